//! Odd folders of each family, as people have them: absent and neutral fields, fields of several
//! versions, missing and extra tensors. Each has the logits that transformers computes, or is
//! refused by name.
//!
//! The expected results are those of transformers 5.23: defaults of its configuration classes, and
//! fields that its models read. Folders are also refused if transformers only warns, or takes one
//! of two contradictory fields.

mod deepseek;
mod experts;
mod gemma;
mod gpt_oss;
mod llama;
mod mixed;
mod qwen;

use std::path::Path;

use anyhow::Result;
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use serde_json::Value;

use super::Decoder;
use crate::hf::DecoderConfig;
use crate::hf::variant::Variant;
use nvfp4_test_support::{Scratch, golden};

/// Change of a folder.
type Change = Box<dyn Fn(&mut Variant)>;

/// Result of loading a changed folder.
enum Expected {
    /// The logits of the unchanged folder.
    Same,
    /// The configuration and the logits of the folder with another change.
    Like(Change),
    /// Logits that differ from those of the unchanged folder.
    Other,
    /// An error that contains this text.
    Refused(&'static str),
}
use Expected::*;

/// Sets fields of config.json.
fn set(fields: Value) -> Change {
    Box::new(move |it| {
        for (name, value) in fields.as_object().unwrap() {
            it.json[name] = value.clone();
        }
    })
}

/// Removes fields of config.json.
fn absent(fields: &'static [&'static str]) -> Change {
    Box::new(move |it| {
        for name in fields {
            assert!(it.json.as_object_mut().unwrap().remove(*name).is_some());
        }
    })
}

/// Removes tensors.
fn without(names: &'static [&'static str]) -> Change {
    Box::new(move |it| {
        for name in names {
            assert!(it.tensors.remove(*name).is_some(), "{name}");
        }
    })
}

/// Adds or replaces a tensor in bf16, all of whose elements are `value`.
fn fill(name: &'static str, shape: &'static [usize], value: f32) -> Change {
    Box::new(move |it| it.fill(name, shape, value))
}

/// Stores the tensor `from` a second time as `to`.
fn copy(from: &'static str, to: &'static str) -> Change {
    Box::new(move |it| {
        let tensor = it.tensors[from].clone();
        it.tensors.insert(to.to_owned(), tensor);
    })
}

/// Adds biases, all of whose elements are `value`, to `modules` of both layers.
fn biases(value: f32, modules: &'static [(&'static str, usize)]) -> Change {
    Box::new(move |it| {
        for layer in 0..2 {
            for (module, width) in modules {
                let name = format!("model.layers.{layer}.{module}.bias");
                it.fill(&name, &[*width], value);
            }
        }
    })
}

/// Applies `changes` in order.
fn all<const N: usize>(changes: [Change; N]) -> Change {
    Box::new(move |it| changes.iter().for_each(|change| change(it)))
}

fn logits(folder: &Path) -> Result<Vec<f32>> {
    let device = Device::flex();
    let model = Decoder::load_for_inference(folder, &device, FloatDType::F32, None)?;
    let ids: Vec<i32> = (0..20).map(|i| (i * 37 + 5) % 288).collect();
    let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, 20]), &device);
    Ok(model.forward(ids)?.into_data().try_to_vec()?)
}

/// Returns the logits of `base` after `change`.
fn changed(base: &str, change: &Change) -> Result<Vec<f32>> {
    let (folder, mut variant) = (Scratch::new("odd"), Variant::of(&golden(base)));
    change(&mut variant);
    variant.write(&folder);
    logits(&folder)
}

/// Returns the configuration of `base` after `change`.
fn config(base: &str, change: &Change) -> DecoderConfig {
    let mut variant = Variant::of(&golden(base));
    change(&mut variant);
    DecoderConfig::from_json(variant.json.as_object().unwrap()).unwrap()
}

fn difference(left: &[f32], right: &[f32]) -> f32 {
    assert_eq!(left.len(), right.len());
    let pairs = left.iter().zip(right);
    pairs.fold(0.0, |most, (left, right)| most.max((left - right).abs()))
}

/// Checks changes of the golden folder `base`; reports all that have another result than expected.
fn check<const N: usize>(base: &str, cases: [(Change, Expected); N]) {
    let plain = logits(&golden(base)).unwrap();
    let mut wrong = Vec::new();
    for (index, (change, expected)) in cases.iter().enumerate() {
        let found = changed(base, change);
        let fault = match (&found, expected) {
            (Err(error), Refused(text)) => {
                let error = format!("{error:#}");
                (!error.contains(text)).then(|| format!("{error}\nnot: {text}"))
            }
            (Ok(_), Refused(text)) => Some(format!("it loads, not: {text}")),
            (Err(error), _) => Some(format!("{error:#}")),
            (Ok(found), Same) => {
                let found = difference(found, &plain);
                (found > 1e-5).then(|| format!("logits differ by {found}"))
            }
            (Ok(found), Other) => {
                let found = difference(found, &plain);
                (found < 1e-3).then(|| format!("logits differ by {found} only"))
            }
            (Ok(found), Like(other)) => {
                let is_same = config(base, change) == config(base, other);
                let found = difference(found, &changed(base, other).unwrap());
                (!is_same || found > 1e-5).then(|| format!("logits differ by {found}"))
            }
        };
        wrong.extend(fault.map(|fault| format!("{base}, case {index}: {fault}")));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}
