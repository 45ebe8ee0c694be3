//! Instances of the kernels that compute a matrix without quantizing it.

use super::{
    super::kernels::{ProloguePlan, prologue_kernel, rms_norm_rstd_kernel},
    inputs::{COLS, ELEMENTS, ROWS, prologue_inputs},
};
use crate::registry::instance::{DummyDevice, Expected, Instance, instance};

pub(super) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let b = |len| device.buffer(len);
    let mut all = Vec::new();
    for (dtype, address) in ELEMENTS {
        let tag = format!("{dtype:?}-{address:?}");
        let words = ROWS * COLS * dtype.size() / 4;
        all.push(instance!(
            device,
            rms_norm_rstd_kernel,
            &tag,
            Expected::default(),
            address,
            4,
            b(words / 4),
            b(ROWS),
            ROWS,
            COLS / 16,
            1e-6,
            true,
            device.conversion,
            dtype
        ));
        for computed in ["RmsNorm", "SwiGlu", "SwiGluBackward"] {
            let bounded = computed != "RmsNorm";
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
                    bounded,
                    overlaps: device.overlaps,
                    conversion: device.conversion,
                    kind: dtype,
                }
            ));
        }
    }
    all
}
