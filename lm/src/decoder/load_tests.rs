//! Tests folders whose configuration is incomplete or does not match their tensors.

use burn::module::ParamGroup;
use burn::tensor::{Device, FloatDType};
use burn_nvfp4::Nvfp4Recipe;
use serde_json::json;

use super::projection::Projection;
use super::*;
use crate::hf::Dtype;
use crate::hf::variant::Variant;
use crate::interchange::{Checkpoint, Scheme};
use nvfp4_test_support::{Scratch, golden};

const NORM: &str = "model.layers.1.input_layernorm.weight";

/// Returns a folder of this thread, because tests share helpers.
fn scratch(name: &str) -> Scratch {
    Scratch::new(&format!("{name}-{:?}", std::thread::current().id()))
}

/// Loads the folder in the same way as inference.
fn load(folder: &std::path::Path) -> anyhow::Result<Decoder> {
    Decoder::load_for_inference(folder, &Device::flex(), FloatDType::F32, None)
}

fn refused(variant: &Variant, says: &[&str]) {
    let folder = scratch("load-refused");
    variant.write(&folder);
    let error = format!("{:#}", load(&folder).map(drop).unwrap_err());
    for part in says {
        assert!(error.contains(part), "does not say {part:?}: {error}");
    }
    // A scan without loading the model reports the same problems.
    let problems = Checkpoint::scan(&folder).unwrap().problems().to_vec();
    let all = format!("{problems:?}");
    for part in says {
        assert!(all.contains(part), "inspect does not say {part:?}: {all}");
    }
}

/// In plain folders and both dialects, any tensor unknown to the model is an error.
#[test]
fn every_tensor_is_used_or_refused() {
    let root = golden("");
    for name in [
        "llama3-tiny",
        "llama3-tiny-ct-nvfp4a16",
        "llama3-tiny-modelopt-nvfp4",
        "qwen3moe-tiny-modelopt-nvfp4",
    ] {
        let source = root.join(name);
        for extra in [
            "model.layers.0.self_attn.q_proj.bias",
            "model.layers.0.self_attn.sinks",
            "model.layers.2.input_layernorm.weight",
            "model.extra.weight",
            "lm_head.bias",
        ] {
            let mut variant = Variant::of(&source);
            variant.fill(extra, &[16], 1.0);
            refused(&variant, &["unknown", &format!("`{extra}`")]);
        }
        let mut variant = Variant::of(&source);
        variant.tensors.remove(NORM);
        refused(&variant, &["missing", NORM]);
        let mut variant = Variant::of(&source);
        variant.fill(NORM, &[48], 1.0);
        refused(&variant, &[NORM, "[48]"]);
        // A tensor from the list of those without a meaning.
        let mut variant = Variant::of(&source);
        let unused = "model.layers.0.self_attn.rotary_emb.inv_freq";
        variant.fill(unused, &[8], 1.0);
        let folder = Scratch::new("load-unused");
        variant.write(&folder);
        load(&folder).unwrap();
        let checkpoint = Checkpoint::scan(&folder).unwrap();
        assert_eq!(checkpoint.unused()[0].0, unused);
        assert_eq!(checkpoint.problems(), []);
    }
    // A separate head despite tied embeddings.
    for name in ["qwen3-tiny", "qwen3-tiny-ct-nvfp4"] {
        let mut variant = Variant::of(&root.join(name));
        let embedding = variant.tensors["model.embed_tokens.weight"].clone();
        variant.tensors.insert("lm_head.weight".into(), embedding);
        let folder = Scratch::new("load-tied");
        variant.write(&folder);
        load(&folder).unwrap();
        variant.set("lm_head.weight", 3, 7.0);
        refused(&variant, &["`lm_head.weight`", "tie_word_embeddings"]);
    }
}

/// The prefix of torch.compile, an extra layer in the configuration, another width.
#[test]
fn tensors_of_another_model_are_refused() {
    let mut variant = Variant::of(&golden("llama3-tiny"));
    let tensors = std::mem::take(&mut variant.tensors);
    let renamed = tensors
        .iter()
        .map(|(name, tensor)| (format!("_orig_mod.{name}"), tensor.clone()));
    variant.tensors = renamed.collect();
    refused(
        &variant,
        &["21 tensors are missing", "_orig_mod.lm_head.weight"],
    );
    variant.tensors = tensors;
    variant.json["num_hidden_layers"] = json!(3);
    refused(&variant, &["9 tensors are missing", "model.layers.2."]);
    variant.json["num_hidden_layers"] = json!(2);
    variant.json["intermediate_size"] = json!(176);
    refused(&variant, &["6 tensors are not", "[160, 96], not [176, 96]"]);
}

/// Biases that are missing or of another rank, norms of another family, another number of heads.
#[test]
fn tensors_of_another_family_are_refused() {
    let (bias, post) = (
        "model.layers.0.self_attn.k_proj.bias",
        "model.layers.1.post_feedforward_layernorm.weight",
    );
    let mut qwen = Variant::of(&golden("qwen2-tiny"));
    qwen.fill(bias, &[1, 32], 1.0);
    refused(&qwen, &[bias, "[1, 32], not [32]"]);
    qwen.tensors.remove(bias);
    refused(&qwen, &["1 tensor is missing", bias]);
    let mut qwen = Variant::of(&golden("qwen2-tiny"));
    qwen.fill("model.layers.0.self_attn.o_proj.bias", &[64], 1.0);
    refused(&qwen, &["unknown", "o_proj.bias"]);
    let mut qwen = Variant::of(&golden("qwen2-tiny"));
    qwen.json["head_dim"] = json!(32);
    refused(&qwen, &["[64, 64], not [128, 64]"]);
    qwen.json["head_dim"] = json!(null);
    qwen.json["tie_word_embeddings"] = json!(false);
    refused(&qwen, &["missing", "`lm_head.weight`"]);
    for name in ["gemma2-tiny", "gemma3-tiny"] {
        let mut gemma = Variant::of(&golden(name));
        gemma.tensors.remove(post);
        refused(&gemma, &["1 tensor is missing", post]);
        gemma.fill(post, &[1, 64], 1.0);
        refused(&gemma, &[post, "[1, 64], not [64]"]);
    }
    let mut gemma = Variant::of(&golden("gemma3-tiny"));
    gemma.json["model_type"] = json!("gemma2");
    gemma.json["architectures"] = json!(["Gemma2ForCausalLM"]);
    gemma.json["rope_parameters"] = json!({"rope_theta": 1e4});
    refused(&gemma, &["4 tensors are unknown", "self_attn.k_norm"]);
}

#[test]
fn tensors_of_latent_attention_and_its_router_are_checked() {
    let correction = "model.layers.1.mlp.gate.e_score_correction_bias";
    let source = golden("deepseek3-tiny");
    for name in [
        correction,
        "model.layers.0.self_attn.kv_a_layernorm.weight",
        "model.layers.1.mlp.shared_experts.down_proj.weight",
        "model.layers.1.mlp.experts.7.up_proj.weight",
    ] {
        let mut variant = Variant::of(&source);
        variant.tensors.remove(name);
        refused(&variant, &["1 tensor is missing", name]);
    }
    let mut variant = Variant::of(&source);
    variant.json["kv_lora_rank"] = json!(16);
    refused(
        &variant,
        &[
            "kv_a_proj_with_mqa.weight` is [48, 64], not [32, 64]",
            "kv_b_proj.weight` is [128, 32], not [128, 16]",
        ],
    );
    let mut variant = Variant::of(&source);
    variant.json["q_lora_rank"] = json!(null);
    refused(
        &variant,
        &["self_attn.q_proj.weight` [128, 64]", "q_a_proj"],
    );
    let mut variant = Variant::of(&source);
    let bias = variant.tensors.get_mut(correction).unwrap();
    bias.2[4..8].copy_from_slice(&f32::NAN.to_le_bytes());
    refused(&variant, &[correction, "the value at 1 is NaN"]);

    // Layers that predict further tokens are ignored, but only where the configuration has them.
    let mut variant = Variant::of(&source);
    variant.fill("model.layers.2.eh_proj.weight", &[64, 128], 1.0);
    refused(&variant, &["1 tensor is unknown", "model.layers.2.eh_proj"]);
    variant.json["num_nextn_predict_layers"] = json!(1);
    let folder = Scratch::new("load-mtp");
    variant.write(&folder);
    let ids = || Tensor::<2, Int>::from_data([[5, 3, 8]], &Device::flex());
    let [model, without] = [&*folder, &source].map(|folder| load(folder).unwrap());
    let found = model.forward(ids()).unwrap().into_data();
    assert_eq!(found, without.forward(ids()).unwrap().into_data());
    let saved = folder.join("saved");
    model.save(&saved, Dtype::BF16, Some(&folder)).unwrap();
    assert_eq!(load(&saved).unwrap().config().extra_layers, 0);
}

#[test]
fn values_that_are_not_finite_are_refused_by_their_place() {
    let root = golden("");
    for (name, tensor, says) in [
        ("llama3-tiny", NORM, "the value at 3 is NaN"),
        ("llama3-tiny-ct-nvfp4", NORM, "the value at 3 is NaN"),
        (
            "llama3-tiny-modelopt-nvfp4",
            "lm_head.weight",
            "row 0, column 3",
        ),
        (
            "llama3-tiny",
            "model.embed_tokens.weight",
            "row 0, column 3",
        ),
        (
            "llama3-tiny",
            "model.layers.0.mlp.up_proj.weight",
            "row 0, column 3",
        ),
    ] {
        let mut variant = Variant::of(&root.join(name));
        variant.set(tensor, 3, f32::NAN);
        refused(&variant, &[tensor, says]);
        variant.set(tensor, 3, f32::INFINITY);
        refused(&variant, &[tensor, "is inf"]);
    }
    // Finite, but not in the computation type.
    let folder = Scratch::new("load-f16");
    let mut variant = Variant::of(&root.join("llama3-tiny"));
    variant.set(NORM, 3, 1e5);
    variant.write(&folder);
    let error = Decoder::load(&folder, &Device::flex(), FloatDType::F16);
    let error = format!("{:#}", error.map(drop).unwrap_err());
    assert!(error.contains(NORM) && error.contains("f16"), "{error}");
}

/// Returns a model with a feed-forward of width 100.
fn odd() -> Variant {
    let mut variant = Variant::of(&golden("llama3-tiny"));
    variant.json["intermediate_size"] = json!(100);
    for layer in 0..2 {
        for (name, shape, value) in [
            ("gate", [100, 96], 0.05),
            ("up", [100, 96], -0.03),
            ("down", [96, 100], 0.02),
        ] {
            let name = format!("model.layers.{layer}.mlp.{name}_proj.weight");
            variant.fill(&name, &shape, value);
        }
    }
    variant
}

/// Errors name the modules, the field, and a remedy.
#[test]
fn widths_that_are_no_multiple_of_16_are_named() {
    let folder = Scratch::new("load-odd");
    odd().write(&folder);
    let device = Device::flex();
    let model = || Decoder::load(&folder, &device, FloatDType::F32).unwrap();
    let recipe = Nvfp4Recipe::preset("nvidia").unwrap();
    let error = model().into_training(&recipe, FloatDType::F32).map(drop);
    let error = format!("{:#}", error.unwrap_err());
    for part in [
        "model.layers.0.mlp.gate_proj [100, 96]",
        "model.layers.0.mlp.up_proj",
        "`intermediate_size` is 100",
        "--high-precision feed_forward",
    ] {
        assert!(error.contains(part), "{error}");
    }
    // With a pattern for all of them, and with further layers.
    for pattern in ["feed_forward", r"gate_up|down|layers\.1\.attention"] {
        let kept = ParamGroup::from_any_regexes(vec![pattern]).unwrap();
        let recipe = recipe.clone().with_high_precision(Some(kept));
        let made = model().into_training(&recipe, FloatDType::F32).unwrap();
        assert!(matches!(made.layers[0].attention.qkv, Projection::Nvfp4(_)));
    }
    let kept = ParamGroup::from_any_regexes(vec!["gate_up"]).unwrap();
    let error = model().into_training(
        &recipe.clone().with_high_precision(Some(kept)),
        FloatDType::F32,
    );
    let error = format!("{:#}", error.map(drop).unwrap_err());
    assert!(error.contains("down_proj [96, 100]"), "{error}");
    model()
        .into_training(&Nvfp4Recipe::bf16(), FloatDType::F32)
        .unwrap();
    let error = Decoder::load_quantizing(&folder, &device, FloatDType::F32, Scheme::W4a16);
    let error = format!("{:#}", error.map(drop).unwrap_err());
    assert!(
        error.contains("gate_proj") && error.contains("`intermediate_size`"),
        "{error}"
    );
}
