//! Instances of the kernels of MXFP8.

use super::{
    super::kernels::{
        MxPlan, MxRowPlan, MxRowsLaunch, MxTilesLaunch, PackedRowsLaunch, mx_dequantize_col_kernel,
        mx_dequantize_row_kernel, mx_quantize_col_kernel, mx_quantize_row_kernel,
        mx_requantize_across_kernel, mx_requantize_along_kernel,
    },
    inputs::{BLOCKS, COLS, ELEMENTS, ROWS, SOURCES, packed, shape},
};
use crate::{
    format::block::ElementFormat,
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
        // All four targets convert to E4M3 themselves. The software form is for GPUs before sm_89,
        // for which Hopper stands in.
        let software = (!device.conversion.has_nearest()).then_some(false);
        for hardware in software.into_iter().chain([true]) {
            let lanes = 2 * dtype.size();
            let e4m3 = Expected {
                e4m3: Some(hardware),
                ..Expected::NONE
            };
            let tag = format!("{tag}-{hardware}");
            let mx = MxPlan {
                element: ElementFormat::E4m3,
                hardware,
                kind: dtype,
            };
            all.push(instance!(
                device,
                mx_quantize_row_kernel,
                &tag,
                e4m3,
                address,
                width,
                8 / lanes,
                b(BLOCKS),
                b(BLOCKS),
                b(BLOCKS),
                ROWS,
                COLS,
                MxRowPlan {
                    dense: true,
                    lanes,
                    mx,
                },
                elem
            ));
            for (name, plan) in SOURCES {
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
                    mx,
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
                    mx,
                    elem
                ));
            }
            for (name, dense, maxima, swizzled) in [
                ("", true, false, false),
                ("-rows", false, true, false),
                ("-swizzled", false, true, true),
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
                    MxRowsLaunch::new(ROWS, COLS, COLS / 32),
                    maxima,
                    swizzled,
                    MxRowPlan {
                        dense,
                        lanes: 2,
                        mx,
                    },
                    elem
                ));
            }
        }
    }
    all
}
