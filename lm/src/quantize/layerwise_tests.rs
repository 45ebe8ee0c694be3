//! Calibration layer by layer, and quantization by kernels: the bytes are those of a calibration of
//! the whole model, and of the host.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::tensor::{Device, FloatDType};

use super::journal::MadeFrom;
use super::kill_tests::copy;
use super::tests::{files, options};
use super::text::{CalibrationText, calibrate};
use super::*;
use crate::checkpoint::{read_json, write_json};
use crate::decoder::Decoder;
use crate::hf::config::CONFIG_FILE;
use crate::hf::{TensorFolder, TensorWriter};
use crate::interchange::{Dialect, Scheme};
use crate::progress::tests::told;
use crate::progress::{Progress, listen};
use nvfp4_test_support::{Scratch, golden};

const TEXT: CalibrationText = CalibrationText {
    length: 24,
    sequences: 3,
    products: true,
};

fn tokens() -> Vec<u32> {
    (0..72).map(|i| (i * i * 7 + i * 37 + 11) % 256).collect()
}

fn reads() -> MadeFrom {
    [("calibration".to_owned(), "a text".into())].into()
}

fn smoothed(dialect: Dialect) -> QuantizeOptions {
    QuantizeOptions {
        smooth: Smoothing::Awq,
        ..options(dialect, Scheme::W4a4, Method::Gptq)
    }
}

fn start(model: &Path, out: &Path, options: &QuantizeOptions) -> Quantization {
    Quantization::start(model, out, options, reads()).unwrap()
}

fn assert_same_files(found: &Path, expected: &Path) {
    let [found, expected]: [BTreeMap<_, _>; 2] = [found, expected].map(files);
    assert!(found.keys().eq(expected.keys()));
    for (name, bytes) in &expected {
        assert!(found[name] == *bytes, "{name} differs");
    }
}

/// Writes a Llama of eleven layers, whose names are not in the order of the layers.
fn deep(out: &Path) -> PathBuf {
    let base = golden("llama3-tiny");
    std::fs::create_dir_all(out).unwrap();
    let mut json: serde_json::Value = read_json(&base.join(CONFIG_FILE)).unwrap();
    let layers = json["num_hidden_layers"].as_u64().unwrap();
    json["num_hidden_layers"] = 11.into();
    write_json(&out.join(CONFIG_FILE), &json).unwrap();
    let mut writer = TensorWriter::create(out, u64::MAX).unwrap();
    for tensor in TensorFolder::open(&base).unwrap().iter() {
        let bytes = tensor.bytes();
        let Some(rest) = tensor.name.strip_prefix("model.layers.") else {
            writer
                .add(tensor.name, tensor.dtype, tensor.shape, &bytes)
                .unwrap();
            continue;
        };
        let (index, leaf) = rest.split_once('.').unwrap();
        let first: u64 = index.parse().unwrap();
        for index in (first..11).step_by(layers as usize) {
            let name = format!("model.layers.{index}.{leaf}");
            writer
                .add(&name, tensor.dtype, tensor.shape, &bytes)
                .unwrap();
        }
    }
    writer.finish().unwrap();
    out.to_owned()
}

#[test]
fn layers_are_calibrated_as_the_whole_model_is() {
    let scratch = Scratch::new("quantize-layerwise");
    let device = Device::flex();
    let models = [
        ("deep", deep(&scratch.join("deep"))),
        ("qwen3moe-tiny", golden("qwen3moe-tiny")),
    ];
    for (name, model) in models {
        let options = QuantizeOptions {
            kv_cache_fp8: true,
            ..smoothed(Dialect::ModelOpt)
        };
        let [whole, by_layer] =
            ["whole", "layer"].map(|kind| scratch.join(format!("{name}-{kind}")));
        let decoder = Decoder::load(&model, &device, FloatDType::F32).unwrap();
        let calibration = calibrate(&decoder, &tokens(), TEXT).unwrap();
        let expected = start(&model, &whole, &options)
            .finish(&calibration)
            .unwrap();
        let run = start(&model, &by_layer, &options);
        let found = run.calibrate(&device, &tokens(), TEXT).unwrap();
        assert_eq!(found.calibration_tokens, expected.calibration_tokens);
        assert_same_files(&by_layer, &whole);
    }
}

/// The copy is made after the first layer is complete, before the second one is calibrated. The
/// caches of the first layer are read again.
#[test]
fn a_run_that_is_killed_between_layers_resumes_to_the_same_bytes() {
    let scratch = Scratch::new("quantize-layerwise-killed");
    let device = Device::flex();
    let model = golden("llama3-tiny");
    let options = QuantizeOptions {
        kv_cache_fp8: true,
        ..options(Dialect::CompressedTensors, Scheme::W4a4, Method::Gptq)
    };
    let [whole, killed] = ["whole", "killed"].map(|name| scratch.join(name));
    let run = start(&model, &whole, &options);
    let (from, to) = (whole.clone(), killed.clone());
    listen(Some(Arc::new(move |it: &Progress<'_>| {
        if it.part == "calibration, layer 1" {
            copy(&from, &to);
        }
    })));
    run.calibrate(&device, &tokens(), TEXT).unwrap();
    listen(None);
    let run = Quantization::resume(&model, &killed, &options, reads()).unwrap();
    let (resumed, told) = told("quantize", || run.calibrate(&device, &tokens(), TEXT));
    resumed.unwrap();
    assert_eq!(told[0], (7, 14));
    assert_same_files(&killed, &whole);
}

/// The sequences of a layer take long on a CPU, so each of them is told.
#[test]
fn the_sequences_of_a_calibration_are_told() {
    let scratch = Scratch::new("quantize-layerwise-told");
    let device = Device::flex();
    let options = smoothed(Dialect::ModelOpt);
    let run = start(&golden("llama3-tiny"), &scratch.join("out"), &options);
    let (done, told) = told("run", || run.calibrate(&device, &tokens(), TEXT));
    done.unwrap();
    let count = told[0].1;
    let of_layer: Vec<_> = (0..=count).map(|done| (done, count)).collect();
    assert!(count > 1, "{told:?}");
    assert_eq!(told, [&of_layer[..], &of_layer].concat());
}

#[test]
fn calibrations_without_text_are_refused() {
    let scratch = Scratch::new("quantize-layerwise-refused");
    let device = Device::flex();
    let model = golden("llama3-tiny");
    let options = smoothed(Dialect::ModelOpt);
    for (name, tokens, text, says) in [
        ("empty", vec![], TEXT, "text of the calibration is empty"),
        (
            "none",
            tokens(),
            CalibrationText {
                sequences: 0,
                ..TEXT
            },
            "0 sequences",
        ),
    ] {
        let run = start(&model, &scratch.join(name), &options);
        let error = run.calibrate(&device, &tokens, text).unwrap_err();
        assert!(error.to_string().contains(says), "{error:#}");
    }
}

/// The forward runs on one device in both runs, so its inputs are the same.
#[cfg(feature = "cpu")]
#[test]
fn kernels_quantize_as_the_host() {
    let scratch = Scratch::new("quantize-kernels");
    let device = Device::cpu();
    let client = crate::memory::client(&device).unwrap();
    let gptq = options(Dialect::CompressedTensors, Scheme::W4a16, Method::Gptq);
    let search = options(Dialect::ModelOpt, Scheme::W4a16, Method::Search);
    for (name, model, options) in [
        ("smooth", "llama3-tiny", smoothed(Dialect::ModelOpt)),
        ("search", "llama3-tiny", search),
        ("experts", "qwen3moe-tiny", gptq),
    ] {
        let engines = [Engine::Host, Engine::Device(client.clone())];
        let folders = engines.map(|engine| {
            let place = match engine {
                Engine::Host => "host",
                Engine::Device(_) => "device",
            };
            let out = scratch.join(format!("{name}-{place}"));
            let run = start(&golden(model), &out, &options).with_engine(engine);
            run.calibrate(&device, &tokens(), TEXT).unwrap();
            out
        });
        assert_same_files(&folders[1], &folders[0]);
    }
}
