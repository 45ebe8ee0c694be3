//! Instances of the kernels that convert scales between layouts.

use cubecl::prelude::*;

use super::{
    super::proof::{ScaleShapeLaunch, swizzle_kernel, unswizzle_kernel},
    inputs::{BLOCKS, COLS, ROWS},
};
use crate::{
    moe::groups::GroupRowsLaunch,
    registry::instance::{DummyDevice, Expected, Instance, instance},
};

pub(super) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let b = |len| device.buffer(len);
    let mut all = Vec::new();
    for address in [AddressType::U32, AddressType::U64] {
        let tag = format!("{address:?}");
        for grouped in [false, true] {
            for (width, wide) in [(4, true), (2, true), (1, true), (1, false)] {
                let tag = format!("{tag}-{width}-{wide}-{grouped}");
                let groups = || GroupRowsLaunch::new(b(9), b(9), 8);
                let scales = || ScaleShapeLaunch::new(ROWS, ROWS, COLS, 2, BLOCKS);
                all.push(instance!(
                    device,
                    swizzle_kernel,
                    &tag,
                    Expected::NONE,
                    address,
                    width,
                    b(BLOCKS),
                    b(BLOCKS),
                    groups(),
                    b(BLOCKS),
                    scales(),
                    wide,
                    grouped,
                ));
                all.push(instance!(
                    device,
                    unswizzle_kernel,
                    &tag,
                    Expected::NONE,
                    address,
                    width,
                    b(BLOCKS),
                    groups(),
                    b(BLOCKS),
                    b(BLOCKS),
                    scales(),
                    wide,
                    grouped,
                ));
            }
        }
    }
    all
}
