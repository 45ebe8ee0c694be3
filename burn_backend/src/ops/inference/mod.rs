//! What inference has beyond training: quantization under a global scale that is given, as an
//! extension trait of its own. [`functions`](crate::functions) checks the arguments before anything
//! is queued.

#[cfg(any(feature = "cpu", feature = "cuda"))]
mod cube;
#[cfg(feature = "flex")]
mod flex;

use burn_core as burn;

use burn_core::backend::{
    Autodiff, Backend, autodiff::checkpoint::strategy::CheckpointStrategy, backend_extension,
    tensor::FloatTensor,
};
use nvfp4_kernels::{BlockScaling, Rounding};

use super::kernels::{constant, inner_groups};
use super::spec::QuantParams;
use super::tensors::{QuantizedMatrix, RowGroups};

/// 1x16 blocks to nearest, under a given global scale.
pub(crate) const STATIC: QuantParams = QuantParams {
    scaling: BlockScaling::Static,
    ..QuantParams::nvfp4(Rounding::Nearest)
};

/// Operations of inference. Under `Autodiff` their results are constants.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(any(feature = "cpu", feature = "cuda")),
    Fusion: cfg(feature = "cubecl-backend"),
    Autodiff
)]
pub trait InferenceOps: Backend {
    /// The rowwise NVFP4 tensor of `x` (`[rows, cols]`) in 1x16 blocks to nearest, under the factor
    /// `global` that dequantizes: `f32[1]`, or one for each of `groups`. It stands in the amax's
    /// place, see [`BlockScaling::Static`]; larger values than it was made for saturate.
    #[fusion(meta = meta::quantize_static)]
    fn nvfp4_quantize_static(
        x: FloatTensor<Self>,
        global: FloatTensor<Self>,
        #[extension_type] groups: RowGroups<Self>,
    ) -> QuantizedMatrix<Self>;
}

#[cfg(feature = "cubecl-backend")]
mod meta {
    use burn_core::backend::fusion::custom::TensorSpec;
    use nvfp4_kernels::Usage;

    use super::super::meta::quantized;
    use super::super::stored::StoredForm;
    use super::super::tensors::{QuantizedMatrixMetadata, RowGroupsMetadata};
    use super::STATIC;

    pub(super) fn quantize_static(
        x: &TensorSpec,
        _global: &TensorSpec,
        groups: &RowGroupsMetadata,
    ) -> QuantizedMatrixMetadata {
        let (groups, shape) = (groups.count(), (x.shape[0], x.shape[1]));
        let layout = groups.layout(shape, Usage::Rowwise, &STATIC, StoredForm::ROWS);
        quantized(groups, layout)
    }
}

impl<B: InferenceOps, C: CheckpointStrategy> InferenceOps for Autodiff<B, C> {
    fn nvfp4_quantize_static(
        x: FloatTensor<Self>,
        global: FloatTensor<Self>,
        groups: RowGroups<Self>,
    ) -> QuantizedMatrix<Self> {
        let groups = inner_groups(groups);
        let (x, global) = (x.into_primitive(), global.into_primitive());
        constant(B::nvfp4_quantize_static(x, global, groups))
    }
}
