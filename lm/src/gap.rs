//! A bound on what NVFP4 costs: the loss of short runs against those in f32, from the same weights
//! and on the same batches.

use std::fs;
use std::path::{Path, PathBuf};

use burn::tensor::Device;
use rand::RngExt;

use crate::config::{ModelConfig, Preset, RecipeName, RunConfig};
use crate::data::Corpus;
use crate::model::Transformer;
use crate::random::stream;
use crate::train::Run;

/// Words, each of which mostly follows from the two before it.
fn text() -> String {
    const WORDS: [&str; 12] = [
        "let", "mut", "fn", "impl", "use", "match", "self", "struct", "pub", "where", "as", "ref",
    ];
    let mut draws = stream(0, "text", 0);
    let mut words = vec![0, 1];
    for _ in 0..12_000 {
        let [.., before, last] = words[..] else {
            unreachable!("there are two")
        };
        words.push(match draws.random_range(0..8) {
            0 => draws.random_range(0..WORDS.len()),
            _ => (5 * before + 7 * last + before * last) % WORDS.len(),
        });
    }
    let words: Vec<&str> = words.into_iter().map(|word| WORDS[word]).collect();
    words.join(" ")
}

fn corpus(folder: &Path) -> Corpus {
    let text = text();
    for (number, part) in text.as_bytes().chunks(text.len() / 20).enumerate() {
        fs::write(folder.join(format!("{number}.txt")), part).unwrap();
    }
    Corpus::load(&[folder.into()], 0).unwrap()
}

/// The validation loss after the last step.
fn loss(corpus: &Corpus, recipe: &str, seed: u64, folder: PathBuf) -> f64 {
    let recipe: RecipeName = recipe.parse().unwrap();
    let config = RunConfig {
        recipe: recipe.clone(),
        compare: Vec::new(),
        model: ModelConfig {
            width: 64,
            layers: 2,
            heads: 2,
            hidden: 96,
            context: 64,
            experts: None,
            top_k: 2,
        },
        batch: 8,
        steps: 150,
        warmup: 10,
        lr: 6e-3,
        eval_every: 1000,
        log_every: 1000,
        checkpoint_every: 1000,
        seed,
        ..RunConfig::preset(Preset::Tiny, "flex")
    };
    let device = [Device::flex()];
    let mut run = Run::<Transformer>::open(&config, recipe, corpus, &device, &folder).unwrap();
    run.train(None, &mut ()).unwrap();
    run.rows().last().and_then(|row| row.valid_loss).unwrap()
}

/// Percent by which the loss of each recipe may exceed that in f32, in the mean over the seeds.
const MOST: f64 = 3.0;

#[test]
fn nvfp4_costs_little() {
    const SEEDS: u64 = 2;
    let root = std::env::temp_dir().join(format!("nvfp4-gap-{}", std::process::id()));
    let text = root.join("text");
    fs::create_dir_all(&text).unwrap();
    let corpus = corpus(&text);
    let loss = |recipe: &str, seed: u64| {
        let folder = root.join(format!("{recipe}-{seed}"));
        loss(&corpus, recipe, seed, folder)
    };
    let baselines: Vec<f64> = (0..SEEDS).map(|seed| loss("f32", seed)).collect();
    let learnt = corpus.unigram_entropy() / 2.0;
    assert!(
        baselines.iter().all(|loss| *loss < learnt),
        "{baselines:?}, {learnt}"
    );
    for recipe in ["nvfp4", "quartet2"] {
        let gaps: Vec<f64> = baselines
            .iter()
            .zip(0..)
            .map(|(baseline, seed)| 100.0 * (loss(recipe, seed) / baseline - 1.0))
            .collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        println!("{recipe}: {mean:+.2} % of {gaps:.2?}");
        assert!(mean < MOST, "{recipe}: {mean} % of {gaps:?}");
    }
    fs::remove_dir_all(root).unwrap();
}
