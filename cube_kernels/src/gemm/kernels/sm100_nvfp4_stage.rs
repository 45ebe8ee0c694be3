//! What the roles of a CTA of the [`sm100_nvfp4`](super::sm100_nvfp4) kernel share.

use cubecl::prelude::*;

use super::{
    sm100_nvfp4_commands::CommandRing,
    sm100_nvfp4_operands::{STAGES, STEP_K},
};
use crate::{
    gemm::{
        arguments::GroupedProblem,
        scheduler::GroupedDim,
        tiles::{SM100_TILE_M, TensorCore},
    },
    moe::groups::extent,
};

/// The comptime choices of `sm100_nvfp4_kernel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sm100Plan {
    /// What is in groups.
    pub grouped: GroupedDim,
    /// Who multiplies.
    pub core: TensorCore,
}

/// Block scales in 128x4 tiles, in bytes from where they begin.
#[derive(CubeType, CubeLaunch)]
pub struct SwizzledScales {
    /// Those of `a`: with groups along M each group begins at a tile.
    pub a: Box<[u32]>,
    /// Those of `b`: each group begins at a tile.
    pub b: Box<[u32]>,
    /// Tiles of 128 rows of `a` that there are.
    pub a_tiles: u32,
}

/// What the roles of a CTA share: addresses in shared memory, and tensor memory.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct CtaState {
    /// The stages.
    pub operands: u32,
    /// Barriers of full stages; those of empty ones are behind them.
    pub full: u32,
    /// The barrier of full accumulators; that of empty ones is behind it.
    pub accumulators: u32,
    /// The ring of commands.
    pub ring: CommandRing,
    /// The address in tensor memory of what was allocated.
    pub tmem: u32,
    /// The seed of delays, or 0.
    pub seed: u32,
}

#[cube]
impl CtaState {
    /// The barrier of an empty stage.
    pub fn empty(&self, stage: u32) -> u32 {
        self.full + comptime!(8 * STAGES as u32) + stage * 8u32
    }
}

/// A group: the rows of its output, and its columns of the contraction.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct GroupExtent {
    /// The first row of the output.
    pub first: u32,
    /// The row behind the last.
    pub end: u32,
    /// The first column of the contraction, a multiple of [`STEP_K`].
    pub k_first: u32,
    /// Columns of the contraction; none in an empty group along K.
    pub k: u32,
}

#[cube]
impl GroupExtent {
    /// Of `group`, within the rows and columns that there are.
    ///
    /// Groups along K begin at multiples of [`STEP_K`]. Other offsets are rounded down: the result
    /// is wrong then, but TMA reads 16-byte pieces as it must.
    pub fn of(
        problem: &GroupedProblem,
        group: u32,
        #[comptime] grouped: GroupedDim,
    ) -> GroupExtent {
        let mut first = 0u32;
        let mut end = problem.shape.m;
        let mut k_first = 0u32;
        let mut k = problem.shape.k;
        if comptime!(grouped == GroupedDim::M) {
            let own = extent(&problem.offsets, group, problem.shape.m);
            first = own.start;
            end = own.end;
        }
        if comptime!(grouped == GroupedDim::K) {
            first = group * problem.shape.m;
            end = first + problem.shape.m;
            let own = extent(&problem.offsets, group, problem.shape.k);
            k_first = own.start - own.start % comptime!(STEP_K as u32);
            k = select(own.end > own.start, own.end - k_first, 0u32);
        }
        GroupExtent {
            first,
            end,
            k_first,
            k,
        }
    }

    /// Whether there is nothing to multiply, and the output is zeros.
    pub fn is_empty(&self, #[comptime] grouped: GroupedDim) -> bool {
        let mut is_empty = false;
        if comptime!(grouped == GroupedDim::K) {
            is_empty = self.k == 0u32;
        }
        is_empty
    }

    /// Rows of tiles.
    pub fn tiles(&self) -> u32 {
        (self.end - self.first).div_ceil(comptime!(SM100_TILE_M as u32))
    }
}
