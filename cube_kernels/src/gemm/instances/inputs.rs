//! Shared inputs of kernel instances.

use cubecl::prelude::*;

use crate::{
    gemm::{
        epilogue::OutputAmax,
        proof::{EpilogueKind, EpilogueLaunch, Factor, GroupedProblemLaunch, ProblemShapeLaunch},
    },
    registry::instance::{DummyDevice, Expected},
    tensor::FloatKind,
};

/// Rows of the matrices. Nothing is launched, so lengths of buffers do not matter.
pub(super) const ROWS: usize = 256;
pub(super) const COLS: usize = 256;
pub(super) const BLOCKS: usize = ROWS * COLS / 16;

/// One amax per operand, and nothing else.
pub(super) const PLAIN: EpilogueKind = EpilogueKind {
    a: Factor::Tensor,
    b: Factor::Tensor,
    bias: false,
    accumulate: false,
    out: FloatKind::Bf16,
    amax: None,
};

/// All features of the epilogue.
pub(super) const ALL: EpilogueKind = EpilogueKind {
    a: Factor::PerRow,
    b: Factor::PerRow,
    bias: true,
    accumulate: true,
    out: FloatKind::F32,
    amax: Some(OutputAmax::Whole),
};

/// All features of the epilogue, with an amax per group.
pub(super) const ALL_GROUPS: EpilogueKind = EpilogueKind {
    amax: Some(OutputAmax::PerGroup),
    ..ALL
};

/// Forbids spills, for every kernel.
pub(super) const NO_SPILLS: Expected = Expected {
    e2m1_rn: None,
    e2m1_rs: None,
    e4m3: None,
    spills: Some(false),
};

/// Returns an epilogue of `kind`.
pub(super) fn epilogue(device: &DummyDevice, kind: EpilogueKind) -> EpilogueLaunch {
    let b = |len| device.buffer(len);
    EpilogueLaunch::new(
        b(ROWS),
        b(ROWS),
        b(COLS),
        b(ROWS * COLS),
        b(2),
        2688.0,
        2688.0,
        256.0,
        kind,
    )
}

/// Returns a GEMM in `groups` groups.
pub(super) fn problem(device: &DummyDevice, groups: usize) -> GroupedProblemLaunch {
    let shape = ProblemShapeLaunch::of((ROWS, ROWS, 64), groups);
    GroupedProblemLaunch::new(shape, device.buffer(groups + 1), 8)
}

/// Returns a map with tiles of `tile` elements of the native type `elem`.
pub(super) fn map(
    device: &DummyDevice,
    tile: [usize; 2],
    elem: cubecl::ir::ElemType,
) -> TensorMapArg<Tiled> {
    // SAFETY: nothing is launched.
    let tensor =
        unsafe { TensorArg::from_raw_parts(device.memory(), [64, 1].into(), [256, 64].into()) };
    TensorMapArg::new(
        TiledArgs {
            tile_size: tile.into(),
        },
        tensor,
        elem,
    )
}
