//! Instances of the NVFP4 quantization kernels.

use cubecl::ir::{ElemType, UIntKind};

use super::{
    super::proof::{
        DrawLaunch, Grouping, PackedOutLaunch, PerTokenPlan, QuantOutArgs, QuantPlan,
        QuantTargetLaunch, RowGroupsLaunch, RowPlan, ShapeLaunch, TileGridLaunch, TilePlan,
        TokenRowsLaunch, map_tiles_kernel, quantize_per_token_kernel, quantize_row_kernel,
        quantize_tiles_kernel,
    },
    inputs::{BLOCKS, COLS, ELEMENTS, ROWS},
};
use crate::{
    cube::{
        block::BlockPlan,
        hadamard::SignsLaunch,
        philox::{Numbering, PositionLaunch, RandomLaunch},
    },
    policy::{BlockScaling, ErrorNorm, HadamardSize},
    registry::instance::{DummyDevice, Expected, Instance, instance},
};

/// Expected conversion instructions to E2M1, to nearest and stochastic.
fn e2m1(nearest: bool, stochastic: bool) -> Expected {
    Expected {
        e2m1_rn: Some(nearest),
        e2m1_rs: Some(stochastic),
        ..Expected::default()
    }
}

pub(super) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let b = |len| device.buffer(len);
    let random = || RandomLaunch::of([1, 2], 3 << 32 | 4);
    let signs = || SignsLaunch::new(1, 2, 3, 4);
    let word = ElemType::UInt(UIntKind::U32);
    let mut all = Vec::new();
    all.push(instance!(
        device,
        map_tiles_kernel,
        "",
        Expected::default(),
        b(3),
        b(8),
        ShapeLaunch::new(ROWS, COLS, 2, 4),
        4,
        16,
        Grouping::Offsets(16)
    ));
    for (dtype, address) in ELEMENTS {
        let tag = format!("{dtype:?}-{address:?}");
        let words = ROWS * COLS * dtype.size() / 4;
        let copy = |stochastic, device_offset, scaling, hadamard| QuantPlan {
            policy: BlockPlan {
                stochastic,
                device_offset,
                numbering: match device_offset {
                    true => Numbering::RowGaps,
                    false => Numbering::Own,
                },
                scaling,
                conversion: device.conversion,
            },
            hadamard,
            default_signs: hadamard == Some(HadamardSize::H16) && !device_offset,
            swizzled: device_offset,
            whole_tiles: false,
            per_row: hadamard.is_some() && device_offset,
            unscaled: false,
        };
        let standard = BlockScaling::Standard;
        let four_over_six = BlockScaling::FourOverSix(ErrorNorm::Mse);
        let conversions = |plans: &[QuantPlan]| {
            let stochastic = |plan: &QuantPlan| plan.policy.stochastic;
            e2m1(
                plans.iter().any(|plan| !stochastic(plan)) && device.has_nearest(),
                plans.iter().any(stochastic) && device.has_stochastic(),
            )
        };
        let values = |plan| QuantPlan {
            unscaled: true,
            ..plan
        };
        let draw = || {
            DrawLaunch::new(
                b(2),
                random(),
                PositionLaunch::new(1, 2, 32, 1, 2, 3, 4),
                b(1),
                signs(),
            )
        };
        let packed_out = || QuantOutArgs::Packed(PackedOutLaunch::new(b(BLOCKS), b(BLOCKS)));
        let target = |plan: Option<QuantPlan>| {
            let out = match plan {
                None => QuantOutArgs::Absent,
                Some(plan) if plan.unscaled => QuantOutArgs::Bf16Unscaled(b(BLOCKS)),
                Some(_) => packed_out(),
            };
            QuantTargetLaunch::new(b(8), draw(), out)
        };
        let row_plans = [
            copy(false, false, standard, None),
            copy(true, false, standard, None),
            copy(true, true, BlockScaling::Headroom, None),
            copy(false, false, four_over_six, None),
            values(copy(false, false, standard, None)),
        ];
        let alone = row_plans.into_iter().enumerate();
        let alone = alone.map(|(i, plan)| (i, plan, false, false));
        let others = [
            (5, row_plans[0], true, false),
            (6, row_plans[1], true, false),
            (7, row_plans[0], false, true),
            (8, row_plans[1], false, true),
            (9, row_plans[3], false, true),
        ];
        for (i, plan, find_groups, with_values) in alone.chain(others) {
            let values = match with_values {
                true => QuantOutArgs::Bf16Unscaled(b(BLOCKS)),
                false => QuantOutArgs::Absent,
            };
            all.push(instance!(
                device,
                quantize_row_kernel,
                format!("{tag}-{i}"),
                conversions(&[plan]),
                address,
                4,
                b(words / 4),
                target(Some(plan)),
                values,
                RowGroupsLaunch::new(b(9), 8),
                ROWS,
                COLS / 16,
                RowPlan {
                    quant: plan,
                    across: 2,
                    whole_tiles: true,
                    find_groups,
                    with_values,
                    kind: dtype,
                }
            ));
        }
        for (i, plan) in [(0, row_plans[0]), (1, row_plans[2])] {
            all.push(instance!(
                device,
                quantize_per_token_kernel,
                format!("{tag}-{i}-Plain"),
                conversions(&[plan]),
                address,
                4,
                b(words / 4),
                b(ROWS),
                packed_out(),
                draw(),
                TokenRowsLaunch::new(ROWS, ROWS, COLS / 16),
                PerTokenPlan {
                    quant: plan,
                    kept_blocks: 4,
                    planes: true,
                    kind: dtype,
                }
            ));
        }
        let h16 = Some(HadamardSize::H16);
        let tile_plans = [
            (
                Some(row_plans[0]),
                Some(copy(true, false, standard, h16)),
                false,
            ),
            (
                None,
                Some(QuantPlan {
                    whole_tiles: true,
                    ..copy(true, true, standard, h16)
                }),
                false,
            ),
            (
                None,
                Some(copy(false, false, standard, Some(HadamardSize::H128))),
                false,
            ),
            (Some(row_plans[0]), Some(row_plans[0]), true),
            (Some(row_plans[3]), Some(row_plans[3]), true),
            (Some(row_plans[0]), Some(row_plans[0]), false),
            (
                Some(row_plans[0]),
                Some(copy(true, false, standard, h16)),
                false,
            ),
            (Some(row_plans[0]), None, true),
            (None, Some(row_plans[0]), true),
        ];
        let per_row = |plan| QuantPlan {
            per_row: true,
            ..plan
        };
        let further_plans = [
            (
                Some(per_row(row_plans[0])),
                Some(per_row(copy(true, false, standard, h16))),
                false,
            ),
            (
                Some(row_plans[4]),
                Some(copy(false, false, standard, h16)),
                false,
            ),
            (
                Some(values(row_plans[1])),
                Some(values(copy(true, false, standard, h16))),
                false,
            ),
        ];
        let plans = tile_plans.into_iter().chain(further_plans).enumerate();
        for (i, (row, col, tiles)) in plans {
            // With a scale for the whole tile, the codes of four over six need no errors.
            let expected = if tiles {
                e2m1(device.has_nearest(), false)
            } else {
                conversions(&row.into_iter().chain(col).collect::<Vec<_>>())
            };
            all.push(instance!(
                device,
                quantize_tiles_kernel,
                format!("{tag}-{i}-Plain"),
                expected,
                address,
                4,
                b(words / 4),
                TileGridLaunch::new(b(4), ShapeLaunch::new(ROWS, COLS, 2, 4), 4usize, BLOCKS,),
                target(row),
                target(col),
                TilePlan {
                    row,
                    col,
                    tiles,
                    side_by_side: i == 0 && !tiles,
                    grouping: if i == 0 {
                        Grouping::Offsets(16)
                    } else {
                        Grouping::One
                    },
                    elements: false,
                    units: 256,
                    kind: dtype,
                },
                word
            ));
        }
    }
    all
}
