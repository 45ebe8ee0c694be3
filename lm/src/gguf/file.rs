//! Parses GGUF files, whole or split.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use memmap2::Mmap;

use super::blocks::GgufType;

/// Maximum number of axes of a tensor, as in ggml.
const MAX_AXES: u32 = 4;
/// Maximum nesting depth of arrays.
const MAX_DEPTH: usize = 4;

/// A memory-mapped GGUF file, or all parts of a split one. The files must not change while this
/// exists.
pub struct GgufFile {
    parts: Vec<Mmap>,
    /// Metadata of the first part, which has the description of the model.
    metadata: BTreeMap<String, Value>,
    /// Index of its part, and location in it, of each tensor.
    tensors: BTreeMap<String, (usize, Place)>,
}

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Integer of any width, signed or unsigned.
    Integer(i128),
    /// Float of any width.
    Float(f64),
    /// Boolean.
    Bool(bool),
    /// Text.
    String(String),
    /// An array of strings.
    Strings(Vec<String>),
    /// An array of 32-bit integers.
    Integers(Vec<i128>),
    /// Number of values in an array of another type, which is not kept.
    Array(u64),
}

/// Shows short values; of arrays, their lengths.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Integer(number) => write!(f, "{number}"),
            Self::Float(number) => write!(f, "{number}"),
            Self::Bool(flag) => write!(f, "{flag}"),
            Self::String(text) => write!(f, "{text:?}"),
            Self::Strings(all) => write!(f, "an array of {} strings", all.len()),
            Self::Integers(all) => write!(f, "an array of {} integers", all.len()),
            Self::Array(count) => write!(f, "an array of {count} values"),
        }
    }
}

/// Location of a tensor.
#[derive(Debug)]
struct Place {
    axes: Vec<usize>,
    dtype: GgufType,
    start: usize,
    end: usize,
}

/// One tensor of a [`GgufFile`].
pub struct GgufTensor<'a> {
    place: &'a Place,
    bytes: &'a [u8],
}

impl GgufTensor<'_> {
    /// Returns the axes, contiguous one first.
    pub fn axes(&self) -> &[usize] {
        &self.place.axes
    }

    /// Returns the type.
    pub fn kind(&self) -> GgufType {
        self.place.dtype
    }

    /// Returns the bytes: whole blocks of [`kind`](Self::kind).
    pub fn bytes(&self) -> &[u8] {
        self.bytes
    }

    /// Dequantizes the values: `scale * code` or `scale * code + minimum` in `f32`.
    ///
    /// # Errors
    /// Returns an error if a value is not finite.
    pub fn to_f32(&self) -> Result<Vec<f32>> {
        let values = self.place.dtype.to_f32(self.bytes);
        ensure!(
            values.iter().all(|value| value.is_finite()),
            "a tensor has values that are not finite"
        );
        Ok(values)
    }
}

impl GgufFile {
    /// Opens a file, and with any part of a split file all its parts, which are in one folder and
    /// named like `model-00001-of-00003.gguf`.
    ///
    /// # Errors
    /// Returns an error if a file is absent, truncated or malformed, has tensors of unsupported
    /// types, or if the parts do not belong together.
    pub fn open(path: &Path) -> Result<Self> {
        let (bytes, metadata, tensors) = open_part(path)?;
        let count = count_of(&metadata, SPLIT_COUNT)?.unwrap_or(0);
        if count <= 1 {
            return Ok(Self {
                parts: vec![bytes],
                metadata,
                tensors: tensors
                    .into_iter()
                    .map(|(name, place)| (name, (0, place)))
                    .collect(),
            });
        }
        let mut whole = Self {
            parts: Vec::new(),
            metadata: BTreeMap::new(),
            tensors: BTreeMap::new(),
        };
        for (index, path) in part_paths(path, count)?.enumerate() {
            let part = open_part(&path)?;
            whole
                .add_part(index, count, part)
                .with_context(|| path.display().to_string())?;
        }
        let found = whole.tensors.len();
        let expected = whole.optional_count(SPLIT_TENSORS)?.unwrap_or(found);
        ensure!(
            expected == found,
            "the {count} parts have {found} tensors, but `{SPLIT_TENSORS}` is {expected}"
        );
        Ok(whole)
    }

    /// Adds part `index` of `count`.
    fn add_part(
        &mut self,
        index: usize,
        count: usize,
        (bytes, metadata, tensors): (Mmap, Metadata, Places),
    ) -> Result<()> {
        for (key, expected) in [(SPLIT_NUMBER, index), (SPLIT_COUNT, count)] {
            let found = count_of(&metadata, key)?;
            ensure!(
                found == Some(expected),
                "`{key}` is {}, but must be {expected} in this part",
                found.map_or("absent".into(), |found| found.to_string())
            );
        }
        for (name, place) in tensors {
            ensure!(
                !self.tensors.contains_key(&name),
                "tensor `{name}` is in an earlier part as well"
            );
            self.tensors.insert(name, (index, place));
        }
        if index == 0 {
            self.metadata = metadata;
        }
        self.parts.push(bytes);
        Ok(())
    }

    /// Returns the number `key` of the metadata, if present.
    ///
    /// # Errors
    /// Returns an error if it is not a number, or exceeds 31 bits.
    pub(super) fn optional_count(&self, key: &str) -> Result<Option<usize>> {
        count_of(&self.metadata, key)
    }

    /// Returns the names of all tensors, sorted.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns the tensor `name`.
    ///
    /// # Errors
    /// Returns an error if it does not exist.
    pub fn tensor(&self, name: &str) -> Result<GgufTensor<'_>> {
        self.find(name)
            .with_context(|| format!("no tensor `{name}`"))
    }

    /// Returns the tensor `name`, if it exists.
    pub fn find(&self, name: &str) -> Option<GgufTensor<'_>> {
        let (part, place) = self.tensors.get(name)?;
        let bytes = &self.parts[*part][place.start..place.end];
        Some(GgufTensor { place, bytes })
    }

    /// Returns all metadata, sorted by key.
    pub(super) fn metadata(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.metadata.iter().map(|(key, value)| (&**key, value))
    }

    /// Returns a value of the metadata.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.metadata.get(key)
    }

    /// Returns a number of the metadata.
    ///
    /// # Errors
    /// Returns an error if the value is not a number.
    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Integer(number)) => Ok(Some(*number as f64)),
            Some(Value::Float(number)) => Ok(Some(*number)),
            Some(other) => bail!("`{key}` is {other}, but must be a number"),
        }
    }
}

type Metadata = BTreeMap<String, Value>;
type Places = BTreeMap<String, Place>;

/// Key of the index of a part.
const SPLIT_NUMBER: &str = "split.no";
/// Key of the number of parts.
const SPLIT_COUNT: &str = "split.count";
/// Key of the number of tensors of all parts.
const SPLIT_TENSORS: &str = "split.tensors.count";

/// Opens one file.
fn open_part(path: &Path) -> Result<(Mmap, Metadata, Places)> {
    let context = || path.display().to_string();
    let file = File::open(path).with_context(context)?;
    // SAFETY: the map is read only, and callers keep the file as it is, as the type demands.
    let bytes = unsafe { Mmap::map(&file) }.with_context(context)?;
    let (metadata, tensors) = parse(&bytes).with_context(context)?;
    Ok((bytes, metadata, tensors))
}

/// Returns the paths of the `count` parts of which `path` is one.
fn part_paths(path: &Path, count: usize) -> Result<impl Iterator<Item = PathBuf>> {
    let name = path.file_name().and_then(|name| name.to_str());
    let ending = format!("-of-{count:05}.gguf");
    let stem = name.and_then(|name| name.strip_suffix(&ending));
    let stem = stem.and_then(|stem| stem.rsplit_once('-'));
    let Some((model, _)) = stem else {
        bail!(
            "{}: this is a part of a file that was split in {count} (`{SPLIT_COUNT}`): its name \
             must end with -00001-of-{count:05}.gguf, and the other parts must be beside it",
            path.display()
        );
    };
    let model = model.to_owned();
    let name = move |part: usize| path.with_file_name(format!("{model}-{part:05}{ending}"));
    Ok((1..=count).map(name))
}

/// Returns a number of the metadata.
///
/// # Errors
/// Returns an error if it is not a number, or exceeds 31 bits.
fn count_of(metadata: &Metadata, key: &str) -> Result<Option<usize>> {
    match metadata.get(key) {
        None => Ok(None),
        Some(Value::Integer(n)) if (0..=i128::from(i32::MAX)).contains(n) => Ok(Some(*n as usize)),
        Some(other) => bail!("`{key}` is {other}, but must be a number below 2147483648"),
    }
}

/// Returns the names of the tensors in a whole file.
#[cfg(test)]
pub(super) fn parse_names(file: &[u8]) -> Result<Vec<String>> {
    Ok(parse(file)?.1.into_keys().collect())
}

/// Parses the metadata and the tensors of a whole file.
fn parse(file: &[u8]) -> Result<(Metadata, Places)> {
    let mut cursor = Cursor { file, at: 0 };
    ensure!(
        cursor.take(4)? == b"GGUF",
        "the file does not start with GGUF"
    );
    let version = cursor.u32()?;
    ensure!(
        version == 2 || version == 3,
        "the version is {version}, but must be 2 or 3"
    );
    let (tensors, keys) = (cursor.u64()?, cursor.u64()?);
    let mut metadata = BTreeMap::new();
    for _ in 0..keys {
        let key = cursor.string()?;
        let kind = cursor.u32()?;
        let value = cursor.value(kind, 0).with_context(|| format!("`{key}`"))?;
        ensure!(
            metadata.insert(key.clone(), value).is_none(),
            "`{key}` comes twice"
        );
    }
    let mut infos = Vec::new();
    for _ in 0..tensors {
        let name = cursor.string()?;
        let info = cursor
            .tensor()
            .with_context(|| format!("tensor `{name}`"))?;
        infos.push((name, info));
    }
    let alignment = match metadata.get("general.alignment") {
        None => 32,
        Some(Value::Integer(n)) if (1..=1 << 16).contains(n) => *n as usize,
        Some(other) => bail!("`general.alignment` is {other}, but must be 1 to 65536"),
    };
    let data = cursor.at.next_multiple_of(alignment);
    let mut places = BTreeMap::new();
    for (name, (axes, dtype, offset)) in infos {
        let context = || format!("tensor `{name}`");
        let place = place(file.len(), data, axes, dtype, offset).with_context(context)?;
        ensure!(
            places.insert(name.clone(), place).is_none(),
            "tensor `{name}` comes twice"
        );
    }
    Ok((metadata, places))
}

/// Returns the location of a tensor, checked against the `length` of the file.
fn place(
    length: usize,
    data: usize,
    axes: Vec<u64>,
    dtype: GgufType,
    offset: u64,
) -> Result<Place> {
    let (elements, size) = dtype.block();
    let first = axes.first().copied().unwrap_or(1);
    ensure!(
        first.is_multiple_of(elements as u64),
        "its rows have {first} elements, but must have whole blocks of {elements}"
    );
    let count = axes.iter().try_fold(1u64, |n, axis| n.checked_mul(*axis));
    let bytes = count.and_then(|n| (n / elements as u64).checked_mul(size as u64));
    let start = offset.checked_add(data as u64);
    let end = start
        .zip(bytes)
        .and_then(|(start, bytes)| start.checked_add(bytes));
    let (Some(start), Some(end)) = (start, end) else {
        bail!("{dtype:?}{axes:?} at offset {offset} does not fit any file");
    };
    ensure!(
        end <= length as u64,
        "its bytes are said to be {start} to {end}, but the file has {length}"
    );
    Ok(Place {
        axes: axes.into_iter().map(|axis| axis as usize).collect(),
        dtype,
        start: start as usize,
        end: end as usize,
    })
}

/// Sequential reader of a file.
struct Cursor<'a> {
    file: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, count: u64) -> Result<&'a [u8]> {
        let rest = &self.file[self.at..];
        ensure!(
            count <= rest.len() as u64,
            "{count} bytes are said to follow at byte {}, but there are {}: the file is truncated",
            self.at,
            rest.len()
        );
        self.at += count as usize;
        Ok(&rest[..count as usize])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        Ok(self.take(N as u64)?.try_into()?)
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn string(&mut self) -> Result<String> {
        let length = self.u64()?;
        let bytes = self.take(length)?;
        let text = std::str::from_utf8(bytes).context("a string is no UTF-8")?;
        Ok(text.to_owned())
    }

    fn value(&mut self, kind: u32, depth: usize) -> Result<Value> {
        Ok(match kind {
            0 => Value::Integer(u8::from_le_bytes(self.array()?).into()),
            1 => Value::Integer(i8::from_le_bytes(self.array()?).into()),
            2 => Value::Integer(u16::from_le_bytes(self.array()?).into()),
            3 => Value::Integer(i16::from_le_bytes(self.array()?).into()),
            4 => Value::Integer(self.u32()?.into()),
            5 => Value::Integer(i32::from_le_bytes(self.array()?).into()),
            6 => Value::Float(f32::from_le_bytes(self.array()?).into()),
            7 => match self.array()? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => bail!("a truth value is {other}, but must be 0 or 1"),
            },
            8 => Value::String(self.string()?),
            9 => {
                let (kind, count) = (self.u32()?, self.u64()?);
                self.values(kind, count, depth + 1)?
            }
            10 => Value::Integer(self.u64()?.into()),
            11 => Value::Integer(i64::from_le_bytes(self.array()?).into()),
            12 => Value::Float(f64::from_le_bytes(self.array()?)),
            other => bail!("the type of a value is {other}, which is not known"),
        })
    }

    /// Reads `count` values. Never allocates for more than the available bytes.
    fn values(&mut self, kind: u32, count: u64, depth: usize) -> Result<Value> {
        ensure!(depth <= MAX_DEPTH, "arrays are nested too deeply");
        let size = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            10..=12 => 8,
            // Each value takes bytes, so a wrong count stops at the end of the file.
            8 => {
                let mut strings = Vec::new();
                for _ in 0..count {
                    strings.push(self.string()?);
                }
                return Ok(Value::Strings(strings));
            }
            9 => {
                for _ in 0..count {
                    self.value(kind, depth)?;
                }
                return Ok(Value::Array(count));
            }
            other => bail!("the type of a value is {other}, which is not known"),
        };
        let Some(bytes) = count.checked_mul(size) else {
            bail!("an array is said to have {count} values");
        };
        let bytes = self.take(bytes)?;
        let (words, _) = bytes.as_chunks();
        Ok(match kind {
            4 => Value::Integers(
                words
                    .iter()
                    .map(|w| u32::from_le_bytes(*w).into())
                    .collect(),
            ),
            5 => Value::Integers(
                words
                    .iter()
                    .map(|w| i32::from_le_bytes(*w).into())
                    .collect(),
            ),
            _ => Value::Array(count),
        })
    }

    /// Reads axes, type and offset.
    fn tensor(&mut self) -> Result<(Vec<u64>, GgufType, u64)> {
        let count = self.u32()?;
        ensure!(
            count <= MAX_AXES,
            "it has {count} axes, but can have {MAX_AXES} at most"
        );
        let axes = (0..count).map(|_| self.u64()).collect::<Result<_>>()?;
        let number = self.u32()?;
        let dtype = GgufType::from_number(number).with_context(|| {
            let names = GgufType::ALL
                .map(|(_, kind)| format!("{kind:?}"))
                .join(", ");
            format!("its type has number {number}, but only these are read: {names}")
        })?;
        Ok((axes, dtype, self.u64()?))
    }
}
