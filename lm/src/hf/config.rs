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

use super::fields::Fields;
use super::tensors::check_folder;
use crate::checkpoint::read_json;

mod blocks;
mod gemma;
mod json;
mod llama;
mod mixtral;
mod qwen;
mod types;

pub use super::CONFIG_FILE;
use types::Spec;
pub use types::{
    Biases, BlockConfig, DecoderConfig, Family, FeedForwardConfig, GateActivation, LayerConfig,
};

impl Family {
    const ALL: [Self; 8] = [
        Self::Llama,
        Self::Mistral,
        Self::Qwen2,
        Self::Qwen3,
        Self::Qwen3Moe,
        Self::Mixtral,
        Self::Gemma2,
        Self::Gemma3,
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
            rope.frequencies(config.head, config.max_positions)?;
        }
        fields.refuse_unknown()?;
        Ok(config)
    }
}

/// Returns an error for the `config.json` of a model with quantized weights.
pub(crate) fn refuse_quantized(json: &Map<String, Value>) -> Result<()> {
    ensure!(
        json.get("quantization_config").is_none_or(Value::is_null),
        "it has a `quantization_config`: the model is quantized already"
    );
    Ok(())
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
