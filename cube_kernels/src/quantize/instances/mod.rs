//! Instances of the kernels of quantization, for the registry.

mod amax;
mod dequantize;
mod ms_eden;
mod mx;
mod prologue;
mod quantize;
mod swizzle;

use cubecl::prelude::*;

use super::kernels::{
    GateInputsLaunch, Grouping, LaunchedVariant, NormInputsLaunch, PackedRowsLaunch,
    PrologueInputsArgs, ShapeLaunch, SourcePlan,
};
use crate::{
    registry::instance::{DummyDevice, Instance},
    tensor::FloatKind,
};

/// Of the matrices. Nothing is launched: lengths of buffers do not matter.
const ROWS: usize = 256;
const COLS: usize = 256;
/// Blocks of a matrix.
const BLOCKS: usize = ROWS * COLS / 16;

/// All instances that `device` uses.
pub(crate) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let families = [
        amax::instances,
        dequantize::instances,
        ms_eden::instances,
        mx::instances,
        prologue::instances,
        quantize::instances,
        swizzle::instances,
    ];
    let instances = families.iter().flat_map(|instances| instances(device));
    let alone = [super::offset::instances, super::random_bits::instances];
    instances
        .chain(alone.iter().flat_map(|instances| instances(device)))
        .collect()
}

/// Types of elements, each with the widths of addresses. The width is independent of the type: one
/// type stands for all.
const ELEMENTS: [(FloatKind, AddressType); 4] = [
    (FloatKind::F32, AddressType::U32),
    (FloatKind::F16, AddressType::U32),
    (FloatKind::Bf16, AddressType::U32),
    (FloatKind::Bf16, AddressType::U64),
];

const PLAIN: SourcePlan = SourcePlan {
    per_row: false,
    swizzled: false,
    grouping: Grouping::One,
};

/// As most kernels are launched, and with all that they can be asked for.
const SOURCES: [(&str, SourcePlan); 3] = [
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

fn shape() -> ShapeLaunch {
    ShapeLaunch::new(ROWS, COLS, 8, 4)
}

fn packed(device: &DummyDevice) -> PackedRowsLaunch {
    let b = |len| device.buffer(len);
    PackedRowsLaunch::new(b(BLOCKS), b(BLOCKS), b(8), COLS / 16, 2688.0)
}

/// The fused prologue `name`, or none.
fn prologue_inputs(device: &DummyDevice, name: &str) -> PrologueInputsArgs {
    let b = |len| device.buffer(len);
    let gates = |variant| GateInputsLaunch::new(b(64), b(64), 8, 4, variant);
    let norm = || NormInputsLaunch::new(b(ROWS), b(COLS / 4), LaunchedVariant::RmsNorm);
    match name {
        "RmsNorm" => PrologueInputsArgs::RmsNorm(norm()),
        "SwiGlu" => PrologueInputsArgs::SwiGlu(gates(LaunchedVariant::SwiGlu)),
        "SwiGluBackward" => {
            PrologueInputsArgs::SwiGluBackward(gates(LaunchedVariant::SwiGluBackward))
        }
        _ => PrologueInputsArgs::Plain,
    }
}
