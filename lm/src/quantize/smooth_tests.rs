//! Smoothing preserves the function of a model, and reduces the quantization error.

use std::path::{Path, PathBuf};

use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use half::bf16;
use regex::Regex;
use safetensors::Dtype;

use super::decoded::Decoded;
use super::inputs::Inputs;
use super::plan::Plan;
use super::smooth::Smoother;
use super::text::{CalibrationText, calibrate};
use super::*;
use crate::decoder::Decoder;
use crate::decoder::fused::open_tensors;
use crate::hf::{DecoderConfig, TensorFolder, TensorWriter};
use crate::interchange::{Checkpoint, Dialect, Scheme};
use nvfp4_formats::ptq::Rule;
use nvfp4_formats::ptq::ScaleChoice;
use nvfp4_test_support::{Scratch, golden};

const TEXT: CalibrationText = CalibrationText {
    length: 64,
    sequences: 8,
    products: true,
};

fn tokens(count: u32, vocab: usize) -> Vec<u32> {
    let vocab = vocab as u32;
    (0..count)
        .map(|i| (i * i * 7 + i * 37 + 11) % vocab)
        .collect()
}

/// Writes the model `base` with outlier features like those of large models: every seventh feature
/// of each norm before a projection is 24 times larger, and the columns that read it are six times
/// smaller.
fn with_outliers(base: &Path, out: &Path) -> PathBuf {
    std::fs::create_dir_all(out).unwrap();
    std::fs::copy(base.join("config.json"), out.join("config.json")).unwrap();
    let mut writer = TensorWriter::create(out, u64::MAX).unwrap();
    let is_large = |feature: usize| feature % 7 == 3;
    let config = DecoderConfig::read(base).unwrap();
    for tensor in open_tensors(base, &config).unwrap().iter() {
        let mut values = tensor.to_f32().unwrap();
        let name = tensor.name;
        let is_gain = name.ends_with("layernorm.weight");
        let leaf = name.trim_end_matches(".weight").rsplit('.').next().unwrap();
        let reads = [
            "q_proj",
            "k_proj",
            "v_proj",
            "gate_proj",
            "up_proj",
            "gate",
            "router",
            "w1",
            "w3",
        ];
        if is_gain || reads.contains(&leaf) {
            let width = *tensor.shape.last().unwrap();
            for (i, value) in values.iter_mut().enumerate() {
                if is_large(i % width) {
                    *value *= if is_gain { 24.0 } else { 1.0 / 6.0 };
                }
            }
        }
        let bytes: Vec<u8> = (values.iter())
            .flat_map(|value| bf16::from_f32(*value).to_le_bytes())
            .collect();
        writer.add(name, Dtype::BF16, tensor.shape, &bytes).unwrap();
    }
    writer.finish().unwrap();
    out.to_owned()
}

fn load(folder: &Path) -> Decoder {
    let (device, dtype) = (Device::flex(), FloatDType::F32);
    Decoder::load_for_inference(folder, &device, dtype, None).unwrap()
}

fn logits(model: &Decoder) -> Vec<f32> {
    let ids: Vec<i32> = (tokens(128, model.config().vocab).iter())
        .map(|id| *id as i32)
        .collect();
    let ids = TensorData::new(ids, [2, 64]);
    let ids = Tensor::<2, Int>::from_data(ids, &model.device());
    model
        .forward(ids)
        .unwrap()
        .into_data()
        .try_to_vec()
        .unwrap()
}

/// Returns the mean divergence KL(p ‖ q) between the token distributions of the logits `p` and `q`.
fn divergence(p: &[f32], q: &[f32], vocab: usize) -> f64 {
    let softmax = |row: &[f32]| -> Vec<f64> {
        let largest = row.iter().copied().fold(f32::MIN, f32::max);
        let exp: Vec<f64> = row.iter().map(|x| f64::from(x - largest).exp()).collect();
        let sum: f64 = exp.iter().sum();
        exp.iter().map(|e| e / sum).collect()
    };
    let rows = p.chunks(vocab).zip(q.chunks(vocab));
    let of_row = |(p, q): (&[f32], &[f32])| -> f64 {
        let terms = softmax(p).into_iter().zip(softmax(q));
        terms.map(|(p, q)| p * (p / q).ln()).sum()
    };
    rows.map(of_row).sum::<f64>() / (p.len() / vocab) as f64
}

fn calibration(model: &Decoder) -> Calibration {
    let ids = tokens(512, model.config().vocab);
    calibrate(model, &ids, TEXT).unwrap()
}

fn options(smooth: Smoothing) -> QuantizeOptions {
    QuantizeOptions {
        dialect: Dialect::CompressedTensors,
        scheme: Scheme::W4a16,
        method: Method::Rtn,
        exclude: Vec::new(),
        fp8: vec![],
        formats: None,
        input_scale: None,
        kv_cache_fp8: false,
        smooth,
    }
}

/// Writes the smoothed model without quantization.
fn smoothed(model: &Path, calibration: &Calibration, exclude: &[Regex], out: &Path) -> usize {
    let tensors = TensorFolder::open(model).unwrap();
    let json = crate::checkpoint::read_json(&model.join("config.json")).unwrap();
    let config = DecoderConfig::from_json(&json).unwrap();
    let plan = Plan::new(&tensors, exclude, &[]).unwrap();
    let smoother = Smoother::new(&config, &tensors, &plan, false);
    let inputs = Inputs::new(calibration);
    std::fs::create_dir_all(out).unwrap();
    std::fs::copy(model.join("config.json"), out.join("config.json")).unwrap();
    let mut writer = TensorWriter::create(out, u64::MAX).unwrap();
    let mut scaled = 0;
    for part in plan.parts() {
        let layer = super::plan::layer_of(&part[0][0]);
        let kind = (Rule::CompressedTensors, ScaleChoice::Max);
        let scales = smoother
            .scales(layer, &mut Decoded::new(&tensors), &inputs, kind)
            .unwrap();
        scales.write_plain(&mut writer).unwrap();
        for module in part.concat() {
            let name = format!("{module}.weight");
            let tensor = tensors.get(&name).unwrap();
            let before = tensor.to_f32().unwrap();
            let mut values = scales.scaled(&module, &before).into_owned();
            scaled += usize::from(values != before);
            let bytes: Vec<u8> = values
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect();
            writer.add(&name, Dtype::F32, tensor.shape, &bytes).unwrap();
            scales.undo(&module, &mut values);
            let difference = values.iter().zip(&before);
            assert!(
                difference
                    .into_iter()
                    .all(|(a, b)| (a - b).abs() <= 1e-6 * b.abs())
            );
        }
    }
    for name in plan.copied.iter().filter(|name| !smoother.rewrites(name)) {
        let tensor = tensors.get(name).unwrap();
        writer
            .add(name, tensor.dtype, tensor.shape, &tensor.bytes())
            .unwrap();
    }
    writer.finish().unwrap();
    scaled
}

#[test]
fn a_smoothed_model_computes_the_same() {
    let root = golden("");
    for (name, exclude, least) in [
        ("llama3-tiny", None, 14),
        // Values with a bias are only scaled by powers of two.
        ("qwen2-tiny", None, 13),
        ("gemma2-tiny", None, 14),
        ("gemma3-tiny", None, 14),
        ("qwen3-tiny", None, 14),
        ("llama3-tiny", Some("up_proj"), 4),
        ("llama3-tiny", Some("v_proj"), 6),
        ("qwen3moe-tiny", None, 20),
        // Experts of a layer are fused: if one is excluded, only attention is scaled.
        ("qwen3moe-tiny", Some(r"experts\.1\.(gate|down)"), 8),
        ("mixtral-tiny", None, 20),
        ("deepseek3-tiny", None, 30),
        // The clamped activation is not proportional to up, so the input of down is not scaled.
        ("gptoss-tiny", None, 20),
    ] {
        let scratch = Scratch::new(&format!("smooth-same-{name}"));
        let model = with_outliers(&root.join(name), &scratch.join("model"));
        let base = load(&model);
        let calibration = calibration(&base);
        let exclude: Vec<Regex> = exclude
            .iter()
            .map(|text| Regex::new(text).unwrap())
            .collect();
        let scaled = smoothed(&model, &calibration, &exclude, &scratch.join("out"));
        assert!(
            scaled >= least,
            "{name}, {exclude:?}: {scaled} weights were scaled"
        );
        let (before, after) = (logits(&base), logits(&load(&scratch.join("out"))));
        let largest = before
            .iter()
            .fold(0.0f32, |largest, x| largest.max(x.abs()));
        for (before, after) in before.iter().zip(&after) {
            let difference = (before - after).abs() / largest;
            assert!(difference < 2e-5, "{name}, {exclude:?}: {before}, {after}");
        }
    }
}

#[test]
fn smoothing_brings_the_quantized_model_closer() {
    let root = golden("");
    for name in ["llama3-tiny", "qwen3-tiny", "mixtral-tiny"] {
        for (scheme, method) in [
            (Scheme::W4a16, Method::Rtn),
            (Scheme::W4a16, Method::Search),
            (Scheme::W4a4, Method::Gptq),
        ] {
            let scratch = Scratch::new(&format!("smooth-{name}-{}", method.name()));
            let model = with_outliers(&root.join(name), &scratch.join("model"));
            let base = load(&model);
            let (calibration, expected) = (calibration(&base), logits(&base));
            let quantize = |smooth: Smoothing| {
                let out = scratch.join(smooth.name());
                let mut options = options(smooth);
                (options.scheme, options.method) = (scheme, method);
                let done = quantize_folder(&model, &out, &options, &calibration);
                let done = done.unwrap();
                assert_eq!(Checkpoint::open(&out).unwrap().problems(), []);
                let found = logits(&load(&out));
                let kl = divergence(&expected, &found, base.config().vocab);
                let seen = done.layers.iter().filter_map(|layer| layer.weighted_sqnr);
                let (sum, count) = seen.fold((0.0, 0.0), |(sum, n), sqnr| (sum + sqnr, n + 1.0));
                (kl, sum / count)
            };
            let (plain, plain_sqnr) = quantize(Smoothing::None);
            let (awq, awq_sqnr) = quantize(Smoothing::Awq);
            println!(
                "{name} {} {}: KL {plain:.5} to {awq:.5}, weighted SQNR {plain_sqnr:.2} to \
                 {awq_sqnr:.2} dB",
                scheme.name(),
                method.name()
            );
            assert!(awq < plain, "{name}, {}: {plain} to {awq}", method.name());
            assert!(awq_sqnr > plain_sqnr, "{name}, {}", method.name());
        }
    }
}

/// The gains of the golden models are nearly equal: smoothing has little effect, and no bad one.
#[test]
fn smoothing_of_equal_features_does_no_harm() {
    let root = golden("");
    for name in ["llama3-tiny", "qwen3moe-tiny"] {
        let model = root.join(name);
        let calibration = calibration(&load(&model));
        let scratch = Scratch::new(&format!("smooth-equal-{name}"));
        let quantize = |smooth: Smoothing| {
            let options = options(smooth);
            let out = scratch.join(smooth.name());
            let done = quantize_folder(&model, &out, &options, &calibration);
            let layers = done.unwrap().layers;
            let seen = layers.iter().filter_map(|layer| layer.weighted_sqnr);
            seen.sum::<f64>() / layers.len() as f64
        };
        let (plain, awq) = (quantize(Smoothing::None), quantize(Smoothing::Awq));
        println!("{name}: weighted SQNR {plain:.2} to {awq:.2} dB");
        assert!(awq > plain - 0.1, "{name}: {plain} to {awq}");
    }
}

#[test]
fn smoothing_is_refused_without_calibration() {
    let model = golden("llama3-tiny");
    let scratch = Scratch::new("smooth-refused");
    let out = scratch.join("out");
    let (options, none) = (options(Smoothing::Awq), Calibration::new());
    let done = quantize_folder(&model, &out, &options, &none);
    let error = format!("{:#}", done.unwrap_err());
    assert!(
        error.contains("smooth is awq") && error.contains("calibrate"),
        "{error}"
    );
}
