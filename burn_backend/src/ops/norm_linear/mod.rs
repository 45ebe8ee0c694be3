//! RMSNorm, packed linear layer and optional SwiGLU, as a separate extension trait.
//! [`nn`](crate::nn) checks the arguments before anything is queued.

#[cfg(any(feature = "cpu", feature = "cuda"))]
mod cube;
#[cfg(feature = "flex")]
mod flex;

use burn_core as burn;

use burn_core::backend::{
    Autodiff, AutodiffBackend, Backend, ExtensionType,
    autodiff::checkpoint::strategy::CheckpointStrategy, backend_extension, tensor::FloatTensor,
};
use nvfp4_formats::StoredForm;
use nvfp4_formats::reference::{Activation, Norm};

#[cfg(feature = "cubecl-backend")]
use super::MaybeTensorMetadata;
use super::kernels::inner;
use super::layers::{ActivationOps, NormOps, NormOutput, NormSpec};
use super::packed::{Activations, PackedInput, PackedOps};
use super::tensors::{MaybeTensor, QuantizedMatrix, RowGroups};

/// Parameters other than the tensors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormLinearSpec {
    /// Term added to the mean square of a row.
    pub epsilon: f32,
    /// True if the output of the GEMM is gate and up, to which SwiGLU is applied.
    pub swiglu: bool,
}

/// Result of a linear layer after a norm.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct NormLinearResult<B: Backend> {
    /// Sum of `x` and the residual, rounded to their dtype, if there is a residual.
    #[extension_type]
    pub sum: MaybeTensor<B>,
    /// Output, in the dtype of `x`.
    pub y: FloatTensor<B>,
}

/// Unquantized input of a layer with packed weights (W4A16).
const AS_IT_IS: PackedInput = PackedInput {
    activations: Activations::HighPrecision,
    form: StoredForm::Rows,
};

/// Linear layers after norms.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(any(feature = "cpu", feature = "cuda")),
    Fusion: cfg(feature = "cubecl-backend"),
    Autodiff
)]
pub trait NormLinearOps: PackedOps + NormOps + ActivationOps {
    /// Computes `swiglu(norm(x + residual) wᵀ + bias)`, or the same without SwiGLU, for `x`
    /// (`[rows, d_in]`), the optional residual of its shape and dtype, the `gain` `f32[d_in]`, the
    /// row-wise tensor `w` of `[d_out, d_in]` and `bias` (`[d_out]`).
    ///
    /// The bits are those of the sequence [`nvfp4_norm`](NormOps::nvfp4_norm),
    /// [`nvfp4_packed_linear`](PackedOps::nvfp4_packed_linear),
    /// [`nvfp4_activation`](ActivationOps::nvfp4_activation). On GPUs, bf16 with small M runs as
    /// one kernel. Under `Autodiff` the results are constants.
    #[fusion(meta = meta::norm_linear)]
    fn nvfp4_norm_linear(
        x: FloatTensor<Self>,
        #[extension_type] residual: MaybeTensor<Self>,
        gain: FloatTensor<Self>,
        #[extension_type] w: QuantizedMatrix<Self>,
        #[extension_type] bias: MaybeTensor<Self>,
        spec: NormLinearSpec,
    ) -> NormLinearResult<Self>;
}

/// Returns the sum with the residual, if any, and its norm.
fn norm<B: NormLinearOps>(
    x: FloatTensor<B>,
    residual: MaybeTensor<B>,
    gain: FloatTensor<B>,
    spec: NormLinearSpec,
) -> (MaybeTensor<B>, FloatTensor<B>) {
    let has_residual = matches!(residual, MaybeTensor::Present(_));
    let spec = NormSpec {
        norm: Norm::Rms,
        epsilon: spec.epsilon,
        amax: None,
        grad_amax: None,
    };
    let NormOutput { sum, normed } = B::nvfp4_norm(x, residual, gain, MaybeTensor::Absent, spec);
    (has_residual.then_some(sum).into(), normed)
}

/// Applies the linear layer to the normalized rows, and SwiGLU to the result.
fn linear<B: NormLinearOps>(
    normed: FloatTensor<B>,
    w: QuantizedMatrix<B>,
    bias: MaybeTensor<B>,
    spec: NormLinearSpec,
) -> FloatTensor<B> {
    let (groups, global) = (RowGroups::Whole, MaybeTensor::Absent);
    let y = B::nvfp4_packed_linear(normed, AS_IT_IS, w, bias, groups, global);
    match spec.swiglu {
        true => B::nvfp4_activation(y, Activation::SwiGlu),
        false => y,
    }
}

/// Computes [`NormLinearOps::nvfp4_norm_linear`] as three operations.
fn separate<B: NormLinearOps>(
    x: FloatTensor<B>,
    residual: MaybeTensor<B>,
    gain: FloatTensor<B>,
    w: QuantizedMatrix<B>,
    bias: MaybeTensor<B>,
    spec: NormLinearSpec,
) -> NormLinearResult<B> {
    let (sum, normed) = norm::<B>(x, residual, gain, spec);
    let y = linear::<B>(normed, w, bias, spec);
    NormLinearResult { sum, y }
}

impl<B: NormLinearOps, C: CheckpointStrategy> NormLinearOps for Autodiff<B, C> {
    fn nvfp4_norm_linear(
        x: FloatTensor<Self>,
        residual: MaybeTensor<Self>,
        gain: FloatTensor<Self>,
        w: QuantizedMatrix<Self>,
        bias: MaybeTensor<Self>,
        spec: NormLinearSpec,
    ) -> NormLinearResult<Self> {
        let [residual, bias] = [residual, bias].map(|tensor| tensor.map(|x| x.into_primitive()));
        let (x, gain) = (x.into_primitive(), gain.into_primitive());
        let made = B::nvfp4_norm_linear(x, residual, gain, inner(w), bias, spec);
        let outer = <Self as AutodiffBackend>::from_inner;
        NormLinearResult {
            sum: made.sum.map(outer),
            y: outer(made.y),
        }
    }
}

#[cfg(feature = "cubecl-backend")]
mod meta {
    use burn_core::backend::fusion::custom::TensorSpec;
    use burn_core::tensor::Shape;

    use super::super::tensors::QuantizedMatrixMetadata;
    use super::{MaybeTensorMetadata, NormLinearResultMetadata, NormLinearSpec};

    pub(super) fn norm_linear(
        x: &TensorSpec,
        residual: &MaybeTensorMetadata,
        _gain: &TensorSpec,
        w: &QuantizedMatrixMetadata,
        _bias: &MaybeTensorMetadata,
        spec: &NormLinearSpec,
    ) -> NormLinearResultMetadata {
        let inputs = if spec.swiglu { 2 } else { 1 };
        let shape = Shape::new([x.shape[0], w.layout.outer() / inputs]);
        NormLinearResultMetadata {
            sum: match residual {
                MaybeTensorMetadata::Absent => MaybeTensorMetadata::Absent,
                MaybeTensorMetadata::Present(_) => MaybeTensorMetadata::Present(x.clone()),
            },
            y: TensorSpec::new(shape, x.dtype),
        }
    }
}
