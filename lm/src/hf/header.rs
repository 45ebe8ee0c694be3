//! Parses the header of a safetensors file, which gives the location of each tensor.
//!
//! A file consists of 8 bytes (the length of the header, little endian), the header in JSON, and
//! the data. The header maps each tensor's name to its type, shape and range of data bytes; the
//! ranges cover the data without holes or overlaps. No allocation depends on a number in the file:
//! the claims of a header are bounded by its length, and that by the length of the file.

use std::collections::hash_map::Entry as HashEntry;
use std::collections::{BTreeMap, HashMap};
use std::fmt;

use anyhow::{Context, Result, bail, ensure};
use safetensors::Dtype;
use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, Visitor};

/// Size of the length field before the header.
pub(super) const LENGTH_BYTES: usize = 8;
/// Maximum header length, as in the `safetensors` library.
pub(super) const MAX_HEADER: u64 = 100_000_000;
/// Maximum number of axes of a tensor.
const MAX_AXES: usize = 16;

/// Location of a tensor in its file.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// First byte of the tensor in the file, and one past its last byte.
    pub start: usize,
    pub end: usize,
}

/// A header that was checked against the length of its file.
#[derive(Debug, Default)]
pub struct Header {
    pub tensors: BTreeMap<String, Entry>,
    pub metadata: BTreeMap<String, String>,
}

impl Header {
    /// Parses the header of a whole file.
    ///
    /// # Errors
    /// Returns an error if the file is truncated or longer than its tensors, or if the header is
    /// not JSON of the expected form, repeats a name, or states a range that does not match the
    /// tensor's type and shape. Errors name the tensor; the caller names the file.
    pub fn parse(file: &[u8]) -> Result<Self> {
        let Some((length, rest)) = file.split_first_chunk::<LENGTH_BYTES>() else {
            bail!(
                "the file has {} bytes, but a safetensors file has at least {LENGTH_BYTES}",
                file.len()
            );
        };
        let length = u64::from_le_bytes(*length);
        ensure!(
            length <= MAX_HEADER && length <= rest.len() as u64,
            "the header is said to have {length} bytes, but at most {} can be: the file is \
             truncated, or no safetensors file",
            MAX_HEADER.min(rest.len() as u64)
        );
        let (header, data) = rest.split_at(length as usize);
        let raw: RawHeader =
            serde_json::from_slice(header).context("the header is not the expected JSON")?;
        let data_start = LENGTH_BYTES + header.len();
        let mut tensors = BTreeMap::new();
        for (name, raw) in raw.tensors {
            let entry = raw
                .check(data_start, data.len())
                .with_context(|| format!("tensor `{name}`"))?;
            tensors.insert(name, entry);
        }
        check_cover(&tensors, data_start, file.len())?;
        Ok(Self {
            tensors,
            metadata: raw.metadata,
        })
    }
}

/// Returns an error unless the tensors cover the bytes from `start` to `end` without holes or
/// overlaps.
fn check_cover(tensors: &BTreeMap<String, Entry>, start: usize, end: usize) -> Result<()> {
    let mut order: Vec<(&String, &Entry)> = tensors.iter().collect();
    order.sort_by_key(|(_, entry)| (entry.start, entry.end));
    let mut covered = start;
    for (name, entry) in order {
        ensure!(
            entry.start == covered,
            "tensor `{name}` starts at byte {} of the data, but the one before it ends at {}",
            entry.start - start,
            covered - start
        );
        covered = entry.end;
    }
    ensure!(
        covered == end,
        "the tensors take {} bytes, but the data has {}: the file is truncated, or has bytes that \
         belong to no tensor",
        covered - start,
        end - start
    );
    Ok(())
}

/// A tensor as the header states it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawEntry {
    dtype: Dtype,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl RawEntry {
    /// Checks the entry against `data`, the number of data bytes, and converts offsets to be
    /// relative to the file.
    fn check(self, data_start: usize, data: usize) -> Result<Entry> {
        let (start, end) = self.data_offsets;
        ensure!(
            start <= end && end <= data as u64,
            "its bytes are said to be {start} to {end}, but the data has {data} bytes"
        );
        ensure!(
            self.shape.len() <= MAX_AXES,
            "it has {} axes, but at most {MAX_AXES} are supported",
            self.shape.len()
        );
        let needed = bytes_of(self.dtype, &self.shape);
        ensure!(
            needed == Some(end - start),
            "{:?}{:?} takes {} bytes, but it is said to have {}",
            self.dtype,
            self.shape,
            needed.map_or("no whole number of".into(), |bytes| bytes.to_string()),
            end - start
        );
        // A shape with a zero may have other dimensions that do not fit a `usize`.
        let shape: Result<Vec<usize>, _> = self.shape.into_iter().map(usize::try_from).collect();
        Ok(Entry {
            dtype: self.dtype,
            shape: shape.context("its shape does not fit this machine")?,
            start: data_start + start as usize,
            end: data_start + end as usize,
        })
    }
}

/// Returns the bytes of a tensor; none if they are not a whole number or do not fit 64 bits.
pub(super) fn bytes_of(dtype: Dtype, shape: &[u64]) -> Option<u64> {
    let elements = if shape.contains(&0) {
        0
    } else {
        shape
            .iter()
            .try_fold(1u64, |n, axis| n.checked_mul(*axis))?
    };
    let bits = elements.checked_mul(dtype.bitsize() as u64)?;
    bits.is_multiple_of(8).then_some(bits / 8)
}

/// The whole header, checked only for repeated names.
struct RawHeader {
    tensors: HashMap<String, RawEntry>,
    metadata: BTreeMap<String, String>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a map from the names of tensors to their type, shape and offsets")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut header = RawHeader {
                    tensors: HashMap::new(),
                    metadata: BTreeMap::new(),
                };
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        header.metadata = map.next_value()?;
                        continue;
                    }
                    match header.tensors.entry(name) {
                        HashEntry::Vacant(place) => place.insert(map.next_value()?),
                        HashEntry::Occupied(place) => {
                            let name = place.key();
                            return Err(A::Error::custom(format!("tensor `{name}` comes twice")));
                        }
                    };
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(Entries)
    }
}
