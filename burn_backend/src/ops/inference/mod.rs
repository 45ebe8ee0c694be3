//! Operations only for inference: quantization with a given global scale, as a separate extension
//! trait. [`functions`](crate::functions) checks the arguments before anything is queued.

#[cfg(any(feature = "cpu", feature = "cuda"))]
mod cube;
#[cfg(feature = "flex")]
mod flex;

use burn_core as burn;

use burn_core::backend::{
    Autodiff, Backend, DispatchDevice, autodiff::checkpoint::strategy::CheckpointStrategy,
    backend_extension, tensor::FloatTensor,
};
use burn_core::tensor::{Device, FloatDType};
use nvfp4_formats::{BlockScaling, Rounding, StoredForm};

use super::kernels::{constant, inner_groups};
use super::linear::plan::{GroupedAxis, LayerGemm};
use super::spec::{OperandSpec, QuantParams};
use super::tensors::{QuantizedMatrix, RowGroups};

/// 1x16 blocks rounded to nearest, with a given global scale.
pub(crate) const STATIC: QuantParams = QuantParams {
    scaling: BlockScaling::Static,
    ..QuantParams::nvfp4(Rounding::Nearest)
};

/// Shape of a packed weight, or of a stack of packed weights.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PackedShape {
    /// Number of rows of one matrix, and their length.
    pub(crate) matrix: (usize, usize),
    /// Number of matrices, if each multiplies a group of rows.
    pub(crate) stack: Option<usize>,
}

impl PackedShape {
    /// Returns the form in which the GEMM of this weight with `rows` rows of an input quantized by
    /// `x` reads both operands on `device`.
    pub(crate) fn form(&self, device: &Device, x: &OperandSpec, rows: usize) -> StoredForm {
        let (n, k) = self.matrix;
        let gemm = LayerGemm {
            specs: [x, &OperandSpec::Quantized(STATIC)],
            shape: (rows, n, k),
            grouped: self.stack.map_or(GroupedAxis::None, GroupedAxis::Rows),
            along_tokens: false,
            bias: false,
            out: FloatDType::BF16,
        };
        gemm.form(reads(&gemm, device.as_dispatch())).packed()
    }
}

/// Returns the operand form that `gemm` reads on `device`.
#[cfg(any(feature = "cpu", feature = "cuda"))]
fn reads(gemm: &LayerGemm<'_>, device: &DispatchDevice) -> StoredForm {
    match device {
        DispatchDevice::Autodiff(device) => reads(gemm, device),
        DispatchDevice::Cube(device) => gemm.reads::<burn_cubecl::CubeBackend>(device),
        // Flex reads rows.
        #[allow(unreachable_patterns, reason = "a build may have one backend")]
        _ => StoredForm::Rows,
    }
}

/// Returns rows, which Flex reads.
#[cfg(not(any(feature = "cpu", feature = "cuda")))]
fn reads(_gemm: &LayerGemm<'_>, _device: &DispatchDevice) -> StoredForm {
    StoredForm::Rows
}

/// Operations of inference. Under `Autodiff` their results are constants.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(any(feature = "cpu", feature = "cuda")),
    Fusion: cfg(feature = "cubecl-backend"),
    Autodiff
)]
pub trait InferenceOps: Backend {
    /// Quantizes `x` (`[rows, cols]`) to a row-wise NVFP4 tensor in 1x16 blocks, rounded to
    /// nearest, with the dequantizing scale `global`: `f32[1]`, or one per group of `groups`. It is
    /// stored instead of the amax, see [`BlockScaling::Static`]; values beyond its range saturate.
    /// The result is packed, in this `form`.
    #[fusion(meta = meta::quantize_static)]
    fn nvfp4_quantize_static(
        x: FloatTensor<Self>,
        global: FloatTensor<Self>,
        #[extension_type] groups: RowGroups<Self>,
        form: StoredForm,
    ) -> QuantizedMatrix<Self>;
}

#[cfg(feature = "cubecl-backend")]
mod meta {
    use burn_core::backend::fusion::custom::TensorSpec;
    use nvfp4_formats::{StoredForm, Usage};

    use super::super::meta::quantized;
    use super::super::tensors::{QuantizedMatrixMetadata, RowGroupsMetadata};
    use super::STATIC;

    pub(super) fn quantize_static(
        x: &TensorSpec,
        _global: &TensorSpec,
        groups: &RowGroupsMetadata,
        form: &StoredForm,
    ) -> QuantizedMatrixMetadata {
        let (groups, shape) = (groups.count(), (x.shape[0], x.shape[1]));
        let layout = groups.layout(shape, Usage::Rowwise, &STATIC, *form);
        quantized(groups, layout)
    }
}

impl<B: InferenceOps, C: CheckpointStrategy> InferenceOps for Autodiff<B, C> {
    fn nvfp4_quantize_static(
        x: FloatTensor<Self>,
        global: FloatTensor<Self>,
        groups: RowGroups<Self>,
        form: StoredForm,
    ) -> QuantizedMatrix<Self> {
        let groups = inner_groups(groups);
        let (x, global) = (x.into_primitive(), global.into_primitive());
        constant(B::nvfp4_quantize_static(x, global, groups, form))
    }
}
