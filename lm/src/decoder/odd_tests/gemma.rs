//! Gemma 2 and Gemma 3.

use serde_json::{Value, json};

use super::*;

const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

/// Cases of both families.
fn shared() -> [(Change, Expected); 20] {
    const EMBEDDING: &str = "model.embed_tokens.weight";
    let without_types = |fields: Value| all([absent(&["layer_types"]), set(fields)]);
    [
        (absent(&["hidden_activation"]), Same),
        (set(json!({"hidden_act": "gelu_pytorch_tanh"})), Same),
        (
            set(json!({"hidden_activation": "gelu"})),
            Refused("`hidden_activation` is `gelu`, but must be `gelu_pytorch_tanh`"),
        ),
        (
            set(json!({"hidden_activation": "silu"})),
            Refused("`hidden_activation` is `silu`"),
        ),
        (
            absent(&["query_pre_attn_scalar"]),
            Like(set(json!({"query_pre_attn_scalar": 256}))),
        ),
        (set(json!({"query_pre_attn_scalar": 64})), Other),
        (
            set(json!({"query_pre_attn_scalar": 0})),
            Refused("`query_pre_attn_scalar` is 0"),
        ),
        (set(json!({"layer_types": [FULL, SLIDING]})), Other),
        (
            set(json!({"layer_types": [SLIDING]})),
            Refused("`layer_types` has 1 entries, but must have 2"),
        ),
        (
            absent(&["sliding_window"]),
            Like(set(json!({"sliding_window": 4096}))),
        ),
        (set(json!({"layer_types": [FULL, FULL]})), Other),
        (
            set(json!({"sliding_window": null})),
            Refused("`layer_types[0]` is sliding_attention, but there is no `sliding_window`"),
        ),
        (
            without_types(json!({"sliding_window": null})),
            Refused("`sliding_window` is null, but layers"),
        ),
        (
            set(json!({"cache_implementation": "hybrid", "sliding_window_size": 8})),
            Same,
        ),
        // The head is tied by default.
        (absent(&["tie_word_embeddings"]), Same),
        (
            set(json!({"tie_word_embeddings": false})),
            Refused("missing: `lm_head.weight` [288, 64]"),
        ),
        (
            all([
                set(json!({"tie_word_embeddings": false})),
                copy(EMBEDDING, "lm_head.weight"),
            ]),
            Same,
        ),
        (
            set(json!({"attention_bias": true})),
            Refused("missing: `model.layers.0.self_attn.q_proj.bias`"),
        ),
        (
            set(json!({"use_bidirectional_attention": true})),
            Refused("`use_bidirectional_attention` (true)"),
        ),
        (
            without(&["model.layers.0.pre_feedforward_layernorm.weight"]),
            Refused("missing: `model.layers.0.pre_feedforward_layernorm.weight` [64]"),
        ),
    ]
}

#[test]
fn shared_cases() {
    for base in ["gemma2-tiny", "gemma3-tiny"] {
        check(base, shared());
    }
}

#[test]
fn gemma2() {
    check(
        "gemma2-tiny",
        [
            // 256 is the size of a head in the class.
            (
                absent(&["head_dim"]),
                Refused("q_proj.weight` is [64, 64], not [1024, 64]"),
            ),
            (
                set(json!({"head_dim": null})),
                Refused("q_proj.weight` is [64, 64], not [1024, 64]"),
            ),
            (absent(&["layer_types"]), Same),
            (set(json!({"attn_logit_softcapping": null})), Other),
            (
                absent(&["attn_logit_softcapping"]),
                Like(set(json!({"attn_logit_softcapping": 50.0}))),
            ),
            (set(json!({"final_logit_softcapping": null})), Other),
            (
                absent(&["final_logit_softcapping"]),
                Like(set(json!({"final_logit_softcapping": 30.0}))),
            ),
            (
                set(json!({"attn_logit_softcapping": 0})),
                Refused("`attn_logit_softcapping` is 0, but must be a positive number or null"),
            ),
            (set(json!({"rope_parameters": null})), Same),
            (
                set(json!({"rope_parameters": null, "rope_theta": 1e6})),
                Other,
            ),
            (
                set(json!({"rope_local_base_freq": 1e4})),
                Refused("`rope_local_base_freq` (10000.0)"),
            ),
            (absent(&["use_bidirectional_attention"]), Same),
        ],
    );
}

#[test]
fn gemma3() {
    let linear = json!({"rope_type": "linear", "factor": 8.0});
    let old = |fields: Value| all([set(json!({"rope_parameters": null})), set(fields)]);
    let rope = |full: Value, sliding: Value| {
        set(json!({"rope_parameters": {FULL: full, SLIDING: sliding}}))
    };
    let local = || json!({"rope_type": "default", "rope_theta": 1e4});
    let pattern = |fields: Value| all([absent(&["layer_types"]), set(fields)]);
    check(
        "gemma3-tiny",
        [
            (
                absent(&["head_dim"]),
                Refused("q_proj.weight` is [128, 64], not [1024, 64]"),
            ),
            // The fields of transformers 4.
            (
                old(json!({"rope_theta": 1e6, "rope_local_base_freq": 1e4,
                    "rope_scaling": linear})),
                Same,
            ),
            (old(json!({"rope_scaling": linear})), Same),
            (
                set(json!({"rope_scaling": linear, "rope_theta": 1e6})),
                Same,
            ),
            (old(json!({"rope_scaling": null})), Other),
            (
                old(json!({"rope_scaling": {}})),
                Like(rope(json!({"rope_type": "default"}), Value::Null)),
            ),
            (
                rope(Value::Null, local()),
                Like(rope(
                    json!({"rope_type": "default", "rope_theta": 1e6}),
                    local(),
                )),
            ),
            (rope(linear.clone(), Value::Null), Same),
            (
                old(json!({"rope_scaling": linear, "rope_local_base_freq": 1e5})),
                Other,
            ),
            (
                set(json!({"rope_local_base_freq": 1e5})),
                Refused("`rope_local_base_freq` is 100000, but"),
            ),
            (
                rope(
                    linear.clone(),
                    json!({"rope_type": "linear", "factor": 2.0}),
                ),
                Refused("`rope_parameters.sliding_attention` has a scaling (linear)"),
            ),
            (
                set(json!({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})),
                Refused("`rope_parameters` has a field `rope_t"),
            ),
            // Without `layer_types`, each sixth layer has no window.
            (
                pattern(json!({})),
                Like(set(json!({"layer_types": [SLIDING, SLIDING]}))),
            ),
            (pattern(json!({"sliding_window_pattern": 2})), Same),
            (
                pattern(json!({"sliding_window_pattern": 1})),
                Like(set(json!({"layer_types": [FULL, FULL]}))),
            ),
            (set(json!({"final_logit_softcapping": 0.5})), Other),
            (absent(&["final_logit_softcapping"]), Same),
            (
                set(json!({"attn_logit_softcapping": 50.0})),
                Refused("`attn_logit_softcapping` is 50, but transformers ignores it"),
            ),
            (
                without(&["model.layers.1.self_attn.q_norm.weight"]),
                Refused("missing: `model.layers.1.self_attn.q_norm.weight` [32]"),
            ),
            (
                set(json!({"model_type": "gemma3", "text_config": {}})),
                Refused("`model_type` is `gemma3`, a model of texts and images"),
            ),
        ],
    );
}
