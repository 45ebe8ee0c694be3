//! Instances of the MXFP8 kernels.

use super::{
    super::proof::{
        MxPlan, MxRowPlan, MxRowsLaunch, MxTilesLaunch, PackedRowsLaunch, mx_dequantize_col_kernel,
        mx_dequantize_row_kernel, mx_quantize_col_kernel, mx_quantize_row_kernel,
        mx_requantize_across_kernel, mx_requantize_along_kernel,
    },
    inputs::{BLOCKS, COLS, ELEMENTS, PLAIN, ROWS, SOURCES, packed, shape},
};
use crate::{
    format::block::ElementFormat,
    quantize::proof::{Grouping, SourcePlan},
    registry::instance::{DummyDevice, Expected, Instance, instance},
};

pub(super) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let b = |len| device.buffer(len);
    let mut all = Vec::new();
    for (dtype, address) in ELEMENTS {
        let (width, elem) = (16 / dtype.size(), dtype.storage_type());
        let tag = format!("{dtype:?}-{address:?}");
        all.push(instance!(
            device,
            mx_dequantize_row_kernel,
            &tag,
            Expected::NONE,
            address,
            width,
            b(BLOCKS),
            b(BLOCKS),
            b(BLOCKS),
            ROWS,
            COLS,
            ElementFormat::E4m3,
            dtype,
            elem
        ));
        all.push(instance!(
            device,
            mx_dequantize_col_kernel,
            &tag,
            Expected::NONE,
            address,
            width,
            b(BLOCKS),
            b(BLOCKS),
            b(BLOCKS),
            ROWS,
            COLS,
            ElementFormat::E4m3,
            dtype,
            elem
        ));
        // All four targets have conversion instructions to E4M3. The software form is for GPUs
        // before sm_89; it is compiled for Hopper instead.
        let software = (!device.conversion.has_nearest()).then_some(false);
        for hardware in software.into_iter().chain([true]) {
            let lanes = 2 * dtype.size();
            let e4m3 = Expected {
                e4m3: Some(hardware),
                ..Expected::NONE
            };
            let tag = format!("{tag}-{hardware}");
            let mx = |swizzled| MxPlan {
                element: ElementFormat::E4m3,
                hardware,
                kind: dtype,
                swizzled,
            };
            let rows = || MxRowsLaunch::new(b(8), shape(), 2, COLS / 32);
            for (name, tiles) in [
                ("", None),
                ("-tiles", Some(Grouping::One)),
                ("-tiles-groups", Some(Grouping::Offsets(16))),
            ] {
                all.push(instance!(
                    device,
                    mx_quantize_row_kernel,
                    format!("{tag}{name}"),
                    e4m3,
                    address,
                    width,
                    8 / lanes,
                    b(BLOCKS),
                    b(BLOCKS),
                    b(BLOCKS),
                    rows(),
                    MxRowPlan {
                        dense: true,
                        lanes,
                        tiles,
                        mx: mx(tiles.is_some()),
                    },
                    elem
                ));
            }
            let [_, (_, groups), (_, batch)] = SOURCES;
            let tiled = [("-tiles-groups", groups), ("-tiles-batch", batch)];
            let to_rows = SOURCES.map(|(name, plan)| (name, plan, false));
            let to_tiles = tiled.map(|(name, plan)| (name, plan, true));
            for (name, plan, swizzled) in to_rows.into_iter().chain(to_tiles) {
                all.push(instance!(
                    device,
                    mx_quantize_col_kernel,
                    format!("{tag}{name}"),
                    e4m3,
                    address,
                    width,
                    b(BLOCKS),
                    b(BLOCKS),
                    b(BLOCKS),
                    MxTilesLaunch::new(b(8), shape(), 2, 8, 1),
                    plan.grouping,
                    mx(swizzled),
                    elem
                ));
                all.push(instance!(
                    device,
                    mx_requantize_across_kernel,
                    format!("{tag}{name}"),
                    e4m3,
                    address,
                    width,
                    packed(device),
                    b(BLOCKS),
                    b(BLOCKS),
                    MxTilesLaunch::new(b(8), shape(), 2, 8, 1),
                    plan,
                    mx(swizzled),
                    elem
                ));
            }
            let by_row = SourcePlan {
                per_row: true,
                ..PLAIN
            };
            let tiled = SourcePlan {
                swizzled: true,
                grouping: Grouping::Offsets(16),
                ..by_row
            };
            for (name, dense, from, swizzled) in [
                ("", true, PLAIN, false),
                ("-rows", false, by_row, false),
                ("-swizzled", false, tiled, false),
                ("-tiles", false, tiled, true),
            ] {
                all.push(instance!(
                    device,
                    mx_requantize_along_kernel,
                    format!("{tag}{name}"),
                    e4m3,
                    address,
                    4,
                    PackedRowsLaunch::new(b(BLOCKS), b(BLOCKS), b(ROWS), COLS / 16, 2688.0),
                    b(BLOCKS),
                    b(BLOCKS),
                    rows(),
                    from,
                    MxRowPlan {
                        dense,
                        lanes: 2,
                        tiles: from.swizzled.then_some(from.grouping),
                        mx: mx(swizzled),
                    },
                    elem
                ));
            }
        }
    }
    all
}
