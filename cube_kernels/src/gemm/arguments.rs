//! Launch arguments of the GEMM kernels, except the [epilogue](super::epilogue). Related arguments
//! are grouped in structs, so that no two of them can be swapped unnoticed.

use cubecl::prelude::*;

/// Size of a GEMM: `m` x `n` x `k`.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct ProblemShape {
    /// Rows of `a`: of all groups along M, or of the output of one group along K.
    pub m: u32,
    /// Rows of `b` per group.
    pub n: u32,
    /// Length of the K dimension, summed over all groups along K.
    pub k: u32,
    /// Number of groups; 1 for a dense GEMM.
    pub groups: u32,
}

impl ProblemShapeLaunch {
    /// Converts sizes from the host.
    pub(crate) fn of((m, n, k): (usize, usize, usize), groups: usize) -> Self {
        Self::new(m as u32, n as u32, k as u32, groups as u32)
    }
}

/// A GEMM whose tiles are numbered through all groups.
#[derive(CubeType, CubeLaunch)]
pub struct GroupedProblem {
    /// Size.
    pub shape: ProblemShape,
    /// Offsets of the groups and the end of the last one; unused for a dense GEMM.
    pub offsets: Box<[u32]>,
    /// Tiles along `m` that run at the same time, for kernels whose host code chooses this number.
    pub band: u32,
}

/// A packed matrix: E2M1 codes in items of type `C`, and a scale byte per block of 16.
#[derive(CubeType, CubeLaunch)]
pub struct PackedMatrix<C: CubePrimitive> {
    /// Codes.
    pub codes: Box<[C]>,
    /// Scale bytes.
    pub scales: Box<[u8]>,
}

/// A matrix that is either packed or bf16 in items of type `D`. Buffers that a kernel does not read
/// may be any memory.
#[derive(CubeType, CubeLaunch)]
pub struct MixedMatrix<C: CubePrimitive, D: CubePrimitive> {
    /// Codes.
    pub codes: Box<[C]>,
    /// Scale bytes.
    pub scales: Box<[u8]>,
    /// Elements of a matrix that is not packed.
    pub dense: Box<[D]>,
}

/// Returns the index of this thread in its CTA. This is a separate function because `rustc` takes
/// `UNIT_POS` for the constant zero and refuses to subtract from it.
#[cube]
pub fn thread_in_cta() -> u32 {
    UNIT_POS
}
