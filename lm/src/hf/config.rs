//! Reads `config.json` of transformers 4 and 5 for the decoders of this crate.
//!
//! A field that changes the computation is either supported or refused by name, never ignored.
//! Unrelated fields are ignored.
//!
//! Each family has a file, whose `Spec` reads and writes the fields that differ from other
//! families; `blocks` and `json` have those that all share. To add a family, add its file, its
//! variants of [`Family`], and their lines in `Family::ALL` and `Family::spec`.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value};

use super::fields::{Fields, is_neutral};
use super::folder::check_folder;
use super::fp8::is_fp8;
use crate::checkpoint::read_json;

mod blocks;
mod deepseek;
mod gemma;
mod gpt_oss;
mod json;
mod llama;
mod mixtral;
mod qwen;
mod types;

pub use super::CONFIG_FILE;
use types::Spec;
pub use types::{
    Biases, BlockConfig, DecoderConfig, Family, FeedForwardConfig, GateActivation, LatentConfig,
    LayerConfig, Scoring,
};

impl Family {
    const ALL: [Self; 10] = [
        Self::Llama,
        Self::Mistral,
        Self::Qwen2,
        Self::Qwen3,
        Self::Qwen3Moe,
        Self::Mixtral,
        Self::Gemma2,
        Self::Gemma3,
        Self::DeepseekV3,
        Self::GptOss,
    ];

    fn spec(self) -> &'static Spec {
        match self {
            Self::Llama => &llama::LLAMA,
            Self::Mistral => &llama::MISTRAL,
            Self::Qwen2 => &qwen::QWEN2,
            Self::Qwen3 => &qwen::QWEN3,
            Self::Qwen3Moe => &qwen::QWEN3_MOE,
            Self::Mixtral => &mixtral::MIXTRAL,
            Self::Gemma2 => &gemma::GEMMA2,
            Self::Gemma3 => &gemma::GEMMA3,
            Self::DeepseekV3 => &deepseek::DEEPSEEK_V3,
            Self::GptOss => &gpt_oss::GPT_OSS,
        }
    }

    /// Returns the architecture of a `model_type`, if it is known.
    pub fn of(model_type: &str) -> Option<Self> {
        let mut all = Self::ALL.into_iter();
        all.find(|family| family.model_type() == model_type)
    }

    /// Returns the `model_type` in `config.json`.
    pub fn model_type(self) -> &'static str {
        self.spec().model_type
    }

    /// Returns the class in `architectures`.
    pub fn architecture(self) -> &'static str {
        self.spec().architecture
    }
}

impl DecoderConfig {
    /// Reads `config.json` of `folder`.
    ///
    /// # Errors
    /// Returns an error if it is absent or [`from_json`](Self::from_json) refuses it.
    pub fn read(folder: &Path) -> Result<Self> {
        check_folder(folder)?;
        let path = folder.join(CONFIG_FILE);
        Self::from_json(&read_json(&path)?).with_context(|| path.display().to_string())
    }

    /// Reads the fields of `config.json`.
    ///
    /// # Errors
    /// Returns an error if the architecture is not a [`Family`], if a field is absent, has another
    /// type or an impossible value, or if an unknown field may change the computation.
    pub fn from_json(json: &Map<String, Value>) -> Result<Self> {
        let fields = &Fields::new(json);
        let family = family(fields)?;
        let config = (family.spec().read)(fields, family)?;
        for rope in &config.ropes {
            rope.frequencies(config.rotary_head(), config.max_positions)?;
        }
        fields.refuse_unknown()?;
        Ok(config)
    }
}

/// Returns an error for the `config.json` of a model with quantized weights. Experts in MXFP4, of
/// gpt-oss, are read like others.
pub(crate) fn refuse_quantized(json: &Map<String, Value>) -> Result<()> {
    let Some(config) = json.get("quantization_config").filter(|it| !it.is_null()) else {
        return Ok(());
    };
    ensure!(
        is_mxfp4(json.get("model_type"), config)?,
        "it has a `quantization_config`: the model is quantized already"
    );
    Ok(())
}

/// Returns an error for the `config.json` of a model whose weights are quantized to less than FP8.
pub(crate) fn refuse_packed(json: &Map<String, Value>) -> Result<()> {
    match is_fp8(json) {
        true => Ok(()),
        false => refuse_quantized(json),
    }
}

/// Returns true if `config` is the `quantization_config` of a gpt-oss whose experts are in MXFP4.
///
/// # Errors
/// Returns an error if it has a field that may change the arithmetic.
pub(crate) fn is_mxfp4(model_type: Option<&Value>, config: &Value) -> Result<bool> {
    let of = |name: &str| config.get(name).and_then(Value::as_str);
    let gpt_oss = Family::GptOss.model_type();
    if of("quant_method") != Some("mxfp4") || model_type.and_then(Value::as_str) != Some(gpt_oss) {
        return Ok(false);
    }
    for (name, value) in config.as_object().into_iter().flatten() {
        // The tensors themselves say which modules are in MXFP4; `dequantize` is that of loading.
        let known = ["quant_method", "modules_to_not_convert", "dequantize"];
        ensure!(
            known.contains(&name.as_str()) || is_neutral(name, value),
            "`quantization_config.{name}` is {value}, which is not supported with MXFP4"
        );
    }
    Ok(true)
}

fn family(fields: &Fields) -> Result<Family> {
    let model_type = fields.string("model_type")?;
    let known: Vec<&str> = Family::ALL.iter().map(|f| f.model_type()).collect();
    ensure!(
        model_type != "gemma3",
        "`model_type` is `gemma3`, a model of texts and images: only text models are supported, \
         whose type is `gemma3_text`"
    );
    let Some(family) = Family::of(model_type) else {
        bail!("`model_type` is `{model_type}`, but must be one of {known:?}");
    };
    if let Some(architectures) = fields
        .take("architectures")
        .filter(|value| !value.is_null())
    {
        let is_ours = |value: &Value| value.as_str() == Some(family.architecture());
        ensure!(
            architectures
                .as_array()
                .is_some_and(|a| a.iter().all(is_ours)),
            "`architectures` is {architectures}, but a model of type `{model_type}` must be \
             {}",
            family.architecture()
        );
    }
    Ok(family)
}

#[cfg(test)]
mod tests;
