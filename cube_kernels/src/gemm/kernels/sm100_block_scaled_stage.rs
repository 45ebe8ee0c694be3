//! What the roles of a CTA of the [`sm100_block_scaled`](super::sm100_block_scaled) kernel share.

use cubecl::prelude::*;

use super::{sm100_block_scaled_commands::CommandRing, sm100_block_scaled_operands::Sm100Plan};
use crate::{
    cube::ptx::{
        mapa, mbarrier_arrive, mbarrier_arrive_cluster, mbarrier_arrive_cluster_relaxed,
        mbarrier_wait_parity, mbarrier_wait_parity_cluster,
    },
    gemm::{arguments::GroupedProblem, scheduler::GroupedDim},
    moe::groups::extent,
};

/// Block scales in 128x4 tiles, in bytes from where they begin.
#[derive(CubeType, CubeLaunch)]
pub struct SwizzledScales {
    /// Those of the instruction's `a`: each group along M begins at a tile.
    pub a: Box<[u32]>,
    /// Those of its `b`: each group along M begins at a tile.
    pub b: Box<[u32]>,
    /// Tiles of 128 rows that there are of the GEMM's `a`, which the rows in groups are.
    pub m_tiles: u32,
    /// The same as matrices, for two CTAs.
    pub maps: ComptimeOption<ScaleMaps>,
}

/// Block scales as matrices: a row is a 128x4 tile, in words.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct ScaleMaps {
    /// Those of the instruction's `a`.
    pub a: TensorMap<u32, Tiled>,
    /// Those of its `b`.
    pub b: TensorMap<u32, Tiled>,
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
    /// Which CTA it is of those that share a tile.
    pub rank: u32,
}

#[cube]
impl CtaState {
    /// The first tile of this CTA.
    pub fn first_tile(&self, #[comptime] plan: Sm100Plan) -> u32 {
        CUBE_POS as u32 / comptime!(plan.ctas() as u32)
    }

    /// Tiles from one of this CTA to the next.
    pub fn tile_step(&self, #[comptime] plan: Sm100Plan) -> u32 {
        CUBE_COUNT as u32 / comptime!(plan.ctas() as u32)
    }

    /// The barrier of an empty stage.
    pub fn empty(&self, stage: u32, #[comptime] plan: Sm100Plan) -> u32 {
        self.full + comptime!(8 * plan.stages() as u32) + stage * 8u32
    }

    /// The barrier of a stage that has arrived in this CTA.
    pub fn arrived(&self, stage: u32, #[comptime] plan: Sm100Plan) -> u32 {
        self.full + comptime!(8 * plan.arrived_at() as u32) + stage * 8u32
    }
}

/// Waits for the phase of `parity` of `barrier`, at which both CTAs of a pair may arrive.
///
/// Only the software model has data for threads of the other CTA. TMA and the tensor cores need no
/// `acquire.cluster`, which would empty the L1 cache at each wait.
#[cube]
pub(super) fn wait(barrier: u32, parity: u32, #[comptime] plan: Sm100Plan) {
    if comptime!(plan.has_arrived()) {
        mbarrier_wait_parity_cluster(barrier, parity);
    } else {
        mbarrier_wait_parity(barrier, parity);
    }
}

/// Arrives at the barrier that is at `barrier` in the CTA that issues the instructions, behind
/// loads of tensor memory. `release.cluster` would wait for all that the epilogue has written.
#[cube]
pub(super) fn arrive_at_issuer(barrier: u32, #[comptime] plan: Sm100Plan) {
    if comptime!(plan.ctas() == 1) {
        mbarrier_arrive(barrier);
    } else if comptime!(plan.has_arrived()) {
        mbarrier_arrive_cluster(mapa(barrier, 0u32.runtime()));
    } else {
        mbarrier_arrive_cluster_relaxed(mapa(barrier, 0u32.runtime()));
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
    /// The first column of the contraction that is loaded, where a 128x4 tile of scales begins.
    pub k_first: u32,
    /// Steps behind that which belong to the group before.
    pub lead: u32,
    /// Columns behind `k_first` up to the end of the contraction; none in an empty group along K.
    pub k: u32,
}

#[cube]
impl GroupExtent {
    /// Of `group`, within the rows and columns that there are.
    ///
    /// Groups along K begin at multiples of a step. Other offsets are rounded down: the result is
    /// wrong then, but TMA reads 16-byte pieces as it must.
    pub fn of(problem: &GroupedProblem, group: u32, #[comptime] plan: Sm100Plan) -> GroupExtent {
        let grouped = comptime!(plan.grouped);
        let mut first = 0u32;
        let mut end = problem.shape.m;
        let mut k_first = 0u32;
        let mut lead = 0u32;
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
            k_first = own.start - own.start % comptime!(plan.format.atom_k() as u32);
            k = select(own.end > own.start, own.end - k_first, 0u32);
            if comptime!(plan.has_lead()) {
                lead = (own.start - k_first) / comptime!(plan.format.step_k() as u32);
            }
        }
        GroupExtent {
            first,
            end,
            k_first,
            lead,
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

    /// Rows of tiles of the output.
    pub fn tiles(&self, #[comptime] plan: Sm100Plan) -> u32 {
        (self.end - self.first).div_ceil(comptime!(plan.tile().tile_m() as u32))
    }

    /// Tiles of 128 rows of scales.
    pub fn scale_tiles(&self) -> u32 {
        (self.end - self.first).div_ceil(128u32)
    }
}
