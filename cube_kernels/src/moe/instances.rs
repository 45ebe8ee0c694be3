//! Instances of the kernels of mixture of experts, for the registry.

use cubecl::prelude::*;

use super::{
    groups::{GroupRowsLaunch, rescale_kernel},
    padding::{MovePlan, move_groups_kernel},
    permute::{
        UnpermuteBackwardPlan, UnpermutePlan, WeightedRowsLaunch, moe_permute_kernel,
        moe_unpermute_backward_kernel, moe_unpermute_kernel,
    },
    router::kernel::{
        RoutedArgsLaunch, RouterArgsLaunch, RouterOutLaunch, RouterPlan, RouterSumsLaunch,
        SortedKeysLaunch, choice_places_kernel, route_backward_kernel, route_kernel,
        route_sums_kernel,
    },
    segments::{
        broadcast_group_values_kernel, part_sums_kernel, segment_sum_kernel,
        zero_padding_rows_kernel,
    },
    window::{ChoiceWindowLaunch, window_places_kernel},
};
use crate::{
    registry::instance::{DummyDevice, Expected, Instance, instance},
    tensor::FloatKind,
};

/// Shape of the matrices. Nothing is launched, so buffer lengths do not matter.
const ROWS: usize = 256;
const COLS: usize = 256;
const BLOCKS: usize = ROWS * COLS / 16;

/// Returns all instances that `device` uses.
pub(crate) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let b = |len| device.buffer(len);
    let mut all = router(device);
    all.push(instance!(
        device,
        rescale_kernel,
        "",
        Expected::NONE,
        b(9),
        b(9),
        8,
        256,
        16,
        16,
        256
    ));
    all.push(instance!(
        device,
        broadcast_group_values_kernel,
        "",
        Expected::NONE,
        b(8),
        b(9),
        b(ROWS),
        ROWS,
        8
    ));
    for kind in [FloatKind::F32, FloatKind::F16, FloatKind::Bf16] {
        let (tag, wide, elem) = (format!("{kind:?}"), AddressType::U64, kind.storage_type());
        all.push(instance!(
            device,
            segment_sum_kernel,
            &tag,
            Expected::NONE,
            wide,
            b(BLOCKS),
            b(9),
            b(BLOCKS),
            ROWS,
            COLS,
            8,
            kind,
            elem
        ));
        all.push(instance!(
            device,
            part_sums_kernel,
            &tag,
            Expected::NONE,
            wide,
            b(BLOCKS),
            b(BLOCKS),
            ROWS,
            COLS,
            8,
            kind,
            elem
        ));
        all.push(instance!(
            device,
            zero_padding_rows_kernel,
            &tag,
            Expected::NONE,
            wide,
            b(9),
            b(BLOCKS),
            ROWS,
            COLS,
            8,
            kind,
            elem
        ));
        for (address, width) in [(AddressType::U32, 4), (AddressType::U64, 1)] {
            for weighted in [false, true] {
                all.push(instance!(
                    device,
                    moe_unpermute_kernel,
                    format!("{tag}-{address:?}-{width}-{weighted}"),
                    Expected::NONE,
                    address,
                    width,
                    b(BLOCKS),
                    WeightedRowsLaunch::new(b(BLOCKS), b(BLOCKS), 2),
                    b(BLOCKS),
                    ROWS,
                    ROWS,
                    COLS,
                    UnpermutePlan {
                        weighted,
                        kind,
                        conversion: device.conversion,
                    }
                ));
            }
            all.push(instance!(
                device,
                moe_unpermute_backward_kernel,
                format!("{tag}-{address:?}-{width}"),
                Expected::NONE,
                address,
                width,
                b(BLOCKS),
                b(BLOCKS),
                WeightedRowsLaunch::new(b(BLOCKS), b(BLOCKS), 2),
                b(BLOCKS),
                b(BLOCKS),
                ROWS,
                COLS,
                UnpermuteBackwardPlan {
                    planes: true,
                    kind,
                    conversion: device.conversion,
                }
            ));
        }
    }
    for (address, width) in [(AddressType::U32, 4), (AddressType::U64, 1)] {
        all.push(instance!(
            device,
            moe_permute_kernel,
            format!("{address:?}-{width}"),
            Expected::NONE,
            address,
            width,
            b(BLOCKS),
            b(ROWS),
            b(BLOCKS),
            ROWS,
            ROWS,
            COLS
        ));
    }
    for address in [AddressType::U32, AddressType::U64] {
        for (width, storage) in [
            (4, u32::elem_type_native()),
            (8, FloatKind::Bf16.storage_type()),
        ] {
            for plan in [MovePlan::Unpad, MovePlan::Pad, MovePlan::PadOnly] {
                let tag = format!("{address:?}-{storage:?}-{plan:?}");
                all.push(instance!(
                    device,
                    move_groups_kernel,
                    &tag,
                    Expected::NONE,
                    address,
                    width,
                    b(BLOCKS),
                    GroupRowsLaunch::new(b(9), b(9), 8),
                    b(BLOCKS),
                    ROWS,
                    ROWS,
                    COLS,
                    plan,
                    storage
                ));
            }
        }
    }
    all
}

/// Returns the kernels of the router, with few experts and with the maximum.
fn router(device: &DummyDevice) -> Vec<Instance> {
    let b = |len| device.buffer(len);
    let args = || RouterArgsLaunch::new(ROWS, 16, 2, 1.0, 1.0, 1.0);
    let sums = || RouterSumsLaunch::new(b(BLOCKS), b(BLOCKS));
    let sorted = || SortedKeysLaunch::new(b(ROWS), b(ROWS));
    let mut all = vec![
        instance!(
            device,
            choice_places_kernel,
            "",
            Expected::NONE,
            sorted(),
            b(ROWS),
            b(17),
            b(16),
            ROWS,
            16
        ),
        instance!(
            device,
            window_places_kernel,
            "",
            Expected::NONE,
            sorted(),
            ChoiceWindowLaunch::new(b(ROWS), b(ROWS), b(9), b(5), b(16)),
            ROWS,
            16,
            8,
            8,
            256
        ),
    ];
    let plans = [
        (1, true, false),
        (1, false, false),
        (16, true, false),
        (1, false, true),
    ];
    for (per_lane, normalizes, losses_only) in plans {
        let plan = RouterPlan {
            per_lane,
            planes: true,
            normalizes,
            losses_only,
            conversion: device.conversion,
        };
        let tag = format!("{per_lane}-{normalizes}-{losses_only}");
        all.push(instance!(
            device,
            route_kernel,
            &tag,
            Expected::NONE,
            b(BLOCKS),
            RouterOutLaunch::new(b(ROWS), b(ROWS)),
            sums(),
            args(),
            plan
        ));
        all.push(instance!(
            device,
            route_sums_kernel,
            &tag,
            Expected::NONE,
            sums(),
            b(16),
            b(ROWS),
            args(),
            plan
        ));
        all.push(instance!(
            device,
            route_backward_kernel,
            &tag,
            Expected::NONE,
            b(BLOCKS),
            RoutedArgsLaunch::new(b(ROWS), b(ROWS), b(ROWS), b(16)),
            b(BLOCKS),
            args(),
            plan
        ));
    }
    all
}
