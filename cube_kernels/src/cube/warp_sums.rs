//! Sums of `mma.sync` fragments over several warps, which add them through shared memory. For GEMMs
//! of small M, in which the rows of a weight are the left operand and those of `a` the right one.

use cubecl::prelude::*;

/// Layout of each warp's sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WarpSums {
    /// Groups of 16 rows of the left operand.
    pub strips: usize,
    /// Groups of 8 rows of the right operand.
    pub columns: usize,
}

impl WarpSums {
    /// Returns the pitch of rows of the right operand, in floats: padded by four, so that the lanes
    /// of a warp write to different banks.
    pub const fn stride(self) -> usize {
        16 * self.strips + 4
    }

    /// Returns the floats per warp.
    pub const fn floats(self) -> usize {
        8 * self.columns * self.stride()
    }
}

/// Stores the sums of a warp after those of the warps before it. A lane has rows `lane / 4` and
/// `lane / 4 + 8` of a strip, for two neighbouring rows of the right operand.
#[cube]
pub fn stage_sums(
    sums: &Array<Vector<f32, Const<4>>>,
    exchange: &mut [f32],
    #[comptime] shape: WarpSums,
) {
    let warp = UNIT_POS / 32u32;
    let group = (UNIT_POS % 32u32) / 4u32;
    let quarter = UNIT_POS % 4u32;
    let stride = comptime!(shape.stride() as u32);
    #[unroll]
    for i in 0..comptime!(shape.strips) {
        #[unroll]
        for j in 0..comptime!(shape.columns) {
            let sum = sums[comptime!(i * shape.columns + j)];
            let base = warp * comptime!(shape.floats() as u32)
                + (comptime!(j as u32 * 8) + quarter * 2u32) * stride
                + comptime!(i as u32 * 16)
                + group;
            exchange[base as usize] = sum.extract(0usize);
            exchange[(base + stride) as usize] = sum.extract(1usize);
            exchange[(base + 8u32) as usize] = sum.extract(2usize);
            exchange[(base + stride + 8u32) as usize] = sum.extract(3usize);
        }
    }
}
