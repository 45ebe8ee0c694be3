use serde_json::json;

use super::*;
use crate::hf::RopeScaling;
use nvfp4_test_support::golden;

fn read(json: Value) -> Result<DecoderConfig> {
    DecoderConfig::from_json(json.as_object().unwrap())
}

/// Returns a small Llama with `changes` (null removes a field).
fn llama(changes: Value) -> Value {
    let json = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 288,
        "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    });
    changed(json, changes)
}

/// Returns a small model of `model_type` with `changes` (null removes a field).
fn of_type(model_type: &str, changes: Value) -> Value {
    let family = Family::of(model_type).unwrap();
    let own = json!({
        "model_type": model_type, "architectures": [family.architecture()], "head_dim": 16,
    });
    changed(llama(own), changes)
}

fn changed(mut json: Value, changes: Value) -> Value {
    for (field, value) in changes.as_object().unwrap() {
        json[field] = value.clone();
    }
    json
}

/// Returns a small Gemma 3 in the fields of transformers 4, with `changes`.
fn gemma3(changes: Value) -> Value {
    let own = json!({"rope_local_base_freq": 10000.0, "rope_theta": 1e6, "sliding_window": 8,
        "sliding_window_pattern": 2, "query_pre_attn_scalar": 24});
    changed(of_type("gemma3_text", own), changes)
}

/// Checks that each of the configurations is refused with the text beside it.
fn refused(cases: &[(Value, &str)]) {
    for (json, expected) in cases {
        let error = format!("{:#}", read(json.clone()).unwrap_err());
        assert!(error.contains(expected), "{json}: {error}");
    }
}

#[test]
fn golden_configs() {
    let folder = golden("llama3-tiny");
    let config = DecoderConfig::read(&folder).unwrap();
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low: 1.0,
        high: 4.0,
        original: 32.0,
    };
    assert_eq!(config.family, Family::Llama);
    assert_eq!((config.heads, config.kv_heads, config.head), (6, 2, 16));
    assert_eq!((config.d_model, config.vocab), (96, 288));
    assert_eq!(
        (config.ropes[0].theta, &config.ropes[0].scaling),
        (500_000.0, &scaling)
    );
    assert_eq!((config.bos, &config.eos[..]), (Some(1), &[2][..]));
    assert!(!config.tied && config.block == BlockConfig::default());
    let four = read_json(&folder.join("config.transformers4.json")).unwrap();
    assert_eq!(DecoderConfig::from_json(&four).unwrap(), config);

    let qwen = DecoderConfig::read(&golden("qwen3-tiny")).unwrap();
    assert_eq!((qwen.heads * qwen.head, qwen.d_model), (128, 96));
    assert!(qwen.tied && qwen.eos.is_empty());
    assert!(qwen.layers.iter().all(|layer| layer.window.is_none()));
    let moe = FeedForwardConfig::Moe {
        experts: 4,
        top_k: 2,
        hidden: 48,
        normalize: true,
        scoring: Scoring::Softmax,
        shared: None,
    };
    for name in ["qwen3moe-tiny", "mixtral-tiny"] {
        let config = DecoderConfig::read(&golden(name)).unwrap();
        assert!(config.layers.iter().all(|layer| layer.feed_forward == moe));
    }

    let qwen2 = DecoderConfig::read(&golden("qwen2-tiny")).unwrap();
    let biases = Biases {
        qkv: true,
        ..Biases::default()
    };
    assert_eq!((qwen2.block.biases, qwen2.head), (biases, 16));
    let gemma2 = DecoderConfig::read(&golden("gemma2-tiny")).unwrap();
    let caps = (gemma2.block.score_cap, gemma2.logit_cap);
    assert_eq!(caps, (Some(0.5), Some(10.0)));
    assert_eq!((gemma2.ropes.len(), gemma2.layers[1].rope), (1, 0));
    // In the fields of both versions.
    let gemma3 = DecoderConfig::read(&golden("gemma3-tiny")).unwrap();
    let layers: Vec<_> = gemma3.layers.iter().map(|l| (l.window, l.rope)).collect();
    assert_eq!(layers, [(Some(8), 1), (None, 0)]);
    let mut four: Map<String, Value> = read_json(&golden("gemma3-tiny/config.json")).unwrap();
    four.remove("rope_parameters");
    four.remove("layer_types");
    for (field, value) in [
        ("rope_theta", json!(1e6)),
        (
            "rope_scaling",
            json!({"rope_type": "linear", "factor": 8.0}),
        ),
        ("rope_local_base_freq", json!(1e4)),
        ("sliding_window_pattern", json!(2)),
    ] {
        four.insert(field.into(), value);
    }
    assert_eq!(DecoderConfig::from_json(&four).unwrap(), gemma3);
}

/// A written configuration can be read back unchanged.
#[test]
fn written_configs_come_back() {
    let rope = |scaling: Value| llama(json!({"rope_scaling": scaling}));
    for json in [
        llama(json!({})),
        llama(json!({"attention_bias": true, "mlp_bias": true, "tie_word_embeddings": true})),
        llama(json!({"eos_token_id": [1, 2], "pad_token_id": -1})),
        rope(json!({"type": "linear", "factor": 2.0})),
        rope(json!({"type": "dynamic", "factor": 4})),
        rope(json!({"rope_type": "yarn", "factor": 4.0, "beta_fast": 16})),
        rope(
            json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32}),
        ),
        llama(json!({"model_type": "mistral", "architectures": null, "sliding_window": 8})),
        llama(
            json!({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"],
            "sliding_window": 8, "use_sliding_window": true, "max_window_layers": 1}),
        ),
        llama(
            json!({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"],
            "head_dim": 32, "sliding_window": 8, "use_sliding_window": true,
            "max_window_layers": 1}),
        ),
        llama(
            json!({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
            "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 48, "decoder_sparse_step": 2}),
        ),
        llama(
            json!({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"],
            "num_local_experts": 4, "num_experts_per_tok": 2}),
        ),
        gemma3(json!({})),
        gemma3(
            json!({"rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "tie_word_embeddings": false, "attention_bias": true}),
        ),
        gemma3(
            json!({"query_pre_attn_scalar": 22.5, "final_logit_softcapping": 30.0,
            "layer_types": ["full_attention", "full_attention"], "sliding_window": null}),
        ),
        of_type("gemma2", json!({"attn_logit_softcapping": 4.5})),
        of_type("gemma2", json!({"attn_logit_softcapping": null})),
        of_type(
            "gpt_oss",
            json!({"num_local_experts": 4, "num_experts_per_tok": 2, "rope_scaling": {"rope_type":
            "yarn", "factor": 4.0, "truncate": false}, "swiglu_limit": 0.7, "sliding_window": 8}),
        ),
    ] {
        let mut json = json;
        if json["architectures"].is_null() {
            json.as_object_mut().unwrap().remove("architectures");
        }
        let config = read(json.clone()).unwrap_or_else(|e| panic!("{json}: {e:#}"));
        let written = config.to_json("bfloat16");
        assert_eq!(
            DecoderConfig::from_json(&written).unwrap(),
            config,
            "{json}"
        );
    }
}

#[test]
fn windows_of_layers() {
    let windows = |changes: Value| -> Vec<Option<usize>> {
        let layers = read(llama(changes)).unwrap().layers;
        layers.into_iter().map(|layer| layer.window).collect()
    };
    let qwen = |changes: Value| {
        let mut json = json!({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]});
        for (field, value) in changes.as_object().unwrap() {
            json[field] = value.clone();
        }
        windows(json)
    };
    let mistral = json!({"model_type": "mistral", "architectures": ["MistralForCausalLM"]});
    assert_eq!(windows(mistral.clone()), [Some(4096); 2]);
    let mut none = mistral;
    none["sliding_window"] = Value::Null;
    assert_eq!(windows(none), [None; 2]);
    let window = json!({"sliding_window": 8, "use_sliding_window": true});
    assert_eq!(qwen(window.clone()), [None; 2]);
    let mut one = window.clone();
    one["max_window_layers"] = json!(1);
    assert_eq!(qwen(one), [None, Some(8)]);
    let mut types = window;
    types["layer_types"] = json!(["sliding_attention", "full_attention"]);
    assert_eq!(qwen(types), [Some(8), None]);
    assert_eq!(qwen(json!({"sliding_window": 8})), [None; 2]);
}

#[test]
fn counts_are_whole() {
    for (changes, expected) in [
        (
            json!({"max_window_layers": 1.5}),
            "`max_window_layers` is 1.5",
        ),
        (
            json!({"max_window_layers": -1}),
            "`max_window_layers` is -1",
        ),
    ] {
        let error = format!("{:#}", read(llama(changes)).unwrap_err());
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn what_changes_the_arithmetic_is_refused_by_name() {
    for (changes, expected) in [
        (json!({"model_type": "gemma"}), "`model_type` is `gemma`"),
        (
            json!({"architectures": ["Qwen3ForCausalLM"]}),
            "must be LlamaForCausalLM",
        ),
        (
            json!({"hidden_act": "gelu"}),
            "`hidden_act` is `gelu`, but must be `silu`",
        ),
        (
            json!({"num_key_value_heads": 4}),
            "must be a divisor of `num_attention_heads` (6)",
        ),
        (
            json!({"num_key_value_heads": 0}),
            "`num_key_value_heads` is 0",
        ),
        (json!({"hidden_size": null}), "`hidden_size` is absent"),
        (json!({"hidden_size": "96"}), "`hidden_size` is \"96\""),
        (
            json!({"hidden_size": 100}),
            "must be a multiple of `num_attention_heads` (6)",
        ),
        (json!({"head_dim": 15}), "must be even"),
        (json!({"head_dim": 2_147_483_646u32}), "takes at most 256"),
        (
            json!({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"],
            "num_local_experts": 2_147_483_647u32, "num_experts_per_tok": 2}),
            "at most 512",
        ),
        (
            json!({"num_hidden_layers": 1u64 << 40}),
            "`num_hidden_layers`",
        ),
        (
            json!({"partial_rotary_factor": 0.5}),
            "`partial_rotary_factor` is 0.5",
        ),
        (json!({"sliding_window": 5}), "`sliding_window`"),
        (json!({"rms_norm_eps": -1}), "`rms_norm_eps` is -1"),
        (json!({"rope_theta": 0}), "`rope_theta` is 0"),
        (json!({"eos_token_id": "x"}), "`eos_token_id`"),
        (
            json!({"attn_logit_softcapping": 30.0}),
            "`attn_logit_softcapping` (30.0)",
        ),
        (
            json!({"embedding_multiplier": 12.0}),
            "`embedding_multiplier` (12.0)",
        ),
        (json!({"use_qk_norm": true}), "`use_qk_norm` (true)"),
        (json!({"num_experts": 8}), "`num_experts` (8)"),
        (
            json!({"model_type": "mistral", "architectures": null, "attention_bias": true}),
            "`attention_bias` is true",
        ),
        (
            json!({"rope_scaling": {"type": "longrope"}}),
            "must be default, linear",
        ),
        (json!({"rope_scaling": 8}), "`rope_scaling` is 8"),
        (
            json!({"rope_scaling": {"type": "linear"}}),
            "`rope_scaling.factor` is absent",
        ),
        (
            json!({"rope_scaling": {"type": "linear", "factor": 0.5}}),
            "`rope_scaling.factor` is 0.5",
        ),
        (
            json!({"rope_scaling": {"type": "linear", "factor": 2, "warp": 1}}),
            "`rope_scaling` has a field `warp` (1)",
        ),
        (
            json!({"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2}}),
            "`rope_scaling.rope_type` is `linear`, but `rope_scaling.type` is `yarn`",
        ),
        (
            json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
            "`rope_parameters` has a field `full_attention`",
        ),
        (
            json!({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4,
                "high_freq_factor": 4, "original_max_position_embeddings": 32}}),
            "must be less than `high_freq_factor`",
        ),
        (
            json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2,
                "original_max_position_embeddings": 32}}),
            "must be `max_position_embeddings` (256)",
        ),
    ] {
        let error = format!("{:#}", read(llama(changes.clone())).unwrap_err());
        assert!(error.contains(expected), "{changes}: {error}");
    }
    // Neutral values, and unrelated fields.
    read(llama(json!({
        "architectures": [], "pruned_heads": {}, "cross_attention_hidden_size": null,
        "attn_implementation": "flash_attention_2", "is_encoder_decoder": false,
        "chunk_size_feed_forward": 0, "compression_config": {}, "parallel_mode": "",
        "rope_scaling": null, "attn_logit_softcapping": null, "use_qk_norm": false,
        "residual_multiplier": 1.0, "shared_expert_intermediate_size": 0, "pretraining_tp": 2,
        "_attn_implementation": "eager", "my_note": "hello", "attention_dropout": 0.1,
        "router_z_loss_coef": 1e-3, "router_jitter_noise": 0.1, "initializer_factor": 0.5,
    })))
    .unwrap();
}

/// Files for transformers 4 and 5 state the same in both forms, or are refused.
#[test]
fn rope_in_the_fields_of_two_versions() {
    let scaling = json!({"rope_type": "linear", "factor": 2.0});
    let parameters = json!({"rope_type": "linear", "factor": 2, "rope_theta": 500000.0,
        "mrope_section": null});
    let both = |changes: Value| read(llama(changes)).map(|config| config.ropes);
    let one = both(json!({"rope_scaling": scaling})).unwrap();
    let same = both(json!({"rope_scaling": scaling, "rope_parameters": parameters})).unwrap();
    assert_eq!(one, same);
    for (changes, expected) in [
        (
            json!({"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": parameters}),
            "delete the one that is wrong",
        ),
        (
            json!({"rope_scaling": {"type": "default"}, "rope_parameters": parameters}),
            "`rope_scaling` says",
        ),
        (
            json!({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
            "`rope_theta` is 500000, but `rope_parameters.rope_theta` is 1000000",
        ),
    ] {
        let error = format!("{:#}", both(changes.clone()).unwrap_err());
        assert!(error.contains(expected), "{changes}: {error}");
    }
}

/// Fields unknown to the lists and to transformers are refused if their names suggest an effect on
/// the computation.
#[test]
fn unknown_fields_of_the_arithmetic_are_refused() {
    for (field, value) in [
        (
            "compression_config",
            json!({"quant_method": "compressed-tensors"}),
        ),
        ("quantization", json!({"bits": 4})),
        ("is_encoder_decoder", json!(true)),
        ("use_bidirectional_attention", json!(true)),
        ("is_causal", json!(false)),
        ("alibi", json!(true)),
        ("parallel_residual", json!(true)),
        ("lora_rank", json!(8)),
        ("pruned_heads", json!({"0": [1]})),
        ("vision_config", json!({"depth": 2})),
    ] {
        let mut json = llama(json!({}));
        json[field] = value;
        let error = format!("{:#}", read(json).unwrap_err());
        assert!(error.contains(&format!("`{field}`")), "{field}: {error}");
    }
}

#[test]
fn frequencies_of_each_kind() {
    let frequencies = |scaling: Value, positions: usize| {
        let config = read(llama(json!({
            "rope_theta": 10000.0, "head_dim": 16, "rope_scaling": scaling,
        })));
        let rope = config.unwrap().ropes.remove(0);
        (
            rope.frequencies(16, positions).unwrap(),
            rope.attention_factor(),
        )
    };
    let close = |found: &[f32], expected: [f64; 8]| {
        assert_eq!(found.len(), 8);
        for (found, expected) in found.iter().zip(expected) {
            let error = (f64::from(*found) - expected).abs();
            assert!(error <= 3e-7 * expected, "{found}, not {expected}");
        }
    };
    let plain: [f64; 8] = std::array::from_fn(|i| 10f64.powf(-(i as f64) / 2.0));
    close(&frequencies(json!(null), 256).0, plain);
    let linear = json!({"type": "linear", "factor": 4.0});
    close(&frequencies(linear, 256).0, plain.map(|f| f / 4.0));
    // Nothing changes up to `max_position_embeddings`; for twice as many positions, the base is
    // 10000 · (2 · 2 - 1)^(16/14).
    let dynamic = json!({"type": "dynamic", "factor": 2.0});
    close(&frequencies(dynamic.clone(), 100).0, plain);
    let base = 10_000.0 * 3f64.powf(16.0 / 14.0);
    let grown = std::array::from_fn(|i| base.powf(-(i as f64) / 8.0));
    close(&frequencies(dynamic, 512).0, grown);
    // Ramp from pair floor(16 ln(64 / 64π) / (2 ln 10000)) = -1, so 0, to pair
    // ceil(16 ln(64 / 2π) / (2 ln 10000)) = ceil(2.016) = 3.
    let yarn = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
    let (found, factor) = frequencies(yarn, 256);
    let blended = std::array::from_fn(|i| {
        let ramp = (i as f64 / 3.0).min(1.0);
        plain[i] * (ramp / 4.0 + (1.0 - ramp))
    });
    close(&found, blended);
    assert!((factor - (0.1 * 4f64.ln() + 1.0)).abs() < 1e-12);
    let yarn = json!({"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5});
    let expected = (0.1 * 4f64.ln() + 1.0) / (0.05 * 4f64.ln() + 1.0);
    assert!((frequencies(yarn, 256).1 - expected).abs() < 1e-12);
    // Wavelengths of 2π · 10^(i/2): those below 256 / 4 are unscaled, those above 256 / 1 are
    // scaled.
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 256});
    let expected = std::array::from_fn(|i| {
        let wave = 2.0 * std::f64::consts::PI / plain[i];
        match i {
            0..=2 => plain[i],
            3 => {
                let smooth = (256.0 / wave - 1.0) / 3.0;
                plain[i] * ((1.0 - smooth) / 8.0 + smooth)
            }
            _ => plain[i] / 8.0,
        }
    });
    close(&frequencies(llama3, 256).0, expected);
}

#[test]
fn qwen2() {
    let qwen2 = |changes| of_type("qwen2", changes);
    let biases = |json: Value| read(json).unwrap().block.biases;
    let expected = Biases {
        qkv: true,
        ..Biases::default()
    };
    // Neutral fields, and another size of heads.
    assert_eq!(biases(qwen2(json!({}))), expected);
    let neutral = json!({"use_mrope": false, "attention_bias": true, "mlp_bias": false,
        "head_dim": 32, "max_window_layers": 1, "use_sliding_window": false, "sliding_window": 8});
    assert_eq!(biases(qwen2(neutral.clone())), expected);
    let config = read(qwen2(neutral)).unwrap();
    assert_eq!((config.head, config.tied), (32, false));
    assert!(config.layers.iter().all(|layer| layer.window.is_none()));
    let tied = json!({"tie_word_embeddings": true, "num_key_value_heads": null, "head_dim": null});
    let config = read(qwen2(tied)).unwrap();
    assert_eq!((config.head, config.kv_heads, config.tied), (16, 6, true));
    refused(&[
        (
            qwen2(json!({"attention_bias": false})),
            "`attention_bias` is false, but a model of type `qwen2` always has biases",
        ),
        (qwen2(json!({"mlp_bias": true})), "`mlp_bias` is true"),
        (qwen2(json!({"qkv_bias": true})), "`qkv_bias` (true)"),
        (
            qwen2(json!({"dual_chunk_attention_config": {"chunk_size": 8}})),
            "`dual_chunk_attention_config`",
        ),
        (qwen2(json!({"use_mrope": true})), "`use_mrope` (true)"),
        (qwen2(json!({"hidden_act": "gelu"})), "must be `silu`"),
        (
            qwen2(json!({"architectures": ["Qwen2MoeForCausalLM"]})),
            "must be Qwen2ForCausalLM",
        ),
        (qwen2(json!({"num_experts": 4})), "`num_experts` (4)"),
    ]);
}

#[test]
fn gemma() {
    let gemma2 = |changes| of_type("gemma2", changes);
    // Values of the classes where a field is absent.
    let config = read(gemma2(json!({"head_dim": null}))).unwrap();
    assert_eq!((config.head, config.tied), (256, true));
    assert_eq!(config.block.query_scalar, Some(256.0));
    let caps = (config.block.score_cap, config.logit_cap);
    assert_eq!(caps, (Some(50.0), Some(30.0)));
    let windows = |json: Value| -> Vec<Option<usize>> {
        let layers = read(json).unwrap().layers;
        layers.into_iter().map(|layer| layer.window).collect()
    };
    assert_eq!(windows(gemma2(json!({}))), [Some(4096), None]);
    assert_eq!(windows(gemma3(json!({}))), [Some(8), None]);
    let six = json!({"sliding_window_pattern": null});
    assert_eq!(windows(gemma3(six)), [Some(8), Some(8)]);
    // Neutral fields.
    let neutral = json!({"use_bidirectional_attention": false, "attn_logit_softcapping": null,
        "cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh", "mlp_bias": false,
        "_sliding_window_pattern": 6, "hidden_activation": "gelu_pytorch_tanh"});
    let config = read(gemma3(neutral)).unwrap();
    assert!(config.block.score_cap.is_none() && config.logit_cap.is_none());
    assert_eq!([0, 1].map(|i| config.ropes[i].theta), [1e6, 1e4]);
    read(gemma2(
        json!({"sliding_window": 8, "sliding_window_size": 8}),
    ))
    .unwrap();

    let parameters = |sliding: Value| {
        gemma3(json!({"rope_parameters": {
            "full_attention": {"rope_type": "default"}, "sliding_attention": sliding}}))
    };
    read(parameters(
        json!({"rope_type": "default", "rope_theta": 1e4}),
    ))
    .unwrap();
    refused(&[
        (
            json!({"model_type": "gemma3", "text_config": {}}),
            "`model_type` is `gemma3`, a model of texts and images",
        ),
        (
            gemma3(json!({"hidden_activation": "silu"})),
            "`hidden_activation` is `silu`, but must be `gelu_pytorch_tanh`",
        ),
        (
            gemma3(json!({"attn_logit_softcapping": 50.0})),
            "`attn_logit_softcapping` is 50",
        ),
        (
            gemma3(json!({"final_logit_softcapping": 0.0})),
            "`final_logit_softcapping` is 0",
        ),
        (
            gemma3(json!({"use_bidirectional_attention": true})),
            "`use_bidirectional_attention` (true)",
        ),
        (
            gemma3(json!({"query_pre_attn_scalar": 0})),
            "`query_pre_attn_scalar` is 0",
        ),
        (
            gemma3(json!({"sliding_window": null})),
            "`sliding_window` is null",
        ),
        (
            gemma3(json!({"layer_types": ["full_attention"]})),
            "`layer_types` has 1 entries",
        ),
        (gemma3(json!({"mlp_bias": true})), "`mlp_bias` is true"),
        (
            gemma3(json!({"vision_config": {"depth": 2}})),
            "`vision_config`",
        ),
        (
            parameters(json!({"rope_type": "linear", "factor": 2.0})),
            "`rope_parameters.sliding_attention` has a scaling",
        ),
        (
            parameters(json!({"rope_theta": 5e4})),
            "`rope_local_base_freq` is 10000, but",
        ),
        (
            gemma3(json!({"rope_parameters": {"rope_theta": 1e6}})),
            "`rope_parameters` has a field `rope_theta`",
        ),
        (
            gemma2(json!({"sliding_window_pattern": 3})),
            "`sliding_window_pattern` (3)",
        ),
        (
            gemma2(json!({"sliding_window": 8, "sliding_window_size": 4})),
            "`sliding_window_size` is 4, but",
        ),
        (
            gemma2(json!({"rope_local_base_freq": 1e4})),
            "`rope_local_base_freq` (10000.0)",
        ),
    ]);
}

#[test]
fn gpt_oss() {
    let gpt_oss = |changes| {
        let own = json!({"num_local_experts": 4, "num_experts_per_tok": 2,
            "rope_theta": null, "rope_scaling": null});
        changed(of_type("gpt_oss", own), changes)
    };
    // Values of the class where a field is absent.
    let config = read(gpt_oss(json!({"head_dim": null}))).unwrap();
    assert_eq!((config.head, config.tied), (64, false));
    let activation = GateActivation::ClampedSwiGlu {
        alpha: 1.702,
        limit: 7.0,
    };
    assert_eq!(config.block.activation, activation);
    let biases = config.block.biases;
    assert!(biases.qkv && biases.out && biases.experts && config.block.sinks);
    let windows: Vec<_> = config.layers.iter().map(|layer| layer.window).collect();
    assert_eq!(windows, [Some(128), None]);
    let yarn = json!({"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": false, "original_max_position_embeddings": 4096});
    let published = gpt_oss(json!({"rope_scaling": yarn, "rope_theta": 150_000}));
    assert_eq!(config.ropes, read(published).unwrap().ropes);
    // Neutral fields, and those of the published models.
    let neutral = json!({"experts_per_token": 2, "num_experts": 4, "mlp_bias": false,
        "initial_context_length": 4096, "output_router_logits": false, "hidden_act": "silu",
        "swiglu_limit": 7.0, "attention_dropout": 0.0, "head_dim": null, "sliding_window": 128});
    assert_eq!(read(gpt_oss(neutral)).unwrap(), config);
    let mxfp4 = |changes: Value| {
        let own = json!({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]});
        let Value::Object(json) = gpt_oss(json!({"quantization_config": changed(own, changes)}))
        else {
            panic!("an object")
        };
        refuse_quantized(&json)
    };
    mxfp4(json!({"dequantize": false})).unwrap();
    let error = mxfp4(json!({"swizzle": true})).unwrap_err().to_string();
    assert!(error.contains("`quantization_config.swizzle`"), "{error}");
    let error = mxfp4(json!({"quant_method": "fp8"})).unwrap_err();
    assert!(error.to_string().contains("quantized already"), "{error}");
    refused(&[
        (
            gpt_oss(json!({"swiglu_limit": 0})),
            "`swiglu_limit` is 0, but must be positive",
        ),
        (
            gpt_oss(json!({"swiglu_alpha": -1.0})),
            "`swiglu_alpha` is -1, but must be positive",
        ),
        (
            gpt_oss(json!({"swiglu_offset": 2.0})),
            "`swiglu_offset` (2.0)",
        ),
        (
            gpt_oss(json!({"hidden_act": "gelu"})),
            "`hidden_act` is `gelu`, but must be `silu`",
        ),
        (
            gpt_oss(json!({"experts_per_token": 4})),
            "`experts_per_token` is 4, but `num_experts_per_tok` is 2",
        ),
        (
            gpt_oss(json!({"num_experts": 8})),
            "`num_local_experts` is 4, but `num_experts` is 8",
        ),
        (
            gpt_oss(json!({"num_experts_per_tok": 5})),
            "`num_experts_per_tok` is 5, but there are 4 experts",
        ),
        (gpt_oss(json!({"mlp_bias": true})), "`mlp_bias` is true"),
        (
            gpt_oss(json!({"layer_types": ["full_attention", "chunked_attention"]})),
            "`layer_types[1]` is \"chunked_attention\"",
        ),
        (
            gpt_oss(json!({"sliding_window": null,
                "layer_types": ["sliding_attention", "full_attention"]})),
            "`layer_types[0]` is sliding_attention, but there is no `sliding_window`",
        ),
        (
            gpt_oss(json!({"rope_parameters": {"rope_type": "yarn"}})),
            "`rope_parameters.factor` is absent",
        ),
        (
            gpt_oss(json!({"num_shared_experts": 1})),
            "`num_shared_experts` (1)",
        ),
        (
            gpt_oss(json!({"architectures": ["GptOssForSequenceClassification"]})),
            "must be GptOssForCausalLM",
        ),
        (
            of_type("llama", json!({"swiglu_limit": 7.0})),
            "`swiglu_limit` (7.0)",
        ),
    ]);
}
