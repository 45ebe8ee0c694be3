//! Embedding layer.

use burn_core as burn;

use burn_core::config::Config;
use burn_core::module::{Module, Param};
use burn_core::tensor::{Device, FloatDType, Int, Tensor};
use burn_nn::{Embedding as BurnEmbedding, Initializer};
use nvfp4_formats::Nvfp4Error;

use crate::functions::or_panic;
use crate::loss::try_embedding;

/// Configuration of [`Embedding`]; same fields and defaults as `burn_nn::EmbeddingConfig`.
#[derive(Config, Debug)]
pub struct EmbeddingConfig {
    /// Number of ids.
    pub n_embedding: usize,
    /// Number of features.
    pub d_model: usize,
    /// Initializer of the table.
    #[config(default = "Initializer::Normal{mean:0.0, std:1.0}")]
    pub initializer: Initializer,
}

impl EmbeddingConfig {
    /// Creates an embedding on `device`.
    pub fn init(&self, device: &Device) -> Embedding {
        let shape = [self.n_embedding, self.d_model];
        Embedding::new(self.initializer.init(shape, device))
    }
}

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

    /// Looks up the rows of `ids` (`[batch, time]`) and returns `[batch, time, d_model]` in the dtype
    /// of the table. An id out of range gives NaN.
    ///
    /// # Panics
    /// If [`try_forward_as`](Self::try_forward_as) returns an error.
    #[track_caller]
    pub fn forward(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let dtype = self.weight.dtype().into();
        or_panic("Embedding::forward", self.try_forward_as(ids, dtype))
    }

    /// Version of [`forward`](Self::forward) that converts to `dtype` in the same pass.
    ///
    /// # Errors
    /// Same as [`try_embedding`].
    pub fn try_forward_as(
        &self,
        ids: Tensor<2, Int>,
        dtype: FloatDType,
    ) -> Result<Tensor<3>, Nvfp4Error> {
        let [batch, time] = ids.dims();
        let rows = try_embedding(self.weight.val(), ids.reshape([batch * time]), dtype)?;
        let [_, d_model] = rows.dims();
        Ok(rows.reshape([batch, time, d_model]))
    }
}
