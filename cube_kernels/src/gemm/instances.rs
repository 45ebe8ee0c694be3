//! Instances of kernels for GEMMs, for the registry. Those of matrix instructions, whose machine
//! code is read in detail, are made by the tests themselves.

use cubecl::prelude::*;

use super::kernels::{
    EpilogueKind, EpilogueLaunch, Factor, PackedMatrixLaunch, ProblemShapeLaunch, add_rows_kernel,
    factors_kernel, scalar_kernel,
};
use crate::{
    registry::{DummyDevice, Expected, Instance, instance},
    tensor::FloatKind,
};

/// Of the matrices. Nothing is launched: lengths of buffers do not matter.
const ROWS: usize = 256;
const COLS: usize = 256;
const BLOCKS: usize = ROWS * COLS / 16;

/// All instances that `device` uses.
pub(crate) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let b = |len| device.buffer(len);
    let factor = Factor::Tensor;
    let mut all = Vec::new();
    all.push(instance!(
        device,
        factors_kernel,
        "",
        Expected::default(),
        b(1),
        b(1),
        b(2),
        2688.0,
        2688.0,
        1.0,
        factor,
        factor
    ));
    for (dtype, address) in [
        (FloatKind::F32, AddressType::U32),
        (FloatKind::F16, AddressType::U32),
        (FloatKind::Bf16, AddressType::U32),
        (FloatKind::Bf16, AddressType::U64),
    ] {
        let elem = dtype.storage_type();
        let tag = format!("{dtype:?}-{address:?}");
        for add in [false, true] {
            all.push(instance!(
                device,
                add_rows_kernel,
                format!("{tag}-{add}"),
                Expected::default(),
                address,
                b(COLS),
                b(ROWS * COLS),
                ROWS * COLS,
                COLS,
                add,
                dtype,
                elem
            ));
        }
        for bias in [false, true] {
            all.push(instance!(
                device,
                scalar_kernel,
                format!("{tag}-{bias}"),
                Expected::default(),
                address,
                PackedMatrixLaunch::new(b(BLOCKS), b(BLOCKS)),
                PackedMatrixLaunch::new(b(BLOCKS), b(BLOCKS)),
                ProblemShapeLaunch::of((ROWS, ROWS, COLS), 1),
                epilogue(device, dtype, bias),
                b(ROWS * COLS),
                true,
                elem
            ));
        }
    }
    all
}

/// The epilogue of a GEMM with one amax for each operand.
fn epilogue(device: &DummyDevice, out: FloatKind, bias: bool) -> EpilogueLaunch {
    let kind = EpilogueKind {
        a: Factor::Tensor,
        b: Factor::Tensor,
        bias,
        accumulate: false,
        out,
        amax: None,
    };
    let b = |len| device.buffer(len);
    EpilogueLaunch::new(b(1), b(1), b(COLS), b(1), b(1), 2688.0, 2688.0, 1.0, kind)
}
