//! Instances of the kernel that aligns groups along K.

use cubecl::prelude::*;

use crate::{
    gemm::align_groups::{SparseGroupsLaunch, align_groups_kernel},
    registry::instance::{DummyDevice, Expected, Instance, instance},
};

/// Returns all instances that `device` uses.
pub(super) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let b = || device.buffer(1 << 10);
    [AddressType::U32, AddressType::U64]
        .map(|address| {
            instance!(
                device,
                align_groups_kernel,
                format!("{address:?}"),
                Expected::NONE,
                address,
                SparseGroupsLaunch::new(b(), b(), b(), 16),
                b(),
                b(),
                b(),
                128,
                4,
                3,
            )
        })
        .into()
}
