//! Instances of the kernels of MS-EDEN.

use cubecl::prelude::*;

use super::{
    super::kernels::{
        EdenDrawLaunch, EdenInputsLaunch, EdenOutLaunch, EdenPolicy, EdenScalesArgs,
        EdenSignsLaunch, EdenStoredArgs, EdenTilesLaunch, SourcePlan, ms_eden_amax_kernel,
        ms_eden_kernel,
    },
    inputs::{BLOCKS, ELEMENTS, PLAIN, SOURCES, packed, shape},
};
use crate::{
    cube::{hadamard::SignsLaunch, philox::RandomLaunch},
    registry::instance::{DummyDevice, Expected, Instance, instance},
    tensor::FloatKind,
};

pub(super) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let b = |len| device.buffer(len);
    let random = || RandomLaunch::new(1, 2, 3, 4);
    let signs = || EdenSignsLaunch::new(SignsLaunch::new(1, 2, 3, 4), b(2));
    let e2m1 = Expected {
        e2m1_rn: Some(device.has_nearest()),
        ..Expected::NONE
    };
    let tiles = || EdenTilesLaunch::new(b(8), shape(), 16, 16);
    let out = |swizzled: bool| {
        let scales = match swizzled {
            true => EdenScalesArgs::Swizzled(b(BLOCKS)),
            false => EdenScalesArgs::Compact(b(BLOCKS)),
        };
        EdenOutLaunch::new(b(BLOCKS), scales, b(8))
    };
    let policy = |across, source, swizzled| EdenPolicy {
        across,
        source,
        swizzled,
        device_offset: across,
        redrawn_signs: across,
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
            let tag = format!("packed-{address:?}-{across}{name}");
            all.push(instance!(
                device,
                ms_eden_amax_kernel,
                &tag,
                Expected::NONE,
                address,
                1,
                EdenStoredArgs::Packed(packed(device)),
                tiles(),
                b(8),
                signs(),
                policy,
                FloatKind::F32,
                FloatKind::F32.storage_type()
            ));
            all.push(instance!(
                device,
                ms_eden_kernel,
                &tag,
                e2m1,
                address,
                1,
                EdenStoredArgs::Packed(packed(device)),
                tiles(),
                EdenInputsLaunch::new(b(8), 1.0, 1.0),
                out(swizzled),
                EdenDrawLaunch::new(b(2), random(), signs()),
                policy,
                FloatKind::F32,
                FloatKind::F32.storage_type()
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
                Expected::NONE,
                address,
                width,
                EdenStoredArgs::Matrix(b(BLOCKS)),
                tiles(),
                b(8),
                signs(),
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
                EdenStoredArgs::Matrix(b(BLOCKS)),
                tiles(),
                EdenInputsLaunch::new(b(8), 1.0, 1.0),
                out(swizzled),
                EdenDrawLaunch::new(b(2), random(), signs()),
                policy,
                dtype,
                elem
            ));
        }
    }
    all
}
