//! What kernels are launched with, beside the [epilogue](super::epilogue): arguments that belong
//! together, so that no two of them can be exchanged silently.

use cubecl::prelude::*;

/// The size of a GEMM: `m` x `n` x `k`, or what its groups have of it.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct ProblemShape {
    /// Rows of `a`: of all groups along M, or of the output of one group along K.
    pub m: u32,
    /// Rows of `b`, of one group.
    pub n: u32,
    /// Length of the contraction, of all groups along K.
    pub k: u32,
    /// How many groups: one where there are none.
    pub groups: u32,
}

impl ProblemShapeLaunch {
    /// Of sizes on the host.
    pub(crate) fn of((m, n, k): (usize, usize, usize), groups: usize) -> Self {
        Self::new(m as u32, n as u32, k as u32, groups as u32)
    }
}

/// A GEMM whose tiles are numbered through all groups.
#[derive(CubeType, CubeLaunch)]
pub struct GroupedProblem {
    /// Its size.
    pub shape: ProblemShape,
    /// Where groups begin and the last one ends; any memory of a dense GEMM.
    pub offsets: Box<[u32]>,
    /// Tiles along `m` that run at the same time, for kernels whose host part chooses it.
    pub band: u32,
}

/// A packed matrix: E2M1 codes in items of `C`, and a byte of scale for each block of 16.
#[derive(CubeType, CubeLaunch)]
pub struct PackedMatrix<C: CubePrimitive> {
    /// The codes.
    pub codes: Box<[C]>,
    /// The scale bytes.
    pub scales: Box<[u8]>,
}

/// A matrix that is packed, or else bf16 in items of `D`. What a kernel does not read is any
/// memory.
#[derive(CubeType, CubeLaunch)]
pub struct MixedMatrix<C: CubePrimitive, D: CubePrimitive> {
    /// The codes.
    pub codes: Box<[C]>,
    /// The scale bytes.
    pub scales: Box<[u8]>,
    /// The elements of a matrix that is not packed.
    pub dense: Box<[D]>,
}

/// The place of this thread in its CTA. A function of its own, because `rustc` takes `UNIT_POS` for
/// the constant zero and refuses to subtract from it.
#[cube]
pub fn thread_in_cta() -> u32 {
    UNIT_POS
}
