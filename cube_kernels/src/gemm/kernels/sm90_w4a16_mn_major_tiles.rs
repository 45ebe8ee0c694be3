//! Where the tiles of the W4A16 kernel for an MN-major `b` lie, and how they are shared out: what
//! all of its warps count alike.

use cubecl::prelude::*;

use super::sm90_w4a16_output::TilePlace;
use crate::{
    cube::ptx::sm90_mainloop_w4a16_mn_major::STAGE_K,
    gemm::{
        arguments::GroupedProblem,
        scheduler::{GroupedDim, place},
        tiles::{W4A16_MN_TILE_N, W4a16MnTile},
    },
    moe::groups::extent,
};

/// The comptime choices of `sm90_w4a16_mn_major_kernel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct W4a16MnMajorPlan {
    /// What is in groups: nothing, or M.
    pub grouped: GroupedDim,
    /// The tile.
    pub tile: W4a16MnTile,
}

/// Rows of tiles of group `group`.
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

/// Columns of tiles.
#[cube]
pub(super) fn tile_columns(problem: &GroupedProblem) -> u32 {
    problem.shape.n.div_ceil(comptime!(W4A16_MN_TILE_N as u32))
}

/// Where tile `number` of group `group` lies, which has `rows` rows of tiles.
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

/// Stages of a tile.
#[cube]
pub(super) fn steps_of(problem: &GroupedProblem) -> u32 {
    problem.shape.k.div_ceil(comptime!(STAGE_K as u32))
}
