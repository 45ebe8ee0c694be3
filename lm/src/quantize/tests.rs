//! Compares the codes with those of the tools, and the methods by their errors.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use nvfp4_formats::format::e2m1;
use regex::Regex;

use super::journal::MadeFrom;
use super::*;
use crate::hf::TensorFolder;
use crate::interchange::names::fused_group;
use crate::interchange::{
    Arithmetic, Checkpoint, Dialect, GlobalScale, PackedWeight, Scheme, convert,
};
use crate::progress::tests::told;
use crate::progress::{Progress, listen};
use nvfp4_formats::ptq::{Rule, block_amax};
use nvfp4_test_support::{Scratch, golden, golden_with_tokenizer};

/// Returns deterministic, approximately normal numbers: sums of four uniform ones.
fn noise(len: usize, seed: u32) -> Vec<f32> {
    let mut bits = seed;
    let mut uniform = || {
        bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (bits >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..len).map(|_| (0..4).map(|_| uniform()).sum()).collect()
}

/// Returns the numbers of differing scale bytes and codes.
fn differences(ours: &PackedWeight, scales: &[u8], codes: &[u8]) -> (usize, usize) {
    assert_eq!(
        (ours.scales().len(), ours.codes().len()),
        (scales.len(), codes.len())
    );
    let bytes = ours.scales().iter().zip(scales).filter(|(a, b)| a != b);
    let nibbles = ours.codes().iter().zip(codes);
    let nibbles = nibbles.map(|(a, b)| {
        let difference = a ^ b;
        usize::from(difference & 15 != 0) + usize::from(difference >> 4 != 0)
    });
    (bytes.count(), nibbles.sum())
}

#[test]
fn the_rules_are_those_of_the_tools_on_the_probe() {
    let probe = TensorFolder::open_file(&golden("probe.safetensors")).unwrap();
    for name in ["normal", "heavy", "edges"] {
        for dtype in ["f32", "bf16"] {
            let key = format!("{name}.{dtype}");
            let x = probe.get(&format!("{key}.x")).unwrap();
            let values = x.to_f32().unwrap();
            let shape = [x.shape[0], x.shape[1]];
            let ct = match dtype {
                "f32" => Rule::CompressedTensors,
                _ => Rule::CompressedTensorsBf16,
            };
            for (rule, stack, global) in [
                (Rule::ModelOpt, "modelopt", "weight_scale_2"),
                (ct, "ct", "weight_global_scale"),
                (Rule::TransformerEngine, "te", "amax"),
            ] {
                let get = |leaf: &str| probe.get(&format!("{key}.{stack}.{leaf}")).unwrap();
                let ours = rules::quantize(rule, &values, shape, block_amax(&values)).unwrap();
                let theirs = get(global).to_f32().unwrap()[0];
                assert_eq!(
                    ours.global().value().to_bits(),
                    theirs.to_bits(),
                    "{key}.{stack}"
                );
                let found = differences(&ours, &get("scales").bytes(), &get("codes").bytes());
                assert_eq!(found, (0, 0), "{key}.{stack}: scale bytes, codes");
            }
        }
    }
}

/// The exports hold the results of the rules for the base models, with the amax shared over q/k/v
/// and gate/up.
#[test]
fn the_rules_give_the_codes_of_the_golden_exports() {
    let root = golden("");
    for (name, base, rule) in [
        ("llama3-tiny-modelopt-nvfp4", "llama3-tiny", Rule::ModelOpt),
        (
            "mixtral-tiny-modelopt-nvfp4",
            "mixtral-tiny",
            Rule::ModelOpt,
        ),
        (
            "qwen3moe-tiny-modelopt-nvfp4",
            "qwen3moe-tiny",
            Rule::ModelOpt,
        ),
        (
            "llama3-tiny-ct-nvfp4-f32",
            "llama3-tiny",
            Rule::CompressedTensors,
        ),
        (
            "llama3-tiny-ct-nvfp4",
            "llama3-tiny",
            Rule::CompressedTensorsBf16,
        ),
        (
            "llama3-tiny-ct-nvfp4a16",
            "llama3-tiny",
            Rule::CompressedTensorsBf16,
        ),
        (
            "qwen3-tiny-ct-nvfp4",
            "qwen3-tiny",
            Rule::CompressedTensorsBf16,
        ),
    ] {
        let base = TensorFolder::open(&root.join(base)).unwrap();
        let checkpoint = Checkpoint::open(&root.join(name)).unwrap();
        let values = |module: &str| {
            let tensor = base.get(&format!("{module}.weight")).unwrap();
            tensor.to_f32().unwrap()
        };
        let mut amax: BTreeMap<_, f32> = BTreeMap::new();
        for module in checkpoint.layers().keys() {
            let largest = amax.entry(fused_group(module).ok_or(module)).or_default();
            *largest = largest.max(block_amax(&values(module)));
        }
        for (module, layer) in checkpoint.layers() {
            let amax = amax[&fused_group(module).ok_or(module)];
            let shape = [layer.n, layer.k];
            let ours = rules::quantize(rule, &values(module), shape, amax).unwrap();
            let theirs = checkpoint.weight(module).unwrap();
            assert_eq!(ours.global(), theirs.global(), "{name}: {module}");
            let found = differences(&ours, theirs.scales(), theirs.codes());
            assert_eq!(found, (0, 0), "{name}: {module}: scale bytes, codes");
        }
    }
}

/// A layer whose input features differ in size and are correlated.
struct Layer {
    values: Vec<f32>,
    shape: [usize; 2],
    stats: InputStats,
}

impl Layer {
    fn new() -> Self {
        let (n, k, tokens) = (24, 96, 512);
        let mut values = noise(n * k, 1);
        values[5] = 3.0;
        let mut x = noise(tokens * k, 2);
        for row in x.chunks_mut(k) {
            for j in 1..k {
                row[j] += 0.7 * row[j - 1];
            }
            for (j, x) in row.iter_mut().enumerate() {
                *x *= 0.1 + (j % 11) as f32;
            }
        }
        let mut stats = InputStats::new(k, true);
        stats.add(&x[..64 * k]).unwrap();
        stats.add(&x[64 * k..]).unwrap();
        Self {
            values,
            shape: [n, k],
            stats,
        }
    }

    fn quantize(&self, dialect: Dialect, method: Method, stats: bool) -> Vec<f64> {
        let stats = stats.then_some(&self.stats);
        let amax = block_amax(&self.values);
        let kind = (dialect, method);
        let weight = quantize_weight(&self.values, self.shape, amax, kind, stats).unwrap();
        let values = weight.dequantize(dialect.arithmetic());
        let errors = values.iter().zip(&self.values);
        errors.map(|(a, b)| f64::from(*a) - f64::from(*b)).collect()
    }

    /// Σ `E[x²]` e².
    fn weighted(&self, errors: &[f64]) -> f64 {
        let weights = self.stats.mean_squares();
        let rows = errors.chunks(self.shape[1]);
        rows.flat_map(|row| row.iter().zip(&weights).map(|(e, &w)| e * e * f64::from(w)))
            .sum()
    }

    /// Returns the mean squared error of the output: tr(E H Eᵀ).
    fn output(&self, errors: &[f64]) -> f64 {
        let (k, hessian) = (self.shape[1], self.stats.second_moments());
        let mut sum = 0.0;
        for row in errors.chunks(k) {
            for (i, a) in row.iter().enumerate() {
                let products = row.iter().zip(&hessian[i * k..(i + 1) * k]);
                sum += a * products.map(|(b, h)| b * h).sum::<f64>();
            }
        }
        sum
    }
}

#[test]
fn better_methods_leave_smaller_errors() {
    let layer = Layer::new();
    for dialect in [Dialect::ModelOpt, Dialect::CompressedTensors] {
        let plain = |errors: &[f64]| errors.iter().map(|e| e * e).sum::<f64>();
        let errors = |method, stats| layer.quantize(dialect, method, stats);
        let rtn = errors(Method::Rtn, true);
        let (six, six_weighted) = (
            errors(Method::FourOverSix, false),
            errors(Method::FourOverSix, true),
        );
        let (search, search_weighted) =
            (errors(Method::Search, false), errors(Method::Search, true));
        let gptq = errors(Method::Gptq, true);
        // Without weights, searches minimise the plain error; with weights, the weighted error.
        assert!(plain(&search) < 0.97 * plain(&rtn));
        assert!(plain(&six) < plain(&rtn));
        assert!(layer.weighted(&search_weighted) < 0.95 * layer.weighted(&search));
        assert!(layer.weighted(&six_weighted) < layer.weighted(&six));
        assert!(layer.weighted(&search_weighted) < 0.9 * layer.weighted(&rtn));
        assert!(plain(&search_weighted) > plain(&search));
        // GPTQ trades both for the error of the output.
        assert!(layer.output(&gptq) < 0.8 * layer.output(&search_weighted));
        assert!(layer.output(&search_weighted) < layer.output(&rtn));
        assert!(layer.weighted(&gptq) > layer.weighted(&search_weighted));
    }
}

/// Every block contains a 6, so that each scale byte is 1.0 under a global scale of 1.
#[test]
fn representable_weights_are_exact_with_every_method() {
    let k = 32;
    let mut values: Vec<f32> = (0..16 * k)
        .map(|i| e2m1::VALUES[(i * 7 + i / 5) % 16])
        .collect();
    values.chunks_mut(16).for_each(|block| block[3] = -6.0);
    let mut stats = InputStats::new(k, true);
    stats.add(&noise(64 * k, 9)).unwrap();
    for dialect in [Dialect::ModelOpt, Dialect::CompressedTensors] {
        for method in [Method::Rtn, Method::Search, Method::Gptq] {
            let kind = (dialect, method);
            let weight = quantize_weight(&values, [16, k], 2688.0, kind, Some(&stats)).unwrap();
            assert_eq!(weight.global().decode(), 1.0);
            assert_eq!(
                weight.dequantize(Arithmetic::CodeTimesScale),
                values,
                "{method:?}"
            );
        }
        let kind = (dialect, Method::FourOverSix);
        let weight = quantize_weight(&values, [16, k], 1536.0, kind, None).unwrap();
        assert_eq!(weight.dequantize(Arithmetic::CodeTimesScale), values);
    }
}

#[test]
fn gptq_without_correlation_is_the_search() {
    let layer = Layer::new();
    let [n, k] = layer.shape;
    // Only one input feature is nonzero at a time, so the Hessian is diagonal.
    let mut stats = InputStats::new(k, true);
    for j in 0..k {
        let mut x = vec![0.0; k];
        x[j] = 1.0 + j as f32;
        stats.add(&x).unwrap();
    }
    let quantize = |method| {
        let kind = (Dialect::ModelOpt, method);
        quantize_weight(&layer.values, [n, k], 3.0, kind, Some(&stats)).unwrap()
    };
    assert_eq!(quantize(Method::Gptq), quantize(Method::Search));
}

#[test]
fn zero_weights_and_unused_inputs_quantize() {
    let zeros = vec![0.0; 16 * 32];
    let mut stats = InputStats::new(32, true);
    stats.add(&[0.0; 64]).unwrap();
    for dialect in [Dialect::ModelOpt, Dialect::CompressedTensors] {
        for method in [
            Method::Rtn,
            Method::FourOverSix,
            Method::Search,
            Method::Gptq,
        ] {
            let kind = (dialect, method);
            let weight = quantize_weight(&zeros, [16, 32], 0.0, kind, Some(&stats)).unwrap();
            assert_eq!(weight.dequantize(dialect.arithmetic()), zeros);
            let values = noise(16 * 32, 4);
            let weight = quantize_weight(&values, [16, 32], 2.0, kind, Some(&stats)).unwrap();
            assert!(sqnr(&values, &weight.dequantize(dialect.arithmetic())) > 14.0);
        }
    }
}

#[test]
fn bad_arguments_are_refused() {
    let values = vec![1.0; 32 * 16];
    let kind = (Dialect::ModelOpt, Method::Rtn);
    let refused = |values: &[f32], shape, amax, kind, says: &str| {
        let error = quantize_weight(values, shape, amax, kind, None).unwrap_err();
        assert!(error.to_string().contains(says), "{error}");
    };
    refused(&values, [16, 24], 1.0, kind, "24 input features");
    refused(&values, [16, 16], 1.0, kind, "512 values");
    refused(&values, [16, 32], 0.5, kind, "amax is 0.5");
    let mut bad = values.clone();
    bad[33] = f32::NAN;
    refused(&bad, [16, 32], 1.0, kind, "row 1, column 1 is NaN");
    let gptq = (Dialect::ModelOpt, Method::Gptq);
    refused(&values, [16, 32], 1.0, gptq, "needs calibration");
    let narrow = InputStats::new(16, false);
    let error = quantize_weight(&values, [16, 32], 1.0, kind, Some(&narrow)).unwrap_err();
    assert!(error.to_string().contains("16 features"), "{error}");
}

pub(super) fn options(dialect: Dialect, scheme: Scheme, method: Method) -> QuantizeOptions {
    QuantizeOptions {
        dialect,
        scheme,
        method,
        exclude: Vec::new(),
        fp8: vec![],
        formats: None,
        input_scale: None,
        kv_cache_fp8: false,
        smooth: Smoothing::None,
    }
}

#[test]
fn golden_models_are_quantized_to_valid_folders() {
    let root = golden("");
    for (name, layers, kept) in [
        ("llama3-tiny", 14, 1),
        ("qwen2-tiny", 14, 0),
        ("gemma2-tiny", 14, 0),
        ("gemma3-tiny", 14, 0),
        ("qwen3-tiny", 14, 0),
        ("qwen3moe-tiny", 32, 3),
        ("mixtral-tiny", 32, 3),
        ("deepseek3-tiny", 40, 2),
        ("gptoss-tiny", 32, 3),
    ] {
        for dialect in [Dialect::ModelOpt, Dialect::CompressedTensors] {
            let scratch = Scratch::new(&format!("quantize-{name}-{}", dialect.name()));
            let options = options(dialect, Scheme::W4a16, Method::Rtn);
            let model = golden_with_tokenizer(name);
            let none = Default::default();
            let done = quantize_folder(&model, &scratch, &options, &none);
            let done = done.unwrap();
            assert_eq!(
                (done.layers.len(), done.kept.len()),
                (layers, kept),
                "{name}"
            );
            let checkpoint = Checkpoint::open(&scratch).unwrap();
            assert_eq!(checkpoint.layers().len(), layers);
            assert_eq!(checkpoint.config().unwrap().scheme(), Some(Scheme::W4a16));
            assert!(scratch.join("tokenizer.json").exists());
            for layer in &done.layers {
                assert!(layer.sqnr > 17.0, "{name}: {layer:?}");
                assert_eq!(layer.bytes, layer.bytes_before * 9 / 32 + 4);
            }
            // The tool's codes, if it quantized the same model.
            let theirs = root.join(format!("{name}-modelopt-nvfp4"));
            if dialect == Dialect::ModelOpt && theirs.exists() {
                let theirs = Checkpoint::open(&theirs).unwrap();
                for module in checkpoint.layers().keys() {
                    let (ours, theirs) = (checkpoint.weight(module), theirs.weight(module));
                    let (ours, theirs) = (ours.unwrap(), theirs.unwrap());
                    assert_eq!(ours.codes(), theirs.codes(), "{name}: {module}");
                    assert_eq!(ours.scales(), theirs.scales(), "{name}: {module}");
                    assert_eq!(ours.global(), theirs.global(), "{name}: {module}");
                }
            }
        }
    }
}

#[test]
fn exclusions_take_their_fused_partners_along() {
    let model = golden("llama3-tiny");
    let scratch = Scratch::new("quantize-exclude");
    let mut options = options(Dialect::CompressedTensors, Scheme::W4a16, Method::Search);
    options.exclude = vec![Regex::new(r"layers\.0\.self_attn\.k_proj|down_proj").unwrap()];
    let none = Default::default();
    let done = quantize_folder(&model, &scratch, &options, &none).unwrap();
    assert_eq!((done.layers.len(), done.kept.len()), (9, 6));
    let checkpoint = Checkpoint::open(&scratch).unwrap();
    let exclude = &checkpoint.config().unwrap().exclude;
    assert!(exclude.contains(&"model.layers.0.self_attn.q_proj".into()));
    assert!(!exclude.contains(&"model.layers.1.self_attn.q_proj".into()));

    options.exclude = vec![Regex::new("proj").unwrap()];
    let again = Scratch::new("quantize-nothing");
    let error = quantize_folder(&model, &again, &options, &none).unwrap_err();
    assert!(error.to_string().contains("nothing is left"), "{error}");
    options.exclude.clear();
    let error = quantize_folder(&model, &scratch, &options, &none).unwrap_err();
    assert!(error.to_string().contains("must be empty"), "{error}");
    let error = quantize_folder(&scratch, &again, &options, &none).unwrap_err();
    assert!(
        format!("{error:#}").contains("quantized already"),
        "{error:#}"
    );
}

#[test]
fn experts_that_no_token_reached_take_the_scale_of_the_others() {
    let model = golden("qwen3moe-tiny");
    let tensors = TensorFolder::open(&model).unwrap();
    let mut calibration = Calibration::new();
    for tensor in tensors.iter() {
        let module = tensor.name.strip_suffix(".weight");
        let Some(module) = module.filter(|module| module.ends_with("_proj")) else {
            continue;
        };
        let mut stats = InputStats::new(tensor.shape[1], true);
        // No token reaches expert 3 of layer 1; among the others, expert 2 has the largest inputs.
        let size = match module.contains("experts.2.") {
            true => 4.0,
            false => 1.0,
        };
        if !module.contains("layers.1.mlp.experts.3.") {
            let x: Vec<f32> = noise(256 * tensor.shape[1], 5)
                .iter()
                .map(|x| x * size)
                .collect();
            stats.add(&x).unwrap();
        }
        calibration
            .inputs
            .insert(module.to_owned(), Arc::new(stats));
    }
    for method in [Method::Search, Method::Gptq] {
        let scratch = Scratch::new(&format!("quantize-experts-{}", method.name()));
        let options = options(Dialect::ModelOpt, Scheme::W4a4, method);
        let done = quantize_folder(&model, &scratch, &options, &calibration).unwrap();
        let experts = |expert: usize| format!("model.layers.1.mlp.experts.{expert}");
        assert_eq!(done.unseen.len(), 3, "{:?}", done.unseen);
        assert!(done.unseen[0].starts_with(&experts(3)));
        let checkpoint = Checkpoint::open(&scratch).unwrap();
        for projection in ["gate_proj", "up_proj", "down_proj"] {
            let input = |expert| {
                let module = format!("{}.{projection}", experts(expert));
                checkpoint.layers()[&module].input_global.unwrap()
            };
            assert_eq!(input(3), input(2), "the largest of the layer");
            assert_ne!(input(3), input(1));
            let amax = calibration.inputs[&format!("{}.{projection}", experts(1))].amax();
            assert_eq!(input(1), GlobalScale::Multiply(amax / 2688.0));
        }
    }
    let none = Default::default();
    for (scheme, method, says) in [
        (Scheme::W4a4, Method::Search, "w4a4"),
        (Scheme::W4a16, Method::Gptq, "gptq"),
    ] {
        let scratch = Scratch::new("quantize-uncalibrated");
        let options = options(Dialect::ModelOpt, scheme, method);
        let error = quantize_folder(&model, &scratch, &options, &none);
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains(says) && error.contains("calibrate"),
            "{error}"
        );
    }
    let scratch = Scratch::new("quantize-input-scale");
    let mut options = options(Dialect::CompressedTensors, Scheme::W4a4, Method::Rtn);
    options.input_scale = Some(1.0);
    quantize_folder(&model, &scratch, &options, &none).unwrap();
    let checkpoint = Checkpoint::open(&scratch).unwrap();
    let mut layers = checkpoint.layers().values();
    assert!(layers.all(|layer| layer.input_global == Some(GlobalScale::Divide(1.0))));
}

/// Returns a calibration with statistics of the caches only.
fn caches(model: &Path) -> Calibration {
    let mut calibration = Calibration::new();
    for name in TensorFolder::open(model).unwrap().names() {
        if let Some(attention) = name.strip_suffix(".k_proj.weight") {
            let amax = [448.0 * 0.1, 3.0 + calibration.caches.len() as f32];
            calibration.caches.insert(attention.to_owned(), amax);
        }
    }
    calibration
}

#[test]
fn scales_of_an_fp8_cache_are_written_and_converted() {
    let root = golden("");
    for (name, layers) in [("llama3-tiny", 2), ("mixtral-tiny", 2)] {
        let model = root.join(name);
        let calibration = caches(&model);
        for (dialect, rounded) in [
            (Dialect::ModelOpt, 448.0f32 * 0.1 / 448.0),
            (
                Dialect::CompressedTensors,
                half::bf16::from_f32(0.1).to_f32(),
            ),
        ] {
            let scratch = Scratch::new(&format!("quantize-kv-{name}-{}", dialect.name()));
            let (own, other) = (scratch.join("own"), scratch.join("other"));
            let mut options = options(dialect, Scheme::W4a16, Method::Rtn);
            options.kv_cache_fp8 = true;
            quantize_folder(&model, &own, &options, &calibration).unwrap();
            let checkpoint = Checkpoint::open(&own).unwrap();
            assert!(checkpoint.config().unwrap().kv_cache_fp8);
            assert_eq!(checkpoint.kv_scales().len(), layers);
            for [keys, values] in checkpoint.kv_scales().values() {
                assert_eq!(*keys, Some(rounded));
                assert_ne!(*values, *keys);
            }
            // The tool's type and shape.
            let attention = "model.layers.0.self_attn";
            let scale = checkpoint.tensors().get(&dialect.kv_scale(attention, 'k'));
            let scale = scale.unwrap();
            let tool = match dialect {
                Dialect::ModelOpt => "llama3-tiny-modelopt-nvfp4-kvfp8",
                Dialect::CompressedTensors => "llama3-tiny-ct-nvfp4-kvfp8",
            };
            let theirs = TensorFolder::open(&root.join(tool)).unwrap();
            let theirs = theirs.get(scale.name).unwrap();
            assert_eq!((scale.dtype, scale.shape), (theirs.dtype, theirs.shape));
            convert(&checkpoint, dialect.other(), &other).unwrap();
            let converted = Checkpoint::open(&other).unwrap();
            assert_eq!(converted.kv_scales(), checkpoint.kv_scales());
            assert!(converted.config().unwrap().kv_cache_fp8);
        }
        let scratch = Scratch::new("quantize-kv-unknown");
        let mut options = options(Dialect::ModelOpt, Scheme::W4a16, Method::Rtn);
        options.kv_cache_fp8 = true;
        let refused = |calibration: &Calibration, says: &str| {
            let out = scratch.join(says);
            let error = quantize_folder(&model, &out, &options, calibration);
            let error = format!("{:#}", error.unwrap_err());
            assert!(error.contains(says), "{error}");
        };
        refused(&Calibration::new(), "calibrate on text");
        let mut calibration = calibration;
        let attention = "model.layers.1.self_attn";
        calibration.caches.get_mut(attention).unwrap()[1] = 0.0;
        refused(&calibration, "v_proj.v_scale");
        calibration.caches.remove(attention);
        refused(&calibration, "layers.1.self_attn: calibration");
    }
}

/// Returns all files of a folder, by name.
pub(super) fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    let read = |path: std::path::PathBuf| (name(&path), std::fs::read(&path).unwrap());
    paths.map(read).collect()
}

#[test]
fn a_run_that_was_killed_goes_on_to_the_same_bytes() {
    let model = golden("llama3-tiny");
    let mut calibration = caches(&model);
    for tensor in TensorFolder::open(&model).unwrap().iter() {
        if let Some(module) = tensor.name.strip_suffix("_proj.weight") {
            let mut stats = InputStats::new(tensor.shape[1], true);
            stats.add(&noise(128 * tensor.shape[1], 3)).unwrap();
            let module = format!("{module}_proj");
            calibration.inputs.insert(module, Arc::new(stats));
        }
    }
    // As in a calibration, the parts of a fused projection share one input.
    let q = calibration.inputs["model.layers.0.self_attn.q_proj"].clone();
    let k = "model.layers.0.self_attn.k_proj".to_owned();
    calibration.inputs.insert(k, q);

    let mut options = options(Dialect::CompressedTensors, Scheme::W4a4, Method::Gptq);
    options.kv_cache_fp8 = true;
    options.smooth = Smoothing::Awq;
    let reads = || -> MadeFrom { [("calibration".to_owned(), "a text".into())].into() };
    let scratch = Scratch::new("quantize-resume");
    let (whole, killed) = (scratch.join("whole"), scratch.join("killed"));
    let start = |out: &Path| Quantization::start(&model, out, &options, reads());
    let resume =
        |options: &QuantizeOptions| Quantization::resume(&model, &killed, options, reads());
    let run = start(&whole).unwrap();
    let expected = run.finish(&calibration).unwrap();

    assert!(resume(&options).is_err(), "nothing to resume");
    let run = start(&killed).unwrap();
    assert!(run.calibration().unwrap().is_none());
    run.keep_calibration(&calibration).unwrap();
    // Killed in the second of two decoder layers: no destructor runs, and files are partially
    // written.
    let journal = killed.join(journal::JOURNAL);
    let dies = std::panic::AssertUnwindSafe(|| {
        listen(Some(Arc::new(|it: &Progress<'_>| {
            assert!(it.has_ended || it.done < 9, "killed");
        })));
        run.finish(&calibration)
    });
    std::panic::catch_unwind(dies).unwrap_err();
    listen(None);
    std::fs::write(journal.join("part-00001.json.unfinished"), "half").unwrap();

    let error = start(&killed).err().unwrap().to_string();
    assert!(error.contains("--resume"), "{error}");
    let refused = |name: &str, change: &dyn Fn(&mut QuantizeOptions)| {
        let mut options = options.clone();
        change(&mut options);
        let error = resume(&options).err().unwrap().to_string();
        assert!(error.contains(&format!("its {name} was")), "{error}");
    };
    refused("method", &|options| options.method = Method::Rtn);
    refused("scheme", &|options| options.scheme = Scheme::W4a16);
    refused("dialect", &|options| options.dialect = Dialect::ModelOpt);
    refused("kv", &|options| options.kv_cache_fp8 = false);
    refused("smooth", &|options| options.smooth = Smoothing::None);
    refused("input-scale", &|options| options.input_scale = Some(1.0));
    refused("exclude", &|options| {
        options.exclude = vec![Regex::new("q_proj").unwrap()];
    });
    let other = |reads: MadeFrom| Quantization::resume(&model, &killed, &options, reads).err();
    let error = other([("calibration".to_owned(), "another".into())].into());
    let error = error.unwrap().to_string();
    assert!(error.contains("its calibration was \"a text\""), "{error}");
    let base = golden("qwen3-tiny");
    let error = Quantization::resume(&base, &killed, &options, reads()).err();
    let error = error.unwrap().to_string();
    assert!(error.contains("its model has changed"), "{error}");

    let run = resume(&options).unwrap();
    let kept = run.calibration().unwrap().unwrap();
    assert_eq!(kept, calibration);
    let (found, told) = told("quantize", || run.finish(&kept));
    assert_eq!(found.unwrap(), expected);
    let now: Vec<_> = (7..=14).map(|done| (done, 14)).collect();
    assert_eq!(told, now, "the first layer is not quantized again");
    assert_eq!(files(&killed), files(&whole));
    assert!(resume(&options).is_err(), "it is finished");
}
