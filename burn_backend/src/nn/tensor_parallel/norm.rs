//! The norm of a rank's tokens.

use burn_core as burn;

use burn_core::module::Module;
use burn_core::tensor::{FloatDType, Tensor};

use nvfp4_kernels::Nvfp4Error;

use super::super::{Neighbours, ResidualStream, RmsNorm};
use super::TensorParallel;
use crate::functions::or_panic;
use crate::parallel::functions;

/// [`RmsNorm`] between layers that are sharded: each rank normalizes its tokens, and the gradient
/// of the gain, which all ranks have, is the sum over the ranks.
///
/// Without sequence parallelism all ranks do the same, and exchange nothing.
#[derive(Module, Debug)]
pub struct SequenceParallelRmsNorm {
    /// The norm.
    pub norm: RmsNorm,
    #[module(skip)]
    parallel: TensorParallel,
}

impl SequenceParallelRmsNorm {
    /// `norm`, of which all ranks have the same.
    pub fn new(norm: RmsNorm, parallel: &TensorParallel) -> Self {
        Self {
            norm,
            parallel: parallel.clone(),
        }
    }

    /// Normalizes `x`, `[..., width]`, the rank's tokens, to the same shape in type `dtype`.
    ///
    /// # Panics
    /// As [`RmsNorm::forward`].
    pub fn forward<const D: usize>(&self, x: Tensor<D>, dtype: FloatDType) -> Tensor<D> {
        self.norm.forward_with(self.gain(), x, dtype)
    }

    /// What is still to be added to the residual stream of the rank's tokens is added, in the pass
    /// that normalizes the sum; see [`RmsNorm::try_forward_stream`].
    ///
    /// # Errors
    /// As there.
    pub fn try_forward_stream(
        &self,
        stream: ResidualStream,
    ) -> Result<(Tensor<3>, Tensor<3>), Nvfp4Error> {
        let neighbours = Neighbours::default();
        self.norm
            .try_forward_stream_with(self.gain(), neighbours, stream)
    }

    /// Panicking version of [`try_forward_stream`](Self::try_forward_stream).
    pub fn forward_stream(&self, stream: ResidualStream) -> (Tensor<3>, Tensor<3>) {
        or_panic(
            "SequenceParallelRmsNorm::forward_stream",
            self.try_forward_stream(stream),
        )
    }

    /// The gain, whose gradient is that of all ranks' tokens.
    fn gain(&self) -> Tensor<1> {
        let gain = self.norm.gain.val();
        match self.parallel.sequence_parallel {
            true => functions::copy_parameter(gain, &self.parallel.group),
            false => gain,
        }
    }
}
