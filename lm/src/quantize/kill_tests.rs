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
use crate::hf::WHOLE_FILE;
use crate::interchange::convert::PROVENANCE;
use crate::interchange::{Checkpoint, Dialect, Scheme, convert};
use crate::progress::tests::told;
use crate::progress::{Progress, listen};
use nvfp4_test_support::{Scratch, golden};

fn options() -> QuantizeOptions {
    QuantizeOptions {
        dialect: Dialect::ModelOpt,
        scheme: Scheme::W4a4,
        method: Method::Rtn,
        exclude: vec![],
        fp8: vec![],
        formats: None,
        input_scale: None,
        kv_cache_fp8: false,
        smooth: Smoothing::None,
    }
}

fn reads() -> MadeFrom {
    [("calibration".to_owned(), "a text".into())].into()
}

pub(super) fn copy(from: &Path, to: &Path) {
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

/// Overwrites the tensors of decoder layer 1 in a safetensors file.
fn spoil_layer_1(path: &Path) {
    let mut file = fs::read(path).unwrap();
    let data = 8 + u64::from_le_bytes(*file.first_chunk().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&file[8..data]).unwrap();
    let tensors = header.as_object().unwrap().iter();
    let layer: Vec<_> = tensors
        .filter(|(name, _)| name.contains("layers.1."))
        .collect();
    assert_eq!(layer.len(), 7 * 4 + 2);
    for (_, tensor) in layer {
        let [start, end] = [0, 1].map(|at| tensor["data_offsets"][at].as_u64().unwrap() as usize);
        file[data + start..data + end].fill(0xff);
    }
    fs::write(path, file).unwrap();
}

/// Bytes written by this thread, by the count of the system.
#[cfg(target_os = "linux")]
fn written_bytes() -> u64 {
    let counts = fs::read_to_string("/proc/thread-self/io").unwrap();
    let mut lines = counts.lines();
    let bytes = lines.find_map(|line| line.strip_prefix("wchar: "));
    bytes.unwrap().parse().unwrap()
}

/// Files of the output are written once; the rest is the journal's records and copies of small
/// files before they replace one.
#[cfg(target_os = "linux")]
#[test]
fn every_tensor_is_written_once() {
    let model = golden("llama3-tiny");
    let scratch = Scratch::new("quantize-written");
    let out = scratch.join("out");
    let run = Quantization::start(
        &model,
        &out,
        &QuantizeOptions {
            scheme: Scheme::W4a16,
            ..options()
        },
        MadeFrom::new(),
    );
    let run = run.unwrap();
    let before = written_bytes();
    run.finish(&Calibration::new()).unwrap();
    let written = written_bytes() - before;
    let files = files(&out);
    let tensors = files[WHOLE_FILE].len() as u64;
    let all: u64 = files.values().map(|file| file.len() as u64).sum();
    let records = 8192;
    assert!(
        (tensors..all + records).contains(&written),
        "{written} bytes written for {all} bytes of files, {tensors} of them tensors"
    );
    assert!(tensors > 4 * records, "{tensors}");
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

    // Killed while a part is recorded, whose tensors are on disk.
    let recording = scratch.join("recording");
    copy(&killed[4], &recording);
    let record = recording.join(JOURNAL).join("part-00001.json.unfinished");
    fs::write(record, "{").unwrap();
    // Killed before a part is complete: its tensors in the file have any bytes.
    let half = scratch.join("half");
    copy(&killed[4], &half);
    spoil_layer_1(&half.join(JOURNAL).join(WHOLE_FILE));
    // Killed before the first part is complete: the file may be anything.
    let creating = scratch.join("creating");
    copy(&killed[1], &creating);
    fs::write(creating.join(JOURNAL).join(WHOLE_FILE), "half").unwrap();
    // Stopped after the file was moved, because another file could not be written.
    let writing = scratch.join("writing");
    copy(&killed[5], &writing);
    let config = writing.join("config.json");
    fs::create_dir(&config).unwrap();
    let run = Quantization::resume(&model, &writing, &options(), reads()).unwrap();
    run.finish(&calibration).unwrap_err();
    assert!(writing.join(WHOLE_FILE).exists());
    fs::remove_dir(&config).unwrap();
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

    killed.extend([recording, half, creating, writing, empty, starting]);
    let quantized = [14, 14, 14, 14, 7, 7, 7, 7, 14, 0, 14, 14];
    assert_eq!(killed.len(), quantized.len());
    for (folder, quantized) in killed.iter().zip(quantized) {
        let stage = folder.display();
        let run = Quantization::resume(&model, folder, &options(), reads());
        let run = run.unwrap_or_else(|error| panic!("{stage}: {error:#}"));
        let kept = run.calibration().unwrap();
        let kept = kept.unwrap_or_else(|| calibration.clone());
        let (found, told) = told("quantize", || run.finish(&kept));
        let layers = told.last().unwrap().0 - told[0].0;
        assert_eq!(
            (found.unwrap(), layers),
            (expected.clone(), quantized),
            "{stage}"
        );
        assert!(files(folder) == files(&whole), "{stage}: other bytes");
    }

    // Killed while the journal is removed: the model is complete.
    let removed = whole.join(format!("{JOURNAL}.partial"));
    fs::create_dir(&removed).unwrap();
    let error = Quantization::resume(&model, &whole, &options(), reads()).err();
    assert!(error.unwrap().to_string().contains("is finished"));
    assert!(!removed.exists());
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
        let amax = nvfp4_formats::ptq::block_amax(&weight.to_f32().unwrap());
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
