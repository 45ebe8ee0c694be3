//! From a matrix to the operands of products.

use burn_core::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn_core::tensor::{FloatDType, Shape, Slice};
use nvfp4_kernels::{Storage, Usage};

use super::{
    Decoded, EdenSpec, Nvfp4Ops, Operand, OperandPair, OperandSpec, PackedPair, PairSpec,
    QuantizeSpec, float_dtype,
};

/// The form in which an operand in 1x16 blocks is made that nothing reads but one product, `m` x `n`
/// with a contraction of `k`, of what `specs` make: values, where that product decodes what is packed.
pub(super) fn storage_of<B: Backend>(
    device: &B::Device,
    specs: [&OperandSpec; 2],
    (m, n, k): (usize, usize, usize),
) -> Storage {
    let unit = specs[0].unit().max(specs[1].unit());
    let shape = (m, n, k.next_multiple_of(unit));
    match specs.iter().all(|spec| spec.is_nvfp4()) && decodes::<B>(device, shape) {
        true => Storage::Bf16Unscaled,
        false => Storage::Packed,
    }
}

/// Whether products of packed operands of this shape decode both.
#[cfg(any(feature = "cpu", feature = "cuda"))]
fn decodes<B: Backend>(device: &B::Device, shape: (usize, usize, usize)) -> bool {
    let device: &dyn std::any::Any = device;
    let device = device.downcast_ref::<burn_cubecl::CubeDevice>();
    device.is_some_and(|device| nvfp4_kernels::gemm::decodes(&device.client(), shape))
}

/// Whether products of packed operands of this shape decode both: Flex does so panel by panel.
#[cfg(not(any(feature = "cpu", feature = "cuda")))]
fn decodes<B: Backend>(_: &B::Device, _: (usize, usize, usize)) -> bool {
    false
}

/// The operand that `spec` makes of `x`, contracted along `usage`; in 1x16 blocks it has the form `form`.
/// Without quantization it has the type `dtype`, that of the activations.
pub(super) fn quantize<B: Nvfp4Ops>(
    x: FloatTensor<B>,
    spec: &OperandSpec,
    usage: Usage,
    dtype: FloatDType,
    form: Storage,
) -> Operand<B> {
    match *spec {
        OperandSpec::HighPrecision => Operand::Float(cast::<B>(x, dtype), usage),
        OperandSpec::Mxfp8 => Operand::Mxfp8(B::nvfp4_mx_quantize(x, usage)),
        OperandSpec::Blocks(copy) => {
            let spec = QuantizeSpec { usage, copy };
            match form {
                Storage::Packed => Operand::Nvfp4(B::nvfp4_quantize(x, spec)),
                Storage::Bf16Unscaled => Operand::Decoded(B::nvfp4_quantize_decoded(x, spec)),
            }
        }
        OperandSpec::Tiles(scaling) => Operand::Nvfp4(B::nvfp4_quantize_tiles(x, usage, scaling)),
        OperandSpec::Eden { hadamard, stream } => Operand::Nvfp4(B::nvfp4_eden(
            x,
            EdenSpec {
                usage,
                hadamard,
                stream,
            },
        )),
    }
}

/// The operands along both axes: row-wise, column-wise, in 1x16 blocks in the form `forms` of each. From
/// one read of `x` where one kernel makes both.
pub(super) fn quantize_pair<B: Nvfp4Ops>(
    x: FloatTensor<B>,
    row: &OperandSpec,
    col: &OperandSpec,
    dtype: FloatDType,
    forms: [Storage; 2],
) -> (Operand<B>, Operand<B>) {
    let pair = match (*row, *col) {
        (OperandSpec::Tiles(row), OperandSpec::Tiles(col)) if row == col => PairSpec::Tile(row),
        (OperandSpec::Blocks(row), OperandSpec::Blocks(col)) if forms == [Storage::Packed; 2] => {
            PairSpec::Blocks { row, col }
        }
        (OperandSpec::Blocks(row), OperandSpec::Blocks(col)) => {
            let OperandPair { row, col } =
                B::nvfp4_quantize_forms(x, (row, forms[0]), (col, forms[1]));
            return (row, col);
        }
        _ => {
            return (
                quantize::<B>(x.clone(), row, Usage::Rowwise, dtype, forms[0]),
                quantize::<B>(x, col, Usage::Columnwise, dtype, forms[1]),
            );
        }
    };
    let PackedPair { row, col } = B::nvfp4_quantize_pair(x, pair);
    (Operand::Nvfp4(row), Operand::Nvfp4(col))
}

/// The operand that `spec` makes of the values that `forward` stands for, contracted along `usage`.
pub(super) fn requantize<B: Nvfp4Ops>(
    forward: Operand<B>,
    spec: &OperandSpec,
    usage: Usage,
    dtype: FloatDType,
) -> Operand<B> {
    match (forward, *spec) {
        (Operand::Nvfp4(packed), OperandSpec::Eden { hadamard, stream }) => {
            Operand::Nvfp4(B::nvfp4_eden_packed(
                packed,
                EdenSpec {
                    usage,
                    hadamard,
                    stream,
                },
            ))
        }
        (Operand::Nvfp4(packed), OperandSpec::Mxfp8) => {
            Operand::Mxfp8(B::nvfp4_mx_requantize(packed, usage, dtype))
        }
        (forward, spec) => {
            let via = requantize_dtype(&spec, dtype);
            let x = match forward {
                Operand::Nvfp4(packed) => B::nvfp4_dequantize(packed, via),
                Operand::Decoded(decoded) => dequantized::<B>(decoded, via),
                Operand::Mxfp8(packed) => B::nvfp4_mx_dequantize(packed, via),
                Operand::Float(x, _) => x,
            };
            quantize::<B>(x, &spec, usage, dtype, Storage::Packed)
        }
    }
}

/// What [`nvfp4_dequantize`](Nvfp4Ops::nvfp4_dequantize) makes of the packed matrix that `decoded` is the
/// values of.
pub(super) fn dequantized<B: Backend>(decoded: Decoded<B>, dtype: FloatDType) -> FloatTensor<B> {
    let Decoded {
        values,
        amax,
        layout,
    } = decoded;
    let factors = B::float_div_scalar(amax, layout.scaling.range().into());
    let factors = B::float_reshape(factors, Shape::new([layout.amax_len(), 1]));
    let x = B::float_mul(cast::<B>(values, FloatDType::F32), factors);
    let x = B::float_slice(
        x,
        &[
            Slice::from(0..layout.outer()),
            Slice::from(0..layout.inner()),
        ],
    );
    let x = match layout.usage {
        Usage::Rowwise => x,
        Usage::Columnwise => B::float_swap_dims(x, 0, 1),
    };
    cast::<B>(x, dtype)
}

/// In which type the values of a forward operand are read again: MS-EDEN takes them exactly, everything
/// else as activations.
pub(super) fn requantize_dtype(spec: &OperandSpec, dtype: FloatDType) -> FloatDType {
    match spec {
        OperandSpec::Eden { .. } => FloatDType::F32,
        _ => dtype,
    }
}

/// `tensor` as `dtype`; no operation when it is already.
pub(super) fn cast<B: Backend>(tensor: FloatTensor<B>, dtype: FloatDType) -> FloatTensor<B> {
    if float_dtype(tensor.dtype()) == dtype {
        tensor
    } else {
        B::float_cast(tensor, dtype)
    }
}
