//! Tests the checks before quantization, and that this crate can read the output.

use std::path::Path;

use burn::tensor::{Device, FloatDType};
use regex::Regex;
use serde_json::json;

use anyhow::Result;

use super::*;
use crate::decoder::Decoder;
use crate::hf::variant::Variant;
use crate::hf::{Dtype, TensorFolder};
use crate::interchange::{Checkpoint, Dialect, Scheme, convert};
use crate::quantize::journal::MadeFrom;
use crate::quantize::plan::Kept;
use nvfp4_test_support::{Scratch, golden};

fn options(exclude: &[&str]) -> QuantizeOptions {
    let exclude = exclude.iter().map(|pattern| Regex::new(pattern).unwrap());
    QuantizeOptions {
        dialect: Dialect::CompressedTensors,
        scheme: Scheme::W4a16,
        method: Method::Search,
        exclude: exclude.collect(),
        fp8: vec![],
        formats: None,
        input_scale: None,
        kv_cache_fp8: false,
        smooth: Smoothing::None,
    }
}

fn quantize(model: &Path, out: &Path, options: &QuantizeOptions) -> Result<Quantized> {
    let none = Calibration::new();
    quantize_folder(model, out, options, &none)
}

/// Loads the output in the same way as `nvfp4 eval`.
fn reads(folder: &Path) {
    Decoder::load_for_inference(folder, &Device::flex(), FloatDType::F32, None).unwrap();
}

/// Asserts that quantization is refused and writes nothing.
fn refused(variant: &Variant, exclude: &[&str], says: &[&str]) {
    let scratch = Scratch::new(&format!(
        "quantize-refused-{:?}",
        std::thread::current().id()
    ));
    let (model, out) = (scratch.join("model"), scratch.join("out"));
    variant.write(&model);
    let error = format!(
        "{:#}",
        quantize(&model, &out, &options(exclude)).unwrap_err()
    );
    for part in says {
        assert!(error.contains(part), "does not say {part:?}: {error}");
    }
    assert!(!out.exists(), "{error}");
}

#[test]
fn what_is_no_known_model_is_refused() {
    let mut variant = Variant::of(&golden("llama3-tiny"));
    variant.json["model_type"] = json!("opt");
    refused(&variant, &[], &["`model_type` is `opt`", "llama"]);
    let mut variant = Variant::of(&golden("llama3-tiny"));
    variant.json["num_hidden_layers"] = json!(1);
    refused(&variant, &[], &["9 tensors are unknown", "model.layers.1."]);
    let mut variant = Variant::of(&golden("mixtral-tiny"));
    let router = "model.layers.0.block_sparse_moe.gate.weight";
    variant.tensors.remove(router);
    refused(&variant, &[], &["1 tensor is missing", router]);
    let mut variant = Variant::of(&golden("qwen3-tiny"));
    variant.json["use_qk_norm"] = json!("l2");
    refused(&variant, &[], &["config.json", "`use_qk_norm`"]);
}

#[test]
fn values_are_checked_before_anything_is_written() {
    for (tensor, at, place) in [
        (
            "model.layers.1.mlp.up_proj.weight",
            7 * 96 + 9,
            "row 7, column 9",
        ),
        (
            "model.layers.0.self_attn.v_proj.weight",
            96,
            "row 1, column 0",
        ),
        ("model.layers.1.input_layernorm.weight", 3, "the value at 3"),
        ("model.embed_tokens.weight", 5, "row 0, column 5"),
        ("lm_head.weight", 5, "row 0, column 5"),
    ] {
        for (value, name) in [(f32::INFINITY, "inf"), (f32::NAN, "NaN")] {
            let mut variant = Variant::of(&golden("llama3-tiny"));
            variant.set(tensor, at, value);
            refused(&variant, &[], &[tensor, place, name]);
            // Also if the tensor is only copied.
            refused(&variant, &[r"layers\.1\.mlp"], &[tensor, place, name]);
        }
    }
}

#[test]
fn exclusions_that_match_nothing_are_refused() {
    let variant = Variant::of(&golden("llama3-tiny"));
    refused(
        &variant,
        &[r"layers\.5\."],
        &[r"layers\\.5\\.", "matches no linear layer"],
    );
    refused(
        &variant,
        &["o_proj", "layernorm"],
        &["layernorm", "matches no linear layer"],
    );
    // Layers that are never quantized count as matches.
    let scratch = Scratch::new("quantize-matches");
    let done = quantize(
        &golden("llama3-tiny"),
        &scratch,
        &options(&["lm_head", "o_proj"]),
    );
    assert_eq!(done.unwrap().layers.len(), 12);
}

/// Readers build the experts of a layer as one.
#[test]
fn an_excluded_expert_takes_those_of_its_layer_along() {
    for (name, pattern) in [
        ("qwen3moe-tiny", r"layers\.0\.mlp\.experts\.2\.down_proj"),
        ("mixtral-tiny", r"layers\.0\..*experts\.3\.w1"),
    ] {
        let scratch = Scratch::new(&format!("quantize-expert-{name}"));
        let done = quantize(&golden(name), &scratch, &options(&[pattern])).unwrap();
        let kept = done
            .kept
            .iter()
            .filter(|layer| layer.reason == Kept::Excluded);
        assert_eq!(kept.count(), 12, "{name}");
        let checkpoint = Checkpoint::open(&scratch).unwrap();
        let layers = checkpoint.layers().keys();
        assert_eq!(
            layers.filter(|module| module.contains(".experts.")).count(),
            12
        );
        reads(&scratch);
    }
}

/// Weights far below the range of a global scale of 2688 / amax.
#[test]
fn dormant_weights_are_quantized_in_both_dialects() {
    let mut variant = Variant::of(&golden("mixtral-tiny"));
    let expert = "model.layers.0.block_sparse_moe.experts.2";
    for projection in ["w1", "w2", "w3"] {
        let name = format!("{expert}.{projection}.weight");
        // Factor 2⁻¹²⁴ in total, on weights of about 0.2.
        variant.scale(&name, 2f32.powi(-62));
        variant.scale(&name, 2f32.powi(-62));
    }
    let scratch = Scratch::new("quantize-dormant");
    let model = scratch.join("model");
    variant.write(&model);
    for dialect in [Dialect::CompressedTensors, Dialect::ModelOpt] {
        for method in [Method::Search, Method::FourOverSix, Method::Rtn] {
            let out = scratch.join(format!("{}-{}", dialect.name(), method.name()));
            let options = QuantizeOptions {
                dialect,
                method,
                ..options(&[])
            };
            let done = quantize(&model, &out, &options).unwrap();
            let own = done
                .layers
                .iter()
                .filter(|layer| layer.module.starts_with(expert));
            for layer in own {
                assert!(layer.sqnr > 12.0, "{layer:?}");
            }
            reads(&out);
            let other = scratch.join(format!("{}-{}-other", dialect.name(), method.name()));
            let checkpoint = Checkpoint::open(&out).unwrap();
            convert(&checkpoint, dialect.other(), &other).unwrap();
            reads(&other);
        }
    }
}

/// Model Optimizer's rule gives factors that have no divisor.
#[test]
fn factors_without_a_divisor_are_not_converted() {
    let scratch = Scratch::new("quantize-no-divisor");
    let (model, out) = (scratch.join("model"), scratch.join("out"));
    let mut changed = options(&[]);
    changed.dialect = Dialect::ModelOpt;
    quantize(&golden("llama3-tiny"), &model, &changed).unwrap();
    let mut variant = Variant::of(&model);
    let name = "model.layers.1.mlp.down_proj.weight_scale_2";
    variant.tensors.get_mut(name).unwrap().2 = 2e-41f32.to_le_bytes().to_vec();
    variant.write(&out);
    let checkpoint = Checkpoint::open(&out).unwrap();
    let other = scratch.join("other");
    let error = convert(&checkpoint, Dialect::CompressedTensors, &other);
    let error = format!("{:#}", error.unwrap_err());
    assert!(
        error.contains("mlp.down_proj") && error.contains("divisor"),
        "{error}"
    );
}

/// Weights whose width is not a multiple of the block size are skipped, and the rest can be read.
#[test]
fn odd_widths_are_left_and_read() {
    let mut variant = Variant::of(&golden("llama3-tiny"));
    variant.json["intermediate_size"] = json!(100);
    for layer in 0..2 {
        for (name, shape) in [("gate", [100, 96]), ("up", [100, 96]), ("down", [96, 100])] {
            let name = format!("model.layers.{layer}.mlp.{name}_proj.weight");
            variant.fill(&name, &shape, 0.05);
        }
    }
    let scratch = Scratch::new("quantize-odd");
    let (model, out) = (scratch.join("model"), scratch.join("out"));
    variant.write(&model);
    let done = quantize(&model, &out, &options(&[])).unwrap();
    let kept = done.kept.iter().filter(|layer| layer.reason == Kept::Width);
    let kept: Vec<&str> = kept.map(|layer| &*layer.module).collect();
    assert!(kept.contains(&"model.layers.0.mlp.down_proj"), "{kept:?}");
    reads(&out);
}

/// A run whose configuration has changed is not resumed.
#[test]
fn resumed_runs_know_their_configuration() {
    let scratch = Scratch::new("quantize-resume-config");
    let (model, out) = (scratch.join("model"), scratch.join("out"));
    let mut variant = Variant::of(&golden("llama3-tiny"));
    variant.write(&model);
    drop(Quantization::start(&model, &out, &options(&[]), Default::default()).unwrap());
    variant.json["rms_norm_eps"] = json!(1e-6);
    variant.write(&model);
    let error = Quantization::resume(&model, &out, &options(&[]), Default::default()).err();
    let error = error.unwrap().to_string();
    assert!(
        error.contains("its model configuration has changed"),
        "{error}"
    );
}

/// Weights in FP8 are quantized like the same values in f32, and excluded ones become bf16. Layers
/// that predict further tokens are left out.
#[test]
fn weights_in_fp8_are_quantized_by_their_values() {
    let scratch = Scratch::new("quantize-fp8");
    let source = golden("deepseek3-tiny-fp8");
    let mut variant = Variant::of(&source);
    let json = variant.json.as_object().unwrap().clone();
    let tensors = TensorFolder::open(&source).unwrap();
    let tensors = tensors.with_fp8_scales(&json).unwrap();

    let mut plain = Variant::of(&source);
    plain.tensors.clear();
    for tensor in tensors.iter() {
        let (mut dtype, mut bytes) = (tensor.dtype, tensor.bytes().into_owned());
        if dtype == Dtype::F8_E4M3 {
            let values = tensor.to_f32().unwrap().into_iter();
            (dtype, bytes) = (Dtype::F32, values.flat_map(f32::to_le_bytes).collect());
        }
        let content = (dtype, tensor.shape.to_vec(), bytes);
        plain.tensors.insert(tensor.name.to_owned(), content);
    }
    plain
        .json
        .as_object_mut()
        .unwrap()
        .remove("quantization_config");
    variant.fill("model.layers.2.eh_proj.weight", &[64, 128], 1.0);
    variant.json["num_nextn_predict_layers"] = json!(1);

    let made = [("fp8", &variant), ("f32", &plain)].map(|(name, variant)| {
        let (model, out) = (scratch.join(name), scratch.join(format!("{name}-nvfp4")));
        variant.write(&model);
        let done = quantize(&model, &out, &options(&["layers.0.mlp"])).unwrap();
        assert_eq!((done.layers.len(), done.kept.len()), (37, 5));
        reads(&out);
        Checkpoint::open(&out).unwrap()
    });
    let [of_fp8, of_f32] = &made;
    assert_eq!(of_fp8.json()["num_nextn_predict_layers"], 0);
    assert!(of_fp8.layers().keys().eq(of_f32.layers().keys()));
    for module in of_fp8.layers().keys() {
        let [ours, theirs] = [of_fp8, of_f32].map(|it| it.weight(module).unwrap());
        assert_eq!(ours.codes(), theirs.codes(), "{module}");
        assert_eq!(ours.scales(), theirs.scales(), "{module}");
        assert_eq!(ours.global(), theirs.global(), "{module}");
    }
    let kept = "model.layers.0.mlp.down_proj.weight";
    let found = of_fp8.tensors().get(kept).unwrap();
    assert_eq!(found.dtype, Dtype::BF16);
    let values = tensors.get(kept).unwrap().to_f32().unwrap().into_iter();
    let rounded = values.map(|value| half::bf16::from_f32(value).to_f32());
    assert_eq!(found.to_f32().unwrap(), rounded.collect::<Vec<f32>>());
}

/// The scales of a cache would belong to compressed keys and values.
#[test]
fn scales_of_a_cache_of_latent_attention_are_refused() {
    let scratch = Scratch::new("quantize-latent-cache");
    let options = QuantizeOptions {
        kv_cache_fp8: true,
        ..options(&[])
    };
    let model = golden("deepseek3-tiny");
    let data = MadeFrom::from([("calibration".to_owned(), json!("given"))]);
    let error = Quantization::start(&model, &scratch.join("out"), &options, data).map(drop);
    let error = format!("{:#}", error.unwrap_err());
    assert!(error.contains("kv is fp8, but"), "{error}");
}
