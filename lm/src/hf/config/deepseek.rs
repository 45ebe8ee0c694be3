//! DeepSeek-V3 and R1: latent attention, sigmoid routers with groups, shared experts.

use anyhow::{Context, Result, ensure};
use burn_nvfp4::attention::MAX_HEAD;
use serde_json::{Map, Value, json};

use super::super::fields::Fields;
use super::super::rope::RopeScaling;
use super::blocks::{self, Defaults};
use super::types::{DecoderConfig, Family, FeedForwardConfig, LatentConfig, Scoring, Spec};

pub(super) const DEEPSEEK_V3: Spec = Spec {
    model_type: "deepseek_v3",
    architecture: "DeepseekV3ForCausalLM",
    read: deepseek_v3,
    write: write_deepseek,
};

fn deepseek_v3(fields: &Fields, family: Family) -> Result<DecoderConfig> {
    let rope = fields.positive("qk_rope_head_dim")?;
    let defaults = Defaults {
        head: Some(rope),
        ..Defaults::default()
    };
    let mut config = blocks::decoder(fields, family, defaults)?;
    ensure!(
        config.head == rope,
        "`head_dim` is {}, but must be `qk_rope_head_dim` ({rope}) in a model of type \
         `deepseek_v3`",
        config.head
    );
    ensure!(
        config.kv_heads == config.heads,
        "`num_key_value_heads` is {}, but must be `num_attention_heads` ({}): each head has keys \
         and values of its own",
        config.kv_heads,
        config.heads
    );
    for name in ["attention_bias", "mlp_bias"] {
        ensure!(
            !fields.bool_or(name, false)?,
            "`{name}` is true, but models of type `deepseek_v3` are supported without biases only"
        );
    }
    let mut latent = latent(fields, rope)?;
    let [width, query] = [latent.width(), latent.query()];
    ensure!(
        width <= MAX_HEAD,
        "`qk_nope_head_dim` ({}) and `qk_rope_head_dim` ({rope}), or `v_head_dim` ({}), make heads \
         of {width}, but attention takes at most {MAX_HEAD}",
        latent.nope,
        latent.value
    );
    if let Some(found) = fields.optional_positive("qk_head_dim")? {
        ensure!(
            found == query,
            "`qk_head_dim` is {found}, but must be {query}, the sum of `qk_nope_head_dim` and \
             `qk_rope_head_dim`"
        );
    }
    config.head = width;
    let mscale = match config.ropes[0].scaling {
        RopeScaling::Yarn { factor, .. } => yarn_mscale(factor, latent.mscale_all_dim),
        // transformers ignores it without scaling.
        RopeScaling::Default => {
            latent.mscale_all_dim = 0.0;
            1.0
        }
        _ => {
            ensure!(
                latent.mscale_all_dim == 0.0,
                "`mscale_all_dim` is {}, but only `yarn` may have it",
                latent.mscale_all_dim
            );
            1.0
        }
    };
    config.block.query_scalar = Some(query as f64 / mscale.powi(4));
    config.block.latent = Some(latent);
    config.extra_layers = extra_layers(fields)?;
    set_experts(fields, &mut config)?;
    Ok(config)
}

fn latent(fields: &Fields, rope: usize) -> Result<LatentConfig> {
    // transformers has a rank where the field is absent, and none where it is null.
    ensure!(
        fields.has("q_lora_rank"),
        "`q_lora_rank` is absent: it must be a rank, or null for queries without one"
    );
    let all_dim = |name: &'static str| -> Result<Option<f64>> {
        match fields.take(name) {
            Some(Value::Object(object)) if !object.is_empty() => {
                let found = Fields::new(object).number_or("mscale_all_dim", 0.0);
                found.map(Some)
            }
            _ => Ok(None),
        }
    };
    let [old, new] = [all_dim("rope_scaling")?, all_dim("rope_parameters")?];
    ensure!(
        [old, new].contains(&None) || old == new,
        "`rope_scaling.mscale_all_dim` is {}, but `rope_parameters.mscale_all_dim` is {}: delete the \
         one that is wrong",
        old.unwrap_or_default(),
        new.unwrap_or_default()
    );
    let mscale_all_dim = old.or(new).unwrap_or(0.0);
    ensure!(
        mscale_all_dim.is_finite() && mscale_all_dim >= 0.0,
        "`mscale_all_dim` is {mscale_all_dim}, but must be zero or positive"
    );
    Ok(LatentConfig {
        q_rank: fields.optional_positive("q_lora_rank")?,
        kv_rank: fields.positive("kv_lora_rank")?,
        nope: fields.positive("qk_nope_head_dim")?,
        rope,
        value: fields.positive("v_head_dim")?,
        interleaved: fields.truth_or("rope_interleave", true)?,
        mscale_all_dim,
    })
}

/// Returns the factor of attention scores, to be applied twice, under YaRN.
fn yarn_mscale(factor: f64, all_dim: f64) -> f64 {
    match factor <= 1.0 || all_dim == 0.0 {
        true => 1.0,
        false => 0.1 * all_dim * factor.ln() + 1.0,
    }
}

/// Returns the number of layers that predict further tokens.
fn extra_layers(fields: &Fields) -> Result<usize> {
    let extra = fields.optional_count("num_nextn_predict_layers")?;
    Ok(match extra {
        Some(extra) => extra,
        None => fields.optional_count("num_mtp_layers")?.unwrap_or(0),
    })
}

/// Gives layers after the first `first_k_dense_replace` experts.
fn set_experts(fields: &Fields, config: &mut DecoderConfig) -> Result<()> {
    for (name, expected) in [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")] {
        if let Some(found) = fields.optional_string(name)? {
            ensure!(
                found == expected,
                "`{name}` is `{found}`, but must be `{expected}`"
            );
        }
    }
    let every = fields.positive_or("moe_layer_freq", 1)?;
    ensure!(
        every == 1,
        "`moe_layer_freq` is {every}, but must be 1: every layer after the first ones has experts"
    );
    let ranks = fields.positive_or("ep_size", 1)?;
    ensure!(
        ranks == 1,
        "`ep_size` is {ranks}, but must be 1: files have all experts"
    );
    // Of the training loss that no inference computes.
    fields.take("aux_loss_alpha");
    fields.take("seq_aux");
    let [experts, top_k] = blocks::experts(fields, ["n_routed_experts", "num_local_experts"])?;
    let groups = fields.positive("n_group")?;
    let top_groups = fields.positive("topk_group")?;
    ensure!(
        experts.is_multiple_of(groups) && experts / groups >= 2,
        "`n_group` is {groups}, but must divide the {experts} experts into groups of at least 2"
    );
    ensure!(
        top_groups <= groups,
        "`topk_group` is {top_groups}, but there are {groups} groups (`n_group`)"
    );
    let reached = top_groups * (experts / groups);
    ensure!(
        top_k <= reached,
        "`num_experts_per_tok` is {top_k}, but {top_groups} groups (`topk_group`) have {reached} \
         experts"
    );
    let factor = fields.number_or("routed_scaling_factor", 2.5)?;
    ensure!(
        factor.is_finite() && factor > 0.0,
        "`routed_scaling_factor` is {factor}, but must be positive"
    );
    let hidden = fields.positive("moe_intermediate_size")?;
    let shared = fields.optional_count("n_shared_experts")?;
    let shared = shared.context("`n_shared_experts` is absent")?;
    let moe = FeedForwardConfig::Moe {
        experts,
        top_k,
        hidden,
        normalize: fields.truth_or("norm_topk_prob", true)?,
        scoring: Scoring::GroupedSigmoid {
            groups,
            top_groups,
            factor,
        },
        shared: (shared > 0).then_some(shared * hidden),
    };
    let dense = fields.optional_count("first_k_dense_replace")?;
    let dense = dense.context("`first_k_dense_replace` is absent")?;
    for layer in config.layers.iter_mut().skip(dense) {
        layer.feed_forward = moe.clone();
    }
    Ok(())
}

fn write_deepseek(config: &DecoderConfig, json: &mut Map<String, Value>) {
    let mut set = |field: &str, value: Value| {
        json.insert(field.to_owned(), value);
    };
    if let Some(latent) = &config.block.latent {
        set("head_dim", json!(latent.rope));
        set("q_lora_rank", json!(latent.q_rank));
        set("kv_lora_rank", json!(latent.kv_rank));
        set("qk_nope_head_dim", json!(latent.nope));
        set("qk_rope_head_dim", json!(latent.rope));
        set("v_head_dim", json!(latent.value));
        set("rope_interleave", json!(latent.interleaved));
    }
    set("attention_bias", json!(false));
    set("num_nextn_predict_layers", json!(config.extra_layers));
    let layers = config.layers.iter().map(|layer| &layer.feed_forward);
    let is_dense = |layer: &&FeedForwardConfig| matches!(layer, FeedForwardConfig::Dense { .. });
    let dense = layers.clone().take_while(is_dense).count();
    set("first_k_dense_replace", json!(dense));
    let mut moe = layers.skip(dense);
    if let Some(FeedForwardConfig::Moe {
        experts,
        top_k,
        hidden,
        normalize,
        scoring,
        shared,
    }) = moe.next()
    {
        if dense == 0 {
            set("intermediate_size", json!(hidden * top_k));
        }
        set("moe_intermediate_size", json!(hidden));
        set("n_routed_experts", json!(experts));
        set("num_experts_per_tok", json!(top_k));
        set("norm_topk_prob", json!(normalize));
        set("n_shared_experts", json!(shared.unwrap_or(0) / hidden));
        set("scoring_func", json!("sigmoid"));
        set("topk_method", json!("noaux_tc"));
        if let Scoring::GroupedSigmoid {
            groups,
            top_groups,
            factor,
        } = scoring
        {
            set("n_group", json!(groups));
            set("topk_group", json!(top_groups));
            set("routed_scaling_factor", json!(factor));
        }
    }
    let mscale = config.block.latent.map_or(0.0, |it| it.mscale_all_dim);
    if let (true, Some(Value::Object(scaling))) = (mscale > 0.0, json.get_mut("rope_scaling")) {
        scaling.insert("mscale_all_dim".into(), json!(mscale));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::read_json;
    use nvfp4_test_support::golden;

    /// Reads the golden configuration with `changes`, of which null removes a field.
    fn read(changes: Value) -> Result<DecoderConfig> {
        let mut json: Map<String, Value> = read_json(&golden("deepseek3-tiny/config.json"))?;
        for (field, value) in changes.as_object().unwrap() {
            match value {
                Value::Null => drop(json.remove(field)),
                value => drop(json.insert(field.clone(), value.clone())),
            }
        }
        DecoderConfig::from_json(&json)
    }

    #[test]
    fn golden_config() {
        let config = read(json!({})).unwrap();
        let latent = config.block.latent.unwrap();
        assert_eq!((latent.q_rank, latent.kv_rank), (Some(48), 32));
        assert_eq!([latent.nope, latent.rope, latent.value], [16; 3]);
        assert_eq!((config.head, config.rotary_head()), (32, 16));
        // Scores are multiplied by m² / √32, where m = 0.07 ln 4 + 1.
        let m = 0.07 * 4f64.ln() + 1.0;
        let scale = config.block.query_scalar.unwrap().sqrt().recip();
        assert!((scale - m * m / 32f64.sqrt()).abs() < 1e-12);
        let dense = FeedForwardConfig::Dense { hidden: 96 };
        let moe = FeedForwardConfig::Moe {
            experts: 8,
            top_k: 3,
            hidden: 48,
            normalize: true,
            scoring: Scoring::GroupedSigmoid {
                groups: 4,
                top_groups: 2,
                factor: 2.5,
            },
            shared: Some(96),
        };
        let layers: Vec<_> = config.layers.iter().map(|l| &l.feed_forward).collect();
        assert_eq!(layers, [&dense, &moe]);
    }

    /// The fields of DeepSeek's own files.
    #[test]
    fn published_fields() {
        let neutral = json!({
            "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
            "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
            "ep_size": 1, "aux_loss_alpha": 0.001, "seq_aux": true, "pretraining_tp": 1,
            "num_nextn_predict_layers": 1, "head_dim": null, "qk_head_dim": null,
            "rope_parameters": null, "rope_theta": 10000, "rope_interleave": null,
            "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1,
                "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
        });
        let config = read(neutral).unwrap();
        assert_eq!(config.extra_layers, 1);
        assert!(config.block.latent.unwrap().interleaved);
        assert_eq!(config.ropes[0].attention_factor(), 1.0);
    }

    #[test]
    fn written_configs_come_back() {
        for changes in [
            json!({}),
            json!({"q_lora_rank": 32, "rope_interleave": false, "num_nextn_predict_layers": 2}),
            json!({"n_group": 1, "topk_group": 1, "n_shared_experts": 0, "norm_topk_prob": false}),
            json!({"rope_parameters": null, "first_k_dense_replace": 0, "v_head_dim": 40}),
            json!({"first_k_dense_replace": 2, "routed_scaling_factor": 1.1}),
        ] {
            let config = read(changes.clone()).unwrap();
            let mut written = config.to_json("bfloat16");
            if changes.get("first_k_dense_replace") == Some(&json!(2)) {
                // Without experts, the fields of experts have no values to write.
                written.insert("n_routed_experts".into(), json!(8));
                for (field, value) in [("num_experts_per_tok", 3), ("moe_intermediate_size", 48)] {
                    written.insert(field.into(), json!(value));
                }
                for (field, value) in [("n_group", 4), ("topk_group", 2), ("n_shared_experts", 2)] {
                    written.insert(field.into(), json!(value));
                }
                written.insert("routed_scaling_factor".into(), json!(1.1));
            }
            assert_eq!(DecoderConfig::from_json(&written).unwrap(), config);
        }
    }

    #[test]
    fn bad_fields_are_refused_by_name() {
        for (changes, expected) in [
            (json!({"kv_lora_rank": null}), "`kv_lora_rank` is absent"),
            (json!({"kv_lora_rank": 0}), "`kv_lora_rank` is 0"),
            (json!({"q_lora_rank": null}), "`q_lora_rank` is absent"),
            (
                json!({"head_dim": 24}),
                "`head_dim` is 24, but must be `qk_rope_head_dim` (16)",
            ),
            (
                json!({"qk_rope_head_dim": 15, "head_dim": 15}),
                "15, but must be even",
            ),
            (json!({"v_head_dim": 512}), "make heads of 512"),
            (
                json!({"qk_head_dim": 48}),
                "`qk_head_dim` is 48, but must be 32",
            ),
            (
                json!({"num_key_value_heads": 2}),
                "`num_key_value_heads` is 2",
            ),
            (json!({"attention_bias": true}), "`attention_bias` is true"),
            (
                json!({"scoring_func": "softmax"}),
                "`scoring_func` is `softmax`",
            ),
            (
                json!({"topk_method": "greedy"}),
                "`topk_method` is `greedy`",
            ),
            (json!({"moe_layer_freq": 2}), "`moe_layer_freq` is 2"),
            (
                json!({"n_group": 3}),
                "`n_group` is 3, but must divide the 8 experts",
            ),
            (json!({"n_group": 8}), "groups of at least 2"),
            (
                json!({"topk_group": 5}),
                "`topk_group` is 5, but there are 4 groups",
            ),
            (
                json!({"topk_group": 1}),
                "`num_experts_per_tok` is 3, but 1 groups",
            ),
            (
                json!({"routed_scaling_factor": 0}),
                "`routed_scaling_factor` is 0",
            ),
            (
                json!({"n_shared_experts": null}),
                "`n_shared_experts` is absent",
            ),
            (
                json!({"index_topk": 64, "index_head_dim": 128}),
                "`index_head_dim` (128)",
            ),
            (json!({"hidden_act": "gelu"}), "must be `silu`"),
            (
                json!({"rope_parameters": {
                    "rope_type": "linear", "factor": 2, "mscale_all_dim": 1}}),
                "`mscale_all_dim` is 1, but only `yarn` may have it",
            ),
            (
                json!({"architectures": ["DeepseekV2ForCausalLM"]}),
                "must be DeepseekV3ForCausalLM",
            ),
        ] {
            let error = format!("{:#}", read(changes.clone()).unwrap_err());
            assert!(error.contains(expected), "{changes}: {error}");
        }
    }
}
