//! Odd files, as converters write them: absent and neutral keys, keys of other architectures.

use super::*;

type Change = fn(&mut Made);
type Tensors = BTreeMap<String, Vec<f32>>;

/// Replaces the value of `key`.
fn put(made: &mut Made, key: &str, kind: u32, value: &[u8]) {
    remove(made, key);
    made.key(key, kind, value);
}

fn remove(made: &mut Made, key: &str) {
    let start = string(key);
    made.keys.retain(|entry| !entry.starts_with(&start));
}

fn count(made: &mut Made, key: &str, value: u32) {
    put(made, key, 4, &value.to_le_bytes());
}

fn float(made: &mut Made, key: &str, value: f32) {
    put(made, key, 6, &value.to_le_bytes());
}

/// Imports `made`; returns the configuration and the tensors of the folder.
fn imported(made: &Made) -> Result<(DecoderConfig, Tensors)> {
    let folder = Scratch::new("gguf-odd");
    let target = folder.join("out");
    let found = import(&write(&folder, made), &target, Dtype::F32)?;
    assert_eq!(DecoderConfig::read(&target)?, found.config);
    let tensors = TensorFolder::open(&target)?;
    let tensors = tensors.iter();
    let tensors = tensors.map(|it| Ok((it.name.to_owned(), it.to_f32()?)));
    Ok((found.config, tensors.collect::<Result<_>>()?))
}

#[test]
fn what_says_nothing_changes_nothing() {
    let expected = imported(&model()).unwrap();
    let cases: [(&str, Change); 18] = [
        ("keys of another tool", |it| {
            it.key("general.name", 8, &string("a model"));
            it.key("general.quantization_version", 4, &[2, 0, 0, 0]);
            it.key("some.tool.scale", 6, &3f32.to_le_bytes());
        }),
        ("a size of values", |it| {
            count(it, "llama.attention.value_length", 16)
        }),
        ("no rotary dimension", |it| {
            remove(it, "llama.rope.dimension_count")
        }),
        ("no scaling", |it| {
            it.key("llama.rope.scaling.type", 8, &string("none"));
        }),
        ("no scaling, with a factor", |it| {
            it.key("llama.rope.scaling.type", 8, &string("none"));
            float(it, "llama.rope.scaling.factor", 4.0);
        }),
        ("a factor of 1", |it| {
            float(it, "llama.rope.scaling.factor", 1.0)
        }),
        ("an old factor of 1", |it| {
            float(it, "llama.rope.scale_linear", 1.0)
        }),
        ("factors of 1", |it| {
            let ones = 1f32.to_le_bytes().repeat(8);
            it.tensor("rope_freqs.weight", &[8], 0, &ones);
        }),
        ("an attention factor of 1", |it| {
            float(it, "llama.rope.scaling.attn_factor", 1.0);
        }),
        ("no experts", |it| count(it, "llama.expert_count", 0)),
        ("experts in use, of none", |it| {
            count(it, "llama.expert_used_count", 0);
        }),
        ("no window", |it| {
            count(it, "llama.attention.sliding_window", 0)
        }),
        ("no scale of scores", |it| {
            float(it, "llama.attention.scale", 0.0)
        }),
        ("a scale of logits of 1", |it| {
            float(it, "llama.logit_scale", 1.0)
        }),
        ("causal attention", |it| {
            it.key("llama.attention.causal", 7, &[1])
        }),
        ("a size of the vocabulary", |it| {
            count(it, "llama.vocab_size", VOCAB as u32);
        }),
        ("counts of 64 bits", |it| {
            put(it, "llama.block_count", 10, &1u64.to_le_bytes());
        }),
        ("an epsilon of 64 bits", |it| {
            let epsilon = f64::from(1e-5f32).to_le_bytes();
            put(it, "llama.attention.layer_norm_rms_epsilon", 12, &epsilon);
        }),
    ];
    for (what, change) in cases {
        let mut made = model();
        change(&mut made);
        let found = imported(&made).unwrap_or_else(|error| panic!("{what}: {error:#}"));
        assert_eq!(found, expected, "{what}");
    }
}

/// Defaults of llama.cpp, and keys that are obeyed.
#[test]
fn keys_are_obeyed() {
    let config = |change: Change| {
        let mut made = model();
        change(&mut made);
        imported(&made).unwrap().0
    };
    let theta = config(|it| remove(it, "llama.rope.freq_base")).ropes[0].theta;
    assert_eq!(theta, 1e4);
    let scaled = config(|it| {
        it.key("llama.rope.scaling.type", 8, &string("linear"));
        float(it, "llama.rope.scaling.factor", 4.0);
    });
    assert_eq!(scaled.ropes[0].scaling, RopeScaling::Linear { factor: 4.0 });
    let epsilon = config(|it| float(it, "llama.attention.layer_norm_rms_epsilon", 0.5)).epsilon;
    assert_eq!(epsilon, 0.5);
    let untied = config(|it| {
        let head = 1f32.to_le_bytes().repeat(VOCAB * D_MODEL);
        it.tensor("output.weight", &[VOCAB, D_MODEL], 0, &head);
    });
    assert!(!untied.tied);
    let ids = config(|it| {
        remove(it, "tokenizer.ggml.bos_token_id");
        remove(it, "tokenizer.ggml.eos_token_id");
    });
    assert_eq!((ids.bos, ids.eos), (None, vec![]));
}

/// Positions of tensors follow the alignment that the file states.
#[test]
fn alignments() {
    let made = |alignment: u32| {
        let mut made = model();
        count(&mut made, "general.alignment", alignment);
        made
    };
    let expected = imported(&model()).unwrap();
    // The bytes are laid out in steps of 32.
    assert_eq!(imported(&made(32)).unwrap(), expected);
    for alignment in [0, 1 << 20] {
        let error = error_of(&made(alignment));
        assert!(error.contains("`general.alignment` is"), "{error}");
    }
}

#[test]
fn what_changes_the_arithmetic_is_refused_by_name() {
    let cases: [(Change, &str); 32] = [
        (
            |it| put(it, "general.architecture", 8, &string("qwen2")),
            "`general.architecture` is `qwen2`, but must be `llama`",
        ),
        (
            |it| remove(it, "general.architecture"),
            "`general.architecture` is absent",
        ),
        (
            |it| count(it, "llama.attention.sliding_window", 8),
            "`llama.attention.sliding_window` (8)",
        ),
        (
            |it| float(it, "llama.attention.scale", 1.0),
            "`llama.attention.scale` (1)",
        ),
        (
            |it| float(it, "llama.attention.clamp_kqv", 1.0),
            "`llama.attention.clamp_kqv` (1)",
        ),
        (
            |it| float(it, "llama.final_logit_softcapping", 1.0),
            "`llama.final_logit_softcapping` (1)",
        ),
        (
            |it| float(it, "llama.logit_scale", 0.5),
            "`llama.logit_scale` (0.5)",
        ),
        (
            |it| float(it, "llama.rope.scale_linear", 4.0),
            "`llama.rope.scale_linear` (4)",
        ),
        (
            |it| it.key("llama.attention.causal", 7, &[0]),
            "`llama.attention.causal` (false)",
        ),
        (
            |it| it.key("llama.use_parallel_residual", 7, &[1]),
            "`llama.use_parallel_residual` (true)",
        ),
        (
            |it| it.key("llama.rope.scaling.type", 8, &string("yarn")),
            "`llama.rope.scaling` is of type \"yarn\"",
        ),
        (
            |it| it.key("llama.rope.scaling.type", 8, &string("linear")),
            "and factor none",
        ),
        (
            |it| float(it, "llama.rope.freq_base", 0.0),
            "`llama.rope.freq_base` is 0",
        ),
        (
            |it| float(it, "llama.attention.layer_norm_rms_epsilon", 0.0),
            "`rms_norm_eps` is 0, but must be positive",
        ),
        (
            |it| float(it, "llama.attention.layer_norm_rms_epsilon", f32::NAN),
            "a number that config.json cannot hold",
        ),
        (
            |it| remove(it, "llama.attention.layer_norm_rms_epsilon"),
            "`llama.attention.layer_norm_rms_epsilon` is absent",
        ),
        (
            |it| remove(it, "llama.context_length"),
            "`llama.context_length` is absent",
        ),
        (
            |it| count(it, "llama.attention.head_count_kv", 0),
            "2 heads of 16 with 0 of keys and values",
        ),
        (
            |it| {
                let counts = array(4, &[vec![1, 0, 0, 0]]);
                put(it, "llama.attention.head_count_kv", 9, &counts);
            },
            "`llama.attention.head_count_kv` is",
        ),
        (
            |it| remove(it, "llama.attention.head_count_kv"),
            "tensor `blk.0.attn_k.weight` is [16, 64], but must be [32, 64]",
        ),
        (
            |it| count(it, "llama.attention.value_length", 32),
            "`llama.attention.value_length` is 32, but must be 16",
        ),
        (
            |it| count(it, "llama.rope.dimension_count", 8),
            "`llama.rope.dimension_count` is 8, but must be 16",
        ),
        (
            |it| remove(it, "llama.attention.key_length"),
            "`llama.rope.dimension_count` is 16, but must be 32",
        ),
        (
            |it| count(it, "llama.block_count", 2),
            "no tensor `blk.1.attn_q.weight`",
        ),
        (
            |it| count(it, "llama.feed_forward_length", 128),
            "tensor `blk.0.ffn_gate.weight` is [64, 64], but must be [128, 64]",
        ),
        (
            |it| count(it, "llama.expert_count", 8),
            "models with experts are not imported",
        ),
        (
            |it| it.tensor("blk.0.attn_q.bias", &[32], 0, &[0; 128]),
            "`blk.0.attn_q.bias`",
        ),
        (
            |it| it.tensor("blk.1.attn_norm.weight", &[64], 0, &[0; 256]),
            "`blk.1.attn_norm.weight`",
        ),
        (
            |it| it.tensor("blk.0.attn_q_norm.weight", &[16], 0, &[0; 64]),
            "`blk.0.attn_q_norm.weight`",
        ),
        (
            |it| it.replace("output_norm.weight", &[64], 19, &[0; 64]),
            "tensor `output_norm.weight`: its type has number 19",
        ),
        (
            |it| count(it, "tokenizer.ggml.eos_token_id", 99),
            "`eos_token_id` is 99",
        ),
        (
            |it| it.tensor("rope_freqs.weight", &[4], 0, &1f32.to_le_bytes().repeat(4)),
            "it has 4 factors, but heads of 16 have 8",
        ),
    ];
    for (index, (change, says)) in cases.into_iter().enumerate() {
        let mut made = model();
        change(&mut made);
        let error = error_of(&made);
        assert!(error.contains(says), "case {index}: {error}\nnot: {says}");
    }
}
