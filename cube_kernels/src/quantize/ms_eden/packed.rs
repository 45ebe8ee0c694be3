//! Blocks of an NVFP4 source.

use cubecl::prelude::*;

use super::{
    super::packed_source::{PackedRows, SourcePlan},
    position::Position,
};

/// Returns the values of block `block` of stored row `row`; zero if `inside` is false. `own` is the
/// factor of the tile.
#[cube]
pub(super) fn decode_block(
    source: &PackedRows,
    own: f32,
    row: usize,
    block: usize,
    at: &Position,
    inside: bool,
    #[comptime] plan: SourcePlan,
) -> Array<f32> {
    let packed = source.load(row, row + at.padding, block, own, inside, plan);
    let mut values = Array::<f32>::new(16usize);
    #[unroll]
    for i in 0..16usize {
        let code = packed.words.extract(comptime!(i / 8)) >> comptime!(4 * (i as u32 % 8));
        values[i] = packed.factors.decode(code);
    }
    values
}

/// Zeroes positions from `end` on. The padding of the last block of a stored row is not part of the
/// matrix, and is nonzero if that copy was transformed.
#[cube]
pub(super) fn mask_block(block: &mut Array<f32>, first: usize, end: usize) {
    if first + 16usize > end {
        #[unroll]
        for i in 0..16usize {
            block[i] = select(first + i < end, block[i], 0.0f32);
        }
    }
}
