//! Llama 2 and 3, and Mistral.

use anyhow::{Result, ensure};
use serde_json::{Map, Value, json};

use super::super::fields::Fields;
use super::blocks::{self, Defaults, Sliding};
use super::types::{Biases, DecoderConfig, Family, Spec};

pub(super) const LLAMA: Spec = Spec {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    read: llama,
    write: |config, json| {
        json.insert("attention_bias".into(), json!(config.block.biases.qkv));
        json.insert("mlp_bias".into(), json!(config.block.biases.feed_forward));
    },
};

pub(super) const MISTRAL: Spec = Spec {
    model_type: "mistral",
    architecture: "MistralForCausalLM",
    read: mistral,
    write: write_window,
};

fn llama(fields: &Fields, family: Family) -> Result<DecoderConfig> {
    let defaults = Defaults {
        optional_kv_heads: true,
        ..Defaults::default()
    };
    let mut config = blocks::decoder(fields, family, defaults)?;
    let attention = fields.bool_or("attention_bias", false)?;
    config.block.biases = Biases {
        qkv: attention,
        out: attention,
        feed_forward: fields.bool_or("mlp_bias", false)?,
        experts: false,
    };
    let sliding = Sliding::read(fields, None)?;
    ensure!(
        sliding.window.is_none() || sliding.is_used == Some(false),
        "`sliding_window` is {}, but a model of type `llama` has none",
        sliding.window.unwrap_or_default()
    );
    blocks::set_window(fields, &mut config, None)?;
    Ok(config)
}

fn mistral(fields: &Fields, family: Family) -> Result<DecoderConfig> {
    let mut config = blocks::decoder(fields, family, Defaults::default())?;
    blocks::refuse_biases(fields, family, &["attention_bias", "mlp_bias"])?;
    // The class has a window unless the file disables it.
    let sliding = Sliding::read(fields, Some(4096))?;
    blocks::set_window(fields, &mut config, sliding.window)?;
    Ok(config)
}

/// Writes the window of models whose layers all have the same.
pub(super) fn write_window(config: &DecoderConfig, json: &mut Map<String, Value>) {
    let window = config.layers.iter().find_map(|layer| layer.window);
    json.insert("sliding_window".into(), json!(window));
}
