//! Llama, and Mistral with the same tensors.

use half::bf16;
use serde_json::{Value, json};

use super::*;
use crate::hf::Dtype;

const BASE: &str = "llama3-tiny";
const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// Biases of attention.
const QKVO: &[(&str, usize)] = &[
    ("self_attn.q_proj", 96),
    ("self_attn.k_proj", 32),
    ("self_attn.v_proj", 32),
    ("self_attn.o_proj", 96),
];
const MLP: &[(&str, usize)] = &[
    ("mlp.gate_proj", 160),
    ("mlp.up_proj", 160),
    ("mlp.down_proj", 96),
];

#[test]
fn biases_and_heads() {
    // Keys and values of each query head: those of the group, three times.
    let repeated = |it: &mut Variant| {
        for layer in 0..2 {
            for part in ["k_proj", "v_proj"] {
                let name = format!("model.layers.{layer}.self_attn.{part}.weight");
                let (_, shape, bytes) = it.tensors.get_mut(&name).unwrap();
                let heads = bytes.chunks(bytes.len() / 2);
                *bytes = heads.flat_map(|head| head.repeat(3)).collect();
                *shape = vec![96, 96];
            }
        }
    };
    check(
        BASE,
        [
            (
                set(json!({"attention_bias": true})),
                Refused("missing: `model.layers.0.self_attn.q_proj.bias` [96]"),
            ),
            (
                biases(0.5, QKVO),
                Refused("8 tensors are unknown: `model.layers.0.self_attn.k_proj.bias`"),
            ),
            (
                all([set(json!({"attention_bias": true})), biases(0.0, QKVO)]),
                Same,
            ),
            (
                all([set(json!({"attention_bias": true})), biases(0.5, QKVO)]),
                Other,
            ),
            (
                all([
                    set(json!({"attention_bias": true})),
                    biases(0.0, &QKVO[..3]),
                ]),
                Refused("missing: `model.layers.0.self_attn.o_proj.bias` [96]"),
            ),
            (
                set(json!({"mlp_bias": true})),
                Refused("missing: `model.layers.0.mlp.gate_proj.bias` [160]"),
            ),
            (
                all([set(json!({"mlp_bias": true})), biases(0.0, MLP)]),
                Same,
            ),
            (
                all([set(json!({"mlp_bias": true})), biases(0.5, MLP)]),
                Other,
            ),
            (absent(&["attention_bias", "mlp_bias"]), Same),
            (absent(&["head_dim"]), Same),
            (set(json!({"head_dim": null})), Same),
            (
                set(json!({"head_dim": 32})),
                Refused("q_proj.weight` is [96, 96], not [192, 96]"),
            ),
            (
                absent(&["num_key_value_heads"]),
                Refused("k_proj.weight` is [32, 96], not [96, 96]"),
            ),
            (
                all([absent(&["num_key_value_heads"]), Box::new(repeated)]),
                Same,
            ),
            (
                all([
                    set(json!({"num_key_value_heads": null})),
                    Box::new(repeated),
                ]),
                Same,
            ),
            (
                set(json!({"num_key_value_heads": 4})),
                Refused("`num_key_value_heads` is 4, but must be a divisor"),
            ),
            (
                set(json!({"num_key_value_heads": 12})),
                Refused("`num_key_value_heads` is 12, but must be a divisor"),
            ),
        ],
    );
}

#[test]
fn tied_heads_and_vocabularies() {
    // An untied model whose head is the embedding.
    let untied = || copy(EMBEDDING, HEAD);
    let tied = |it: &mut Variant| it.json["tie_word_embeddings"] = json!(true);
    let of_untied = changed(BASE, &untied()).unwrap();
    for change in [
        all([Box::new(tied), untied()]),
        all([Box::new(tied), without(&[HEAD])]),
    ] {
        let found = changed(BASE, &change).unwrap();
        assert!(difference(&found, &of_untied) < 1e-5);
    }
    check(
        BASE,
        [
            (
                Box::new(tied),
                Refused("`lm_head.weight`, which is not `model.embed_tokens.weight`"),
            ),
            (
                without(&[HEAD]),
                Refused("missing: `lm_head.weight` [288, 96]"),
            ),
            (absent(&["tie_word_embeddings"]), Same),
            // Embeddings that are padded, or shorter than the configuration says.
            (
                set(json!({"vocab_size": 256})),
                Refused("`model.embed_tokens.weight` is [288, 96], not [256, 96]"),
            ),
            (
                set(json!({"vocab_size": 320})),
                Refused("`lm_head.weight` is [288, 96], not [320, 96]"),
            ),
            (absent(&["vocab_size"]), Refused("`vocab_size` is absent")),
        ],
    );
}

#[test]
fn rotary_embeddings() {
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32});
    let mut short = llama3.clone();
    short
        .as_object_mut()
        .unwrap()
        .remove("original_max_position_embeddings");
    let with_theta = |scaling: &Value| {
        let mut scaling = scaling.clone();
        scaling["rope_theta"] = json!(5e5);
        scaling
    };
    // The fields of transformers 4.
    let old = |scaling: Value| {
        set(json!({"rope_parameters": null, "rope_theta": 5e5, "rope_scaling": scaling}))
    };
    let new = |scaling: Value| set(json!({"rope_parameters": with_theta(&scaling)}));
    let yarn = json!({"rope_type": "yarn", "factor": 4.0});
    let with = |object: &Value, name: &str, value: Value| {
        let mut object = object.clone();
        object[name] = value;
        object
    };
    check(
        BASE,
        [
            (old(llama3.clone()), Same),
            (all([old(llama3.clone()), new(llama3.clone())]), Same),
            // The original context is that of the model unless it is given.
            (
                new(short),
                Like(new(with(
                    &llama3,
                    "original_max_position_embeddings",
                    json!(256),
                ))),
            ),
            (set(json!({"rope_scaling": null})), Same),
            (set(json!({"rope_scaling": {}})), Same),
            (set(json!({"rope_theta": 5e5})), Same),
            (
                set(json!({"rope_theta": 1e4})),
                Refused("`rope_theta` is 10000, but `rope_parameters.rope_theta` is 500000"),
            ),
            (
                all([
                    new(llama3.clone()),
                    set(json!({"partial_rotary_factor": 1.0})),
                ]),
                Same,
            ),
            (
                set(json!({"partial_rotary_factor": 0.5})),
                Refused("`partial_rotary_factor` is 0.5"),
            ),
            (old(Value::Null), Like(new(json!({"rope_type": "default"})))),
            (old(json!({})), Like(new(json!({"rope_type": "default"})))),
            (old(json!({"rope_type": "default"})), Other),
            (new(json!({})), Like(new(json!({"rope_type": "default"})))),
            // 10000 is the theta of the class.
            (
                set(json!({"rope_parameters": null})),
                Like(set(json!({"rope_parameters": {"rope_theta": 1e4}}))),
            ),
            (
                set(json!({"rope_parameters": {"rope_type": "linear", "factor": 4}})),
                Like(all([
                    old(json!({"type": "linear", "factor": 4.0})),
                    set(json!({"rope_theta": 1e4})),
                ])),
            ),
            (old(json!({"type": "linear", "factor": 4.0})), Other),
            (
                old(json!({"type": "linear", "rope_type": "linear", "factor": 4.0})),
                Like(new(json!({"rope_type": "linear", "factor": 4.0}))),
            ),
            (
                old(json!({"type": "dynamic", "factor": 4.0})),
                Like(new(json!({"rope_type": "dynamic", "factor": 4.0}))),
            ),
            (
                old(yarn.clone()),
                Like(new(with(
                    &yarn,
                    "original_max_position_embeddings",
                    json!(256),
                ))),
            ),
            (
                new(with(&yarn, "original_max_position_embeddings", json!(64))),
                Other,
            ),
            (
                new(with(&yarn, "attention_factor", json!(null))),
                Like(new(yarn.clone())),
            ),
            (
                new(with(&yarn, "mscale_all_dim", json!(1.0))),
                Like(new(yarn.clone())),
            ),
            (
                all([old(yarn.clone()), new(json!({"rope_type": "default"}))]),
                Refused("`rope_parameters` says"),
            ),
            (
                old(json!({"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]})),
                Refused("`rope_scaling.rope_type` is `longrope`, but must be default, linear"),
            ),
            (
                old(json!({"type": "su", "short_factor": [1.0]})),
                Refused("`rope_scaling.rope_type` is `su`"),
            ),
            (
                old(json!({"type": "mrope", "mrope_section": [2, 3, 3]})),
                Refused("`rope_scaling.rope_type` is `mrope`"),
            ),
            (
                old(json!({"type": "yarn"})),
                Refused("`rope_scaling.factor` is absent, which `yarn` needs"),
            ),
            (
                old(json!({"type": "linear", "factor": "4"})),
                Refused("`factor` is \"4\", but must be a number"),
            ),
            (
                set(json!({"original_max_position_embeddings": 64})),
                Refused("`original_max_position_embeddings` (64)"),
            ),
            (
                set(json!({"rope_parameters": {"full_attention": llama3}})),
                Refused("`rope_parameters` has a field `full_attention`"),
            ),
            (
                set(json!({"rope_scaling": "linear"})),
                Refused("`rope_scaling` is \"linear\", but must be an object"),
            ),
        ],
    );
}

#[test]
fn other_fields() {
    check(
        BASE,
        [
            (set(json!({"hidden_act": "swish"})), Same),
            (absent(&["hidden_act"]), Same),
            (
                set(json!({"hidden_act": "gelu"})),
                Refused("`hidden_act` is `gelu`, but must be `silu`"),
            ),
            (
                set(json!({"hidden_act": "gelu_pytorch_tanh"})),
                Refused("`hidden_act` is `gelu_pytorch_tanh`"),
            ),
            (
                absent(&["rms_norm_eps"]),
                Like(set(json!({"rms_norm_eps": 1e-6}))),
            ),
            (
                set(json!({"rms_norm_eps": 0})),
                Refused("`rms_norm_eps` is 0, but must be positive"),
            ),
            (set(json!({"rms_norm_eps": 0.5})), Other),
            (
                set(json!({"torch_dtype": "float32", "dtype": "float8_e4m3fn"})),
                Same,
            ),
            (
                absent(&["dtype", "transformers_version", "use_cache"]),
                Same,
            ),
            (set(json!({"quantization_config": null})), Same),
            (
                set(json!({"quantization_config": {}})),
                Refused("quantization_config: quant_method is missing"),
            ),
            (
                set(json!({"quantization_config": {"quant_method": "bitsandbytes"}})),
                Refused("quant_method is \"bitsandbytes\""),
            ),
            (set(json!({"architectures": null})), Same),
            (set(json!({"architectures": []})), Same),
            (absent(&["architectures"]), Same),
            (
                set(json!({"architectures": ["LlamaModel"]})),
                Refused("must be LlamaForCausalLM"),
            ),
            (absent(&["model_type"]), Refused("`model_type` is absent")),
            (set(json!({"pretraining_tp": 4})), Same),
            (
                set(json!({"layer_types": ["full_attention", "full_attention"]})),
                Same,
            ),
            (
                set(json!({"layer_types": ["full_attention"]})),
                Refused("`layer_types` has 1 entries, but must have 2"),
            ),
            (
                set(json!({"layer_types": ["full_attention", "sliding_attention"]})),
                Refused("`layer_types[1]` is sliding_attention, but there is no `sliding_window`"),
            ),
            (set(json!({"sliding_window": null})), Same),
            (
                set(json!({"sliding_window": 8})),
                Refused("`sliding_window` is 8, but a model of type `llama` has none"),
            ),
            (
                absent(&["max_position_embeddings"]),
                Refused("`max_position_embeddings` is absent"),
            ),
        ],
    );
}

/// Adds a copy of each tensor of layer 1 as one of layer 2.
fn third_layer(it: &mut Variant) {
    for (name, tensor) in it.tensors.clone() {
        if name.starts_with("model.layers.1.") {
            it.tensors
                .insert(name.replace("layers.1.", "layers.2."), tensor);
        }
    }
}

/// Stores all tensors in f32.
fn in_f32(it: &mut Variant) {
    for (dtype, _, bytes) in it.tensors.values_mut() {
        assert_eq!(*dtype, Dtype::BF16);
        let values = bytes.as_chunks::<2>().0.iter();
        let values = values.map(|value| bf16::from_le_bytes(*value).to_f32().to_le_bytes());
        (*dtype, *bytes) = (Dtype::F32, values.collect::<Vec<_>>().concat());
    }
}

#[test]
fn tensors() {
    check(
        BASE,
        [
            (
                fill("model.layers.0.self_attn.rotary_emb.inv_freq", &[8], 1.0),
                Same,
            ),
            (
                fill("model.layers.0.self_attn.q_norm.weight", &[16], 1.0),
                Refused("1 tensor is unknown: `model.layers.0.self_attn.q_norm.weight`"),
            ),
            (
                fill("model.embed_positions.weight", &[256, 96], 0.0),
                Refused("unknown: `model.embed_positions.weight`"),
            ),
            (
                set(json!({"num_hidden_layers": 1})),
                Refused("9 tensors are unknown: `model.layers.1."),
            ),
            (
                set(json!({"num_hidden_layers": 3})),
                Refused("9 tensors are missing: `model.layers.2."),
            ),
            (
                all([set(json!({"num_hidden_layers": 3})), Box::new(third_layer)]),
                Other,
            ),
            (
                Box::new(third_layer),
                Refused("9 tensors are unknown: `model.layers.2."),
            ),
            (Box::new(in_f32), Same),
            (
                all([Box::new(in_f32), fill("model.norm.weight", &[1, 96], 1.0)]),
                Refused("`model.norm.weight` is [1, 96], not [96]"),
            ),
        ],
    );
}

/// Mistral has the tensors of Llama, and a window of 4096 unless the file says otherwise.
#[test]
fn mistral() {
    let mistral = |fields: Value| {
        let own = json!({"model_type": "mistral", "architectures": ["MistralForCausalLM"]});
        all([
            absent(&["attention_bias", "mlp_bias"]),
            set(own),
            set(fields),
        ])
    };
    let types = |types: [&str; 2]| json!({"sliding_window": 8, "layer_types": types});
    check(
        BASE,
        [
            (mistral(json!({"sliding_window": null})), Same),
            (
                mistral(json!({})),
                Like(mistral(json!({"sliding_window": 4096}))),
            ),
            (mistral(json!({"sliding_window": 8})), Other),
            // A field of Qwen, which Mistral does not have.
            (
                mistral(json!({"sliding_window": 8, "use_sliding_window": false})),
                Like(mistral(json!({"sliding_window": 8}))),
            ),
            (
                mistral(json!({"sliding_window": 0})),
                Refused("`sliding_window` is 0"),
            ),
            (
                mistral(types(["sliding_attention", "sliding_attention"])),
                Like(mistral(json!({"sliding_window": 8}))),
            ),
            (
                mistral(types(["sliding_attention", "full_attention"])),
                Refused("`layer_types[1]` is full_attention, but `sliding_window` is 8"),
            ),
            (
                mistral(json!({"sliding_window": null, "attention_bias": true})),
                Refused("`attention_bias` is true, but a model of type `mistral`"),
            ),
            (
                all([
                    mistral(json!({"sliding_window": null})),
                    absent(&["num_key_value_heads"]),
                ]),
                Refused("`num_key_value_heads` is absent"),
            ),
            (
                all([
                    mistral(json!({"sliding_window": null})),
                    absent(&["head_dim"]),
                ]),
                Same,
            ),
            (
                all([
                    mistral(json!({"sliding_window": null})),
                    absent(&["rms_norm_eps"]),
                ]),
                Like(mistral(
                    json!({"sliding_window": null, "rms_norm_eps": 1e-6}),
                )),
            ),
            (
                all([
                    mistral(json!({"sliding_window": null, "tie_word_embeddings": true})),
                    without(&[HEAD]),
                ]),
                Other,
            ),
            (
                mistral(json!({"model_type": "mistral3", "vision_config": {"depth": 2}})),
                Refused("`model_type` is `mistral3`"),
            ),
        ],
    );
}
