//! Rows of a table by number.

use burn_core as burn;

use burn_core::module::{Module, Param};
use burn_core::tensor::{FloatDType, Int, Tensor};
use burn_nn::Embedding as BurnEmbedding;
use nvfp4_kernels::Nvfp4Error;

use crate::functions::or_panic;
use crate::loss::try_embedding;

/// A table of vectors, whose gradient is added up in a fixed order, on the device.
///
/// It stands in for `burn_nn::Embedding` (the same parameter, id and record), whose gradient is a
/// scatter, which GPUs add up in an order that is not the same from run to run.
#[derive(Module, Debug)]
pub struct Embedding {
    /// One row per id, `[vocab, d_model]`; `f32`, `bf16` or `f16`.
    pub weight: Param<Tensor<2>>,
}

impl Embedding {
    /// An embedding of this table. A parameter may be that of a head, too: its gradients add up.
    pub fn new(weight: Param<Tensor<2>>) -> Self {
        Self { weight }
    }

    /// Take over the parameter of `embedding`, with its id.
    pub fn from_embedding(embedding: BurnEmbedding) -> Self {
        Self {
            weight: embedding.weight,
        }
    }

    /// Gives the parameter to a `burn_nn::Embedding`, with its id.
    pub fn into_embedding(self) -> BurnEmbedding {
        BurnEmbedding {
            weight: self.weight,
        }
    }

    /// The rows `ids` (`[batch, time]`) in type `dtype`: `[batch, time, d_model]`. An id that is no
    /// row gives NaN.
    ///
    /// # Errors
    /// As [`try_embedding`].
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

    /// [`try_forward`](Self::try_forward), panicking where it fails.
    pub fn forward(&self, ids: Tensor<2, Int>, dtype: FloatDType) -> Tensor<3> {
        or_panic("Embedding::forward", self.try_forward(ids, dtype))
    }
}
