//! Typed host memory that collectives read and write, and reductions over it.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use bytemuck::Pod;
use half::bf16;

use crate::reduction::Reduction;

/// Element dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit float.
    F32,
    /// bfloat16.
    Bf16,
    /// Byte, also for packed codes and scales.
    U8,
    /// 32-bit unsigned integer.
    U32,
}

impl DType {
    /// All dtypes, at the index of their code on the wire.
    pub(crate) const ALL: [Self; 4] = [Self::F32, Self::Bf16, Self::U8, Self::U32];

    /// Size of an element in bytes.
    pub fn size(self) -> usize {
        match self {
            Self::F32 | Self::U32 => 4,
            Self::Bf16 => 2,
            Self::U8 => 1,
        }
    }

    /// Returns true if `reduction` is defined for the dtype: the mean is not defined for integers.
    pub fn supports(self, reduction: Reduction) -> bool {
        reduction != Reduction::Avg || matches!(self, Self::F32 | Self::Bf16)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::U8 => "u8",
            Self::U32 => "u32",
        })
    }
}

/// Elements that a collective reads.
#[derive(Debug, Clone, Copy)]
pub enum Buffer<'a> {
    /// Elements of [`DType::F32`].
    F32(&'a [f32]),
    /// Elements of [`DType::Bf16`].
    Bf16(&'a [bf16]),
    /// Elements of [`DType::U8`].
    U8(&'a [u8]),
    /// Elements of [`DType::U32`].
    U32(&'a [u32]),
}

impl<'a> Buffer<'a> {
    /// Returns the dtype of the elements.
    pub fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::Bf16(_) => DType::Bf16,
            Self::U8(_) => DType::U8,
            Self::U32(_) => DType::U32,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::Bf16(values) => values.len(),
            Self::U8(values) => values.len(),
            Self::U32(values) => values.len(),
        }
    }

    /// Returns true if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the memory.
    pub fn bytes(&self) -> &'a [u8] {
        match self {
            Self::F32(values) => bytemuck::cast_slice(values),
            Self::Bf16(values) => bytemuck::cast_slice(values),
            Self::U8(values) => values,
            Self::U32(values) => bytemuck::cast_slice(values),
        }
    }

    /// Returns the memory of the elements of `range`.
    pub(crate) fn part(&self, range: Range<usize>) -> &'a [u8] {
        let size = self.dtype().size();
        &self.bytes()[range.start * size..range.end * size]
    }
}

/// Element type, which defines the conversion of a slice to a buffer.
pub trait Element: Pod + Default {
    /// Converts a slice to read from.
    fn buffer(values: &[Self]) -> Buffer<'_>;

    /// Converts a slice to write to.
    fn buffer_mut(values: &mut [Self]) -> BufferMut<'_>;
}

macro_rules! element {
    ($($kind:ident: $type:ty),*) => {
        $(impl Element for $type {
            fn buffer(values: &[Self]) -> Buffer<'_> {
                Buffer::$kind(values)
            }

            fn buffer_mut(values: &mut [Self]) -> BufferMut<'_> {
                BufferMut::$kind(values)
            }
        })*
    };
}

element!(F32: f32, Bf16: bf16, U8: u8, U32: u32);

/// Elements that a collective writes.
#[derive(Debug)]
pub enum BufferMut<'a> {
    /// Elements of [`DType::F32`].
    F32(&'a mut [f32]),
    /// Elements of [`DType::Bf16`].
    Bf16(&'a mut [bf16]),
    /// Elements of [`DType::U8`].
    U8(&'a mut [u8]),
    /// Elements of [`DType::U32`].
    U32(&'a mut [u32]),
}

impl BufferMut<'_> {
    /// Returns the same elements as a buffer to read.
    pub fn as_buffer(&self) -> Buffer<'_> {
        match self {
            Self::F32(values) => Buffer::F32(values),
            Self::Bf16(values) => Buffer::Bf16(values),
            Self::U8(values) => Buffer::U8(values),
            Self::U32(values) => Buffer::U32(values),
        }
    }

    /// Returns the dtype of the elements.
    pub fn dtype(&self) -> DType {
        self.as_buffer().dtype()
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.as_buffer().len()
    }

    /// Returns true if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the memory of the elements of `range`.
    pub(crate) fn part_mut(&mut self, range: Range<usize>) -> &mut [u8] {
        let size = self.dtype().size();
        let bytes: &mut [u8] = match self {
            Self::F32(values) => bytemuck::cast_slice_mut(values),
            Self::Bf16(values) => bytemuck::cast_slice_mut(values),
            Self::U8(values) => values,
            Self::U32(values) => bytemuck::cast_slice_mut(values),
        };
        &mut bytes[range.start * size..range.end * size]
    }

    /// Writes the reduction of `parts`, in their order, to the elements of `range`. Each part must
    /// have as many elements as the range.
    pub(crate) fn reduce(&mut self, range: Range<usize>, reduction: Reduction, parts: &[&[u8]]) {
        match self {
            Self::F32(values) => {
                let out = &mut values[range];
                fold(out, reduction, parts, |x: f32| x);
            }
            Self::Bf16(values) => {
                let out = &mut values[range];
                let mut sums = vec![0.0f32; out.len()];
                fold(&mut sums, reduction, parts, bf16::to_f32);
                for (value, sum) in out.iter_mut().zip(sums) {
                    *value = bf16::from_f32(sum);
                }
            }
            Self::U8(values) => {
                fold_integers(&mut values[range], reduction, parts, u8::wrapping_add)
            }
            Self::U32(values) => {
                fold_integers(&mut values[range], reduction, parts, u32::wrapping_add);
            }
        }
    }
}

/// Converts `bytes`, which need not be aligned, to elements.
fn elements<T: Pod>(bytes: &[u8]) -> Cow<'_, [T]> {
    match bytemuck::try_cast_slice(bytes) {
        Ok(elements) => Cow::Borrowed(elements),
        Err(_) => {
            let elements = bytes.chunks_exact(size_of::<T>());
            Cow::Owned(elements.map(bytemuck::pod_read_unaligned).collect())
        }
    }
}

/// Reduces floats in `f32`, part after part. A NaN in any part gives NaN, also for a maximum: an
/// amax without the NaN would give a finite scale.
fn fold<T: Pod>(out: &mut [f32], reduction: Reduction, parts: &[&[u8]], widen: impl Fn(T) -> f32) {
    for (index, part) in parts.iter().enumerate() {
        let part = elements::<T>(part);
        let pairs = out.iter_mut().zip(part.iter().map(|value| widen(*value)));
        match reduction {
            _ if index == 0 => pairs.for_each(|(out, value)| *out = value),
            Reduction::Sum | Reduction::Avg => pairs.for_each(|(out, value)| *out += value),
            Reduction::Max => pairs.for_each(|(out, value)| {
                if value > *out || value.is_nan() {
                    *out = value;
                }
            }),
            Reduction::Min => pairs.for_each(|(out, value)| {
                if value < *out || value.is_nan() {
                    *out = value;
                }
            }),
        }
    }
    if reduction == Reduction::Avg {
        let count = parts.len() as f32;
        out.iter_mut().for_each(|value| *value /= count);
    }
}

fn fold_integers<T: Pod + Ord>(
    out: &mut [T],
    reduction: Reduction,
    parts: &[&[u8]],
    add: impl Fn(T, T) -> T,
) {
    for (index, part) in parts.iter().enumerate() {
        let part = elements::<T>(part);
        for (out, value) in out.iter_mut().zip(part.iter().copied()) {
            *out = match reduction {
                _ if index == 0 => value,
                Reduction::Sum | Reduction::Avg => add(*out, value),
                Reduction::Max => value.max(*out),
                Reduction::Min => value.min(*out),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_reduce_in_order_and_keep_nan() {
        // 1e8 + 1 - 1e8 is 0 in this order and 1 in another.
        let parts = [1e8f32, 1.0, -1e8].map(f32::to_ne_bytes);
        let parts: Vec<&[u8]> = parts.iter().map(|part| &part[..]).collect();
        let mut out = [7.0f32];
        BufferMut::F32(&mut out).reduce(0..1, Reduction::Sum, &parts);
        assert_eq!(out, [0.0]);
        for order in [[f32::NAN, 1.0], [1.0, f32::NAN]] {
            let parts = order.map(f32::to_ne_bytes);
            let parts: Vec<&[u8]> = parts.iter().map(|part| &part[..]).collect();
            for reduction in [Reduction::Max, Reduction::Min, Reduction::Sum] {
                BufferMut::F32(&mut out).reduce(0..1, reduction, &parts);
                assert!(out[0].is_nan(), "{reduction} of {order:?}");
            }
        }
    }

    #[test]
    fn bf16_rounds_once() {
        // 1 + 2^-8 + 2^-8: added in bf16, each half ulp would be lost to ties-to-even.
        let parts = [1.0f32, 0.00390625, 0.00390625].map(|x| bf16::from_f32(x).to_ne_bytes());
        let parts: Vec<&[u8]> = parts.iter().map(|part| &part[..]).collect();
        let mut out = [bf16::ZERO];
        BufferMut::Bf16(&mut out).reduce(0..1, Reduction::Sum, &parts);
        assert_eq!(out[0].to_f32(), 1.0078125);
    }

    #[test]
    fn parts_need_not_be_aligned() {
        let mut bytes = vec![0u8];
        bytes.extend(3u32.to_ne_bytes());
        let mut out = [0u32];
        BufferMut::U32(&mut out).reduce(0..1, Reduction::Max, &[&bytes[1..], &bytes[1..]]);
        assert_eq!(out, [3]);
    }
}
