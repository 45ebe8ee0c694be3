use std::fs;
use std::path::Path;

use burn::tensor::TensorData;

use super::*;
use crate::hf::{Dtype, StoredTensor, TensorFolder, TensorWriter};
use nvfp4_test_support::{Scratch, golden, golden_with_tokenizer};

fn flex() -> Device {
    Device::flex()
}

fn load(folder: &Path) -> Decoder {
    Decoder::load(folder, &flex(), FloatDType::F32).unwrap()
}

fn integers(tensor: StoredTensor) -> Vec<i64> {
    assert_eq!(tensor.dtype, Dtype::I64, "{tensor}");
    let bytes = tensor.bytes();
    let (numbers, _) = bytes.as_chunks();
    numbers
        .iter()
        .map(|bytes| i64::from_le_bytes(*bytes))
        .collect()
}

fn tokens(ids: &[i64], batch: usize) -> Tensor<2, Int> {
    let data = TensorData::new(ids.to_vec(), [batch, ids.len() / batch]);
    Tensor::from_data(data, &flex())
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().unwrap()
}

/// Returns the largest difference, as a share of the largest value.
fn distance(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
    let pairs = found.iter().zip(expected);
    pairs.fold(0f32, |most, (a, b)| most.max((a - b).abs())) / largest
}

/// Returns columns `range` of rows of `width`.
fn columns(x: &[i64], width: usize, range: std::ops::Range<usize>) -> Vec<i64> {
    x.chunks(width)
        .flat_map(|row| row[range.clone()].to_vec())
        .collect()
}

/// Compares logits, negative log-likelihoods and greedy tokens with those of transformers, all in
/// f32.
fn matches_transformers(folder: &Path) {
    let model = load(folder);
    let reference = TensorFolder::open_file(&folder.join("reference.safetensors")).unwrap();
    let ids = integers(reference.get("input_ids").unwrap());
    let expected = reference.get("logits_f32").unwrap().to_f32().unwrap();

    let logits = values(model.forward(tokens(&ids, 2)).unwrap());
    let error = distance(&logits, &expected);
    assert!(error < 1e-4, "logits differ by {error}");

    let nll = reference.get("nll_f64").unwrap().to_f32().unwrap();
    let vocab = model.config().vocab;
    for row in 0..2 {
        for i in 0..31 {
            let position = row * 32 + i;
            let logits = &logits[position * vocab..][..vocab];
            let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
            let target = ids[position + 1] as usize;
            let found = sum.ln() - f64::from(logits[target]);
            let expected = f64::from(nll[row * 31 + i]);
            assert!((found - expected).abs() < 1e-5, "{found}, not {expected}");
        }
    }

    // In chunks of 5 with a cache; the last chunk has 2 tokens in a row of 5.
    let mut cache = model.cache(2, 40).unwrap();
    let mut found = vec![Vec::new(); 2];
    for first in (0..32).step_by(5) {
        let count = 5.min(32 - first);
        let mut chunk = columns(&ids, 32, first..first + count);
        if count < 5 {
            let rows = chunk
                .chunks(count)
                .map(|row| [row, &vec![0; 5 - count]].concat());
            chunk = rows.flatten().collect();
        }
        let logits = model
            .forward_cached(tokens(&chunk, 2), &[count; 2], &mut cache)
            .unwrap();
        for (row, logits) in values(logits).chunks(5 * vocab).enumerate() {
            found[row].extend(&logits[..count * vocab]);
        }
    }
    assert_eq!(cache.lengths(), [32, 32]);
    let error = distance(&found.concat(), &logits);
    assert!(error < 1e-5, "with a cache logits differ by {error}");

    // Greedy. transformers' `generate` treated token 0 as padding, which occurs once in the second
    // row: it was masked and had no position, as if absent. The texts of models with a window, which
    // counts masked tokens, lack it.
    let greedy = integers(reference.get("greedy_24_from_first_16").unwrap());
    let prompts: Vec<Vec<u32>> = ids
        .chunks(32)
        .map(|row| {
            row[..16]
                .iter()
                .filter(|t| **t != 0)
                .map(|t| *t as u32)
                .collect()
        })
        .collect();
    let has_window = model.config().layers.iter().any(|l| l.window.is_some());
    let second = if has_window { 16 } else { 15 };
    assert_eq!((prompts[0].len(), prompts[1].len()), (16, second));
    for (row, prompt) in prompts.iter().enumerate() {
        let expected: Vec<u32> = greedy[row * 40 + 16..][..24]
            .iter()
            .map(|t| *t as u32)
            .collect();
        let mut text = prompt.clone();
        for expected in &expected[..4] {
            let ids: Vec<i64> = text.iter().map(|t| i64::from(*t)).collect();
            let logits = values(model.forward(tokens(&ids, 1)).unwrap());
            let last = &logits[logits.len() - vocab..];
            let best = (0..vocab).fold(0, |b, i| if last[i] > last[b] { i } else { b });
            assert_eq!(best as u32, *expected, "without a cache");
            text.push(best as u32);
        }
    }
    let found = model
        .generate(&prompts, &Generation::greedy(24).with_chunk(7), |_, _| {
            Ok(true)
        })
        .unwrap();
    for (row, found) in found.iter().enumerate() {
        let expected: Vec<u32> = greedy[row * 40 + 16..][..24]
            .iter()
            .map(|t| *t as u32)
            .collect();
        assert_eq!(*found, expected, "row {row}");
    }
    // Prompts of different lengths in one batch give the same results as alone.
    let uneven = [prompts[0].clone(), prompts[1][..9].to_vec()];
    let together = model
        .generate(&uneven, &Generation::greedy(6).with_chunk(5), |_, _| {
            Ok(true)
        })
        .unwrap();
    assert_eq!(together[0], found[0][..6]);
    let alone = model
        .generate(&uneven[1..], &Generation::greedy(6), |_, _| Ok(true))
        .unwrap();
    assert_eq!(together[1], alone[0]);
}

#[test]
fn llama3_matches_transformers() {
    matches_transformers(&golden("llama3-tiny"));
}

#[test]
fn qwen2_matches_transformers() {
    matches_transformers(&golden("qwen2-tiny"));
}

#[test]
fn qwen3_matches_transformers() {
    matches_transformers(&golden("qwen3-tiny"));
}

#[test]
fn qwen3_moe_matches_transformers() {
    matches_transformers(&golden("qwen3moe-tiny"));
}

/// Layers with and without a window, with different rotary embeddings, and norms of outputs.
#[test]
fn gemma3_matches_transformers() {
    matches_transformers(&golden("gemma3-tiny"));
}

/// Soft caps of scores and logits.
#[test]
fn gemma2_matches_transformers() {
    matches_transformers(&golden("gemma2-tiny"));
}

/// Latent attention, a sigmoid router with groups, shared experts, and a dense first layer.
#[test]
fn deepseek3_matches_transformers() {
    matches_transformers(&golden("deepseek3-tiny"));
}

/// Weights in FP8 with scales of blocks.
#[test]
fn deepseek3_in_fp8_matches_transformers() {
    matches_transformers(&golden("deepseek3-tiny-fp8"));
}

#[test]
fn mixtral_matches_transformers() {
    matches_transformers(&golden("mixtral-tiny"));
}

/// Sinks, biases of all projections, and experts in one tensor.
#[test]
fn gpt_oss_matches_transformers() {
    matches_transformers(&golden("gptoss-tiny"));
}

#[test]
fn gpt_oss_in_mxfp4_matches_transformers() {
    matches_transformers(&golden("gptoss-tiny-mxfp4"));
}

/// A model saved in the type of its source has the same bytes, regardless of its type in memory.
fn saves_the_same_bytes(source: &Path, dtype: FloatDType) {
    let model = Decoder::load(source, &flex(), dtype).unwrap();
    let name = source.file_name().unwrap().to_str().unwrap();
    let scratch = Scratch::new(&format!("save-{name}-{dtype:?}"));
    let target = scratch.join("model");
    model.save(&target, Dtype::BF16, Some(source)).unwrap();
    let (old, new) = (
        TensorFolder::open(source).unwrap(),
        TensorFolder::open(&target).unwrap(),
    );
    assert_eq!(old.len(), new.len());
    for (old, new) in old.iter().zip(new.iter()) {
        assert_eq!(
            (old.name, old.dtype, old.shape),
            (new.name, new.dtype, new.shape)
        );
        assert!(old.bytes() == new.bytes(), "{}", old.name);
    }
    let whole = "model.safetensors";
    if source.join(whole).exists() {
        let bytes = |folder: &Path| fs::read(folder.join(whole)).unwrap();
        assert!(bytes(source) == bytes(&target), "the header differs");
    }
    for file in ["tokenizer.json", "generation_config.json"] {
        let bytes = |folder: &Path| fs::read(folder.join(file)).unwrap();
        assert_eq!(bytes(source), bytes(&target), "{file}");
    }
    assert_eq!(DecoderConfig::read(&target).unwrap(), *model.config());
    let error = model
        .save(&target, Dtype::BF16, None)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("must not exist or be an empty folder"),
        "{error}"
    );
    assert_eq!(
        fs::read_dir(&*scratch).unwrap().count(),
        1,
        "something is left"
    );
}

#[test]
fn saved_models_have_the_bytes_that_were_loaded() {
    for name in [
        "llama3-tiny",
        "qwen2-tiny",
        "qwen3-tiny",
        "qwen3moe-tiny",
        "mixtral-tiny",
        "gemma2-tiny",
        "gemma3-tiny",
        "deepseek3-tiny",
        "gptoss-tiny",
    ] {
        saves_the_same_bytes(&golden_with_tokenizer(name), FloatDType::F32);
    }
    saves_the_same_bytes(&golden("llama3-tiny"), FloatDType::BF16);
}

#[test]
fn tensors_that_do_not_fit_are_all_named() {
    let source = golden("llama3-tiny");
    let folder = Scratch::new("misfit");
    fs::copy(source.join("config.json"), folder.join("config.json")).unwrap();
    let mut writer = TensorWriter::create(&folder, TensorWriter::SHARD_BYTES).unwrap();
    for tensor in TensorFolder::open(&source).unwrap().iter() {
        let (name, shape, bytes) = (tensor.name, tensor.shape, &*tensor.bytes());
        match name {
            "model.norm.weight" => continue,
            "model.layers.1.mlp.up_proj.weight" => {
                writer
                    .add(name, tensor.dtype, &[shape[1], shape[0]], bytes)
                    .unwrap();
            }
            "lm_head.weight" => {
                let shape = [shape[0], shape[1] * 2];
                writer.add(name, Dtype::U8, &shape, bytes).unwrap();
            }
            _ => writer.add(name, tensor.dtype, shape, bytes).unwrap(),
        }
    }
    writer
        .add("model.layers.2.extra", Dtype::F32, &[1], &[0; 4])
        .unwrap();
    let frequencies = "model.layers.0.self_attn.rotary_emb.inv_freq";
    writer.add(frequencies, Dtype::F32, &[1], &[0; 4]).unwrap();
    writer.finish().unwrap();
    let error = Decoder::load(&folder, &flex(), FloatDType::F32).unwrap_err();
    let error = format!("{error:#}");
    for expected in [
        "1 tensor is missing: `model.norm.weight` [96]",
        "2 tensors are not what the configuration says: `model.layers.1.mlp.up_proj.weight` is \
         [96, 160], not [160, 96]",
        "`lm_head.weight` is [288, 192], not [288, 96]",
        "1 tensor is unknown: `model.layers.2.extra`",
    ] {
        assert!(error.contains(expected), "{error}\nnot: {expected}");
    }
    assert!(!error.contains("inv_freq"), "{error}");
}

/// Writes a small Llama with `changes` to its configuration and generated values; those of biases
/// are multiplied by `bias`.
fn made(folder: &Path, changes: serde_json::Value, bias: f32) {
    let mut json = serde_json::json!({
        "model_type": "llama", "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    });
    for (field, value) in changes.as_object().unwrap() {
        json[field] = value.clone();
    }
    fs::write(folder.join("config.json"), json.to_string()).unwrap();
    let config = DecoderConfig::read(folder).unwrap();
    let mut writer = TensorWriter::create(folder, TensorWriter::SHARD_BYTES).unwrap();
    for (seed, tensor) in names::expected(&config).iter().enumerate() {
        let scale = if tensor.name.ends_with(".bias") {
            bias
        } else {
            0.25
        };
        let value = |i: usize| ((i * 7919 + seed * 104_729) % 1009) as f32 / 504.5 - 1.0;
        let count = tensor.shape.iter().product();
        let bytes = (0..count).flat_map(|i| (value(i) * scale).to_le_bytes());
        let bytes: Vec<u8> = bytes.collect();
        writer
            .add(&tensor.name, Dtype::F32, &tensor.shape, &bytes)
            .unwrap();
    }
    writer.finish().unwrap();
}

/// Features absent from the golden folders: biases, dense layers among layers with experts, and
/// rotary embeddings that depend on the length. Saving preserves the bytes; a cache preserves the
/// logits.
#[test]
fn rare_parts_load_save_and_run() {
    let experts = serde_json::json!({
        "model_type": "qwen3_moe", "head_dim": 16, "num_experts": 3, "num_experts_per_tok": 3,
        "moe_intermediate_size": 16, "norm_topk_prob": false, "mlp_only_layers": [0],
    });
    let biases = serde_json::json!({"attention_bias": true, "mlp_bias": true});
    let yarn = serde_json::json!({"rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}});
    // One projection of queries, heads of values wider than those of keys, neither of them a
    // multiple of 16, all groups, weights that are not divided by their sum.
    let latent = serde_json::json!({
        "model_type": "deepseek_v3", "num_key_value_heads": 2, "q_lora_rank": null,
        "kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 20,
        "rope_interleave": false, "first_k_dense_replace": 0, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 0,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": false, "routed_scaling_factor": 1.5,
    });
    let all = [
        ("experts", experts),
        ("biases", biases),
        ("yarn", yarn),
        ("latent", latent),
    ];
    for (name, changes) in all {
        let scratch = Scratch::new(&format!("rare-{name}"));
        made(&scratch, changes, 0.25);
        let model = load(&scratch);
        let ids: Vec<i64> = (0..20).map(|i| (i * 37 + 5) % 48).collect();
        let all = values(model.forward(tokens(&ids, 1)).unwrap());
        assert!(all.iter().all(|logit| logit.is_finite()), "{name}");
        // A few tokens at a time, and more.
        for size in [6, 11] {
            let mut cache = model.cache(1, 20).unwrap();
            let mut found = Vec::new();
            for chunk in ids.chunks(size) {
                let logits = model.forward_cached(tokens(chunk, 1), &[chunk.len()], &mut cache);
                found.extend(values(logits.unwrap()));
            }
            assert!(distance(&found, &all) < 1e-5, "{name}, {size}");
        }
        let target = scratch.join("saved");
        model.save(&target, Dtype::F32, None).unwrap();
        let whole = |folder: &Path| fs::read(folder.join("model.safetensors")).unwrap();
        assert!(whole(&scratch) == whole(&target), "{name}");
        assert_eq!(
            DecoderConfig::read(&target).unwrap(),
            *model.config(),
            "{name}"
        );
    }
}

#[test]
fn biases_are_added() {
    let biased = serde_json::json!({"attention_bias": true, "mlp_bias": true});
    let run = |name: &str, changes: serde_json::Value, bias: f32| {
        let scratch = Scratch::new(name);
        made(&scratch, changes, bias);
        values(load(&scratch).forward(tokens(&[3, 1, 4, 1, 5], 1)).unwrap())
    };
    let zero = run("bias-zero", biased.clone(), 0.0);
    assert!(distance(&run("bias-some", biased, 0.25), &zero) > 1e-2);
}

#[test]
fn a_window_is_the_same_with_and_without_a_cache() {
    let source = golden("mixtral-tiny");
    let folder = Scratch::new("window");
    for file in fs::read_dir(&source).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), folder.join(file.file_name())).unwrap();
    }
    let path = folder.join("config.json");
    let mut config: serde_json::Map<String, serde_json::Value> =
        crate::checkpoint::read_json(&path).unwrap();
    config.insert("sliding_window".into(), 4.into());
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    fs::write(&path, serde_json::to_vec(&config).unwrap()).unwrap();
    let (model, full) = (load(&folder), load(&source));
    let ids: Vec<i64> = (0..24).map(|i| (i * 37 + 5) % 288).collect();
    let all = values(model.forward(tokens(&ids, 1)).unwrap());
    let without = values(full.forward(tokens(&ids, 1)).unwrap());
    let vocab = 288;
    // The first four tokens attend to the same tokens as without a window.
    assert!(distance(&all[..4 * vocab], &without[..4 * vocab]) < 1e-6);
    assert!(distance(&all[4 * vocab..5 * vocab], &without[4 * vocab..5 * vocab]) > 1e-3);
    let mut cache = model.cache(1, 24).unwrap();
    let mut found = Vec::new();
    for chunk in ids.chunks(1) {
        let logits = model
            .forward_cached(tokens(chunk, 1), &[1], &mut cache)
            .unwrap();
        found.extend(values(logits));
    }
    assert!(distance(&found, &all) < 1e-5);
    let error = model
        .forward_cached(tokens(&[1], 1), &[1], &mut cache)
        .unwrap_err();
    assert!(error.to_string().contains("room for 24"), "{error}");
    cache.truncate(0, 3);
    let again = values(
        model
            .forward_cached(tokens(&ids[3..4], 1), &[1], &mut cache)
            .unwrap(),
    );
    assert!(distance(&again, &all[3 * vocab..4 * vocab]) < 1e-5);
}
