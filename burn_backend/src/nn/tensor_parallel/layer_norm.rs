//! Tensor-parallel layers with the norm before them.

use burn_core as burn;

use burn_core::module::{Module, ParamId};
use burn_core::tensor::Tensor;
use nvfp4_formats::Nvfp4Error;

use super::super::{InputNorm, LayerNormLinear, LayerNormMlp, MlpActivation, rows};
use super::feed_forward::{check_pair, feed_forward_of, inner_part};
use super::{ColumnParallelLinear, RowParallelLinear, ShardedParameter, TensorParallel};
use crate::functions::or_panic;

/// [`LayerNormLinear`] with its output features sharded over ranks: the norm of a rank's tokens,
/// then a [`ColumnParallelLinear`].
///
/// The norm is replicated. With sequence parallelism its gradients are summed over the ranks.
#[derive(Module, Debug)]
pub struct TensorParallelLayerNormLinear {
    /// Norm of the input.
    pub norm: InputNorm,
    /// This rank's shard of the layer.
    pub linear: ColumnParallelLinear,
    #[module(skip)]
    parallel: TensorParallel,
}

/// [`LayerNormMlp`] with its hidden features sharded over ranks: the norm of a rank's tokens, a
/// [`ColumnParallelLinear`], the activation, and a [`RowParallelLinear`].
///
/// Input and output are `[..., d_model]`, replicated on all ranks, or with sequence parallelism
/// `[tokens / ranks, ..., d_model]`. The norm is replicated. With sequence parallelism its
/// gradients are summed over the ranks.
#[derive(Module, Debug)]
pub struct TensorParallelLayerNormMlp {
    /// Norm of the input.
    pub norm: InputNorm,
    /// This rank's hidden features of the first layer, or of gate and factor.
    pub linear_inner: ColumnParallelLinear,
    /// This rank's hidden features of the second layer.
    pub linear_outer: RowParallelLinear,
    #[module(skip)]
    activation: MlpActivation,
    #[module(skip)]
    recompute: bool,
    #[module(skip)]
    parallel: TensorParallel,
}

impl TensorParallelLayerNormLinear {
    /// Returns this rank's shard of `layer`, which is identical on all ranks, state included.
    /// `widths` are the output features of each of the layers that it concatenates, such as
    /// queries, keys and values; one width if there is one layer.
    ///
    /// # Errors
    /// Same as [`ColumnParallelLinear::from_segments`].
    pub fn from_segments(
        layer: LayerNormLinear,
        widths: &[usize],
        parallel: &TensorParallel,
    ) -> Result<Self, Nvfp4Error> {
        Ok(Self {
            norm: layer.norm,
            linear: ColumnParallelLinear::from_segments(layer.linear, widths, parallel)?,
            parallel: parallel.clone(),
        })
    }

    /// Gathers the shards of all ranks into an unsharded layer. All ranks call it together.
    ///
    /// # Panics
    /// If the group fails.
    pub fn into_layer_norm_linear(self) -> LayerNormLinear {
        LayerNormLinear {
            norm: self.norm,
            linear: self.linear.into_linear(),
        }
    }

    /// Returns the sharded parameters.
    pub fn sharded_parameters(&self) -> Vec<(ParamId, ShardedParameter)> {
        self.linear.sharded_parameters()
    }

    /// Applies norm and layer; see [`ColumnParallelLinear`] for shapes. Also returns the output of
    /// the norm, of the shape and dtype of `x`, the rank's tokens.
    ///
    /// # Errors
    /// Same as [`ColumnParallelLinear::try_forward`]; also if the width of the norm is not
    /// `d_input`.
    pub fn try_forward_with_layernorm_output<const D: usize>(
        &self,
        x: Tensor<D>,
    ) -> Result<(Tensor<D>, Tensor<D>), Nvfp4Error> {
        self.linear.check(&x)?;
        self.norm.check(&x)?;
        let replicated = |value| self.parallel.replicated(value);
        let next = &self.linear.linear;
        let normed = self.norm.try_forward_for(next, replicated, x)?;
        Ok((self.linear.try_forward(normed.clone())?, normed))
    }

    /// Applies norm and layer; see [`ColumnParallelLinear`] for shapes.
    ///
    /// # Errors
    /// Same as [`try_forward_with_layernorm_output`](Self::try_forward_with_layernorm_output).
    pub fn try_forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>, Nvfp4Error> {
        Ok(self.try_forward_with_layernorm_output(x)?.0)
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let y = self.try_forward(x);
        or_panic("TensorParallelLayerNormLinear::forward", y)
    }
}

impl TensorParallelLayerNormMlp {
    /// Returns this rank's shard of `layer`, which is identical on all ranks, state included.
    ///
    /// # Errors
    /// Returns an error if the hidden features per rank are not a multiple of 16.
    pub fn from_layer_norm_mlp(
        layer: LayerNormMlp,
        parallel: &TensorParallel,
    ) -> Result<Self, Nvfp4Error> {
        let LayerNormMlp {
            norm,
            linear_inner,
            linear_outer,
            activation,
            recompute,
        } = layer;
        Ok(Self {
            norm,
            linear_inner: inner_part(linear_inner, activation, parallel)?,
            linear_outer: RowParallelLinear::from_linear(linear_outer, parallel)?,
            activation,
            recompute,
            parallel: parallel.clone(),
        })
    }

    /// Gathers the shards of all ranks into an unsharded layer. All ranks call it together.
    ///
    /// # Panics
    /// If the group fails.
    pub fn into_layer_norm_mlp(self) -> LayerNormMlp {
        LayerNormMlp {
            norm: self.norm,
            linear_inner: self.linear_inner.into_linear(),
            linear_outer: self.linear_outer.into_linear(),
            activation: self.activation,
            recompute: self.recompute,
        }
    }

    /// Returns the sharded parameters.
    pub fn sharded_parameters(&self) -> Vec<(ParamId, ShardedParameter)> {
        let inner = self.linear_inner.sharded_parameters();
        [inner, self.linear_outer.sharded_parameters()].concat()
    }

    /// Applies norm and feed-forward. Returns the output and the output of the norm, both of the
    /// shape and dtype of `x`.
    ///
    /// # Errors
    /// Same as [`ColumnParallelLinear::try_forward`]; also if the shapes of norm and layers do not
    /// match, or the activation does not support recomputation.
    pub fn try_forward_with_layernorm_output<const D: usize>(
        &self,
        x: Tensor<D>,
    ) -> Result<(Tensor<D>, Tensor<D>), Nvfp4Error> {
        let pair = (&self.linear_inner, &self.linear_outer);
        self.activation.check_recompute(self.recompute)?;
        let names = ["linear_outer.weight", "linear_outer.bias"];
        check_pair(pair, names, self.activation, &x)?;
        self.norm.check(&x)?;
        let replicated = |value| self.parallel.replicated(value);
        let next = &self.linear_inner.linear;
        let normed = self.norm.try_forward_for(next, replicated, x)?;
        let (x, dims) = rows(normed.clone());
        let y = feed_forward_of(pair, (self.activation, self.recompute), x)?;
        Ok((y.reshape(dims), normed))
    }

    /// Applies norm and feed-forward. The output has the shape and dtype of the input.
    ///
    /// # Errors
    /// Same as [`try_forward_with_layernorm_output`](Self::try_forward_with_layernorm_output).
    pub fn try_forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>, Nvfp4Error> {
        Ok(self.try_forward_with_layernorm_output(x)?.0)
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        or_panic("TensorParallelLayerNormMlp::forward", self.try_forward(x))
    }
}
