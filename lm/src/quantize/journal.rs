//! Stores the progress of an unfinished quantization on disk, to resume an interrupted run.
//!
//! While a model is quantized to a folder, its subfolder `.nvfp4_quantize` has:
//!
//! - `made_from.json`: the version, a hash of the model, the options, and the calibration data;
//! - `calibration`: the statistics, bit for bit, once they are complete;
//! - the safetensors files of the model, planned in advance and filled layer by layer;
//! - `part-N.json`: the rows of the report for decoder layer N of the plan, once all of its tensors
//!   are on disk in the files above.
//!
//! The journal and each of its entries are renamed to their names when they are complete. Finally,
//! the files are moved to the output folder, the other files of the model are written, and the
//! journal is renamed and removed. A run can thus be resumed after any system call at which it was
//! killed: it keeps the tensors of complete parts and writes the others again. The plan of the
//! files depends only on the entries of `made_from.json`, so the bytes are the same.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::mxfp4::Cast;
use super::report::{LayerReport, PartReport};
use super::stats::{Calibration, InputStats, Products};
use super::weight_format::WeightFormat;
use crate::checkpoint::{read_json, sync_folder, write_json};
use crate::hf::config::CONFIG_FILE;
use crate::hf::folder::UNFINISHED;
use crate::hf::{Dtype, ModelPlan, PlannedWriter, TensorFolder, TensorWriter};
use crate::interchange::convert::create_empty;

/// Subfolder of the journal in the output folder.
pub const JOURNAL: &str = UNFINISHED;

const MADE_FROM: &str = "made_from.json";
const CALIBRATION: &str = "calibration";
const REPORT: &str = "report.json";
/// Prefix of the entry of a part.
const PART: &str = "part-";
const JSON: &str = ".json";
/// Suffix of an incomplete entry.
const PARTIAL: &str = ".partial";

/// Inputs of a run, by option name.
pub type MadeFrom = BTreeMap<String, Value>;

/// Returns true if the folder `out` holds a journal, also one that is not complete.
pub fn has_journal(out: &Path) -> bool {
    let journal = Journal::in_folder(out);
    journal.folder.exists() || journal.partial().exists()
}

/// The journal of a run.
pub(crate) struct Journal {
    out: PathBuf,
    folder: PathBuf,
    /// The locked file of the inputs, once the journal exists.
    lock: Option<File>,
}

/// Report in the form of the file.
#[derive(Serialize, Deserialize)]
struct StoredReport {
    layers: Vec<StoredLayer>,
    unseen: Vec<String>,
}

/// A layer's row; ratios are stored as bits, because JSON has no infinity.
#[derive(Serialize, Deserialize)]
struct StoredLayer {
    module: String,
    format: WeightFormat,
    shape: [usize; 2],
    bytes_before: usize,
    bytes: usize,
    amax: u32,
    sqnr: u64,
    weighted_sqnr: Option<u64>,
    cast: Option<Cast>,
}

impl From<&LayerReport> for StoredLayer {
    fn from(layer: &LayerReport) -> Self {
        Self {
            module: layer.module.clone(),
            format: layer.format,
            shape: layer.shape,
            bytes_before: layer.bytes_before,
            bytes: layer.bytes,
            amax: layer.amax.to_bits(),
            sqnr: layer.sqnr.to_bits(),
            weighted_sqnr: layer.weighted_sqnr.map(f64::to_bits),
            cast: layer.cast,
        }
    }
}

impl From<StoredLayer> for LayerReport {
    fn from(layer: StoredLayer) -> Self {
        Self {
            module: layer.module,
            format: layer.format,
            shape: layer.shape,
            bytes_before: layer.bytes_before,
            bytes: layer.bytes,
            amax: f32::from_bits(layer.amax),
            sqnr: f64::from_bits(layer.sqnr),
            weighted_sqnr: layer.weighted_sqnr.map(f64::from_bits),
            cast: layer.cast,
        }
    }
}

/// Input of each module, and the token count of each input.
#[derive(Serialize, Deserialize)]
struct StoredInputs {
    modules: BTreeMap<String, usize>,
    tokens: Vec<u64>,
}

impl Journal {
    /// Starts the journal of a new run into the folder `out`, which must be absent, empty, or hold
    /// an interrupted run that has no complete entry.
    pub fn start(out: &Path, made_from: &MadeFrom) -> Result<Self> {
        let mut journal = Self::in_folder(out);
        if journal.folder.join(MADE_FROM).exists() {
            journal.lock(&journal.folder.clone())?;
        }
        ensure!(
            journal.entries()?.is_empty(),
            "out {} must be empty, but it holds a quantization that is not finished: --resume \
             continues it, and removing the folder starts anew",
            out.display()
        );
        for folder in [&journal.folder, &journal.partial()] {
            if folder.exists() {
                fs::remove_dir_all(folder).with_context(|| folder.display().to_string())?;
            }
        }
        create_empty(out)?;
        let partial = journal.partial();
        fs::create_dir(&partial).with_context(|| partial.display().to_string())?;
        write_json(&partial.join(MADE_FROM), made_from)?;
        journal.lock(&partial)?;
        fs::rename(&partial, &journal.folder)
            .with_context(|| journal.folder.display().to_string())?;
        Ok(journal)
    }

    /// Opens the journal of an unfinished run into `out`. Starts it if the run was interrupted
    /// before it had a complete entry.
    ///
    /// # Errors
    /// Returns an error if there is none. Returns an error that names the difference if the run has
    /// other inputs.
    pub fn resume(out: &Path, made_from: &MadeFrom) -> Result<Self> {
        let mut journal = Self::in_folder(out);
        let path = journal.folder.join(MADE_FROM);
        let partial = journal.partial();
        let is_finished = !path.exists() && out.join(CONFIG_FILE).exists();
        if is_finished && partial.exists() {
            // Killed at the end of `finish`.
            fs::remove_dir_all(&partial).with_context(|| partial.display().to_string())?;
        }
        if partial.exists() || is_empty(out) {
            return Self::start(out, made_from);
        }
        ensure!(
            path.exists(),
            "resume is given, but there is nothing to resume in out {}: {}",
            out.display(),
            match is_finished {
                true => "the quantization is finished",
                false => "it holds no quantization that is not finished",
            }
        );
        journal.lock(&journal.folder.clone())?;
        let found: MadeFrom = read_json(&path)?;
        if let Some(difference) = difference(&found, made_from) {
            bail!(
                "the run in {} cannot be resumed: its {difference}",
                out.display()
            );
        }
        journal.remove_incomplete()?;
        Ok(journal)
    }

    fn in_folder(out: &Path) -> Self {
        Self {
            out: out.to_owned(),
            folder: out.join(JOURNAL),
            lock: None,
        }
    }

    /// Locks the journal in `folder` until this value is dropped. File systems without locks have
    /// none.
    ///
    /// # Errors
    /// Returns an error if another process has the lock.
    fn lock(&mut self, folder: &Path) -> Result<()> {
        let path = folder.join(MADE_FROM);
        let file = File::open(&path).with_context(|| path.display().to_string())?;
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            bail!(
                "another process quantizes to {}: wait for it or give another --out",
                self.out.display()
            );
        }
        self.lock = Some(file);
        Ok(())
    }

    /// Returns the path of the journal before it is complete, and while it is removed.
    fn partial(&self) -> PathBuf {
        self.out.join(format!("{JOURNAL}{PARTIAL}"))
    }

    /// Returns the complete entries.
    fn entries(&self) -> Result<Vec<PathBuf>> {
        if !self.folder.exists() {
            return Ok(Vec::new());
        }
        let entries = named_entries(&self.folder)?.into_iter();
        let complete = entries.filter(|(_, name)| name == CALIBRATION || is_part(name));
        Ok(complete.map(|(path, _)| path).collect())
    }

    /// Removes partial entries, which an interrupted run left.
    fn remove_incomplete(&self) -> Result<()> {
        for (path, name) in named_entries(&self.folder)? {
            if name.ends_with(PARTIAL) && path.is_dir() {
                fs::remove_dir_all(&path).with_context(|| path.display().to_string())?;
            }
        }
        Ok(())
    }

    /// Returns the calibration, if it is complete.
    pub fn calibration(&self) -> Result<Option<Calibration>> {
        let folder = self.folder.join(CALIBRATION);
        if !folder.exists() {
            return Ok(None);
        }
        let read = || -> Result<Calibration> {
            let stored: StoredInputs = read_json(&folder.join(REPORT))?;
            let tensors = TensorFolder::open(&folder)?;
            let mut inputs = Vec::new();
            for (index, tokens) in stored.tokens.iter().enumerate() {
                inputs.push(Arc::new(read_input(&tensors, index, *tokens)?));
            }
            let mut calibration = Calibration::new();
            for (module, index) in stored.modules {
                let input = inputs.get(index).context("a module has no input")?;
                calibration.inputs.insert(module, input.clone());
            }
            for tensor in tensors.iter() {
                if let Some(attention) = tensor.name.strip_prefix("cache.") {
                    let amax = <[f32; 2]>::try_from(tensor.to_f32()?);
                    let Ok(amax) = amax else {
                        bail!("{tensor} has {:?} numbers, not 2", tensor.shape);
                    };
                    calibration.caches.insert(attention.to_owned(), amax);
                }
            }
            Ok(calibration)
        };
        read()
            .with_context(|| folder.display().to_string())
            .map(Some)
    }

    /// Stores the calibration.
    pub fn keep_calibration(&self, calibration: &Calibration) -> Result<()> {
        self.entry(CALIBRATION, |folder| {
            let mut writer = TensorWriter::create(folder, TensorWriter::SHARD_BYTES)?;
            // Modules that read the same input share its statistics in the journal as well.
            let mut known: Vec<&Arc<InputStats>> = Vec::new();
            let mut modules = BTreeMap::new();
            for (module, stats) in &calibration.inputs {
                let same = known.iter().position(|known| Arc::ptr_eq(known, stats));
                let index = same.unwrap_or_else(|| {
                    known.push(stats);
                    known.len() - 1
                });
                modules.insert(module.clone(), index);
            }
            for (index, stats) in known.iter().enumerate() {
                write_input(&mut writer, index, stats)?;
            }
            for (attention, amax) in &calibration.caches {
                let name = format!("cache.{attention}");
                writer.add(&name, Dtype::F32, &[2], &bytes_of(amax, f32::to_le_bytes))?;
            }
            writer.finish()?;
            let tokens = known.iter().map(|stats| stats.tokens()).collect();
            write_json(&folder.join(REPORT), &StoredInputs { modules, tokens })
        })
    }

    fn part_path(&self, index: usize) -> PathBuf {
        self.folder.join(format!("{PART}{index:05}{JSON}"))
    }

    /// Returns the report of part `index`, if the part is complete.
    pub fn part(&self, index: usize) -> Result<Option<PartReport>> {
        let path = self.part_path(index);
        if !path.exists() {
            return Ok(None);
        }
        let stored: StoredReport = read_json(&path)?;
        Ok(Some(PartReport {
            layers: stored.layers.into_iter().map(LayerReport::from).collect(),
            unseen: stored.unseen,
        }))
    }

    /// Returns the files of `plan`, with the tensors of complete parts, if there are any.
    pub fn files(&self, plan: ModelPlan) -> Result<PlannedWriter> {
        let entries = self.entries()?;
        match entries.iter().any(|path| path.is_file()) {
            true => PlannedWriter::resume(plan, &self.folder, &self.out),
            false => PlannedWriter::create(plan, &self.folder),
        }
    }

    /// Records that part `index` is complete, once its tensors in `files` are on disk.
    pub fn keep_part(
        &self,
        index: usize,
        files: &mut PlannedWriter,
        report: &PartReport,
    ) -> Result<()> {
        files.sync()?;
        let report = StoredReport {
            layers: report.layers.iter().map(StoredLayer::from).collect(),
            unseen: report.unseen.clone(),
        };
        write_json(&self.part_path(index), &report)
    }

    /// Creates an entry of the journal, filled by `write` and renamed when complete.
    fn entry(&self, name: &str, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        let folder = self.folder.join(name);
        let partial = self.folder.join(format!("{name}{PARTIAL}"));
        let context = || partial.display().to_string();
        if partial.exists() {
            fs::remove_dir_all(&partial).with_context(context)?;
        }
        fs::create_dir(&partial).with_context(context)?;
        write(&partial)?;
        fs::rename(&partial, &folder).with_context(|| folder.display().to_string())
    }

    /// Removes the journal after the run is finished.
    pub fn finish(&self) -> Result<()> {
        let partial = self.partial();
        sync_folder(&self.out)
            .and_then(|()| fs::rename(&self.folder, &partial))
            .and_then(|()| fs::remove_dir_all(&partial))
            .with_context(|| self.folder.display().to_string())
    }
}

/// Returns true if a complete part has the name `name`.
fn is_part(name: &str) -> bool {
    name.starts_with(PART) && name.ends_with(JSON)
}

/// Returns the entries of `folder` with their names.
fn named_entries(folder: &Path) -> Result<Vec<(PathBuf, String)>> {
    let name = || folder.display().to_string();
    let entries = fs::read_dir(folder).with_context(name)?;
    let paths: Result<Vec<PathBuf>> = entries.map(|entry| Ok(entry?.path())).collect();
    let named = |path: PathBuf| {
        let name = path.file_name()?.to_str()?.to_owned();
        Some((path, name))
    };
    Ok(paths?.into_iter().filter_map(named).collect())
}

/// Returns true if `folder` is an empty folder.
fn is_empty(folder: &Path) -> bool {
    fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none())
}

fn bytes_of<T: Copy, const N: usize>(values: &[T], to_bytes: fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|value| to_bytes(*value)).collect()
}

fn write_input(writer: &mut TensorWriter, index: usize, stats: &InputStats) -> Result<()> {
    let k = stats.k();
    let name = |what: &str| format!("{what}.{index}");
    let amax = bytes_of(&stats.amax, f32::to_le_bytes);
    writer.add(&name("amax"), Dtype::F32, &[k], &amax)?;
    let squares = bytes_of(&stats.squares, f64::to_le_bytes);
    writer.add(&name("squares"), Dtype::F64, &[k], &squares)?;
    if let Some(products) = &stats.products {
        let products = bytes_of(&products.on_host()?, f64::to_le_bytes);
        writer.add(&name("products"), Dtype::F64, &[k, k], &products)?;
    }
    Ok(())
}

fn read_input(tensors: &TensorFolder, index: usize, tokens: u64) -> Result<InputStats> {
    let name = |what: &str| format!("{what}.{index}");
    let doubles = |name: &str| -> Result<Vec<f64>> {
        let tensor = tensors.get(name)?;
        ensure!(tensor.dtype == Dtype::F64, "{tensor} is not F64");
        let bytes = tensor.bytes();
        let values = bytes.chunks_exact(8);
        let value = |bytes: &[u8]| f64::from_le_bytes(bytes.try_into().expect("8 bytes"));
        Ok(values.map(value).collect())
    };
    let amax = tensors.get(&name("amax"))?.to_f32()?;
    let k = amax.len();
    let mut stats = InputStats::new(k, false);
    stats.tokens = tokens;
    stats.amax = amax;
    stats.squares = doubles(&name("squares"))?;
    if tensors.contains(&name("products")) {
        let products = doubles(&name("products"))?;
        ensure!(
            products.len() == k * k,
            "the products of input {index} do not have {k} features"
        );
        stats.products = Some(Products::Host(products));
    }
    ensure!(
        stats.squares.len() == k,
        "the statistics of input {index} do not have {k} features"
    );
    Ok(stats)
}

/// Describes what differs between two runs; the first difference of many. Hashes come last: that of
/// the calibration tokens depends on the model and on options.
fn difference(then: &MadeFrom, now: &MadeFrom) -> Option<String> {
    let names: BTreeSet<&String> = then.keys().chain(now.keys()).collect();
    let values = |name: &String| [then, now].map(|of| of.get(name).unwrap_or(&Value::Null));
    let is_hash = |value: &Value| {
        let text = value.as_str();
        text.is_some_and(|it| it.len() == 16 && it.bytes().all(|byte| byte.is_ascii_hexdigit()))
    };
    let differ = |name: &&String| values(name)[0] != values(name)[1];
    let (hashes, plain): (Vec<&String>, Vec<&String>) = (names.into_iter())
        .filter(differ)
        .partition(|name| values(name).into_iter().all(is_hash));
    if let Some(name) = plain.first() {
        let [then, now] = values(name);
        return Some(format!("{name} was {then}, but now it is {now}"));
    }
    let is_model = |name: &&&String| name.as_str() != "calibration";
    let name = hashes.iter().find(is_model).or(hashes.first())?;
    Some(format!("{name} has changed"))
}
