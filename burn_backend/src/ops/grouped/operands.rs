//! From tokens in groups, and from stacks of weights, to the operands of grouped products.
//!
//! What is made row by row, and has no maximum of a group, is what the plain layer makes of all rows. What is
//! made of a forward operand is made of its codes, without a matrix of its values between, but for NVFP4 in
//! blocks.

use burn_core::backend::{
    TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn_core::tensor::{FloatDType, Shape};
use nvfp4_kernels::{BLOCK, MX_BLOCK, Usage};

use super::super::operands::{cast, requantize_dtype};
use super::super::{
    AmaxGranularity, CopySpec, EdenSpec, Operand, OperandSpec, Packed, PackedLayout, PackedPair,
    PairSpec, QuantizeSpec,
};
use super::{GroupPairSpec, Nvfp4GroupedOps, RowGroups};

/// Values are made for dense products alone.
pub(super) const NO_VALUES: &str = "an operand in groups is packed, or a float";

/// Elements that the groups of an operand are padded to where they lie side by side along the
/// contraction.
pub(super) fn unit<B: Nvfp4GroupedOps>(operand: &Operand<B>) -> usize {
    match operand {
        Operand::Nvfp4(packed) => packed.layout.unit(),
        Operand::Mxfp8(_) => MX_BLOCK,
        // Not padded yet.
        Operand::Float(..) => BLOCK,
        Operand::Decoded(_) => unreachable!("{NO_VALUES}"),
    }
}

/// The operand that `spec` makes of tokens `x` (`[tokens, cols]`) in groups, contracted along `usage`.
/// Without quantization it has the type `dtype`, that of the activations.
pub(super) fn tokens<B: Nvfp4GroupedOps>(
    x: FloatTensor<B>,
    offsets: &IntTensor<B>,
    spec: &OperandSpec,
    usage: Usage,
    dtype: FloatDType,
) -> Operand<B> {
    match *spec {
        OperandSpec::HighPrecision => Operand::Float(cast::<B>(x, dtype), usage),
        OperandSpec::Mxfp8 => {
            let groups = RowGroups::Offsets(offsets.clone());
            Operand::Mxfp8(B::nvfp4_mx_quantize_groups(x, groups, usage))
        }
        OperandSpec::Blocks(copy) => {
            let spec = QuantizeSpec { usage, copy };
            Operand::Nvfp4(match (usage, copy.global) {
                (Usage::Rowwise, AmaxGranularity::PerRow) => B::nvfp4_quantize(x, spec),
                _ => B::nvfp4_quantize_groups(x, offsets.clone(), spec),
            })
        }
        OperandSpec::Tiles(_) => unreachable!("refused for tokens before anything is queued"),
        OperandSpec::Eden { hadamard, stream } => {
            let groups = RowGroups::Offsets(offsets.clone());
            let spec = EdenSpec {
                usage,
                hadamard,
                stream,
            };
            Operand::Nvfp4(B::nvfp4_eden_groups(x, groups, spec))
        }
    }
}

/// The operands of tokens along both axes: row-wise, column-wise. From one read of `x` where one kernel
/// makes both.
pub(super) fn tokens_both<B: Nvfp4GroupedOps>(
    x: FloatTensor<B>,
    offsets: &IntTensor<B>,
    row: &OperandSpec,
    col: &OperandSpec,
    dtype: FloatDType,
) -> (Operand<B>, Operand<B>) {
    if let (OperandSpec::Blocks(row), OperandSpec::Blocks(col)) = (*row, *col) {
        let spec = GroupPairSpec { row, col };
        let PackedPair { row, col } = B::nvfp4_quantize_groups_pair(x, offsets.clone(), spec);
        return (Operand::Nvfp4(row), Operand::Nvfp4(col));
    }
    (
        tokens::<B>(x.clone(), offsets, row, Usage::Rowwise, dtype),
        tokens::<B>(x, offsets, col, Usage::Columnwise, dtype),
    )
}

/// The operand that `spec` makes, along the tokens, of the values that the row-wise operand `forward`
/// stands for.
pub(super) fn tokens_again<B: Nvfp4GroupedOps>(
    forward: Operand<B>,
    offsets: &IntTensor<B>,
    spec: &OperandSpec,
    dtype: FloatDType,
) -> Operand<B> {
    let groups = RowGroups::Offsets(offsets.clone());
    match again_from_codes(forward, &groups, spec, dtype) {
        Ok(operand) => operand,
        Err(forward) => {
            let values = values::<B>(forward, &groups, requantize_dtype(spec, dtype));
            tokens::<B>(values, offsets, spec, Usage::Columnwise, dtype)
        }
    }
}

/// The operand that `spec` makes of the stack `w` (`[experts, d_in, d_out]`), contracted along `usage` of
/// each matrix: row-wise ones, one below the other, of the transposed matrices for
/// [`Usage::Columnwise`].
pub(super) fn stack<B: Nvfp4GroupedOps>(
    w: FloatTensor<B>,
    spec: &OperandSpec,
    usage: Usage,
    dtype: FloatDType,
) -> Operand<B> {
    let rows = Usage::Rowwise;
    match *spec {
        OperandSpec::HighPrecision => Operand::Float(flat::<B>(cast::<B>(w, dtype), usage), rows),
        OperandSpec::Mxfp8 => {
            let (w, groups) = batch::<B>(w);
            Operand::Mxfp8(B::nvfp4_mx_quantize_groups(w, groups, usage))
        }
        OperandSpec::Blocks(copy) => Operand::Nvfp4(match copy.global {
            AmaxGranularity::PerTensor => B::nvfp4_quantize_stack(w, QuantizeSpec { usage, copy }),
            AmaxGranularity::PerRow => {
                B::nvfp4_quantize(flat::<B>(w, usage), QuantizeSpec { usage: rows, copy })
            }
        }),
        OperandSpec::Tiles(scaling) => {
            Operand::Nvfp4(B::nvfp4_quantize_stack_tiles(w, usage, scaling))
        }
        OperandSpec::Eden { hadamard, stream } => {
            let (w, groups) = batch::<B>(w);
            let spec = EdenSpec {
                usage,
                hadamard,
                stream,
            };
            Operand::Nvfp4(B::nvfp4_eden_groups(w, groups, spec))
        }
    }
}

/// The operands of a stack along both axes: row-wise, column-wise. From one read of `w` where one kernel
/// makes both.
pub(super) fn stack_both<B: Nvfp4GroupedOps>(
    w: FloatTensor<B>,
    row: &OperandSpec,
    col: &OperandSpec,
    dtype: FloatDType,
) -> (Operand<B>, Operand<B>) {
    let whole = |copy: &CopySpec| copy.global == AmaxGranularity::PerTensor;
    let pair = match (*row, *col) {
        (OperandSpec::Tiles(row), OperandSpec::Tiles(col)) if row == col => PairSpec::Tile(row),
        (OperandSpec::Blocks(row), OperandSpec::Blocks(col)) if whole(&row) && whole(&col) => {
            PairSpec::Blocks { row, col }
        }
        _ => {
            return (
                stack::<B>(w.clone(), row, Usage::Rowwise, dtype),
                stack::<B>(w, col, Usage::Columnwise, dtype),
            );
        }
    };
    let PackedPair { row, col } = B::nvfp4_quantize_stack_pair(w, pair);
    (Operand::Nvfp4(row), Operand::Nvfp4(col))
}

/// The operand that `spec` makes, along the columns of each of `experts` matrices, of the values of
/// `forward`, which was made along their rows.
pub(super) fn stack_again<B: Nvfp4GroupedOps>(
    forward: Operand<B>,
    experts: usize,
    spec: &OperandSpec,
    dtype: FloatDType,
) -> Operand<B> {
    match again_from_codes(forward, &RowGroups::Batch(experts), spec, dtype) {
        Ok(operand) => operand,
        Err(forward) => {
            let values = stack_values::<B>(forward, experts, requantize_dtype(spec, dtype));
            let w = B::float_swap_dims(values, 1, 2);
            stack::<B>(w, spec, Usage::Rowwise, dtype)
        }
    }
}

/// The operand that `spec` makes, along the rows of each group, of the values that the row-wise operand
/// `forward` stands for, if it is made of codes; or `forward`.
fn again_from_codes<B: Nvfp4GroupedOps>(
    forward: Operand<B>,
    groups: &RowGroups<B>,
    spec: &OperandSpec,
    dtype: FloatDType,
) -> Result<Operand<B>, Operand<B>> {
    let (groups, usage) = (groups.clone(), Usage::Columnwise);
    match (forward, *spec) {
        (Operand::Nvfp4(packed), OperandSpec::Eden { hadamard, stream }) => {
            let spec = EdenSpec {
                usage,
                hadamard,
                stream,
            };
            let again = B::nvfp4_eden_groups_packed(packed, groups, spec);
            Ok(Operand::Nvfp4(again))
        }
        (Operand::Nvfp4(packed), OperandSpec::Mxfp8) => {
            let again = B::nvfp4_mx_requantize_groups(packed, groups, usage, dtype);
            Ok(Operand::Mxfp8(again))
        }
        (forward, _) => Err(forward),
    }
}

/// The values of the operand of a stack of `experts` matrices, as it is stored, `[experts, n, k]`, rounded
/// to `dtype`.
pub(super) fn stack_values<B: Nvfp4GroupedOps>(
    operand: Operand<B>,
    experts: usize,
    dtype: FloatDType,
) -> FloatTensor<B> {
    let stored = values::<B>(operand, &RowGroups::Batch(experts), dtype);
    let [rows, k] = [stored.shape()[0], stored.shape()[1]];
    B::float_reshape(stored, Shape::new([experts, rows / experts, k]))
}

/// The values of a row-wise operand with the groups `groups`, `[rows, cols]`, rounded to `dtype`; undefined
/// for rows of no group.
pub(super) fn values<B: Nvfp4GroupedOps>(
    operand: Operand<B>,
    groups: &RowGroups<B>,
    dtype: FloatDType,
) -> FloatTensor<B> {
    match operand {
        Operand::Nvfp4(packed) => {
            let layout = packed.layout;
            let packed = match layout.global {
                AmaxGranularity::PerRow => packed,
                AmaxGranularity::PerTensor => Packed {
                    amax: spread::<B>(packed.amax, groups, layout.rows),
                    layout: PackedLayout {
                        global: AmaxGranularity::PerRow,
                        ..layout
                    },
                    ..packed
                },
            };
            B::nvfp4_dequantize(packed, dtype)
        }
        Operand::Mxfp8(packed) => B::nvfp4_mx_dequantize(packed, dtype),
        Operand::Float(x, _) => cast::<B>(x, dtype),
        Operand::Decoded(_) => unreachable!("{NO_VALUES}"),
    }
}

/// The maximum of its group for each of `rows` rows.
fn spread<B: Nvfp4GroupedOps>(
    amax: FloatTensor<B>,
    groups: &RowGroups<B>,
    rows: usize,
) -> FloatTensor<B> {
    match groups {
        RowGroups::Offsets(offsets) => B::nvfp4_broadcast_group_values(amax, offsets.clone(), rows),
        RowGroups::Batch(count) => {
            let amax = B::float_reshape(amax, Shape::new([*count, 1]));
            let amax = B::float_expand(amax, Shape::new([*count, rows / count]));
            B::float_reshape(amax, Shape::new([rows]))
        }
    }
}

/// A stack as one matrix, the matrices one below the other, and as groups of its rows.
fn batch<B: Nvfp4GroupedOps>(w: FloatTensor<B>) -> (FloatTensor<B>, RowGroups<B>) {
    let count = w.shape()[0];
    (flat::<B>(w, Usage::Rowwise), RowGroups::Batch(count))
}

/// A stack as one matrix, whose rows are contracted: those of the matrices, or of the transposed ones.
fn flat<B: Nvfp4GroupedOps>(w: FloatTensor<B>, usage: Usage) -> FloatTensor<B> {
    let w = match usage {
        Usage::Rowwise => w,
        Usage::Columnwise => B::float_swap_dims(w, 1, 2),
    };
    let [count, rows, cols] = [w.shape()[0], w.shape()[1], w.shape()[2]];
    B::float_reshape(w, Shape::new([count * rows, cols]))
}
