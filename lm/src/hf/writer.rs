//! Writes the safetensors files of a model atomically.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use memmap2::Mmap;
use safetensors::Dtype;

use super::plan::{FilePlan, TensorSpec, check_name, file_name, write_index};
use super::{INDEX_FILE, WHOLE_FILE};
use crate::progress::{Unit, Work};

/// Receives the tensors of a model.
pub trait TensorSink {
    /// Adds a tensor with the elements `bytes`, little endian, last axis contiguous.
    ///
    /// # Errors
    /// Returns an error if the tensor is not accepted or writing fails.
    fn add(&mut self, name: &str, dtype: Dtype, shape: &[usize], bytes: &[u8]) -> Result<()>;
}

/// Writes the tensors of a model to `model.safetensors`, or to shards with an index if they exceed
/// the limit of one file.
///
/// Tensors arrive one by one and are written to disk at once, so that memory holds one of them at a
/// time. Their places in a file are known only when all of it have arrived, so every tensor is
/// written twice; [`PlannedWriter`](super::PlannedWriter) writes it once.
/// [`finish`](Self::finish) renames the files when all of them are on disk. Before that, and if
/// writing fails, the folder has no model.
pub struct TensorWriter {
    folder: PathBuf,
    shard_bytes: u64,
    /// Bytes of all tensors.
    total: u64,
    /// Shard index of each tensor, from 0.
    shard_of: BTreeMap<String, usize>,
    /// Complete shards under temporary names.
    shards: Vec<PathBuf>,
    spool: Option<Spool>,
    /// Progress, if it is reported.
    work: Option<Work>,
}

/// Tensors of the current shard, in arrival order.
struct Spool {
    path: PathBuf,
    file: BufWriter<File>,
    /// Tensors, with the first byte of each in the spool.
    tensors: Vec<(TensorSpec, usize)>,
    bytes: u64,
}

impl TensorWriter {
    /// Default limit on the tensor bytes per file: 5 GB, as in transformers 4.
    pub const SHARD_BYTES: u64 = 5_000_000_000;

    /// Creates a writer into the existing folder `folder`; a file gets at most `shard_bytes` bytes
    /// of tensors, but at least one tensor.
    ///
    /// # Errors
    /// Returns an error if there is no such folder, or if it already has a model.
    pub fn create(folder: &Path, shard_bytes: u64) -> Result<Self> {
        ensure!(
            folder.is_dir(),
            "{} is no folder, so that no model can be written to it",
            folder.display()
        );
        for file in [WHOLE_FILE, INDEX_FILE] {
            let path = folder.join(file);
            ensure!(
                !path.exists(),
                "{} exists already: write the model to another folder",
                path.display()
            );
        }
        Ok(Self {
            folder: folder.to_owned(),
            shard_bytes,
            total: 0,
            shard_of: BTreeMap::new(),
            shards: Vec::new(),
            spool: None,
            work: None,
        })
    }

    /// Reports the progress of writing tensors of `bytes` bytes in total.
    pub fn with_progress(mut self, bytes: usize) -> Self {
        self.work = Some(Work::begin("write", Unit::Bytes, 0, bytes));
        self
    }

    /// Adds a tensor with the elements `bytes`, little endian, last axis contiguous.
    ///
    /// # Errors
    /// Returns an error if the name exists, the number of bytes does not match type and shape, or
    /// writing fails.
    pub fn add(&mut self, name: &str, dtype: Dtype, shape: &[usize], bytes: &[u8]) -> Result<()> {
        let spec = TensorSpec::new(name, dtype, shape);
        ensure!(
            spec.bytes().ok() == Some(bytes.len() as u64),
            "tensor `{name}`: {} bytes are no {dtype:?}{shape:?}",
            bytes.len()
        );
        check_name(name, self.shard_of.contains_key(name))?;
        let length = bytes.len() as u64;
        let is_full = |spool: &Spool| spool.bytes + length > self.shard_bytes;
        if self.spool.as_ref().is_some_and(is_full) {
            self.end_shard()?;
        }
        let path = self.partial("data");
        let spool = match &mut self.spool {
            Some(spool) => spool,
            none => none.insert(Spool {
                file: BufWriter::new(
                    File::create(&path).with_context(|| path.display().to_string())?,
                ),
                path,
                tensors: Vec::new(),
                bytes: 0,
            }),
        };
        let write = spool.file.write_all(bytes);
        write.with_context(|| spool.path.display().to_string())?;
        spool.tensors.push((spec, spool.bytes as usize));
        spool.bytes += length;
        self.total += length;
        if let Some(work) = &mut self.work {
            work.add(bytes.len());
        }
        self.shard_of.insert(name.to_owned(), self.shards.len());
        Ok(())
    }

    /// Renames the files to their final names.
    ///
    /// # Errors
    /// Returns an error if no tensor was added, or writing fails; then the folder has no model.
    pub fn finish(mut self) -> Result<()> {
        ensure!(
            !self.shard_of.is_empty(),
            "a model has at least one tensor, but none was written to {}",
            self.folder.display()
        );
        self.end_shard()?;
        let count = self.shards.len();
        // The index comes last: shards without an index are not a model.
        for (shard, partial) in self.shards.iter().enumerate() {
            let path = self.folder.join(file_name(shard, count));
            fs::rename(partial, &path).with_context(|| path.display().to_string())?;
        }
        write_index(&self.folder, &self.shard_of, count, self.total)
    }

    /// Converts the spooled tensors to a safetensors file under a temporary name.
    fn end_shard(&mut self) -> Result<()> {
        let Some(spool) = self.spool.take() else {
            return Ok(());
        };
        let shard = self.partial(&self.shards.len().to_string());
        self.shards.push(shard.clone());
        let written = spool.write(&shard);
        written.with_context(|| shard.display().to_string())
    }

    /// Returns the path of an unfinished file.
    fn partial(&self, what: &str) -> PathBuf {
        let name = format!(".model-{what}-{}.partial", std::process::id());
        self.folder.join(name)
    }
}

impl Drop for TensorWriter {
    fn drop(&mut self) {
        let spool = self.spool.take().map(|spool| spool.path.clone());
        for partial in self.shards.iter().chain(&spool) {
            // After `finish` these files no longer exist.
            let _ = fs::remove_file(partial);
        }
    }
}

impl TensorSink for TensorWriter {
    fn add(&mut self, name: &str, dtype: Dtype, shape: &[usize], bytes: &[u8]) -> Result<()> {
        Self::add(self, name, dtype, shape, bytes)
    }
}

impl Spool {
    /// Writes the safetensors file `path`, and syncs it to disk.
    fn write(mut self, path: &Path) -> Result<()> {
        self.file.flush()?;
        let tensors = std::mem::take(&mut self.tensors);
        let names = tensors
            .iter()
            .map(|(spec, start)| (spec.name.clone(), *start));
        let starts: BTreeMap<String, usize> = names.collect();
        let plan = FilePlan::new(tensors.into_iter().map(|(spec, _)| spec).collect())?;
        let spool = File::open(&self.path)?;
        // SAFETY: the file is ours alone, and stays as it is until it is removed.
        let data = unsafe { Mmap::map(&spool)? };
        let mut file = BufWriter::new(File::create(path)?);
        file.write_all(&plan.header)?;
        for (name, entry) in &plan.tensors {
            file.write_all(&data[starts[name]..][..entry.end - entry.start])?;
        }
        file.into_inner()?.sync_all()?;
        Ok(())
    }
}

impl Drop for Spool {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}
