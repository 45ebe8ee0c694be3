//! Arguments and shared-memory layout of the backward.

use cubecl::prelude::*;

use super::{
    barriers::{Barriers, PLACES},
    forward::{BOX, CONSUMERS, WARPGROUP_ROWS},
    tiles::{Schedule, TilePlan},
};
use crate::{
    attention::mma::problem::{MmaPlan, Problem, Side},
    cube::ptx::{Major, WgmmaGemm, WgmmaOperand},
};

/// Pipeline stages of the blocks over which a CTA iterates: one is filled while the GEMMs of two
/// run.
pub(super) const BACKWARD_STAGES: usize = 3;

/// Gradients that a kernel computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pass {
    /// A CTA holds keys and values, and iterates over queries.
    KeysValues,
    /// A CTA holds queries, and iterates over keys and values.
    Queries,
}

/// Comptime choices of `sm90_backward_kernel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sm90BackwardPlan {
    /// Choices shared with the `mma.sync` kernels: a warp has one strip, and a block has `inner`
    /// rows of the other side.
    pub plan: MmaPlan,
    /// Gradients to compute.
    pub pass: Pass,
    /// True if gradients of `q` and `k` are rotated back.
    pub rope: bool,
}

impl Sm90BackwardPlan {
    /// Returns the rows per CTA.
    pub const fn rows(self) -> usize {
        WARPGROUP_ROWS * CONSUMERS
    }

    /// Returns the side of the rows that a CTA holds.
    pub(super) const fn own_side(self) -> Side {
        match self.pass {
            Pass::KeysValues => Side::Keys,
            Pass::Queries => Side::Queries,
        }
    }

    /// Returns the side of the blocks over which a CTA iterates.
    pub(super) const fn other_side(self) -> Side {
        match self.pass {
            Pass::KeysValues => Side::Queries,
            Pass::Queries => Side::Keys,
        }
    }

    /// Returns the tiles; those with the most work come first: the first keys, or the last queries.
    pub(super) const fn tiles(self) -> TilePlan {
        TilePlan {
            rows: self.rows(),
            backwards: !self.is_keys(),
            offsets: self.plan.offsets,
        }
    }

    pub(super) const fn boxes(self) -> usize {
        self.plan.head / BOX
    }

    /// Returns the vectors of the rows of one operand that a CTA holds.
    pub(super) const fn own_vectors(self) -> usize {
        self.rows() * self.plan.head / 8
    }

    /// Returns the vectors of one operand in a stage.
    pub(super) const fn stage_vectors(self) -> usize {
        self.plan.inner * self.plan.head / 8
    }

    /// Returns the GEMM of scores, and of gradients of weights: rows of the CTA times a block.
    pub(super) const fn scores(self) -> WgmmaGemm {
        WgmmaGemm {
            n: self.plan.inner,
            depth: self.plan.head,
            kind: self.plan.kind,
            a: WgmmaOperand {
                major: Major::K,
                box_bytes: self.rows() * 128,
            },
            b: WgmmaOperand {
                major: Major::K,
                box_bytes: self.plan.inner * 128,
            },
        }
    }

    /// Returns the GEMM of gradients: registers times a block.
    pub(super) const fn gradients(self) -> WgmmaGemm {
        let block = WgmmaOperand {
            major: Major::Mn,
            box_bytes: self.plan.inner * 128,
        };
        WgmmaGemm {
            n: self.plan.head,
            depth: self.plan.inner,
            kind: self.plan.kind,
            a: block,
            b: block,
        }
    }

    pub(super) const fn is_keys(self) -> bool {
        matches!(self.pass, Pass::KeysValues)
    }
}

/// Inputs of the backward besides its tensor maps.
#[derive(CubeType, CubeLaunch)]
pub struct BackwardProblem {
    /// Operation and sizes.
    pub problem: Problem,
    /// Order of the tiles; its heads are those of the rows that a CTA holds.
    pub schedule: Schedule,
    /// Log-sum-exps and deltas of queries, and the rotations.
    pub saved: Rows,
}

/// Per-row values of queries, and rotations of positions.
#[derive(CubeType, CubeLaunch)]
pub struct Rows {
    /// Log-sum-exp of each query, `[heads, tokens]`.
    pub lse: Box<[f32]>,
    /// Sum of `dout · out` of each query, `[heads, tokens]`.
    pub delta: Box<[f32]>,
    /// Cosines of the rotation of each position, `[positions, head / 2]`. Read only if gradients
    /// are rotated back.
    pub cos: Box<[f32]>,
    /// Sines, `[positions, head / 2]`.
    pub sin: Box<[f32]>,
}

/// Blocks of the other side over which a tile iterates: `count` blocks from `first` on, once for
/// each of `heads` heads from `head` on.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Blocks {
    pub first: u32,
    pub count: u32,
    pub head: u32,
    pub heads: u32,
}

/// Addresses of the shared-memory buffers. The barriers of the CTA's rows come first, then those of
/// the stages. Each pair has a barrier that completes when the buffer is full, and one that
/// completes when it has been read.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Memory {
    pub own_a: u32,
    pub own_b: u32,
    pub block_a: u32,
    pub block_b: u32,
    /// Log-sum-exps of the queries of a stage, followed by their deltas.
    pub rows: u32,
    pub barriers: Barriers,
}

/// Buffer of a block of the other side, or of the rows that a CTA holds.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Stage {
    /// Index of its barriers.
    pub number: u32,
    /// Parity of the phase of the full barrier that ends when this use of the buffer is full.
    pub parity: u32,
    /// Addresses of its operands and, for a block, of the per-query values.
    pub a: u32,
    pub b: u32,
    pub rows: u32,
}

/// Returns the address of an operand's rows for the CTA's tile in buffer `place`; `first` is the
/// address for buffer 0.
#[cube]
pub(super) fn own_at(first: u32, place: u32, #[comptime] plan: Sm90BackwardPlan) -> u32 {
    first + place * comptime!(16 * plan.own_vectors() as u32)
}

/// Returns the stage of use `used`, counted from 0.
#[cube]
pub(super) fn stage_of(memory: Memory, used: u32, #[comptime] plan: Sm90BackwardPlan) -> Stage {
    let stage = used % comptime!(BACKWARD_STAGES as u32);
    let bytes = stage * comptime!(16 * plan.stage_vectors() as u32);
    Stage {
        number: comptime!(PLACES as u32) + stage,
        parity: (used / comptime!(BACKWARD_STAGES as u32)) & 1u32,
        a: memory.block_a + bytes,
        b: memory.block_b + bytes,
        rows: memory.rows + stage * comptime!(8 * plan.plan.inner as u32),
    }
}
