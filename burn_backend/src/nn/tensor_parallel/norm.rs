//! The norm of a rank's tokens.

use burn_core as burn;

use burn_core::module::Module;
use burn_core::tensor::{FloatDType, Tensor};

use super::super::RmsNorm;
use super::TensorParallel;
use crate::parallel::functions;

/// [`RmsNorm`] between layers that are sharded: each rank normalises its tokens, and the gradient
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

    /// Normalise `x`, `[..., width]`, the rank's tokens, to the same shape in type `dtype`.
    ///
    /// # Panics
    /// As [`RmsNorm::forward`].
    pub fn forward<const D: usize>(&self, x: Tensor<D>, dtype: FloatDType) -> Tensor<D> {
        let gain = self.norm.gain.val();
        let gain = match self.parallel.sequence_parallel {
            true => functions::copy(gain, &self.parallel.group),
            false => gain,
        };
        self.norm.forward_with(gain, x, dtype)
    }
}
