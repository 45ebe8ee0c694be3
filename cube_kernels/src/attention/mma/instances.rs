//! Instances of the kernels of this folder, for the registry.

use cubecl::prelude::*;

use super::{
    MmaPlans,
    dkdv::{OperandsLaunch, mma_dkdv_kernel},
    dq::mma_dq_kernel,
    forward::mma_forward_kernel,
    gradient::{BackwardPlan, GradientViewLaunch, Part, SavedLaunch},
    problem::ProblemLaunch,
    tile::HeadsViewLaunch,
};
use crate::{
    AttentionParams,
    registry::instance::{DummyDevice, Expected, Instance, instance},
    tensor::FloatKind,
};

/// No conversion. Open issue: some of the widest instances spill a few registers on some targets.
const NONE: Expected = Expected {
    spills: None,
    ..Expected::NONE
};

/// Shared memory of a CTA on data center GPUs, and on others.
const SHARED: [usize; 2] = [160 << 10, 99 << 10];

/// Returns all instances that `device` uses.
pub(crate) fn instances(device: &DummyDevice) -> Vec<Instance> {
    if !device.conversion.has_ptx() {
        return Vec::new();
    }
    let plain = AttentionParams {
        scale: 1.0,
        causal: true,
        window: None,
        softcap: None,
        quiet_softmax: false,
    };
    let everything = AttentionParams {
        window: Some(8),
        softcap: Some(8.0),
        quiet_softmax: true,
        ..plain
    };
    let mut all = Vec::new();
    for head in [64, 96, 128, 256] {
        add(device, &mut all, &plans(head, &plain, SHARED[0]), true, "");
    }
    add(
        device,
        &mut all,
        &plans(128, &plain, SHARED[1]),
        true,
        "-99KB",
    );
    add(
        device,
        &mut all,
        &plans(256, &plain, SHARED[1]),
        true,
        "-99KB",
    );
    let open = AttentionParams {
        causal: false,
        ..plain
    };
    add(
        device,
        &mut all,
        &plans(64, &open, SHARED[0]),
        false,
        "-open",
    );
    for head in [48, 64, 128] {
        let mut plans = plans(head, &everything, SHARED[0]);
        for plan in [&mut plans.forward, &mut plans.dkdv, &mut plans.dq] {
            plan.kind = FloatKind::F16;
            plan.offsets = true;
        }
        add(device, &mut all, &plans, true, "-everything");
    }
    all
}

fn plans(head: usize, params: &AttentionParams, shared: usize) -> MmaPlans {
    MmaPlans::new(head, FloatKind::Bf16, params, false, shared)
}

/// Adds the instances of `plans`.
fn add(device: &DummyDevice, all: &mut Vec<Instance>, plans: &MmaPlans, rope: bool, tag: &str) {
    let b = |len| device.buffer(len);
    let view = || HeadsViewLaunch::new(b(64), 0, 8);
    let gradient = || GradientViewLaunch::new(b(64), 0, 8);
    let operands = || OperandsLaunch::new(view(), view(), view());
    let saved = || SavedLaunch::new(view(), b(64), b(64), b(64), b(64));
    let problem = || ProblemLaunch::new(b(2), b(2), 1, 64, 64, 1, 1.0, 1.0, 0);
    let name = format!("{}{tag}", plans.forward.head);
    let wide = AddressType::U32;
    all.push(instance!(
        device,
        mma_forward_kernel,
        &name,
        NONE,
        wide,
        view(),
        view(),
        view(),
        problem(),
        b(64),
        b(64),
        plans.forward
    ));
    let parts: &[Part] = match plans.dkdv.head {
        ..=super::BOTH => &[Part::Both],
        _ => &[Part::Keys, Part::Values],
    };
    for &part in parts {
        all.push(instance!(
            device,
            mma_dkdv_kernel,
            format!("{name}-{part:?}"),
            NONE,
            wide,
            operands(),
            saved(),
            problem(),
            gradient(),
            gradient(),
            BackwardPlan {
                plan: plans.dkdv,
                rope,
                part
            }
        ));
    }
    all.push(instance!(
        device,
        mma_dq_kernel,
        &name,
        NONE,
        wide,
        operands(),
        saved(),
        problem(),
        gradient(),
        BackwardPlan {
            plan: plans.dq,
            rope,
            part: Part::Both
        }
    ));
}
