//! Tensor-parallel SwiGLU feed-forward.

use burn_core as burn;

use burn_core::module::{Module, ParamId};
use burn_core::tensor::Tensor;
use nvfp4_formats::Nvfp4Error;

use super::super::feed_forward::swiglu_between;
use super::super::{Nvfp4SwiGlu, rows};
use super::{ColumnParallelLinear, RowParallelLinear, ShardedParameter, TensorParallel};
use crate::functions::or_panic;
use crate::ops::RowGroups;
use crate::whole::whole_dims;

/// [`Nvfp4SwiGlu`] with its hidden features sharded over ranks: each rank has the same features of
/// gate and up, concatenated.
///
/// Input and output are `[..., d_model]`, replicated on all ranks, or with sequence parallelism
/// `[tokens / ranks, ..., d_model]`. As on one device, activation and quantization are one
/// operation, with recomputation if set by [`with_recompute`](Nvfp4SwiGlu::with_recompute).
#[derive(Module, Debug)]
pub struct TensorParallelSwiGlu {
    /// Gate and up weights, `[d_model, 2 * d_hidden / ranks]`.
    pub gate_up: ColumnParallelLinear,
    /// Down weight, `[d_hidden / ranks, d_model]`.
    pub down: RowParallelLinear,
    #[module(skip)]
    recompute: bool,
}

impl TensorParallelSwiGlu {
    /// Returns this rank's shard of `layer`, which is identical on all ranks, state included.
    ///
    /// # Errors
    /// Returns an error if the hidden features per rank are not a multiple of 16.
    pub fn from_swiglu(layer: Nvfp4SwiGlu, parallel: &TensorParallel) -> Result<Self, Nvfp4Error> {
        let recompute = layer.recomputes();
        let Nvfp4SwiGlu { gate_up, down, .. } = layer;
        let [_, both] = gate_up.weight.lazy_shape().dims();
        let widths = [both / 2; 2];
        Ok(Self {
            gate_up: ColumnParallelLinear::from_segments(gate_up, &widths, parallel)?,
            down: RowParallelLinear::from_linear(down, parallel)?,
            recompute,
        })
    }

    /// Gathers the shards of all ranks into unsharded layers: gate and up in one layer, and down.
    /// All ranks call it together.
    ///
    /// # Panics
    /// If the group fails.
    pub fn into_layers(self) -> (crate::Nvfp4Linear, crate::Nvfp4Linear) {
        (self.gate_up.into_linear(), self.down.into_linear())
    }

    /// Checks that shard boundaries, of features and of the `tokens` of a rank, are multiples of
    /// the recipe's block size.
    ///
    /// # Errors
    /// Returns an error that names the dimension that does not fit.
    pub fn check_parts(&self, tokens: usize) -> Result<(), Nvfp4Error> {
        self.gate_up.check_parts(tokens)?;
        self.down.check_parts(tokens)
    }

    /// Returns the sharded parameters.
    pub fn sharded_parameters(&self) -> Vec<(ParamId, ShardedParameter)> {
        [
            self.gate_up.sharded_parameters(),
            self.down.sharded_parameters(),
        ]
        .concat()
    }

    /// Applies the layer. The output has the shape and dtype of the input.
    ///
    /// # Errors
    /// Same as [`ColumnParallelLinear::try_forward`]; also if the shapes of the two layers do not
    /// match.
    pub fn try_forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>, Nvfp4Error> {
        self.gate_up.check(&x)?;
        let [d_model, both] = whole_dims(&self.gate_up.linear.weight);
        let (names, shape) = (["down.weight", "down.bias"], [both / 2, d_model]);
        self.down.linear.check_part(names, &x.device(), shape)?;
        self.down
            .check_tokens::<D>(x.dims()[..D - 1].iter().product())?;
        let (x, dims) = rows(x);
        let input = self.gate_up.part(x.is_tracked())?;
        let output = self.down.part(input.tracks(&x))?;
        let y = swiglu_between(x, input, output, RowGroups::Whole, self.recompute);
        Ok(y.reshape(dims))
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        or_panic("TensorParallelSwiGlu::forward", self.try_forward(x))
    }
}
