//! Instances of the dequantization kernels.

use super::{
    super::proof::{
        ColumnsPlan, Grouping, PackedRowsLaunch, PackedSectorsLaunch, PackedWordsLaunch,
        ShapeLaunch, SourcePlan, WordsPlan, dequantize_col_pairs_kernel, dequantize_cols_kernel,
        dequantize_rows_kernel,
    },
    inputs::{BLOCKS, COLS, ELEMENTS, ROWS},
};
use crate::registry::instance::{DummyDevice, Expected, Instance, instance};

pub(super) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let b = |len| device.buffer(len);
    let mut all = Vec::new();
    for (dtype, address) in ELEMENTS {
        let elem = dtype.storage_type();
        let tag = format!("{dtype:?}-{address:?}");

        for (name, per_row, swizzled) in [
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
                PackedWordsLaunch::new(
                    b(BLOCKS * 2),
                    b(BLOCKS),
                    b(ROWS),
                    COLS / 8,
                    COLS / 8,
                    2688.0
                ),
                b(BLOCKS * 2),
                BLOCKS * 2,
                WordsPlan {
                    per_row,
                    swizzled,
                    kind: dtype,
                },
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
                PackedRowsLaunch::new(b(BLOCKS), b(BLOCKS), b(ROWS), ROWS / 16, 2688.0),
                b(8),
                b(ROWS * COLS),
                ShapeLaunch::new(ROWS, COLS, 2, 1),
                ROWS / 16,
                ColumnsPlan {
                    span: 16,
                    source: SourcePlan {
                        per_row,
                        swizzled,
                        grouping,
                    },
                    kind: dtype,
                },
                elem
            ));
        }
        all.push(instance!(
            device,
            dequantize_col_pairs_kernel,
            &tag,
            Expected::default(),
            address,
            PackedSectorsLaunch::new(
                b(BLOCKS / 2),
                b(BLOCKS / 4),
                b(1),
                ROWS,
                COLS,
                COLS / 16,
                2688.0
            ),
            b(ROWS * COLS / 2),
            false,
            dtype,
            elem
        ));
    }
    all
}
