//! Shared inputs of the quantization kernel instances.

use cubecl::prelude::*;

use crate::{
    quantize::proof::{
        GateInputsLaunch, GatherInputsLaunch, Grouping, LaunchedVariant, PackedRowsLaunch,
        PrologueInputsArgs, ShapeLaunch, SourcePlan,
    },
    registry::instance::DummyDevice,
    tensor::FloatKind,
};

/// Rows of the matrices. Nothing is launched, so lengths of buffers do not matter.
pub(super) const ROWS: usize = 256;
pub(super) const COLS: usize = 256;
/// Blocks of a matrix.
pub(super) const BLOCKS: usize = ROWS * COLS / 16;

/// Element types, each with address widths. The width is independent of the type, so one type
/// covers both widths.
pub(super) const ELEMENTS: [(FloatKind, AddressType); 4] = [
    (FloatKind::F32, AddressType::U32),
    (FloatKind::F16, AddressType::U32),
    (FloatKind::Bf16, AddressType::U32),
    (FloatKind::Bf16, AddressType::U64),
];

pub(super) const PLAIN: SourcePlan = SourcePlan {
    per_row: false,
    swizzled: false,
    grouping: Grouping::One,
};

/// The usual configuration, and one with all features.
pub(super) const SOURCES: [(&str, SourcePlan); 3] = [
    ("", PLAIN),
    (
        "-groups",
        SourcePlan {
            grouping: Grouping::Offsets(16),
            ..PLAIN
        },
    ),
    (
        "-batch",
        SourcePlan {
            per_row: true,
            swizzled: true,
            grouping: Grouping::Batch,
        },
    ),
];

pub(super) fn shape() -> ShapeLaunch {
    ShapeLaunch::new(ROWS, COLS, 8, 4)
}

pub(super) fn packed(device: &DummyDevice) -> PackedRowsLaunch {
    let b = |len| device.buffer(len);
    PackedRowsLaunch::new(b(BLOCKS), b(BLOCKS), b(8), COLS / 16, 2688.0)
}

/// Returns the fused prologue `name`, or none.
pub(super) fn prologue_inputs(device: &DummyDevice, name: &str) -> PrologueInputsArgs {
    let b = |len| device.buffer(len);
    let gates = |variant| GateInputsLaunch::new(b(64), b(64), 8, 4, variant);
    match name {
        "SwiGlu" => PrologueInputsArgs::SwiGlu(gates(LaunchedVariant::SwiGlu)),
        "SwiGluBackward" => {
            PrologueInputsArgs::SwiGluBackward(gates(LaunchedVariant::SwiGluBackward))
        }
        "Gather" => {
            PrologueInputsArgs::Gather(GatherInputsLaunch::new(b(64), 64, LaunchedVariant::Gather))
        }
        _ => PrologueInputsArgs::Plain,
    }
}
