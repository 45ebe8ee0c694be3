//! Losses and embeddings: the extension trait, and its backwards.
//!
//! As for [`Nvfp4Ops`], arguments are trusted here: [`loss`](crate::loss) checks them before
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
pub use nvfp4_kernels::reference::TablePart;
pub use nvfp4_kernels::{CrossEntropy, KlDivergence};
pub(crate) use vocab_parallel::{VocabLoss, VocabTargets, vocab_parallel_cross_entropy};

#[cfg(feature = "cubecl-backend")]
use super::MaybeTensorMetadata;
use super::{MaybeTensor, Nvfp4Ops};

/// Which gradients of a head are asked for, and how much memory its logits may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearLossRequest {
    /// That of the input.
    pub x: bool,
    /// That of the weight.
    pub w: bool,
    /// Bytes for the logits of a chunk of tokens.
    pub chunk_bytes: usize,
}

/// A divergence of a head from its teacher's, and which of its gradients are asked for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinearKl {
    /// Temperature, and the target of rows that do not count.
    pub params: KlDivergence,
    /// Gradients of the student; bytes for the logits of both.
    pub gradients: LinearLossRequest,
}

/// A loss, and its gradient by the logits.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct LossAndGradient<B: Backend> {
    /// The loss, `f32[1]`.
    pub loss: FloatTensor<B>,
    /// Its gradient, in the shape and type of the logits.
    pub gradient: FloatTensor<B>,
}

/// A loss, and its gradients by the input and the weight of the head, as far as they were asked
/// for.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct LinearLoss<B: Backend> {
    /// The loss, `f32[1]`.
    pub loss: FloatTensor<B>,
    /// By the input, in its shape and type.
    #[extension_type]
    pub dx: MaybeTensor<B>,
    /// By the weight, in its shape and type.
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
    /// The cross entropy of `logits` (`[rows, vocab]`) with `targets` (`[rows]`), `f32[1]`.
    #[fusion(meta = meta::loss)]
    fn cross_entropy_loss(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        params: CrossEntropy,
    ) -> FloatTensor<Self>;

    /// The same with its gradient, which takes the memory of the logits where nobody else has them.
    #[fusion(meta = meta::loss_and_gradient)]
    fn cross_entropy_gradient(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        params: CrossEntropy,
    ) -> LossAndGradient<Self>;

    /// [`cross_entropy_loss`](Self::cross_entropy_loss), differentiable in the logits: the gradient
    /// is computed in the forward, and kept.
    #[fusion(default)]
    fn cross_entropy(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        params: CrossEntropy,
    ) -> FloatTensor<Self> {
        Self::cross_entropy_loss(logits, targets, params)
    }

    /// The cross entropy of the logits `x w`, for `x` (`[rows, d]`) and `w` (`[d, vocab]`), and
    /// the gradients of `request`. The logits have the type of `x`; those of one chunk of rows are
    /// in memory at a time.
    #[fusion(meta = meta::linear_loss)]
    fn linear_cross_entropy_gradients(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        targets: IntTensor<Self>,
        params: CrossEntropy,
        request: LinearLossRequest,
    ) -> LinearLoss<Self>;

    /// The loss of [`linear_cross_entropy_gradients`](Self::linear_cross_entropy_gradients),
    /// differentiable in `x` and `w`: gradients are computed in the forward, and kept.
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

    /// The KL divergence of the logits `student` (`[rows, vocab]`) to those of `teacher`, in the same
    /// shape and type, summed over rows whose targets count and times `scale` (`f32[1]`), with its
    /// gradient, which takes the memory of `student` where nobody else has it.
    #[fusion(meta = meta::divergence_and_gradient)]
    fn kl_divergence_gradient(
        student: FloatTensor<Self>,
        teacher: FloatTensor<Self>,
        targets: IntTensor<Self>,
        scale: FloatTensor<Self>,
        params: KlDivergence,
    ) -> LossAndGradient<Self>;

    /// The same of the logits `x w` and `teacher_x teacher_w`, with the gradients of `request`: the
    /// logits have the type of `x`; those of one chunk of rows are in memory at a time.
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

    /// The loss of [`linear_kl_gradients`](Self::linear_kl_gradients), differentiable in `x` and
    /// `w`: gradients are computed in the forward, and kept. Those that `request` asks for do not
    /// matter.
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

    /// `loss` (`f32[1]`), which was computed of `x` and `w` with its gradients `dx` and `dw`, as far
    /// as they are asked for: differentiable in `x` and `w` by these.
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

    /// `x` times `factor` (`f32[1]`), in place where nobody else has it; a kernel leaves all as it
    /// is where the factor is 1.
    #[fusion(meta = meta::scaled)]
    fn scale_gradient(x: FloatTensor<Self>, factor: FloatTensor<Self>) -> FloatTensor<Self>;

    /// The rows `ids` (`[tokens]`) of a table, rounded to `dtype`: `[tokens, d]`. `table`
    /// (`[rows, d]`) is this `part` of it: rows that are not in it are zeros. NaN where there is no
    /// such row. `Autodiff` overrides it.
    #[fusion(meta = meta::embedding)]
    fn embedding_rows(
        table: FloatTensor<Self>,
        part: TablePart,
        ids: IntTensor<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self>;

    /// The gradient of a table of `vocab` rows by `dy` (`[tokens, d]`), `f32[vocab, d]`, in a fixed
    /// order.
    #[fusion(meta = meta::embedding_gradient)]
    fn embedding_gradient(
        dy: FloatTensor<Self>,
        ids: IntTensor<Self>,
        vocab: usize,
    ) -> FloatTensor<Self>;
}
