//! Writes the safetensors files of a model atomically.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use memmap2::Mmap;
use safetensors::{Dtype, View};
use serde_json::json;

use super::header::bytes_of;
use super::{INDEX_FILE, WHOLE_FILE};
use crate::progress::{Unit, Work};

/// Writes the tensors of a model to `model.safetensors`, or to shards with an index if they exceed
/// the limit of one file.
///
/// Tensors arrive one by one and are written to disk at once, so that memory holds one of them at a
/// time. [`finish`](Self::finish) renames the files when all of them are on disk. Before that, and
/// if writing fails, the folder has no model. In a file, tensors have the order of the
/// `safetensors` library (wider types first, then by name), and the metadata is `format: pt`, which
/// transformers 4 requires.
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

/// Tensors of the current shard, in arrival order. Their final order and the header are known only
/// when the shard is full.
struct Spool {
    path: PathBuf,
    file: BufWriter<File>,
    tensors: Vec<(String, Dtype, Vec<usize>, usize)>,
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
        let axes: Vec<u64> = shape.iter().map(|axis| *axis as u64).collect();
        ensure!(
            bytes_of(dtype, &axes) == Some(bytes.len() as u64),
            "tensor `{name}`: {} bytes are no {dtype:?}{shape:?}",
            bytes.len()
        );
        ensure!(
            name != "__metadata__" && !self.shard_of.contains_key(name),
            "tensor `{name}`: there is one of this name already"
        );
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
        let start = spool.bytes as usize;
        spool.bytes += length;
        let tensor = (name.to_owned(), dtype, shape.to_vec(), start);
        spool.tensors.push(tensor);
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
        let name = |shard: usize| match count {
            1 => WHOLE_FILE.to_owned(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", shard + 1),
        };
        // The index comes last: shards without an index are not a model.
        for (shard, partial) in self.shards.iter().enumerate() {
            let path = self.folder.join(name(shard));
            fs::rename(partial, &path).with_context(|| path.display().to_string())?;
        }
        if count > 1 {
            let map: BTreeMap<&String, String> =
                self.shard_of.iter().map(|(k, v)| (k, name(*v))).collect();
            let index = json!({"metadata": {"total_size": self.total}, "weight_map": map});
            let mut text = serde_json::to_vec_pretty(&index)?;
            text.push(b'\n');
            crate::checkpoint::replace(&self.folder.join(INDEX_FILE), &text)?;
        }
        Ok(())
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

impl Spool {
    /// Writes the safetensors file `path`, and syncs it to disk.
    fn write(mut self, path: &Path) -> Result<()> {
        self.file.flush()?;
        let file = File::open(&self.path)?;
        // SAFETY: the file is ours alone, and stays as it is until it is removed.
        let data = unsafe { Mmap::map(&file)? };
        let views = self.tensors.iter().map(|(name, dtype, shape, start)| {
            let axes: Vec<u64> = shape.iter().map(|axis| *axis as u64).collect();
            let length = bytes_of(*dtype, &axes).expect("checked when it was added") as usize;
            let bytes = &data[*start..start + length];
            let dtype = *dtype;
            (
                name,
                Spooled {
                    dtype,
                    shape,
                    bytes,
                },
            )
        });
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        safetensors::serialize_to_file(views, Some(metadata), path)?;
        // The library restricts its file to the owner; the spool has default permissions.
        fs::set_permissions(path, file.metadata()?.permissions())?;
        File::open(path)?.sync_all()?;
        Ok(())
    }
}

impl Drop for Spool {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

struct Spooled<'a> {
    dtype: Dtype,
    shape: &'a [usize],
    bytes: &'a [u8],
}

impl View for Spooled<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        self.bytes.into()
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}
