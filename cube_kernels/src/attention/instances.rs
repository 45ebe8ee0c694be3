//! Instances of the kernels of attention, for the registry.

use crate::registry::{DummyDevice, Instance};

/// All instances that `device` uses.
pub(crate) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let mut all = super::mma::instances::instances(device);
    all.extend(super::sm90::instances::instances(device));
    all
}
