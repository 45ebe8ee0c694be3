//! Output of a run of `nvfp4 train` with one recipe, as a soak compares it.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Name of the file with the losses, in the folder of the recipe.
pub(super) const METRICS: &str = "metrics.csv";
/// Prefix of the names of checkpoints, before the step.
const CHECKPOINT: &str = "checkpoint-";
/// Files that differ from run to run: timings, and checksums of them.
const OF_TIME: [&str; 2] = ["timing.json", "manifest.json"];

/// One line of [`METRICS`].
#[derive(Debug, PartialEq)]
pub(super) struct Row {
    /// Number of finished steps.
    pub(super) step: u64,
    tokens: f64,
    /// Fields without the speed.
    timeless: String,
    tokens_per_s: Option<f64>,
}

impl Row {
    fn parse(line: &str) -> Option<Self> {
        let mut fields: Vec<&str> = line.split(',').collect();
        if fields.len() < 6 {
            return None;
        }
        let speed = fields.remove(5);
        Some(Self {
            step: fields[0].parse().ok()?,
            tokens: fields[1].parse().ok()?,
            timeless: fields.join(","),
            tokens_per_s: speed.parse().ok(),
        })
    }
}

/// Returns the whole rows of the metrics in `path`.
///
/// # Errors
/// Returns an error if the file cannot be read.
pub(super) fn rows_in(path: &Path) -> Result<Vec<Row>> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    Ok(whole.lines().skip(1).filter_map(Row::parse).collect())
}

/// Result of a run: hashes of its files by name.
pub(super) struct RunOutput {
    /// Name of the recipe's subfolder.
    pub(super) recipe: OsString,
    /// Hashes of the files of the last checkpoint, and of the rows of metrics.
    files: BTreeMap<String, u64>,
    /// Shortest time between two rows, in seconds.
    pub(super) interval: f64,
}

impl RunOutput {
    /// Returns the result in `folder`.
    ///
    /// # Errors
    /// Returns an error if there is no checkpoint, or if a file cannot be read.
    pub(super) fn of(folder: &Path) -> Result<Self> {
        let of_recipe = folders(folder)?
            .into_iter()
            .find(|path| path.join(METRICS).exists());
        let of_recipe = of_recipe.with_context(|| format!("no run in {}", folder.display()))?;
        let steps = folders(&of_recipe)?.into_iter().filter_map(|path| {
            let step = path.file_name()?.to_str()?.strip_prefix(CHECKPOINT)?;
            Some((step.parse::<u64>().ok()?, path))
        });
        let last = steps.max();
        let (step, last) =
            last.with_context(|| format!("no checkpoint in {}", of_recipe.display()))?;
        let mut files = BTreeMap::from([(format!("{CHECKPOINT}{step}"), 0)]);
        for file in fs::read_dir(&last)? {
            let file = file?;
            let name = file.file_name().to_string_lossy().into_owned();
            if !OF_TIME.contains(&&name[..]) {
                files.insert(name, hash(&fs::read(file.path())?));
            }
        }
        let rows = rows_in(&of_recipe.join(METRICS))?;
        let timeless: Vec<&str> = rows.iter().map(|row| &row.timeless[..]).collect();
        files.insert(METRICS.into(), hash(timeless));
        let seconds = rows
            .windows(2)
            .filter_map(|pair| Some((pair[1].tokens - pair[0].tokens) / pair[1].tokens_per_s?));
        let interval = seconds.reduce(f64::min).unwrap_or_default();
        let recipe = of_recipe.file_name().context("a recipe has a folder")?;
        Ok(Self {
            recipe: recipe.into(),
            files,
            interval,
        })
    }

    /// Returns the names of the files that differ.
    pub(super) fn differences(&self, other: &Self) -> Vec<String> {
        let names = self.files.keys().chain(other.files.keys());
        let mut names: Vec<String> = names
            .filter(|name| self.files.get(*name) != other.files.get(*name))
            .cloned()
            .collect();
        names.sort();
        names.dedup();
        names
    }
}

/// Returns a hash that is the same for one binary.
fn hash(of: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

/// Returns the folders in `folder`.
fn folders(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let paths = entries.map(|entry| Ok(entry?.path()));
    let paths: Vec<PathBuf> = paths.collect::<Result<_>>()?;
    Ok(paths.into_iter().filter(|path| path.is_dir()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_or_is_missing_is_named() {
        let left = |files: &[(&str, u64)]| RunOutput {
            recipe: "f32".into(),
            files: (files.iter().map(|(name, hash)| ((*name).into(), *hash))).collect(),
            interval: 0.0,
        };
        let first = left(&[("model.bpk", 1), ("state.json", 2)]);
        assert!(first.differences(&first).is_empty());
        let other = left(&[("model.bpk", 3), ("optimizer.bpk", 2)]);
        let expected = ["model.bpk", "optimizer.bpk", "state.json"];
        assert_eq!(first.differences(&other), expected);
    }

    #[test]
    fn rows_are_compared_without_their_speed() {
        let [slow, fast] =
            ["20,1,4.5,,1e-3,9.5", "20,1,4.5,,1e-3,10.5"].map(|line| Row::parse(line).unwrap());
        assert_eq!((slow.step, slow.tokens_per_s), (20, Some(9.5)));
        assert_eq!(slow.timeless, fast.timeless);
        assert_eq!(Row::parse("0,0,,10.5,1e-3,").unwrap().tokens_per_s, None);
        assert_eq!(Row::parse("20,1,4.5"), None);
    }
}
