//! Instances of the kernels of MS-EDEN.

use cubecl::prelude::*;

use super::{
    super::kernels::{
        EdenDrawLaunch, EdenInputsLaunch, EdenOutLaunch, EdenPackedLaunch, EdenPolicy,
        EdenScalesArgs, EdenScreenLaunch, EdenSignsLaunch, EdenStoredArgs, EdenTilesLaunch,
        EdenValuesArgs, Grouping, ScreenOutLaunch, ScreenPlan, SourcePlan, ms_eden_amax_kernel,
        ms_eden_kernel, ms_eden_screen_kernel,
    },
    inputs::{BLOCKS, ELEMENTS, PLAIN, SOURCES, packed, shape},
};
use crate::{
    ScaleLayout,
    cube::{
        hadamard::SignsLaunch,
        philox::{Numbering, PositionLaunch, RandomLaunch},
    },
    quantize::EdenForm,
    registry::instance::{DummyDevice, Expected, Instance, instance},
    tensor::FloatKind,
};

pub(super) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let b = |len| device.buffer(len);
    let random = || RandomLaunch::new(1, 2, 3, 4);
    let signs = || EdenSignsLaunch::new(SignsLaunch::new(1, 2, 3, 4), b(2));
    let e2m1 = Expected {
        e2m1_rn: Some(device.has_nearest()),
        e4m3: Some(device.conversion.has_e4m3()),
        ..Expected::NONE
    };
    let screen = || EdenScreenLaunch::new(b(1), b(64));
    let tiles = || EdenTilesLaunch::new(b(8), shape(), 16, 16);
    let out = |form: EdenForm| {
        let packed = |scales| EdenValuesArgs::Packed(EdenPackedLaunch::new(b(BLOCKS), scales));
        let values = match form {
            EdenForm::Packed(ScaleLayout::Compact) => packed(EdenScalesArgs::Compact(b(BLOCKS))),
            EdenForm::Packed(_) => packed(EdenScalesArgs::Swizzled(b(BLOCKS))),
            EdenForm::Bf16Unscaled => EdenValuesArgs::Bf16Unscaled(b(BLOCKS)),
        };
        EdenOutLaunch::new(values, b(8))
    };
    let policy = |across, packed, words, source: SourcePlan, form| EdenPolicy {
        across,
        packed,
        words,
        source,
        swizzled: form == EdenForm::Packed(ScaleLayout::Swizzled128x4),
        device_offset: across,
        numbering: match across && source.grouping == Grouping::One {
            true => Numbering::BlockGaps,
            false => Numbering::Own,
        },
        redrawn_signs: across,
        unscaled: form == EdenForm::Bf16Unscaled,
        screened: !packed && source.grouping == Grouping::One,
        conversion: device.conversion,
    };
    let both = [false, true]
        .into_iter()
        .flat_map(|across| SOURCES.map(|(name, source)| (across, name, source)));
    let mut all = Vec::new();
    for address in [AddressType::U32, AddressType::U64] {
        for (across, name, source) in both.clone() {
            let (form, others) = forms(source);
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
                screen(),
                b(8),
                signs(),
                policy(across, true, false, source, form),
                FloatKind::F32,
                FloatKind::F32.storage_type()
            ));
            for (suffix, form) in [("", form)].into_iter().chain(others) {
                all.push(instance!(
                    device,
                    ms_eden_kernel,
                    format!("{tag}{suffix}"),
                    e2m1,
                    address,
                    1,
                    EdenStoredArgs::Packed(packed(device)),
                    tiles(),
                    EdenInputsLaunch::new(b(8), 1.0, 1.0),
                    out(form),
                    EdenDrawLaunch::new(
                        b(2),
                        random(),
                        PositionLaunch::new(1, 2, 4, 1, 2, 3, 4),
                        b(1),
                        signs()
                    ),
                    policy(across, true, false, source, form),
                    FloatKind::F32,
                    FloatKind::F32.storage_type()
                ));
            }
        }
    }
    for (dtype, address) in ELEMENTS {
        for (across, name, source) in both.clone() {
            let (form, others) = forms(source);
            // A matrix has neither amax values nor scales.
            let source = SourcePlan {
                grouping: source.grouping,
                ..PLAIN
            };
            // As a plane loads columns.
            let load = |words: bool| match (across, words) {
                (true, true) => (1, u32::elem_type_native()),
                (true, false) => (2, dtype.storage_type()),
                (false, true) => (4, u32::elem_type_native()),
                (false, false) => (16 / dtype.size(), dtype.storage_type()),
            };
            let words = dtype.size() == 2;
            let (width, elem) = load(words);
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
                screen(),
                b(8),
                signs(),
                policy(across, false, words, source, form),
                dtype,
                elem
            ));
            for (suffix, form) in [("", form)].into_iter().chain(others) {
                let words = words && (across || form == EdenForm::Bf16Unscaled);
                let (width, elem) = load(words);
                all.push(instance!(
                    device,
                    ms_eden_kernel,
                    format!("{tag}{suffix}"),
                    e2m1,
                    address,
                    width,
                    EdenStoredArgs::Matrix(b(BLOCKS)),
                    tiles(),
                    EdenInputsLaunch::new(b(8), 1.0, 1.0),
                    out(form),
                    EdenDrawLaunch::new(
                        b(2),
                        random(),
                        PositionLaunch::new(1, 2, 4, 1, 2, 3, 4),
                        b(1),
                        signs()
                    ),
                    policy(across, false, words, source, form),
                    dtype,
                    elem
                ));
            }
        }
    }
    let elements = |&(dtype, _): &(FloatKind, AddressType)| dtype.size() == 2;
    for (dtype, address) in ELEMENTS.into_iter().filter(elements) {
        all.push(instance!(
            device,
            ms_eden_screen_kernel,
            format!("{dtype:?}-{address:?}"),
            Expected {
                // It is not launched where ptxas spills a register of it.
                spills: (!device.has_nearest()).then_some(false),
                ..Expected::NONE
            },
            address,
            b(BLOCKS),
            b(BLOCKS),
            shape(),
            signs(),
            signs(),
            ScreenOutLaunch::new(b(64), b(1)),
            ScreenOutLaunch::new(b(64), b(1)),
            ScreenPlan {
                kind: dtype,
                redrawn_signs: [false, true],
            }
        ));
    }
    all
}

/// How the result of a source is stored, and the other forms that it has, with their names.
fn forms(source: SourcePlan) -> (EdenForm, Option<(&'static str, EdenForm)>) {
    let unscaled = ("-unscaled", EdenForm::Bf16Unscaled);
    match source.swizzled {
        true => (EdenForm::Packed(ScaleLayout::Swizzled128x4), None),
        false => (
            EdenForm::Packed(ScaleLayout::Compact),
            (source.grouping == Grouping::One).then_some(unscaled),
        ),
    }
}
