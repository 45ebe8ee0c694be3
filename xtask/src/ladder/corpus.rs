//! The corpus made by `cargo xtask corpus`, as described by its folder.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::plan::Run;

/// Maximum number of epochs of a run over its shards.
const MOST_EPOCHS: f64 = 4.0;

/// Folder of a corpus.
#[derive(Debug)]
pub struct Corpus {
    folder: PathBuf,
    /// FNV-1a hash of the tokenizer's file.
    tokenizer: String,
    valid: Shard,
    train: Vec<Shard>,
}

/// A file of tokens, and its compressed form.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Shard {
    /// Name of the file; the compressed one has the additional suffix `.xz`.
    pub file: String,
    tokens: u64,
    /// FNV-1a hash of the tokens.
    checksum: String,
}

#[derive(Deserialize)]
struct Manifest {
    tokenizer: String,
    shards: Vec<Shard>,
}

impl Corpus {
    /// Reads `manifest.json` of `folder`.
    ///
    /// # Errors
    /// Returns an error if it is absent or malformed, or a file of the corpus is absent.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("manifest.json");
        let text = fs::read_to_string(&path).with_context(|| {
            let path = path.display();
            format!("{path} cannot be read: `cargo xtask corpus` makes the corpus")
        })?;
        let found: Manifest =
            serde_json::from_str(&text).with_context(|| path.display().to_string())?;
        let (valid, train): (Vec<Shard>, Vec<Shard>) =
            (found.shards.into_iter()).partition(|shard| shard.file.starts_with("valid"));
        let [valid] = <[Shard; 1]>::try_from(valid)
            .ok()
            .with_context(|| format!("{} must have one file to validate on", path.display()))?;
        let corpus = Self {
            folder: folder.to_owned(),
            tokenizer: found.tokenizer,
            valid,
            train,
        };
        for file in corpus.files(corpus.train.len()) {
            ensure!(file.exists(), "{} is absent", file.display());
        }
        Ok(corpus)
    }

    /// Returns the files needed by runs on the first `shards` shards, smallest first.
    pub fn files(&self, shards: usize) -> Vec<PathBuf> {
        let tokenizer = ["tokenizer.json", "tokenizer_config.json"];
        let tokenizer = tokenizer.map(|name| self.folder.join("tokenizer").join(name));
        let compressed = |shard: &Shard| self.folder.join(format!("{}.xz", shard.file));
        let train = self.train.iter().take(shards).map(compressed);
        let valid = compressed(&self.valid);
        tokenizer.into_iter().chain([valid]).chain(train).collect()
    }

    /// Checks that there is enough text for `run`.
    ///
    /// # Errors
    /// Returns an error if it needs more shards than exist, or more than four epochs.
    pub fn check_run(&self, run: &Run) -> Result<()> {
        let (name, count) = (&run.name, self.train.len());
        ensure!(
            run.shards <= count,
            "run {name} needs {} shards, but the corpus has {count}",
            run.shards
        );
        let own = self.train.iter().take(run.shards);
        let tokens: u64 = own.map(|shard| shard.tokens).sum();
        let epochs = run.tokens as f64 / tokens as f64;
        ensure!(
            epochs <= MOST_EPOCHS,
            "run {name} sees its {tokens} tokens {epochs:.2} times, but at most {MOST_EPOCHS} times \
             are planned"
        );
        Ok(())
    }

    /// Returns `run` with the files that it reads, for the queue of `ladder/run.py`.
    pub fn queued(&self, run: &Run, commit: &str) -> Result<Value> {
        let own: Vec<&Shard> = self.train.iter().take(run.shards).collect();
        let names: Vec<&str> = own.iter().map(|shard| &*shard.file).collect();
        let checksums: Vec<&str> = own.iter().map(|shard| &*shard.checksum).collect();
        let mut queued = serde_json::to_value(run)?;
        let fields = queued.as_object_mut().context("a run is an object")?;
        fields.insert("data".into(), json!(names));
        fields.insert("valid".into(), json!(self.valid.file));
        fields.insert("commit".into(), json!(commit));
        fields.insert("corpus".into(), self.identity(&checksums));
        Ok(queued)
    }

    fn identity(&self, train: &[&str]) -> Value {
        json!({"tokenizer": self.tokenizer, "valid": self.valid.checksum, "train": train})
    }
}
