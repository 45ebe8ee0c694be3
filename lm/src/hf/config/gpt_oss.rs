//! gpt-oss: attention sinks, biases, windows in every second layer, and experts with a clamped
//! SwiGLU.

use anyhow::{Result, bail, ensure};
use serde_json::{Map, Value, json};

use super::super::fields::Fields;
use super::super::rope::{Rope, RopeScaling, is_empty};
use super::blocks::{self, Defaults, Sliding};
use super::json::layer_types;
use super::types::{
    Biases, BlockConfig, DecoderConfig, Family, FeedForwardConfig, GateActivation, Scoring, Spec,
};

pub(super) const GPT_OSS: Spec = Spec {
    model_type: "gpt_oss",
    architecture: "GptOssForCausalLM",
    read: gpt_oss,
    write: write_gpt_oss,
};

fn gpt_oss(fields: &Fields, family: Family) -> Result<DecoderConfig> {
    let defaults = Defaults {
        head: Some(64),
        theta: 150_000.0,
        epsilon: 1e-5,
        activation: GateActivation::ClampedSwiGlu {
            alpha: positive(fields, "swiglu_alpha", 1.702)?,
            limit: positive(fields, "swiglu_limit", 7.0)?,
        },
        ropes,
        ..Defaults::default()
    };
    let mut config = blocks::decoder(fields, family, defaults)?;
    blocks::refuse_biases(fields, family, &["mlp_bias"])?;
    let attention = fields.bool_or("attention_bias", true)?;
    config.block = BlockConfig {
        biases: Biases {
            qkv: attention,
            out: attention,
            feed_forward: false,
            experts: true,
        },
        sinks: true,
        ..config.block
    };
    let sliding = Sliding::read(fields, Some(128))?;
    blocks::set_windows(fields, &mut config, sliding.window, |layer| {
        layer.is_multiple_of(2)
    })?;
    let [experts, top_k] = blocks::experts(fields, ["num_local_experts", "num_experts"])?;
    if let Some(other) = fields.optional_positive("experts_per_token")? {
        ensure!(
            other == top_k,
            "`experts_per_token` is {other}, but `num_experts_per_tok` is {top_k}: they are the \
             same"
        );
    }
    for layer in &mut config.layers {
        let FeedForwardConfig::Dense { hidden } = layer.feed_forward else {
            bail!("the layers of gpt-oss are read as those with one feed-forward");
        };
        // The softmax over the chosen logits is that over all, divided by its sum.
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

fn positive(fields: &Fields, name: &'static str, default: f64) -> Result<f32> {
    let value = fields.number_or(name, default)?;
    ensure!(
        value.is_finite() && value > 0.0,
        "`{name}` is {value}, but must be positive"
    );
    Ok(value as f32)
}

/// Reads the rotary embedding; without fields, it is the YaRN of the published models.
fn ropes(fields: &Fields, theta: f64, max: usize) -> Result<Vec<Rope>> {
    let scaling = fields.take("rope_scaling");
    let parameters = fields.take("rope_parameters");
    // transformers takes an empty `rope_scaling` for an absent one, but not `rope_parameters`.
    if scaling.is_some_and(|it| !is_empty(it)) || parameters.is_some_and(|it| !it.is_null()) {
        return Ok(vec![Rope::from_fields(fields, theta, max)?]);
    }
    let factor: f64 = 32.0;
    Ok(vec![Rope {
        theta: fields.number_or("rope_theta", theta)?,
        scaling: RopeScaling::Yarn {
            factor,
            original: 4096.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: 0.1 * factor.ln() + 1.0,
            truncate: false,
        },
    }])
}

fn write_gpt_oss(config: &DecoderConfig, json: &mut Map<String, Value>) {
    let mut set = |field: &str, value: Value| {
        json.insert(field.to_owned(), value);
    };
    let window = config.layers.iter().find_map(|layer| layer.window);
    set("attention_bias", json!(config.block.biases.qkv));
    set("sliding_window", json!(window));
    set("layer_types", layer_types(config));
    if let GateActivation::ClampedSwiGlu { alpha, limit } = config.block.activation {
        set("swiglu_alpha", json!(decimal(alpha)));
        set("swiglu_limit", json!(decimal(limit)));
    }
    if let FeedForwardConfig::Moe {
        experts,
        top_k,
        hidden,
        ..
    } = config.layers[0].feed_forward
    {
        set("intermediate_size", json!(hidden));
        set("num_local_experts", json!(experts));
        set("num_experts_per_tok", json!(top_k));
    }
}

/// Returns the number that JSON shows with the digits of the `f32`.
fn decimal(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}
