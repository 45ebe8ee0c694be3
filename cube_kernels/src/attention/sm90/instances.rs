//! Instances of the kernels of this folder, for the registry.

use cubecl::prelude::*;
use half::bf16;

use super::{
    super::{AttentionParams, mma::problem::MmaPlan},
    backward::sm90_backward_kernel,
    backward_problem::{BackwardProblemLaunch, Pass, RowsLaunch, Sm90BackwardPlan},
    forward::{ScheduleLaunch, Sm90Plan, UNITS, sm90_forward_kernel},
};
use crate::{
    attention::mma::{gradient::GradientViewLaunch, problem::ProblemLaunch},
    registry::instance::{Architectures, DummyDevice, Expected, Instance, instance},
    tensor::FloatKind,
};

/// No conversion. Some addresses of what is written behind the loop are spilled before it; the loop
/// has no spilled registers.
const NONE: Expected = Expected {
    spills: None,
    ..Expected::NONE
};

/// All instances that `device` uses.
pub(crate) fn instances(device: &DummyDevice) -> Vec<Instance> {
    if !device.conversion.has_ptx() {
        return Vec::new();
    }
    let plain = AttentionParams::causal(64);
    let open = AttentionParams::new(64);
    let everything = AttentionParams {
        window: Some(8),
        softcap: Some(8.0),
        quiet_softmax: true,
        ..plain
    };
    let mut all = Vec::new();
    for head in [64, 128] {
        for (tag, params) in [("", plain), ("-open", open), ("-everything", everything)] {
            add(device, &mut all, head, &params, tag);
        }
    }
    all
}

/// A map of boxes of `rows` tokens.
fn map(device: &DummyDevice, rows: usize) -> TensorMapArg<Tiled> {
    let (shape, strides) = ([1, 256, 1, 64], [256 * 64, 64, 64, 1]);
    // SAFETY: nothing is launched.
    let tensor =
        unsafe { TensorArg::from_raw_parts(device.memory(), strides.into(), shape.into()) };
    TensorMapArg::new(
        TiledArgs {
            tile_size: [1, rows, 1, 64].into(),
        },
        tensor,
        bf16::elem_type_native(),
    )
    .with_swizzle(TensorMapSwizzle::B128)
}

/// The instances for heads of `head` elements.
fn add(
    device: &DummyDevice,
    all: &mut Vec<Instance>,
    head: usize,
    params: &AttentionParams,
    tag: &str,
) {
    let b = |len| device.buffer(len);
    let plan = |inner| MmaPlan {
        head,
        kind: FloatKind::Bf16,
        strips: 1,
        warps: 8,
        inner,
        causal: params.causal,
        window: params.window.is_some(),
        softcap: params.softcap.is_some(),
        quiet_softmax: params.quiet_softmax,
        offsets: false,
    };
    let problem = || ProblemLaunch::new(b(2), b(2), 1, 64, 64, 1, 1.0, 1.0, 0);
    let forward = Sm90Plan { plan: plan(128) };
    let instance = instance!(
        device,
        units UNITS,
        sm90_forward_kernel,
        format!("{head}{tag}"),
        NONE,
        AddressType::U32,
        map(device, 128),
        map(device, 128),
        map(device, 128),
        problem(),
        ScheduleLaunch::new(1, 1, 1),
        b(64),
        b(64),
        forward
    );
    all.push(instance.on(Architectures::Sm90a));
    for pass in [Pass::KeysValues, Pass::Queries] {
        let inner = super::backward_inner(head, pass);
        let gradient = || GradientViewLaunch::new(b(64), 0, 8);
        let instance = instance!(
            device,
            units UNITS,
            sm90_backward_kernel,
            format!("{head}{tag}-{pass:?}"),
            NONE,
            AddressType::U32,
            map(device, 128),
            map(device, 128),
            map(device, inner),
            map(device, inner),
            BackwardProblemLaunch::new(
                problem(),
                ScheduleLaunch::new(1, 1, 1),
                RowsLaunch::new(b(64), b(64), b(64), b(64))
            ),
            gradient(),
            gradient(),
            Sm90BackwardPlan {
                plan: plan(inner),
                pass,
                rope: true
            }
        );
        all.push(instance.on(Architectures::Sm90a));
    }
}
