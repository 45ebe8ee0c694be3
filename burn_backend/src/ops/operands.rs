//! From a matrix to the operands of products.

use burn_core::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn_core::tensor::FloatDType;
use nvfp4_kernels::PackedAxis;

use super::{
    EdenSpec, GlobalScaling, Nvfp4Ops, Operand, OperandSpec, Packed, PackedPair, PairSpec,
    QuantizeSpec, float_dtype,
};

/// The operand that `spec` makes of `x`, contracted along `axis`. Without quantization it has the
/// type `dtype`, that of the activations.
pub(super) fn one<B: Nvfp4Ops>(
    x: FloatTensor<B>,
    spec: &OperandSpec,
    axis: PackedAxis,
    dtype: FloatDType,
) -> Operand<B> {
    match *spec {
        OperandSpec::HighPrecision => Operand::Float(cast::<B>(x, dtype), axis),
        OperandSpec::Mxfp8 => Operand::Mxfp8(B::nvfp4_mx_quantize(x, axis)),
        OperandSpec::Blocks(copy) => {
            Operand::Nvfp4(B::nvfp4_quantize(x, QuantizeSpec { axis, copy }))
        }
        OperandSpec::Tiles(scaling) => {
            let PackedPair { row, col } = B::nvfp4_quantize_pair(x, PairSpec::Tile(scaling));
            Operand::Nvfp4(match axis {
                PackedAxis::Cols => row,
                PackedAxis::Rows => col,
            })
        }
        OperandSpec::Eden { hadamard, stream } => Operand::Nvfp4(B::nvfp4_eden(
            x,
            EdenSpec {
                axis,
                hadamard,
                stream,
            },
        )),
    }
}

/// The operands along both axes: row-wise, column-wise. From one read of `x` where one kernel makes
/// both.
pub(super) fn both<B: Nvfp4Ops>(
    x: FloatTensor<B>,
    row: &OperandSpec,
    col: &OperandSpec,
    dtype: FloatDType,
) -> (Operand<B>, Operand<B>) {
    let pair = match (*row, *col) {
        (OperandSpec::Tiles(row), OperandSpec::Tiles(col)) if row == col => PairSpec::Tile(row),
        (OperandSpec::Blocks(row), OperandSpec::Blocks(col)) => PairSpec::Blocks { row, col },
        _ => {
            return (
                one::<B>(x.clone(), row, PackedAxis::Cols, dtype),
                one::<B>(x, col, PackedAxis::Rows, dtype),
            );
        }
    };
    let PackedPair { row, col } = B::nvfp4_quantize_pair(x, pair);
    (Operand::Nvfp4(row), Operand::Nvfp4(col))
}

/// The operand that `spec` makes of the values that `forward` stands for, contracted along `axis`.
pub(super) fn again<B: Nvfp4Ops>(
    forward: Operand<B>,
    spec: &OperandSpec,
    axis: PackedAxis,
    dtype: FloatDType,
) -> Operand<B> {
    match (forward, *spec) {
        (Operand::Nvfp4(packed), OperandSpec::Eden { hadamard, stream }) if one_scale(&packed) => {
            Operand::Nvfp4(B::nvfp4_eden_packed(
                packed,
                EdenSpec {
                    axis,
                    hadamard,
                    stream,
                },
            ))
        }
        (Operand::Nvfp4(packed), OperandSpec::Mxfp8) if one_scale(&packed) => {
            Operand::Mxfp8(B::nvfp4_mx_requantize(packed, axis, dtype))
        }
        (Operand::Nvfp4(packed), spec) => {
            one::<B>(B::nvfp4_dequantize(packed, dtype), &spec, axis, dtype)
        }
        (Operand::Mxfp8(packed), spec) => {
            one::<B>(B::nvfp4_mx_dequantize(packed, dtype), &spec, axis, dtype)
        }
        (Operand::Float(x, _), spec) => one::<B>(x, &spec, axis, dtype),
    }
}

fn one_scale<B: Nvfp4Ops>(packed: &Packed<B>) -> bool {
    packed.layout.global == GlobalScaling::PerTensor
}

/// `tensor` as `dtype`; no operation when it is already.
pub(super) fn cast<B: Backend>(tensor: FloatTensor<B>, dtype: FloatDType) -> FloatTensor<B> {
    if float_dtype(tensor.dtype()) == dtype {
        tensor
    } else {
        B::float_cast(tensor, dtype)
    }
}
