//! Instances of the kernel for `tcgen05` and of its probes.

use cubecl::prelude::*;

use super::inputs::{ALL, ALL_GROUPS, BLOCKS, NO_SPILLS, PLAIN, epilogue, map, problem};
use crate::{
    cube::ptx::BlockScaled,
    gemm::{
        kernels::{
            EpilogueKind, Factor, Fault, GroupedDim, Sm100Plan, SoftwareTensorCoreLaunch,
            SwizzledScalesLaunch, TensorCore, sm100_block_scaled_kernel,
            sm100_probe::{PROBE_UNITS, step_kernel, step_model_kernel, tmem_round_trip_kernel},
            sm100_units,
        },
        specialization::GemmInstance,
    },
    registry::instance::{Architectures, DummyDevice, Expected, Instance, instance},
    tensor::FloatKind,
};

/// With the instructions, for the GPUs that have them, and with the software model, for Hopper: as
/// it is, and with each fault.
pub(super) fn block_scaled(device: &DummyDevice) -> Vec<Instance> {
    let out = |out, kind: EpilogueKind| EpilogueKind { out, ..kind };
    let forms = [
        (GroupedDim::None, PLAIN),
        (GroupedDim::M, ALL_GROUPS),
        (GroupedDim::None, ALL),
        (GroupedDim::M, PLAIN),
        (GroupedDim::None, out(FloatKind::F16, ALL)),
        (GroupedDim::K, out(FloatKind::F32, PLAIN)),
        (GroupedDim::K, ALL_GROUPS),
    ];
    // MXFP8 has no global scales.
    let unscaled = |kind: EpilogueKind| EpilogueKind {
        a: Factor::One,
        b: Factor::One,
        ..kind
    };
    let swapped = [
        (GroupedDim::None, PLAIN),
        (GroupedDim::M, ALL_GROUPS),
        (GroupedDim::M, PLAIN),
        (GroupedDim::None, out(FloatKind::F16, ALL)),
    ];
    let plan = |format, swap_ab, grouped, core| Sm100Plan {
        format,
        swap_ab,
        grouped,
        core,
    };
    let (nvfp4, mxfp8) = (BlockScaled::Nvfp4, BlockScaled::Mxfp8);
    let mut plans = Vec::new();
    for core in [TensorCore::Instruction, TensorCore::Software(Fault::None)] {
        plans.extend(forms.map(|(dim, kind)| (plan(nvfp4, false, dim, core), kind)));
        plans.extend(forms.map(|(dim, kind)| (plan(mxfp8, false, dim, core), unscaled(kind))));
        plans.extend(swapped.map(|(dim, kind)| (plan(nvfp4, true, dim, core), kind)));
        plans.extend(swapped.map(|(dim, kind)| (plan(mxfp8, true, dim, core), unscaled(kind))));
    }
    for fault in Fault::INJECTED {
        let (none, core) = (GroupedDim::None, TensorCore::Software(fault));
        plans.push((plan(nvfp4, false, none, core), PLAIN));
    }
    for format in BlockScaled::ALL {
        for swap_ab in [false, true] {
            let core = TensorCore::Software(Fault::WrongScaleId);
            let other = plan(format, swap_ab, GroupedDim::None, core);
            if (format, swap_ab) != (nvfp4, false) {
                plans.push((other, unscaled(PLAIN)));
            }
        }
    }
    let mut all = Vec::new();
    for (plan, kind) in plans {
        let Sm100Plan {
            format,
            swap_ab,
            grouped,
            core,
        } = plan;
        let (architectures, expected) = match core {
            TensorCore::Instruction => (Architectures::Sm100, NO_SPILLS),
            TensorCore::Software(_) => (Architectures::Sm90a, Expected::default()),
        };
        let name = format!("{grouped:?}-{:?}-{}-{core:?}", kind.out, kind.accumulate);
        let order = if swap_ab { "-swapped" } else { "" };
        let codes = |rows| {
            map(device, [rows, 32], u32::elem_type_native()).with_swizzle(TensorMapSwizzle::B128)
        };
        let instance = instance!(
            device,
            units sm100_units(core),
            sm100_block_scaled_kernel,
            format!("{format:?}{order}-{name}"),
            expected,
            AddressType::U32,
            codes(128),
            codes(plan.b_rows()),
            SwizzledScalesLaunch::new(device.buffer(BLOCKS), device.buffer(BLOCKS), 2),
            problem(device, 1),
            epilogue(device, kind),
            SoftwareTensorCoreLaunch::new(device.buffer(256), device.buffer(4), 0),
            device.buffer(1 << 12),
            plan,
        );
        all.push(instance.of_gemm(GemmInstance::Sm100BlockScaled(plan), architectures));
    }
    all
}

/// The probes with the instructions, and the model of the same for any GPU.
pub(super) fn probes(device: &DummyDevice) -> Vec<Instance> {
    let b = || device.buffer(1 << 14);
    let on_sm100 = |instance: Instance, copies, multiplies| {
        let gemm = GemmInstance::Sm100Probe { copies, multiplies };
        instance.of_gemm(gemm, Architectures::Sm100)
    };
    let round_trip = instance!(
        device,
        units PROBE_UNITS,
        tmem_round_trip_kernel,
        "",
        NO_SPILLS,
        b(),
        b()
    );
    let mut all = vec![on_sm100(round_trip, 0, None)];
    for multiplies in [Some(BlockScaled::Nvfp4), Some(BlockScaled::Mxfp8), None] {
        let step = instance!(
            device,
            units PROBE_UNITS,
            step_kernel,
            format!("{multiplies:?}"),
            NO_SPILLS,
            b(),
            b(),
            3,
            multiplies
        );
        all.push(on_sm100(step, 3, multiplies));
        all.push(instance!(
            device,
            units 32,
            step_model_kernel,
            format!("{multiplies:?}"),
            Expected::default(),
            b(),
            b(),
            b(),
            3,
            multiplies
        ));
    }
    all
}
