//! Comptime choices and grids of the kernels of norms.

use cubecl::{ir::ElemType, prelude::*};

use crate::{
    capabilities::{conversion_of, is_cpu, overlaps_kernels},
    cube::codec::Conversion,
    launch::{buffer, tile_grid, units},
    quantize::amax::{AmaxPlan, STRIP},
    reference::{
        GRAD_SUM_LANES, Norm, SUM_LANES, norm_part_lanes, norm_parts_are_strips, norm_planes,
    },
    tensor::{FloatKind, Matrix},
};

/// Elements per block.
pub(crate) const BLOCK: usize = 16;
/// Planes of a cube, unless a row needs more.
pub(crate) const PLANES: usize = 8;

/// Largest number of rows that counts as few: those of decoding steps.
const FEW_ROWS: usize = 16;

/// Direction: forward or backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pass {
    Forward,
    Backward,
}

impl Pass {
    /// Returns the number of partial sums along a row.
    pub(super) const fn row_lanes(self) -> usize {
        match self {
            Self::Forward => SUM_LANES,
            Self::Backward => GRAD_SUM_LANES,
        }
    }

    /// Returns the number of planes that share a row of `cols` elements.
    pub(super) fn planes(self, cols: usize) -> usize {
        norm_planes(cols, self.row_lanes() / 32)
    }

    /// Returns how many blocks of a row of `cols` elements a unit keeps in registers: all of them,
    /// or none if there are too many. The backward keeps more values per block.
    pub(super) fn kept(self, cols: usize) -> usize {
        let blocks = cols.div_ceil(BLOCK * 32 * self.planes(cols));
        let most = match self {
            Self::Forward => 4,
            Self::Backward => 2,
        };
        if blocks <= most { blocks } else { 0 }
    }
}

/// Comptime choices of the kernels of norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NormPlan {
    /// Kind of norm.
    pub norm: Norm,
    /// True if the forward adds a residual, or the backward adds a gradient of the sum.
    pub residual: bool,
    /// True if the forward adds a bias, or the backward computes its gradient.
    pub bias: bool,
    /// Planes that share a row, a power of two; 0 if there are no planes and a cube shares the row.
    pub planes: usize,
    /// Planes per cube, if it has planes.
    pub cube_planes: usize,
    /// Partial sums over which the rows of a part are distributed.
    pub lanes: usize,
    /// Partial sums along a row.
    pub row_lanes: usize,
    /// Blocks of a row that each unit keeps in registers, which are all of its blocks; 0 if there
    /// are too many, and they are read again.
    pub kept: usize,
    /// True if rows are whole blocks that start at multiples of 16 bytes.
    pub whole: bool,
    /// True if the kernel can start before the previous one has ended.
    pub overlaps: bool,
    /// True for at most 16 rows: the time is the latency of loads, not memory bandwidth.
    pub few: bool,
    /// True if the parts of the backward start at multiples of 16 rows.
    pub strips: bool,
    /// Amax values to compute, if any: of the normalized rows in the forward, of the gradient of
    /// the normalization's input in the backward. Column amax values in the backward require
    /// `strips`.
    pub amax: Option<AmaxPlan>,
    /// Element type of matrices.
    pub kind: FloatKind,
    /// Conversion method.
    pub conversion: Conversion,
}

impl NormPlan {
    /// Returns the plan of RMSNorm of few bf16 rows of `cols` elements, in whole aligned blocks, as
    /// the prologue of a kernel on the device of `client`. Its cubes have `cube_planes` planes, at
    /// least [`PLANES`].
    pub(crate) fn of_prologue(
        client: &Client,
        x: &Matrix,
        residual: bool,
        cube_planes: usize,
    ) -> Self {
        Self {
            residual,
            cube_planes,
            few: false,
            ..Self::new(client, (Norm::Rms, Pass::Forward), x, true)
        }
    }

    /// Returns the plan for rows of `x` on the device of `client`. `aligned` is true if all
    /// matrices and per-column factors start at multiples of 16 bytes.
    pub(super) fn new(
        client: &Client,
        (norm, pass): (Norm, Pass),
        x: &Matrix,
        aligned: bool,
    ) -> Self {
        let (cols, kind) = (x.cols, x.dtype);
        let has_planes = !is_cpu(client) && units(client).is_multiple_of(32 * PLANES);
        let planes = if has_planes { pass.planes(cols) } else { 0 };
        Self {
            norm,
            residual: false,
            bias: false,
            planes,
            cube_planes: planes.max(PLANES),
            lanes: norm_part_lanes(cols),
            row_lanes: pass.row_lanes(),
            kept: if has_planes { pass.kept(cols) } else { 0 },
            whole: cols.is_multiple_of(BLOCK) && aligned,
            overlaps: pass == Pass::Forward && overlaps_kernels(client),
            few: pass == Pass::Forward && x.rows <= FEW_ROWS,
            strips: pass == Pass::Backward && norm_parts_are_strips(x.rows),
            amax: None,
            kind,
            conversion: conversion_of(client),
        }
    }

    /// Returns the number of rows that a cube processes at a time.
    pub const fn slots(&self) -> usize {
        match self.planes {
            0 => 1,
            planes => self.cube_planes / planes,
        }
    }

    /// Returns the number of rows that a cube completes before it continues with others: those that
    /// it processes at a time, or a strip of them if it computes column amax values.
    pub const fn cube_rows(&self) -> usize {
        match self.amax {
            Some(amax) if amax.cols.is_some() => STRIP,
            _ => self.slots(),
        }
    }

    /// Returns true if each row has an amax.
    pub fn has_row_amax(&self) -> bool {
        self.amax.is_some_and(|amax| amax.has_own_rows())
    }

    /// Returns the number of gains that a unit loads before it waits for the rows: those of all
    /// blocks that it keeps if `few` is set, otherwise none.
    pub const fn ready_gains(&self) -> usize {
        match self.few {
            true => BLOCK * self.kept,
            false => 0,
        }
    }

    /// Returns the words of a block in registers: those in memory, or one `f32` per element.
    pub const fn raw_words(&self) -> usize {
        match self.whole {
            true => 4 * self.kind.size(),
            false => BLOCK,
        }
    }

    /// Returns a matrix as a kernel argument.
    ///
    /// # Safety
    /// Its memory must hold it.
    pub(super) unsafe fn matrix(&self, matrix: &Matrix) -> BufferArg {
        let len = match self.whole {
            true => matrix.len() * matrix.dtype.size() / 16,
            false => matrix.len(),
        };
        // SAFETY: the caller's promise.
        unsafe { buffer(&matrix.handle, len) }
    }

    /// Returns the scalar type of matrix loads, the scalars per load, and the per-column factors
    /// per load.
    pub(super) fn loads(&self) -> (ElemType, usize, usize) {
        match self.whole {
            true => (u32::elem_type_native(), 4, 4),
            false => (self.kind.storage_type(), 1, 1),
        }
    }
}

/// Returns cubes that iterate over `items`; a whole cube processes an item.
///
/// Without planes the number of units is a power of two, so that each partial sum of a row belongs
/// to one unit.
pub(super) fn cubes(client: &Client, items: usize, plan: &NormPlan) -> (CubeCount, CubeDim) {
    let (count, dim) = tile_grid(client, items);
    let units = match plan.planes {
        0 => 1 << (dim.x as usize).min(plan.row_lanes).ilog2(),
        _ => 32 * plan.cube_planes as u32,
    };
    (count, CubeDim::new_1d(units))
}
