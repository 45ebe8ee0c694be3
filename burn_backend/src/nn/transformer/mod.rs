//! burn-nn's transformer modules, with GEMMs in NVFP4, flash attention and layer norms in one pass.
//! [`Nvfp4TransformerBlock`](super::Nvfp4TransformerBlock) is another architecture: RMSNorm, SwiGLU
//! or experts, and rotary positions.
//!
//! - Masks and dropout determine whether the kernels or Burn's operations compute attention
//!   ([list](super::attention#flash-attention)). For a causal model use
//!   [`TransformerEncoderInput::causal`] or [`TransformerDecoderInput::target_causal`] instead of a
//!   mask.
//! - The `recipe` of a configuration is that of all layers. A recipe that exempts layers
//!   (`high_precision`, `layers`) is applied to the whole model by
//!   [`Nvfp4Recipe::apply`](crate::Nvfp4Recipe::apply).
//! - In autoregressive inference each call passes the whole sequence, and computes the positions
//!   that are not in the cache. burn-nn computes exactly one after the first call.

mod decoder;
mod encoder;

pub use super::feed_forward::{
    Nvfp4FeedForward as PositionWiseFeedForward,
    Nvfp4FeedForwardConfig as PositionWiseFeedForwardConfig,
};
pub use decoder::{
    TransformerDecoder, TransformerDecoderAutoregressiveCache, TransformerDecoderConfig,
    TransformerDecoderInput, TransformerDecoderLayer, TransformerDecoderLayerAutoregressiveCache,
};
pub use encoder::{
    TransformerEncoder, TransformerEncoderAutoregressiveCache, TransformerEncoderConfig,
    TransformerEncoderInput, TransformerEncoderLayer, TransformerEncoderLayerAutoregressiveCache,
};

use burn_core::tensor::Tensor;
use burn_nn::Dropout;
use nvfp4_formats::Nvfp4Error;

use super::LayerNorm;

/// Residual connection around the sublayers of a transformer layer.
struct Residual<'a> {
    dropout: &'a Dropout,
    /// True to normalize the input of a sublayer, false to normalize the sum.
    norm_first: bool,
}

impl Residual<'_> {
    /// Adds `sublayer` of `x` to `x`, with the norm `before` the sublayer or the norm `after` the
    /// addition.
    fn add(
        &self,
        x: Tensor<3>,
        [before, after]: [&LayerNorm; 2],
        sublayer: impl FnOnce(Tensor<3>) -> Result<Tensor<3>, Nvfp4Error>,
    ) -> Result<Tensor<3>, Nvfp4Error> {
        let input = match self.norm_first {
            true => before.try_forward(x.clone())?,
            false => x.clone(),
        };
        let sum = x + self.dropout.forward(sublayer(input)?);
        match self.norm_first {
            true => Ok(sum),
            false => after.try_forward(sum),
        }
    }
}
