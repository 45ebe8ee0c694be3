//! Qwen2 and Qwen3.

use serde_json::{Value, json};

use super::*;

const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

/// Sets the fields of a window, without `layer_types`.
fn window(fields: Value) -> Change {
    all([absent(&["layer_types"]), set(fields)])
}

/// Cases of windows, which are those of both families.
fn windows() -> [(Change, Expected); 11] {
    let used = |first: usize| {
        let mut fields = json!({"use_sliding_window": true, "sliding_window": 8});
        fields["max_window_layers"] = json!(first);
        fields
    };
    let types = |is_used: bool, types: [&str; 2]| {
        set(json!({"use_sliding_window": is_used, "sliding_window": 8, "layer_types": types}))
    };
    [
        (window(json!({})), Same),
        (set(json!({"layer_types": null})), Same),
        (
            window(json!({"use_sliding_window": true, "sliding_window": null,
                "max_window_layers": 0})),
            Same,
        ),
        (
            window(json!({"use_sliding_window": false, "sliding_window": 8,
                "max_window_layers": 0})),
            Same,
        ),
        (window(used(0)), Other),
        (window(used(1)), Like(types(true, [FULL, SLIDING]))),
        // By default, the first 28 layers have no window.
        (all([window(used(0)), absent(&["max_window_layers"])]), Same),
        // A window that is used without a number is 4096.
        (
            all([window(used(0)), absent(&["sliding_window"])]),
            Like(window(
                json!({"use_sliding_window": true, "sliding_window": 4096,
                "max_window_layers": 0}),
            )),
        ),
        (
            types(false, [FULL, SLIDING]),
            Refused(
                "`layer_types[1]` is sliding_attention, but there is no `sliding_window` in use",
            ),
        ),
        (
            set(json!({"layer_types": [FULL]})),
            Refused("`layer_types` has 1 entries, but must have 2"),
        ),
        (
            set(json!({"layer_types": [FULL, "linear_attention"]})),
            Refused("`layer_types[1]` is \"linear_attention\""),
        ),
    ]
}

/// Cases of rotary embeddings and other fields, which are those of both families.
fn fields() -> [(Change, Expected); 17] {
    let theta = |mut rope: Value| {
        rope["rope_theta"] = json!(1e6);
        set(json!({"rope_parameters": rope}))
    };
    let old = |scaling: Value| {
        set(json!({"rope_parameters": null, "rope_theta": 1e6, "rope_scaling": scaling}))
    };
    // As the model cards of Qwen recommend for long texts.
    let yarn = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
    [
        (old(Value::Null), Same),
        (old(yarn.clone()), Like(theta(yarn.clone()))),
        (old(yarn), Other),
        (
            old(json!({"rope_type": "default", "mrope_section": [2, 3, 3]})),
            Refused("`rope_scaling` has a field `mrope_section`"),
        ),
        (
            set(json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}})),
            Refused("`rope_parameters` has a field `full_attention`"),
        ),
        (
            set(json!({"dual_chunk_attention_config": {"chunk_size": 8}})),
            Refused("`dual_chunk_attention_config`"),
        ),
        (set(json!({"use_mrope": false})), Same),
        (
            set(json!({"rope_parameters": null})),
            Like(set(json!({"rope_parameters": {"rope_theta": 1e4}}))),
        ),
        (absent(&["rms_norm_eps"]), Same),
        (set(json!({"hidden_act": "swish"})), Same),
        (
            set(json!({"hidden_act": "gelu"})),
            Refused("`hidden_act` is `gelu`"),
        ),
        (
            set(json!({"vocab_size": 280})),
            Refused("`model.embed_tokens.weight` is [288,"),
        ),
        (
            absent(&["num_key_value_heads"]),
            Refused("`num_key_value_heads` is absent"),
        ),
        // The head is tied in these folders, but not by default.
        (
            absent(&["tie_word_embeddings"]),
            Refused("missing: `lm_head.weight`"),
        ),
        (copy("model.embed_tokens.weight", "lm_head.weight"), Same),
        (
            all([
                copy("model.embed_tokens.weight", "lm_head.weight"),
                set(json!({"tie_word_embeddings": false})),
            ]),
            Same,
        ),
        (
            all([
                copy("model.embed_tokens.weight", "lm_head.weight"),
                Box::new(|it| it.set("lm_head.weight", 5, 1.0)),
            ]),
            Refused("although `tie_word_embeddings` is true"),
        ),
    ]
}

#[test]
fn shared_cases() {
    for base in ["qwen2-tiny", "qwen3-tiny"] {
        check(base, windows());
        check(base, fields());
    }
}

#[test]
fn qwen2() {
    check(
        "qwen2-tiny",
        [
            (set(json!({"attention_bias": true})), Same),
            (
                set(json!({"attention_bias": false})),
                Refused("`attention_bias` is false, but a model of type `qwen2` always has biases"),
            ),
            (
                without(&["model.layers.1.self_attn.v_proj.bias"]),
                Refused("1 tensor is missing: `model.layers.1.self_attn.v_proj.bias` [32]"),
            ),
            (
                biases(0.0, &[("self_attn.o_proj", 64)]),
                Refused("2 tensors are unknown: `model.layers.0.self_attn.o_proj.bias`"),
            ),
            (set(json!({"head_dim": 16})), Same),
            (
                set(json!({"head_dim": 32})),
                Refused("q_proj.weight` is [64, 64], not [128, 64]"),
            ),
            (
                set(json!({"num_key_value_heads": null})),
                Refused("k_proj.weight` is [32, 64], not [64, 64]"),
            ),
            (
                fill("model.layers.0.self_attn.q_norm.weight", &[16], 1.0),
                Refused("unknown: `model.layers.0.self_attn.q_norm.weight`"),
            ),
        ],
    );
}

#[test]
fn qwen3() {
    const QKVO: &[(&str, usize)] = &[
        ("self_attn.q_proj", 128),
        ("self_attn.k_proj", 64),
        ("self_attn.v_proj", 64),
        ("self_attn.o_proj", 96),
    ];
    check(
        "qwen3-tiny",
        [
            // 128 is the size of a head in the class.
            (
                absent(&["head_dim"]),
                Refused("q_proj.weight` is [128, 96], not [512, 96]"),
            ),
            (
                set(json!({"head_dim": 24})),
                Refused("q_proj.weight` is [128, 96], not [96, 96]"),
            ),
            (absent(&["attention_bias"]), Same),
            (
                set(json!({"attention_bias": true})),
                Refused("missing: `model.layers.0.self_attn.q_proj.bias` [128]"),
            ),
            (
                all([set(json!({"attention_bias": true})), biases(0.0, QKVO)]),
                Same,
            ),
            (
                all([set(json!({"attention_bias": true})), biases(0.5, QKVO)]),
                Other,
            ),
            (biases(0.5, QKVO), Refused("8 tensors are unknown")),
            (
                without(&["model.layers.1.self_attn.k_norm.weight"]),
                Refused("missing: `model.layers.1.self_attn.k_norm.weight` [32]"),
            ),
            (
                fill("model.layers.1.self_attn.k_norm.weight", &[64], 1.0),
                Refused("k_norm.weight` is [64], not [32]"),
            ),
            (set(json!({"num_experts": 4})), Refused("`num_experts` (4)")),
        ],
    );
}
