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

#[test]
fn nvfp4_costs_little() {
    let root = std::env::temp_dir().join(format!("nvfp4-gap-{}", std::process::id()));
    let text = root.join("text");
    fs::create_dir_all(&text).unwrap();
    let corpus = corpus(&text);
    let unigram = corpus.unigram_entropy();
    for seed in 0..3 {
        let loss = |recipe: &str| {
            let folder = root.join(format!("{recipe}-{seed}"));
            loss(&corpus, recipe, seed, folder)
        };
        let baseline = loss("f32");
        eprintln!("f32 {baseline:.4} unigram {unigram:.4}");
        for recipe in ["nvfp4", "quartet2", "per_token"] {
            let start = std::time::Instant::now();
            let loss = loss(recipe);
            eprintln!(
                "{recipe} {loss:.4} {:+.2} % {:?}",
                100.0 * (loss / baseline - 1.0),
                start.elapsed()
            );
        }
    }
    fs::remove_dir_all(root).unwrap();
}
