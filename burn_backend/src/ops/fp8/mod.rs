//! Linear layers with FP8 weights on the primitives of a backend, as a separate extension trait.
//! [`nn`](crate::nn) checks the arguments before anything is queued.

#[cfg(any(feature = "cpu", feature = "cuda"))]
mod cube;
#[cfg(feature = "flex")]
mod flex;

use burn_core as burn;

use burn_core::backend::{
    Autodiff, AutodiffBackend, Backend, ExtensionType,
    autodiff::checkpoint::strategy::CheckpointStrategy,
    backend_extension,
    tensor::{FloatTensor, IntTensor},
};

/// Weight `[n, k]` in FP8: element `(n, k)` is `e4m3(code) · scale[n]`.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct Fp8Tensors<B: Backend> {
    /// E4M3 bytes, `u32[n, k / 4]`: the first code in the lowest byte.
    pub codes: IntTensor<B>,
    /// Row scales, `f32[n]`.
    pub scales: FloatTensor<B>,
}

/// Linear layers in FP8. Under `Autodiff` their results are constants.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(any(feature = "cpu", feature = "cuda")),
    Fusion: cfg(feature = "cubecl-backend"),
    Autodiff
)]
pub trait Fp8Ops: Backend {
    /// Quantizes the rows of `w` (`[n, k]`) to FP8, each with the scale `amax / 448`; see
    /// [`fp8_quantize_rows`](nvfp4_formats::reference::fp8_quantize_rows). `k` must be a multiple
    /// of 4.
    #[fusion(meta = meta::quantize)]
    fn nvfp4_fp8_quantize(w: FloatTensor<Self>) -> Fp8Tensors<Self>;

    /// Computes `x wᵀ` for `x` (`[rows, k]`), `[rows, n]`: accumulates in `f32`, multiplies by the
    /// scales, and rounds once to the dtype of `x`. `k` must be a multiple of 64.
    #[fusion(meta = meta::linear)]
    fn nvfp4_fp8_linear(
        x: FloatTensor<Self>,
        #[extension_type] w: Fp8Tensors<Self>,
    ) -> FloatTensor<Self>;
}

impl<B: Fp8Ops, C: CheckpointStrategy> Fp8Ops for Autodiff<B, C> {
    fn nvfp4_fp8_quantize(w: FloatTensor<Self>) -> Fp8Tensors<Self> {
        let Fp8Tensors { codes, scales } = B::nvfp4_fp8_quantize(w.into_primitive());
        Fp8Tensors {
            codes,
            scales: <Self as AutodiffBackend>::from_inner(scales),
        }
    }

    fn nvfp4_fp8_linear(x: FloatTensor<Self>, w: Fp8Tensors<Self>) -> FloatTensor<Self> {
        let w = Fp8Tensors {
            codes: w.codes,
            scales: w.scales.into_primitive(),
        };
        <Self as AutodiffBackend>::from_inner(B::nvfp4_fp8_linear(x.into_primitive(), w))
    }
}

#[cfg(feature = "cubecl-backend")]
mod meta {
    use burn_core::backend::fusion::custom::TensorSpec;
    use burn_core::tensor::{DType, Shape};

    use super::Fp8TensorsMetadata;

    pub(super) fn quantize(w: &TensorSpec) -> Fp8TensorsMetadata {
        let [n, k] = [w.shape[0], w.shape[1]];
        Fp8TensorsMetadata {
            codes: TensorSpec::new(Shape::new([n, k / 4]), DType::U32),
            scales: TensorSpec::new(Shape::new([n]), DType::F32),
        }
    }

    pub(super) fn linear(x: &TensorSpec, w: &Fp8TensorsMetadata) -> TensorSpec {
        TensorSpec::new(Shape::new([x.shape[0], w.scales.shape[0]]), x.dtype)
    }
}
