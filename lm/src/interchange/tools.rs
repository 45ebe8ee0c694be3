//! The values that this crate reads in folders, for `cargo xtask test --interop`, which compares them
//! with those that other tools read there.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::Path;

use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use safetensors::Dtype;

use super::*;
use crate::decoder::Decoder;

/// The tokens of both rows, as `xtask/interop/check.py` has them.
const TOKENS: [usize; 2] = [2, 32];

fn logits(model: &Decoder) -> Vec<f32> {
    let ids: Vec<i64> = (0..64).map(|i| (i * 37 + 11) % 288).collect();
    let tokens = Tensor::<2, Int>::from_data(TensorData::new(ids, TOKENS), &Device::flex());
    let logits = model.forward(tokens).unwrap();
    logits.into_data().try_to_vec().unwrap()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

/// `folder` without its quantization: the values as compressed-tensors has them, in bf16.
fn decompressed(folder: &Path, checkpoint: &Checkpoint, out: &Path) {
    fs::create_dir_all(out).unwrap();
    let mut json = checkpoint.json().clone();
    json.as_object_mut().unwrap().remove("quantization_config");
    fs::write(out.join("config.json"), json.to_string()).unwrap();
    let mut writer = TensorWriter::create(out, u64::MAX).unwrap();
    for module in checkpoint.layers().keys() {
        let weight = checkpoint.weight(module).unwrap();
        let values = weight.dequantize(Arithmetic::CompressedTensors);
        let half = |value: &f32| half::bf16::from_f32(*value).to_le_bytes();
        let halves: Vec<u8> = values.iter().flat_map(half).collect();
        let shape = [weight.n(), weight.k()];
        let name = format!("{module}.weight");
        writer.add(&name, Dtype::BF16, &shape, &halves).unwrap();
    }
    let tensors = TensorFolder::open(folder).unwrap();
    for tensor in tensors.iter().filter(|tensor| {
        let module = tensor
            .name
            .rsplit_once('.')
            .map_or("", |(module, _)| module);
        !checkpoint.layers().contains_key(module) && !tensor.name.ends_with("_scale")
    }) {
        let shape = tensor.shape.to_vec();
        writer
            .add(tensor.name, tensor.dtype, &shape, tensor.bytes)
            .unwrap();
    }
    writer.finish().unwrap();
}

#[test]
#[ignore = "cargo xtask test --interop runs it"]
fn values_for_the_tools() {
    let folder = env::var("NVFP4_INTEROP").expect("NVFP4_INTEROP names the folder of the stage");
    let folder = Path::new(&folder);
    let mut written = 0;
    for entry in fs::read_dir(folder.join("made")).unwrap() {
        let path = entry.unwrap().path();
        if !path.join("config.json").exists() {
            continue;
        }
        let checkpoint = Checkpoint::scan(&path).unwrap();
        assert_eq!(checkpoint.problems(), [], "{}", path.display());
        let mut values = BTreeMap::new();
        for module in checkpoint.layers().keys() {
            let weight = checkpoint.weight(module).unwrap();
            let shape = vec![weight.n(), weight.k()];
            for (leaf, arithmetic) in [
                ("ct", Arithmetic::CompressedTensors),
                ("modelopt", Arithmetic::ModelOpt),
            ] {
                let dequantized = weight.dequantize(arithmetic);
                values.insert(format!("{module}.{leaf}"), (shape.clone(), dequantized));
            }
        }
        let name = path.file_name().unwrap();
        let (device, f32) = (Device::flex(), FloatDType::F32);
        let (key, model) = match checkpoint.config() {
            None => ("logits", Decoder::load(&path, &device, f32)),
            Some(_) => {
                let plain = folder.join("decompressed").join(name);
                decompressed(&path, &checkpoint, &plain);
                ("logits_bf16", Decoder::load(&plain, &device, f32))
            }
        };
        let model = model.unwrap();
        let shape = vec![TOKENS[0], TOKENS[1], model.config().vocab];
        values.insert(key.to_owned(), (shape, logits(&model)));

        let out = folder.join("ours").join(name);
        fs::create_dir_all(&out).unwrap();
        let mut writer = TensorWriter::create(&out, u64::MAX).unwrap();
        for (name, (shape, values)) in &values {
            writer.add(name, Dtype::F32, shape, &bytes(values)).unwrap();
        }
        writer.finish().unwrap();
        written += 1;
    }
    assert!(
        written > 0,
        "{} has no models",
        folder.join("made").display()
    );
}
