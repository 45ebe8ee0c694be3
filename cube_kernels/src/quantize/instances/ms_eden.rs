//! Instances of the kernels of MS-EDEN.

use cubecl::prelude::*;

use super::{
    super::kernels::{
        EdenPolicy, SourcePlan, ms_eden_amax_kernel, ms_eden_amax_packed_kernel, ms_eden_kernel,
        ms_eden_packed_kernel,
    },
    BLOCKS, ELEMENTS, NONE, PLAIN, SOURCES, packed, shape,
};
use crate::{
    cube::{eden::SignsLaunch, philox::RandomLaunch},
    registry::{DummyDevice, Expected, Instance, instance},
};

pub(super) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let b = |len| device.buffer(len);
    let random = || RandomLaunch::new(1, 2, 3, 4);
    let signs = || SignsLaunch::new(1, 2, 3, 4);
    let e2m1 = Expected {
        e2m1_rn: Some(device.has_nearest()),
        ..NONE
    };
    // Scales that are stored together: a tile of 128x4 has four blocks of a row.
    let words_of_scales = |swizzled: bool| if swizzled { 1 } else { 2 };
    let policy = |across, source, swizzled| EdenPolicy {
        across,
        source,
        swizzled,
        device_offset: across,
        cuda: true,
        conversion: device.conversion,
    };
    let both = [false, true]
        .into_iter()
        .flat_map(|across| SOURCES.map(|(name, source)| (across, name, source)));
    let mut all = Vec::new();
    for address in [AddressType::U32, AddressType::U64] {
        for (across, name, source) in both.clone() {
            let swizzled = source.swizzled;
            let policy = policy(across, source, swizzled);
            let tag = format!("{address:?}-{across}{name}");
            all.push(instance!(
                device,
                ms_eden_amax_packed_kernel,
                &tag,
                NONE,
                address,
                packed(device),
                b(8),
                b(8),
                signs(),
                shape(),
                16,
                policy
            ));
            all.push(instance!(
                device,
                ms_eden_packed_kernel,
                &tag,
                e2m1,
                address,
                words_of_scales(swizzled),
                packed(device),
                b(8),
                b(8),
                b(BLOCKS),
                b(BLOCKS),
                b(8),
                b(2),
                random(),
                signs(),
                shape(),
                16,
                16,
                1.0,
                1.0,
                policy
            ));
        }
    }
    for (dtype, address) in ELEMENTS {
        let (width, elem) = (16 / dtype.size(), dtype.storage_type());
        for (across, name, source) in both.clone() {
            let swizzled = source.swizzled;
            // A matrix has neither amax values nor scales.
            let source = SourcePlan {
                grouping: source.grouping,
                ..PLAIN
            };
            let policy = policy(across, source, swizzled);
            let tag = format!("{dtype:?}-{address:?}-{across}{name}");
            all.push(instance!(
                device,
                ms_eden_amax_kernel,
                &tag,
                NONE,
                address,
                width,
                b(BLOCKS),
                b(8),
                b(8),
                signs(),
                shape(),
                16,
                policy,
                dtype,
                elem
            ));
            all.push(instance!(
                device,
                ms_eden_kernel,
                &tag,
                e2m1,
                address,
                width,
                words_of_scales(swizzled),
                b(BLOCKS),
                b(8),
                b(8),
                b(BLOCKS),
                b(BLOCKS),
                b(8),
                b(2),
                random(),
                signs(),
                shape(),
                16,
                16,
                1.0,
                1.0,
                policy,
                dtype,
                elem
            ));
        }
    }
    all
}
