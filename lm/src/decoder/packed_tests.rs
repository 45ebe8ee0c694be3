//! Compares models with packed weights to the references of quantized golden folders.

use std::path::Path;

use burn::tensor::{Distribution, TensorData};

use super::observe::LinearInput;
use super::projection::{Experts, Projection};
use super::*;
use crate::eval::log_probabilities;
use crate::hf::{StoredTensor, TensorFolder};
use crate::interchange::{Checkpoint, Scheme};
use nvfp4_test_support::golden;

fn load(folder: &Path, scheme: Option<Scheme>, device: &Device) -> Decoder {
    Decoder::load_for_inference(folder, device, FloatDType::F32, scheme).unwrap()
}

fn ids(tensor: StoredTensor) -> Vec<u32> {
    let bytes = tensor.bytes();
    let (numbers, _) = bytes.as_chunks();
    let numbers = numbers
        .iter()
        .map(|bytes| i64::from_le_bytes(*bytes) as u32);
    numbers.collect()
}

/// Returns the largest difference of the logits of the first 12 positions, as a share of the
/// largest logit.
fn distance(model: &Decoder, ids: &[u32], expected: &[f32]) -> f32 {
    let rows = ids.chunks(32).flat_map(|row| &row[..12]);
    let rows: Vec<i32> = rows.map(|id| *id as i32).collect();
    let tokens = Tensor::from_data(TensorData::new(rows, [2, 12]), &model.device());
    let found: Vec<f32> = model.forward(tokens).unwrap().into_data().iter().collect();
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
    let pairs = found.iter().zip(expected);
    pairs.fold(0f32, |most, (a, b)| most.max((a - b).abs())) / largest
}

/// Asserts that exactly those layers are packed that the folder packs.
fn assert_packed(model: &Decoder) {
    for layer in &model.layers {
        assert!(matches!(layer.attention.qkv, Projection::Packed(_)));
        assert!(matches!(layer.attention.out, Projection::Packed(_)));
        match &layer.feed_forward {
            FeedForward::Dense(dense) => {
                assert!(matches!(dense.gate_up, Projection::Packed(_)));
                assert!(matches!(dense.down, Projection::Packed(_)));
            }
            FeedForward::Moe(moe) => {
                assert!(matches!(moe.gate_up, Experts::Packed(_)));
                assert!(matches!(moe.down, Experts::Packed(_)));
            }
        }
    }
}

/// Compares logits, losses and, for W4A16, greedy tokens.
fn matches_references(folder: &Path, scheme: Scheme, bound: f32) {
    let model = load(folder, Some(scheme), &Device::flex());
    assert_packed(&model);
    let name = scheme.name();
    let reference = TensorFolder::open_file(&folder.join("reference.safetensors")).unwrap();
    let floats = |name: &str| reference.get(name).unwrap().to_f32().unwrap();
    let tokens = ids(reference.get("input_ids").unwrap());
    let error = distance(&model, &tokens, &floats(&format!("logits_{name}_f32")));
    assert!(error < bound, "logits of {name} differ by {error}");
    let nll = floats(&format!("nll_{name}"));
    for (ids, expected) in tokens.chunks(32).zip(nll.chunks(31)) {
        let found = log_probabilities(&model, ids).unwrap();
        for (found, expected) in found.iter().zip(expected) {
            let error = (found + expected).abs();
            assert!(error < 1e-5, "{name}: {found}, not -{expected}");
        }
    }
    if scheme == Scheme::W4a16 {
        let greedy = ids(reference.get("greedy_24_w4a16").unwrap());
        // Excludes the padding of the second row, as the tests of unquantized models do.
        let prompts = tokens.chunks(32).map(|row| &row[..16]);
        let prompts = prompts.map(|row| row.iter().copied().filter(|id| *id != 0).collect());
        let prompts: Vec<Vec<u32>> = prompts.collect();
        let found = model.generate(&prompts, &Generation::greedy(24), |_, _| Ok(true));
        for (found, expected) in found.unwrap().iter().zip(greedy.chunks(40)) {
            assert_eq!(found, &expected[16..]);
        }
    }
}

/// W4A4 is compared in `f32`, as the notes of the references require.
#[test]
fn packed_models_match_the_references() {
    for (folder, schemes) in [
        ("llama3-tiny-ct-nvfp4a16", &[Scheme::W4a16][..]),
        ("llama3-tiny-ct-nvfp4", &[Scheme::W4a16, Scheme::W4a4]),
        ("llama3-tiny-ct-nvfp4-f32", &[Scheme::W4a16, Scheme::W4a4]),
        ("llama3-tiny-modelopt-nvfp4", &[Scheme::W4a16, Scheme::W4a4]),
        ("qwen3-tiny-ct-nvfp4", &[Scheme::W4a16, Scheme::W4a4]),
        ("qwen3moe-tiny-modelopt-nvfp4", &[Scheme::W4a16]),
        ("mixtral-tiny-modelopt-nvfp4", &[Scheme::W4a16]),
    ] {
        let folder = golden(folder);
        for scheme in schemes {
            println!("{}: {}", folder.display(), scheme.name());
            matches_references(&folder, *scheme, 1e-5);
        }
    }
}

/// Layers in FP8 and bf16 are dense, those in NVFP4 packed. The references are computed from the
/// dequantized weights.
#[test]
fn mixed_models_match_the_references() {
    let devices = [
        Some(Device::flex()),
        #[cfg(feature = "cpu")]
        Some(nvfp4_test_support::cpu_runtime(Device::cpu)),
    ];
    for (name, is_out_packed) in [
        ("llama3-tiny-modelopt-mixed", [true, false]),
        ("llama3-tiny-ct-mixed", [false, false]),
    ] {
        let folder = golden(name);
        let reference = TensorFolder::open_file(&folder.join("reference.safetensors")).unwrap();
        let floats = |name: &str| reference.get(name).unwrap().to_f32().unwrap();
        let tokens = ids(reference.get("input_ids").unwrap());
        for device in devices.iter().flatten() {
            let model = load(&folder, Some(Scheme::W4a16), device);
            for (layer, is_packed) in model.layers.iter().zip(is_out_packed) {
                assert_eq!(layer.attention.out.is_packed(), is_packed, "{name}");
            }
            let error = distance(&model, &tokens, &floats("logits_w4a16_f32"));
            assert!(error < 1e-5, "{name}: logits differ by {error}");
        }
        let model = load(&folder, Some(Scheme::W4a16), &Device::flex());
        let nll = floats("nll_w4a16");
        for (ids, expected) in tokens.chunks(32).zip(nll.chunks(31)) {
            let found = log_probabilities(&model, ids).unwrap();
            for (found, expected) in found.iter().zip(expected) {
                let error = (found + expected).abs();
                assert!(error < 1e-5, "{name}: {found}, not -{expected}");
            }
        }
        // By default, W4A4 layers quantize their inputs, and FP8 layers round theirs.
        let by_default = load(&folder, None, &Device::flex());
        let error = distance(&by_default, &tokens, &floats("logits_w4a16_f32"));
        assert!(error > 1e-4, "{name}: {error}");
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let rounded = by_default
            .layers
            .iter()
            .flat_map(|layer| layer.projections());
        let rounded = rounded
            .filter(|(_, it)| matches!(it, Projection::Rounded(_)))
            .count();
        let quantizing = (checkpoint.fp8_layers().values())
            .filter(|layer| layer.format.quantizes_inputs())
            .count();
        assert!(
            quantizing > 0 && (1..=quantizing).contains(&rounded),
            "{name}: {rounded}"
        );
        // Only the rounding differs.
        let frozen = Decoder::load_packed(&folder, &Device::flex(), FloatDType::F32, None);
        let frozen = frozen.unwrap();
        for (found, plain) in by_default.layers.iter().zip(&frozen.layers) {
            for ((_, found), (_, plain)) in found.projections().into_iter().zip(plain.projections())
            {
                let Projection::Rounded(layer) = found else {
                    continue;
                };
                let [d_in, _] = found.shape();
                let normal = Distribution::Normal(0.0, 1.0);
                let x = Tensor::<2>::random([4, d_in], normal, &Device::flex());
                let expected = plain.forward(layer.inputs.round(x.clone())).unwrap();
                let found = found.forward(x).unwrap();
                assert_eq!(found.into_data(), expected.into_data());
            }
        }
    }
}

/// Counts the inputs of linear layers.
struct Count(usize);

impl Observer for Count {
    fn observe(&mut self, input: LinearInput<'_>) -> Result<()> {
        assert!(input.x.dims()[1] > 0);
        self.0 += 1;
        Ok(())
    }
}

/// Norms and activations fused into linear layers compute the same bits as separate ones, which an
/// observer requires.
#[test]
fn an_observed_model_computes_the_same() {
    let folder = golden("llama3-tiny-ct-nvfp4");
    let devices = [
        Some(Device::flex()),
        #[cfg(feature = "cuda")]
        (std::env::var("NVFP4_TEST_DEVICE").as_deref() == Ok("cuda")).then(|| Device::cuda(0)),
    ];
    for device in devices.into_iter().flatten() {
        for scheme in [Scheme::W4a16, Scheme::W4a4] {
            for dtype in [FloatDType::BF16, FloatDType::F32] {
                let model = Decoder::load_for_inference(&folder, &device, dtype, Some(scheme));
                let model = model.unwrap();
                for ids in [&[7i32][..], &[1, 5, 9, 200]] {
                    let data = TensorData::new(ids.to_vec(), [1, ids.len()]);
                    let tokens: Tensor<2, Int> = Tensor::from_data(data, &device);
                    let mut count = Count(0);
                    let observed = model.observed(tokens.clone(), &mut count).unwrap();
                    assert_eq!(count.0, 4 * model.layers.len());
                    let bits = |x: Tensor<3>| -> Vec<u32> {
                        let values = x.into_data().convert::<f32>();
                        values.iter::<f32>().map(f32::to_bits).collect()
                    };
                    let found = bits(model.features(tokens).unwrap());
                    assert!(found.iter().any(|bits| *bits != 0));
                    let what = format!("{device:?} {scheme:?} {dtype:?} {}", ids.len());
                    assert_eq!(found, bits(observed), "{what}");
                }
            }
        }
    }
}

/// Compares the folder's scheme, weight-only quantization, and global scales from amax values.
#[test]
fn schemes_differ() {
    let folder = golden("llama3-tiny-ct-nvfp4");
    let device = Device::flex();
    let logits = |scheme| {
        let model = load(&folder, scheme, &device);
        let tokens = Tensor::from_data([[1i32, 5, 9, 200]], &device);
        let logits = model.forward(tokens).unwrap().into_data();
        logits.iter().collect::<Vec<f32>>()
    };
    assert!(logits(None) == logits(Some(Scheme::W4a4)));
    assert!(logits(None) != logits(Some(Scheme::W4a16)));
    let weights_only = golden("llama3-tiny-ct-nvfp4a16");
    let model = load(&weights_only, Some(Scheme::W4a4), &device);
    let Projection::Packed(layer) = &model.layers[0].attention.qkv else {
        panic!("it is packed");
    };
    assert_eq!(layer.activations(), burn_nvfp4::nn::Activations::DYNAMIC);
    let plain = golden("llama3-tiny");
    let scheme = Some(Scheme::W4a16);
    let error = Decoder::load_for_inference(&plain, &device, FloatDType::F32, scheme);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("is not quantized"), "{error}");
}

/// Runs on CubeCL's CPU runtime, whose kernels decode the weights.
#[cfg(feature = "cpu")]
#[test]
fn kernels_compute_packed_models() {
    let folder = golden("llama3-tiny-ct-nvfp4");
    let reference = TensorFolder::open_file(&folder.join("reference.safetensors")).unwrap();
    let tokens = ids(reference.get("input_ids").unwrap());
    for scheme in [Scheme::W4a16, Scheme::W4a4] {
        let device = nvfp4_test_support::cpu_runtime(Device::cpu);
        let model = load(&folder, Some(scheme), &device);
        let expected = format!("logits_{}_f32", scheme.name());
        let expected = reference.get(&expected).unwrap().to_f32().unwrap();
        let error = distance(&model, &tokens, &expected);
        assert!(error < 1e-5, "{}: {error}", scheme.name());
    }
}
