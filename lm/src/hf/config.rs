//! Reads `config.json` of transformers 4 and 5 for the decoders of this crate.
//!
//! A field that changes the computation is either supported or refused by name, never ignored.
//! Unrelated fields are ignored.

use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use burn_nvfp4::attention::MAX_HEAD;
use burn_nvfp4::experts::MAX_EXPERTS;
use serde_json::{Map, Value};

use super::fields::Fields;
use super::rope::Rope;
use super::tensors::check_folder;
use crate::checkpoint::read_json;

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
}

impl Family {
    const ALL: [Self; 6] = [
        Self::Llama,
        Self::Mistral,
        Self::Qwen2,
        Self::Qwen3,
        Self::Qwen3Moe,
        Self::Mixtral,
    ];

    /// Returns the architecture of a `model_type`, if it is known.
    pub fn of(model_type: &str) -> Option<Self> {
        let mut all = Self::ALL.into_iter();
        all.find(|family| family.model_type() == model_type)
    }

    /// Returns the `model_type` in `config.json`.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Qwen3Moe => "qwen3_moe",
            Self::Mixtral => "mixtral",
        }
    }

    /// Returns the class in `architectures`.
    pub fn architecture(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
            Self::Qwen3Moe => "Qwen3MoeForCausalLM",
            Self::Mixtral => "MixtralForCausalLM",
        }
    }

    /// Returns true if queries and keys have a norm per head.
    pub fn has_qk_norm(self) -> bool {
        matches!(self, Self::Qwen3 | Self::Qwen3Moe)
    }
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

/// Feed-forward of a layer.
#[derive(Clone, Debug, PartialEq)]
pub enum FeedForwardConfig {
    /// SwiGLU.
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
    /// Rotary embedding.
    pub rope: Rope,
    /// Maximum context of the model, in tokens.
    pub max_positions: usize,
    /// True if the head is tied to the embedding.
    pub tied: bool,
    /// Projections that have a bias.
    pub biases: Biases,
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
        let heads = fields.positive("num_attention_heads")?;
        let kv_heads = match family {
            // Models older than grouped-query attention lack this field.
            Family::Llama => fields.positive_or("num_key_value_heads", heads)?,
            _ if json.get("num_key_value_heads").is_some_and(Value::is_null) => heads,
            _ => fields.positive("num_key_value_heads")?,
        };
        ensure!(
            heads.is_multiple_of(kv_heads),
            "`num_key_value_heads` is {kv_heads}, but must be a divisor of `num_attention_heads` \
             ({heads})"
        );
        let d_model = fields.positive("hidden_size")?;
        let head = head_size(fields, family, d_model, heads)?;
        let max_positions = fields.positive("max_position_embeddings")?;
        refuse_other_arithmetic(fields, family)?;
        let config = Self {
            family,
            vocab: fields.positive("vocab_size")?,
            d_model,
            heads,
            kv_heads,
            head,
            layers: layers(fields, family)?,
            epsilon: epsilon(fields, family)?,
            rope: Rope::from_fields(fields, default_theta(family), max_positions)?,
            max_positions,
            tied: fields.bool_or("tie_word_embeddings", false)?,
            biases: biases(fields, family)?,
            bos: fields.token("bos_token_id")?,
            eos: fields.tokens("eos_token_id")?,
            pad: fields.token("pad_token_id")?,
        };
        config.rope.frequencies(head, max_positions)?;
        fields.refuse_unknown()?;
        Ok(config)
    }
}

impl DecoderConfig {
    /// Returns the maximum number of tokens of a text: the model's maximum context, or unlimited if
    /// the rotary embedding adapts to the length of the text.
    pub fn longest(&self) -> usize {
        match self.rope.dynamic_beyond() {
            Some(_) => usize::MAX,
            None => self.max_positions,
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

fn head_size(fields: &Fields, family: Family, d_model: usize, heads: usize) -> Result<usize> {
    let written = fields.optional_positive("head_dim")?;
    let head = match (written, family) {
        (Some(head), _) => head,
        // Default of the class.
        (None, Family::Qwen3 | Family::Qwen3Moe) => 128,
        (None, _) => {
            ensure!(
                d_model.is_multiple_of(heads),
                "`hidden_size` ({d_model}) must be a multiple of `num_attention_heads` ({heads}) \
                 where there is no `head_dim`"
            );
            d_model / heads
        }
    };
    ensure!(
        head <= MAX_HEAD,
        "the size of a head is {head}, but attention takes at most {MAX_HEAD}"
    );
    ensure!(
        head.is_multiple_of(2),
        "the size of a head is {head}, but must be even for rotary positions"
    );
    Ok(head)
}

fn default_theta(family: Family) -> f64 {
    match family {
        Family::Mixtral => 1e6,
        _ => 1e4,
    }
}

fn epsilon(fields: &Fields, family: Family) -> Result<f64> {
    let default = if family == Family::Mixtral {
        1e-5
    } else {
        1e-6
    };
    let epsilon = fields.number_or("rms_norm_eps", default)?;
    ensure!(
        epsilon.is_finite() && epsilon >= 0.0,
        "`rms_norm_eps` is {epsilon}, but must be zero or positive"
    );
    Ok(epsilon)
}

/// Checks fields for which this crate supports only one value.
fn refuse_other_arithmetic(fields: &Fields, family: Family) -> Result<()> {
    if let Some(act) = fields.optional_string("hidden_act")? {
        ensure!(
            act == "silu" || act == "swish",
            "`hidden_act` is `{act}`, but must be `silu`"
        );
    }
    let partial = fields.number_or("partial_rotary_factor", 1.0)?;
    ensure!(
        partial == 1.0,
        "`partial_rotary_factor` is {partial}, but must be 1: whole heads are rotated"
    );
    Ok(())
}

fn biases(fields: &Fields, family: Family) -> Result<Biases> {
    let attention = fields.optional_bool("attention_bias")?;
    let feed_forward = fields.bool_or("mlp_bias", false)?;
    let model_type = family.model_type();
    ensure!(
        family == Family::Llama || !feed_forward,
        "`mlp_bias` is true, but a model of type `{model_type}` has no such bias"
    );
    let [qkv, out] = match family {
        Family::Llama | Family::Qwen3 | Family::Qwen3Moe => [attention == Some(true); 2],
        Family::Qwen2 => {
            // transformers does not read the field.
            ensure!(
                attention != Some(false),
                "`attention_bias` is false, but a model of type `qwen2` always has biases of \
                 queries, keys and values"
            );
            [true, false]
        }
        Family::Mistral | Family::Mixtral => {
            ensure!(
                attention != Some(true),
                "`attention_bias` is true, but a model of type `{model_type}` has no such bias"
            );
            [false; 2]
        }
    };
    Ok(Biases {
        qkv,
        out,
        feed_forward,
    })
}

fn layers(fields: &Fields, family: Family) -> Result<Vec<LayerConfig>> {
    let count = fields.positive("num_hidden_layers")?;
    ensure!(
        count <= 10_000,
        "`num_hidden_layers` is {count}, but can be 10000 at most"
    );
    let windows = windows(fields, family, count)?;
    let feed_forwards = feed_forwards(fields, family, count)?;
    let layers = windows.into_iter().zip(feed_forwards);
    Ok(layers
        .map(|(window, feed_forward)| LayerConfig {
            window,
            feed_forward,
        })
        .collect())
}

/// Returns the window of each layer.
fn windows(fields: &Fields, family: Family, count: usize) -> Result<Vec<Option<usize>>> {
    // Mistral's class has a default window unless the file disables it.
    let window = match (fields.has("sliding_window"), family) {
        (false, Family::Mistral) => Some(4096),
        _ => fields.optional_positive("sliding_window")?,
    };
    let is_used = fields.optional_bool("use_sliding_window")?;
    let full_layers = fields.optional_count("max_window_layers")?;
    let window = match family {
        Family::Llama => {
            ensure!(
                window.is_none() || is_used == Some(false),
                "`sliding_window` is {window:?}, but a model of type `llama` has none"
            );
            None
        }
        Family::Mistral | Family::Mixtral => window,
        Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe => {
            window.filter(|_| is_used == Some(true))
        }
    };
    // Only Qwen's dense classes have layers without a window before layers with one.
    let first = match family {
        Family::Qwen2 | Family::Qwen3 => full_layers.unwrap_or(28),
        _ => 0,
    };
    let mut windows: Vec<Option<usize>> =
        (0..count).map(|i| window.filter(|_| i >= first)).collect();
    if let Some(types) = fields.take("layer_types").filter(|types| !types.is_null()) {
        let types = types.as_array().map_or(&[][..], |types| types);
        ensure!(
            types.len() == count,
            "`layer_types` has {} entries, but must have {count}, one for each layer",
            types.len()
        );
        for (layer, (slot, kind)) in windows.iter_mut().zip(types).enumerate() {
            *slot = match kind.as_str() {
                Some("full_attention") => None,
                Some("sliding_attention") if window.is_some() => window,
                Some("sliding_attention") => bail!(
                    "`layer_types[{layer}]` is sliding_attention, but there is no \
                     `sliding_window`"
                ),
                _ => bail!(
                    "`layer_types[{layer}]` is {kind}, but must be full_attention or \
                     sliding_attention"
                ),
            };
        }
    }
    Ok(windows)
}

/// Returns the feed-forward of each layer.
fn feed_forwards(fields: &Fields, family: Family, count: usize) -> Result<Vec<FeedForwardConfig>> {
    let hidden = fields.positive("intermediate_size")?;
    let dense = FeedForwardConfig::Dense { hidden };
    if !matches!(family, Family::Qwen3Moe | Family::Mixtral) {
        return Ok(vec![dense; count]);
    }
    // transformers 5 uses one name for both architectures.
    let experts = match fields.optional_positive("num_local_experts")? {
        Some(experts) => {
            let other = fields.positive_or("num_experts", experts)?;
            ensure!(
                other == experts,
                "`num_local_experts` is {experts}, but `num_experts` is {other}: they are the same"
            );
            experts
        }
        None if family == Family::Qwen3Moe => fields.positive("num_experts")?,
        None => fields.positive("num_local_experts")?,
    };
    let top_k = fields.positive("num_experts_per_tok")?;
    ensure!(
        experts <= MAX_EXPERTS,
        "the number of experts is {experts}, but a layer has at most {MAX_EXPERTS}"
    );
    ensure!(
        top_k <= experts,
        "`num_experts_per_tok` is {top_k}, but there are {experts} experts"
    );
    if family == Family::Mixtral {
        let moe = FeedForwardConfig::Moe {
            experts,
            top_k,
            hidden,
            normalize: true,
        };
        return Ok(vec![moe; count]);
    }
    let moe = FeedForwardConfig::Moe {
        experts,
        top_k,
        hidden: fields.positive("moe_intermediate_size")?,
        normalize: fields.bool_or("norm_topk_prob", false)?,
    };
    let step = fields.positive_or("decoder_sparse_step", 1)?;
    let dense_layers = fields.indices("mlp_only_layers", count)?;
    let kind =
        |layer: usize| match dense_layers.contains(&layer) || !(layer + 1).is_multiple_of(step) {
            true => dense.clone(),
            false => moe.clone(),
        };
    Ok((0..count).map(kind).collect())
}

#[cfg(test)]
mod tests;
