//! Losses and embeddings: the extension trait, and its backwards.
//!
//! As for [`Nvfp4Ops`], arguments are not checked here: [`loss`](crate::loss) checks them before
//! anything is queued.

mod autodiff;
mod chunks;
#[cfg(any(feature = "cpu", feature = "cuda"))]
mod cube;
#[cfg(feature = "flex")]
mod flex;
#[cfg(feature = "cubecl-backend")]
mod meta;
mod vocab_parallel;

use burn_core as burn;

use burn_core::backend::{
    Backend, ExtensionType, backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use burn_core::tensor::FloatDType;
pub use nvfp4_formats::reference::TablePart;
pub use nvfp4_formats::{CrossEntropy, KlDivergence};
pub(crate) use vocab_parallel::{VocabLoss, VocabTargets, vocab_parallel_cross_entropy};

#[cfg(feature = "cubecl-backend")]
use super::MaybeTensorMetadata;
use super::{MaybeTensor, Nvfp4Ops};

/// Requested gradients of an output head, and memory limit of its logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearLossRequest {
    /// True to compute the gradient of the input.
    pub x: bool,
    /// True to compute the gradient of the weight.
    pub w: bool,
    /// Maximum bytes of logits per chunk of tokens.
    pub chunk_bytes: usize,
}

/// KL divergence of a head from its teacher's, with the requested gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinearKl {
    /// Temperature, and the target of ignored rows.
    pub params: KlDivergence,
    /// Requested gradients of the student; the memory limit covers the logits of both models.
    pub gradients: LinearLossRequest,
}

/// Loss with its gradient by the logits.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct LossAndGradient<B: Backend> {
    /// Loss, `f32[1]`.
    pub loss: FloatTensor<B>,
    /// Gradient, in the shape and dtype of the logits.
    pub gradient: FloatTensor<B>,
}

/// Loss with its requested gradients by the input and the weight of the head.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct LinearLoss<B: Backend> {
    /// Loss, `f32[1]`.
    pub loss: FloatTensor<B>,
    /// Gradient by the input, in its shape and dtype.
    #[extension_type]
    pub dx: MaybeTensor<B>,
    /// Gradient by the weight, in its shape and dtype.
    #[extension_type]
    pub dw: MaybeTensor<B>,
}

/// Losses and embeddings on the primitives of a backend.
///
/// Floats are `f32`, `bf16` or `f16`. [`cross_entropy`](Self::cross_entropy),
/// [`linear_cross_entropy`](Self::linear_cross_entropy),
/// [`loss_with_gradients`](Self::loss_with_gradients) and
/// [`embedding_rows`](Self::embedding_rows) are differentiable; under `Autodiff` the results of the
/// other operations are constants.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(any(feature = "cpu", feature = "cuda")),
    Fusion: cfg(feature = "cubecl-backend"),
    Autodiff
)]
pub trait LossOps: Nvfp4Ops {
    /// Computes the cross entropy of `logits` (`[rows, vocab]`) against `targets` (`[rows]`),
    /// `f32[1]`.
    #[fusion(meta = meta::loss)]
    fn cross_entropy_loss(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        params: CrossEntropy,
    ) -> FloatTensor<Self>;

    /// Computes the cross entropy and its gradient, which reuses the memory of the logits if
    /// nothing else holds it.
    #[fusion(meta = meta::loss_and_gradient)]
    fn cross_entropy_gradient(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        params: CrossEntropy,
    ) -> LossAndGradient<Self>;

    /// Version of [`cross_entropy_loss`](Self::cross_entropy_loss) that is differentiable by the
    /// logits: the gradient is computed in the forward, and kept.
    #[fusion(default)]
    fn cross_entropy(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        params: CrossEntropy,
    ) -> FloatTensor<Self> {
        Self::cross_entropy_loss(logits, targets, params)
    }

    /// Computes the cross entropy of the logits `x w`, for `x` (`[rows, d]`) and `w`
    /// (`[d, vocab]`), and the gradients of `request`. The logits have the dtype of `x`; only those
    /// of one chunk of rows are in memory at a time.
    #[fusion(meta = meta::linear_loss)]
    fn linear_cross_entropy_gradients(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        targets: IntTensor<Self>,
        params: CrossEntropy,
        request: LinearLossRequest,
    ) -> LinearLoss<Self>;

    /// Computes the loss of
    /// [`linear_cross_entropy_gradients`](Self::linear_cross_entropy_gradients), differentiable by
    /// `x` and `w`: gradients are computed in the forward, and kept.
    #[fusion(default)]
    fn linear_cross_entropy(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        targets: IntTensor<Self>,
        params: CrossEntropy,
        chunk_bytes: usize,
    ) -> FloatTensor<Self> {
        let request = LinearLossRequest {
            x: false,
            w: false,
            chunk_bytes,
        };
        Self::linear_cross_entropy_gradients(x, w, targets, params, request).loss
    }

    /// Computes the KL divergence of the logits `student` (`[rows, vocab]`) to those of `teacher`,
    /// of the same shape and dtype, summed over rows with targets that are not ignored, times
    /// `scale` (`f32[1]`). Also computes its gradient, which reuses the memory of `student` if
    /// nothing else holds it.
    #[fusion(meta = meta::divergence_and_gradient)]
    fn kl_divergence_gradient(
        student: FloatTensor<Self>,
        teacher: FloatTensor<Self>,
        targets: IntTensor<Self>,
        scale: FloatTensor<Self>,
        params: KlDivergence,
    ) -> LossAndGradient<Self>;

    /// Computes the KL divergence of the logits `x w` and `teacher_x teacher_w`, and the gradients
    /// of `request`. The logits have the dtype of `x`; only those of one chunk of rows are in
    /// memory at a time.
    #[fusion(meta = meta::linear_kl)]
    fn linear_kl_gradients(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        teacher_x: FloatTensor<Self>,
        teacher_w: FloatTensor<Self>,
        targets: IntTensor<Self>,
        scale: FloatTensor<Self>,
        request: LinearKl,
    ) -> LinearLoss<Self>;

    /// Computes the loss of [`linear_kl_gradients`](Self::linear_kl_gradients), differentiable by
    /// `x` and `w`: gradients are computed in the forward, and kept. The gradients in `request` are
    /// ignored.
    #[fusion(default)]
    fn linear_kl_divergence(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        teacher_x: FloatTensor<Self>,
        teacher_w: FloatTensor<Self>,
        targets: IntTensor<Self>,
        scale: FloatTensor<Self>,
        request: LinearKl,
    ) -> FloatTensor<Self> {
        Self::linear_kl_gradients(x, w, teacher_x, teacher_w, targets, scale, request).loss
    }

    /// Returns `loss` (`f32[1]`), which was computed from `x` and `w` with its requested gradients
    /// `dx` and `dw`, as differentiable by `x` and `w` with these gradients.
    #[fusion(default)]
    fn loss_with_gradients(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        loss: FloatTensor<Self>,
        #[extension_type] dx: MaybeTensor<Self>,
        #[extension_type] dw: MaybeTensor<Self>,
    ) -> FloatTensor<Self> {
        drop((x, w, dx, dw));
        loss
    }

    /// Multiplies `x` by `factor` (`f32[1]`), in place if nothing else holds it; a kernel writes
    /// nothing if the factor is 1.
    #[fusion(meta = meta::scaled)]
    fn scale_gradient(x: FloatTensor<Self>, factor: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Looks up the rows `ids` (`[tokens]`) of a table, rounded to `dtype`: `[tokens, d]`. `table`
    /// (`[rows, d]`) is this `part` of the table: rows outside the part are zero. Ids out of range
    /// give NaN. `Autodiff` overrides it.
    #[fusion(meta = meta::embedding)]
    fn embedding_rows(
        table: FloatTensor<Self>,
        part: TablePart,
        ids: IntTensor<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self>;

    /// Computes the gradient of a table of `vocab` rows from `dy` (`[tokens, d]`), `f32[vocab, d]`,
    /// in a fixed order.
    #[fusion(meta = meta::embedding_gradient)]
    fn embedding_gradient(
        dy: FloatTensor<Self>,
        ids: IntTensor<Self>,
        vocab: usize,
    ) -> FloatTensor<Self>;
}
