//! Specializations of the small-M kernels.

use crate::{
    cube::{codec::Conversion, warp_sums::WarpSums},
    norm::plan::NormPlan,
};

/// Columns that a warp processes at a time.
pub(super) const CHUNK: usize = 128;
/// Maximum number of rows of `a`.
///
/// Measured (H100, N = K = 8192, microseconds, this kernel / tiles of the fused one, before the
/// last version of either): 1 row 19.7 / 33.2, 16 rows 22.6 / 38.0, 32 rows 33.7 / 30.8.
pub const MAX_ROWS: usize = 16;

/// Form in which the rows of `a` are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SmallMLeft {
    /// Codes, which every cube decodes. Decoding them once in a separate kernel was measured to be
    /// slower, because of the second launch and the wider reads.
    Packed,
    /// bf16.
    Bf16,
    /// bf16 rows in shared memory, which every cube normalizes.
    Normed,
    /// One bf16 row with this number of vectors of eight elements. Each warp stages the elements
    /// that its chunks need in shared memory at once.
    Staged(usize),
}

impl SmallMLeft {
    /// Returns the number of vectors of eight elements that warps stage in shared memory, if any.
    pub(super) const fn staged(self) -> usize {
        match self {
            Self::Staged(vectors) => vectors,
            _ => 0,
        }
    }
}

/// Shape of a cube's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SmallMShape {
    /// Warps per cube.
    pub warps: usize,
    /// Groups of 16 rows of `b`.
    pub strips: usize,
    /// Groups of 8 rows of `a`.
    pub columns: usize,
    /// Chunks per warp in flight.
    pub ahead: usize,
    /// True if a warp has at most one chunk, which it decodes before it waits for the previous
    /// kernel.
    pub early: bool,
    /// True if K is no multiple of `CHUNK`.
    pub tail: bool,
    /// True if K is an odd number of blocks, so that rows do not begin at multiples of 16 bytes and
    /// end in half a vector.
    pub halves: bool,
    /// Form in which `a` is read.
    pub left: SmallMLeft,
    /// True if the device has a conversion instruction for E4M3.
    pub converts: bool,
    /// True if the next rows of `a` are loaded after the multiplications of a chunk instead of
    /// before; see `loads_a_late`.
    pub late: bool,
    /// True if the kernel can begin before the previous one has ended, and load `b` while it waits.
    pub overlaps: bool,
    /// Set if the first half of the rows of `b` is gate and the second half up; the output is then
    /// SwiGLU of both, with this conversion. A cube has as many rows of gate as of up.
    pub swiglu: Option<Conversion>,
}

impl SmallMShape {
    /// Returns the rows of `b` per cube.
    pub(super) const fn rows(self) -> usize {
        16 * self.strips
    }

    /// Returns the rows of `b` per output column.
    pub(super) const fn inputs(self) -> usize {
        match self.swiglu {
            Some(_) => 2,
            None => 1,
        }
    }

    /// Returns the output columns per cube.
    pub(super) const fn outputs(self) -> usize {
        self.rows() / self.inputs()
    }

    /// Returns the layout of each warp's sums.
    pub(super) const fn warp_sums(self) -> WarpSums {
        WarpSums {
            strips: self.strips,
            columns: self.columns,
        }
    }
}

/// RMSNorm prologue of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SmallMNorm {
    /// Distribution of rows to units, in cubes with as many planes as the kernel has warps.
    pub plan: NormPlan,
    /// Maximum number of rows of `a`, a power of two.
    pub rows: usize,
}

impl SmallMNorm {
    /// Returns an upper bound of the vectors of eight elements per row; a unit has one or several
    /// blocks.
    const fn row_vectors(self) -> usize {
        self.plan.kept * 32 * self.plan.planes * 2
    }

    /// Returns the vectors of eight elements that all rows take in shared memory.
    pub(super) const fn vectors(self) -> usize {
        self.rows * self.row_vectors()
    }

    /// Returns the units per cube.
    pub(super) const fn units(self) -> usize {
        32 * self.plan.cube_planes
    }

    /// Returns the maximum number of vectors per row that a unit normalizes.
    pub(super) const fn unit_vectors(self) -> usize {
        self.row_vectors().div_ceil(self.units())
    }

    /// Returns the bytes of all rows in shared memory.
    pub(super) const fn bytes(self) -> usize {
        16 * self.vectors()
    }
}
