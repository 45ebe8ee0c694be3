//! Plans the safetensors files of a model: the file and the bytes of each tensor.
//!
//! In a file, tensors have the order of the `safetensors` library (wider types first, then by
//! name), and the metadata is `format: pt`, which transformers 4 requires.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::json;

use super::header::{Entry, LENGTH_BYTES, MAX_HEADER, bytes_of};
use super::{INDEX_FILE, WHOLE_FILE};

/// Name, type and shape of a tensor to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Name of the tensor.
    pub name: String,
    /// Type of the elements.
    pub dtype: Dtype,
    /// Shape; the last axis is contiguous.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// Creates the description of a tensor.
    pub fn new(name: impl Into<String>, dtype: Dtype, shape: &[usize]) -> Self {
        Self {
            name: name.into(),
            dtype,
            shape: shape.to_vec(),
        }
    }

    /// Returns the number of bytes of all elements.
    pub(super) fn bytes(&self) -> Result<u64> {
        let axes: Vec<u64> = self.shape.iter().map(|axis| *axis as u64).collect();
        let bytes = bytes_of(self.dtype, &axes);
        bytes.with_context(|| {
            format!(
                "tensor `{}`: {:?}{:?} takes no whole number of bytes",
                self.name, self.dtype, self.shape
            )
        })
    }
}

/// Plan of one file.
#[derive(Debug)]
pub(super) struct FilePlan {
    /// First bytes of the file: length of the JSON header, and the header.
    pub header: Vec<u8>,
    /// Tensors in the order of the file, with their names.
    pub tensors: Vec<(String, Entry)>,
    /// Size of the file.
    pub bytes: u64,
}

impl FilePlan {
    /// Plans a file of `specs`.
    ///
    /// # Errors
    /// Returns an error if a tensor takes no whole number of bytes, or the header is too large.
    pub fn new(mut specs: Vec<TensorSpec>) -> Result<Self> {
        specs.sort_by(|a, b| b.dtype.cmp(&a.dtype).then_with(|| a.name.cmp(&b.name)));
        let mut end = 0;
        let mut infos = Vec::new();
        for spec in specs {
            let start = end;
            end += spec.bytes()? as usize;
            let info = TensorInfo {
                dtype: spec.dtype,
                shape: spec.shape,
                data_offsets: (start, end),
            };
            infos.push((spec.name, info));
        }
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let mut json = serde_json::to_vec(&Metadata::new(Some(metadata), infos.clone())?)?;
        json.resize(json.len().next_multiple_of(LENGTH_BYTES), b' ');
        ensure!(
            json.len() as u64 <= MAX_HEADER,
            "the header of {} tensors has {} bytes, but readers accept {MAX_HEADER}",
            infos.len(),
            json.len()
        );
        let header = [&(json.len() as u64).to_le_bytes()[..], &json].concat();
        let entry = |info: TensorInfo| Entry {
            dtype: info.dtype,
            shape: info.shape,
            start: header.len() + info.data_offsets.0,
            end: header.len() + info.data_offsets.1,
        };
        Ok(Self {
            bytes: (header.len() + end) as u64,
            tensors: (infos.into_iter())
                .map(|(name, info)| (name, entry(info)))
                .collect(),
            header,
        })
    }
}

/// Plan of all files of a model.
#[derive(Debug)]
pub struct ModelPlan {
    pub(super) files: Vec<FilePlan>,
}

impl ModelPlan {
    /// Assigns `tensors`, in this order, to files of at most `shard_bytes` bytes of tensors, but at
    /// least one tensor.
    ///
    /// # Errors
    /// Returns an error if there is no tensor, a name occurs twice, or a tensor takes no whole
    /// number of bytes.
    pub fn new(tensors: Vec<TensorSpec>, shard_bytes: u64) -> Result<Self> {
        ensure!(!tensors.is_empty(), "a model has at least one tensor");
        let mut names = BTreeSet::new();
        let mut shards: Vec<(Vec<TensorSpec>, u64)> = Vec::new();
        for tensor in tensors {
            check_name(&tensor.name, names.contains(&tensor.name))?;
            names.insert(tensor.name.clone());
            let length = tensor.bytes()?;
            match shards.last_mut() {
                Some((shard, bytes)) if *bytes + length <= shard_bytes => {
                    shard.push(tensor);
                    *bytes += length;
                }
                _ => shards.push((vec![tensor], length)),
            }
        }
        let files = shards.into_iter().map(|(shard, _)| FilePlan::new(shard));
        Ok(Self {
            files: files.collect::<Result<_>>()?,
        })
    }

    /// Returns the name of file `index`.
    pub(super) fn file_name(&self, index: usize) -> String {
        file_name(index, self.files.len())
    }

    /// Writes the index into `folder` if there are several files.
    pub(super) fn write_index(&self, folder: &Path) -> Result<()> {
        let mut shard_of = BTreeMap::new();
        let mut total = 0;
        for (shard, file) in self.files.iter().enumerate() {
            total += file.bytes - file.header.len() as u64;
            shard_of.extend(file.tensors.iter().map(|(name, _)| (name.clone(), shard)));
        }
        write_index(folder, &shard_of, self.files.len(), total)
    }
}

/// Returns an error if no tensor may have the name `name`.
pub(super) fn check_name(name: &str, is_taken: bool) -> Result<()> {
    ensure!(
        name != "__metadata__" && !is_taken,
        "tensor `{name}`: there is one of this name already"
    );
    Ok(())
}

/// Returns the name of file `index` of `count` files.
pub(super) fn file_name(index: usize, count: usize) -> String {
    match count {
        1 => WHOLE_FILE.to_owned(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
    }
}

/// Writes the index of `count` files with `total` bytes of tensors into `folder`, if there are
/// several files. `shard_of` maps the name of a tensor to the index of its file.
pub(super) fn write_index(
    folder: &Path,
    shard_of: &BTreeMap<String, usize>,
    count: usize,
    total: u64,
) -> Result<()> {
    if count == 1 {
        return Ok(());
    }
    let names = shard_of.iter();
    let map: BTreeMap<&String, String> = names
        .map(|(name, shard)| (name, file_name(*shard, count)))
        .collect();
    let index = json!({"metadata": {"total_size": total}, "weight_map": map});
    crate::checkpoint::write_json(&folder.join(INDEX_FILE), &index)
}
