//! Instances of the quantization kernels for the registry.

mod amax;
mod dequantize;
mod inputs;
mod ms_eden;
mod mx;
mod prologue;
mod quantize;
mod swizzle;

use super::offset::advance_offset_kernel;
use crate::registry::instance::{DummyDevice, Expected, Instance, instance};

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
    let mut all: Vec<Instance> = (families.iter())
        .flat_map(|instances| instances(device))
        .collect();
    all.push(instance!(
        device,
        advance_offset_kernel,
        "",
        Expected::NONE,
        device.buffer(2),
        1
    ));
    all
}
