//! The extension trait, and the values that cross it.
//!
//! Arguments are trusted here: [`functions`](crate::functions) and [`experts`](crate::experts)
//! check them before anything is queued, because an implementation may run later, on another
//! thread, where it can only panic.
//!
//! # Groups
//!
//! The linear layers of a mixture of experts run all experts in one launch. Tokens are sorted by
//! expert, `[tokens, d_in]`, and offsets (`u32[experts + 1]`, ascending from 0, none above
//! `tokens`) say where each expert's tokens begin. They stay on the device: shapes depend on the
//! numbers of tokens and experts alone.
//!
//! A grouped layer computes what the plain layer computes for each expert's tokens and weight:
//!
//! - In NVFP4, with MS-EDEN too, each group is quantized as a separate matrix. It has its own amax,
//!   before and after the transform, or one for each of its stored rows. Its blocks along the
//!   tokens begin at its first token; the last block, or transform, is padded with zeros. The same
//!   holds for each expert's weight (docs/src/numerics.md, sections 4 and 9).
//! - The MX formats have no amax beyond their blocks of 32, which begin at the first token of each
//!   group.
//! - High precision, of the original tensors or of dequantized ones, is multiplied as it is.
//!
//! The experts share the random streams of the layer. Block numbers, and those of MS-EDEN's groups
//! of 128, continue from group to group: from `first_row · blocks` on in a rowwise tensor, from
//! `columns · (blocks of the earlier groups along the tokens)` on in a columnwise one, so that no
//! two experts draw the same bits.

pub mod attention;
mod autodiff;
mod context;
#[cfg(any(feature = "cpu", feature = "cuda"))]
mod cube;
pub mod decode;
#[cfg(any(feature = "flex", feature = "cpu", feature = "cuda"))]
mod dequantize;
pub(crate) mod feed_forward;
#[cfg(feature = "flex")]
mod flex;
mod gradients;
pub mod graph;
pub mod inference;
pub mod layers;
#[cfg(any(feature = "flex", feature = "cubecl-backend"))]
mod layout;
pub(crate) mod linear;
pub mod loss;
#[cfg(feature = "cubecl-backend")]
mod meta;
pub(crate) mod operands;
pub mod optimizer;
mod probe;
mod rows;
mod spec;
mod tensors;

use burn_core as burn;

use burn_core::backend::{
    TensorMetadata, backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use burn_core::tensor::{DType, FloatDType, Shape};
use nvfp4_kernels::Usage;

pub use context::LinearContext;
pub(crate) use context::{CachedWeight, WeightCache, WeightIdentity};
pub use feed_forward::FeedForwardSpec;
use layers::{Activation, ActivationOps};
pub(crate) use probe::{Probe, SampledOperand};

pub use nvfp4_kernels::{AmaxGranularity, BlockShape, Format, Layout};
pub use spec::{BackwardSource, EdenDraw, LinearSpec, OperandSpec, QuantParams, QuantRounding};
pub use tensors::{
    GemmGroups, LinearParams, MaybeTensor, Operand, QuantUsages, QuantizedData, QuantizedMatrix,
    QuantizedPair, RowGroups, UnpermuteGradients,
};
#[cfg(feature = "cubecl-backend")]
pub use tensors::{
    GemmGroupsMetadata, LinearParamsMetadata, MaybeTensorMetadata, OperandMetadata,
    QuantizedDataMetadata, QuantizedMatrixMetadata, QuantizedPairMetadata, RowGroupsMetadata,
    UnpermuteGradientsMetadata,
};

/// NVFP4 operations on the primitives of a backend.
///
/// Matrices are 2-D floats of type `f32`, `bf16` or `f16`. Only
/// [`nvfp4_linear`](Self::nvfp4_linear), [`nvfp4_feed_forward`](Self::nvfp4_feed_forward),
/// [`nvfp4_moe_permute`](Self::nvfp4_moe_permute) and
/// [`nvfp4_moe_unpermute`](Self::nvfp4_moe_unpermute) are differentiable; under `Autodiff` the
/// results of the other operations are constants.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(any(feature = "cpu", feature = "cuda")),
    Fusion: cfg(feature = "cubecl-backend"),
    Autodiff
)]
pub trait Nvfp4Ops: ActivationOps {
    /// The quantized tensors of `x` (`[rows, cols]`) with the `usages`, from one read of `x` where
    /// one kernel makes both.
    ///
    /// `cols` must be a multiple of 16 for a rowwise NVFP4 tensor; a columnwise one is padded with
    /// zeros. 16x16 blocks need `rows` to be a multiple of 16 too. With [`RowGroups::Offsets`]
    /// blocks are 1x16 or 1x32, and the storage is packed.
    #[fusion(meta = meta::quantize)]
    fn nvfp4_quantize(
        x: FloatTensor<Self>,
        #[extension_type] groups: RowGroups<Self>,
        usages: QuantUsages,
    ) -> QuantizedPair<Self>;

    /// The quantized tensors of `activation` of the rows of `x`, or, with `grad`, of its gradient by
    /// `x`, given that of its output: those that [`nvfp4_quantize`](Self::nvfp4_quantize) makes of
    /// [`nvfp4_activation`](ActivationOps::nvfp4_activation) or
    /// [`nvfp4_activation_backward`](ActivationOps::nvfp4_activation_backward), bit for bit.
    ///
    /// Where amax values are wanted, GPUs find them in the pass that computes the activation.
    #[fusion(meta = meta::quantize_activation)]
    fn nvfp4_quantize_activation(
        x: FloatTensor<Self>,
        #[extension_type] grad: MaybeTensor<Self>,
        #[extension_type] groups: RowGroups<Self>,
        activation: Activation,
        usages: QuantUsages,
    ) -> QuantizedPair<Self> {
        let values = match grad.into_option() {
            None => Self::nvfp4_activation(x, activation),
            Some(grad) => Self::nvfp4_activation_backward(grad, x, activation),
        };
        Self::nvfp4_quantize(values, groups, usages)
    }

    /// The values of `source`, which is NVFP4, packed and not transformed, quantized straight from
    /// its codes, by MS-EDEN or to an MX format. For an MX format the values are rounded to `via`
    /// first. With groups, which are those of `source`, `source` is rowwise.
    #[fusion(meta = meta::requantize)]
    fn nvfp4_requantize(
        #[extension_type] source: QuantizedMatrix<Self>,
        #[extension_type] groups: RowGroups<Self>,
        usage: Usage,
        params: QuantParams,
        via: FloatDType,
    ) -> QuantizedMatrix<Self>;

    /// The values of `source` in the orientation of its source, `[rows, cols]`. With a transform
    /// they stay in the rotated domain. With groups, `source` is rowwise; rows of no group are
    /// undefined.
    #[fusion(meta = meta::dequantize)]
    fn nvfp4_dequantize(
        #[extension_type] source: QuantizedMatrix<Self>,
        #[extension_type] groups: RowGroups<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self>;

    /// The GEMM of two operands, see [`GemmGroups`], accumulated in `f32` and rounded once to
    /// `dtype`. `alpha` is one operand's global scale times the other's.
    ///
    /// Two float operands have one type, and none is multiplied with a quantized one whose
    /// contraction is padded.
    #[fusion(meta = meta::gemm)]
    fn nvfp4_gemm(
        #[extension_type] a: Operand<Self>,
        #[extension_type] b: Operand<Self>,
        #[extension_type] bias: MaybeTensor<Self>,
        #[extension_type] groups: GemmGroups<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self>;

    /// `y = x w + bias` for `x` (`[m, d_in]`), `w` (`[d_in, d_out]`) and `bias` (`[d_out]`), with
    /// the operands of `spec`, in the type of `x`.
    ///
    /// With [`RowGroups::Offsets`], `y[i] = x[i] w[g] + bias[g]` for the rows `i` of group `g`, `w`
    /// being `[experts, d_in, d_out]` and `bias` `[experts, d_out]`; rows of no group are zero.
    /// `Autodiff` overrides it with its own backward.
    #[fusion(default)]
    fn nvfp4_linear(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        #[extension_type] bias: MaybeTensor<Self>,
        #[extension_type] groups: RowGroups<Self>,
        spec: LinearSpec,
        context: LinearContext,
    ) -> FloatTensor<Self> {
        let x = operands::QuantSource::Matrix(x);
        let params = LinearParams { weight: w, bias };
        linear::infer::<Self>(x, params, &groups, (&spec, &context))
    }

    /// `activation(x w_in + bias_in) w_out + bias_out`, each linear layer as
    /// [`nvfp4_linear`](Self::nvfp4_linear) computes it with its part of `spec`.
    ///
    /// `Autodiff` overrides it. It keeps for the backward what both layers keep, and the input of
    /// the activation, or, with [`FeedForwardSpec::recompute`], the operands that it is the GEMM
    /// of.
    #[fusion(default)]
    fn nvfp4_feed_forward(
        x: FloatTensor<Self>,
        #[extension_type] input: LinearParams<Self>,
        #[extension_type] output: LinearParams<Self>,
        #[extension_type] groups: RowGroups<Self>,
        spec: FeedForwardSpec,
    ) -> FloatTensor<Self> {
        feed_forward::infer::<Self>(x, input, output, groups, spec)
    }

    /// The value of its group for each of `rows` rows, from `values`, `f32[groups]`; 0 for rows of
    /// no group.
    #[fusion(meta = meta::broadcast_group_values)]
    fn nvfp4_broadcast_group_values(
        values: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        rows: usize,
    ) -> FloatTensor<Self>;

    /// The sum of the rows of each group of `x` (`[tokens, cols]`), `f32[groups, cols]`.
    #[fusion(meta = meta::segment_sum)]
    fn nvfp4_segment_sum(x: FloatTensor<Self>, offsets: IntTensor<Self>) -> FloatTensor<Self>;

    /// Rows of `x` (`[tokens, width]`) by number: `out[s] = x[index[s]]` for `index` `[slots]`.
    ///
    /// `inverse` (`[tokens, copies]`) holds, for each row of `x`, the slots that it went to; every
    /// slot stands there once. `Autodiff` overrides it: with the inverse the backward is a gather
    /// too, `dx[t] = Σⱼ dout[inverse[t, j]]`, in a fixed order and in `f32`, where that of a plain
    /// selection scatters.
    #[fusion(default)]
    fn nvfp4_moe_permute(
        x: FloatTensor<Self>,
        index: IntTensor<Self>,
        _inverse: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let slots = index.shape()[0];
        let places = Self::int_reshape(index, Shape::new([slots, 1]));
        Self::nvfp4_sum_rows(x, MaybeTensor::Absent, places)
    }

    /// `out[t] = Σⱼ weights[t, j] · y[places[t, j]]`, in `f32`, rounded once to the type of `y`:
    /// for `y` (`[slots, width]`), `weights` (`f32[tokens, copies]`) and `places` (`[tokens,
    /// copies]`), which holds every slot once; `choices` (`[slots]`) is its inverse, `t * copies +
    /// j`.
    ///
    /// `Autodiff` overrides it with a backward that gathers too.
    #[fusion(default)]
    fn nvfp4_moe_unpermute(
        y: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        places: IntTensor<Self>,
        _choices: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        Self::nvfp4_sum_rows(y, MaybeTensor::Present(weights), places)
    }

    /// The gradients of [`nvfp4_moe_unpermute`](Self::nvfp4_moe_unpermute), given that of its
    /// output (`[tokens, width]`), which has the type of `y`.
    #[fusion(meta = meta::moe_unpermute_backward)]
    fn nvfp4_moe_unpermute_backward(
        dout: FloatTensor<Self>,
        y: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        places: IntTensor<Self>,
        choices: IntTensor<Self>,
    ) -> UnpermuteGradients<Self> {
        rows::unpermute_backward::<Self>(dout, y, weights, places, choices)
    }

    /// `out[i] = Σⱼ weights[i, j] · x[places[i, j]]`, without `weights` the sum of the rows: for
    /// `x` (`[rows, width]`), `weights` (`f32[n, copies]`) and `places` (`[n, copies]`), row
    /// numbers, at least one column of them. In `f32`, in the order of `j`, rounded once to the
    /// type of `x`.
    #[fusion(meta = meta::sum_rows)]
    fn nvfp4_sum_rows(
        x: FloatTensor<Self>,
        #[extension_type] weights: MaybeTensor<Self>,
        places: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        rows::sum::<Self>(x, weights, places)
    }
}

/// The float type of a tensor that is known to hold one of the three supported types.
pub(crate) fn float_dtype(dtype: DType) -> FloatDType {
    match dtype {
        DType::F32 => FloatDType::F32,
        DType::BF16 => FloatDType::BF16,
        DType::F16 => FloatDType::F16,
        other => panic!("element type {other:?}: expected F32, BF16 or F16"),
    }
}

/// Reports work to `tracing`: one event for each quantization or GEMM that a backend computes.
#[cfg(any(feature = "flex", feature = "cpu", feature = "cuda"))]
fn trace_op(op: &'static str, usage: &'static str, rows: usize, cols: usize) {
    tracing::trace!(target: "burn_nvfp4::ops", op, usage, rows, cols);
}

/// The name of a usage in traces.
#[cfg(any(feature = "flex", feature = "cpu", feature = "cuda"))]
fn usage_name(usage: Usage) -> &'static str {
    match usage {
        Usage::Rowwise => "rowwise",
        Usage::Columnwise => "columnwise",
    }
}
