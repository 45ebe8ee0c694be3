//! RMSNorm of a rank's tokens.

use burn_core as burn;

use burn_core::module::Module;
use burn_core::tensor::Tensor;

use nvfp4_formats::Nvfp4Error;

use super::super::{Neighbours, ResidualStream, RmsNorm};
use super::TensorParallel;
use crate::functions::{or_panic, try_rms_norm};

/// [`RmsNorm`] between sharded layers: each rank normalizes its tokens. γ is replicated; its
/// gradient is summed over the ranks.
///
/// Without sequence parallelism all ranks compute the same, without communication.
#[derive(Module, Debug)]
pub struct SequenceParallelRmsNorm {
    /// Unsharded norm.
    pub norm: RmsNorm,
    #[module(skip)]
    parallel: TensorParallel,
}

impl SequenceParallelRmsNorm {
    /// Wraps `norm`, which is identical on all ranks.
    pub fn new(norm: RmsNorm, parallel: &TensorParallel) -> Self {
        Self {
            norm,
            parallel: parallel.clone(),
        }
    }

    /// Normalizes `x`, `[..., width]`, the rank's tokens, to the same shape and dtype.
    ///
    /// # Panics
    /// Same as [`RmsNorm::forward`].
    #[track_caller]
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let normed = try_rms_norm(x, self.gamma(), self.norm.epsilon);
        or_panic("SequenceParallelRmsNorm::forward", normed)
    }

    /// Adds the pending term to the residual stream of the rank's tokens in the pass that
    /// normalizes the sum; see [`RmsNorm::try_forward_stream`].
    ///
    /// # Errors
    /// Same as [`RmsNorm::try_forward_stream`].
    pub fn try_forward_stream(
        &self,
        stream: ResidualStream,
    ) -> Result<(Tensor<3>, Tensor<3>), Nvfp4Error> {
        self.try_forward_stream_for(Neighbours::default(), stream)
    }

    /// Version of [`try_forward_stream`](Self::try_forward_stream) between layers that quantize the
    /// norm and the gradient of the pending term: computes their amax values, of the rank's tokens,
    /// in the same passes.
    pub(super) fn try_forward_stream_for(
        &self,
        neighbours: Neighbours<'_>,
        stream: ResidualStream,
    ) -> Result<(Tensor<3>, Tensor<3>), Nvfp4Error> {
        self.norm
            .try_forward_stream_with(self.gamma(), neighbours, stream)
    }

    /// Panicking version of [`try_forward_stream`](Self::try_forward_stream).
    #[track_caller]
    pub fn forward_stream(&self, stream: ResidualStream) -> (Tensor<3>, Tensor<3>) {
        or_panic(
            "SequenceParallelRmsNorm::forward_stream",
            self.try_forward_stream(stream),
        )
    }

    /// Returns γ, whose gradient is that of all ranks' tokens.
    fn gamma(&self) -> Tensor<1> {
        self.parallel.replicated(self.norm.gamma.val())
    }
}
