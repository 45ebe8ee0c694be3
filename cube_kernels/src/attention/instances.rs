//! Instances of the kernels of attention, for the registry.

use cubecl::prelude::*;

use super::{
    delta::{DeltaPlan, DeltaShapeLaunch, DeltaViewLaunch, delta_kernel},
    rope::{RopePlan, RopeShapeLaunch, RotationsLaunch, rope_kernel},
    scalar::{
        UNITS,
        backward::{OperandsLaunch, scalar_dkdv_kernel, scalar_dq_kernel},
        forward::scalar_forward_kernel,
        problem::{HeadsViewLaunch, ProblemLaunch, ScalarPlan},
    },
};
use crate::{
    reference::attention::{lanes, padded},
    registry::instance::{DummyDevice, Expected, Instance, instance},
    tensor::FloatKind,
};

/// Size of the operands. Nothing is launched, so buffer lengths do not matter.
const TOKENS: usize = 64;
const LEN: usize = 1 << 14;

const KINDS: [FloatKind; 3] = [FloatKind::F32, FloatKind::F16, FloatKind::Bf16];

/// Returns all instances that `device` uses.
pub(crate) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let mut all = super::mma::instances::instances(device);
    all.extend(super::sm90::instances::instances(device));
    all.extend(super::decode::instances::instances(device));
    for kind in KINDS {
        for address in [AddressType::U32, AddressType::U64] {
            for width in [1, 16 / kind.size()] {
                all.push(rope(device, kind, address, width));
                all.push(delta(device, kind, address, width));
            }
        }
    }
    // For each number of lanes, the widest head that uses it.
    for (head, kind) in [
        (32, FloatKind::Bf16),
        (64, FloatKind::F32),
        (96, FloatKind::F16),
        (128, FloatKind::F32),
        (256, FloatKind::F32),
    ] {
        all.extend(scalar(device, head, kind, AddressType::U32, head == 64));
    }
    all.extend(scalar(device, 128, FloatKind::Bf16, AddressType::U64, true));
    all
}

fn rope(device: &DummyDevice, kind: FloatKind, address: AddressType, width: usize) -> Instance {
    let b = || device.buffer(LEN);
    instance!(
        device,
        rope_kernel,
        format!("{kind:?}-{address:?}-{width}"),
        Expected::NONE,
        address,
        width,
        b(),
        b(),
        RotationsLaunch::new(b(), b(), TOKENS, b(), 1, 0),
        RopeShapeLaunch::new(TOKENS, 4, 32 / width, 0, 1024, 0, 1024),
        RopePlan {
            inverse: width > 1,
            kind,
            conversion: device.conversion,
        },
        kind.storage_type()
    )
}

fn delta(device: &DummyDevice, kind: FloatKind, address: AddressType, width: usize) -> Instance {
    let b = || device.buffer(LEN);
    let view = || DeltaViewLaunch::new(0, 1024);
    instance!(
        device,
        delta_kernel,
        format!("{kind:?}-{address:?}-{width}"),
        Expected::NONE,
        address,
        width,
        b(),
        b(),
        DeltaShapeLaunch::new(view(), view(), TOKENS, 4, 64),
        b(),
        DeltaPlan {
            lanes: 8,
            planes: true,
            kind,
            conversion: device.conversion,
        },
        kind.storage_type()
    )
}

fn scalar(
    device: &DummyDevice,
    head: usize,
    kind: FloatKind,
    address: AddressType,
    softcap: bool,
) -> Vec<Instance> {
    let b = || device.buffer(LEN);
    let plan = ScalarPlan {
        padded: padded(head),
        lanes: lanes(head),
        units: UNITS,
        planes: true,
        softcap,
        kind,
        conversion: device.conversion,
    };
    let problem = || {
        let (tokens, head) = (TOKENS as u32, head as u32);
        ProblemLaunch::new(
            b(),
            b(),
            1,
            0,
            tokens,
            tokens,
            4,
            1,
            head,
            1,
            0,
            0,
            0.125,
            1.0,
            1.0,
        )
    };
    let tag = format!("{head}-{kind:?}-{address:?}-{softcap}");
    macro_rules! view {
        () => {
            HeadsViewLaunch::new(b(), 0, 1024)
        };
    }
    macro_rules! operands {
        () => {
            OperandsLaunch::new(view!(), view!(), view!(), view!(), b(), b())
        };
    }
    let storage = kind.storage_type();
    let mut all = Vec::new();
    all.push(instance!(
        device,
        scalar_forward_kernel,
        &tag,
        Expected::NONE,
        address,
        view!(),
        view!(),
        view!(),
        problem(),
        view!(),
        b(),
        plan,
        storage
    ));
    all.push(instance!(
        device,
        scalar_dq_kernel,
        &tag,
        Expected::NONE,
        address,
        operands!(),
        problem(),
        view!(),
        plan,
        storage
    ));
    all.push(instance!(
        device,
        scalar_dkdv_kernel,
        &tag,
        Expected::NONE,
        address,
        operands!(),
        problem(),
        view!(),
        view!(),
        plan,
        storage
    ));
    all
}
