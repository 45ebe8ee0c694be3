//! Reads `config.json` of transformers 4 and 5 for the decoders of this crate.
//!
//! A field that changes the computation is either supported or refused by name, never ignored.
//! Unrelated fields are ignored.
//!
//! Each family has a file, whose [`Spec`] reads and writes the fields that differ from other
//! families; `blocks` and `json` have those that all share. To add a family, add its file, its
//! variants of [`Family`], and their lines in [`Family::ALL`] and [`Family::spec`].

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Map, Value};

use super::fields::Fields;
use super::rope::Rope;
use super::tensors::check_folder;
use crate::checkpoint::read_json;

mod blocks;
mod gemma;
mod json;
mod llama;
mod mixtral;
mod qwen;

/// Name of the file.
pub const CONFIG_FILE: &str = "config.json";

/// Model architecture, by its `model_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Llama 2 and 3, and models with the same structure, such as SmolLM.
    Llama,
    /// Llama with a sliding window.
    Mistral,
    /// Qwen2 and Qwen2.5: Llama with biases of queries, keys and values.
    Qwen2,
    /// RMSNorm on each head of queries and keys, before the rotary embedding.
    Qwen3,
    /// Qwen3 with experts.
    Qwen3Moe,
    /// Mistral with experts.
    Mixtral,
    /// Gemma 2: norms before and after each block, soft caps of scores and logits.
    Gemma2,
    /// Text models of Gemma 3: Gemma 2 with norms of queries and keys instead of soft caps.
    Gemma3,
}

/// Facts of a family.
struct Spec {
    /// `model_type` in `config.json`.
    model_type: &'static str,
    /// Class in `architectures`.
    architecture: &'static str,
    /// Reads the configuration.
    read: fn(&Fields, Family) -> Result<DecoderConfig>,
    /// Adds the fields that not all families have.
    write: fn(&DecoderConfig, &mut Map<String, Value>),
}

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

/// Activation of the gate in a feed-forward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GateActivation {
    /// SiLU.
    #[default]
    Silu,
    /// GELU in its `tanh` approximation.
    GeluTanh,
}

/// Projections that have a bias. Experts and routers have none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Biases {
    /// True for queries, keys and values.
    pub qkv: bool,
    /// True for the output projection of attention.
    pub out: bool,
    /// True for gate, up and down of dense feed-forwards.
    pub feed_forward: bool,
}

/// Arithmetic of every layer. The default is that of Llama.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BlockConfig {
    /// Projections that have a bias.
    pub biases: Biases,
    /// True if each head of queries and keys has a norm before the rotary embedding.
    pub qk_norm: bool,
    /// True if attention and feed-forward also have a norm after them, before the residual
    /// addition.
    pub post_norms: bool,
    /// True if norms multiply by 1 + weight instead of the weight; also for the final norm.
    pub norm_plus_one: bool,
    /// Activation of the gate in dense feed-forwards.
    pub activation: GateActivation,
    /// Attention scores are divided by the square root of this number; by default, the head
    /// dimension.
    pub query_scalar: Option<f64>,
    /// Soft cap of attention scores: `cap · tanh(score / cap)`.
    pub score_cap: Option<f32>,
}

/// Feed-forward of a layer.
#[derive(Clone, Debug, PartialEq)]
pub enum FeedForwardConfig {
    /// A gated feed-forward.
    Dense {
        /// Hidden width.
        hidden: usize,
    },
    /// A mixture of SwiGLU experts.
    Moe {
        /// Number of experts.
        experts: usize,
        /// Number of experts per token.
        top_k: usize,
        /// Hidden width of an expert.
        hidden: usize,
        /// True if the weights of a token's experts are divided by their sum.
        normalize: bool,
    },
}

/// One layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerConfig {
    /// Maximum number of keys per query, including its own position; `None` for all.
    pub window: Option<usize>,
    /// Index of its rotary embedding in [`DecoderConfig::ropes`].
    pub rope: usize,
    /// Feed-forward after the attention.
    pub feed_forward: FeedForwardConfig,
}

/// Configuration of a decoder, in one form for all versions and architectures of `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Architecture.
    pub family: Family,
    /// Vocabulary size: rows of the embedding.
    pub vocab: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads; a divisor of `heads`.
    pub kv_heads: usize,
    /// Head dimension; even. `heads * head` may differ from `d_model`.
    pub head: usize,
    /// Layers, in order.
    pub layers: Vec<LayerConfig>,
    /// Epsilon of every RMSNorm.
    pub epsilon: f64,
    /// Rotary embeddings; each layer uses one of them.
    pub ropes: Vec<Rope>,
    /// Arithmetic of every layer.
    pub block: BlockConfig,
    /// True if embeddings are multiplied by the square root of `d_model`.
    pub scaled_embedding: bool,
    /// Soft cap of the logits: `cap · tanh(logit / cap)`.
    pub logit_cap: Option<f32>,
    /// Maximum context of the model, in tokens.
    pub max_positions: usize,
    /// True if the head is tied to the embedding.
    pub tied: bool,
    /// Start-of-text token.
    pub bos: Option<u32>,
    /// End-of-text tokens.
    pub eos: Vec<u32>,
    /// Padding token.
    pub pad: Option<u32>,
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

impl DecoderConfig {
    /// Returns the maximum number of tokens of a text: the model's maximum context, or unlimited if
    /// the rotary embedding adapts to the length of the text.
    pub fn longest(&self) -> usize {
        match self
            .ropes
            .iter()
            .any(|rope| rope.dynamic_beyond().is_some())
        {
            true => usize::MAX,
            false => self.max_positions,
        }
    }

    /// Checks that texts of `length` tokens, described by `what`, fit into the maximum context.
    ///
    /// # Errors
    /// Returns an error that names `what`, the length and the maximum.
    pub fn check_length(&self, what: &str, length: usize) -> Result<()> {
        ensure!(
            length <= self.longest(),
            "{what} is {length}, but the model is meant for {} positions at most",
            self.max_positions
        );
        Ok(())
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
