//! Parts of stored tensors that appear as tensors with names of their own, such as the matrix of one
//! expert in a tensor of all experts.
//!
//! Nothing is copied when a part is made; [`Contents::bytes`] arranges its elements on use.

use std::borrow::Cow;
use std::ops::Range;

use anyhow::{Result, ensure};
use half::{bf16, f16};
use nvfp4_formats::format::e2m1;
use safetensors::Dtype;

use super::super::header::Entry;

/// Elements of an MXFP4 block.
pub const MXFP4_BLOCK: usize = 32;

/// Location of a tensor: its file, its entry there, and the arrangement of its elements.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// Index of the file.
    pub file: usize,
    /// Type, shape and bytes. The type and the shape are those of the part.
    pub entry: Entry,
    pub layout: Layout,
}

/// Arrangement of a tensor's elements.
#[derive(Clone, Debug)]
pub(crate) enum Layout {
    /// In the order of the file.
    Contiguous,
    /// The element of row r and column c is element `first + r * strides[0] + c * strides[1]`.
    Strided { first: usize, strides: [usize; 2] },
    /// Rows of MXFP4 codes, decoded to bf16: row r is row `first + r * step` of the codes.
    Mxfp4 {
        first: usize,
        step: usize,
        /// File and bytes of the scales.
        scales: (usize, Range<usize>),
    },
}

impl Place {
    /// Returns a whole stored tensor.
    pub fn whole(file: usize, entry: Entry) -> Self {
        Self {
            file,
            entry,
            layout: Layout::Contiguous,
        }
    }

    /// Returns the part of `shape` whose elements begin at `first` and are adjacent.
    pub fn adjacent(&self, first: usize, shape: &[usize]) -> Self {
        let size = self.entry.dtype.bitsize() / 8;
        let start = self.entry.start + first * size;
        let entry = Entry {
            shape: shape.to_vec(),
            start,
            end: start + shape.iter().product::<usize>() * size,
            ..self.entry.clone()
        };
        Self::whole(self.file, entry)
    }

    /// Returns the part of `shape`, a matrix or a vector, whose elements are `strides` apart.
    pub fn strided(&self, first: usize, strides: [usize; 2], shape: &[usize]) -> Self {
        Self {
            file: self.file,
            entry: Entry {
                shape: shape.to_vec(),
                ..self.entry.clone()
            },
            layout: Layout::Strided { first, strides },
        }
    }

    /// Returns the matrix of `shape` whose rows are `step` apart, from row `first`, in these MXFP4
    /// codes with `scales`.
    pub fn mxfp4(&self, scales: &Self, [first, step]: [usize; 2], shape: [usize; 2]) -> Self {
        Self {
            file: self.file,
            entry: Entry {
                dtype: Dtype::BF16,
                shape: shape.to_vec(),
                ..self.entry.clone()
            },
            layout: Layout::Mxfp4 {
                first,
                step,
                scales: (scales.file, scales.entry.start..scales.entry.end),
            },
        }
    }
}

/// Scales of the blocks of a stored matrix.
#[derive(Clone, Copy)]
pub(crate) struct BlockScales<'a> {
    /// Scales `[rows, columns]` of blocks, little endian.
    pub bytes: &'a [u8],
    /// Type of the scales: F32, BF16 or F16.
    pub dtype: Dtype,
    /// Rows and columns of a block.
    pub block: [usize; 2],
}

impl BlockScales<'_> {
    /// Returns the scales, row-major.
    pub fn values(&self) -> Vec<f32> {
        let halves = || self.bytes.as_chunks::<2>().0.iter();
        match self.dtype {
            Dtype::BF16 => halves()
                .map(|it| bf16::from_le_bytes(*it).to_f32())
                .collect(),
            Dtype::F16 => halves()
                .map(|it| f16::from_le_bytes(*it).to_f32())
                .collect(),
            _ => {
                let (words, _) = self.bytes.as_chunks::<4>();
                words.iter().map(|it| f32::from_le_bytes(*it)).collect()
            }
        }
    }

    /// Multiplies the elements `values` of a matrix with `columns` columns.
    pub fn apply(&self, values: &mut [f32], columns: usize) {
        let scales = self.values();
        let [rows, width] = self.block;
        let per_row = columns.div_ceil(width);
        for (row, values) in values.chunks_mut(columns).enumerate() {
            let scales = &scales[row / rows * per_row..][..per_row];
            for (values, scale) in values.chunks_mut(width).zip(scales) {
                values.iter_mut().for_each(|value| *value *= scale);
            }
        }
    }
}

/// Elements of a tensor, as they are stored.
#[derive(Clone, Copy)]
pub(super) enum Contents<'a> {
    Adjacent(&'a [u8]),
    Strided {
        source: &'a [u8],
        first: usize,
        strides: [usize; 2],
    },
    Mxfp4 {
        codes: &'a [u8],
        scales: &'a [u8],
        first: usize,
        step: usize,
    },
}

impl<'a> Contents<'a> {
    /// Returns the elements of a tensor of `dtype` and `shape`, in order.
    pub fn bytes(&self, dtype: Dtype, shape: &[usize]) -> Cow<'a, [u8]> {
        match *self {
            Self::Adjacent(bytes) => Cow::Borrowed(bytes),
            Self::Strided {
                source,
                first,
                strides,
            } => {
                let size = dtype.bitsize() / 8;
                let (rows, columns) = matrix(shape);
                let mut bytes = Vec::with_capacity(rows * columns * size);
                for row in 0..rows {
                    let begin = first + row * strides[0];
                    for column in 0..columns {
                        let at = (begin + column * strides[1]) * size;
                        bytes.extend_from_slice(&source[at..at + size]);
                    }
                }
                Cow::Owned(bytes)
            }
            Self::Mxfp4 { .. } => {
                let blocks = self.mxfp4(shape).expect("these are its codes");
                let factors: Vec<f32> = (0..=u8::MAX).map(mxfp4_scale).collect();
                let (codes, scales) = (blocks.codes.chunks(MXFP4_BLOCK / 2), &blocks.scales);
                let mut bytes = Vec::with_capacity(blocks.codes.len() * 4);
                for (codes, scale) in codes.zip(scales) {
                    let factor = factors[usize::from(*scale)];
                    for code in codes.iter().flat_map(|pair| [pair & 0xF, pair >> 4]) {
                        // Exact: a code has two significant bits, and bf16 the exponents of f32.
                        let value = bf16::from_f32(e2m1::decode(code) * factor);
                        bytes.extend_from_slice(&value.to_le_bytes());
                    }
                }
                Cow::Owned(bytes)
            }
        }
    }

    /// Returns the number of bytes in the file.
    pub fn stored_bytes(&self, dtype: Dtype, shape: &[usize]) -> usize {
        let elements = shape.iter().product::<usize>();
        match self {
            Self::Adjacent(bytes) => bytes.len(),
            Self::Strided { .. } => elements * dtype.bitsize() / 8,
            Self::Mxfp4 { .. } => elements / 2 + elements / MXFP4_BLOCK,
        }
    }

    /// Returns the codes and scales of a tensor in MXFP4; `None` for another one.
    pub fn mxfp4(&self, shape: &[usize]) -> Option<Mxfp4> {
        let &Self::Mxfp4 {
            codes,
            scales,
            first,
            step,
        } = self
        else {
            return None;
        };
        let (rows, columns) = matrix(shape);
        let gather = |source: &[u8], width: usize| -> Vec<u8> {
            let rows = (0..rows).map(|row| (first + row * step) * width);
            rows.flat_map(|at| &source[at..at + width])
                .copied()
                .collect()
        };
        Some(Mxfp4 {
            codes: gather(codes, columns / 2),
            scales: gather(scales, columns / MXFP4_BLOCK),
        })
    }
}

/// A matrix in MXFP4.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mxfp4 {
    /// E2M1 codes by row, two in a byte, the first in its low half.
    pub codes: Vec<u8>,
    /// E8M0 scale of each block of 32.
    pub scales: Vec<u8>,
}

/// Returns the value of an E8M0 scale: 2^(byte - 127), or NaN for 255.
pub fn mxfp4_scale(byte: u8) -> f32 {
    match byte {
        u8::MAX => f32::NAN,
        byte => 2f64.powi(i32::from(byte) - 127) as f32,
    }
}

/// Returns the rows and columns of a matrix; a vector has one column.
fn matrix(shape: &[usize]) -> (usize, usize) {
    match *shape {
        [rows, columns] => (rows, columns),
        _ => (shape.iter().product(), 1),
    }
}

/// Checks the type and shape of the stored tensor `name`.
///
/// # Errors
/// Returns an error that names what differs.
pub(crate) fn check(name: &str, place: &Place, types: &[Dtype], shape: &[usize]) -> Result<()> {
    let found = &place.entry;
    ensure!(
        types.contains(&found.dtype),
        "`{name}` is of type {:?}, but must be one of {types:?}",
        found.dtype
    );
    ensure!(
        found.shape == shape,
        "`{name}` is {:?}, but must be {shape:?}",
        found.shape
    );
    Ok(())
}
