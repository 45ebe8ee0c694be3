//! Instances of the MS-EDEN kernels.

use cubecl::prelude::*;

use super::{
    super::proof::{
        EdenDrawLaunch, EdenInputsLaunch, EdenOutLaunch, EdenPackedLaunch, EdenPolicy,
        EdenScalesArgs, EdenScreenLaunch, EdenSearchLaunch, EdenSignsLaunch, EdenStoredArgs,
        EdenTilesLaunch, EdenValuesArgs, Grouping, ScreenOutLaunch, ScreenPlan, SourcePlan,
        ms_eden_amax_kernel, ms_eden_amax_pair_kernel, ms_eden_kernel, ms_eden_screen_kernel,
    },
    inputs::{BLOCKS, ELEMENTS, PLAIN, SOURCES, packed, shape},
};
use crate::{
    StoredForm,
    cube::{
        hadamard::SignsLaunch,
        philox::{Numbering, PositionLaunch, RandomLaunch},
    },
    registry::instance::{DummyDevice, Expected, Instance, instance},
    tensor::FloatKind,
};

pub(super) fn instances(device: &DummyDevice) -> Vec<Instance> {
    let b = |len| device.buffer(len);
    let random = || RandomLaunch::of([1, 2], 3 << 32 | 4);
    let signs = || EdenSignsLaunch::new(SignsLaunch::new(1, 2, 3, 4), b(2));
    // Forms in bf16 round in software, since their results are not codes.
    let e2m1 = |form: StoredForm| Expected {
        e2m1_rn: Some(device.has_nearest() && form != StoredForm::Bf16Unscaled),
        e4m3: Some(device.conversion.has_e4m3()),
        ..Expected::NONE
    };
    let tiles = || EdenTilesLaunch::new(b(8), shape(), 16, 16);
    let out = |form: StoredForm| {
        let packed = |scales| EdenValuesArgs::Packed(EdenPackedLaunch::new(b(BLOCKS), scales));
        let values = match form {
            StoredForm::Rows => packed(EdenScalesArgs::Compact(b(BLOCKS))),
            StoredForm::Tiles | StoredForm::WholeTiles => {
                packed(EdenScalesArgs::Swizzled(b(BLOCKS)))
            }
            StoredForm::Bf16Unscaled => EdenValuesArgs::Bf16Unscaled(b(BLOCKS)),
        };
        EdenOutLaunch::new(values, b(8))
    };
    let policy = |across, packed, words, source: SourcePlan, form: StoredForm| EdenPolicy {
        across,
        packed,
        words,
        source,
        swizzled: form == StoredForm::Tiles,
        device_offset: across,
        numbering: match across && source.grouping == Grouping::One {
            true => Numbering::BlockGaps,
            false => Numbering::Own,
        },
        redrawn_signs: across,
        unscaled: form == StoredForm::Bf16Unscaled,
        planes_of_tile: 1,
        conversion: device.conversion,
    };
    let both = [false, true]
        .into_iter()
        .flat_map(|across| SOURCES.map(|(name, source)| (across, name, source)));
    let draw = || {
        let position = PositionLaunch::new(1, 2, 4, 1, 2, 3, 4);
        EdenDrawLaunch::new(b(2), random(), position, b(1), signs())
    };
    let mut all = Vec::new();
    // For few tiles, planes share tiles, in cubes of four; see the launch.
    let tag_of = |planes: usize| match planes {
        1 => String::new(),
        planes => format!("-{planes}-planes"),
    };
    let of_packed = |all: &mut Vec<Instance>, address, planes, across, (name, source)| {
        let (form, others) = forms(source);
        let tag = format!("packed-{address:?}-{across}{name}{}", tag_of(planes));
        let policy = |form| EdenPolicy {
            planes_of_tile: planes,
            ..policy(across, true, false, source, form)
        };
        let units = 32 * policy(form).planes_of_cube() as u32;
        all.push(instance!(
            device,
            units units,
            ms_eden_amax_kernel,
            &tag,
            Expected::NONE,
            address,
            1,
            EdenStoredArgs::Packed(packed(device)),
            tiles(),
            b(8),
            signs(),
            policy(form),
            FloatKind::F32,
            FloatKind::F32.storage_type()
        ));
        for &(suffix, form) in [("", form)].iter().chain(others) {
            all.push(instance!(
                device,
                units units,
                ms_eden_kernel,
                format!("{tag}{suffix}"),
                e2m1(form),
                address,
                1,
                EdenStoredArgs::Packed(packed(device)),
                tiles(),
                EdenInputsLaunch::new(b(8), 1.0, 1.0),
                out(form),
                draw(),
                policy(form),
                FloatKind::F32,
                FloatKind::F32.storage_type()
            ));
        }
    };
    let of_matrix = |all: &mut Vec<Instance>, (dtype, address), across, (name, source)| {
        let (dtype, source): (FloatKind, SourcePlan) = (dtype, source);
        let (form, others) = forms(source);
        // A matrix has neither amax values nor scales.
        let source = SourcePlan {
            grouping: source.grouping,
            ..PLAIN
        };
        // Vector widths and types with which a plane loads.
        let load = |words: bool| match (across, words) {
            (true, true) => (1, u32::elem_type_native()),
            (true, false) => (2, dtype.storage_type()),
            (false, true) => (4, u32::elem_type_native()),
            (false, false) => (16 / dtype.size(), dtype.storage_type()),
        };
        let words = dtype.size() == 2;
        let (width, elem) = load(words);
        let tag = format!("{dtype:?}-{address:?}-{across}{name}");
        let policy = |words, form| policy(across, false, words, source, form);
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
            policy(words, form),
            dtype,
            elem
        ));
        for &(suffix, form) in [("", form)].iter().chain(others) {
            let words = words && (across || form == StoredForm::Bf16Unscaled);
            let (width, elem) = load(words);
            all.push(instance!(
                device,
                ms_eden_kernel,
                format!("{tag}{suffix}"),
                e2m1(form),
                address,
                width,
                EdenStoredArgs::Matrix(b(BLOCKS)),
                tiles(),
                EdenInputsLaunch::new(b(8), 1.0, 1.0),
                out(form),
                draw(),
                policy(words, form),
                dtype,
                elem
            ));
        }
    };
    for address in [AddressType::U32, AddressType::U64] {
        for (across, name, source) in both.clone() {
            of_packed(&mut all, address, 1, across, (name, source));
        }
    }
    for element in ELEMENTS {
        for (across, name, source) in both.clone() {
            of_matrix(&mut all, element, across, (name, source));
        }
    }
    let elements = |&(dtype, _): &(FloatKind, AddressType)| dtype.size() == 2;
    // Neither is launched on devices for which ptxas spills a register of the first.
    let screening = Expected {
        spills: (!device.has_nearest()).then_some(false),
        ..Expected::NONE
    };
    let search = || {
        let screen = EdenScreenLaunch::new(b(1), b(64));
        EdenSearchLaunch::new(tiles(), screen, b(1), signs())
    };
    for (dtype, address) in ELEMENTS.into_iter().filter(elements) {
        all.push(instance!(
            device,
            ms_eden_screen_kernel,
            format!("{dtype:?}-{address:?}"),
            screening,
            address,
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
        let policies = [false, true].map(|across| EdenPolicy {
            planes_of_tile: 4,
            ..policy(across, false, true, PLAIN, StoredForm::Bf16Unscaled)
        });
        all.push(instance!(
            device,
            ms_eden_amax_pair_kernel,
            format!("{dtype:?}-{address:?}"),
            screening,
            address,
            EdenStoredArgs::Matrix(b(BLOCKS)),
            EdenStoredArgs::Matrix(b(BLOCKS)),
            search(),
            search(),
            policies,
            dtype
        ));
    }
    let shared = match device.conversion.has_nearest() {
        true => [].as_slice(),
        false => &[(false, 2), (false, 4), (true, 2), (true, 4)],
    };
    for &(across, planes) in shared {
        of_packed(&mut all, AddressType::U32, planes, across, ("", PLAIN));
    }
    all
}

/// Returns the main storage form of the result of a source, and its other forms with their names.
fn forms(source: SourcePlan) -> (StoredForm, &'static [(&'static str, StoredForm)]) {
    let others: &[_] = match source.swizzled || source.grouping != Grouping::One {
        true => &[],
        false => &[("-unscaled", StoredForm::Bf16Unscaled)],
    };
    let scales = match source.swizzled {
        true => StoredForm::Tiles,
        false => StoredForm::Rows,
    };
    (scales, others)
}
