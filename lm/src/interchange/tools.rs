//! Exports the values that this crate reads in folders, for `cargo xtask test --interop`, which
//! compares them with the values read by other tools.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::Path;

use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use safetensors::Dtype;

use super::*;
use crate::decoder::Decoder;
use crate::hf::TensorWriter;

/// Shape of the token batch, as in `xtask/interop/check.py`.
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
        // Quantized weights stay packed.
        let schemes = match checkpoint.config().and_then(QuantConfig::scheme) {
            None => vec![("logits", None)],
            Some(Scheme::W4a16) => vec![("logits", Some(Scheme::W4a16))],
            Some(Scheme::W4a4) => vec![
                ("logits", Some(Scheme::W4a16)),
                ("logits_w4a4", Some(Scheme::W4a4)),
            ],
        };
        for (key, scheme) in schemes {
            let (device, f32) = (Device::flex(), FloatDType::F32);
            let model = Decoder::load_for_inference(&path, &device, f32, scheme).unwrap();
            let shape = vec![TOKENS[0], TOKENS[1], model.config().vocab];
            values.insert(key.to_owned(), (shape, logits(&model)));
        }

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
