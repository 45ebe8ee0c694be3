//! Instances of the kernels of this folder, for the registry.

use cubecl::prelude::*;
use half::bf16;

use super::{
    super::mma::problem::MmaPlan,
    backward::sm90_backward_kernel,
    backward_problem::{BackwardProblemLaunch, Pass, RowsLaunch, Sm90BackwardPlan},
    forward::{ForwardOutputsLaunch, Sm90Plan, UNITS, sm90_forward_kernel},
    table::sm90_tiles_kernel,
    tiles::ScheduleLaunch,
};
use crate::{
    AttentionParams, HadamardSize,
    attention::mma::{
        gradient::GradientViewLaunch,
        problem::{ProblemLaunch, Side},
    },
    cube::hadamard::SignsLaunch,
    quantize::{
        amax::{AmaxOutLaunch, AmaxPlan},
        tile::Grouping,
    },
    registry::instance::{Architectures, DummyDevice, Expected, Instance, instance},
    tensor::{AmaxGranularity, FloatKind},
};

/// No conversion. Some addresses of outputs written after the loop are spilled before it; the loop
/// has no spilled registers.
const NONE: Expected = Expected {
    spills: None,
    ..Expected::NONE
};

/// Returns all instances that `device` uses.
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
            add(device, &mut all, plan(head, &params), tag);
        }
        for (tag, params) in [("-offsets", plain), ("-offsets-everything", everything)] {
            let offsets = MmaPlan {
                offsets: true,
                ..plan(head, &params)
            };
            add(device, &mut all, offsets, tag);
        }
        // Amax of all elements alone, and of transformed columns, too.
        for (tag, hadamard, offsets) in [
            ("-amax", None, false),
            ("-amax-columns", Some(HadamardSize::H16), false),
            ("-offsets-amax", None, true),
        ] {
            let amax = AmaxPlan {
                rows: Some(AmaxGranularity::PerTensor),
                cols: hadamard.map(|_| AmaxGranularity::PerTensor),
                hadamard,
                default_signs: true,
                grouping: Grouping::One,
                elements: false,
                units: 256,
                planes: true,
                conversion: device.conversion,
                kind: FloatKind::Bf16,
            };
            let plan = Sm90Plan {
                plan: MmaPlan {
                    offsets,
                    ..plan(head, &plain)
                },
                amax: Some(amax),
            };
            all.push(forward(device, plan, tag));
        }
    }
    all.extend([Side::Queries, Side::Keys].map(|side| tiles(device, side)));
    all
}

/// Returns a tensor map with boxes of `rows` tokens.
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

/// Returns the choices that all kernels share, with the blocks of the forward.
fn plan(head: usize, params: &AttentionParams) -> MmaPlan {
    MmaPlan {
        head,
        kind: FloatKind::Bf16,
        strips: 1,
        half_strip: false,
        warps: 8,
        inner: 128,
        causal: params.causal,
        window: params.window.is_some(),
        softcap: params.softcap.is_some(),
        quiet_softmax: params.quiet_softmax,
        offsets: false,
    }
}

fn problem(device: &DummyDevice) -> ProblemLaunch {
    let b = |len| device.buffer(len);
    ProblemLaunch::new(b(2), b(2), 1, 64, 64, 1, 1.0, 1.0, 0)
}

/// Returns the instance of the forward for `plan`.
fn forward(device: &DummyDevice, plan: Sm90Plan, tag: &str) -> Instance {
    let b = |len| device.buffer(len);
    let instance = instance!(
        device,
        units UNITS,
        sm90_forward_kernel,
        format!("{}{tag}", plan.plan.head),
        NONE,
        AddressType::U32,
        map(device, 128),
        map(device, 128),
        map(device, 128),
        problem(device),
        ScheduleLaunch::new(1, 1, 1, b(64), b(1)),
        ForwardOutputsLaunch::new(b(64), b(64), AmaxOutLaunch::new(b(1), b(1))),
        SignsLaunch::new(1, 2, 3, 4),
        plan
    );
    instance.on(Architectures::Sm90a)
}

/// Returns the kernel that writes the tiles of one side.
fn tiles(device: &DummyDevice, side: Side) -> Instance {
    let b = |len| device.buffer(len);
    let instance = instance!(
        device,
        sm90_tiles_kernel,
        format!("{side:?}"),
        Expected::NONE,
        problem(device),
        b(2),
        b(64),
        4,
        side,
        128
    );
    instance.on(Architectures::Sm90a)
}

/// Adds the instances of the forward and of both passes of the backward.
fn add(device: &DummyDevice, all: &mut Vec<Instance>, plan: MmaPlan, tag: &str) {
    let b = |len| device.buffer(len);
    let head = plan.head;
    let of_forward = Sm90Plan { plan, amax: None };
    all.push(forward(device, of_forward, tag));
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
                problem(device),
                ScheduleLaunch::new(1, 1, 1, b(64), b(1)),
                RowsLaunch::new(b(64), b(64), b(64), b(64))
            ),
            gradient(),
            gradient(),
            Sm90BackwardPlan {
                plan: MmaPlan { inner, ..plan },
                pass,
                rope: true
            }
        );
        all.push(instance.on(Architectures::Sm90a));
    }
}
