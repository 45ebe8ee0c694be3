//! `cargo xtask corpus`: makes the text and the tokens for the training runs of the ladder.
//!
//! `corpus/packages.txt` names packages of Debian; `corpus/corpus.py` downloads them, strips
//! markup, removes duplicates, trains a tokenizer and writes shards in the format of
//! `nvfp4 tokenize`. `corpus/manifest.json` describes the corpus of the recorded runs: versions and
//! licences of the packages, checksums of the shards.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::setup::staging::Staging;
use crate::setup::wheels::{Download, Requirements, require_pip, unpack};
use crate::workspace;

const PACKAGES: Requirements = Requirements {
    name: "corpus.txt",
    text: include_str!("../requirements/corpus.txt"),
};

/// Manifest of the corpus of the recorded runs, relative to the root.
const MANIFEST: &str = "xtask/corpus/manifest.json";

/// Minimum number of unique tokens in a corpus.
const LEAST_TOKENS: u64 = 200_000_000;

/// Contents of a corpus.
#[derive(Debug, Deserialize)]
struct Manifest {
    train_prose_tokens: u64,
    train_code_tokens: u64,
    packages: Vec<Package>,
    shards: Vec<Shard>,
}

#[derive(Debug, Deserialize)]
struct Package {
    package: String,
    version: String,
    /// Source package.
    source: String,
    /// Split: `train` or `valid`.
    part: String,
    licences: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Shard {
    file: String,
    checksum: String,
}

/// Options of `cargo xtask corpus`.
#[derive(clap::Args)]
pub struct Args {
    /// Write packages, texts and shards to this folder [default: nvfp4/corpus in the user's cache
    /// folder]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Read packages with this many processes [default: one per core]
    #[arg(long, value_name = "N")]
    processes: Option<usize>,
}

/// Returns the default folder of the corpus.
pub fn default_folder() -> Result<PathBuf> {
    let cache = dirs::cache_dir().context("this user has no folder of caches")?;
    Ok(cache.join("nvfp4/corpus"))
}

/// Makes the corpus, and prints its differences from that of the recorded runs.
///
/// # Errors
/// Returns an error if a package cannot be downloaded, a tool fails, or the corpus is too small.
pub fn run(args: &Args) -> Result<()> {
    let out = match &args.out {
        Some(folder) => folder.clone(),
        None => default_folder()?,
    };
    let root = workspace::root().join("xtask/corpus");
    let mut python = Command::new("python3");
    python
        .arg(root.join("corpus.py"))
        .arg(root.join("packages.txt"));
    python.arg(&out).env("PYTHONPATH", library()?);
    if let Some(processes) = args.processes {
        python.args(["--processes", &processes.to_string()]);
    }
    workspace::spawn(&mut python)?;
    let made = Manifest::read(&out.join("manifest.json"))?;
    made.check()?;
    let recorded = workspace::root().join(MANIFEST);
    if !recorded.exists() {
        println!("no corpus is recorded: commit its manifest.json as {MANIFEST}");
        return Ok(());
    }
    let differences = Manifest::read(&recorded)?.differences(&made);
    match differences.is_empty() {
        true => println!("the corpus is that of the recorded runs"),
        false => println!(
            "the corpus is not that of the recorded runs: losses cannot be compared with theirs\n{}",
            differences.join("\n")
        ),
    }
    Ok(())
}

/// Returns the folder of the BPE library, which is downloaded once.
fn library() -> Result<PathBuf> {
    let folder = workspace::target_folder()?.join("tools/corpus");
    let installed = fs::read_to_string(folder.join("requirements.txt"));
    if installed.is_ok_and(|text| text == PACKAGES.text) {
        return Ok(folder);
    }
    require_pip()?;
    if let Some(parent) = folder.parent() {
        fs::create_dir_all(parent)?;
    }
    let staging = Staging::new(&folder)?;
    let root = staging.root();
    fs::create_dir_all(&root)?;
    if let Download::OutOfReach(why) = unpack(&PACKAGES, &root)? {
        bail!("the library of BPE is out of reach: {why}");
    }
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    staging.publish("requirements.txt", PACKAGES.text)?;
    Ok(folder)
}

impl Manifest {
    fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
        serde_json::from_str(&text).with_context(|| path.display().to_string())
    }

    /// Returns an error unless there is enough text, a third of it at least is prose and code, all
    /// licences are named, and validation and training share no source package.
    fn check(&self) -> Result<()> {
        let (prose, code) = (self.train_prose_tokens, self.train_code_tokens);
        let all = prose + code;
        ensure!(
            all >= LEAST_TOKENS,
            "the corpus has {all} tokens to train on, but must have {LEAST_TOKENS} at least"
        );
        // Half of the text each; a token of code has fewer bytes.
        ensure!(
            prose.min(code) >= all / 3,
            "the corpus has {prose} tokens of prose and {code} of code, but each must be a third at \
             least"
        );
        let sources = |part: &str| -> BTreeSet<&str> {
            let own = self.packages.iter().filter(|package| package.part == part);
            own.map(|package| &*package.source).collect()
        };
        let (train, valid) = (sources("train"), sources("valid"));
        let shared: Vec<&&str> = train.intersection(&valid).collect();
        ensure!(
            shared.is_empty(),
            "source packages {shared:?} are in training and in validation"
        );
        ensure!(
            !train.is_empty() && !valid.is_empty(),
            "the corpus has {} packages to train on and {} to validate on",
            train.len(),
            valid.len()
        );
        for package in &self.packages {
            ensure!(
                !package.licences.is_empty(),
                "package {} names no licence",
                package.package
            );
        }
        Ok(())
    }

    /// Returns names and versions of the packages, then names and checksums of the shards.
    fn entries(&self) -> [(&'static str, Vec<[&str; 2]>); 2] {
        let packages = self.packages.iter();
        let shards = self.shards.iter();
        [
            (
                "version",
                packages.map(|of| [&*of.package, &*of.version]).collect(),
            ),
            (
                "check sum",
                shards.map(|of| [&*of.file, &*of.checksum]).collect(),
            ),
        ]
    }

    /// Describes the packages and shards in which `made` differs from this manifest, one per line.
    fn differences(&self, made: &Self) -> Vec<String> {
        let mut lines = Vec::new();
        for ((value, old), (_, new)) in self.entries().into_iter().zip(made.entries()) {
            for [name, was] in &old {
                match new.iter().find(|[other, _]| other == name) {
                    None => lines.push(format!("{name} is absent, its {value} was {was}")),
                    Some([_, is]) if is != was => {
                        lines.push(format!("{name}: {value} {is}, it was {was}"));
                    }
                    Some(_) => {}
                }
            }
            for [name, is] in &new {
                if !old.iter().any(|[other, _]| other == name) {
                    lines.push(format!("{name} is new, {value} {is}"));
                }
            }
        }
        lines
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn whole() -> Value {
        let package = |name: &str, part: &str| {
            json!({"package": name, "version": "1", "source": name, "part": part,
                   "licences": ["MIT"]})
        };
        json!({
            "train_prose_tokens": 110_000_000, "train_code_tokens": 100_000_000,
            "packages": [package("a", "train"), package("b", "valid")],
            "shards": [{"file": "train-1.tokens", "checksum": "00"}],
        })
    }

    fn manifest(value: Value) -> Manifest {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn another_version_is_a_difference() {
        let recorded = manifest(whole());
        assert!(recorded.differences(&recorded).is_empty());
        let mut other = whole();
        other["packages"][0]["version"] = json!("2");
        other["packages"][1]["package"] = json!("c");
        other["shards"][0]["checksum"] = json!("01");
        assert_eq!(
            recorded.differences(&manifest(other)),
            [
                "a: version 2, it was 1",
                "b is absent, its version was 1",
                "c is new, version 1",
                "train-1.tokens: check sum 01, it was 00"
            ]
        );
    }

    #[test]
    fn a_corpus_is_large_mixed_licensed_and_apart() {
        manifest(whole()).check().unwrap();
        let refused = |change: &dyn Fn(&mut Value), expected: &str| {
            let mut value = whole();
            change(&mut value);
            let error = manifest(value).check().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        refused(&|v| v["train_code_tokens"] = json!(80_000_000), "200000000");
        refused(&|v| v["train_code_tokens"] = json!(230_000_000), "a third");
        refused(&|v| v["packages"][1]["source"] = json!("a"), "[\"a\"]");
        refused(
            &|v| v["packages"][1]["part"] = json!("train"),
            "0 to validate",
        );
        refused(&|v| v["packages"][0]["licences"] = json!([]), "package a");
    }

    /// `corpus.py` also refuses other lines, but only after hours.
    #[test]
    fn the_list_names_each_package_once() {
        let list = include_str!("../corpus/packages.txt");
        let lines = list
            .lines()
            .map(|line| line.split('#').next().unwrap_or_default());
        let mut names = BTreeSet::new();
        let mut groups = BTreeSet::new();
        for line in lines.filter(|line| !line.trim().is_empty()) {
            let words: Vec<&str> = line.split_whitespace().collect();
            assert!(names.insert(words[2]), "{} comes twice", words[2]);
            groups.insert((words[0], words[1]));
        }
        let expected = [
            ("train", "code"),
            ("train", "prose"),
            ("valid", "code"),
            ("valid", "prose"),
        ];
        assert!(groups.into_iter().eq(expected));
    }
}
