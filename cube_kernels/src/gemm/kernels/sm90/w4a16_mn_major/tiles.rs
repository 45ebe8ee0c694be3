//! Tile positions of the W4A16 kernel for an MN-major `b`, and their distribution to cubes. All its
//! warps compute them identically.

use cubecl::prelude::*;

use super::super::w4a16::TilePlace;
use crate::{
    cube::ptx::sm90_mainloop_w4a16_mn_major::STAGE_K,
    gemm::{
        arguments::GroupedProblem,
        scheduler::{GroupedDim, place},
        tiles::{W4A16_MN_TILE_N, W4a16MnTile},
    },
    moe::groups::extent,
};

/// Comptime configuration of `sm90_w4a16_mn_major_kernel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct W4a16MnMajorPlan {
    /// Grouped dimension: none, or M.
    pub grouped: GroupedDim,
    /// Tile.
    pub tile: W4a16MnTile,
}

/// Returns the rows of tiles of group `group`.
#[cube]
pub(super) fn tile_rows(
    problem: &GroupedProblem,
    group: u32,
    #[comptime] plan: W4a16MnMajorPlan,
) -> u32 {
    let mut rows = problem.shape.m;
    if comptime!(plan.grouped == GroupedDim::M) {
        let own = extent(&problem.offsets, group, problem.shape.m);
        rows = own.end - own.start;
    }
    rows.div_ceil(comptime!(plan.tile.rows_a() as u32))
}

/// Returns the columns of tiles.
#[cube]
pub(super) fn tile_columns(problem: &GroupedProblem) -> u32 {
    problem.shape.n.div_ceil(comptime!(W4A16_MN_TILE_N as u32))
}

/// Returns the position of tile `number` of group `group`, which has `rows` rows of tiles.
#[cube]
pub(super) fn place_of(
    problem: &GroupedProblem,
    group: u32,
    number: u32,
    rows: u32,
    #[comptime] plan: W4a16MnMajorPlan,
) -> TilePlace {
    let at = place(
        number,
        rows,
        tile_columns(problem),
        problem.band,
        comptime!(plan.tile.rows_a() as u32),
        comptime!(W4A16_MN_TILE_N as u32),
    );
    let mut first = 0u32;
    let mut end = problem.shape.m;
    if comptime!(plan.grouped == GroupedDim::M) {
        let own = extent(&problem.offsets, group, problem.shape.m);
        first = own.start;
        end = own.end;
    }
    TilePlace {
        group,
        row: first + at.row,
        end,
        column: at.column,
    }
}

/// Returns the stages per tile.
#[cube]
pub(super) fn steps_of(problem: &GroupedProblem) -> u32 {
    problem.shape.k.div_ceil(comptime!(STAGE_K as u32))
}
