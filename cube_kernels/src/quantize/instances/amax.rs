//! Instances of the amax kernels.

use cubecl::ir::{ElemType, UIntKind};

use super::{
    super::proof::{
        AmaxOutLaunch, AmaxPlan, AmaxTilesLaunch, Grouping, PrologueOutArgs, ShapeLaunch,
        amax_kernel, amax_lines_kernel, amax_strips_kernel, amax_tiles_kernel,
    },
    inputs::{COLS, ELEMENTS, ROWS, prologue_inputs},
};
use crate::{
    cube::hadamard::SignsLaunch,
    policy::HadamardSize,
    registry::instance::{DummyDevice, Expected, Instance, instance},
    tensor::AmaxGranularity,
    zeroed::zero_kernel,
};

const PER_ROW: Option<AmaxGranularity> = Some(AmaxGranularity::PerRow);
const PER_TENSOR: Option<AmaxGranularity> = Some(AmaxGranularity::PerTensor);

pub(super) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let b = |len| device.buffer(len);
    let signs = || SignsLaunch::new(1, 2, 3, 4);
    let word = ElemType::UInt(UIntKind::U32);
    let mut all = Vec::new();
    all.push(instance!(
        device,
        zero_kernel,
        "",
        Expected::default(),
        b(64),
        64
    ));
    for (dtype, address) in ELEMENTS {
        let tag = format!("{dtype:?}-{address:?}");
        let words = ROWS * COLS * dtype.size() / 4;
        let plan = |rows, cols, hadamard| AmaxPlan {
            rows,
            cols,
            hadamard,
            default_signs: hadamard == Some(HadamardSize::H16),
            grouping: Grouping::One,
            elements: false,
            units: 256,
            planes: true,
            conversion: device.conversion,
            kind: dtype,
        };
        all.push(instance!(
            device,
            amax_kernel,
            &tag,
            Expected::default(),
            address,
            4,
            b(words / 4),
            b(1),
            words / 4,
            false,
            true,
            device.conversion,
            dtype,
            word
        ));
        for (width, hadamard, default_signs) in [
            (2, Some(HadamardSize::H16), true),
            (2, Some(HadamardSize::H16), false),
            (2, None, false),
            (1, Some(HadamardSize::H16), true),
        ] {
            all.push(instance!(
                device,
                amax_strips_kernel,
                format!("{tag}-{hadamard:?}-{default_signs}-{width}"),
                Expected::NONE,
                address,
                width,
                b(words / width),
                AmaxOutLaunch::new(b(1), b(1)),
                signs(),
                ROWS,
                COLS * dtype.size() / (4 * width),
                AmaxPlan {
                    default_signs,
                    ..plan(PER_TENSOR, PER_TENSOR, hadamard)
                }
            ));
        }
        for (width, hadamard, rows, cols) in [
            (1, Some(HadamardSize::H16), PER_ROW, PER_ROW),
            (1, None, None, PER_ROW),
            (2, Some(HadamardSize::H16), PER_ROW, PER_TENSOR),
        ] {
            all.push(instance!(
                device,
                amax_lines_kernel,
                format!("{tag}-{hadamard:?}-{}-{width}", rows.is_some()),
                Expected::NONE,
                address,
                width,
                b(words / width),
                AmaxOutLaunch::new(b(ROWS), b(COLS)),
                signs(),
                ROWS,
                COLS * dtype.size() / (4 * width),
                plan(rows, cols, hadamard)
            ));
        }
        for (hadamard, grouping, computed) in [
            (None, Grouping::Offsets(16), "Plain"),
            (Some(HadamardSize::H16), Grouping::One, "Plain"),
            (Some(HadamardSize::H128), Grouping::Batch, "Plain"),
            (Some(HadamardSize::H16), Grouping::Offsets(16), "SwiGlu"),
            (Some(HadamardSize::H16), Grouping::One, "SwiGluBackward"),
            (Some(HadamardSize::H16), Grouping::Offsets(16), "Gather"),
        ] {
            let written = match computed {
                "SwiGlu" | "SwiGluBackward" | "Gather" => PrologueOutArgs::Matrix(b(words / 4)),
                _ => PrologueOutArgs::None,
            };
            all.push(instance!(
                device,
                amax_tiles_kernel,
                format!("{tag}-{hadamard:?}-{computed}"),
                Expected::default(),
                address,
                4,
                b(words / 4),
                prologue_inputs(device, computed),
                written,
                AmaxTilesLaunch::new(b(4), ShapeLaunch::new(ROWS, COLS, 2, 4), 2),
                AmaxOutLaunch::new(b(1), b(1)),
                signs(),
                AmaxPlan {
                    grouping,
                    ..plan(PER_TENSOR, PER_ROW, hadamard)
                },
                word
            ));
        }
    }
    all
}
