//! Output head of a language model, with its loss.

use burn_core as burn;

use burn_core::module::{Module, Param};
use burn_core::tensor::{Int, Tensor};
use burn_nn::Linear;
use nvfp4_formats::{CrossEntropy, Nvfp4Error};

use super::{cast, rows};
use crate::functions::or_panic;
use crate::loss::{CHUNK_BYTES, try_linear_cross_entropy};
use crate::validate;

/// Output head: projects features to next-token logits in high precision, and computes their cross
/// entropy without materializing the logits of all tokens.
#[derive(Module, Debug)]
pub struct LmHead {
    /// Weight, `[d_model, vocab]`; `f32`, `bf16` or `f16`.
    pub weight: Param<Tensor<2>>,
    /// Loss configuration.
    #[module(skip)]
    pub params: CrossEntropy,
    /// Maximum bytes of logits per chunk of tokens.
    #[module(skip)]
    pub chunk_bytes: usize,
}

impl LmHead {
    /// Creates a head with this weight and the mean cross entropy, in chunks of [`CHUNK_BYTES`].
    pub fn new(weight: Param<Tensor<2>>) -> Self {
        Self {
            weight,
            params: CrossEntropy::default(),
            chunk_bytes: CHUNK_BYTES,
        }
    }

    /// Replaces the loss configuration.
    pub fn with_params(self, params: CrossEntropy) -> Self {
        Self { params, ..self }
    }

    /// Takes over the weight of a linear layer without a bias, with its id.
    ///
    /// # Errors
    /// Returns an error if the layer has a bias.
    pub fn try_from_linear(linear: Linear) -> Result<Self, Nvfp4Error> {
        match linear.bias {
            None => Ok(Self::new(linear.weight)),
            Some(_) => Err(Nvfp4Error::value("linear", "a bias", "no bias")),
        }
    }

    /// Returns the weight as a linear layer, with its id.
    pub fn into_linear(self) -> Linear {
        Linear {
            weight: self.weight,
            bias: None,
        }
    }

    /// Computes the logits of `x` (`[..., d_model]`): `[..., vocab]` in the dtype of `x`.
    ///
    /// # Panics
    /// If the last axis of `x` is not `d_model`.
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

    /// Computes the cross entropy, `f32[1]`, of the logits of `x` (`[..., d_model]`) against
    /// `targets`, one per row of `x`, in row order.
    ///
    /// # Errors
    /// Same as [`try_linear_cross_entropy`].
    pub fn try_loss<const D: usize>(
        &self,
        x: Tensor<D>,
        targets: Tensor<1, Int>,
    ) -> Result<Tensor<1>, Nvfp4Error> {
        validate::parameter(&x.device(), "weight", &self.weight)?;
        let (x, _) = rows(x);
        try_linear_cross_entropy(x, self.weight.val(), targets, self.params, self.chunk_bytes)
    }

    /// Panicking version of [`try_loss`](Self::try_loss).
    #[track_caller]
    pub fn loss<const D: usize>(&self, x: Tensor<D>, targets: Tensor<1, Int>) -> Tensor<1> {
        or_panic("LmHead::loss", self.try_loss(x, targets))
    }
}
