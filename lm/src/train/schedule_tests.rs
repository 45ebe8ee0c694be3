//! Runs whose recipe changes during the run.

use std::fs;
use std::path::Path;

use burn::module::Module;
use burn::tensor::Device;
use burn_nvfp4::recipe::{Healing, RecipePhase};
use nvfp4_test_support::Scratch;

use super::*;
use crate::checkpoint;
use crate::config::{Activation, HealingOption, ModelConfig, Preset, RecipeName, RunConfig};
use crate::data::Corpus;
use crate::model::{LanguageModel, Transformer};

const SCHEDULE: &str = "nvidia,0.5=fwd_nvfp4_bwd_mxfp8,0.75=quartet2:fwd_bf16";

/// Returns a corpus of twenty files of words that follow a pattern.
fn corpus(folder: &Path) -> Corpus {
    let folder = folder.join("text");
    fs::create_dir(&folder).unwrap();
    for file in 0..20usize {
        let words = (0..40).map(|i| ["let", "x", "=", "fn", "y", ";"][(file + i * i) % 6]);
        let text = words.collect::<Vec<_>>().join(" ");
        fs::write(folder.join(format!("file-{file}.txt")), text).unwrap();
    }
    Corpus::load(&[folder], 0).unwrap()
}

/// Returns a run of 8 steps that follows `schedule`.
fn config(schedule: &str) -> RunConfig {
    let mut config = RunConfig::preset(Preset::Tiny, "flex");
    config.model = ModelConfig {
        width: 32,
        layers: 1,
        heads: 2,
        hidden: 64,
        context: 16,
        experts: None,
        top_k: 2,
    };
    config.compare = Vec::new();
    config.schedule = Some(schedule.parse().unwrap());
    config.activation = Activation::F32;
    (config.batch, config.steps, config.warmup) = (2, 8, 2);
    (config.eval_every, config.eval_batches) = (4, 1);
    (config.log_every, config.checkpoint_every) = (1, 8);
    config
}

/// Begins of phases that a run reported.
#[derive(Default)]
struct Phases(Vec<(u64, usize, String)>);

impl Observer for Phases {
    fn phase(&mut self, step: u64, index: usize, phase: &RecipePhase) {
        self.0.push((step, index, phase.label()));
    }
}

fn open<'a>(
    config: &'a RunConfig,
    corpus: &'a Corpus,
    folder: &Path,
) -> anyhow::Result<Trainer<ByteTask<'a, Transformer>>> {
    let task = ByteTask::new(config, config.recipe.clone(), corpus);
    Trainer::open(task, &Device::flex(), folder)
}

/// Trains to step `stop_at`, or the end.
fn train(
    config: &RunConfig,
    corpus: &Corpus,
    folder: &Path,
    stop_at: Option<u64>,
) -> Vec<(u64, usize, String)> {
    let mut phases = Phases::default();
    let mut run = open(config, corpus, folder).unwrap();
    run.train(stop_at, &mut phases).unwrap();
    phases.0
}

/// Returns the named file of the latest checkpoint.
fn file(folder: &Path, name: &str) -> Vec<u8> {
    let path = checkpoint::latest(folder).unwrap().unwrap();
    fs::read(path.join(name)).unwrap()
}

/// Returns the rows of metrics.csv without the speed, which precedes the phase.
fn rows(folder: &Path) -> Vec<String> {
    let text = fs::read_to_string(folder.join("metrics.csv")).unwrap();
    let timeless = |line: &str| {
        let mut fields: Vec<&str> = line.split(',').collect();
        fields.remove(5);
        fields.join(",")
    };
    text.lines().map(timeless).collect()
}

#[test]
fn a_run_resumes_in_its_phase() {
    let folder = Scratch::new("schedule-resume");
    let corpus = corpus(&folder);
    let config = config(SCHEDULE);
    let [whole, parts] = ["whole", "parts"].map(|name| folder.join(name));
    let second = (4, 1, "fwd_nvfp4_bwd_mxfp8".to_owned());
    let third = (6, 2, "quartet2:fwd_bf16".to_owned());
    let begun = train(&config, &corpus, &whole, None);
    assert_eq!(begun, [second.clone(), third.clone()]);
    // Stops where phase 2 begins, within it, and within phase 3.
    assert!(train(&config, &corpus, &parts, Some(4)).is_empty());
    assert_eq!(train(&config, &corpus, &parts, Some(5)), [second]);
    assert_eq!(train(&config, &corpus, &parts, Some(7)), [third]);
    assert!(train(&config, &corpus, &parts, None).is_empty());
    for name in ["model.bpk", "optimizer.bpk", "state.json"] {
        assert!(file(&whole, name) == file(&parts, name), "{name} differs");
    }
    let found = rows(&whole);
    assert_eq!(found, rows(&parts));
    assert!(found[0].ends_with(",phase"));
    let phases: String = found[1..].iter().map(|row| &row[row.len() - 1..]).collect();
    assert_eq!(phases, "111112233", "step 0 is that of the untrained model");

    // The loaded model computes as in the phase of its last step: in phase 3 without quantization.
    let saved = Checkpoint::load(&checkpoint::latest(&whole).unwrap().unwrap()).unwrap();
    let loaded: Transformer = crate::bytes::load(saved, &Device::flex()).unwrap();
    let run = open(&config, &corpus, &whole).unwrap();
    let loss = |model: &Transformer| {
        let (inputs, targets) = corpus.valid_batch(0, 1, 2, 16).tensors(&Device::flex());
        model.loss(inputs, targets).into_data()
    };
    assert_eq!(loss(&loaded), loss(&run.model().valid()));

    // Another schedule is refused, with both.
    let other = self::config("nvidia,0.25=fwd_nvfp4_bwd_mxfp8");
    let error = open(&other, &corpus, &parts).err().unwrap();
    let error = format!("{error:#}");
    let was = format!("schedule was {SCHEDULE:?}, and is \"nvidia,0.25=fwd_nvfp4_bwd_mxfp8\"");
    assert!(error.contains(&was), "{error}");
}

/// A schedule changes the losses from its second phase on, and healing is a spelling of one.
#[test]
fn healing_has_the_bits_of_its_schedule() {
    let folder = Scratch::new("schedule-healing");
    let corpus = corpus(&folder);
    let plain = config("nvidia");
    let mut losses = Vec::new();
    for (forward_only, schedule) in [
        (true, "nvidia,0.5=nvidia:fwd_bf16"),
        (false, "nvidia,0.5=nvidia:bf16"),
    ] {
        let healed = RunConfig {
            schedule: None,
            healing: Some(HealingOption(Healing {
                at_fraction: 0.5,
                forward_only,
            })),
            ..plain.clone()
        };
        let runs = [&healed, &config(schedule)].map(|config| {
            let out = folder.join(format!("{}-{forward_only}", config.healing.is_some()));
            train(config, &corpus, &out, None);
            let files = ["model.bpk", "optimizer.bpk"].map(|name| file(&out, name));
            (files, rows(&out))
        });
        assert!(runs[0] == runs[1], "{schedule}");
        losses.push(runs[0].1.clone());
    }
    let out = folder.join("plain");
    train(&plain, &corpus, &out, None);
    losses.push(rows(&out));
    // One phase has no column.
    let loss = |row: &String| row.split(',').take(5).collect::<Vec<_>>().join(",");
    let losses = losses
        .iter()
        .map(|rows| rows[1..].iter().map(loss).collect());
    let losses: Vec<Vec<String>> = losses.collect();
    for other in 0..2 {
        // Rows of the steps 0 to 3; that of step 4 has an evaluation.
        assert_eq!(losses[2][..4], losses[other][..4]);
        assert_ne!(losses[2][8], losses[other][8]);
    }
    assert_ne!(losses[0][8], losses[1][8]);
}

/// Two forward passes of two sequences take the step of one with all four.
#[test]
fn accumulated_gradients_are_those_of_the_whole_batch() {
    let folder = Scratch::new("train-accumulate");
    let corpus = corpus(&folder);
    let losses = |batch, accumulate| {
        let mut config = config("f32");
        (config.batch, config.accumulate) = (batch, accumulate);
        (config.schedule, config.recipe) = (None, RecipeName::f32());
        let run = folder.join(format!("{batch}-{accumulate}"));
        train(&config, &corpus, &run, None);
        let rows = rows(&run);
        assert_eq!(rows[0].split(',').nth(2), Some("train_loss"));
        let losses = rows[1..].iter().filter_map(|row| row.split(',').nth(2));
        let losses = losses.filter_map(|loss| loss.parse().ok());
        losses.collect::<Vec<f64>>()
    };
    let [whole, parts, half] = [losses(4, 1), losses(2, 2), losses(2, 1)];
    assert_eq!(whole.len(), 8);
    let apart = |other: &[f64]| {
        let distances = whole.iter().zip(other).map(|(a, b)| (a - b).abs());
        distances.fold(0.0, f64::max)
    };
    assert!(apart(&parts) < 1e-5, "{whole:?}, {parts:?}");
    assert!(apart(&half) > 1e-3, "{whole:?}, {half:?}");
}
