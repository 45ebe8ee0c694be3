//! Resumes runs that were killed at any stage. A copy of the folder has what a killed run leaves.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::tensor::{Device, FloatDType};

use super::journal::{JOURNAL, MadeFrom};
use super::tests::files;
use super::text::{CalibrationText, calibrate};
use super::*;
use crate::checkpoint::read_json;
use crate::decoder::Decoder;
use crate::interchange::convert::PROVENANCE;
use crate::interchange::{Checkpoint, Scheme, convert};
use crate::progress::{Progress, listen};
use nvfp4_test_support::{Scratch, golden};

fn options() -> QuantizeOptions {
    QuantizeOptions {
        dialect: Dialect::ModelOpt,
        scheme: Scheme::W4a4,
        method: Method::Rtn,
        exclude: vec![],
        input_scale: None,
        kv_cache_fp8: false,
        smooth: Smoothing::None,
    }
}

fn reads() -> MadeFrom {
    [("calibration".to_owned(), "a text".into())].into()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        match entry.path().is_dir() {
            true => copy(&entry.path(), &target),
            false => {
                fs::copy(entry.path(), target).unwrap();
            }
        }
    }
}

#[test]
fn a_run_that_is_killed_at_any_stage_resumes_to_the_same_bytes() {
    let model = golden("llama3-tiny");
    let decoder = Decoder::load(&model, &Device::flex(), FloatDType::F32).unwrap();
    let ids: Vec<u32> = (0..48).collect();
    let text = CalibrationText {
        length: 16,
        sequences: 3,
        products: false,
    };
    let calibration = calibrate(&decoder, &ids, text).unwrap();

    let scratch = Scratch::new("quantize-killed");
    let whole = scratch.join("whole");
    let mut killed: Vec<PathBuf> = Vec::new();
    let mut kill = |stage: &str| {
        let folder = scratch.join(stage);
        copy(&whole, &folder);
        killed.push(folder);
    };
    let run = Quantization::start(&model, &whole, &options(), reads()).unwrap();
    // A second run would mix its parts with those of this one.
    for other in [Quantization::start, Quantization::resume] {
        let error = other(&model, &whole, &options(), reads()).err().unwrap();
        assert!(error.to_string().contains("another process quantizes"));
    }
    kill("calibrating");
    run.keep_calibration(&calibration).unwrap();
    kill("calibrated");
    // The first and the second decoder layer, at their first and last projection.
    let stages = [0, 6, 7, 13];
    let (from, to) = (whole.clone(), scratch.to_path_buf());
    listen(Some(Arc::new(move |it: &Progress<'_>| {
        if !it.part.is_empty() && stages.contains(&it.done) {
            copy(&from, &to.join(format!("layer-{}", it.done)));
        }
    })));
    let expected = run.finish(&calibration).unwrap();
    listen(None);
    killed.extend(stages.map(|done| scratch.join(format!("layer-{done}"))));

    // Killed while the model is written: no file of it is complete.
    let writing = scratch.join("writing");
    copy(&killed[4], &writing);
    fs::write(writing.join(".model-data-1.partial"), "half").unwrap();
    fs::write(writing.join("model.safetensors"), "half").unwrap();
    fs::write(writing.join("config.json"), "{}").unwrap();
    // Killed while the journal is removed: the model is complete, the journal is not.
    let removing = scratch.join("removing");
    copy(&whole, &removing);
    copy(&killed[5].join(JOURNAL), &removing.join(JOURNAL));
    let removed = scratch.join("removed");
    copy(&whole, &removed);
    copy(&killed[0].join(JOURNAL), &removed.join(JOURNAL));
    // Killed while the journal is made.
    let [empty, starting] = ["empty", "starting"].map(|name| scratch.join(name));
    fs::create_dir_all(&empty).unwrap();
    let partial = starting.join(format!("{JOURNAL}.partial"));
    fs::create_dir_all(&partial).unwrap();
    fs::write(partial.join("made_from.json"), "{").unwrap();

    // Before an entry is complete, a run with other options may start anew.
    for stage in [&killed[0], &starting] {
        let again = scratch.join("again");
        copy(stage, &again);
        let other = QuantizeOptions {
            method: Method::Search,
            ..options()
        };
        Quantization::start(&model, &again, &other, reads()).unwrap();
        fs::remove_dir_all(&again).unwrap();
    }
    let error = Quantization::start(&model, &killed[1], &options(), reads()).err();
    assert!(error.unwrap().to_string().contains("--resume"));

    killed.extend([writing, removing, removed, empty, starting]);
    for folder in &killed {
        let stage = folder.display();
        let run = Quantization::resume(&model, folder, &options(), reads());
        let run = run.unwrap_or_else(|error| panic!("{stage}: {error:#}"));
        let kept = run.calibration().unwrap();
        let kept = kept.unwrap_or_else(|| calibration.clone());
        let found = run.finish(&kept).unwrap();
        assert_eq!(found, expected, "{stage}");
        assert!(files(folder) == files(&whole), "{stage}: other bytes");
    }

    // The last trace of the journal.
    fs::create_dir(whole.join(JOURNAL)).unwrap();
    let error = Quantization::resume(&model, &whole, &options(), reads()).err();
    assert!(error.unwrap().to_string().contains("is finished"));
    assert!(!whole.join(JOURNAL).exists());
}

/// Readers ignore the file, and a conversion copies it.
#[test]
fn the_folder_records_amax_and_sqnr_of_each_layer() {
    let model = golden("llama3-tiny");
    let scratch = Scratch::new("quantize-record");
    let [out, converted] = ["out", "converted"].map(|name| scratch.join(name));
    let options = QuantizeOptions {
        scheme: Scheme::W4a16,
        ..options()
    };
    let none = Calibration::new();
    let done = quantize_folder(&model, &out, &options, &none).unwrap();
    let json: serde_json::Value = read_json(&out.join(PROVENANCE)).unwrap();
    assert_eq!(
        (&json["scheme"], &json["dialect"]),
        (&"w4a16".into(), &"modelopt".into())
    );
    let layers = json["layers"].as_array().unwrap();
    assert_eq!(layers.len(), done.layers.len());
    let tensors = crate::hf::TensorFolder::open(&model).unwrap();
    for (layer, found) in layers.iter().zip(&done.layers) {
        assert_eq!(layer["module"], found.module.as_str());
        let weight = tensors.get(&format!("{}.weight", found.module)).unwrap();
        let amax = rules::block_amax(&weight.to_f32().unwrap());
        assert_eq!(
            (found.amax, layer["amax"].as_f64().unwrap() as f32),
            (amax, amax)
        );
        let sqnr = layer["sqnr_db"].as_f64().unwrap();
        assert!((sqnr - found.sqnr).abs() < 1e-9 && sqnr > 17.0, "{layer}");
        assert!(layer.get("weighted_sqnr_db").is_none());
    }
    assert_eq!(json["kept"][0]["module"], "lm_head");
    assert_eq!(json["kept"][0]["reason"], "head");

    let checkpoint = Checkpoint::open(&out).unwrap();
    convert(&checkpoint, Dialect::CompressedTensors, &converted).unwrap();
    let copied: serde_json::Value = read_json(&converted.join(PROVENANCE)).unwrap();
    assert_eq!(copied, json);
}
