//! Memory-mapped tensors of a model folder: `model.safetensors`, or the shards listed in
//! `model.safetensors.index.json`.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use half::{bf16, f16};
use memmap2::Mmap;
use nvfp4_formats::format::e4m3;
use nvfp4_formats::ptq::values::{decode_bf16, decode_f16};
use rayon::prelude::*;
use safetensors::Dtype;
use serde::Deserialize;

use super::folder::{ADAPTER_FILE, check_folder};
use super::header::{Entry, Header};
use super::{INDEX_FILE, TensorSpec, WHOLE_FILE};
use crate::progress::{Unit, Work};
use crate::random::{hash, hash_all};

mod part;

pub(super) use part::BlockScales;
use part::{Contents, Layout};
pub use part::{MXFP4_BLOCK, Mxfp4, mxfp4_scale};
pub(crate) use part::{Place, check};
/// Number of tensors that are read between two reports of progress.
const PART: usize = 64;

/// Tensors of a model, by name.
///
/// Files are mapped, not read: a tensor's bytes are loaded from disk on use, and the system may
/// drop them from memory at any time. Headers are parsed and checked once, on opening.
///
/// The files must not change while this exists: accessing a truncated file kills the process.
pub struct TensorFolder {
    files: Vec<MappedFile>,
    tensors: BTreeMap<String, Place>,
    /// Scales of weights in FP8, by the name of the weight: their name, place, and the rows and
    /// columns of a block.
    scales: BTreeMap<String, (String, Place, [usize; 2])>,
}

struct MappedFile {
    path: PathBuf,
    bytes: Mmap,
    metadata: BTreeMap<String, String>,
}

/// One tensor of a [`TensorFolder`].
#[derive(Clone, Copy)]
pub struct StoredTensor<'a> {
    /// Name of the tensor.
    pub name: &'a str,
    /// File of the tensor.
    pub file: &'a Path,
    /// Type of the elements.
    pub dtype: Dtype,
    /// Shape; the last axis is contiguous.
    pub shape: &'a [usize],
    contents: Contents<'a>,
    /// Scales by which the elements of blocks are multiplied, if any.
    pub(crate) scales: Option<BlockScales<'a>>,
}

/// Contents of `model.safetensors.index.json`.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl TensorFolder {
    /// Opens the model in `folder`: `model.safetensors`, or the shards of
    /// `model.safetensors.index.json`. If both exist they must hold the same tensors: transformers
    /// reads the file, vLLM and MLX the index.
    ///
    /// # Errors
    /// Returns an error if there is neither, if both differ, or if a file is absent, truncated or
    /// malformed. Returns an error if the index and its shards disagree: the index names a file
    /// that is not in the folder or a tensor that is not in its shard, or omits a tensor. A tensor
    /// found in several shards is taken from the one that the index names. Returns an error if the
    /// folder has other weight files that would be ignored: shards that no index names, or
    /// adapters.
    pub fn open(folder: &Path) -> Result<Self> {
        check_folder(folder)?;
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

    /// Describes the first tensor that differs from `other`, if any.
    fn difference(&self, other: &Self) -> Option<String> {
        let names: BTreeSet<&str> = self.names().chain(other.names()).collect();
        names.into_iter().find_map(|name| {
            let (ours, theirs) = (self.find(name), other.find(name));
            let (Some(ours), Some(theirs)) = (ours, theirs) else {
                return Some(format!("only one of them has `{name}`"));
            };
            let is_same = (ours.dtype, ours.shape, ours.bytes())
                == (theirs.dtype, theirs.shape, theirs.bytes());
            (!is_same).then(|| {
                format!(
                    "`{name}` is {:?}{:?} in the first and {:?}{:?} in the second, with other values",
                    ours.dtype, ours.shape, theirs.dtype, theirs.shape
                )
            })
        })
    }

    /// Returns an error if `folder` has weight files that are not open here but that other readers
    /// would treat as part of the model.
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

    /// Opens one file of any name.
    ///
    /// # Errors
    /// Returns an error if it is absent, truncated or malformed.
    pub fn open_file(path: &Path) -> Result<Self> {
        let (file, tensors) = open(path)?;
        Ok(Self {
            files: vec![file],
            tensors: tensors
                .into_iter()
                .map(|(name, entry)| (name, Place::whole(0, entry)))
                .collect(),
            scales: BTreeMap::new(),
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
            scales: BTreeMap::new(),
        };
        let mut stray = Vec::new();
        for shard in shards {
            check_shard_name(shard)?;
            let (file, tensors) = open(&folder.join(shard))?;
            for (name, entry) in tensors {
                match index.weight_map.get(&name) {
                    Some(owner) if owner == shard => {
                        let place = Place::whole(opened.files.len(), entry);
                        opened.tensors.insert(name, place);
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

    /// Returns the names of all tensors, sorted.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns all tensors, sorted by name.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = StoredTensor<'_>> {
        let tensors = self.tensors.iter();
        tensors.map(|(name, place)| self.tensor(name, place))
    }

    /// Returns the number of tensors.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Returns true if there are no tensors.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Returns true if the tensor `name` exists.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Returns the tensor `name`, if it exists.
    pub fn find(&self, name: &str) -> Option<StoredTensor<'_>> {
        let (name, place) = self.tensors.get_key_value(name)?;
        Some(self.tensor(name, place))
    }

    /// Returns the tensor `name`.
    ///
    /// # Errors
    /// Returns an error if it does not exist.
    pub fn get(&self, name: &str) -> Result<StoredTensor<'_>> {
        let Some(tensor) = self.find(name) else {
            let files: Vec<_> = self.files().map(|f| f.display().to_string()).collect();
            bail!("no tensor `{name}` in {}", list(&files));
        };
        Ok(tensor)
    }

    /// Returns a hash of all names, types, shapes and elements.
    pub fn hash(&self) -> u64 {
        let tensors: Vec<StoredTensor<'_>> = self.iter().collect();
        let of_one = |tensor: &StoredTensor<'_>| {
            let kind = format!("{:?}{:?}", tensor.dtype, tensor.shape);
            let bytes = tensor.bytes();
            let mut parts = vec![tensor.name.as_bytes(), kind.as_bytes(), &bytes];
            parts.extend(tensor.scales.map(|scales| scales.bytes));
            hash_all(&parts).to_le_bytes()
        };
        let mut hashes: Vec<[u8; 8]> = Vec::new();
        each_part(&tensors, "fingerprint", |part| {
            hashes.par_extend(part.par_iter().map(of_one));
        });
        hash(hashes.as_flattened())
    }

    /// Returns the paths of the files.
    pub fn files(&self) -> impl ExactSizeIterator<Item = &Path> {
        self.files.iter().map(|file| file.path.as_path())
    }

    /// Returns the value of `key` in the metadata of the files' headers, the first file's value
    /// first.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        let mut values = self.files.iter().filter_map(|f| f.metadata.get(key));
        values.next().map(String::as_str)
    }

    /// Makes the tensor `scales`, of F32, BF16 or F16, the scales of the blocks of `weight`.
    pub(crate) fn join_scales(&mut self, weight: &str, scales: &str, block: [usize; 2]) {
        if let Some((name, place)) = self.tensors.remove_entry(scales) {
            self.scales.insert(weight.to_owned(), (name, place, block));
        }
    }

    /// Returns the tensor of the scales of `weight`, if it is joined with scales.
    pub(crate) fn scales_of(&self, weight: &str) -> Option<StoredTensor<'_>> {
        let (name, place, _) = self.scales.get(weight)?;
        Some(self.tensor(name, place))
    }

    /// Drops the tensors for which `keeps` returns false.
    pub(crate) fn retain(&mut self, keeps: impl Fn(&str) -> bool) {
        self.tensors.retain(|name, _| keeps(name));
    }

    /// Removes the tensor `name`, of which [`insert`](Self::insert) adds the parts.
    pub(crate) fn remove(&mut self, name: &str) -> Option<Place> {
        self.tensors.remove(name)
    }

    /// Adds a tensor, called `name`.
    ///
    /// # Errors
    /// Returns an error if there is a tensor of this name.
    pub(crate) fn insert(&mut self, name: String, place: Place) -> Result<()> {
        ensure!(
            !self.tensors.contains_key(&name),
            "`{name}` is stored twice: alone, and in a tensor of all experts"
        );
        self.tensors.insert(name, place);
        Ok(())
    }

    fn tensor<'a>(&'a self, name: &'a str, place: &'a Place) -> StoredTensor<'a> {
        let scales = self.scales.get(name).map(|(_, place, block)| BlockScales {
            bytes: &self.files[place.file].bytes[place.entry.start..place.entry.end],
            dtype: place.entry.dtype,
            block: *block,
        });
        let file = &self.files[place.file];
        let Place { entry, layout, .. } = place;
        let source = &file.bytes[entry.start..entry.end];
        StoredTensor {
            name,
            file: &file.path,
            dtype: entry.dtype,
            shape: &entry.shape,
            contents: match *layout {
                Layout::Contiguous => Contents::Adjacent(source),
                Layout::Strided { first, strides } => Contents::Strided {
                    source,
                    first,
                    strides,
                },
                Layout::Mxfp4 {
                    first,
                    step,
                    scales: (file, ref scales),
                } => Contents::Mxfp4 {
                    codes: source,
                    scales: &self.files[file].bytes[scales.clone()],
                    first,
                    step,
                },
            },
            scales,
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

impl<'a> StoredTensor<'a> {
    /// Returns the elements, little endian, at any alignment. Copies them if the tensor is a part
    /// of a stored one whose elements are not adjacent there.
    pub fn bytes(&self) -> Cow<'a, [u8]> {
        self.contents.bytes(self.dtype, self.shape)
    }

    /// Returns the number of bytes in the file.
    pub fn stored_bytes(&self) -> usize {
        self.contents.stored_bytes(self.dtype, self.shape)
    }

    /// Returns the codes and scales of a tensor that is stored in MXFP4; `None` for another one.
    /// Such a tensor is otherwise one in bf16.
    pub fn mxfp4(&self) -> Option<Mxfp4> {
        self.contents.mxfp4(self.shape)
    }

    /// Returns the description of the tensor.
    pub fn spec(&self) -> TensorSpec {
        TensorSpec::new(self.name, self.dtype, self.shape)
    }

    /// Returns true if the values are numbers of a supported type: `F32`, `BF16`, `F16`, or
    /// `F8_E4M3` with scales.
    pub(crate) fn is_float(&self) -> bool {
        match self.dtype {
            Dtype::F32 | Dtype::BF16 | Dtype::F16 => true,
            Dtype::F8_E4M3 => self.scales.is_some(),
            _ => false,
        }
    }

    /// Converts the elements to `f32`; exact except for `F64` and for products with scales, which
    /// are rounded.
    ///
    /// # Errors
    /// Returns an error if the type is not `F64`, `F32`, `F16`, `BF16` or `F8_E4M3`.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        fn map<const N: usize>(bytes: &[u8], value: impl Fn([u8; N]) -> f32) -> Vec<f32> {
            let (elements, _) = bytes.as_chunks::<N>();
            elements.iter().map(|element| value(*element)).collect()
        }
        let bytes = &*self.bytes();
        Ok(match self.dtype {
            Dtype::F64 => map(bytes, |b| f64::from_le_bytes(b) as f32),
            Dtype::F32 => map(bytes, f32::from_le_bytes),
            Dtype::F16 => decode_f16(bytes),
            Dtype::BF16 => decode_bf16(bytes),
            Dtype::F8_E4M3 => {
                let mut values = map(bytes, |[b]| e4m3::decode_element(b));
                if let (Some(scales), Some(&columns)) = (self.scales, self.shape.last()) {
                    scales.apply(&mut values, columns);
                }
                values
            }
            other => bail!(
                "{self}: its values are asked for, but its type is {other:?}, none of F64, F32, \
                 F16, BF16 and F8_E4M3"
            ),
        })
    }

    /// Checks that all values are finite; non-float types pass.
    ///
    /// # Errors
    /// Returns an error that names the tensor and the position of the first value that is NaN or
    /// infinite.
    pub fn check_finite(&self) -> Result<()> {
        fn first<const N: usize>(
            bytes: &[u8],
            is_finite: impl Fn([u8; N]) -> bool,
        ) -> Option<usize> {
            let (elements, _) = bytes.as_chunks::<N>();
            elements.iter().position(|element| !is_finite(*element))
        }
        let bytes = &*self.bytes();
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
            contents: Contents::Adjacent(&bytes[at * size..][..size]),
            scales: None,
            ..*self
        };
        let value = one.to_f32()?[0];
        bail!(
            "{self}: {} is {value}, but weights must be finite",
            self.place(at)
        )
    }

    /// Describes the position of element `at`: its index along each axis.
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

    /// Checks that the tensor has `shape`.
    ///
    /// # Errors
    /// Returns an error if the shape differs.
    pub fn check_shape(&self, shape: &[usize]) -> Result<()> {
        ensure!(
            self.shape == shape,
            "{self}: its shape is {:?}, but must be {shape:?}",
            self.shape
        );
        Ok(())
    }
}

/// Checks that all values of each of `tensors` are finite.
pub(crate) fn check_each(tensors: &[StoredTensor<'_>]) -> Vec<Result<()>> {
    let mut results = Vec::new();
    each_part(tensors, "check", |part| {
        results.par_extend(part.par_iter().map(StoredTensor::check_finite));
    });
    results
}

/// Calls `each` with parts of `tensors`, and reports the progress of `task`.
fn each_part(
    tensors: &[StoredTensor<'_>],
    task: &'static str,
    mut each: impl FnMut(&[StoredTensor<'_>]),
) {
    let bytes = |part: &[StoredTensor<'_>]| part.iter().map(|tensor| tensor.stored_bytes()).sum();
    let mut work = Work::begin(task, Unit::Bytes, 0, bytes(tensors));
    for part in tensors.chunks(PART) {
        each(part);
        work.add(bytes(part));
    }
}

/// Shows file and name, for errors.
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

/// Returns an error unless `shard` is the name of a file in the folder itself, because a path could
/// lead outside of it.
fn check_shard_name(shard: &str) -> Result<()> {
    let mut parts = Path::new(shard).components();
    let is_name = matches!(parts.next(), Some(Component::Normal(name)) if name == shard);
    ensure!(
        is_name && parts.next().is_none() && !shard.contains(['/', '\\', ':', '\0']),
        "the shard `{shard}` must be the name of a file in the same folder"
    );
    Ok(())
}

/// Formats the first few of `names`, and the number of further ones.
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
