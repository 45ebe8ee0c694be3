//! Qwen3 with experts, and Mixtral.

use serde_json::{Value, json};

use super::*;

const QWEN: &str = "qwen3moe-tiny";
const MIXTRAL: &str = "mixtral-tiny";
const TYPES: [&str; 2] = ["full_attention", "sliding_attention"];

#[test]
fn qwen3_attention() {
    const QKVO: &[(&str, usize)] = &[
        ("self_attn.q_proj", 128),
        ("self_attn.k_proj", 64),
        ("self_attn.v_proj", 64),
        ("self_attn.o_proj", 96),
    ];
    let window = |fields: Value| {
        let used = json!({"use_sliding_window": true, "sliding_window": 8});
        all([set(used), set(fields)])
    };
    check(
        QWEN,
        [
            // The class has no size of a head: by default, it is 96 / 4.
            (
                absent(&["head_dim"]),
                Refused("q_proj.weight` is [128, 96], not [96, 96]"),
            ),
            (
                set(json!({"head_dim": 64})),
                Refused("q_proj.weight` is [128, 96], not [256, 96]"),
            ),
            (
                set(json!({"attention_bias": true})),
                Refused("missing: `model.layers.0.self_attn.q_proj.bias` [128]"),
            ),
            (
                all([set(json!({"attention_bias": true})), biases(0.5, QKVO)]),
                Other,
            ),
            (biases(0.5, QKVO), Refused("8 tensors are unknown")),
            (
                without(&["model.layers.0.self_attn.q_norm.weight"]),
                Refused("missing: `model.layers.0.self_attn.q_norm.weight` [32]"),
            ),
            (window(json!({"sliding_window": null})), Same),
            (window(json!({"use_sliding_window": false})), Same),
            (window(json!({})), Other),
            // The class has neither `max_window_layers` nor `layer_types`.
            (
                window(json!({"max_window_layers": 28})),
                Like(window(json!({}))),
            ),
            (
                all([window(json!({})), absent(&["sliding_window"])]),
                Like(window(json!({"sliding_window": 4096}))),
            ),
            (
                window(json!({"layer_types": TYPES})),
                Refused("`layer_types[0]` is full_attention, but `sliding_window` is 8"),
            ),
            (
                window(json!({"layer_types": [TYPES[1], TYPES[1]]})),
                Like(window(json!({}))),
            ),
            (set(json!({"layer_types": [TYPES[0], TYPES[0]]})), Same),
            (absent(&["tie_word_embeddings"]), Same),
            (
                set(json!({"tie_word_embeddings": true})),
                Refused("although `tie_word_embeddings` is true"),
            ),
            (
                set(json!({"rope_parameters": null, "rope_theta": 1e6, "rope_scaling": {}})),
                Same,
            ),
        ],
    );
}

#[test]
fn qwen3_experts() {
    let count = |fields: Value| all([absent(&["num_local_experts"]), set(fields)]);
    check(
        QWEN,
        [
            (count(json!({"num_experts": 4})), Same),
            (set(json!({"num_experts": 4})), Same),
            (
                set(json!({"num_experts": 8})),
                Refused("`num_experts` is 8, but `num_local_experts` is 4"),
            ),
            (count(json!({})), Refused("`num_experts` is absent")),
            (
                count(json!({"num_experts": 3})),
                Refused("mlp.gate.weight` is [4, 96], not [3, 96]"),
            ),
            (
                count(json!({"num_experts": 5})),
                Refused("missing: `model.layers.0.mlp.experts.4.gate_proj.weight` [48, 96]"),
            ),
            (set(json!({"num_experts_per_tok": 4})), Other),
            (
                set(json!({"num_experts_per_tok": 5})),
                Refused("`num_experts_per_tok` is 5, but there are 4 experts"),
            ),
            (
                absent(&["num_experts_per_tok"]),
                Refused("`num_experts_per_tok` is absent"),
            ),
            (set(json!({"norm_topk_prob": false})), Other),
            (
                absent(&["norm_topk_prob"]),
                Like(set(json!({"norm_topk_prob": false}))),
            ),
            (set(json!({"mlp_only_layers": null})), Same),
            (
                set(json!({"mlp_only_layers": [0]})),
                Refused("missing: `model.layers.0.mlp.gate_proj.weight` [160, 96]"),
            ),
            (
                set(json!({"mlp_only_layers": [2]})),
                Refused("`mlp_only_layers` is [2], but must be a list of numbers below 2"),
            ),
            (absent(&["decoder_sparse_step"]), Same),
            (
                set(json!({"decoder_sparse_step": 2})),
                Refused("missing: `model.layers.0.mlp.gate_proj.weight` [160, 96]"),
            ),
            (
                set(json!({"decoder_sparse_step": 0})),
                Refused("`decoder_sparse_step` is 0"),
            ),
            (
                set(json!({"moe_intermediate_size": 32})),
                Refused("experts.0.gate_proj.weight` is [48, 96], not [32, 96]"),
            ),
            // Only layers without experts have this width.
            (set(json!({"intermediate_size": 999})), Same),
            (
                set(
                    json!({"shared_expert_intermediate_size": 0, "router_jitter_noise": 0.1,
                    "output_router_logits": true, "router_aux_loss_coef": 0.01}),
                ),
                Same,
            ),
            (
                set(json!({"shared_expert_intermediate_size": 64})),
                Refused("`shared_expert_intermediate_size` (64)"),
            ),
            (
                without(&["model.layers.1.mlp.experts.2.up_proj.weight"]),
                Refused("1 tensor is missing: `model.layers.1.mlp.experts.2.up_proj.weight`"),
            ),
            (
                fill(
                    "model.layers.1.mlp.shared_expert_gate.weight",
                    &[1, 96],
                    1.0,
                ),
                Refused("unknown: `model.layers.1.mlp.shared_expert_gate.weight`"),
            ),
        ],
    );
}

#[test]
fn mixtral() {
    let renamed = |it: &mut Variant| {
        // The experts of other families have these names.
        for (from, to) in [("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")] {
            let name =
                |part: &str| format!("model.layers.0.block_sparse_moe.experts.0.{part}.weight");
            let tensor = it.tensors.remove(&name(from)).unwrap();
            it.tensors.insert(name(to), tensor);
        }
    };
    check(
        MIXTRAL,
        [
            (absent(&["head_dim"]), Same),
            (set(json!({"head_dim": 16})), Same),
            (
                set(json!({"head_dim": 32})),
                Refused("q_proj.weight` is [64, 64], not [128, 64]"),
            ),
            (
                all([
                    absent(&["num_local_experts"]),
                    set(json!({"num_experts": 4})),
                ]),
                Same,
            ),
            (
                absent(&["num_local_experts"]),
                Refused("`num_local_experts` is absent"),
            ),
            (set(json!({"num_experts_per_tok": 1})), Other),
            (
                set(json!({"num_experts_per_tok": 0})),
                Refused("`num_experts_per_tok` is 0"),
            ),
            (absent(&["sliding_window"]), Same),
            (set(json!({"sliding_window": 8})), Other),
            (
                set(json!({"sliding_window": 8, "layer_types": TYPES})),
                Refused("`layer_types[0]` is full_attention, but `sliding_window` is 8"),
            ),
            // The class has another theta and epsilon than other families.
            (set(json!({"rope_parameters": null})), Same),
            (
                set(json!({"rope_parameters": null, "rope_theta": 1e4})),
                Other,
            ),
            (absent(&["rms_norm_eps"]), Same),
            (
                set(json!({"router_jitter_noise": 0.1, "router_aux_loss_coef": 0.02})),
                Same,
            ),
            (set(json!({"hidden_act": "swish"})), Same),
            (
                set(json!({"attention_bias": true})),
                Refused("`attention_bias` is true, but a model of type `mixtral`"),
            ),
            (
                biases(0.0, &[("self_attn.q_proj", 64)]),
                Refused("2 tensors are unknown: `model.layers.0.self_attn.q_proj.bias`"),
            ),
            (
                without(&["model.layers.1.block_sparse_moe.gate.weight"]),
                Refused("missing: `model.layers.1.block_sparse_moe.gate.weight` [4, 64]"),
            ),
            (
                without(&["model.layers.1.block_sparse_moe.experts.3.w2.weight"]),
                Refused("missing: `model.layers.1.block_sparse_moe.experts.3.w2.weight` [64, 48]"),
            ),
            (
                Box::new(renamed),
                Refused(
                    "3 tensors are unknown: `model.layers.0.block_sparse_moe.experts.0.down_proj",
                ),
            ),
            (
                all([
                    set(json!({"tie_word_embeddings": true})),
                    without(&["lm_head.weight"]),
                ]),
                Other,
            ),
        ],
    );
}
