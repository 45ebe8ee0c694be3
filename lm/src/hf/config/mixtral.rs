//! Mixtral: Mistral with experts.

use anyhow::Result;
use serde_json::json;

use super::super::fields::Fields;
use super::blocks::{self, Defaults, Sliding};
use super::llama::write_window;
use super::types::{DecoderConfig, Family, FeedForwardConfig, Scoring, Spec};

pub(super) const MIXTRAL: Spec = Spec {
    model_type: "mixtral",
    architecture: "MixtralForCausalLM",
    read: mixtral,
    write: |config, json| {
        write_window(config, json);
        if let FeedForwardConfig::Moe {
            experts,
            top_k,
            hidden,
            ..
        } = config.layers[0].feed_forward
        {
            json.insert("intermediate_size".into(), json!(hidden));
            json.insert("num_local_experts".into(), json!(experts));
            json.insert("num_experts_per_tok".into(), json!(top_k));
        }
    },
};

fn mixtral(fields: &Fields, family: Family) -> Result<DecoderConfig> {
    let defaults = Defaults {
        theta: 1e6,
        epsilon: 1e-5,
        ..Defaults::default()
    };
    let mut config = blocks::decoder(fields, family, defaults)?;
    blocks::refuse_biases(fields, family, &["attention_bias", "mlp_bias"])?;
    let sliding = Sliding::read(fields, None)?;
    blocks::set_window(fields, &mut config, sliding.window)?;
    let [experts, top_k] = blocks::experts(fields, ["num_local_experts", "num_experts"])?;
    let hidden = fields.positive("intermediate_size")?;
    for layer in &mut config.layers {
        layer.feed_forward = FeedForwardConfig::Moe {
            experts,
            top_k,
            hidden,
            normalize: true,
            scoring: Scoring::Softmax,
            shared: None,
        };
    }
    Ok(config)
}
