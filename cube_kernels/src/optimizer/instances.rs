//! Instances of the optimizer's kernels, for the registry.

use cubecl::prelude::*;

use super::{
    SLOTS, WIDTH,
    adamw::{AdamWPlan, AdamWSlotLaunch, AdamWStepLaunch, adamw_kernel},
    norm::{GradientSlotLaunch, SquarePlan, clip_factor_kernel, square_sums_kernel},
};
use crate::{
    registry::instance::{DummyDevice, Expected, Instance, instance},
    tensor::FloatKind,
};

/// Returns all instances that `device` uses.
pub(crate) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let b = |len| device.buffer(len);
    let mut all = vec![instance!(
        device,
        clip_factor_kernel,
        "",
        Expected::NONE,
        b(64),
        b(2),
        64,
        1.0,
        device.conversion
    )];
    for (slots, width, address) in shapes() {
        for gradient in [FloatKind::F32, FloatKind::Bf16, FloatKind::F16] {
            all.push(instance!(
                device,
                square_sums_kernel,
                format!("{gradient:?}-{slots}-{width}-{address:?}"),
                Expected::NONE,
                address,
                width,
                (0..slots)
                    .map(|_| GradientSlotLaunch::new(b(64), 64, 0, 1, 0))
                    .collect(),
                b(64),
                SquarePlan {
                    gradient,
                    conversion: device.conversion,
                },
                gradient.storage_type()
            ));
        }
        for (gradient, moment, copy) in types() {
            let plan = AdamWPlan {
                gradient,
                moment,
                copy,
                clip: true,
                amax: copy.is_some(),
                planes: true,
                conversion: device.conversion,
            };
            all.push(instance!(
                device,
                adamw_kernel,
                format!("{gradient:?}-{moment:?}-{copy:?}-{slots}-{width}-{address:?}"),
                Expected::NONE,
                address,
                width,
                (0..slots)
                    .map(|_| {
                        AdamWSlotLaunch::new(b(64), b(64), b(64), b(64), b(64), 0, 16, 0.1, 1, 2, 0)
                    })
                    .collect(),
                AdamWStepLaunch::new(b(4), b(2), 0.9, 0.1, 0.95, 0.05, 1e-8),
                b(64),
                plan,
                gradient.storage_type(),
                moment.storage_type(),
                plan.copy_kind().storage_type()
            ));
        }
    }
    all
}

fn shapes() -> [(usize, usize, AddressType); 3] {
    [
        (1, WIDTH, AddressType::U64),
        (SLOTS, WIDTH, AddressType::U32),
        (SLOTS, 1, AddressType::U32),
    ]
}

/// Returns the types of gradients, moments and copies.
fn types() -> [(FloatKind, FloatKind, Option<FloatKind>); 4] {
    [
        (FloatKind::F32, FloatKind::F32, None),
        (FloatKind::Bf16, FloatKind::F32, Some(FloatKind::Bf16)),
        (FloatKind::F16, FloatKind::F32, Some(FloatKind::F16)),
        (FloatKind::Bf16, FloatKind::Bf16, Some(FloatKind::Bf16)),
    ]
}
