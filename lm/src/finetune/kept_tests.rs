//! Tests the data report of a run, and the checks when it is resumed.

use std::fs;

use super::data::TextReader;
use super::tests::{config, data, open};
use super::*;
use crate::decoder::{FrozenForm, LoraConfig};
use crate::hf::variant::Variant;
use crate::train::Outcome;
use burn::tensor::Device;
use nvfp4_test_support::{Scratch, golden};

const WEIGHT: &str = "model.layers.0.self_attn.o_proj.weight";

fn adapters() -> LoraConfig {
    LoraConfig {
        rank: 2,
        alpha: 4.0,
        targets: "q_proj$".into(),
    }
}

/// Stops a run of `config` on a copy of the model, applies `change` to `folder`, and returns the
/// error on resuming, if any.
fn resumed(
    test: &str,
    set: impl FnOnce(&mut FinetuneConfig, &std::path::Path),
    changed: &str,
    change: impl FnOnce(&mut Variant),
) -> Option<String> {
    let scratch = Scratch::new(test);
    for folder in ["model", "teacher"] {
        Variant::of(&golden("llama3-tiny")).write(&scratch.join(folder));
    }
    let mut config = config(&scratch.join("model"), &scratch, "bf16");
    config.steps = 4;
    set(&mut config, &scratch);
    let data = data(&config);
    let out = scratch.join("run");
    let open = || open(&config, &data, &Device::flex(), &out);
    let mut run = open().unwrap();
    assert_eq!(run.train(Some(2), &mut ()).unwrap(), Outcome::Stopped);
    drop(run);
    open().unwrap();
    let mut variant = Variant::of(&scratch.join(changed));
    change(&mut variant);
    // The variant reads the old folder while the new one is written.
    let again = scratch.join("again");
    variant.write(&again);
    fs::remove_dir_all(scratch.join(changed)).unwrap();
    fs::rename(&again, scratch.join(changed)).unwrap();
    open().err().map(|error| format!("{error:#}"))
}

#[test]
fn a_resumed_run_knows_what_it_does_not_train() {
    let lora = |config: &mut FinetuneConfig, _: &std::path::Path| config.lora = Some(adapters());
    let touch = |variant: &mut Variant| variant.set(WEIGHT, 5, 0.25);
    let error = resumed("kept-base", lora, "model", touch).unwrap();
    assert!(
        error.contains("the weights of") && error.contains("model"),
        "{error}"
    );
    let frozen = |config: &mut FinetuneConfig, _: &std::path::Path| {
        config.lora = Some(adapters());
        config.frozen = FrozenForm::W4a16;
    };
    let error = resumed("kept-frozen", frozen, "model", touch).unwrap();
    assert!(error.contains("the weights of"), "{error}");
    let distill = |config: &mut FinetuneConfig, folder: &std::path::Path| {
        config.objective = Objective::Distillation {
            teacher: folder.join("teacher"),
            form: FrozenForm::High,
            temperature: 1.0,
        };
    };
    let error = resumed("kept-teacher", distill, "teacher", touch).unwrap();
    assert!(error.contains("the teacher"), "{error}");
    // All weights are in the checkpoint, but not the architecture.
    assert_eq!(resumed("kept-none", |_, _| (), "model", touch), None);
    let epsilon = |variant: &mut Variant| variant.json["rms_norm_eps"] = 0.01.into();
    let error = resumed("kept-config", |_, _| (), "model", epsilon).unwrap();
    assert!(error.contains("config.json of"), "{error}");
}

/// A single long text is the most common input.
#[test]
fn the_end_of_a_single_text_is_for_validation() {
    let model = golden("llama3-tiny");
    let scratch = Scratch::new("kept-one");
    let text = scratch.join("one.txt");
    fs::write(
        &text,
        "the quick brown fox jumps over the lazy dog. ".repeat(40),
    )
    .unwrap();
    let mut config = config(&model, &scratch, "bf16");
    let shard = scratch.join("one.tokens");
    let reader = TextReader::read(&model).unwrap();
    reader.write_shard(&[text], &shard).unwrap();
    config.data = vec![shard];
    config.valid_share = 0.1;
    config.steps = 2;
    config.warmup = 0;
    let found = data(&config);
    assert!(found.is_one);
    let all = found.train.tokens() + found.valid.tokens();
    assert_eq!(found.valid.tokens(), (all as f64 * 0.1).round() as usize);
    assert!(found.train.cut().longer == 1 && found.train.cut().parted == 0);
    let mut run = open(&config, &found, &Device::flex(), &scratch.join("run")).unwrap();
    assert_eq!(run.train(None, &mut ()).unwrap(), Outcome::Finished);
}
