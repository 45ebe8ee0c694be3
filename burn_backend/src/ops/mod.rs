//! Extension trait, and the values that cross it.
//!
//! Arguments are not checked here: [`functions`](crate::functions) and [`experts`](crate::experts)
//! check them before anything is queued, because an implementation may run later on another thread,
//! where it can only panic.
//!
//! The module is public for tests only; it is not part of the interface. Groups of rows are described
//! in [`experts`](crate::experts).

pub mod attention;
mod autodiff;
mod branch;
pub mod collective;
mod context;
#[cfg(any(feature = "cpu", feature = "cuda"))]
mod cube;
pub mod decode;
#[cfg(any(feature = "flex", feature = "cpu", feature = "cuda"))]
mod dequantize;
mod dtype;
pub(crate) mod feed_forward;
#[cfg(feature = "flex")]
mod flex;
pub mod fp8;
mod gradients;
pub mod graph;
pub mod inference;
mod kernels;
pub(crate) mod known_amax;
pub mod layers;
#[cfg(any(feature = "flex", feature = "cubecl-backend"))]
mod layout;
pub(crate) mod linear;
pub mod loss;
#[cfg(feature = "cubecl-backend")]
mod meta;
pub mod norm_linear;
pub(crate) mod operands;
pub mod optimizer;
pub mod packed;
mod probe;
pub mod routing;
mod rows;
mod segments;
pub(crate) mod sharding;
mod spec;
mod tensors;

use burn_core as burn;

use burn_core::backend::{
    backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use nvfp4_formats::Usage;

pub use branch::{Branch, BranchPoint};
pub use context::LinearContext;
pub(crate) use context::{CachedWeight, TensorIdentity, WeightCache, WeightIdentity};
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub use cube::device_matrix;
pub(crate) use dtype::float_dtype;
pub use feed_forward::FeedForwardSpec;
pub use kernels::Nvfp4KernelOps;
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub(crate) use kernels::inner;
pub(crate) use probe::{Probe, SampledOperand};

pub use nvfp4_formats::{AmaxGranularity, BlockShape, Format, Layout, StoredForm};
pub use spec::{BackwardSource, EdenDraw, LinearSpec, OperandSpec, QuantParams, QuantRounding};
pub use tensors::{
    ComputedAmax, GatherSpec, GemmGroups, GivenAmax, LinearParams, MaybeTensor, Named, Operand,
    OtherRows, QuantizeRequest, QuantizeSource, QuantizedData, QuantizedMatrix, QuantizedPair,
    RowGroups, UnpermuteGradients,
};
#[cfg(feature = "cubecl-backend")]
pub use tensors::{
    ComputedAmaxMetadata, GemmGroupsMetadata, GivenAmaxMetadata, LinearParamsMetadata,
    MaybeTensorMetadata, OperandMetadata, QuantizeRequestMetadata, QuantizeSourceMetadata,
    QuantizedDataMetadata, QuantizedMatrixMetadata, QuantizedPairMetadata, RowGroupsMetadata,
    UnpermuteGradientsMetadata,
};

/// Differentiable layers, implemented by [`Nvfp4KernelOps`].
///
/// Matrices are 2-D floats of dtype `f32`, `bf16` or `f16`. `Autodiff` overrides each operation
/// with a custom backward.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(any(feature = "cpu", feature = "cuda")),
    Fusion: cfg(feature = "cubecl-backend"),
    Autodiff
)]
pub trait Nvfp4Ops: Nvfp4KernelOps {
    /// Computes `y = x w + bias` for `x` (`[m, d_in]`), `w` (`[d_in, d_out]`) and `bias`
    /// (`[d_out]`), with the operands of `spec`, in the dtype of `x`.
    ///
    /// With [`RowGroups::Offsets`], computes `y[i] = x[i] w[g] + bias[g]` for the rows `i` of group
    /// `g`, with `w` `[experts, d_in, d_out]` and `bias` `[experts, d_out]`; rows of no group are
    /// zero. `Autodiff` overrides it with a custom backward.
    #[fusion(default)]
    fn nvfp4_linear(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        #[extension_type] bias: MaybeTensor<Self>,
        #[extension_type] groups: RowGroups<Self>,
        spec: LinearSpec,
        context: LinearContext,
    ) -> FloatTensor<Self> {
        let x = QuantizeSource::Matrix(x);
        let params = LinearParams { weight: w, bias };
        linear::infer::<Self>(x, params, &groups, (&spec, &context))
    }

    /// Computes `added + x w` for `added` (`[m, d_out]`) in the dtype of `x`, otherwise like
    /// [`nvfp4_linear`](Self::nvfp4_linear) without a bias. The sum is that of
    /// [`nvfp4_add_gemm`](Nvfp4KernelOps::nvfp4_add_gemm).
    ///
    /// `Autodiff` overrides it: the gradient of `added` is that of the output, not a copy of it.
    #[fusion(default)]
    fn nvfp4_add_linear(
        added: FloatTensor<Self>,
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        spec: LinearSpec,
    ) -> FloatTensor<Self> {
        linear::add::<Self>(added, [x, w], spec, linear::RequiresGrad::NONE).0
    }

    /// Computes `activation(x w_in + bias_in) w_out + bias_out`, each linear layer as by
    /// [`nvfp4_linear`](Self::nvfp4_linear) with its part of `spec`.
    ///
    /// `Autodiff` overrides it. It keeps for the backward the saved state of both layers, and
    /// either the input of the activation, or, with [`FeedForwardSpec::recompute`], the operands of
    /// the GEMM that computes it.
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

    /// Gathers rows of `x` (`[tokens, width]`): `out[s] = x[index[s]]` for `index` `[slots]`.
    ///
    /// `inverse` (`[tokens, copies]`) holds, for each row of `x`, the slots that it was copied to,
    /// every slot once. `Autodiff` overrides it: with the inverse the backward is a gather too,
    /// `dx[t] = Σⱼ dout[inverse[t, j]]`, in a fixed order and in `f32`, whereas that of a plain
    /// selection scatters. With [`Named::Some`] indices and slots may be out of range: such rows of
    /// the result are undefined, and such slots add nothing to a gradient. `groups` are those of
    /// the result, for its amax values.
    #[fusion(default)]
    fn nvfp4_moe_permute(
        x: FloatTensor<Self>,
        index: IntTensor<Self>,
        _inverse: IntTensor<Self>,
        #[extension_type] groups: RowGroups<Self>,
        spec: GatherSpec,
    ) -> FloatTensor<Self> {
        Self::nvfp4_gather_rows(x, index, groups, spec)
    }

    /// Computes `out[t] = Σⱼ weights[t, j] · y[places[t, j]]`, in `f32`, rounded once to the dtype
    /// of `y`, for `y` (`[slots, width]`), `weights` (`f32[tokens, copies]`) and `places`
    /// (`[tokens, copies]`), which holds every slot once. `choices` (`[slots]`) is its inverse,
    /// `t * copies + j`.
    ///
    /// `Autodiff` overrides it with a backward that gathers too. With [`Named::Some`] places and
    /// slots may be out of range: they add nothing, and have no gradient.
    #[fusion(default)]
    fn nvfp4_moe_unpermute(
        y: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        places: IntTensor<Self>,
        _choices: IntTensor<Self>,
        named: Named,
    ) -> FloatTensor<Self> {
        Self::nvfp4_sum_rows(y, MaybeTensor::Present(weights), places, named)
    }
}

/// Reports work to `tracing`: one event per quantization or GEMM of a backend.
#[cfg(any(feature = "flex", feature = "cpu", feature = "cuda"))]
fn trace_op(op: &'static str, usage: &'static str, rows: usize, cols: usize) {
    tracing::trace!(target: "burn_nvfp4::ops", op, usage, rows, cols);
}

/// Returns the name of a usage in traces.
#[cfg(any(feature = "flex", feature = "cpu", feature = "cuda"))]
fn usage_name(usage: Usage) -> &'static str {
    match usage {
        Usage::Rowwise => "rowwise",
        Usage::Columnwise => "columnwise",
    }
}
