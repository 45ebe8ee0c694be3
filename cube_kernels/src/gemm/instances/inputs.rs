//! What instances of several kernels are made with.

use cubecl::prelude::*;

use crate::{
    gemm::{
        epilogue::OutputAmax,
        kernels::{EpilogueKind, EpilogueLaunch, Factor, GroupedProblemLaunch, ProblemShapeLaunch},
    },
    registry::instance::{DummyDevice, Expected},
    tensor::FloatKind,
};

/// Of the matrices. Nothing is launched: lengths of buffers do not matter.
pub(super) const ROWS: usize = 256;
pub(super) const COLS: usize = 256;
pub(super) const BLOCKS: usize = ROWS * COLS / 16;

/// One amax for each operand, and nothing besides.
pub(super) const PLAIN: EpilogueKind = EpilogueKind {
    a: Factor::Tensor,
    b: Factor::Tensor,
    bias: false,
    accumulate: false,
    out: FloatKind::Bf16,
    amax: None,
};

/// Everything that an epilogue can do.
pub(super) const ALL: EpilogueKind = EpilogueKind {
    a: Factor::PerRow,
    b: Factor::PerRow,
    bias: true,
    accumulate: true,
    out: FloatKind::F32,
    amax: Some(OutputAmax::Whole),
};

/// The same with an amax for each group.
pub(super) const ALL_GROUPS: EpilogueKind = EpilogueKind {
    amax: Some(OutputAmax::PerGroup),
    ..ALL
};

/// Spills are forbidden, whatever the kernel.
pub(super) const NO_SPILLS: Expected = Expected {
    e2m1_rn: None,
    e2m1_rs: None,
    e4m3: None,
    spills: Some(false),
};

/// An epilogue of `kind`.
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

/// A GEMM of one size, in `groups` groups.
pub(super) fn problem(device: &DummyDevice, groups: usize) -> GroupedProblemLaunch {
    let shape = ProblemShapeLaunch::of((ROWS, ROWS, 64), groups);
    GroupedProblemLaunch::new(shape, device.buffer(groups + 1), 8)
}

/// A map of tiles of `tile` elements of the native type `elem`.
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
