//! Instances of the kernels of FP8, for the registry.

use cubecl::prelude::*;

use super::{
    linear::{Fp8LinearPlan, fp8_linear_kernel},
    mma::{Fp8MmaPlan, Fp8ShapeLaunch, Fp8WeightLaunch, fp8_linear_mma_kernel},
    quantize::{Fp8QuantizePlan, fp8_quantize_kernel},
};
use crate::{
    registry::instance::{DummyDevice, Expected, Instance, instance},
    tensor::FloatKind,
};

/// Returns all instances that `device` uses.
pub(crate) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let mut all = linears(device);
    all.extend(quantizers(device));
    all
}

fn linears(device: &DummyDevice) -> Vec<Instance> {
    let b = || device.buffer(1 << 12);
    let weight = || Fp8WeightLaunch::new(b(), b());
    let shape = || Fp8ShapeLaunch::new(1, 64, 64);
    let mut all = Vec::new();
    for (out, address) in [
        (FloatKind::Bf16, AddressType::U32),
        (FloatKind::F32, AddressType::U32),
        (FloatKind::Bf16, AddressType::U64),
    ] {
        let tag = format!("{out:?}-{address:?}");
        for m in [8, 16] {
            all.push(instance!(
                device,
                fp8_linear_mma_kernel,
                format!("{tag}-{m}"),
                Expected::NONE,
                address,
                b(),
                weight(),
                b(),
                shape(),
                Fp8MmaPlan::of(m, out, device.overlaps),
                out.storage_type(),
            ));
        }
    }
    for (a, address) in [
        (FloatKind::F32, AddressType::U32),
        (FloatKind::F16, AddressType::U32),
        (FloatKind::F32, AddressType::U64),
    ] {
        all.push(instance!(
            device,
            fp8_linear_kernel,
            format!("{a:?}-{address:?}"),
            Expected::NONE,
            address,
            b(),
            weight(),
            b(),
            shape(),
            Fp8LinearPlan { a, out: a },
            a.storage_type(),
            a.storage_type(),
        ));
    }
    all
}

fn quantizers(device: &DummyDevice) -> Vec<Instance> {
    let b = || device.buffer(1 << 12);
    let mut all = Vec::new();
    for (kind, address, width) in [
        (FloatKind::Bf16, AddressType::U32, 4),
        (FloatKind::F32, AddressType::U32, 4),
        (FloatKind::F16, AddressType::U32, 1),
        (FloatKind::Bf16, AddressType::U64, 4),
    ] {
        let plan = Fp8QuantizePlan {
            kind,
            conversion: device.conversion,
            units: 256,
        };
        all.push(instance!(
            device,
            fp8_quantize_kernel,
            format!("{kind:?}-{address:?}-{width}"),
            Expected {
                e4m3: Some(device.conversion.has_e4m3()),
                ..Expected::NONE
            },
            address,
            width,
            b(),
            b(),
            b(),
            64,
            64,
            plan,
            kind.storage_type(),
        ));
    }
    all
}
