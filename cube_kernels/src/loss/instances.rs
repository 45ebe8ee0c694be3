//! Instances of the kernels of the cross entropy, for the registry.

use cubecl::prelude::*;

use super::{
    kernel::{
        CrossEntropyArgsLaunch, CrossEntropyPlan, cross_entropy_kernel, scale_kernel,
        sum_losses_kernel, target_scale_kernel,
    },
    kl_kernel::{KlDivergenceArgsLaunch, KlDivergencePlan, kl_divergence_kernel},
};
use crate::{
    embedding::instances::row_plans,
    registry::instance::{DummyDevice, Expected, Instance, instance},
    tensor::FloatKind,
};

/// Nothing is launched, so sizes do not matter.
const ROWS: usize = 256;

/// No conversion to 4 or 8 bits, and no spilled registers.
const NONE: Expected = Expected {
    // Open issue: one instance of the cross entropy spills a few registers on sm_90a.
    spills: None,
    ..Expected::NONE
};

/// Returns all instances that `device` uses.
pub(crate) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let b = |len| device.buffer(len);
    let wide = AddressType::U64;
    let mut all = vec![instance!(
        device,
        sum_losses_kernel,
        "",
        NONE,
        b(ROWS),
        b(1),
        b(1),
        ROWS
    )];
    for mean in [false, true] {
        all.push(instance!(
            device,
            target_scale_kernel,
            format!("{mean}"),
            NONE,
            b(ROWS),
            b(1),
            ROWS,
            1,
            mean,
            device.conversion,
            256
        ));
    }
    let kinds = [FloatKind::F32, FloatKind::F16, FloatKind::Bf16];
    for (width, rows, elem) in kinds.into_iter().flat_map(row_plans) {
        let tag = format!("{:?}-{}-{}", rows.kind, rows.whole, rows.elements);
        all.push(instance!(
            device,
            scale_kernel,
            &tag,
            NONE,
            wide,
            width,
            b(ROWS),
            b(1),
            ROWS,
            ROWS,
            device.conversion,
            rows,
            elem
        ));
        let lanes: &[(usize, usize)] = match rows.whole {
            true => &[(32, 0), (512, 1), (1024, 3)],
            false => &[(32, 0), (1024, 0)],
        };
        for &(lanes, held) in lanes {
            for (gradient, smoothing) in [(true, false), (true, true), (false, false)] {
                all.push(instance!(
                    device,
                    units lanes.max(256) as u32,
                    cross_entropy_kernel,
                    format!("{tag}-{lanes}-{gradient}-{smoothing}"),
                    NONE,
                    wide,
                    width,
                    b(ROWS),
                    b(ROWS),
                    b(1),
                    b(ROWS),
                    CrossEntropyArgsLaunch::new(ROWS, ROWS, ROWS, 1, 0.0, 0.0, 0.0),
                    CrossEntropyPlan {
                        lanes,
                        planes: true,
                        held: if gradient { held } else { 0 },
                        gradient,
                        smoothing,
                        rows,
                        conversion: device.conversion,
                    },
                    elem
                ));
            }
            for gradient in [true, false] {
                all.push(instance!(
                    device,
                    units lanes.max(256) as u32,
                    kl_divergence_kernel,
                    format!("{tag}-{lanes}-{gradient}"),
                    NONE,
                    wide,
                    width,
                    b(ROWS),
                    b(ROWS),
                    b(ROWS),
                    b(1),
                    b(ROWS),
                    KlDivergenceArgsLaunch::new(ROWS, ROWS, ROWS, 1, 1.0, 1.0),
                    KlDivergencePlan {
                        lanes,
                        planes: true,
                        gradient,
                        rows,
                        conversion: device.conversion,
                    },
                    elem
                ));
            }
        }
    }
    all
}
