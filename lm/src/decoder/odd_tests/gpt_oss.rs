//! gpt-oss, with experts in bf16 and in MXFP4.

use serde_json::{Value, json};

use super::*;

const BASE: &str = "gptoss-tiny";
const MXFP4: &str = "gptoss-tiny-mxfp4";
const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

#[test]
fn fields() {
    let yarn = |changes: Value| {
        let mut yarn = json!({"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "original_max_position_embeddings": 64, "truncate": false});
        for (name, value) in changes.as_object().unwrap() {
            yarn[name] = value.clone();
        }
        yarn
    };
    let mut truncated = yarn(json!({}));
    truncated.as_object_mut().unwrap().remove("truncate");
    // The rotary embedding of the class where a file states none.
    let published = || {
        let changes = json!({"factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_theta": 150_000});
        set(json!({"rope_parameters": yarn(changes)}))
    };
    let none = || set(json!({"rope_parameters": {"rope_type": "default", "rope_theta": 150_000}}));
    check(
        BASE,
        [
            (absent(&["swiglu_alpha"]), Same),
            (
                absent(&["swiglu_limit"]),
                Like(set(json!({"swiglu_limit": 7.0}))),
            ),
            (set(json!({"swiglu_limit": 0.25})), Other),
            (
                set(json!({"swiglu_limit": 0})),
                Refused("`swiglu_limit` is 0, but must be positive"),
            ),
            (
                set(json!({"rope_parameters": null, "rope_theta": 150_000,
                    "rope_scaling": yarn(json!({}))})),
                Same,
            ),
            (set(json!({"rope_parameters": yarn(json!({}))})), Same),
            // Null counts as false; absent, it is true.
            (
                set(json!({"rope_parameters": yarn(json!({"truncate": null}))})),
                Same,
            ),
            (set(json!({"rope_parameters": truncated})), Other),
            (absent(&["rope_parameters"]), Like(published())),
            (
                set(json!({"rope_parameters": null, "rope_scaling": {}})),
                Like(published()),
            ),
            (
                set(json!({"rope_parameters": null, "rope_scaling": null})),
                Like(published()),
            ),
            (set(json!({"rope_parameters": {}})), Like(none())),
            (
                set(json!({"rope_parameters": null, "rope_scaling": {"rope_type": "default"}})),
                Like(none()),
            ),
            (absent(&["layer_types"]), Same),
            (set(json!({"layer_types": [FULL, SLIDING]})), Other),
            (
                absent(&["sliding_window"]),
                Like(set(json!({"sliding_window": 128}))),
            ),
            (set(json!({"layer_types": [FULL, FULL]})), Other),
            (
                set(json!({"sliding_window": null, "layer_types": null})),
                Refused("`sliding_window` is null, but layers of a model of type `gpt_oss`"),
            ),
            (
                absent(&["head_dim"]),
                Refused("q_proj.weight` is [128, 64], not [256, 64]"),
            ),
            (absent(&["rms_norm_eps"]), Same),
            (
                set(json!({"experts_per_token": 2, "num_experts": 4,
                    "initial_context_length": 4096})),
                Same,
            ),
            (set(json!({"num_experts_per_tok": 1})), Other),
            (
                set(json!({"hidden_act": "gelu"})),
                Refused("`hidden_act` is `gelu`"),
            ),
        ],
    );
}

#[test]
fn tensors() {
    let no_biases = |it: &mut Variant| {
        it.json["attention_bias"] = json!(false);
        it.tensors
            .retain(|name, _| !name.contains("self_attn.") || !name.ends_with(".bias"));
    };
    check(
        BASE,
        [
            (absent(&["attention_bias"]), Same),
            (Box::new(no_biases), Other),
            (
                set(json!({"attention_bias": false})),
                Refused("8 tensors are unknown: `model.layers.0.self_attn.k_proj.bias`"),
            ),
            (
                without(&["model.layers.0.self_attn.o_proj.bias"]),
                Refused("missing: `model.layers.0.self_attn.o_proj.bias` [64]"),
            ),
            (
                without(&["model.layers.0.self_attn.sinks"]),
                Refused("missing: `model.layers.0.self_attn.sinks` [4]"),
            ),
            (fill("model.layers.0.self_attn.sinks", &[4], 3.0), Other),
            (
                fill("model.layers.0.self_attn.sinks", &[1, 4], 3.0),
                Refused("`model.layers.0.self_attn.sinks` is [1, 4], not [4]"),
            ),
            (
                without(&["model.layers.1.mlp.experts.down_proj_bias"]),
                Refused("missing: `model.layers.1.mlp.experts.0.down_proj.bias` [64]"),
            ),
            (
                all([
                    set(json!({"tie_word_embeddings": true})),
                    without(&["lm_head.weight"]),
                ]),
                Other,
            ),
            (
                set(json!({"num_local_experts": 3})),
                Refused("is [4, 64, 192], but must be [3, 64, 192]"),
            ),
            (
                set(json!({"intermediate_size": 48})),
                Refused("is [4, 64, 192], but must be [4, 64, 96]"),
            ),
        ],
    );
}

#[test]
fn mxfp4() {
    let field = |name: &'static str, value: Value| -> Change {
        Box::new(move |it| it.json["quantization_config"][name] = value.clone())
    };
    check(
        MXFP4,
        [
            (field("modules_to_not_convert", json!(null)), Same),
            (field("dequantize", json!(true)), Same),
            (field("version", json!("")), Same),
            (
                field("quant_method", json!("mxfp6")),
                Refused("quant_method is \"mxfp6\""),
            ),
            (
                field("group_size", json!(16)),
                Refused("`quantization_config.group_size` is 16"),
            ),
            (
                without(&["model.layers.1.mlp.experts.down_proj_scales"]),
                Refused(
                    "down_proj_blocks` and `model.layers.1.mlp.experts.down_proj_scales` belong",
                ),
            ),
            (
                without(&["model.layers.1.mlp.experts.down_proj_blocks"]),
                Refused(
                    "down_proj_blocks` and `model.layers.1.mlp.experts.down_proj_scales` belong",
                ),
            ),
            (
                fill("model.layers.1.mlp.experts.down_proj", &[4, 96, 64], 0.1),
                Refused("are the same experts: delete one"),
            ),
            (
                fill(
                    "model.layers.1.mlp.experts.2.down_proj.weight",
                    &[64, 96],
                    0.1,
                ),
                Refused("experts.2.down_proj.weight` is stored twice"),
            ),
            (
                copy(
                    "model.layers.1.mlp.experts.down_proj_scales",
                    "model.layers.1.mlp.experts.gate_up_proj_scales",
                ),
                Refused("gate_up_proj_scales` is [4, 64, 3], but must be [4, 192, 2]"),
            ),
            (
                set(json!({"model_type": "qwen3_moe", "architectures": null})),
                Refused("quant_method is \"mxfp4\""),
            ),
        ],
    );
}
