//! Checks of a quantized tensor against its source, before anything is allocated or launched.

use super::target::TargetSpec;
use crate::{
    BLOCK, BlockPosition, Gaps, HadamardSize, Nvfp4Error, QuantRounding, Rounding, StoredForm,
    Usage,
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
    let params = &target.params;
    if params.offset_in_memory && target.offset.is_none() {
        return Err(Nvfp4Error::value("offset", "none", "that in device memory"));
    }
    if !params.has_only_own_options() {
        let expected = "MX formats without options, or MS-EDEN with none but a transform";
        return Err(Nvfp4Error::value("params", format!("{params:?}"), expected));
    }
    if params.format.is_mx() {
        return check_packed(target, "an MX format");
    }
    if params.is_ms_eden() {
        return Ok(());
    }
    if usage == Usage::Columnwise {
        check_groups(target, groups, side_by_side)?;
    }
    if usage == Usage::Rowwise || target.params.is_2d() {
        check_columns(rows, cols)?;
    }
    if usage == Usage::Rowwise {
        check_row_transform(target)?;
    }
    if target.params.is_2d() {
        check_tiles(target)?;
    }
    check_rounding(target, groups)?;
    match (target.form, usage) {
        (StoredForm::WholeTiles, Usage::Rowwise) => Err(Nvfp4Error::value(
            "form",
            "whole tiles of a rowwise tensor",
            "a columnwise tensor: columns of `x` are not padded",
        )),
        (StoredForm::Bf16Unscaled, _) => check_unscaled(groups),
        _ => Ok(()),
    }
}

fn check_packed(target: &TargetSpec, of: &'static str) -> Result<(), Nvfp4Error> {
    if target.form != StoredForm::Bf16Unscaled {
        return Ok(());
    }
    let found = format!("{:?} of {of}", target.form);
    Err(Nvfp4Error::value("form", found, "codes and scales"))
}

/// Returns an error unless the columnwise tensor of `groups` can be laid out: groups that share
/// stored rows share tiles of scales, unless each begins with a whole one.
fn check_groups(
    target: &TargetSpec,
    groups: &Groups,
    side_by_side: bool,
) -> Result<(), Nvfp4Error> {
    let is_2d = target.params.is_2d();
    let (found, expected) = match target.form {
        StoredForm::Tiles if side_by_side && !is_2d => (
            "scales in 128x4 tiles, of groups side by side",
            "compact scales, or whole tiles",
        ),
        StoredForm::WholeTiles if is_2d => (
            "whole tiles, of 16x16 blocks",
            "another form: 16x16 blocks are not padded to whole tiles",
        ),
        StoredForm::WholeTiles if !side_by_side && !matches!(groups, Groups::One) => (
            "whole tiles, of groups one after another",
            "one matrix, or groups side by side",
        ),
        _ => return Ok(()),
    };
    Err(Nvfp4Error::value("form", found, expected))
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
    match target.params.hadamard {
        Some(hadamard) if hadamard.size() != HadamardSize::H16 => Err(Nvfp4Error::value(
            "hadamard",
            format!("{:?} of a rowwise tensor", hadamard.size()),
            "H16; larger transforms for columnwise tensors",
        )),
        _ => Ok(()),
    }
}

/// Returns an error unless the kernel of 16x16 tiles supports the options of `target`.
fn check_tiles(target: &TargetSpec) -> Result<(), Nvfp4Error> {
    let params = &target.params;
    let is_plain = params.is_deterministic()
        && params.hadamard.is_none()
        && params.amax == AmaxGranularity::PerTensor;
    if !is_plain {
        return Err(Nvfp4Error::value(
            "block",
            format!(
                "16x16 tiles by {:?}, amax {:?}, transform {:?}",
                params.rounding, params.amax, params.hadamard
            ),
            "16x16 tiles to nearest, with one amax and no transform",
        ));
    }
    check_packed(target, "16x16 tiles")
}

fn check_rounding(target: &TargetSpec, groups: &Groups) -> Result<(), Nvfp4Error> {
    let QuantRounding::Elements(Rounding::Stochastic(stream)) = target.params.rounding else {
        return Ok(());
    };
    if let Some(offset) = &target.offset {
        check_memory("offset", offset, 8)?;
    }
    if matches!(target.params.scaling, BlockScaling::FourOverSix(_)) {
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

/// Returns an error unless tensors of `groups` can be written as bf16 values.
pub(super) fn check_unscaled(groups: &Groups) -> Result<(), Nvfp4Error> {
    match groups {
        Groups::One => Ok(()),
        _ => Err(Nvfp4Error::value(
            "groups",
            format!("{} for bf16 values", groups.count()),
            "no groups: only MS-EDEN writes bf16 values of groups",
        )),
    }
}
