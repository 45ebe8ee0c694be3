//! Instances of the kernels that update inputs of graphs, for the registry.

use super::{copy::copy_words_kernel, words::set_words_kernel};
use crate::registry::instance::{DummyDevice, Expected, Instance, instance};

/// Returns all instances that `device` uses.
pub(crate) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let (from, out, words) = (device.buffer(64), device.buffer(64), device.buffer(4));
    vec![
        instance!(device, copy_words_kernel, "", Expected::NONE, from, out, 64),
        instance!(
            device,
            set_words_kernel,
            "",
            Expected::NONE,
            words,
            1,
            2,
            3,
            4
        ),
    ]
}
