//! Writes a configuration in the fields of transformers 4, which transformers 5 reads as well.

use serde_json::{Map, Value, json};

use super::config::{DecoderConfig, Family, FeedForwardConfig};
use super::rope::RopeScaling;

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
        set("hidden_act", json!("silu"));
        set("rms_norm_eps", json!(self.epsilon));
        set("max_position_embeddings", json!(self.max_positions));
        set("rope_theta", json!(self.rope.theta));
        set("rope_scaling", rope_scaling(&self.rope.scaling));
        set("tie_word_embeddings", json!(self.tied));
        set("bos_token_id", json!(self.bos));
        set("eos_token_id", tokens(&self.eos));
        set("pad_token_id", json!(self.pad));
        set("use_cache", json!(true));
        if matches!(family, Family::Llama | Family::Qwen3 | Family::Qwen3Moe) {
            set("attention_bias", json!(self.biases.qkv));
        }
        if family == Family::Llama {
            set("mlp_bias", json!(self.biases.feed_forward));
        } else {
            let window = self.layers.iter().find_map(|layer| layer.window);
            set("sliding_window", json!(window));
            if !matches!(family, Family::Mistral | Family::Mixtral) {
                set("use_sliding_window", json!(window.is_some()));
            }
        }
        if matches!(family, Family::Qwen2 | Family::Qwen3) {
            let full = self.layers.iter().take_while(|l| l.window.is_none());
            set("max_window_layers", json!(full.count()));
            let kinds = self.layers.iter().map(|layer| match layer.window {
                None => "full_attention",
                Some(_) => "sliding_attention",
            });
            set("layer_types", kinds.collect());
        }
        for (field, value) in feed_forward(self) {
            json.insert(field.to_owned(), value);
        }
        json
    }
}

/// Returns the fields of the feed-forwards.
fn feed_forward(config: &DecoderConfig) -> Vec<(&'static str, Value)> {
    let mut dense_layers = Vec::new();
    let (mut dense, mut moe) = (None, None);
    for (index, layer) in config.layers.iter().enumerate() {
        match layer.feed_forward {
            FeedForwardConfig::Dense { hidden } => {
                dense_layers.push(index);
                dense = Some(hidden);
            }
            FeedForwardConfig::Moe {
                experts,
                top_k,
                hidden,
                normalize,
            } => moe = Some((experts, top_k, hidden, normalize)),
        }
    }
    let Some((experts, top_k, hidden, normalize)) = moe else {
        return vec![("intermediate_size", json!(dense))];
    };
    if config.family == Family::Mixtral {
        return vec![
            ("intermediate_size", json!(hidden)),
            ("num_local_experts", json!(experts)),
            ("num_experts_per_tok", json!(top_k)),
        ];
    }
    vec![
        ("intermediate_size", json!(dense.unwrap_or(hidden * top_k))),
        ("moe_intermediate_size", json!(hidden)),
        ("num_experts", json!(experts)),
        ("num_experts_per_tok", json!(top_k)),
        ("norm_topk_prob", json!(normalize)),
        ("decoder_sparse_step", json!(1)),
        ("mlp_only_layers", json!(dense_layers)),
    ]
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
