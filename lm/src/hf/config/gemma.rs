//! Gemma 2, and the text models of Gemma 3.

use anyhow::{Result, bail, ensure};
use serde_json::{Map, Value, json};

use super::super::fields::Fields;
use super::super::rope::{Rope, RopeScaling};
use super::blocks::{self, Defaults, Sliding};
use super::json::layer_types;
use super::types::{Biases, BlockConfig, DecoderConfig, Family, GateActivation, Spec};

pub(super) const GEMMA2: Spec = Spec {
    model_type: "gemma2",
    architecture: "Gemma2ForCausalLM",
    read: gemma2,
    write: write_gemma,
};

pub(super) const GEMMA3: Spec = Spec {
    model_type: "gemma3_text",
    architecture: "Gemma3ForCausalLM",
    read: gemma3,
    write: |config, json| {
        write_gemma(config, json);
        let local = &config.ropes[LOCAL];
        json.insert("rope_local_base_freq".into(), json!(local.theta));
    },
};

/// Index of the rotary embedding of Gemma 3's layers with a window.
const LOCAL: usize = 1;

fn gemma2(fields: &Fields, family: Family) -> Result<DecoderConfig> {
    let mut config = gemma(fields, family, Defaults::default(), 2)?;
    config.block.score_cap = blocks::soft_cap(fields, "attn_logit_softcapping", Some(50.0))?;
    config.logit_cap = blocks::soft_cap(fields, "final_logit_softcapping", Some(30.0))?;
    Ok(config)
}

fn gemma3(fields: &Fields, family: Family) -> Result<DecoderConfig> {
    let pattern = fields.positive_or("sliding_window_pattern", 6)?;
    let defaults = Defaults {
        theta: 1e6,
        ropes,
        ..Defaults::default()
    };
    let mut config = gemma(fields, family, defaults, pattern)?;
    for layer in &mut config.layers {
        layer.rope = if layer.window.is_some() { LOCAL } else { 0 };
    }
    config.block.qk_norm = true;
    if let Some(cap) = blocks::soft_cap(fields, "attn_logit_softcapping", None)? {
        bail!(
            "`attn_logit_softcapping` is {cap}, but transformers ignores it in a model of type \
             `gemma3_text`: it must be null"
        );
    }
    config.logit_cap = blocks::soft_cap(fields, "final_logit_softcapping", None)?;
    Ok(config)
}

/// Reads what the two have in common. Without `layer_types`, every `pattern`th layer has no window.
fn gemma(
    fields: &Fields,
    family: Family,
    defaults: Defaults,
    pattern: usize,
) -> Result<DecoderConfig> {
    let defaults = Defaults {
        head: Some(256),
        tied: true,
        activation: GateActivation::GeluTanh,
        ..defaults
    };
    let mut config = blocks::decoder(fields, family, defaults)?;
    blocks::refuse_biases(fields, family, &["mlp_bias"])?;
    let attention = fields.bool_or("attention_bias", false)?;
    let query_scalar = fields.number_or("query_pre_attn_scalar", 256.0)?;
    ensure!(
        query_scalar.is_finite() && query_scalar > 0.0,
        "`query_pre_attn_scalar` is {query_scalar}, but must be positive"
    );
    config.block = BlockConfig {
        biases: Biases {
            qkv: attention,
            out: attention,
            ..Biases::default()
        },
        post_norms: true,
        norm_plus_one: true,
        query_scalar: Some(query_scalar),
        ..config.block
    };
    config.scaled_embedding = true;
    let sliding = Sliding::read(fields, Some(4096))?;
    if let Some(size) = fields.optional_positive("sliding_window_size")? {
        ensure!(
            sliding.window == Some(size),
            "`sliding_window_size` is {size}, but must be `sliding_window`, which is {}",
            sliding
                .window
                .map_or("null".into(), |window| window.to_string())
        );
    }
    let is_sliding = |layer: usize| !(layer + 1).is_multiple_of(pattern);
    blocks::set_windows(fields, &mut config, sliding.window, is_sliding)?;
    Ok(config)
}

/// Reads the rotary embeddings of layers without and with a window. Only the first is scaled.
fn ropes(fields: &Fields, theta: f64, max: usize) -> Result<Vec<Rope>> {
    let by_type = match fields.take("rope_parameters") {
        None | Some(Value::Null) => &Map::new(),
        Some(Value::Object(object)) => object,
        Some(other) => bail!("`rope_parameters` is {other}, but must be an object"),
    };
    let by_type = Fields::new(by_type);
    let new = (
        "rope_parameters.full_attention",
        by_type.take("full_attention"),
    );
    let global = Rope::from_versions(fields, theta, max, new)?;
    let name = "rope_local_base_freq";
    let written = fields.optional_number(name)?.map(|theta| (name, theta));
    let new = "rope_parameters.sliding_attention";
    let local = match by_type.take("sliding_attention") {
        None | Some(Value::Null) => Rope::unscaled(written.map_or(1e4, |(_, theta)| theta))?,
        Some(value) => Rope::from_value(new, value, (written, 1e4), max)?,
    };
    ensure!(
        local.scaling == RopeScaling::Default,
        "`{new}` has a scaling ({}), but only layers of full_attention may have one",
        local.scaling.kind()
    );
    by_type.refuse_all_unknown("rope_parameters")?;
    Ok(vec![global, local])
}

fn write_gemma(config: &DecoderConfig, json: &mut Map<String, Value>) {
    let window = config.layers.iter().find_map(|layer| layer.window);
    let mut set = |field: &str, value: Value| {
        json.insert(field.to_owned(), value);
    };
    set("attention_bias", json!(config.block.biases.qkv));
    // transformers requires a whole number.
    let scalar = config.block.query_scalar.unwrap_or(config.head as f64);
    let whole = (scalar.fract() == 0.0).then_some(scalar as u64);
    let scalar = whole.map_or_else(|| json!(scalar), |scalar| json!(scalar));
    set("query_pre_attn_scalar", scalar);
    set("attn_logit_softcapping", json!(config.block.score_cap));
    set("final_logit_softcapping", json!(config.logit_cap));
    set("sliding_window", json!(window));
    set("layer_types", layer_types(config));
}
