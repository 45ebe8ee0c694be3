//! State that the roles of a CTA of the [`sm100_block_scaled`](super) kernel
//! share.

use cubecl::prelude::*;

use super::{commands::CommandRing, operands::Sm100Plan};
use crate::{
    cube::ptx::{
        mapa, mbarrier_arrive, mbarrier_arrive_cluster, mbarrier_arrive_cluster_relaxed,
        mbarrier_wait_parity, mbarrier_wait_parity_cluster,
    },
    gemm::{arguments::GroupedProblem, scheduler::GroupedDim},
    moe::groups::extent,
};

/// Block scales in 128x4 tiles.
#[derive(CubeType, CubeLaunch)]
pub struct SwizzledScales {
    /// Scales of the instruction's `a`: each group along M begins at a tile.
    pub a: Box<[u32]>,
    /// Scales of the instruction's `b`: each group along M begins at a tile.
    pub b: Box<[u32]>,
    /// Number of 128-row tiles of the GEMM's `a`, the operand whose rows are in groups.
    pub m_tiles: u32,
    /// The scales as matrices, for two CTAs.
    pub maps: ComptimeOption<ScaleMaps>,
}

/// Block scales as matrices: each row is a 128x4 tile, in words.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct ScaleMaps {
    /// Scales of the instruction's `a`.
    pub a: TensorMap<u32, Tiled>,
    /// Scales of the instruction's `b`.
    pub b: TensorMap<u32, Tiled>,
}

/// Shared state of the roles of a CTA: addresses in shared memory and tensor memory.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct CtaState {
    /// Address of the stages.
    pub operands: u32,
    /// First full-stage barrier; the empty-stage barriers follow.
    pub full: u32,
    /// Barrier of full accumulators; that of empty ones follows.
    pub accumulators: u32,
    /// Command ring.
    pub ring: CommandRing,
    /// Address of the allocated tensor memory.
    pub tmem: u32,
    /// Seed of delays, or 0.
    pub seed: u32,
    /// Rank of this CTA among those that share a tile.
    pub rank: u32,
}

#[cube]
impl CtaState {
    /// Returns the first tile of this CTA.
    pub fn first_tile(&self, #[comptime] plan: Sm100Plan) -> u32 {
        CUBE_POS as u32 / comptime!(plan.ctas() as u32)
    }

    /// Returns the distance between consecutive tiles of this CTA.
    pub fn tile_step(&self, #[comptime] plan: Sm100Plan) -> u32 {
        CUBE_COUNT as u32 / comptime!(plan.ctas() as u32)
    }

    /// Returns the barrier of an empty stage.
    pub fn empty(&self, stage: u32, #[comptime] plan: Sm100Plan) -> u32 {
        self.full + comptime!(8 * plan.stages() as u32) + stage * 8u32
    }

    /// Returns the "arrived" barrier of a stage in this CTA.
    pub fn arrived(&self, stage: u32, #[comptime] plan: Sm100Plan) -> u32 {
        self.full + comptime!(8 * plan.arrived_at() as u32) + stage * 8u32
    }
}

/// Waits for the phase of `parity` of `barrier`, at which both CTAs of a pair may arrive.
///
/// Only the software model passes data to threads of the other CTA. TMA and the tensor cores need
/// no `acquire.cluster`, which would flush the L1 cache at each wait.
#[cube]
pub(super) fn wait(barrier: u32, parity: u32, #[comptime] plan: Sm100Plan) {
    if comptime!(plan.has_arrived()) {
        mbarrier_wait_parity_cluster(barrier, parity);
    } else {
        mbarrier_wait_parity(barrier, parity);
    }
}

/// Arrives at the barrier at address `barrier` in the CTA that issues the instructions, after loads
/// of tensor memory. `release.cluster` would wait for all stores of the epilogue.
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

/// Extent of a group: the rows of its output, and its columns along K.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct GroupExtent {
    /// First row of the output.
    pub first: u32,
    /// End row (exclusive).
    pub end: u32,
    /// First column that is loaded, where a 128x4 tile of scales begins.
    pub k_first: u32,
    /// Steps after `k_first` that belong to the previous group.
    pub lead: u32,
    /// Columns from `k_first` to the end of K; zero in an empty group along K.
    pub k: u32,
}

#[cube]
impl GroupExtent {
    /// Returns the extent of `group`, clamped to the existing rows and columns.
    ///
    /// Groups along K begin at multiples of a step. Other offsets are rounded down: the result is
    /// then wrong, but TMA always reads aligned 16-byte chunks.
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

    /// Returns true if there is nothing to multiply, and the output is zeros.
    pub fn is_empty(&self, #[comptime] grouped: GroupedDim) -> bool {
        let mut is_empty = false;
        if comptime!(grouped == GroupedDim::K) {
            is_empty = self.k == 0u32;
        }
        is_empty
    }

    /// Returns the number of rows of tiles of the output.
    pub fn tiles(&self, #[comptime] plan: Sm100Plan) -> u32 {
        (self.end - self.first).div_ceil(comptime!(plan.tile().tile_m() as u32))
    }

    /// Returns the number of 128-row tiles of scales.
    pub fn scale_tiles(&self) -> u32 {
        (self.end - self.first).div_ceil(128u32)
    }
}
