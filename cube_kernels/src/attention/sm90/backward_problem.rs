//! What the backward is told, and where its shared memory lies.

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

/// Stages of the blocks that a CTA passes over: one is filled while the GEMMs of two run.
pub(super) const BACKWARD_STAGES: usize = 3;

/// Which gradients a kernel computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pass {
    /// A CTA holds keys and values, and passes over queries.
    KeysValues,
    /// A CTA holds queries, and passes over keys and values.
    Queries,
}

/// The comptime choices of `sm90_backward_kernel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sm90BackwardPlan {
    /// What is shared with the kernels of `mma.sync`: a warp has one strip, and `inner` rows of the
    /// other side make a block.
    pub plan: MmaPlan,
    /// Which gradients are computed.
    pub pass: Pass,
    /// Gradients of `q` and `k` are rotated back.
    pub rope: bool,
}

impl Sm90BackwardPlan {
    /// Rows of a CTA.
    pub const fn rows(self) -> usize {
        WARPGROUP_ROWS * CONSUMERS
    }

    /// The side of the rows that a CTA holds.
    pub(super) const fn own_side(self) -> Side {
        match self.pass {
            Pass::KeysValues => Side::Keys,
            Pass::Queries => Side::Queries,
        }
    }

    /// The side of the blocks that it passes over.
    pub(super) const fn other_side(self) -> Side {
        match self.pass {
            Pass::KeysValues => Side::Queries,
            Pass::Queries => Side::Keys,
        }
    }

    /// Its tiles: the ones with the most work first are the first keys, or the last queries.
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

    /// Vectors of the rows of one operand that a CTA holds.
    pub(super) const fn own_vectors(self) -> usize {
        self.rows() * self.plan.head / 8
    }

    /// Vectors of one operand in a stage.
    pub(super) const fn stage_vectors(self) -> usize {
        self.plan.inner * self.plan.head / 8
    }

    /// Scores, and gradients of weights: rows of the CTA times a block.
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

    /// Gradients: registers times a block.
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

/// What the backward reads and is told beside its maps.
#[derive(CubeType, CubeLaunch)]
pub struct BackwardProblem {
    /// What is computed, and of what size.
    pub problem: Problem,
    /// In which order the tiles are taken; its heads are those of the rows that a CTA holds.
    pub schedule: Schedule,
    /// Log-sum-exps and deltas of queries, and the rotations.
    pub saved: Rows,
}

/// What is known of the rows, and of their positions.
#[derive(CubeType, CubeLaunch)]
pub struct Rows {
    /// Log-sum-exp of each query, `[heads, tokens]`.
    pub lse: Box<[f32]>,
    /// The sum of `dout · out` of each query, `[heads, tokens]`.
    pub delta: Box<[f32]>,
    /// Cosines of the rotation of each position, `[positions, head / 2]`. Read only where gradients
    /// are rotated back.
    pub cos: Box<[f32]>,
    /// The sines.
    pub sin: Box<[f32]>,
}

/// The blocks of the other side that a tile passes over: `count` from `first` on, once for each of
/// `heads` heads from `head` on.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Blocks {
    pub first: u32,
    pub count: u32,
    pub head: u32,
    pub heads: u32,
}

/// Where the parts of shared memory begin. The barriers are those of the CTA's rows, then of the
/// stages: each pair of one that completes when the part is full, and one when it has been read.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Memory {
    pub own_a: u32,
    pub own_b: u32,
    pub block_a: u32,
    pub block_b: u32,
    /// Log-sum-exps of the queries of a stage, then their deltas.
    pub rows: u32,
    pub barriers: Barriers,
}

/// A place of blocks of the other side, or of the rows that a CTA holds.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Stage {
    /// The number of its barriers.
    pub number: u32,
    /// The parity of the phase of the full one that ends when this use of it is full.
    pub parity: u32,
    /// Where its operands begin, and, of a block, what is known of its queries.
    pub a: u32,
    pub b: u32,
    pub rows: u32,
}

/// Where the rows of an operand begin, of the CTA's tile in place `place`; `first` is where those
/// of the first place do.
#[cube]
pub(super) fn own_at(first: u32, place: u32, #[comptime] plan: Sm90BackwardPlan) -> u32 {
    first + place * comptime!(16 * plan.own_vectors() as u32)
}

/// The stage of use number `used`, counted from the first.
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
