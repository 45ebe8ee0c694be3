//! Operations on plain tensors.
//!
//! Each function has two forms. `try_*` returns an [`Nvfp4Error`] that names the argument. The
//! plain name panics with the same message, as Burn's own operations do. If a check fails, nothing
//! has been queued.

use burn_core::backend::Dispatch;
use burn_core::tensor::{DType, FloatDType, Int, Tensor};
use nvfp4_formats::{BlockScaling, Hadamard, Layout, Nvfp4Error, Rounding, Usage};

use crate::ops::{
    GemmGroups, LinearContext, MaybeTensor, Nvfp4KernelOps, Nvfp4Ops, Operand, QuantizeRequest,
    QuantizedData, QuantizedMatrix, RowGroups, StoredForm,
};
use crate::validate;

pub use crate::layers::{
    add_rms_norm, gelu, layer_norm, rms_norm, swiglu, try_add_rms_norm, try_gelu, try_layer_norm,
    try_rms_norm, try_swiglu,
};
pub use crate::ops::layers::Gelu;
pub use crate::ops::{
    BackwardSource, EdenDraw, LinearSpec, OperandSpec, QuantParams, QuantRounding,
};

/// Matrix in NVFP4: 4-bit codes, one scale per block of 16, and the amax values.
///
/// It is a constant for autodiff.
#[derive(Clone, Debug)]
pub struct Nvfp4Tensor {
    codes: Tensor<2, Int>,
    scales: Tensor<2, Int>,
    amax: Tensor<1>,
    layout: Layout,
}

impl Nvfp4Tensor {
    /// Creates a quantized matrix from its buffers: `codes` `u32[outer, blocks * 2]`, `scales`
    /// `u8[outer, blocks]`, `amax` `f32[amax_len]`.
    ///
    /// # Errors
    /// Returns an error if `layout` is not that of a packed NVFP4 tensor with compact scales, or a
    /// buffer's shape, dtype or device does not match `layout`.
    pub fn try_from_parts(
        codes: Tensor<2, Int>,
        scales: Tensor<2, Int>,
        amax: Tensor<1>,
        layout: Layout,
    ) -> Result<Self, Nvfp4Error> {
        validate::device("codes", &codes.device())?;
        let plain = Layout::nvfp4(layout.rows, layout.cols, layout.usage);
        let kind = |layout: &Layout| (layout.format, layout.form);
        if kind(&layout) != kind(&plain) {
            return Err(Nvfp4Error::value(
                "layout",
                format!("{:?}", kind(&layout)),
                format!("{:?}", kind(&plain)),
            ));
        }
        let (outer, blocks) = (layout.outer(), layout.blocks());
        validate::buffer("codes", &codes, [outer, blocks * 2], DType::U32)?;
        validate::buffer("scales", &scales, [outer, blocks], DType::U8)?;
        validate::buffer("amax", &amax, [layout.amax_len()], DType::F32)?;
        validate::same_device(("codes", &codes.device()), ("scales", &scales.device()))?;
        validate::same_device(("codes", &codes.device()), ("amax", &amax.device()))?;
        Ok(Self {
            codes,
            scales,
            amax,
            layout,
        })
    }

    /// Returns the codes, `u32[outer, blocks * 2]`: eight codes per word, the first in the lowest
    /// four bits.
    pub fn codes(&self) -> &Tensor<2, Int> {
        &self.codes
    }

    /// Returns the block scales, `u8[outer, blocks]`: E4M3 bytes.
    pub fn scales(&self) -> &Tensor<2, Int> {
        &self.scales
    }

    /// Returns the amax of the source, or of each stored row: `f32[amax_len]`.
    pub fn amax(&self) -> &Tensor<1> {
        &self.amax
    }

    /// Returns the layout of the buffers.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    pub(crate) fn from_dispatch(quantized: QuantizedMatrix<Dispatch>) -> Self {
        let layout = quantized.layout;
        let amax = quantized.amax.clone().into_option();
        let (codes, scales) = quantized.into_packed();
        Self {
            codes: Tensor::from_dispatch(codes),
            scales: Tensor::from_dispatch(scales),
            amax: Tensor::from_dispatch(amax.expect("NVFP4 has a global scale")),
            layout,
        }
    }

    fn into_dispatch(self) -> QuantizedMatrix<Dispatch> {
        QuantizedMatrix {
            data: QuantizedData::Packed {
                codes: self.codes.into_dispatch(),
                scales: self.scales.into_dispatch(),
            },
            amax: MaybeTensor::Present(self.amax.into_dispatch()),
            layout: self.layout,
        }
    }
}

/// Quantizes the matrix `x` (`[rows, cols]`, `f32`, `bf16` or `f16`) in 1x16 blocks along `usage`,
/// after the transform `hadamard` along the same axis, if given.
///
/// # Errors
/// Returns an error if the device or the dtype is not supported, `cols` is not a multiple of 16 for
/// [`Usage::Rowwise`], or a transform is requested along [`Usage::Rowwise`].
pub fn try_quantize(
    x: Tensor<2>,
    usage: Usage,
    rounding: Rounding,
    hadamard: Option<Hadamard>,
) -> Result<Nvfp4Tensor, Nvfp4Error> {
    let params = quantize_params(&x, usage, rounding, hadamard)?;
    let request = QuantizeRequest::of_matrix(x.into_dispatch());
    let made = Dispatch::nvfp4_quantize(request.along(usage, params, StoredForm::Rows));
    Ok(Nvfp4Tensor::from_dispatch(made.into_one()))
}

/// Returns the quantization parameters of [`try_quantize`] for `x`, after its checks.
pub(crate) fn quantize_params(
    x: &Tensor<2>,
    usage: Usage,
    rounding: Rounding,
    hadamard: Option<Hadamard>,
) -> Result<QuantParams, Nvfp4Error> {
    validate::operand("x", x)?;
    match (usage, hadamard) {
        (Usage::Rowwise, Some(_)) => {
            return Err(Nvfp4Error::value(
                "hadamard",
                "a transform for the rowwise tensor",
                "none: the transform belongs to columnwise tensors",
            ));
        }
        (Usage::Rowwise, None) => validate::blocks("x", "cols", x.dims()[1])?,
        (Usage::Columnwise, _) => {}
    }
    Ok(QuantParams {
        hadamard,
        ..QuantParams::nvfp4(rounding)
    })
}

/// Panicking version of [`try_quantize`].
#[track_caller]
pub fn quantize(
    x: Tensor<2>,
    usage: Usage,
    rounding: Rounding,
    hadamard: Option<Hadamard>,
) -> Nvfp4Tensor {
    or_panic("quantize", try_quantize(x, usage, rounding, hadamard))
}

/// Quantizes the matrix `x` (`[rows, cols]`) in 16x16 blocks, rounded to nearest. Returns the
/// row-wise and the column-wise tensor, exact transposes of each other.
///
/// # Errors
/// Returns an error if the device or the dtype is not supported, or a dimension is not a multiple
/// of 16.
pub fn try_quantize_tiles(x: Tensor<2>) -> Result<(Nvfp4Tensor, Nvfp4Tensor), Nvfp4Error> {
    validate::operand("x", &x)?;
    let [rows, cols] = x.dims();
    validate::blocks("x", "rows", rows)?;
    validate::blocks("x", "cols", cols)?;
    let params = QuantParams::nvfp4_2d(BlockScaling::Standard);
    let request = QuantizeRequest::of_matrix(x.into_dispatch());
    let made = Dispatch::nvfp4_quantize(request.both(params, params));
    let (rowwise, columnwise) = made.into_both();
    Ok((
        Nvfp4Tensor::from_dispatch(rowwise),
        Nvfp4Tensor::from_dispatch(columnwise),
    ))
}

/// Panicking version of [`try_quantize_tiles`].
#[track_caller]
pub fn quantize_tiles(x: Tensor<2>) -> (Nvfp4Tensor, Nvfp4Tensor) {
    or_panic("quantize_tiles", try_quantize_tiles(x))
}

/// Dequantizes `packed` in the orientation of its source (`[rows, cols]`) to `dtype`. The values of
/// a transformed tensor stay in the rotated domain.
///
/// # Errors
/// Returns an error if `dtype` is not one of `F32`, `BF16` and `F16`.
pub fn try_dequantize(packed: Nvfp4Tensor, dtype: FloatDType) -> Result<Tensor<2>, Nvfp4Error> {
    validate::float("dtype", dtype.into())?;
    Ok(Tensor::from_dispatch(Dispatch::nvfp4_dequantize(
        packed.into_dispatch(),
        RowGroups::Whole,
        dtype,
    )))
}

/// Panicking version of [`try_dequantize`].
#[track_caller]
pub fn dequantize(packed: Nvfp4Tensor, dtype: FloatDType) -> Tensor<2> {
    or_panic("dequantize", try_dequantize(packed, dtype))
}

/// Computes `out[m, n] = alpha · Σₖ a[m, k] · b[n, k] + bias[n]` over the stored rows of both
/// operands, accumulated in `f32` and rounded once to `dtype`.
///
/// # Errors
/// Returns an error if the operands differ in K or transform, the shape of the bias is not
/// `[b's stored rows]`, devices differ, or a dtype is not supported.
pub fn try_matmul(
    a: Nvfp4Tensor,
    b: Nvfp4Tensor,
    bias: Option<Tensor<1>>,
    dtype: FloatDType,
) -> Result<Tensor<2>, Nvfp4Error> {
    validate::float("dtype", dtype.into())?;
    validate::same_device(("a", &a.codes.device()), ("b", &b.codes.device()))?;
    let (la, lb) = (a.layout, b.layout);
    if la.inner() != lb.inner() {
        return Err(Nvfp4Error::shape(
            "b",
            format!("a contraction of {}", lb.inner()),
            format!("{}, as in `a`", la.inner()),
        ));
    }
    if la.hadamard != lb.hadamard {
        return Err(Nvfp4Error::value(
            "b",
            format!("transform {:?}", lb.hadamard),
            format!("{:?}, as in `a`", la.hadamard),
        ));
    }
    if let Some(bias) = &bias {
        validate::operand("bias", bias)?;
        validate::same_device(("a", &a.codes.device()), ("bias", &bias.device()))?;
        if bias.dims() != [lb.outer()] {
            return Err(Nvfp4Error::shape(
                "bias",
                format!("{:?}", bias.dims()),
                format!("[{}], the stored rows of `b`", lb.outer()),
            ));
        }
    }
    let [a, b] = [a, b].map(|operand| Operand::Quantized(operand.into_dispatch()));
    let out = Dispatch::nvfp4_gemm(a, b, into_bias(bias), GemmGroups::None, dtype);
    Ok(Tensor::from_dispatch(out))
}

/// Panicking version of [`try_matmul`].
#[track_caller]
pub fn matmul(
    a: Nvfp4Tensor,
    b: Nvfp4Tensor,
    bias: Option<Tensor<1>>,
    dtype: FloatDType,
) -> Tensor<2> {
    or_panic("matmul", try_matmul(a, b, bias, dtype))
}

/// Linear layer `y = Q(x) Q(weight) + bias`, differentiable by `x`, `weight` and `bias`, with
/// forward and backward in NVFP4.
///
/// `x` is `[..., d_in]` (any number of leading axes, including none, is flattened to rows),
/// `weight` is `[d_in, d_out]`, and `bias` is `[d_out]`; each may be `f32`, `bf16` or `f16`. The
/// output has the dtype of `x`; each gradient has the dtype of its tensor.
///
/// # Errors
/// Returns an error if the device has no implementation, devices differ, a dtype is not supported,
/// a shape does not fit, `d_in` or `d_out` is not a positive multiple of 16 while an operand is
/// quantized, or no kernel supports the operands of `spec`.
pub fn try_linear<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    spec: LinearSpec,
) -> Result<Tensor<D>, Nvfp4Error> {
    check_linear(&x, &weight, bias.as_ref(), spec)?;
    Ok(linear_unchecked(
        x,
        weight,
        bias,
        spec,
        LinearContext::default(),
    ))
}

/// Panicking version of [`try_linear`].
#[track_caller]
pub fn linear<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    spec: LinearSpec,
) -> Tensor<D> {
    or_panic("linear", try_linear(x, weight, bias, spec))
}

/// Returns an error if a linear layer with the operands of `spec` does not accept these tensors.
fn check_linear<const D: usize>(
    x: &Tensor<D>,
    weight: &Tensor<2>,
    bias: Option<&Tensor<1>>,
    spec: LinearSpec,
) -> Result<(), Nvfp4Error> {
    validate::linear_tensors(x, weight, bias)?;
    if spec.is_quantized() {
        validate::weight_blocks("weight", weight)?;
    }
    spec.check()
}

/// Linear layer that is added to a matrix: `y = added + Q(x) Q(weight)`, differentiable by `added`,
/// `x` and `weight`.
///
/// `added` is `[rows, d_out]`, `x` is `[rows, d_in]` in the dtype of `added`, and `weight` is
/// `[d_in, d_out]`. The product is summed in `f32`, `added` is added to it in `f32`, and the sum is
/// rounded once. If `added` is the output of another layer, it was rounded before: that sum of two
/// layers is rounded twice.
///
/// The output has the memory of `added`, unless another tensor shares it, which costs a copy. The
/// gradient of `added` is that of the output, without a copy.
///
/// # Errors
/// Same as [`try_linear`]; also if `added` does not match.
pub fn try_add_linear(
    added: Tensor<2>,
    x: Tensor<2>,
    weight: Tensor<2>,
    spec: LinearSpec,
) -> Result<Tensor<2>, Nvfp4Error> {
    check_linear(&x, &weight, None, spec)?;
    validate::same_dtype(("x", x.dtype()), ("added", added.dtype()))?;
    validate::same_device(("x", &x.device()), ("added", &added.device()))?;
    let ([rows, _], [_, d_out]) = (x.dims(), weight.dims());
    validate::shape("added", added.dims(), [rows, d_out], || {
        "that of the product of `x` and `weight`".into()
    })?;
    Ok(Tensor::from_dispatch(Dispatch::nvfp4_add_linear(
        added.into_dispatch(),
        x.into_dispatch(),
        weight.into_dispatch(),
        spec,
    )))
}

/// Panicking version of [`try_add_linear`].
#[track_caller]
pub fn add_linear(
    added: Tensor<2>,
    x: Tensor<2>,
    weight: Tensor<2>,
    spec: LinearSpec,
) -> Tensor<2> {
    or_panic("add_linear", try_add_linear(added, x, weight, spec))
}

/// Runs the layer after [`validate::linear`].
pub(crate) fn linear_unchecked<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    spec: LinearSpec,
    context: LinearContext,
) -> Tensor<D> {
    let [_, d_out] = weight.dims();
    let mut dims = x.dims();
    let rows = dims[..D - 1].iter().product();
    // `d_in` is taken from `x`, because the weight may be a rank's shard of its rows.
    let d_in = dims[D - 1];
    let x: Tensor<2> = x.reshape([rows, d_in]);
    let y = linear_of_rows(x, weight, bias, spec, context);
    dims[D - 1] = d_out;
    y.reshape(dims)
}

/// Version of [`linear_unchecked`] for rows. If the layer is sharded by tokens, the number of
/// output rows differs.
pub(crate) fn linear_of_rows(
    x: Tensor<2>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    spec: LinearSpec,
    context: LinearContext,
) -> Tensor<2> {
    Tensor::from_dispatch(Dispatch::nvfp4_linear(
        x.into_dispatch(),
        weight.into_dispatch(),
        into_bias(bias),
        RowGroups::Whole,
        spec,
        context,
    ))
}

pub(crate) fn into_bias<const D: usize>(bias: Option<Tensor<D>>) -> MaybeTensor<Dispatch> {
    bias.map(Tensor::into_dispatch).into()
}

/// Follows Burn's convention for operations: invalid arguments panic before anything is queued.
#[track_caller]
pub(crate) fn or_panic<T>(operation: &str, result: Result<T, Nvfp4Error>) -> T {
    result.unwrap_or_else(|error| panic!("nvfp4 {operation}: {error}"))
}

/// Computes the logits `x weight` for small M, accumulated in `f32` and rounded once. `x` is
/// `[rows, d_model]`, and `weight` is `[d_model, vocab]`, fastest as a transposed view of a
/// `[vocab, d_model]` buffer; both `f32`, `bf16` or `f16`. A constant for autodiff.
///
/// # Errors
/// Returns an error if shapes, dtypes or devices do not fit.
pub fn try_logits(x: Tensor<2>, weight: Tensor<2>) -> Result<Tensor<2>, Nvfp4Error> {
    validate::operand("x", &x)?;
    validate::operand("weight", &weight)?;
    validate::same_device(("x", &x.device()), ("weight", &weight.device()))?;
    let ([_, d_model], [rows, vocab]) = (x.dims(), weight.dims());
    validate::shape("weight", [rows, vocab], [d_model, vocab], || {
        "as many rows as `x` has columns".into()
    })?;
    let x = Operand::Float(x.into_dispatch(), Usage::Rowwise);
    let weight = Operand::Float(weight.into_dispatch(), Usage::Columnwise);
    let bias = MaybeTensor::Absent;
    let logits = Dispatch::nvfp4_gemm(x, weight, bias, GemmGroups::None, FloatDType::F32);
    Ok(Tensor::from_dispatch(logits))
}
