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
        let mut config = qwen3(fields, family, Some(128))?;
        set_windows(fields, &mut config)?;
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
    set_windows(fields, &mut config)?;
    Ok(config)
}

/// Reads what the two have in common; `head` is the default of [`Defaults`].
fn qwen3(fields: &Fields, family: Family, head: Option<usize>) -> Result<DecoderConfig> {
    let defaults = Defaults {
        head,
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
    let mut config = qwen3(fields, family, None)?;
    let window = used_window(&sliding(fields)?);
    blocks::set_window(fields, &mut config, window)?;
    let count = config.layers.len();
    let [experts, top_k] = blocks::experts(fields, ["num_experts", "num_local_experts"])?;
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

/// Reads the fields of the window, which is 4096 if it is used without a number.
fn sliding(fields: &Fields) -> Result<Sliding> {
    Sliding::read(fields, Some(4096))
}

/// Returns the window if `use_sliding_window` is true.
fn used_window(sliding: &Sliding) -> Option<usize> {
    sliding.window.filter(|_| sliding.is_used == Some(true))
}

/// Gives layers a window if it is used, by default those after the first `max_window_layers`.
fn set_windows(fields: &Fields, config: &mut DecoderConfig) -> Result<()> {
    let sliding = sliding(fields)?;
    let window = used_window(&sliding);
    let first = sliding.full_layers.unwrap_or(28);
    blocks::set_windows(fields, config, window, |layer| {
        window.is_some() && layer >= first
    })
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
