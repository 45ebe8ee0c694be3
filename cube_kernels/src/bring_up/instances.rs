//! Instances of the kernel that rounds by given random bits, for the registry. Those of the probes
//! are with the `tcgen05` kernel.

use super::random_bits::random_bits_kernel;
use crate::registry::instance::{DummyDevice, Expected, Instance, instance};

/// Returns all instances that `device` uses.
pub(crate) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let expected = match device.has_stochastic() {
        true => Expected {
            e2m1_rn: Some(false),
            e2m1_rs: Some(true),
            ..Expected::default()
        },
        false => Expected::default(),
    };
    vec![instance!(
        device,
        random_bits_kernel,
        "",
        expected,
        device.buffer(256),
        device.buffer(64),
        device.buffer(64),
        64,
        device.conversion,
    )]
}
