//! Instances of the kernels of norms, for the registry.

use cubecl::prelude::*;

use super::{
    backward::{NormGradInputsLaunch, NormGradOutputsLaunch, norm_backward_kernel},
    forward::{NormInputsLaunch, NormOutputsLaunch, norm_kernel},
    parts::norm_parts_kernel,
    plan::{NormPlan, PLANES, Pass},
};
use crate::{
    HadamardSize,
    cube::hadamard::SignsLaunch,
    quantize::{
        amax::{AmaxOutLaunch, AmaxPlan},
        tile::Grouping,
    },
    reference::{Norm, norm_part_lanes},
    registry::instance::{DummyDevice, Expected, Instance, instance},
    tensor::{AmaxGranularity, FloatKind},
};

const ROWS: usize = 256;

/// Returns all instances that `device` uses.
pub(crate) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let b = |len| device.buffer(len);
    let signs = || SignsLaunch::new(1, 2, 3, 4);
    let mut all = Vec::new();
    all.push(instance!(
        device,
        norm_parts_kernel,
        "",
        Expected::NONE,
        AddressType::U64,
        b(64),
        b(64),
        16,
        64,
        true
    ));
    for (norm, kind, residual, cols) in shapes() {
        let [plan, backward] = [Pass::Forward, Pass::Backward]
            .map(|pass| plan((norm, pass), kind, residual, cols, device));
        let (scalar, width, factors) = plan.loads();
        let address = if cols == 768 {
            AddressType::U64
        } else {
            AddressType::U32
        };
        let variant = format!("{norm:?}-{kind:?}-{address:?}-{residual}-{cols}");
        all.push(instance!(
            device,
            norm_kernel,
            &variant,
            Expected::NONE,
            address,
            width,
            factors,
            NormInputsLaunch::new(b(64), b(64), b(64), b(64), 1e-6),
            NormOutputsLaunch::new(b(64), b(64), b(64), AmaxOutLaunch::new(b(1), b(1))),
            signs(),
            ROWS,
            cols,
            plan,
            scalar
        ));
        all.push(instance!(
            device,
            norm_backward_kernel,
            &variant,
            Expected::NONE,
            address,
            width,
            factors,
            NormGradInputsLaunch::new(b(64), b(64), b(64), b(64), b(64)),
            NormGradOutputsLaunch::new(b(64), b(64), b(64), AmaxOutLaunch::new(b(1), b(1))),
            signs(),
            ROWS,
            16,
            cols,
            backward,
            scalar
        ));
    }
    // Instances with amax values: of transformed columns and all elements, of all elements alone,
    // and of each row and each transformed column.
    let (whole, each) = (AmaxGranularity::PerTensor, AmaxGranularity::PerRow);
    let h16 = Some(HadamardSize::H16);
    for (norm, cols, hadamard, scope) in [
        (Norm::Rms, 768, h16, whole),
        (Norm::Layer, 768, h16, whole),
        (Norm::Rms, 4096, h16, whole),
        (Norm::Rms, 768, None, whole),
        (Norm::Rms, 20_480, h16, whole),
        (Norm::Layer, 768, h16, each),
        (Norm::Rms, 4096, h16, each),
        (Norm::Rms, 20_480, h16, each),
    ] {
        let residual = true;
        let name = match scope {
            AmaxGranularity::PerTensor => format!("{norm:?}-{cols}-amax-{hadamard:?}"),
            AmaxGranularity::PerRow => format!("{norm:?}-{cols}-amax-per-row-{hadamard:?}"),
        };
        let kind = FloatKind::Bf16;
        let [plan, backward] = [Pass::Forward, Pass::Backward].map(|pass| NormPlan {
            few: false,
            strips: true,
            amax: Some(AmaxPlan {
                rows: Some(scope),
                cols: hadamard.map(|_| scope),
                hadamard,
                default_signs: true,
                grouping: Grouping::One,
                elements: false,
                units: 256,
                planes: true,
                conversion: device.conversion,
                kind,
            }),
            ..plan((norm, pass), kind, residual, cols, device)
        });
        let (scalar, width, factors) = plan.loads();
        // For Blackwell ptxas spills registers of the first instance with an amax of each row.
        let forward = Expected {
            spills: (norm == Norm::Rms || scope == whole || !device.has_nearest()).then_some(false),
            ..Expected::NONE
        };
        all.push(instance!(
            device,
            norm_kernel,
            &name,
            forward,
            AddressType::U32,
            width,
            factors,
            NormInputsLaunch::new(b(64), b(64), b(64), b(64), 1e-6),
            NormOutputsLaunch::new(b(64), b(64), b(64), AmaxOutLaunch::new(b(1), b(1))),
            signs(),
            ROWS,
            cols,
            plan,
            scalar
        ));
        all.push(instance!(
            device,
            norm_backward_kernel,
            &name,
            Expected::NONE,
            AddressType::U32,
            width,
            factors,
            NormGradInputsLaunch::new(b(64), b(64), b(64), b(64), b(64)),
            NormGradOutputsLaunch::new(b(64), b(64), b(64), AmaxOutLaunch::new(b(1), b(1))),
            signs(),
            ROWS,
            16,
            cols,
            backward,
            scalar
        ));
    }
    all
}

/// Returns norm, element type, whether a residual is added, and columns. The rows take one plane,
/// two or eight planes, several blocks per unit, a tail, or are too long to be kept.
fn shapes() -> Vec<(Norm, FloatKind, bool, usize)> {
    let mut shapes = Vec::new();
    for norm in [Norm::Rms, Norm::Layer] {
        for cols in [768, 4096, 8192, 16384] {
            shapes.push((norm, FloatKind::Bf16, true, cols));
        }
        shapes.push((norm, FloatKind::Bf16, false, 4096));
        shapes.push((norm, FloatKind::F32, true, 4096));
        shapes.push((norm, FloatKind::F16, false, 250));
        shapes.push((norm, FloatKind::Bf16, true, 20_480));
    }
    shapes
}

/// Returns the plan of RMSNorm of few bf16 rows as a prologue, in cubes of `cube_planes` planes.
pub(crate) fn prologue_plan(
    device: &DummyDevice,
    cols: usize,
    residual: bool,
    cube_planes: usize,
) -> NormPlan {
    let of = (Norm::Rms, Pass::Forward);
    NormPlan {
        cube_planes,
        few: false,
        ..plan(of, FloatKind::Bf16, residual, cols, device)
    }
}

fn plan(
    (norm, pass): (Norm, Pass),
    kind: FloatKind,
    residual: bool,
    cols: usize,
    device: &DummyDevice,
) -> NormPlan {
    NormPlan {
        norm,
        residual,
        bias: norm == Norm::Layer,
        planes: pass.planes(cols),
        cube_planes: pass.planes(cols).max(PLANES),
        lanes: norm_part_lanes(cols),
        row_lanes: pass.row_lanes(),
        kept: pass.kept(cols),
        whole: cols.is_multiple_of(16),
        overlaps: pass == Pass::Forward && device.overlaps,
        few: pass == Pass::Forward && norm == Norm::Rms && cols <= 4096,
        strips: pass == Pass::Backward && cols != 4096,
        amax: None,
        kind,
        conversion: device.conversion,
    }
}
