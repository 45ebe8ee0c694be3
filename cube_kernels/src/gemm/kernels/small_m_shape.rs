//! How the kernels of small M are specialized.

use crate::{
    cube::{codec::Conversion, warp_sums::WarpSums},
    norm::plan::NormPlan,
};

/// Columns that a warp takes at a time.
pub(super) const CHUNK: usize = 128;
/// Most rows of `a`.
///
/// Measured (H100, N = K = 8192, microseconds, this kernel / tiles of the fused one, before the
/// last version of either): 1 row 19.7 / 33.2, 16 rows 22.6 / 38.0, 32 rows 33.7 / 30.8.
pub const MAX_ROWS: usize = 16;

/// How the rows of `a` are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SmallMLeft {
    /// As codes, which every cube decodes for itself. Decoding them once, by a kernel before, was
    /// measured: the second launch and the wider reads cost more.
    Packed,
    /// As bf16.
    Bf16,
    /// As bf16 rows in shared memory, which every cube normalises for itself.
    Normed,
    /// As one bf16 row of so many vectors of eight elements, of which each warp brings what its
    /// chunks have to shared memory at once.
    Staged(usize),
}

impl SmallMLeft {
    /// Vectors of eight elements that warps bring to shared memory, if they do.
    pub(super) const fn staged(self) -> usize {
        match self {
            Self::Staged(vectors) => vectors,
            _ => 0,
        }
    }
}

/// The shape of a cube's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SmallMShape {
    /// Warps of a cube.
    pub warps: usize,
    /// Groups of 16 rows of `b`.
    pub strips: usize,
    /// Groups of 8 rows of `a`.
    pub columns: usize,
    /// Chunks of a warp that are on the way at a time.
    pub ahead: usize,
    /// A warp has one chunk at most, which it decodes before it waits for the kernel in front.
    pub early: bool,
    /// The contraction is no multiple of `CHUNK`.
    pub tail: bool,
    /// It is an odd number of blocks, so that rows do not begin at multiples of 16 bytes and end in
    /// half a vector.
    pub halves: bool,
    /// How `a` is read.
    pub left: SmallMLeft,
    /// The device has an instruction that converts E4M3.
    pub converts: bool,
    /// The next rows of `a` are loaded behind the products of a chunk instead of ahead of them: see
    /// `loads_a_late`.
    pub late: bool,
    /// Whether the kernel can begin before the one in front of it has ended: `b` is on its way
    /// while it waits.
    pub overlaps: bool,
    /// The first half of the rows of `b` is gate, the second half up, and the output is SwiGLU of
    /// both, computed so. A cube then has as many rows of the one as of the other.
    pub swiglu: Option<Conversion>,
}

impl SmallMShape {
    /// Rows of `b`.
    pub(super) const fn rows(self) -> usize {
        16 * self.strips
    }

    /// Rows of `b` for each column of the output.
    pub(super) const fn inputs(self) -> usize {
        match self.swiglu {
            Some(_) => 2,
            None => 1,
        }
    }

    /// Columns of the output.
    pub(super) const fn outputs(self) -> usize {
        self.rows() / self.inputs()
    }

    /// What each warp has sums of.
    pub(super) const fn warp_sums(self) -> WarpSums {
        WarpSums {
            strips: self.strips,
            columns: self.columns,
        }
    }
}

/// RMSNorm in front of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SmallMNorm {
    /// How rows are shared out, in cubes of as many planes as the kernel has warps.
    pub plan: NormPlan,
    /// Rows of `a` at most, a power of two.
    pub rows: usize,
}

impl SmallMNorm {
    /// Vectors of eight elements of a row, or more, of which a unit has one block or several.
    const fn row_vectors(self) -> usize {
        self.plan.kept * 32 * self.plan.planes * 2
    }

    /// Vectors of eight elements that all rows take in shared memory.
    pub(super) const fn vectors(self) -> usize {
        self.rows * self.row_vectors()
    }

    /// Units of a cube.
    pub(super) const fn units(self) -> usize {
        32 * self.plan.cube_planes
    }

    /// Vectors of a row that a unit normalises, at most.
    pub(super) const fn unit_vectors(self) -> usize {
        self.row_vectors().div_ceil(self.units())
    }

    /// Bytes of these.
    pub(super) const fn bytes(self) -> usize {
        16 * self.vectors()
    }
}
