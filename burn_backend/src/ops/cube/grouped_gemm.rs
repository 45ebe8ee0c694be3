//! GEMMs with grouped M or K dimension. Nothing waits for the device.

use burn_core::backend::{
    Scalar, get_or_init_device_settings,
    ops::{BoolTensorOps, FloatTensorOps, IntTensorOps},
};
use burn_core::tensor::{DType, FloatDType, IntDType, Shape, Slice};
use burn_cubecl::{
    CubeBackend,
    kernel::{cast, into_contiguous},
    tensor::CubeTensor,
};
use nvfp4_formats::reference::swizzle::TILE_INNER;
use nvfp4_formats::{BLOCK, Format, Usage};
use nvfp4_kernels::gemm::{self, Gemm};
use nvfp4_kernels::moe;
use nvfp4_kernels::tensor::Matrix;

use super::super::dtype::float_kind;
use super::super::operands::stacked;
use super::super::tensors::{Operand, OtherRows, RowGroups};
use super::super::{float_dtype, trace_op};
use super::dequantize::dequantize;
use super::gemm::{DeviceOperand, bias_matrix, is_wide};
use super::tensors::{Source, group_offsets, launched, like, new_tensor, result, stored_shape};

/// Computes the M-grouped GEMM.
///
/// Unquantized operands run on the grouped kernels in `bf16`. In other float dtypes all tokens are
/// multiplied by the weight of every expert and masked: the work is multiplied by the number of
/// experts.
pub(super) fn m_grouped(
    a: Operand<CubeBackend>,
    b: Operand<CubeBackend>,
    bias: Option<CubeTensor>,
    (offsets, others): (CubeTensor, OtherRows),
    dtype: FloatDType,
) -> CubeTensor {
    let like = like(&a);
    let groups = group_offsets(offsets.clone());
    let stored = stored_shape(&b).0;
    let columns = match &b {
        // Stacked along the K dimension.
        Operand::Float(_, Usage::Columnwise) | Operand::QuantizedMnMajor(_) => stored,
        Operand::Float(_, Usage::Rowwise) | Operand::Quantized(_) => stored / groups.count,
    };
    let rows = stored_shape(&a).0;
    trace_op("gemm", "", rows, columns);
    let out = if is_wide(&a) || is_wide(&b) {
        let inner = matmul_dtype(&a, &b, dtype);
        trace_masked(rows, columns, groups.count, inner);
        let x = values(a, &RowGroups::Offsets(offsets.clone()), inner);
        let is_transposed = matches!(
            b,
            Operand::Float(_, Usage::Columnwise) | Operand::QuantizedMnMajor(_)
        );
        let w = values(b, &RowGroups::Batch(groups.count), inner);
        let w = stacked::<CubeBackend>(w, groups.count);
        let w = match is_transposed {
            true => CubeBackend::float_swap_dims(w, 1, 2),
            false => w,
        };
        let out = masked_m(x, w, bias, offsets);
        let out = into_contiguous(cast(out, dtype.into()));
        let kind = float_kind(dtype);
        launched(Matrix::new(out.handle, rows, columns, kind))
    } else {
        let bias = bias.map(bias_matrix);
        let (a, b) = (DeviceOperand::new(a), DeviceOperand::stack(b));
        let request = Gemm::new(a.view_of_groups(), b.view_of_groups())
            .m_grouped(&groups)
            .bias(bias.as_ref())
            .out(float_kind(dtype));
        launched(gemm::gemm(&like.client, &request)).matrix
    };
    if others == OtherRows::Zero {
        launched(moe::zero_padding_rows(&like.client, &out, &groups));
    }
    result(&like, out)
}

/// Computes the K-grouped GEMM. As for the M-grouped one, floats other than `bf16` cost more.
pub(super) fn k_grouped(
    a: Operand<CubeBackend>,
    b: Operand<CubeBackend>,
    (offsets, others): (CubeTensor, OtherRows),
    tokens: usize,
    dtype: FloatDType,
) -> CubeTensor {
    let like = like(&a);
    let [m, n] = [&a, &b].map(|operand| stored_shape(operand).0);
    trace_op("gemm", "", m, n);
    let (a, b) = match (a, b) {
        // Burn multiplies floats other than bf16, which have one dtype.
        (Operand::Float(x, _), Operand::Float(dy, _)) if x.dtype != DType::BF16 => {
            let groups = offsets.meta.shape()[0] - 1;
            trace_masked(m, n, groups, float_dtype(x.dtype));
            // Masks are factors, and a factor of 0 keeps NaN. Rows of no group may be NaN: those of
            // dequantized tokens are undefined.
            let [x, dy] = [x, dy].map(|x| within_groups(x, &offsets));
            return masked_k(x, dy, offsets, dtype);
        }
        operands => operands,
    };
    let unit = match &a {
        Operand::Quantized(quantized) => {
            let layout = &quantized.layout;
            match (layout.form.has_tiles(), layout.format) {
                (true, Format::Nvfp4) => layout.unit().max(TILE_INNER),
                // Groups of MXFP8 can begin inside tiles.
                _ => layout.unit(),
            }
        }
        // Not padded yet, or rejected by the kernels.
        Operand::Float(..) | Operand::QuantizedMnMajor(_) => BLOCK,
    };
    let groups = group_offsets(offsets);
    let aligned = launched(groups.aligned(&like.client, tokens, unit));
    let [a, b] = [a, b].map(|operand| {
        DeviceOperand::new(match operand {
            Operand::Float(x, usage) => {
                let x = Source::new(x);
                let padded = match others {
                    OtherRows::Zero => moe::pad_groups(&like.client, &x.matrix, &groups, unit),
                    OtherRows::Undefined => {
                        moe::pad_groups_only(&like.client, &x.matrix, &groups, unit)
                    }
                };
                Operand::Float(result(&x.tensor, launched(padded).0), usage)
            }
            quantized => quantized,
        })
    });
    let request = Gemm::new(a.view_of_groups(), b.view_of_groups())
        .k_grouped(&aligned)
        .k_alignment(unit)
        .out(float_kind(dtype));
    let out = launched(gemm::gemm(&like.client, &request)).matrix;
    let shape = Shape::new([groups.count, m, n]);
    new_tensor(&like, out.handle, shape, dtype.into())
}

/// Dequantizes an operand with these groups, in stored orientation, rounded to `dtype`; undefined
/// for rows of no group.
fn values(
    operand: Operand<CubeBackend>,
    groups: &RowGroups<CubeBackend>,
    dtype: FloatDType,
) -> CubeTensor {
    match operand {
        Operand::Quantized(quantized) | Operand::QuantizedMnMajor(quantized) => {
            dequantize(quantized, groups, dtype)
        }
        Operand::Float(x, _) => cast(x, dtype.into()),
    }
}

/// Returns the dtype in which Burn multiplies: that of the result, if both operands have it, or
/// `f32`, in which dequantized values are exact.
fn matmul_dtype(
    a: &Operand<CubeBackend>,
    b: &Operand<CubeBackend>,
    dtype: FloatDType,
) -> FloatDType {
    let has = |operand: &Operand<CubeBackend>| match operand {
        Operand::Float(x, _) => x.dtype == DType::from(dtype),
        Operand::Quantized(_) | Operand::QuantizedMnMajor(_) => false,
    };
    if has(a) && has(b) {
        dtype
    } else {
        FloatDType::F32
    }
}

/// Reports that Burn multiplies in dtype `inner`: all tokens by the weight of every expert, so the
/// number of operations is multiplied by the number of groups.
fn trace_masked(m: usize, n: usize, groups: usize, inner: FloatDType) {
    tracing::debug!(
        m,
        n,
        groups,
        ?inner,
        "grouped GEMM by Burn's matmul, all tokens for every group"
    );
}

/// Returns 1 for the tokens of group `group` and 0 for others, `[tokens, 1]` of dtype `dtype`.
fn members(offsets: &CubeTensor, group: usize, tokens: usize, dtype: FloatDType) -> CubeTensor {
    let (int, device) = (IntDType::I32, offsets.device.clone());
    let bool_dtype = get_or_init_device_settings::<CubeBackend>(&device).bool_dtype;
    let numbers = CubeBackend::int_arange(0..tokens as i64, &device, int);
    let offset = |index: usize| {
        let offset = CubeBackend::int_slice(offsets.clone(), &[Slice::from(index..index + 1)]);
        let offset = CubeBackend::int_cast(offset, int);
        CubeBackend::int_expand(offset, Shape::new([tokens]))
    };
    let from = CubeBackend::int_greater_equal(numbers.clone(), offset(group), bool_dtype);
    let to = CubeBackend::int_lower(numbers, offset(group + 1), bool_dtype);
    let members = CubeBackend::bool_into_float(CubeBackend::bool_and(from, to), dtype);
    CubeBackend::float_reshape(members, Shape::new([tokens, 1]))
}

/// Sets the rows of `x` after the last group to zero.
fn within_groups(x: CubeTensor, offsets: &CubeTensor) -> CubeTensor {
    let (int, device) = (IntDType::I32, offsets.device.clone());
    let bool_dtype = get_or_init_device_settings::<CubeBackend>(&device).bool_dtype;
    let (tokens, shape) = (x.meta.shape()[0], x.meta.shape().clone());
    let last = offsets.meta.shape()[0] - 1;
    let end = CubeBackend::int_slice(offsets.clone(), &[Slice::from(last..last + 1)]);
    let end = CubeBackend::int_expand(CubeBackend::int_cast(end, int), Shape::new([tokens]));
    let numbers = CubeBackend::int_arange(0..tokens as i64, &device, int);
    let others = CubeBackend::int_greater_equal(numbers, end, bool_dtype);
    let others = CubeBackend::bool_reshape(others, Shape::new([tokens, 1]));
    CubeBackend::float_mask_fill(x, CubeBackend::bool_expand(others, shape), Scalar::from(0))
}

/// Computes the M-grouped GEMM with the stack `w` (`[experts, n, k]`) in any float dtype: all
/// tokens by the weight of every expert, masked.
fn masked_m(
    x: CubeTensor,
    w: CubeTensor,
    bias: Option<CubeTensor>,
    offsets: CubeTensor,
) -> CubeTensor {
    let dtype = float_dtype(x.dtype);
    let (tokens, shape) = (x.meta.shape()[0], w.meta.shape().clone());
    let outputs = (0..shape[0]).map(|group| {
        let slices = [group..group + 1, 0..shape[1], 0..shape[2]].map(Slice::from);
        let w = CubeBackend::float_slice(w.clone(), &slices);
        let w = CubeBackend::float_reshape(w, Shape::new([shape[1], shape[2]]));
        let w = CubeBackend::float_swap_dims(w, 0, 1);
        let mut y = CubeBackend::float_matmul(x.clone(), w);
        if let Some(bias) = &bias {
            let slices = [group..group + 1, 0..shape[1]].map(Slice::from);
            let bias = CubeBackend::float_slice(bias.clone(), &slices);
            y = CubeBackend::float_add(y, cast(bias, dtype.into()));
        }
        CubeBackend::float_mul(y, members(&offsets, group, tokens, dtype))
    });
    outputs
        .reduce(CubeBackend::float_add)
        .expect("a stack has a matrix")
}

/// Computes the K-grouped GEMM in any float dtype: all tokens for every expert, with those of other
/// experts set to zero.
fn masked_k(x: CubeTensor, dy: CubeTensor, offsets: CubeTensor, dtype: FloatDType) -> CubeTensor {
    let (tokens, experts) = (x.meta.shape()[0], offsets.meta.shape()[0] - 1);
    let (m, n) = (x.meta.shape()[1], dy.meta.shape()[1]);
    let kind = float_dtype(x.dtype);
    let outputs = (0..experts).map(|group| {
        let own = CubeBackend::float_mul(x.clone(), members(&offsets, group, tokens, kind));
        CubeBackend::float_matmul(CubeBackend::float_swap_dims(own, 0, 1), dy.clone())
    });
    let stacked = CubeBackend::float_cat(outputs.collect(), 0);
    let stacked = CubeBackend::float_reshape(stacked, Shape::new([experts, m, n]));
    cast(stacked, dtype.into())
}
