//! Instances of the kernels of activations, for the registry.

use cubecl::prelude::*;

use super::kernel::{GeluPlan, SwiGluPlan, gelu_kernel, swiglu_elements_kernel};
use crate::{
    reference::Gelu,
    registry::instance::{DummyDevice, Expected, Instance, instance},
    tensor::FloatKind,
};

/// Returns all instances that `device` uses.
pub(crate) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let b = |len| device.buffer(len);
    let mut all = Vec::new();
    for kind in [FloatKind::F32, FloatKind::F16, FloatKind::Bf16] {
        for backward in [false, true] {
            let address = match kind {
                FloatKind::Bf16 => AddressType::U64,
                _ => AddressType::U32,
            };
            let tag = format!("{kind:?}-{address:?}-{backward}");
            all.push(instance!(
                device,
                swiglu_elements_kernel,
                &tag,
                Expected::NONE,
                address,
                b(64),
                b(64),
                b(64),
                16,
                16,
                SwiGluPlan {
                    backward,
                    kind,
                    conversion: device.conversion,
                },
                kind.storage_type()
            ));
            for (gelu, whole) in [(Gelu::Erf, true), (Gelu::Tanh, true), (Gelu::Erf, false)] {
                let (scalar, width) = match whole {
                    true => (u32::elem_type_native(), 4),
                    false => (kind.storage_type(), 1),
                };
                all.push(instance!(
                    device,
                    gelu_kernel,
                    format!("{tag}-{gelu:?}-{whole}"),
                    Expected::NONE,
                    address,
                    width,
                    b(64),
                    b(64),
                    b(64),
                    64,
                    GeluPlan {
                        gelu,
                        backward,
                        whole,
                        kind,
                        conversion: device.conversion,
                    },
                    scalar
                ));
            }
        }
    }
    all
}
