//! Writes the tensors of a planned model, each once, and resumes where an interrupted run stopped.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use safetensors::Dtype;

use super::INDEX_FILE;
use super::header::Entry;
use super::plan::{FilePlan, ModelPlan};
use super::writer::TensorSink;
use crate::checkpoint::sync_folder;

/// Writes the tensors of a [`ModelPlan`] in any order. Every tensor is written once, to its place
/// in the file.
///
/// The unfinished files stay in their own folder, also if this value is dropped or the process is
/// killed, until [`finish`](Self::finish) moves them. The caller records which tensors are written,
/// after [`sync`](Self::sync), and passes them to [`keep`](Self::keep) to resume.
pub struct PlannedWriter {
    plan: ModelPlan,
    /// Folder of the unfinished files.
    folder: PathBuf,
    files: Vec<File>,
    /// Index of the file and location of each tensor.
    places: BTreeMap<String, (usize, Entry)>,
    /// Tensors that are not written yet.
    missing: BTreeSet<String>,
    /// Files that were written since the last [`sync`](Self::sync).
    unsynced: BTreeSet<usize>,
}

impl PlannedWriter {
    /// Creates the files of `plan` in `folder`; replaces unfinished files of the same names.
    ///
    /// # Errors
    /// Returns an error if a file cannot be written.
    pub fn create(plan: ModelPlan, folder: &Path) -> Result<Self> {
        let create = |path: &Path, file: &FilePlan| {
            let mut created = File::create(path)?;
            created.write_all(&file.header)?;
            created.set_len(file.bytes)?;
            created.sync_all()?;
            Ok(created)
        };
        let writer = Self::with_files(plan, folder, create)?;
        sync_folder(folder).with_context(|| folder.display().to_string())?;
        Ok(writer)
    }

    /// Opens the unfinished files of `plan` in `folder`. Files that an interrupted
    /// [`finish`](Self::finish) moved to the folder `moved_to` are moved back.
    ///
    /// # Errors
    /// Returns an error if a file is missing or does not belong to `plan`.
    pub fn resume(plan: ModelPlan, folder: &Path, moved_to: &Path) -> Result<Self> {
        let index = moved_to.join(INDEX_FILE);
        if index.exists() {
            fs::remove_file(&index).with_context(|| index.display().to_string())?;
        }
        let open = |path: &Path, file: &FilePlan| {
            let moved = moved_to.join(path.file_name().unwrap_or_default());
            if !path.exists() && moved.exists() {
                fs::rename(&moved, path)?;
            }
            let mut opened = File::options().read(true).write(true).open(path)?;
            let mut header = vec![0; file.header.len()];
            ensure!(
                opened.metadata()?.len() == file.bytes
                    && opened.read_exact(&mut header).is_ok()
                    && header == file.header,
                "the file was changed since the run that is resumed: remove the folder, and start \
                 anew"
            );
            Ok(opened)
        };
        Self::with_files(plan, folder, open)
    }

    fn with_files(
        plan: ModelPlan,
        folder: &Path,
        mut open: impl FnMut(&Path, &FilePlan) -> Result<File>,
    ) -> Result<Self> {
        let mut files = Vec::new();
        let mut places = BTreeMap::new();
        for (index, file) in plan.files.iter().enumerate() {
            let path = folder.join(plan.file_name(index));
            files.push(open(&path, file).with_context(|| path.display().to_string())?);
            let tensors = file.tensors.iter().cloned();
            places.extend(tensors.map(|(name, entry)| (name, (index, entry))));
        }
        Ok(Self {
            folder: folder.to_owned(),
            files,
            missing: places.keys().cloned().collect(),
            places,
            unsynced: BTreeSet::new(),
            plan,
        })
    }

    /// Marks the tensor `name` as written by the run that is resumed.
    pub fn keep(&mut self, name: &str) {
        self.missing.remove(name);
    }

    /// Flushes all written tensors to disk.
    ///
    /// # Errors
    /// Returns an error if that fails.
    pub fn sync(&mut self) -> Result<()> {
        for index in std::mem::take(&mut self.unsynced) {
            let synced = self.files[index].sync_data();
            synced.with_context(|| self.path(index).display().to_string())?;
        }
        Ok(())
    }

    /// Moves the files to `folder`, and writes the index if there are several.
    ///
    /// # Errors
    /// Returns an error if a tensor is missing or a file cannot be moved.
    pub fn finish(mut self, folder: &Path) -> Result<()> {
        if let Some(name) = self.missing.first() {
            bail!(
                "tensor `{name}` and {} others were not written",
                self.missing.len() - 1
            );
        }
        self.sync()?;
        // The index comes last: shards without an index are not a model.
        for index in 0..self.files.len() {
            let target = folder.join(self.plan.file_name(index));
            let moved = fs::rename(self.path(index), &target);
            moved.with_context(|| target.display().to_string())?;
        }
        self.plan.write_index(folder)
    }

    fn path(&self, index: usize) -> PathBuf {
        self.folder.join(self.plan.file_name(index))
    }
}

impl TensorSink for PlannedWriter {
    /// Writes a tensor to its place.
    ///
    /// # Errors
    /// Returns an error if the tensor is not as planned, is written already, or writing fails.
    fn add(&mut self, name: &str, dtype: Dtype, shape: &[usize], bytes: &[u8]) -> Result<()> {
        let place = self.places.get(name);
        let (index, entry) = place.with_context(|| format!("tensor `{name}` is not planned"))?;
        ensure!(
            (dtype, shape, bytes.len())
                == (entry.dtype, entry.shape.as_slice(), entry.end - entry.start),
            "tensor `{name}`: {} bytes of {dtype:?}{shape:?} are written, but {:?}{:?} was planned",
            bytes.len(),
            entry.dtype,
            entry.shape
        );
        ensure!(
            self.missing.remove(name),
            "tensor `{name}` is written already"
        );
        let mut file = &self.files[*index];
        let written = file
            .seek(SeekFrom::Start(entry.start as u64))
            .and_then(|_| file.write_all(bytes));
        written.with_context(|| self.path(*index).display().to_string())?;
        self.unsynced.insert(*index);
        Ok(())
    }
}
