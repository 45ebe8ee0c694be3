//! The tensors of a model folder, memory-mapped: `model.safetensors`, or the shards that
//! `model.safetensors.index.json` lists.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use half::{bf16, f16};
use memmap2::Mmap;
use nvfp4_kernels::format::e4m3;
use rayon::prelude::*;
use safetensors::Dtype;
use serde::Deserialize;

use super::header::{Entry, Header};
use super::{INDEX_FILE, WHOLE_FILE};
use crate::random::{hash, hash_all};

/// The tensors of a model, by name.
///
/// Files are mapped, not read: a tensor's bytes come from the disk when they are used, and the
/// system may drop them from memory at any time. Headers are parsed and checked once, here.
///
/// Nobody may change the files while this exists: truncated files end the process.
pub struct TensorFolder {
    files: Vec<MappedFile>,
    tensors: BTreeMap<String, (usize, Entry)>,
}

struct MappedFile {
    path: PathBuf,
    bytes: Mmap,
    metadata: BTreeMap<String, String>,
}

/// One tensor of a [`TensorFolder`].
#[derive(Clone, Copy)]
pub struct StoredTensor<'a> {
    /// Its name.
    pub name: &'a str,
    /// The file that it is in.
    pub file: &'a Path,
    /// Type of its elements.
    pub dtype: Dtype,
    /// Its axes, the last one contiguous.
    pub shape: &'a [usize],
    /// Its elements, little endian, at any alignment.
    pub bytes: &'a [u8],
}

/// The file that PEFT writes, and by which transformers adds adapters to a model that it loads.
const ADAPTER_FILE: &str = "adapter_config.json";

/// `model.safetensors.index.json`.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl TensorFolder {
    /// Opens the model in `folder`: `model.safetensors`, or the shards of
    /// `model.safetensors.index.json`. Where both exist they must be the same tensors: transformers
    /// reads the file, vLLM and MLX the index.
    ///
    /// # Errors
    /// When there is neither, both differ, a file is absent, truncated or malformed, or the index
    /// and its shards disagree: it names a file that is not in the folder, a tensor that is not in
    /// its shard, or leaves one out. A tensor that is in several shards is taken from the one that
    /// the index names. When the folder has other files of weights that loading would leave out:
    /// shards that no index names, or adapters.
    pub fn open(folder: &Path) -> Result<Self> {
        let whole = folder.join(WHOLE_FILE);
        let index = folder.join(INDEX_FILE);
        let shards = || {
            let shards = Self::open_shards(folder, &index);
            shards.with_context(|| index.display().to_string())
        };
        let opened = match (whole.exists(), index.exists()) {
            (false, false) => bail!(
                "{} has neither {WHOLE_FILE} nor {INDEX_FILE}",
                folder.display()
            ),
            (true, false) => Self::open_file(&whole)?,
            (false, true) => shards()?,
            (true, true) => {
                let both = || {
                    format!(
                        "{} has both {WHOLE_FILE} and {INDEX_FILE}, of which transformers reads the \
                         first and vLLM the second: delete the one that is not the model",
                        folder.display()
                    )
                };
                let shards = shards().with_context(both)?;
                let opened = Self::open_file(&whole)?;
                if let Some(difference) = opened.difference(&shards) {
                    bail!("{}; {difference}", both());
                }
                shards
            }
        };
        opened.refuse_other_weights(folder)?;
        Ok(opened)
    }

    /// Describes the first tensor that differs from `other`, if one does.
    fn difference(&self, other: &Self) -> Option<String> {
        let names: BTreeSet<&str> = self.names().chain(other.names()).collect();
        names.into_iter().find_map(|name| {
            let (ours, theirs) = (self.find(name), other.find(name));
            let (Some(ours), Some(theirs)) = (ours, theirs) else {
                return Some(format!("only one of them has `{name}`"));
            };
            let is_same = (ours.dtype, ours.shape, ours.bytes)
                == (theirs.dtype, theirs.shape, theirs.bytes);
            (!is_same).then(|| {
                format!(
                    "`{name}` is {:?}{:?} in the first and {:?}{:?} in the second, with other values",
                    ours.dtype, ours.shape, theirs.dtype, theirs.shape
                )
            })
        })
    }

    /// Fails if `folder` has files of weights that are not among the open ones, although readers
    /// take them for part of the model.
    fn refuse_other_weights(&self, folder: &Path) -> Result<()> {
        let adapter = folder.join(ADAPTER_FILE);
        ensure!(
            !adapter.exists(),
            "{} is there, but adapters beside a model are not read: merge them first, or delete the \
             file",
            adapter.display()
        );
        let context = || folder.display().to_string();
        let mut stray = Vec::new();
        for entry in std::fs::read_dir(folder).with_context(context)? {
            let path = entry.with_context(context)?.path();
            let name = path.file_name().and_then(|name| name.to_str());
            let shard = name.and_then(|name| {
                let parts = name.strip_prefix("model-")?.strip_suffix(".safetensors")?;
                parts.split_once("-of-")
            });
            if shard.is_some() && !self.files().any(|file| file == path) {
                stray.push(name.unwrap_or_default().to_owned());
            }
        }
        stray.sort();
        ensure!(
            stray.is_empty(),
            "{} has shards that belong to no model: {}; {INDEX_FILE} must name them, or they must be \
             deleted",
            folder.display(),
            list(&stray)
        );
        Ok(())
    }

    /// Opens one file, of any name.
    ///
    /// # Errors
    /// When it is absent, truncated or malformed.
    pub fn open_file(path: &Path) -> Result<Self> {
        let (file, tensors) = open(path)?;
        Ok(Self {
            files: vec![file],
            tensors: tensors.into_iter().map(|(k, v)| (k, (0, v))).collect(),
        })
    }

    fn open_shards(folder: &Path, index: &Path) -> Result<Self> {
        let index: Index = serde_json::from_slice(&std::fs::read(index)?)
            .context("not the expected JSON: `weight_map` maps names of tensors to files")?;
        let shards: BTreeSet<&String> = index.weight_map.values().collect();
        ensure!(
            !shards.is_empty(),
            "`weight_map` is empty, but a model has tensors"
        );
        let mut opened = Self {
            files: Vec::new(),
            tensors: BTreeMap::new(),
        };
        let mut stray = Vec::new();
        for shard in shards {
            check_shard_name(shard)?;
            let (file, tensors) = open(&folder.join(shard))?;
            for (name, entry) in tensors {
                match index.weight_map.get(&name) {
                    Some(owner) if owner == shard => {
                        opened.tensors.insert(name, (opened.files.len(), entry));
                    }
                    Some(_) => {}
                    None => stray.push(format!("`{name}` in {shard}")),
                }
            }
            opened.files.push(file);
        }
        let absent: Vec<String> = index
            .weight_map
            .iter()
            .filter(|(name, _)| !opened.tensors.contains_key(*name))
            .map(|(name, shard)| format!("`{name}` in {shard}"))
            .collect();
        ensure!(
            absent.is_empty(),
            "the index names tensors that are not where it says: {}",
            list(&absent)
        );
        ensure!(
            stray.is_empty(),
            "shards have tensors that the index does not name: {}",
            list(&stray)
        );
        Ok(opened)
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// All tensors, sorted by name.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = StoredTensor<'_>> {
        let tensors = self.tensors.iter();
        tensors.map(|(name, place)| self.tensor(name, place))
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there is no tensor.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Whether there is a tensor `name`.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The tensor `name`, if there is one.
    pub fn find(&self, name: &str) -> Option<StoredTensor<'_>> {
        let (name, place) = self.tensors.get_key_value(name)?;
        Some(self.tensor(name, place))
    }

    /// The tensor `name`.
    ///
    /// # Errors
    /// When there is none.
    pub fn get(&self, name: &str) -> Result<StoredTensor<'_>> {
        let Some(tensor) = self.find(name) else {
            let files: Vec<_> = self.files().map(|f| f.display().to_string()).collect();
            bail!("no tensor `{name}` in {}", list(&files));
        };
        Ok(tensor)
    }

    /// A hash of all names, types, shapes and elements.
    pub fn hash(&self) -> u64 {
        let tensors: Vec<StoredTensor<'_>> = self.iter().collect();
        let of_one = |tensor: &StoredTensor<'_>| {
            let kind = format!("{:?}{:?}", tensor.dtype, tensor.shape);
            hash_all(&[tensor.name.as_bytes(), kind.as_bytes(), tensor.bytes]).to_le_bytes()
        };
        let hashes: Vec<[u8; 8]> = tensors.par_iter().map(of_one).collect();
        hash(hashes.as_flattened())
    }

    /// The paths of the files.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.files.iter().map(|file| file.path.as_path())
    }

    /// The metadata of the files' headers, the first file's value of a key first.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        let mut values = self.files.iter().filter_map(|f| f.metadata.get(key));
        values.next().map(String::as_str)
    }

    fn tensor<'a>(&'a self, name: &'a str, (file, entry): &'a (usize, Entry)) -> StoredTensor<'a> {
        let file = &self.files[*file];
        StoredTensor {
            name,
            file: &file.path,
            dtype: entry.dtype,
            shape: &entry.shape,
            bytes: &file.bytes[entry.start..entry.end],
        }
    }
}

impl fmt::Debug for TensorFolder {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_map()
            .entries(self.iter().map(|t| (t.name, (t.dtype, t.shape))))
            .finish()
    }
}

impl StoredTensor<'_> {
    /// Its elements as `f32`; exact but for `F64`, which is rounded.
    ///
    /// # Errors
    /// When its type is none of `F64`, `F32`, `F16`, `BF16` and `F8_E4M3`.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        fn map<const N: usize>(bytes: &[u8], value: impl Fn([u8; N]) -> f32) -> Vec<f32> {
            let (elements, _) = bytes.as_chunks::<N>();
            elements.iter().map(|element| value(*element)).collect()
        }
        let bytes = self.bytes;
        Ok(match self.dtype {
            Dtype::F64 => map(bytes, |b| f64::from_le_bytes(b) as f32),
            Dtype::F32 => map(bytes, f32::from_le_bytes),
            Dtype::F16 => map(bytes, |b| f16::from_le_bytes(b).to_f32()),
            Dtype::BF16 => map(bytes, |b| bf16::from_le_bytes(b).to_f32()),
            Dtype::F8_E4M3 => map(bytes, |[b]| e4m3::decode_element(b)),
            other => bail!(
                "{self}: its values are asked for, but its type is {other:?}, none of F64, F32, \
                 F16, BF16 and F8_E4M3"
            ),
        })
    }

    /// Fails unless all values are finite; types that are no floats pass.
    ///
    /// # Errors
    /// Names the tensor and the place of the first value that is NaN or infinite.
    pub fn check_finite(&self) -> Result<()> {
        fn first<const N: usize>(
            bytes: &[u8],
            is_finite: impl Fn([u8; N]) -> bool,
        ) -> Option<usize> {
            let (elements, _) = bytes.as_chunks::<N>();
            elements.iter().position(|element| !is_finite(*element))
        }
        let bytes = self.bytes;
        let at = match self.dtype {
            Dtype::F64 => first(bytes, |b| f64::from_le_bytes(b).is_finite()),
            Dtype::F32 => first(bytes, |b| f32::from_le_bytes(b).is_finite()),
            Dtype::F16 => first(bytes, |b| f16::from_le_bytes(b).is_finite()),
            Dtype::BF16 => first(bytes, |b| bf16::from_le_bytes(b).is_finite()),
            Dtype::F8_E4M3 => first(bytes, |[b]| b & e4m3::NAN_BYTE != e4m3::NAN_BYTE),
            _ => None,
        };
        let Some(at) = at else { return Ok(()) };
        let size = bytes.len() / self.shape.iter().product::<usize>();
        let one = StoredTensor {
            bytes: &bytes[at * size..][..size],
            ..*self
        };
        let value = one.to_f32()?[0];
        bail!(
            "{self}: {} is {value}, but weights must be finite",
            self.place(at)
        )
    }

    /// Names the place of element `at`: its index on each axis.
    pub(crate) fn place(&self, at: usize) -> String {
        match *self.shape {
            [] => "its value".into(),
            [_] => format!("the value at {at}"),
            [_, columns] => format!("the value of row {}, column {}", at / columns, at % columns),
            _ => {
                let mut rest = at;
                let mut index: Vec<usize> = Vec::new();
                for axis in self.shape.iter().rev() {
                    index.insert(0, rest % axis);
                    rest /= axis;
                }
                format!("the value at {index:?}")
            }
        }
    }

    /// Fail unless it has `shape`.
    ///
    /// # Errors
    /// When it has another one.
    pub fn check_shape(&self, shape: &[usize]) -> Result<()> {
        ensure!(
            self.shape == shape,
            "{self}: its shape is {:?}, but must be {shape:?}",
            self.shape
        );
        Ok(())
    }
}

/// File and name, as errors have them.
impl fmt::Display for StoredTensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}: tensor `{}`", self.file.display(), self.name)
    }
}

impl fmt::Debug for StoredTensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{self}: {:?}{:?}", self.dtype, self.shape)
    }
}

fn open(path: &Path) -> Result<(MappedFile, BTreeMap<String, Entry>)> {
    let context = || path.display().to_string();
    let file = File::open(path).with_context(context)?;
    // SAFETY: the map is read only, and callers keep the files as they are, as the type demands.
    let bytes = unsafe { Mmap::map(&file) }.with_context(context)?;
    let Header { tensors, metadata } = Header::parse(&bytes).with_context(context)?;
    let file = MappedFile {
        path: path.to_owned(),
        bytes,
        metadata,
    };
    Ok((file, tensors))
}

/// Fail unless `shard` is the name of a file in the folder itself: a path could lead out of it.
fn check_shard_name(shard: &str) -> Result<()> {
    let mut parts = Path::new(shard).components();
    let is_name = matches!(parts.next(), Some(Component::Normal(name)) if name == shard);
    ensure!(
        is_name && parts.next().is_none() && !shard.contains(['/', '\\', ':', '\0']),
        "the shard `{shard}` must be the name of a file in the same folder"
    );
    Ok(())
}

/// The first few of `names`, and how many more there are.
pub(crate) fn list(names: &[String]) -> String {
    const SHOWN: usize = 20;
    let shown = names[..names.len().min(SHOWN)].join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

#[cfg(test)]
mod tests;
