//! Writes a configuration in the fields of transformers 4, which transformers 5 reads as well.

use serde_json::{Map, Value, json};

use super::super::rope::RopeScaling;
use super::types::{DecoderConfig, FeedForwardConfig, GateActivation};

impl DecoderConfig {
    /// Returns the fields of `config.json` in the form of transformers 4, which transformers 5
    /// reads as well. `dtype` is the type of the tensors, such as `bfloat16`.
    ///
    /// Does not check for structures that no architecture has, such as layers with different
    /// windows in a Mixtral, because they cannot result from reading.
    pub fn to_json(&self, dtype: &str) -> Map<String, Value> {
        let family = self.family;
        let mut json = Map::new();
        let mut set = |field: &str, value: Value| {
            json.insert(field.to_owned(), value);
        };
        set("architectures", json!([family.architecture()]));
        set("model_type", json!(family.model_type()));
        set("torch_dtype", json!(dtype));
        set("vocab_size", json!(self.vocab));
        set("hidden_size", json!(self.d_model));
        set("num_hidden_layers", json!(self.layers.len()));
        set("num_attention_heads", json!(self.heads));
        set("num_key_value_heads", json!(self.kv_heads));
        set("head_dim", json!(self.head));
        match self.block.activation {
            GateActivation::Silu | GateActivation::ClampedSwiGlu { .. } => {
                set("hidden_act", json!("silu"));
            }
            GateActivation::GeluTanh => set("hidden_activation", json!("gelu_pytorch_tanh")),
        }
        set("rms_norm_eps", json!(self.epsilon));
        set("max_position_embeddings", json!(self.max_positions));
        set("rope_theta", json!(self.ropes[0].theta));
        set("rope_scaling", rope_scaling(&self.ropes[0].scaling));
        set("tie_word_embeddings", json!(self.tied));
        set("bos_token_id", json!(self.bos));
        set("eos_token_id", tokens(&self.eos));
        set("pad_token_id", json!(self.pad));
        set("use_cache", json!(true));
        let dense = self
            .layers
            .iter()
            .find_map(|layer| match layer.feed_forward {
                FeedForwardConfig::Dense { hidden } => Some(hidden),
                FeedForwardConfig::Moe { .. } => None,
            });
        set("intermediate_size", json!(dense));
        (family.spec().write)(self, &mut json);
        json
    }
}

/// Returns `layer_types`.
pub(super) fn layer_types(config: &DecoderConfig) -> Value {
    let kinds = config.layers.iter().map(|layer| match layer.window {
        None => "full_attention",
        Some(_) => "sliding_attention",
    });
    kinds.collect()
}

fn rope_scaling(scaling: &RopeScaling) -> Value {
    match *scaling {
        RopeScaling::Default => Value::Null,
        RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
        RopeScaling::Llama3 {
            factor,
            low,
            high,
            original,
        } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original as u64,
        }),
        RopeScaling::Yarn {
            factor,
            original,
            beta_fast,
            beta_slow,
            attention_factor,
            truncate,
        } => json!({
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original as u64,
            "beta_fast": beta_fast,
            "beta_slow": beta_slow,
            "attention_factor": attention_factor,
            "truncate": truncate,
        }),
        RopeScaling::Dynamic { factor, .. } => json!({"rope_type": "dynamic", "factor": factor}),
    }
}

/// Writes a single token as a number, as most files do.
fn tokens(tokens: &[u32]) -> Value {
    match tokens {
        [] => Value::Null,
        [token] => json!(token),
        tokens => json!(tokens),
    }
}
