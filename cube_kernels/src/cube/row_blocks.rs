//! Rows of any length in blocks of 8 elements, the amount that a unit loads and stores at once.

use cubecl::prelude::*;

use super::{
    codec::Conversion,
    words::{pack, unpack},
};
use crate::tensor::FloatKind;

/// Elements per block.
pub const ROW_BLOCK: usize = 8;

/// Access pattern for the rows of a matrix in blocks of 8; the last block may be shorter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RowPlan {
    /// True if a loaded scalar is an element of 16 bits instead of a word.
    pub elements: bool,
    /// True if rows consist of whole blocks.
    pub whole: bool,
    /// Element type.
    pub kind: FloatKind,
}

impl RowPlan {
    /// Returns the elements per loaded scalar.
    pub const fn per_scalar(&self) -> usize {
        if self.elements {
            1
        } else {
            4 / self.kind.size()
        }
    }

    /// Returns the vectors of `width` scalars per block.
    pub const fn vectors(&self, width: usize) -> usize {
        ROW_BLOCK / self.per_scalar() / width
    }
}

/// Returns the index of vector `v` of block `block` of the row that begins at vector `row`. If rows
/// are not whole blocks, vectors after the end of the row are replaced by its last one.
#[cube]
pub fn vector_index(
    row: usize,
    block: usize,
    #[comptime] v: usize,
    row_vectors: usize,
    #[comptime] vectors: usize,
    #[comptime] plan: RowPlan,
) -> usize {
    let index = block * vectors + v;
    if comptime!(plan.whole) {
        row + index
    } else {
        row + min(index, row_vectors - 1usize)
    }
}

/// Returns the elements of a block whose vectors start at entry `first` of `loaded`. Elements from
/// `left` on, which are after the end of the row, are `fill`.
#[cube]
pub fn block_values<F: Numeric, N: Size>(
    loaded: &Array<Vector<F, N>>,
    #[comptime] first: usize,
    left: usize,
    fill: f32,
    #[comptime] plan: RowPlan,
) -> Array<f32> {
    let width = N::value();
    let per = comptime!(plan.per_scalar());
    let mut values = Array::<f32>::new(ROW_BLOCK);
    #[unroll]
    for i in 0..ROW_BLOCK {
        let scalar = comptime!(i / per);
        let vector = loaded[comptime!(first + scalar / width)];
        let word = u32::cast_from(vector.extract(comptime!(scalar % width)));
        let value = unpack(word, comptime!((i % per) as u32), plan.kind);
        values[i] = if comptime!(plan.whole) {
            value
        } else {
            select(i < left, value, fill)
        };
    }
    values
}

/// Returns vector `v` of the block `values`, rounded to nearest even.
#[cube]
pub fn block_vector<F: Numeric, N: Size>(
    values: &Array<f32>,
    #[comptime] v: usize,
    #[comptime] conversion: Conversion,
    #[comptime] plan: RowPlan,
) -> Vector<F, N> {
    let width = N::value();
    let per = comptime!(plan.per_scalar());
    let mut vector = Vector::<F, N>::empty();
    #[unroll]
    for k in 0..width {
        let first = comptime!((v * width + k) * per);
        let second = comptime!(first + per - 1);
        let word = pack(values[first], values[second], plan.kind, conversion);
        let scalar = if comptime!(plan.elements) {
            F::cast_from(word & 0xFFFFu32)
        } else {
            F::cast_from(word)
        };
        vector.insert(k, scalar);
    }
    vector
}

/// Returns the sum of 8 values in a tree: neighbours, then neighbouring pairs, then the two halves.
#[cube]
pub fn block_sum(values: &Array<f32>) -> f32 {
    let low = (values[0] + values[1]) + (values[2] + values[3]);
    low + ((values[4] + values[5]) + (values[6] + values[7]))
}
