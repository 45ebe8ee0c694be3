//! The head of a language model, with its loss.

use burn_core as burn;

use burn_core::module::{Module, Param};
use burn_core::tensor::{Int, Tensor};
use burn_nn::Linear;
use nvfp4_kernels::{CrossEntropy, Nvfp4Error};

use super::{cast, rows};
use crate::functions::or_panic;
use crate::loss::{CHUNK_BYTES, try_linear_cross_entropy};
use crate::validate;

/// From features to the logits of the next token, in high precision, and to their cross entropy
/// without ever having the logits of all tokens in memory.
#[derive(Module, Debug)]
pub struct LmHead {
    /// `[d_model, vocab]`; `f32`, `bf16` or `f16`.
    pub weight: Param<Tensor<2>>,
    /// The loss.
    #[module(skip)]
    pub params: CrossEntropy,
    /// Bytes for the logits of a chunk of tokens.
    #[module(skip)]
    pub chunk_bytes: usize,
}

impl LmHead {
    /// A head of this weight with the mean cross entropy, in chunks of [`CHUNK_BYTES`].
    pub fn new(weight: Param<Tensor<2>>) -> Self {
        Self {
            weight,
            params: CrossEntropy::default(),
            chunk_bytes: CHUNK_BYTES,
        }
    }

    /// The same head with another loss.
    pub fn with_params(self, params: CrossEntropy) -> Self {
        Self { params, ..self }
    }

    /// Take over the weight of a linear layer without a bias, with its id.
    ///
    /// # Errors
    /// When the layer has a bias.
    pub fn try_from_linear(linear: Linear) -> Result<Self, Nvfp4Error> {
        match linear.bias {
            None => Ok(Self::new(linear.weight)),
            Some(_) => Err(Nvfp4Error::value("linear", "a bias", "no bias")),
        }
    }

    /// Gives the weight to a linear layer, with its id.
    pub fn into_linear(self) -> Linear {
        Linear {
            weight: self.weight,
            bias: None,
        }
    }

    /// The logits of `x` (`[..., d_model]`): `[..., vocab]` in the type of `x`.
    ///
    /// # Panics
    /// When the last axis of `x` is not `d_model`.
    pub fn logits<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let (x, mut dims) = rows(x);
        let dtype = x.dtype();
        let weight = self.weight.val();
        let weight = if weight.dtype() == dtype {
            weight
        } else {
            cast(weight, dtype.into())
        };
        dims[D - 1] = weight.dims()[1];
        x.matmul(weight).reshape(dims)
    }

    /// The cross entropy, `f32[1]`, of the logits of `x` (`[..., d_model]`) with `targets`, one for
    /// each of its rows, in the order of the rows.
    ///
    /// # Errors
    /// As [`try_linear_cross_entropy`].
    pub fn try_loss<const D: usize>(
        &self,
        x: Tensor<D>,
        targets: Tensor<1, Int>,
    ) -> Result<Tensor<1>, Nvfp4Error> {
        validate::parameter(&x.device(), "weight", &self.weight)?;
        let (x, _) = rows(x);
        try_linear_cross_entropy(x, self.weight.val(), targets, self.params, self.chunk_bytes)
    }

    /// [`try_loss`](Self::try_loss), panicking where it fails.
    pub fn loss<const D: usize>(&self, x: Tensor<D>, targets: Tensor<1, Int>) -> Tensor<1> {
        or_panic("LmHead::loss", self.try_loss(x, targets))
    }
}
