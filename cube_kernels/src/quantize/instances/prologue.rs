//! Instances of the kernels that compute a matrix without quantizing it.

use super::{
    super::proof::{ProloguePlan, prologue_kernel},
    inputs::{COLS, ELEMENTS, ROWS, prologue_inputs},
};
use crate::registry::instance::{DummyDevice, Expected, Instance, instance};

pub(super) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let b = |len| device.buffer(len);
    let mut all = Vec::new();
    for (dtype, address) in ELEMENTS {
        let tag = format!("{dtype:?}-{address:?}");
        let words = ROWS * COLS * dtype.size() / 4;
        for computed in ["SwiGlu", "SwiGluBackward"] {
            all.push(instance!(
                device,
                prologue_kernel,
                format!("{tag}-{computed}"),
                Expected::default(),
                address,
                4,
                b(words / 4),
                prologue_inputs(device, computed),
                b(words / 4),
                b(1),
                ROWS,
                COLS * dtype.size() / 16,
                ProloguePlan {
                    bounded: true,
                    overlaps: device.overlaps,
                    conversion: device.conversion,
                    kind: dtype,
                }
            ));
        }
    }
    all
}
