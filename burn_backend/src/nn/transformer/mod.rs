//! burn-nn's transformer modules, with GEMMs in NVFP4, flash attention and layer norms in one pass.
//! [`Nvfp4TransformerBlock`](super::Nvfp4TransformerBlock) is another architecture: RMSNorm, SwiGLU
//! or experts, and rotary positions.
//!
//! - Masks and dropout determine whether the kernels or Burn's operations compute attention
//!   ([list](super::attention#flash-attention)).
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

use super::{LayerNorm, Neighbours, Nvfp4Linear, ResidualStream};

/// Returns the configurations of norms, attentions and feed-forward of a layer of `$config`, an
/// encoder's or a decoder's, which have the same fields. Returns an error from the calling function
/// if `layer_norm_eps` is not positive.
macro_rules! sublayers {
    ($config:expr) => {{
        let config = $config;
        $crate::nn::norm::check_epsilon("layer_norm_eps", config.layer_norm_eps)?;
        let norm = $crate::nn::LayerNormConfig::new(config.d_model);
        let attention =
            $crate::nn::attention::MultiHeadAttentionConfig::new(config.d_model, config.n_heads)
                .with_initializer(config.initializer.clone())
                .with_dropout(config.dropout)
                .with_quiet_softmax(config.quiet_softmax)
                .with_recipe(config.recipe.clone());
        let feed_forward = $crate::nn::Nvfp4FeedForwardConfig::new(config.d_model, config.d_ff)
            .with_initializer(config.initializer.clone())
            .with_dropout(config.dropout)
            .with_activation(config.activation.clone())
            .with_recipe(config.recipe.clone());
        (
            norm.with_epsilon(config.layer_norm_eps),
            attention,
            feed_forward,
        )
    }};
}
use sublayers;

/// Returns an error if a cache of `found` layers is not that of a model of `expected` layers.
fn check_cache(found: usize, expected: usize) -> Result<(), Nvfp4Error> {
    if found != expected {
        let (found, expected) = (format!("{found} layers"), expected.to_string());
        return Err(Nvfp4Error::value("cache", found, expected));
    }
    Ok(())
}

/// Norm of a transformer layer with the linear layers around it, wherever the norm is: the last one
/// of the sublayer before it and the first one of the sublayer after it.
type NormOf<'a> = (&'a LayerNorm, Neighbours<'a>);

/// Returns a norm and its neighbours.
fn norm_between<'a>(
    before: &'a Nvfp4Linear,
    norm: &'a LayerNorm,
    next: &'a Nvfp4Linear,
) -> NormOf<'a> {
    let (before, next) = (Some(before), Some(next));
    (norm, Neighbours { before, next })
}

/// Adds `sublayer` to the residual stream, with the norm `before` the sublayer if `norm_first`,
/// otherwise with the norm `after` the addition. The norm adds what is pending in its own pass.
fn add_sublayer(
    (dropout, norm_first): (&Dropout, bool),
    stream: ResidualStream,
    [before, after]: [NormOf<'_>; 2],
    sublayer: impl FnOnce(Tensor<3>) -> Result<Tensor<3>, Nvfp4Error>,
) -> Result<ResidualStream, Nvfp4Error> {
    let normed =
        |(norm, neighbours): NormOf<'_>, stream| norm.try_forward_stream_for(neighbours, stream);
    let add = |sum, output| ResidualStream {
        sum,
        pending: Some(dropout.forward(output)),
    };
    match norm_first {
        true => {
            let (sum, x) = normed(before, stream)?;
            Ok(add(sum, sublayer(x)?))
        }
        false => {
            let x = stream.into_sum();
            let output = sublayer(x.clone())?;
            Ok(normed(after, add(x, output))?.1.into())
        }
    }
}
