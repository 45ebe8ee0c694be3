//! DeepSeek-V3, in bf16 and in FP8.

use half::bf16;
use nvfp4_formats::format::e4m3;
use serde_json::{Value, json};

use super::*;
use crate::hf::Dtype;

const BASE: &str = "deepseek3-tiny";
const FP8: &str = "deepseek3-tiny-fp8";

/// Removes the tensors of layer 1 whose names begin with `start`.
fn remove(it: &mut Variant, start: &str) {
    let start = format!("model.layers.1.{start}");
    let count = it.tensors.len();
    it.tensors.retain(|name, _| !name.starts_with(&start));
    assert!(it.tensors.len() < count);
}

#[test]
fn attention() {
    let yarn = |changes: Value| {
        let mut yarn = json!({"type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 0.7, "original_max_position_embeddings": 64});
        for (name, value) in changes.as_object().unwrap() {
            yarn[name] = value.clone();
        }
        yarn
    };
    // Queries from one projection instead of two of low rank.
    let one_query = |it: &mut Variant| {
        it.json["q_lora_rank"] = Value::Null;
        for layer in 0..2 {
            let path = format!("model.layers.{layer}.self_attn");
            it.tensors
                .retain(|name, _| !name.starts_with(&format!("{path}.q_")));
            it.fill(&format!("{path}.q_proj.weight"), &[128, 64], 0.05);
        }
    };
    check(
        BASE,
        [
            (absent(&["head_dim", "qk_head_dim"]), Same),
            (
                set(json!({"head_dim": 32})),
                Refused("`head_dim` is 32, but must be `qk_rope_head_dim` (16)"),
            ),
            (set(json!({"num_key_value_heads": null})), Same),
            (
                set(json!({"num_key_value_heads": 2})),
                Refused("`num_key_value_heads` is 2, but must be `num_attention_heads` (4)"),
            ),
            (Box::new(one_query), Other),
            (
                set(json!({"q_lora_rank": null})),
                Refused("missing: `model.layers.0.self_attn.q_proj.weight` [128, 64]"),
            ),
            (
                absent(&["q_lora_rank"]),
                Refused("`q_lora_rank` is absent: it must be a rank, or null"),
            ),
            (
                set(json!({"kv_lora_rank": 16})),
                Refused("kv_b_proj.weight` is [128, 32], not [128, 16]"),
            ),
            (
                set(json!({"attention_bias": true})),
                Refused("`attention_bias` is true, but models of type `deepseek_v3`"),
            ),
            (absent(&["rope_interleave"]), Same),
            (set(json!({"rope_interleave": false})), Other),
            (
                set(json!({"rope_interleave": null})),
                Like(set(json!({"rope_interleave": false}))),
            ),
            // The fields of DeepSeek's own files, alone and beside those of transformers 5.
            (
                set(json!({"rope_parameters": null, "rope_theta": 10000,
                    "rope_scaling": yarn(json!({}))})),
                Same,
            ),
            (set(json!({"rope_scaling": yarn(json!({}))})), Same),
            (
                set(json!({"rope_scaling": yarn(json!({"mscale": 0.7}))})),
                Refused("`rope_scaling` says"),
            ),
            // The factor of the rotary embedding is the same, that of the scores is not.
            (
                set(json!({
                    "rope_parameters": yarn(json!({"mscale": 0.7, "rope_theta": 1e4})),
                    "rope_scaling": yarn(json!({"mscale": 1.0, "mscale_all_dim": 1.0})),
                })),
                Refused("`rope_scaling.mscale_all_dim` is 1, but `rope_parameters.mscale_all_dim`"),
            ),
            (
                set(json!({"rope_parameters": {"rope_type": "default"}})),
                Like(set(json!({"rope_parameters": null}))),
            ),
            (absent(&["rms_norm_eps"]), Same),
            (
                without(&["model.layers.1.self_attn.kv_a_layernorm.weight"]),
                Refused("missing: `model.layers.1.self_attn.kv_a_layernorm.weight` [32]"),
            ),
        ],
    );
}

#[test]
fn experts() {
    // Layer 1 with the feed-forward of layer 0.
    let dense = |it: &mut Variant| {
        remove(it, "mlp.");
        for part in ["gate_proj", "up_proj", "down_proj"] {
            let name = |layer: usize| format!("model.layers.{layer}.mlp.{part}.weight");
            let tensor = it.tensors[&name(0)].clone();
            it.tensors.insert(name(1), tensor);
        }
    };
    let first = |count: usize| {
        all([
            Box::new(dense),
            set(json!({"first_k_dense_replace": count})),
        ])
    };
    let not_shared = |it: &mut Variant| {
        it.json["n_shared_experts"] = json!(0);
        remove(it, "mlp.shared_experts.");
    };
    // transformers writes a projection of no width.
    let empty = |it: &mut Variant| {
        it.fill(
            "model.layers.1.mlp.shared_experts.gate_proj.weight",
            &[0, 64],
            0.0,
        );
        it.fill(
            "model.layers.1.mlp.shared_experts.down_proj.weight",
            &[64, 0],
            0.0,
        );
    };
    check(
        BASE,
        [
            (absent(&["routed_scaling_factor"]), Same),
            (set(json!({"routed_scaling_factor": 1.0})), Other),
            (absent(&["norm_topk_prob"]), Same),
            (set(json!({"norm_topk_prob": false})), Other),
            (
                set(json!({"norm_topk_prob": null})),
                Like(set(json!({"norm_topk_prob": false}))),
            ),
            (
                set(json!({"scoring_func": "sigmoid", "topk_method": "noaux_tc",
                    "moe_layer_freq": 1, "ep_size": 1, "aux_loss_alpha": 0.001, "seq_aux": true})),
                Same,
            ),
            (
                set(json!({"scoring_func": "softmax"})),
                Refused("`scoring_func` is `softmax`, but must be `sigmoid`"),
            ),
            (
                set(json!({"topk_method": "group_limited_greedy"})),
                Refused("`topk_method` is `group_limited_greedy`"),
            ),
            (
                set(json!({"moe_layer_freq": 2})),
                Refused("`moe_layer_freq` is 2, but must be 1"),
            ),
            (set(json!({"n_group": 1, "topk_group": 1})), Other),
            (
                set(json!({"n_group": 3})),
                Refused("`n_group` is 3, but must divide the 8 experts"),
            ),
            (
                set(json!({"topk_group": 5})),
                Refused("`topk_group` is 5, but there are 4 groups"),
            ),
            (absent(&["n_group"]), Refused("`n_group` is absent")),
            (
                set(json!({"num_experts_per_tok": 5})),
                Refused("`num_experts_per_tok` is 5, but 2 groups (`topk_group`) have 4"),
            ),
            (first(2), Other),
            // More dense layers than there are layers.
            (first(5), Like(first(2))),
            (
                set(json!({"first_k_dense_replace": 2})),
                Refused("missing: `model.layers.1.mlp.gate_proj.weight` [96, 64]"),
            ),
            (
                set(json!({"first_k_dense_replace": 0})),
                Refused("missing: `model.layers.0.mlp.gate.weight` [8, 64]"),
            ),
            (Box::new(not_shared), Other),
            (
                all([Box::new(not_shared), Box::new(empty)]),
                Like(Box::new(not_shared)),
            ),
            (
                set(json!({"n_shared_experts": 0})),
                Refused("3 tensors are unknown: `model.layers.1.mlp.shared_experts.down_proj"),
            ),
            (
                set(json!({"n_shared_experts": 1})),
                Refused("shared_experts.gate_proj.weight` is [96, 64], not [48, 64]"),
            ),
            (set(json!({"num_nextn_predict_layers": 1})), Same),
            (
                all([
                    absent(&["n_routed_experts"]),
                    set(json!({"num_local_experts": 8})),
                ]),
                Same,
            ),
            (
                without(&["model.layers.1.mlp.gate.e_score_correction_bias"]),
                Refused("missing: `model.layers.1.mlp.gate.e_score_correction_bias` [8]"),
            ),
            (
                set(json!({"index_topk": 64, "index_n_heads": 4})),
                Refused("`index_n_heads` (4)"),
            ),
        ],
    );
}

#[test]
fn fp8() {
    const WEIGHT: &str = "model.layers.0.self_attn.o_proj.weight";
    const SCALES: &str = "model.layers.0.self_attn.o_proj.weight_scale_inv";
    let field = |name: &'static str, value: Value| -> Change {
        Box::new(move |it| it.json["quantization_config"][name] = value.clone())
    };
    // A module that was not converted: its values, with scales of 1.
    let unconverted = |it: &mut Variant| {
        it.tensors.remove(SCALES).unwrap();
        let (dtype, _, bytes) = it.tensors.get_mut(WEIGHT).unwrap();
        let values = bytes.iter().map(|code| e4m3::decode_element(*code));
        let values = values.map(|value| bf16::from_f32(value).to_le_bytes());
        (*dtype, *bytes) = (Dtype::BF16, values.collect::<Vec<_>>().concat());
    };
    let ones = |it: &mut Variant| {
        let (_, _, bytes) = it.tensors.get_mut(SCALES).unwrap();
        *bytes = 1f32.to_le_bytes().repeat(bytes.len() / 4);
    };
    check(
        FP8,
        [
            (field("modules_to_not_convert", json!(["lm_head"])), Same),
            (field("modules_to_not_convert", json!(null)), Same),
            (field("scale_fmt", json!("ue8m0")), Same),
            (field("fmt", json!(null)), Same),
            (field("activation_scheme", json!(null)), Same),
            (field("dequantize", json!(false)), Same),
            (Box::new(unconverted), Like(Box::new(ones))),
            (Box::new(ones), Other),
            (
                field("activation_scheme", json!("static")),
                Refused("`activation_scheme` is `static`, but must be `dynamic`"),
            ),
            (field("fmt", json!("e5m2")), Refused("`fmt` is `e5m2`")),
            (
                field("weight_block_size", json!(null)),
                Refused("`weight_block_size` is null, but must be the rows and columns"),
            ),
            (
                field("weight_block_size", json!([128, 128])),
                Refused("but must be [1, 1]"),
            ),
            (
                field("quant_method", json!("fbgemm_fp8")),
                Refused("quant_method is \"fbgemm_fp8\""),
            ),
            (
                set(json!({"quantization_config": null})),
                Refused("is of type F8_E4M3, not F32, BF16 or F16"),
            ),
            (
                without(&[SCALES]),
                Refused("there is no `model.layers.0.self_attn.o_proj.weight_scale_inv`"),
            ),
            (
                fill("model.layers.0.self_attn.o_proj.weight_scale", &[1], 1.0),
                Refused("unknown: `model.layers.0.self_attn.o_proj.weight_scale`"),
            ),
        ],
    );
}
