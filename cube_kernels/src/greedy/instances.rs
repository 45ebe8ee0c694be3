//! Instances of the kernel of greedy selection, for the registry.

use cubecl::prelude::*;

use super::kernel::{ChunksLaunch, GreedyPlan, StepLaunch, UNITS, greedy_kernel};
use crate::{
    registry::instance::{DummyDevice, Expected, Instance, instance},
    tensor::FloatKind,
};

/// Returns all instances that `device` uses.
pub(crate) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let b = || device.buffer(1 << 12);
    let mut all = Vec::new();
    for kind in [FloatKind::F32, FloatKind::Bf16] {
        for (address, width) in [(AddressType::U32, 4), (AddressType::U64, 1)] {
            let plan = GreedyPlan {
                kind,
                concurrent: true,
                overlaps: device.overlaps,
            };
            all.push(instance!(
                device,
                units UNITS as u32,
                greedy_kernel,
                format!("{kind:?}-{address:?}-{width}"),
                Expected::NONE,
                address,
                width,
                b(),
                ChunksLaunch::new(b(), b(), 2048),
                StepLaunch::new(b(), b(), b(), b(), 4, b()),
                plan,
                kind.storage_type(),
            ));
        }
    }
    all
}
