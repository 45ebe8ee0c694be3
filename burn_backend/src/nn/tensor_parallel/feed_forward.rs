//! Tensor-parallel SwiGLU feed-forward.

use burn_core as burn;

use burn_core::module::{Module, ParamId};
use burn_core::tensor::Tensor;
use nvfp4_formats::Nvfp4Error;

use super::super::feed_forward::feed_forward_between;
use super::super::{MlpActivation, Nvfp4Linear, Nvfp4SwiGlu, rows};
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
    /// Gate and up weights, `[d_model, 2 * d_hidden / ranks]`, or `[d_model, d_hidden / ranks]` if
    /// the activation is not gated.
    pub gate_up: ColumnParallelLinear,
    /// Down weight, `[d_hidden / ranks, d_model]`.
    pub down: RowParallelLinear,
    #[module(skip)]
    activation: MlpActivation,
    #[module(skip)]
    recompute: bool,
}

impl TensorParallelSwiGlu {
    /// Returns this rank's shard of `layer`, which is identical on all ranks, state included.
    ///
    /// # Errors
    /// Returns an error if the hidden features per rank are not a multiple of 16.
    pub fn from_swiglu(layer: Nvfp4SwiGlu, parallel: &TensorParallel) -> Result<Self, Nvfp4Error> {
        let (activation, recompute) = (layer.activation(), layer.recomputes());
        let Nvfp4SwiGlu { gate_up, down, .. } = layer;
        Ok(Self {
            gate_up: inner_part(gate_up, activation, parallel)?,
            down: RowParallelLinear::from_linear(down, parallel)?,
            activation,
            recompute,
        })
    }

    /// Gathers the shards of all ranks into unsharded layers: gate and up in one layer, and down.
    /// All ranks call it together.
    ///
    /// # Panics
    /// If the group fails.
    pub fn into_layers(self) -> (Nvfp4Linear, Nvfp4Linear) {
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
        let pair = (&self.gate_up, &self.down);
        self.activation.check_recompute(self.recompute)?;
        check_pair(pair, ["down.weight", "down.bias"], self.activation, &x)?;
        let (x, dims) = rows(x);
        let y = feed_forward_of(pair, (self.activation, self.recompute), x)?;
        Ok(y.reshape(dims))
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        or_panic("TensorParallelSwiGlu::forward", self.try_forward(x))
    }
}

/// Returns this rank's shard of the first layer of a feed-forward: the same hidden features of gate
/// and factor, if `activation` is gated.
pub(super) fn inner_part(
    layer: Nvfp4Linear,
    activation: MlpActivation,
    parallel: &TensorParallel,
) -> Result<ColumnParallelLinear, Nvfp4Error> {
    let inputs = activation.inputs();
    let [_, d_inner] = layer.weight.lazy_shape().dims();
    let widths = vec![d_inner / inputs; inputs];
    ColumnParallelLinear::from_segments(layer, &widths, parallel)
}

/// Returns an error if a rank's layers, with `activation` between them, do not match each other or
/// the input `x`. `names` are those of the second layer's parameters.
pub(super) fn check_pair<const D: usize>(
    (input, output): (&ColumnParallelLinear, &RowParallelLinear),
    names: [&'static str; 2],
    activation: MlpActivation,
    x: &Tensor<D>,
) -> Result<(), Nvfp4Error> {
    input.check(x)?;
    let [d_model, d_inner] = whole_dims(&input.linear.weight);
    let shape = [d_inner / activation.inputs(), d_model];
    output.linear.check_part(names, &x.device(), shape)?;
    output.check_tokens::<D>(x.dims()[..D - 1].iter().product())
}

/// Computes a rank's feed-forward after [`check_pair`]. The flag is true if the backward recomputes
/// the input of the activation.
pub(super) fn feed_forward_of(
    (input, output): (&ColumnParallelLinear, &RowParallelLinear),
    settings: (MlpActivation, bool),
    x: Tensor<2>,
) -> Result<Tensor<2>, Nvfp4Error> {
    let input = input.part(x.is_tracked())?;
    let output = output.part(input.tracks(&x))?;
    feed_forward_between(x, (input, output), RowGroups::Whole, settings)
}
