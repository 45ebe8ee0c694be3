//! Qwen2, Qwen2.5, Qwen3, and Qwen3 with experts.

use anyhow::{Result, ensure};
use serde_json::{Map, Value, json};

use super::super::fields::Fields;
use super::blocks::{self, Defaults, Sliding};
use super::json::layer_types;
use super::types::{Biases, DecoderConfig, Family, FeedForwardConfig, Scoring, Spec};

pub(super) const QWEN2: Spec = Spec {
    model_type: "qwen2",
    architecture: "Qwen2ForCausalLM",
    read: qwen2,
    write: write_windows,
};

pub(super) const QWEN3: Spec = Spec {
    model_type: "qwen3",
    architecture: "Qwen3ForCausalLM",
    read: |fields, family| {
        let mut config = qwen3(fields, family)?;
        set_windows_after(28, fields, &mut config)?;
        Ok(config)
    },
    write: |config, json| {
        json.insert("attention_bias".into(), json!(config.block.biases.qkv));
        write_windows(config, json);
    },
};

pub(super) const QWEN3_MOE: Spec = Spec {
    model_type: "qwen3_moe",
    architecture: "Qwen3MoeForCausalLM",
    read: qwen3_moe,
    write: write_moe,
};

fn qwen2(fields: &Fields, family: Family) -> Result<DecoderConfig> {
    let mut config = blocks::decoder(fields, family, Defaults::default())?;
    blocks::refuse_biases(fields, family, &["mlp_bias"])?;
    // transformers does not read the field.
    ensure!(
        fields.bool_or("attention_bias", true)?,
        "`attention_bias` is false, but a model of type `qwen2` always has biases of queries, keys \
         and values"
    );
    config.block.biases = Biases {
        qkv: true,
        ..Biases::default()
    };
    set_windows_after(28, fields, &mut config)?;
    Ok(config)
}

fn qwen3(fields: &Fields, family: Family) -> Result<DecoderConfig> {
    let defaults = Defaults {
        head: Some(128),
        ..Defaults::default()
    };
    let mut config = blocks::decoder(fields, family, defaults)?;
    blocks::refuse_biases(fields, family, &["mlp_bias"])?;
    let attention = fields.bool_or("attention_bias", false)?;
    config.block.biases = Biases {
        qkv: attention,
        out: attention,
        ..Biases::default()
    };
    config.block.qk_norm = true;
    Ok(config)
}

fn qwen3_moe(fields: &Fields, family: Family) -> Result<DecoderConfig> {
    let mut config = qwen3(fields, family)?;
    set_windows_after(0, fields, &mut config)?;
    let count = config.layers.len();
    let [experts, top_k] = blocks::experts(fields, "num_experts")?;
    let moe = FeedForwardConfig::Moe {
        experts,
        top_k,
        hidden: fields.positive("moe_intermediate_size")?,
        normalize: fields.bool_or("norm_topk_prob", false)?,
        scoring: Scoring::Softmax,
        shared: None,
    };
    let step = fields.positive_or("decoder_sparse_step", 1)?;
    let dense_layers = fields.indices("mlp_only_layers", count)?;
    for (index, layer) in config.layers.iter_mut().enumerate() {
        if !dense_layers.contains(&index) && (index + 1).is_multiple_of(step) {
            layer.feed_forward = moe.clone();
        }
    }
    Ok(config)
}

/// Gives layers a window if `use_sliding_window` is true. The dense classes skip the first
/// `max_window_layers` layers, by default `first`; the class with experts skips none, whose `first`
/// is 0.
fn set_windows_after(first: usize, fields: &Fields, config: &mut DecoderConfig) -> Result<()> {
    let sliding = Sliding::read(fields, None)?;
    let window = sliding.window.filter(|_| sliding.is_used == Some(true));
    let first = match first {
        0 => 0,
        _ => sliding.full_layers.unwrap_or(first),
    };
    blocks::set_windows(fields, &mut config.layers, window, |layer| layer >= first)
}

fn write_windows(config: &DecoderConfig, json: &mut Map<String, Value>) {
    let window = config.layers.iter().find_map(|layer| layer.window);
    let full = config.layers.iter().take_while(|l| l.window.is_none());
    json.insert("sliding_window".into(), json!(window));
    json.insert("use_sliding_window".into(), json!(window.is_some()));
    json.insert("max_window_layers".into(), json!(full.count()));
    json.insert("layer_types".into(), layer_types(config));
}

fn write_moe(config: &DecoderConfig, json: &mut Map<String, Value>) {
    let window = config.layers.iter().find_map(|layer| layer.window);
    let (mut dense_layers, mut moe) = (Vec::new(), None);
    for (index, layer) in config.layers.iter().enumerate() {
        match layer.feed_forward {
            FeedForwardConfig::Dense { .. } => dense_layers.push(index),
            FeedForwardConfig::Moe {
                experts,
                top_k,
                hidden,
                normalize,
                ..
            } => moe = Some((experts, top_k, hidden, normalize)),
        }
    }
    let mut set = |field: &str, value: Value| {
        json.insert(field.to_owned(), value);
    };
    set("attention_bias", json!(config.block.biases.qkv));
    set("sliding_window", json!(window));
    set("use_sliding_window", json!(window.is_some()));
    if let Some((experts, top_k, hidden, normalize)) = moe {
        if dense_layers.is_empty() {
            set("intermediate_size", json!(hidden * top_k));
        }
        set("moe_intermediate_size", json!(hidden));
        set("num_experts", json!(experts));
        set("num_experts_per_tok", json!(top_k));
        set("norm_topk_prob", json!(normalize));
        set("decoder_sparse_step", json!(1));
        set("mlp_only_layers", json!(dense_layers));
    }
}
