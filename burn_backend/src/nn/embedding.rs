//! Embedding layer.

use burn_core as burn;

use burn_core::module::{Module, Param};
use burn_core::tensor::{FloatDType, Int, Tensor};
use burn_nn::Embedding as BurnEmbedding;
use nvfp4_formats::Nvfp4Error;

use crate::functions::or_panic;
use crate::loss::try_embedding;

/// Embedding table whose gradient is accumulated on the device in a fixed order.
///
/// Replaces `burn_nn::Embedding` (same parameter, id and record). The gradient of that one is a
/// scatter, which GPUs accumulate in an order that varies from run to run.
#[derive(Module, Debug)]
pub struct Embedding {
    /// Table, one row per id, `[vocab, d_model]`; `f32`, `bf16` or `f16`.
    pub weight: Param<Tensor<2>>,
}

impl Embedding {
    /// Creates an embedding with this table. The parameter may be shared with a head: the gradients
    /// add up.
    pub fn new(weight: Param<Tensor<2>>) -> Self {
        Self { weight }
    }

    /// Takes over the parameter of `embedding`, with its id.
    pub fn from_embedding(embedding: BurnEmbedding) -> Self {
        Self {
            weight: embedding.weight,
        }
    }

    /// Returns the parameter as a `burn_nn::Embedding`, with its id.
    pub fn into_embedding(self) -> BurnEmbedding {
        BurnEmbedding {
            weight: self.weight,
        }
    }

    /// Looks up the rows of `ids` (`[batch, time]`) and returns `[batch, time, d_model]` in dtype
    /// `dtype`. An id out of range gives NaN.
    ///
    /// # Errors
    /// Same as [`try_embedding`].
    pub fn try_forward(
        &self,
        ids: Tensor<2, Int>,
        dtype: FloatDType,
    ) -> Result<Tensor<3>, Nvfp4Error> {
        let [batch, time] = ids.dims();
        let rows = try_embedding(self.weight.val(), ids.reshape([batch * time]), dtype)?;
        let [_, d_model] = rows.dims();
        Ok(rows.reshape([batch, time, d_model]))
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    pub fn forward(&self, ids: Tensor<2, Int>, dtype: FloatDType) -> Tensor<3> {
        or_panic("Embedding::forward", self.try_forward(ids, dtype))
    }
}
