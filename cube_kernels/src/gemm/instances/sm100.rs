//! Instances of the `tcgen05` kernel and of its probes.

use cubecl::prelude::*;

use super::inputs::{ALL, ALL_GROUPS, BLOCKS, NO_SPILLS, PLAIN, epilogue, map, problem};
use crate::{
    cube::ptx::BlockScaled,
    gemm::proof::{
        EpilogueKind, Factor, Fault, GemmInstance, GroupedDim, ScaleMapsLaunch, Sm100Form,
        Sm100Plan, SoftwareTensorCoreLaunch, SwizzledScalesLaunch, TensorCore,
        sm100::probe::{PROBE_UNITS, step_kernel, step_model_kernel, tmem_round_trip_kernel},
        sm100_block_scaled_kernel, sm100_units,
    },
    registry::instance::{Architectures, DummyDevice, Expected, Instance, instance},
    tensor::FloatKind,
};

/// With the instructions, for GPUs that have them, and with the software model, for Hopper: without
/// and with each fault.
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
    let pairs = [
        (GroupedDim::None, PLAIN),
        (GroupedDim::M, ALL_GROUPS),
        (GroupedDim::None, ALL),
        (GroupedDim::None, out(FloatKind::F16, ALL)),
        (GroupedDim::K, out(FloatKind::F32, PLAIN)),
    ];
    let (one, two, swap) = (Sm100Form::OneCta, Sm100Form::TwoCta, Sm100Form::SwapAb);
    let plan = |format, form, grouped, core| Sm100Plan {
        format,
        form,
        grouped,
        core,
    };
    let (nvfp4, mxfp8) = (BlockScaled::Nvfp4, BlockScaled::Mxfp8);
    let mut plans = Vec::new();
    for core in [TensorCore::Instruction, TensorCore::Software(Fault::None)] {
        plans.extend(forms.map(|(dim, kind)| (plan(nvfp4, one, dim, core), kind)));
        plans.extend(forms.map(|(dim, kind)| (plan(mxfp8, one, dim, core), unscaled(kind))));
        plans.extend(pairs.map(|(dim, kind)| (plan(nvfp4, two, dim, core), kind)));
        plans.extend(pairs.map(|(dim, kind)| (plan(mxfp8, two, dim, core), unscaled(kind))));
        plans.extend(swapped.map(|(dim, kind)| (plan(nvfp4, swap, dim, core), kind)));
        plans.extend(swapped.map(|(dim, kind)| (plan(mxfp8, swap, dim, core), unscaled(kind))));
    }
    for fault in Fault::INJECTED {
        let (none, core) = (GroupedDim::None, TensorCore::Software(fault));
        plans.push((plan(nvfp4, one, none, core), PLAIN));
    }
    for fault in Fault::INJECTED.into_iter().chain(Fault::OF_PAIRS) {
        let (none, core) = (GroupedDim::None, TensorCore::Software(fault));
        plans.push((plan(nvfp4, two, none, core), PLAIN));
    }
    for format in BlockScaled::ALL {
        for form in Sm100Form::ALL {
            let core = TensorCore::Software(Fault::WrongScaleId);
            let other = plan(format, form, GroupedDim::None, core);
            // NVFP4 without swapped operands is instantiated above.
            if format == mxfp8 || form == swap {
                plans.push((other, unscaled(PLAIN)));
            }
        }
    }
    let mut all = Vec::new();
    for (plan, kind) in plans {
        let Sm100Plan {
            format,
            form,
            grouped,
            core,
        } = plan;
        let (architectures, expected) = match core {
            TensorCore::Instruction => (Architectures::Sm100, NO_SPILLS),
            TensorCore::Software(_) => (Architectures::Sm90a, Expected::default()),
        };
        let name = format!("{grouped:?}-{:?}-{}-{core:?}", kind.out, kind.accumulate);
        let order = match form {
            Sm100Form::OneCta => "",
            Sm100Form::TwoCta => "-two",
            Sm100Form::SwapAb => "-swapped",
        };
        let codes = |rows| {
            map(device, [rows, 32], u32::elem_type_native()).with_swizzle(TensorMapSwizzle::B128)
        };
        let scales = || map(device, [plan.atoms(), 128], u32::elem_type_native());
        let maps: Option<ScaleMapsLaunch> =
            (plan.ctas() > 1).then(|| ScaleMapsLaunch::new(scales(), scales()));
        let instance = instance!(
            device,
            units sm100_units(core),
            sm100_block_scaled_kernel,
            format!("{format:?}{order}-{name}"),
            expected,
            AddressType::U32,
            codes(128),
            codes(plan.b_rows_of_cta()),
            SwizzledScalesLaunch::new(
                device.buffer(BLOCKS),
                device.buffer(BLOCKS),
                2,
                maps.into(),
            ),
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

/// Probes with the instructions, and their software model for any GPU.
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
