//! Tests ModelOpt's `NVFP4_AWQ` checkpoints, made from golden exports by adding a `pre_quant_scale`
//! to layers.

use std::path::Path;

use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use half::bf16;
use safetensors::Dtype;

use super::convert::write_configs;
use super::*;
use crate::checkpoint::{read_json, write_json};
use crate::decoder::Decoder;
use nvfp4_test_support::{Scratch, golden};

/// Returns the scales of the input of `module`; fused layers share them.
fn factors(module: &str, k: usize, is_power: bool) -> Vec<f32> {
    let (parent, leaf) = module.rsplit_once('.').unwrap();
    let is_out = ["o_proj", "down_proj", "w2"].contains(&leaf);
    let seed = parent.bytes().map(usize::from).sum::<usize>() + usize::from(is_out);
    let factor = |j: usize| match is_power {
        true => [0.25, 1.0, 2.0, 0.5][(j + seed) % 4],
        false => 0.5 + ((j * 37 + seed * 11) % 64) as f32 / 32.0,
    };
    (0..k).map(factor).collect()
}

fn bf16_bytes(values: &[f32]) -> Vec<u8> {
    let bytes = values
        .iter()
        .map(|value| bf16::from_f32(*value).to_le_bytes());
    bytes.flatten().collect()
}

/// Mutations applied to a golden export.
struct Made<'a> {
    /// True for layers that get scales.
    has_factors: &'a dyn Fn(&str) -> bool,
    /// True if the scales are powers of two.
    is_power: bool,
    /// Factors for the elements of another tensor.
    gains: &'a dyn Fn(&str, usize) -> Option<Vec<f32>>,
}

/// Writes the checkpoint `from` with the mutations to `out`.
fn write(from: &Path, out: &Path, made: &Made<'_>) {
    let checkpoint = Checkpoint::open(from).unwrap();
    std::fs::create_dir_all(out).unwrap();
    let mut writer = TensorWriter::create(out, u64::MAX).unwrap();
    for tensor in checkpoint.tensors().iter() {
        let width = tensor.shape.last().copied().unwrap_or(1);
        let scaled = (made.gains)(tensor.name, width);
        let bytes = match scaled {
            None => tensor.bytes().to_vec(),
            Some(gains) => {
                let values = tensor.to_f32().unwrap();
                let values: Vec<f32> = values.iter().zip(gains).map(|(a, b)| a * b).collect();
                bf16_bytes(&values)
            }
        };
        writer
            .add(tensor.name, tensor.dtype, tensor.shape, &bytes)
            .unwrap();
    }
    let mut any = false;
    for (module, layer) in checkpoint.layers() {
        if (made.has_factors)(module) {
            let bytes = bf16_bytes(&factors(module, layer.k, made.is_power));
            let name = format!("{module}.pre_quant_scale");
            writer.add(&name, Dtype::BF16, &[layer.k], &bytes).unwrap();
            any = true;
        }
    }
    writer.finish().unwrap();
    let config = QuantConfig {
        pre_quant: any,
        ..checkpoint.config().unwrap().clone()
    };
    let mut json = checkpoint.json().clone();
    json["quantization_config"] = config.inline();
    write_configs(out, &json, &config).unwrap();
}

const ALL: Made<'static> = Made {
    has_factors: &|_| true,
    is_power: false,
    gains: &|_, _| None,
};

fn logits(folder: &Path, scheme: Option<Scheme>, device: &Device) -> Vec<f32> {
    let model = Decoder::load_for_inference(folder, device, FloatDType::F32, scheme).unwrap();
    let ids: Vec<i32> = (0..32).map(|i| (i * 37 + 11) % 288).collect();
    let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [2, 16]), device);
    let logits = model.forward(ids).unwrap();
    logits.into_data().iter().collect()
}

fn assert_near(found: &[f32], expected: &[f32], what: &str) {
    let largest = expected.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    for (found, expected) in found.iter().zip(expected) {
        let error = (found - expected).abs() / largest;
        assert!(error < 1e-5, "{what}: {found}, not {expected}");
    }
}

/// Writes the high-precision model equivalent to the checkpoint `from`.
fn dense(from: &Path, out: &Path) {
    let checkpoint = Checkpoint::open(from).unwrap();
    std::fs::create_dir_all(out).unwrap();
    let mut json = checkpoint.json().clone();
    json.as_object_mut().unwrap().remove("quantization_config");
    write_json(&out.join("config.json"), &json).unwrap();
    let mut writer = TensorWriter::create(out, u64::MAX).unwrap();
    for name in checkpoint.plain() {
        let tensor = checkpoint.tensors().get(name).unwrap();
        writer
            .add(name, tensor.dtype, tensor.shape, &tensor.bytes())
            .unwrap();
    }
    for (module, layer) in checkpoint.layers() {
        let weight = checkpoint.weight(module).unwrap();
        let factors = weight.pre_quant().unwrap().values().iter().cycle();
        let values = weight.dequantize(Arithmetic::CodeTimesScale);
        let values = values
            .iter()
            .zip(factors)
            .map(|(value, factor)| value * factor);
        let values: Vec<f32> = values.collect();
        assert_eq!(values, weight.effective(Arithmetic::CodeTimesScale));
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        let name = format!("{module}.weight");
        writer
            .add(&name, Dtype::F32, &[layer.n, layer.k], &bytes)
            .unwrap();
    }
    writer.finish().unwrap();
}

const EXPORTS: [&str; 3] = [
    "llama3-tiny-modelopt-nvfp4",
    "qwen3moe-tiny-modelopt-nvfp4",
    "mixtral-tiny-modelopt-nvfp4",
];

#[test]
fn checkpoints_of_awq_are_read_and_written_again_byte_for_byte() {
    let root = golden("");
    for name in EXPORTS {
        let scratch = Scratch::new(&format!("awq-same-{name}"));
        let (made, same) = (scratch.join("made"), scratch.join("same"));
        write(&root.join(name), &made, &ALL);
        let checkpoint = Checkpoint::open(&made).unwrap();
        assert!(checkpoint.config().unwrap().pre_quant, "{name}");
        for (module, layer) in checkpoint.layers() {
            let weight = checkpoint.weight(module).unwrap();
            let found = weight.pre_quant().unwrap().values();
            let expected = factors(module, layer.k, false);
            let expected = expected.iter().map(|x| bf16::from_f32(*x).to_f32());
            assert!(expected.eq(found.iter().copied()), "{name}: {module}");
            assert_eq!(weight.bytes(), layer.bytes);
        }
        convert(&checkpoint, Dialect::ModelOpt, &same, &mut |_, _| ()).unwrap();
        let bytes = |folder: &Path| std::fs::read(folder.join("model.safetensors")).unwrap();
        assert!(bytes(&made) == bytes(&same), "{name}");
        let again = Checkpoint::open(&same).unwrap();
        assert_eq!(again.config(), checkpoint.config());
        let file: serde_json::Value = read_json(&same.join("hf_quant_config.json")).unwrap();
        assert_eq!(file["quantization"]["quant_algo"], "NVFP4_AWQ");
        assert_eq!(file["quantization"]["pre_quant_scale"], true);
        let other = scratch.join("other");
        let to = Dialect::CompressedTensors;
        let error = convert(&checkpoint, to, &other, &mut |_, _| ()).unwrap_err();
        let error = error.to_string();
        assert!(
            error.contains("layers.0") && error.contains("--smooth awq"),
            "{error}"
        );
        assert!(!other.exists());
    }
}

#[test]
fn layers_multiply_their_input_by_its_scale() {
    let root = golden("");
    let device = Device::flex();
    for name in EXPORTS {
        let scratch = Scratch::new(&format!("awq-dense-{name}"));
        let (made, plain) = (scratch.join("made"), scratch.join("plain"));
        write(&root.join(name), &made, &ALL);
        dense(&made, &plain);
        let found = logits(&made, Some(Scheme::W4a16), &device);
        let expected = logits(&plain, None, &device);
        assert_near(&found, &expected, name);
        let without = logits(&root.join(name), Some(Scheme::W4a16), &device);
        let differ = found.iter().zip(&without).any(|(a, b)| (a - b).abs() > 0.1);
        assert!(differ, "{name}: the scales do something");
    }
}

/// Scales that are powers of two can move into the preceding norm without rounding: the logits have
/// the same bits, even if activations are quantized.
#[test]
fn static_scales_of_activations_are_those_of_scaled_inputs() {
    let root = golden("");
    let from = root.join("llama3-tiny-modelopt-nvfp4");
    let scratch = Scratch::new("awq-norm");
    let (made, folded) = (scratch.join("made"), scratch.join("folded"));
    let reads_norm = |module: &str| {
        let leaf = module.rsplit('.').next().unwrap();
        ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"].contains(&leaf)
    };
    write(
        &from,
        &made,
        &Made {
            has_factors: &reads_norm,
            is_power: true,
            gains: &|_, _| None,
        },
    );
    let gains = |name: &str, width: usize| {
        let layer = name.strip_suffix(".weight")?;
        let reader = match layer.rsplit_once('.')? {
            (layer, "input_layernorm") => format!("{layer}.self_attn.q_proj"),
            (layer, "post_attention_layernorm") => format!("{layer}.mlp.up_proj"),
            _ => return None,
        };
        Some(factors(&reader, width, true))
    };
    write(
        &from,
        &folded,
        &Made {
            has_factors: &|_| false,
            is_power: true,
            gains: &gains,
        },
    );
    #[allow(unused_mut, reason = "without the CPU runtime")]
    let mut devices = vec![Device::flex()];
    #[cfg(feature = "cpu")]
    devices.push(nvfp4_test_support::cpu_runtime(Device::cpu));
    for device in devices {
        for scheme in [Scheme::W4a16, Scheme::W4a4] {
            let found = logits(&made, Some(scheme), &device);
            let expected = logits(&folded, Some(scheme), &device);
            assert_eq!(found, expected, "{}", scheme.name());
        }
    }
}

#[test]
fn wrong_scales_of_inputs_are_refused_by_name() {
    let root = golden("");
    let from = root.join("llama3-tiny-modelopt-nvfp4");
    let scratch = Scratch::new("awq-refused");
    let refused = |has: &dyn Fn(&str) -> bool, change: &dyn Fn(&mut Changed), says: &[&str]| {
        let (made, changed) = (scratch.join("made"), scratch.join("changed"));
        for folder in [&made, &changed] {
            let _ = std::fs::remove_dir_all(folder);
        }
        let parts = Made {
            has_factors: has,
            ..ALL
        };
        write(&from, &made, &parts);
        std::fs::create_dir_all(&changed).unwrap();
        for name in ["config.json", "hf_quant_config.json"] {
            std::fs::copy(made.join(name), changed.join(name)).unwrap();
        }
        let mut writer = TensorWriter::create(&changed, u64::MAX).unwrap();
        for tensor in TensorFolder::open(&made).unwrap().iter() {
            let (name, shape) = (tensor.name.to_owned(), tensor.shape.to_vec());
            let mut tensor = Changed {
                name,
                shape,
                dtype: tensor.dtype,
                bytes: tensor.bytes().to_vec(),
            };
            change(&mut tensor);
            let Changed {
                name,
                shape,
                dtype,
                bytes,
            } = tensor;
            writer.add(&name, dtype, &shape, &bytes).unwrap();
        }
        writer.finish().unwrap();
        let error = format!("{:#}", Checkpoint::open(&changed).unwrap_err());
        for part in says {
            assert!(error.contains(part), "no {part:?}: {error}");
        }
    };
    let q = "model.layers.0.self_attn.q_proj.pre_quant_scale";
    let o = "model.layers.1.self_attn.o_proj.pre_quant_scale";
    let all = |_: &str| true;
    let set = |name: &'static str, value: f32| {
        move |tensor: &mut Changed| {
            if tensor.name == name {
                tensor.bytes[4..6].copy_from_slice(&bf16::from_f32(value).to_le_bytes());
            }
        }
    };
    refused(&all, &set(q, 7.0), &["another scale", "qkv_proj"]);
    for value in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        refused(&all, &set(o, value), &[o, "feature 2 is", "positive"]);
    }
    let narrow = |tensor: &mut Changed| {
        if tensor.name == o {
            tensor.shape[0] -= 1;
            tensor.bytes.truncate(2 * tensor.shape[0]);
        }
    };
    refused(&all, &narrow, &[o, "it must be F32, BF16 or F16["]);
    let without_k = |module: &str| !module.ends_with("k_proj");
    refused(&without_k, &|_| (), &["another scale", "qkv_proj"]);
    let moved = |tensor: &mut Changed| {
        if tensor.name == o {
            tensor.name = "model.norm.pre_quant_scale".into();
        }
    };
    refused(&all, &moved, &["model.norm.pre_quant_scale"]);
}

/// A tensor of a checkpoint, to be mutated.
struct Changed {
    name: String,
    shape: Vec<usize>,
    dtype: Dtype,
    bytes: Vec<u8>,
}
