//! Modules.
//!
//! [`Nvfp4Linear`] is the plain layer; [`Nvfp4GroupedLinear`] is one layer per expert, all in one
//! launch. [`Nvfp4Attention`], [`Nvfp4SwiGlu`], [`Nvfp4FeedForward`], [`Nvfp4Moe`] and
//! [`Nvfp4TransformerBlock`] build on them. GEMMs with a common input are fused (queries, keys and
//! values; gate and up): the input is quantized once, and the parts of the weight share one global
//! scale. [`ExpertParallelMoe`] is the mixture of experts with its experts sharded over ranks.
//!
//! [`Nvfp4PackedLinear`] and [`Nvfp4PackedGroupedLinear`] are for inference: their weights are
//! stored in NVFP4. The weight of [`Fp8Linear`] is stored in FP8.
//!
//! [`tensor_parallel`] has layers whose weights are sharded over ranks.
//!
//! [`Embedding`] and [`LmHead`] are the first and last layers of a language model, in high
//! precision. [`LayerNormLinear`] and [`LayerNormMlp`] are TransformerEngine's modules: a norm and
//! the GEMMs after it.
//!
//! # Replacing burn-nn
//!
//! The names of burn-nn are here too: replace `use burn::nn::` by `use nvfp4::nn::`. These modules
//! are of this crate, with burn-nn's fields, configurations, defaults and records:
//!
//! - with GEMMs in NVFP4: [`Linear`], [`SwiGlu`], [`MultiHeadAttention`](attention), and the modules
//!   of [`transformer`]. Their configurations also have a `recipe`,
//!   [`Nvfp4Recipe::new`](crate::Nvfp4Recipe::new) by default, and feature sizes must be multiples of
//!   16;
//! - in high precision: [`LayerNorm`], [`RmsNorm`], [`Embedding`] and
//!   [`CrossEntropyLoss`](loss::CrossEntropyLoss).
//!
//! All other names are burn-nn's own modules, in high precision: other losses, convolutions, recurrent
//! layers, dropout, activations ([`activation`], with burn-nn's `SwiGlu`), positions and
//! `CrossAttention`.
//!
//! ```
//! # #[cfg(feature = "flex")] {
//! use burn_core::tensor::{Device, Tensor};
//! use burn_nvfp4::nn::attention::generate_autoregressive_mask;
//! use burn_nvfp4::nn::transformer::{TransformerEncoderConfig, TransformerEncoderInput};
//!
//! let device = Device::flex();
//! let encoder = TransformerEncoderConfig::new(32, 64, 2, 1).init(&device);
//! let x = Tensor::<3>::ones([1, 6, 32], &device);
//! let mask = generate_autoregressive_mask(1, 6, &device);
//! let y = encoder.forward(TransformerEncoderInput::new(x).mask_attn(mask));
//! assert_eq!(y.dims(), [1, 6, 32]);
//! # }
//! ```

pub mod attention;
mod block;
mod embedding;
mod feed_forward;
mod fp8;
mod grouped;
mod head;
mod input_norm;
mod layer_norm_linear;
mod layer_norm_mlp;
mod linear;
pub mod loss;
mod moe;
pub mod norm;
mod operand_weight;
mod packed;
mod parts;
mod routing;
mod swiglu;
pub mod tensor_parallel;
pub mod transformer;

// A name of this crate shadows the same name of burn-nn.
pub use burn_nn::*;

pub use attention::layer::{Nvfp4Attention, Nvfp4AttentionConfig, RopeCache, RopeCacheConfig};
pub use block::{BlockOutput, Nvfp4TransformerBlock, Nvfp4TransformerBlockConfig};
pub use embedding::{Embedding, EmbeddingConfig};
pub use feed_forward::{
    MlpActivation, Nvfp4FeedForward, Nvfp4FeedForwardConfig, Nvfp4SwiGlu, Nvfp4SwiGluConfig,
    SwiGluActivation, try_feed_forward_of_experts, try_swiglu_of,
};
pub use fp8::Fp8Linear;
pub use grouped::{Nvfp4GroupedLinear, Nvfp4GroupedLinearConfig};
pub use head::LmHead;
pub use input_norm::{InputNorm, NormKind};
pub use layer_norm_linear::{LayerNormLinear, LayerNormLinearConfig};
pub use layer_norm_mlp::{LayerNormMlp, LayerNormMlpConfig};
pub use linear::{
    Nvfp4Linear, Nvfp4Linear as Linear, Nvfp4LinearConfig, Nvfp4LinearConfig as LinearConfig,
};
pub use moe::{
    ExpertDispatch, ExpertParallelMoe, ExpertShard, MoeOutput, Nvfp4Moe, Nvfp4MoeConfig,
    RoutedTokens, ShardedExperts, expert_parameters,
};
pub(crate) use norm::Neighbours;
pub use norm::{LayerNorm, LayerNormConfig, ResidualStream, RmsNorm, RmsNormConfig};
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub(crate) use packed::Observer;
pub use packed::{
    Activations, BlockScales, NormLinear, Nvfp4PackedGroupedLinear, Nvfp4PackedLinear, Nvfp4Weight,
    PackedParameter,
};
pub use routing::Routing;
pub use swiglu::{SwiGlu, SwiGluConfig};

use burn_core::tensor::{DType, Device, FloatDType, Tensor};
use nvfp4_formats::Nvfp4Error;

/// Casts `x` to `dtype`; no operation if it has that dtype.
pub(crate) fn cast<const D: usize>(x: Tensor<D>, dtype: FloatDType) -> Tensor<D> {
    if x.dtype() == DType::from(dtype) {
        x
    } else {
        x.cast(dtype)
    }
}

/// Flattens a tensor of any rank to a matrix of rows; also returns the original shape, to restore
/// it on the result.
fn rows<const D: usize>(x: Tensor<D>) -> (Tensor<2>, [usize; D]) {
    const { assert!(D > 0, "the input needs at least one axis") };
    let dims = x.dims();
    let rows = dims[..D - 1].iter().product();
    (x.reshape([rows, dims[D - 1]]), dims)
}

/// Returns the size of each of `count` equal parts of `whole`, or an error that names `count`.
fn equal_parts(
    (name, whole): (&str, usize),
    (argument, count): (&'static str, usize),
) -> Result<usize, Nvfp4Error> {
    if count == 0 || !whole.is_multiple_of(count) {
        let expected = format!("a divisor of {name} ({whole})");
        return Err(Nvfp4Error::value(argument, count.to_string(), expected));
    }
    Ok(whole / count)
}

/// Returns true if `dropout` changes tensors on `device`.
fn drops(dropout: &Dropout, device: &Device) -> bool {
    dropout.prob > 0.0 && dropout.training.is_enabled() && device.is_autodiff()
}

/// Returns a dropout with the probability `dropout`, or an error if that is out of range.
fn checked_dropout(dropout: f64) -> Result<Dropout, Nvfp4Error> {
    if !(0.0..1.0).contains(&dropout) {
        let expected = "at least 0 and less than 1";
        return Err(Nvfp4Error::value("dropout", dropout.to_string(), expected));
    }
    Ok(DropoutConfig::new(dropout).init())
}
