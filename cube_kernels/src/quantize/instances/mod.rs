//! Instances of the quantization kernels for the registry.

mod amax;
mod dequantize;
mod inputs;
mod ms_eden;
mod mx;
mod prologue;
mod quantize;
mod swizzle;

use crate::registry::instance::{DummyDevice, Instance};

/// Returns all instances that `device` uses.
pub(crate) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let families = [
        amax::instances,
        dequantize::instances,
        ms_eden::instances,
        mx::instances,
        prologue::instances,
        quantize::instances,
        swizzle::instances,
    ];
    let instances = families.iter().flat_map(|instances| instances(device));
    let alone = [super::offset::instances, super::random_bits::instances];
    instances
        .chain(alone.iter().flat_map(|instances| instances(device)))
        .collect()
}
