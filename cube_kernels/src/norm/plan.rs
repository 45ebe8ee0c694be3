//! How the kernels of norms are specialized, and their grids.

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

/// Elements of a block.
pub(crate) const BLOCK: usize = 16;
/// Planes of a cube, where a row has no more.
pub(crate) const PLANES: usize = 8;

/// Most rows that are few: those of the steps of decoding.
const FEW_ROWS: usize = 16;

/// The forward of a norm or its backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pass {
    Forward,
    Backward,
}

impl Pass {
    /// Partial sums along a row.
    pub(super) const fn row_lanes(self) -> usize {
        match self {
            Self::Forward => SUM_LANES,
            Self::Backward => GRAD_SUM_LANES,
        }
    }

    /// Planes that share a row of `cols` elements.
    pub(super) fn planes(self, cols: usize) -> usize {
        norm_planes(cols, self.row_lanes() / 32)
    }

    /// Blocks of a row of `cols` elements that a unit keeps in registers: all of them, or none
    /// where these are too many. The backward keeps more of each.
    pub(super) fn kept(self, cols: usize) -> usize {
        let blocks = cols.div_ceil(BLOCK * 32 * self.planes(cols));
        let most = match self {
            Self::Forward => 4,
            Self::Backward => 2,
        };
        if blocks <= most { blocks } else { 0 }
    }
}

/// The comptime choices of the kernels of norms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NormPlan {
    /// Which norm.
    pub norm: Norm,
    /// Whether there is a residual in the forward, or a gradient of the sum in the backward.
    pub residual: bool,
    /// Whether a bias is added, or its gradient wanted.
    pub bias: bool,
    /// Planes that share a row, a power of two; 0 where there are no planes and a cube shares it.
    pub planes: usize,
    /// Planes of a cube that has planes.
    pub cube_planes: usize,
    /// Sums that the rows of a part are dealt out to.
    pub lanes: usize,
    /// Partial sums along a row.
    pub row_lanes: usize,
    /// Blocks of a row that each unit keeps in registers, which are all of them; 0 where they are
    /// too many and are read again.
    pub kept: usize,
    /// Whether rows are whole blocks that start at multiples of 16 bytes.
    pub whole: bool,
    /// Whether the kernel can begin before the one in front of it has ended.
    pub overlaps: bool,
    /// Whether there are few rows: time is that of loads, not of memory.
    pub few: bool,
    /// Whether the parts of the backward begin at multiples of 16 rows.
    pub strips: bool,
    /// The amax values of the normalised rows that the forward finds, or of the gradient by what was
    /// normalised that the backward does, if they do. Of columns the backward needs parts of strips.
    pub amax: Option<AmaxPlan>,
    /// The element type of matrices.
    pub kind: FloatKind,
    /// Who computes.
    pub conversion: Conversion,
}

impl NormPlan {
    /// RMSNorm of few bf16 rows of `cols` elements, in whole aligned blocks, as the prologue of a
    /// kernel on the device of `client` whose cubes have `cube_planes` planes, at least [`PLANES`].
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

    /// For rows as those of `x` on the device of `client`; `aligned` says whether all matrices and
    /// factors start at multiples of 16 bytes.
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

    /// Rows that a cube works on at a time.
    pub const fn slots(&self) -> usize {
        match self.planes {
            0 => 1,
            planes => self.cube_planes / planes,
        }
    }

    /// Rows that a cube has before it takes others: those that it works on at a time, or a strip of
    /// them, down whose columns it finds an amax.
    pub const fn cube_rows(&self) -> usize {
        match self.amax {
            Some(amax) if amax.cols.is_some() => STRIP,
            _ => self.slots(),
        }
    }

    /// Gains that a unit loads before it waits for the rows: of all blocks that it keeps, where
    /// there are few rows.
    pub const fn ready_gains(&self) -> usize {
        match self.few {
            true => BLOCK * self.kept,
            false => 0,
        }
    }

    /// Words of a block in registers: those of its memory, or an `f32` for each element.
    pub const fn raw_words(&self) -> usize {
        match self.whole {
            true => 4 * self.kind.size(),
            false => BLOCK,
        }
    }

    /// A matrix as the kernels take it.
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

    /// The type of the scalars that matrices are loaded by, how many a load takes, and how many
    /// factors of columns.
    pub(super) fn loads(&self) -> (ElemType, usize, usize) {
        match self.whole {
            true => (u32::elem_type_native(), 4, 4),
            false => (self.kind.storage_type(), 1, 1),
        }
    }
}

/// Cubes that work on `items` in turn, each of them the whole cube.
///
/// Where there are no planes the units are a power of two, so that each partial sum of a row has
/// one unit.
pub(super) fn cubes(client: &Client, items: usize, plan: &NormPlan) -> (CubeCount, CubeDim) {
    let (count, dim) = tile_grid(client, items);
    let units = match plan.planes {
        0 => 1 << (dim.x as usize).min(plan.row_lanes).ilog2(),
        _ => 32 * plan.cube_planes as u32,
    };
    (count, CubeDim::new_1d(units))
}
