//! Checks of a quantized tensor against its source, before anything is allocated or launched.

use super::target::{DeviceRounding, TargetSpec};
use crate::{
    BLOCK, BlockPosition, Gaps, HadamardSize, Nvfp4Error, ScaleLayout, Storage, Usage,
    memory::check_memory,
    policy::{AmaxGranularity, BlockScaling},
    tensor::Groups,
};

/// Returns an error unless kernels can make `target` along `usage` of a matrix of `rows` x `cols`
/// in `groups`, whose columnwise tensors share stored rows if they are `side_by_side`.
pub(super) fn check_target(
    target: &TargetSpec,
    usage: Usage,
    (rows, cols): (usize, usize),
    (groups, side_by_side): (&Groups, bool),
) -> Result<(), Nvfp4Error> {
    if target.format.is_mx() {
        return check_storage(target, Storage::Packed, "an MX format");
    }
    if target.is_ms_eden() {
        return Ok(());
    }
    if usage == Usage::Columnwise {
        check_groups(target, groups, side_by_side)?;
    }
    if usage == Usage::Rowwise || target.is_2d() {
        check_columns(rows, cols)?;
    }
    if usage == Usage::Rowwise {
        check_row_transform(target)?;
    }
    if target.is_2d() {
        check_tiles(target)?;
    }
    check_rounding(target, groups)?;
    check_whole_tiles(target, usage)?;
    if target.storage == Storage::Bf16Unscaled {
        check_unscaled(target, groups)?;
    }
    Ok(())
}

fn check_storage(
    target: &TargetSpec,
    expected: Storage,
    of: &'static str,
) -> Result<(), Nvfp4Error> {
    if target.storage == expected {
        return Ok(());
    }
    Err(Nvfp4Error::value(
        "storage",
        format!("{:?}", target.storage),
        format!("{expected:?} of {of}"),
    ))
}

/// Returns an error unless the columnwise tensor of `groups` can be laid out: groups that share
/// stored rows share tiles of scales, unless each begins with a whole one.
fn check_groups(
    target: &TargetSpec,
    groups: &Groups,
    side_by_side: bool,
) -> Result<(), Nvfp4Error> {
    let is_2d = target.is_2d();
    let (found, expected) = match (target.scale_layout, target.whole_tiles) {
        (ScaleLayout::Swizzled128x4, false) if side_by_side && !is_2d => (
            "scales in 128x4 tiles, of groups side by side",
            "compact scales, or whole tiles",
        ),
        (_, true) if is_2d => ("whole tiles, of 16x16 blocks", "a row that ends as it does"),
        (_, true) if !side_by_side && !matches!(groups, Groups::One) => (
            "whole tiles, of groups one after another",
            "one matrix, or groups side by side",
        ),
        _ => return Ok(()),
    };
    Err(Nvfp4Error::value("copy", found, expected))
}

fn check_columns(rows: usize, cols: usize) -> Result<(), Nvfp4Error> {
    if cols.is_multiple_of(BLOCK) {
        return Ok(());
    }
    Err(Nvfp4Error::shape(
        "x",
        format!("{rows} x {cols}"),
        "columns, the packed axis, in a multiple of 16",
    ))
}

fn check_row_transform(target: &TargetSpec) -> Result<(), Nvfp4Error> {
    match target.hadamard {
        Some(hadamard) if hadamard.size() != HadamardSize::H16 => Err(Nvfp4Error::value(
            "hadamard",
            format!("{:?} on a row-wise copy", hadamard.size()),
            "H16 there; larger transforms on column-wise copies",
        )),
        _ => Ok(()),
    }
}

/// Returns an error unless the kernel of 16x16 tiles supports the options of `target`.
fn check_tiles(target: &TargetSpec) -> Result<(), Nvfp4Error> {
    let is_plain = matches!(target.rounding, DeviceRounding::Nearest)
        && target.hadamard.is_none()
        && target.granularity == AmaxGranularity::PerTensor;
    if !is_plain {
        return Err(Nvfp4Error::value(
            "block",
            format!(
                "16x16 tiles by {:?}, amax {:?}, transform {:?}",
                target.rounding, target.granularity, target.hadamard
            ),
            "16x16 tiles to nearest, with one amax and no transform",
        ));
    }
    check_storage(target, Storage::Packed, "16x16 tiles")
}

fn check_rounding(target: &TargetSpec, groups: &Groups) -> Result<(), Nvfp4Error> {
    let stream = match &target.rounding {
        DeviceRounding::Nearest | DeviceRounding::MsEden(_) => return Ok(()),
        DeviceRounding::Stochastic(stream) => stream,
        DeviceRounding::StochasticAt(stream, offset) => {
            check_memory("offset", offset, 8)?;
            stream
        }
    };
    if matches!(target.scaling, BlockScaling::FourOverSix(_)) {
        return Err(Nvfp4Error::value(
            "rounding",
            "stochastic, with four over six",
            "to nearest: four over six chooses by the error of rounding to nearest",
        ));
    }
    check_position(&stream.position, groups)
}

/// Returns an error unless a tensor in `groups` can be at `position`.
pub(super) fn check_position(position: &BlockPosition, groups: &Groups) -> Result<(), Nvfp4Error> {
    let expected = match (position.row_blocks, groups) {
        (Some(_), Groups::One) => return Ok(()),
        (Some(_), _) => "no row_blocks: each group has its own rows",
        (None, _) if position.gaps == Gaps::None => return Ok(()),
        (None, _) => "row_blocks, the blocks of a row with its gaps",
    };
    let found = match groups {
        Groups::One => format!("{position:?}"),
        _ => format!("{position:?} of a tensor in groups"),
    };
    Err(Nvfp4Error::value("position", found, expected))
}

/// Returns an error unless a tensor along `usage` can be padded as `target` requires.
fn check_whole_tiles(target: &TargetSpec, usage: Usage) -> Result<(), Nvfp4Error> {
    let expected = match (target.whole_tiles, usage, target.scale_layout) {
        (false, ..) | (true, Usage::Columnwise, ScaleLayout::Swizzled128x4) => return Ok(()),
        (true, Usage::Rowwise, _) => "a columnwise tensor: columns of `x` are not padded",
        (true, _, ScaleLayout::Compact) => "scales in 128x4 tiles",
    };
    Err(Nvfp4Error::value(
        "whole_tiles",
        format!("true along {usage:?} with {:?} scales", target.scale_layout),
        expected,
    ))
}

/// Returns an error unless `target` can be written as bf16 values.
pub(super) fn check_unscaled(target: &TargetSpec, groups: &Groups) -> Result<(), Nvfp4Error> {
    if target.scale_layout == ScaleLayout::Swizzled128x4 {
        return Err(Nvfp4Error::value(
            "layout",
            format!("{:?} for bf16 values", target.scale_layout),
            "Compact: no GEMM that reads values reads tiles of scales",
        ));
    }
    match groups {
        Groups::One => Ok(()),
        _ => Err(Nvfp4Error::value(
            "groups",
            format!("{} for bf16 values", groups.count()),
            "no groups: only MS-EDEN writes bf16 values of groups",
        )),
    }
}
