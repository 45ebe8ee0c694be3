//! Instances of the kernels that dequantize.

use super::{
    super::kernels::{
        Grouping, ShapeLaunch, SourcePlan, dequantize_col_pairs_kernel, dequantize_cols_kernel,
        dequantize_rows_kernel,
    },
    BLOCKS, COLS, ELEMENTS, ROWS,
};
use crate::registry::{DummyDevice, Expected, Instance, instance};

pub(super) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let b = |len| device.buffer(len);
    let mut all = Vec::new();
    for (dtype, address) in ELEMENTS {
        let elem = dtype.storage_type();
        let tag = format!("{dtype:?}-{address:?}");

        for (name, maxima, swizzled) in [
            ("", false, false),
            ("-rows", true, false),
            ("-swizzled", true, true),
        ] {
            all.push(instance!(
                device,
                dequantize_rows_kernel,
                format!("{tag}{name}"),
                Expected::default(),
                address,
                b(BLOCKS * 2),
                b(BLOCKS),
                b(ROWS),
                b(BLOCKS * 2),
                BLOCKS * 2,
                COLS / 8,
                COLS / 8,
                2688.0,
                maxima,
                swizzled,
                dtype,
                elem
            ));
        }
        for (name, per_row, swizzled, grouping) in [
            ("", true, false, Grouping::One),
            ("-groups", false, false, Grouping::Offsets(16)),
            ("-batch", true, true, Grouping::Batch),
        ] {
            all.push(instance!(
                device,
                dequantize_cols_kernel,
                format!("{tag}{name}"),
                Expected::default(),
                address,
                b(BLOCKS),
                b(BLOCKS),
                b(ROWS),
                b(8),
                b(ROWS * COLS),
                ShapeLaunch::new(ROWS, COLS, 2, 1),
                ROWS / 16,
                ROWS / 16,
                2688.0,
                16,
                SourcePlan {
                    per_row,
                    swizzled,
                    grouping,
                },
                dtype,
                elem
            ));
        }
        all.push(instance!(
            device,
            dequantize_col_pairs_kernel,
            &tag,
            Expected::default(),
            address,
            b(BLOCKS / 2),
            b(BLOCKS / 4),
            b(1),
            b(ROWS * COLS / 2),
            ROWS,
            COLS,
            COLS / 16,
            2688.0f32,
            false,
            dtype,
            elem
        ));
    }
    all
}
