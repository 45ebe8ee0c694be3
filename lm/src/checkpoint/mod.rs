//! Reads and writes checkpoints of a run.
//!
//! A checkpoint is a folder `checkpoint-STEP` with these files:
//!
//! - `model.bpk`: the parameters, a Burn record;
//! - `optimizer.bpk`: the optimizer state, and f32 copies of parameters of another type;
//! - `state.json`: [`State`], everything else that decides how the run continues;
//! - `timing.json`: the time spent, in a separate file because it differs between runs;
//! - `manifest.json`: length and checksum of the other four.
//!
//! If parameters or optimizer state are split over ranks, each rank writes its shards as
//! `model-R.bpk` and `optimizer-R.bpk`, and `layout.json` describes the split. Ranks that share a
//! shard (of a matrix or of the experts) may split it again. Such a checkpoint can be read like any
//! other, also on a different number of ranks. It uses the parameters and paths of the single-rank
//! model.
//!
//! A checkpoint is written under another name, synced to disk, and renamed. Only then are older
//! ones removed, so the checkpoint with the highest step is always complete.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use burn::tensor::Bytes;
use burn_nvfp4::Nvfp4State;
use burn_nvfp4::parallel::ProcessGroup;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::config::RunConfig;
use crate::hf::folder::check_folder;
use crate::random::hash;
use crate::ranks::{agree, gathered_bytes, on_first};
use parts::{Level, Partition, ranks_of};

pub(crate) mod parts;

/// Version of the format; other versions are refused.
const FORMAT: u32 = 1;
const PREFIX: &str = "checkpoint-";
const UNFINISHED: &str = ".unfinished";
const MANIFEST: &str = "manifest.json";
const LAYOUT: &str = "layout.json";
const MODEL: &str = "model.bpk";
const OPTIMIZER: &str = "optimizer.bpk";
const STATE: &str = "state.json";
const TIMING: &str = "timing.json";
/// File with the run's configuration, in the folder of a run.
pub const CONFIG: &str = "config.json";

/// State that decides how a run continues, apart from the parameters and the optimizer state.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct State<R> {
    format: u32,
    /// Configuration and data of the run.
    #[serde(flatten)]
    pub run: R,
    /// Number of finished steps.
    pub step: u64,
    /// Losses of the steps since the last row of `metrics.csv`.
    pub losses: Vec<f32>,
    /// Position in the random stream of each layer.
    pub nvfp4: Nvfp4State,
}

impl<R> State<R> {
    /// Returns the state of `run` after `step` steps.
    pub fn new(run: R, step: u64, losses: Vec<f32>, nvfp4: Nvfp4State) -> Self {
        Self {
            format: FORMAT,
            run,
            step,
            losses,
            nvfp4,
        }
    }
}

/// Wall-clock time of a run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// Seconds spent on training and evaluation so far.
    pub seconds: f64,
}

/// Contents of a checkpoint of the run `R`.
pub struct Saved<R> {
    /// See [`State`].
    pub state: State<R>,
    /// See [`Timing`].
    pub timing: Timing,
    /// Burnpack container of the parameters.
    pub model: Bytes,
    /// Burnpack container of the optimizer's state.
    pub optimizer: Bytes,
}

#[derive(Serialize, Deserialize, PartialEq)]
struct Entry {
    bytes: usize,
    checksum: String,
}

impl Entry {
    fn of(content: &[u8]) -> Self {
        Self::from_numbers(content.len() as u64, hash(content))
    }

    fn from_numbers(bytes: u64, hash: u64) -> Self {
        Self {
            bytes: bytes as usize,
            checksum: format!("{hash:016x}"),
        }
    }
}

/// Describes how the files of several ranks split the tensors.
#[derive(Debug, Serialize, Deserialize)]
struct Layout {
    /// Levels of the split, outermost first; each level splits the shards of the level before.
    levels: Vec<Level>,
}

impl Layout {
    /// Returns the levels that split the optimizer state, or only those that also split the model.
    fn levels(&self, of_model: bool) -> Vec<&Level> {
        let levels = self.levels.iter();
        levels.filter(|level| level.model || !of_model).collect()
    }

    /// Returns the number of ranks that write shards of the optimizer state or of the model.
    fn ranks(&self, of_model: bool) -> usize {
        ranks_of(self.levels(of_model)).unwrap_or_default()
    }

    /// Returns the files that `rank` writes: the model, if this rank writes one, and the optimizer
    /// state. The shards of all other ranks are duplicates.
    fn names(&self, rank: usize) -> [Option<String>; 2] {
        let model = match self.levels(true).is_empty() {
            false => format!("model-{rank}.bpk"),
            // The whole model, which all ranks have.
            true => MODEL.into(),
        };
        [
            (rank < self.ranks(true)).then_some(model),
            (rank < self.ranks(false)).then(|| format!("optimizer-{rank}.bpk")),
        ]
    }
}

impl<R: Serialize + DeserializeOwned> Saved<R> {
    /// Writes the checkpoint into `folder`, then removes the older ones there. Returns its path.
    ///
    /// # Errors
    /// Returns an error if a file cannot be written; the older checkpoints then remain.
    pub fn save(&self, folder: &Path) -> Result<PathBuf> {
        let unfinished = Unfinished::begin(folder, self.state.step)?;
        let model = unfinished.write(MODEL, &self.model)?;
        let optimizer = unfinished.write(OPTIMIZER, &self.optimizer)?;
        let manifest = [(MODEL.into(), model), (OPTIMIZER.into(), optimizer)];
        self.finish(unfinished, manifest.into(), None)
    }

    /// Writes the checkpoint of the ranks of `world` into `folder`, which all of them see. With a
    /// `partition`, each rank writes its shards; else rank 0 writes the common state. All ranks
    /// call this function. Returns the path; without a partition, only on rank 0.
    ///
    /// # Errors
    /// Returns the errors of [`save`](Self::save), on all ranks.
    pub(crate) fn save_of_ranks(
        &self,
        folder: &Path,
        world: &ProcessGroup,
        partition: Option<&Partition>,
    ) -> Result<PathBuf> {
        match partition {
            Some(partition) => self.save_parts(folder, world, partition),
            None => {
                let path = on_first(world, || self.save(folder))?;
                Ok(path.unwrap_or_else(|| folder.into()))
            }
        }
    }

    /// Writes the checkpoint of ranks whose shards `partition` describes into `folder`, which all
    /// of them see. All ranks of `world` call this function, each with its own shards; rank 0
    /// writes the other files. Returns the path.
    ///
    /// # Errors
    /// Returns an error if one of the ranks cannot write a file; the older checkpoints then remain.
    fn save_parts(
        &self,
        folder: &Path,
        world: &ProcessGroup,
        partition: &Partition,
    ) -> Result<PathBuf> {
        let layout = Layout {
            levels: partition.levels.clone(),
        };
        let begun = match world.rank() {
            0 => Unfinished::begin(folder, self.state.step),
            _ => Ok(Unfinished::at(folder, self.state.step)),
        };
        let unfinished = agree(world, begun)?;
        let contents = [&self.model, &self.optimizer];
        let files = layout.names(world.rank()).into_iter().zip(contents);
        let write = |(name, content): (Option<String>, &Bytes)| match name {
            Some(name) => unfinished.write(&name, content).map(drop),
            None => Ok(()),
        };
        agree(world, files.into_iter().try_for_each(write))?;
        // Length and checksum of both files.
        let mut numbers = [0; 32];
        for (place, content) in contents.into_iter().enumerate() {
            let own = &mut numbers[16 * place..16 * (place + 1)];
            own[..8].copy_from_slice(&(content.len() as u64).to_le_bytes());
            own[8..].copy_from_slice(&hash(content).to_le_bytes());
        }
        let mut manifest = BTreeMap::new();
        for (rank, numbers) in gathered_bytes(world, numbers)?.iter().enumerate() {
            let number = |at: usize| {
                let bytes = numbers[at..at + 8].try_into();
                u64::from_le_bytes(bytes.expect("eight bytes"))
            };
            for (place, name) in layout.names(rank).into_iter().enumerate() {
                let entry = Entry::from_numbers(number(16 * place), number(16 * place + 8));
                manifest.extend(name.map(|name| (name, entry)));
            }
        }
        let path = unfinished.path.clone();
        let finished = match world.rank() {
            0 => self.finish(unfinished, manifest, Some(&layout)),
            _ => Ok(path),
        };
        agree(world, finished)
    }

    /// Writes the files that only one rank writes, renames the checkpoint and removes the older
    /// ones.
    fn finish(
        &self,
        unfinished: Unfinished,
        mut manifest: BTreeMap<String, Entry>,
        layout: Option<&Layout>,
    ) -> Result<PathBuf> {
        let mut files = vec![
            (STATE, pretty(&self.state)?),
            (TIMING, pretty(&self.timing)?),
        ];
        if let Some(layout) = layout {
            files.push((LAYOUT, pretty(layout)?));
        }
        for (name, content) in files {
            manifest.insert(name.into(), unfinished.write(name, &content)?);
        }
        unfinished.write(MANIFEST, &pretty(&manifest)?)?;
        unfinished.finish()
    }

    /// Reads the checkpoint at `path`.
    ///
    /// # Errors
    /// Returns an error that names the file if a file is missing, corrupt, or of another version of
    /// the format.
    pub fn load(path: &Path) -> Result<Self> {
        let context = || format!("cannot load checkpoint {}", path.display());
        Self::try_load(path).with_context(context)
    }

    fn try_load(path: &Path) -> Result<Self> {
        let read = |name: &str| {
            fs::read(path.join(name)).with_context(|| format!("{name} cannot be read"))
        };
        let manifest: BTreeMap<String, Entry> =
            serde_json::from_slice(&read(MANIFEST)?).context("manifest.json is damaged")?;
        let verified = |name: &str| -> Result<Bytes> {
            let content = read(name)?;
            let entry = manifest
                .get(name)
                .with_context(|| format!("manifest.json is damaged: it has no entry for {name}"))?;
            ensure!(
                Entry::of(&content) == *entry,
                "{name} is damaged: it has {} bytes with check sum {:016x}, but {} bytes with \
                 check sum {} were written",
                content.len(),
                hash(&content),
                entry.bytes,
                entry.checksum
            );
            Ok(Bytes::from_bytes_vec(content))
        };
        let state = verified(STATE)?;
        #[derive(Deserialize)]
        struct Version {
            format: u32,
        }
        let version: Version = serde_json::from_slice(&state).context("state.json")?;
        ensure!(
            version.format == FORMAT,
            "its format is {}, but this version reads format {FORMAT}",
            version.format
        );
        let (model, optimizer) = match manifest.contains_key(LAYOUT) {
            false => (verified(MODEL)?, verified(OPTIMIZER)?),
            true => {
                let layout: Layout =
                    serde_json::from_slice(&verified(LAYOUT)?).context("layout.json")?;
                let whole = |of_model: bool| {
                    let parts = (0..layout.ranks(of_model)).map(|rank| {
                        let [model, optimizer] = layout.names(rank);
                        let name = if of_model { model } else { optimizer };
                        verified(&name.context("a rank below the number of those that write")?)
                    });
                    parts::join(parts.collect::<Result<_>>()?, &layout.levels(of_model))
                };
                (whole(true)?, whole(false)?)
            }
        };
        Ok(Self {
            state: serde_json::from_slice(&state).context("state.json")?,
            timing: serde_json::from_slice(&verified(TIMING)?).context("timing.json")?,
            model,
            optimizer,
        })
    }
}

/// A checkpoint that is being written under a temporary name.
struct Unfinished {
    /// Final path.
    path: PathBuf,
    /// Temporary folder.
    folder: PathBuf,
}

impl Unfinished {
    /// Refers to the checkpoint of `step` in `folder`, which another rank begins.
    fn at(folder: &Path, step: u64) -> Self {
        let path = folder.join(format!("{PREFIX}{step:08}"));
        let folder = path.with_extension(&UNFINISHED[1..]);
        Self { path, folder }
    }

    fn begin(folder: &Path, step: u64) -> Result<Self> {
        let unfinished = Self::at(folder, step);
        let context = || unfinished.context();
        remove_folder(&unfinished.folder).with_context(context)?;
        fs::create_dir_all(&unfinished.folder).with_context(context)?;
        Ok(unfinished)
    }

    fn context(&self) -> String {
        format!("cannot write checkpoint {}", self.path.display())
    }

    fn write(&self, name: &str, content: &[u8]) -> Result<Entry> {
        let written = write_durably(&self.folder.join(name), content);
        written.with_context(|| self.context())?;
        Ok(Entry::of(content))
    }

    /// Renames the checkpoint to its final name and removes the older ones.
    fn finish(self) -> Result<PathBuf> {
        let context = || self.context();
        sync_folder(&self.folder).with_context(context)?;
        // The name exists only if the run was resumed at this very step, and then with the same
        // contents.
        remove_folder(&self.path).with_context(context)?;
        fs::rename(&self.folder, &self.path).with_context(context)?;
        let parent = self.path.parent().unwrap_or(Path::new("."));
        sync_folder(parent).with_context(context)?;
        for (_, older) in list(parent)? {
            if older != self.path {
                remove_folder(&older).with_context(context)?;
            }
        }
        Ok(self.path)
    }
}

/// Returns the path of the latest checkpoint in `folder`, if there is one.
///
/// # Errors
/// Returns an error if the folder cannot be read.
pub fn latest(folder: &Path) -> Result<Option<PathBuf>> {
    Ok(list(folder)?.pop().map(|(_, path)| path))
}

/// Resolves `path` to a checkpoint: itself, the latest in a recipe's folder, or the latest of the
/// main recipe in a run's folder.
///
/// # Errors
/// Returns an error if there is none.
pub fn resolve(path: &Path) -> Result<PathBuf> {
    check_folder(path)?;
    if path.join(MANIFEST).exists() {
        return Ok(path.into());
    }
    if let Some(latest) = latest(path)? {
        return Ok(latest);
    }
    let config = path.join(CONFIG);
    if config.exists() {
        let config: RunConfig = read_json(&config)?;
        let folder = path.join(config.recipe.name());
        if folder.is_dir()
            && let Some(latest) = latest(&folder)?
        {
            return Ok(latest);
        }
    }
    bail!(
        "there is no checkpoint in {}: give the folder of a run, of one of its recipes, or of a \
         checkpoint",
        path.display()
    )
}

/// Returns the settings in which the configurations `saved` and `own` differ, as the rest of an error
/// message.
///
/// # Errors
/// Returns an error if a configuration cannot be serialized.
pub(crate) fn differences<C: Serialize>(saved: &C, own: &C) -> Result<String> {
    /// Longest value in a message.
    const LONGEST: usize = 300;
    let [saved, own] = [serde_json::to_value(saved)?, serde_json::to_value(own)?];
    let mut texts = Vec::new();
    for (key, own) in own.as_object().into_iter().flatten() {
        let saved = &saved[key];
        if saved != own {
            let name = key.replace('_', "-");
            let values = format!("{name} was {saved}, and is {own}");
            texts.push(match values.len() {
                ..=LONGEST => values,
                _ => format!("{name} differs"),
            });
        }
    }
    Ok(format!(": {}", texts.join("; ")))
}

/// Parses the JSON file at `path`.
///
/// # Errors
/// Returns an error that names the file if it cannot be read or parsed.
pub fn read_json<T: DeserializeOwned>(path: &Path) -> Result<T> {
    let text = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("{} is not valid", path.display()))
}

/// Writes `value` to `path` as JSON, replacing the file atomically.
///
/// # Errors
/// Returns an error if the file cannot be written; the old file then remains.
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    replace(path, &pretty(value)?)
}

/// Replaces the file at `path` by `content` atomically.
///
/// # Errors
/// Returns an error if the file cannot be written; the old file then remains.
pub fn replace(path: &Path, content: &[u8]) -> Result<()> {
    let context = || format!("cannot write {}", path.display());
    let mut unfinished = path.as_os_str().to_owned();
    unfinished.push(UNFINISHED);
    write_durably(Path::new(&unfinished), content).with_context(context)?;
    fs::rename(&unfinished, path).with_context(context)
}

fn pretty(value: &impl Serialize) -> Result<Vec<u8>> {
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    Ok(text)
}

fn write_durably(path: &Path, content: &[u8]) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(content)?;
    file.sync_all()
}

/// Flushes the names in a folder to disk, on systems with a call for that.
pub(crate) fn sync_folder(path: &Path) -> std::io::Result<()> {
    if cfg!(unix) {
        File::open(path)?.sync_all()
    } else {
        Ok(())
    }
}

fn remove_folder(path: &Path) -> std::io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Lists the finished checkpoints in `folder`, lowest step first.
fn list(folder: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let context = || format!("cannot read {}", folder.display());
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(context)? {
        let path = entry.with_context(context)?.path();
        let step = path
            .file_name()
            .and_then(|name| name.to_str())
            .and_then(|name| name.strip_prefix(PREFIX))
            .and_then(|step| step.parse().ok());
        if let Some(step) = step {
            found.push((step, path));
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Preset, RecipeName};
    use crate::data::Fingerprint;
    use crate::train::{ByteRun, Checkpoint};

    fn checkpoint(step: u64) -> Checkpoint {
        let corpus = Fingerprint {
            train_files: 1,
            train_bytes: 2,
            valid_files: 3,
            valid_bytes: 4,
            checksum: "5".into(),
        };
        let run = ByteRun {
            config: RunConfig::preset(Preset::Tiny, "flex"),
            recipe: RecipeName::nvidia(),
            corpus,
        };
        let losses = vec![1.25, 0.1 + 0.2];
        Checkpoint {
            state: State::new(run, step, losses, Nvfp4State::default()),
            timing: Timing { seconds: 1.5 },
            model: Bytes::from_bytes_vec(vec![7; 1000]),
            optimizer: Bytes::from_bytes_vec(vec![8; 2000]),
        }
    }

    fn folder(name: &str) -> PathBuf {
        let path =
            std::env::temp_dir().join(format!("nvfp4-checkpoint-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        path
    }

    #[test]
    fn the_newest_whole_one_stays() {
        let folder = folder("newest");
        let first = checkpoint(5).save(&folder).unwrap();
        let second = checkpoint(100).save(&folder).unwrap();
        assert!(!first.exists());
        assert_eq!(latest(&folder).unwrap(), Some(second.clone()));
        assert_eq!(resolve(&folder).unwrap(), second);

        // A crash during the next write leaves a folder with a temporary name.
        let crashed = folder.join(format!("{PREFIX}{:08}{UNFINISHED}", 200));
        fs::create_dir(&crashed).unwrap();
        fs::write(crashed.join("model.bpk"), [1, 2, 3]).unwrap();
        assert_eq!(latest(&folder).unwrap(), Some(second.clone()));

        let loaded = Checkpoint::load(&second).unwrap();
        assert_eq!(loaded.state, checkpoint(100).state);
        assert_eq!(loaded.model.to_vec(), vec![7; 1000]);
        assert_eq!(loaded.optimizer.to_vec(), vec![8; 2000]);
        assert_eq!(
            checkpoint(200).save(&folder).unwrap(),
            crashed.with_extension("")
        );
        assert!(!crashed.exists());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn damage_is_an_error_that_names_the_file() {
        let folder = folder("damage");
        for name in [
            "model.bpk",
            "optimizer.bpk",
            "state.json",
            "timing.json",
            MANIFEST,
        ] {
            let path = checkpoint(1).save(&folder).unwrap();
            assert!(Checkpoint::load(&path).is_ok());
            let file = path.join(name);
            let whole = fs::read(&file).unwrap();
            let mut flipped = whole.clone();
            flipped[whole.len() / 2] ^= 1;
            for content in [&flipped[..], &whole[..whole.len() - 5], &[]] {
                fs::write(&file, content).unwrap();
                let Err(error) = Checkpoint::load(&path) else {
                    panic!("{name} loaded")
                };
                let error = format!("{error:#}");
                assert!(error.contains("damaged"), "{name}: {error}");
            }
            fs::remove_file(&file).unwrap();
            let Err(error) = Checkpoint::load(&path) else {
                panic!("{name} loaded")
            };
            assert!(format!("{error:#}").contains(name), "{error:#}");
        }
        fs::remove_dir_all(folder).unwrap();
    }
}
