//! Multi-head attention with burn-nn's interface, for models that use
//! `burn::nn::attention::MultiHeadAttention`. [`Nvfp4Attention`](super::Nvfp4Attention) also has
//! rotary positions, grouped queries and windows.
//!
//! ```
//! # #[cfg(feature = "flex")] {
//! use burn_core::tensor::{Device, Tensor};
//! use burn_nvfp4::nn::attention::{
//!     MhaInput, MultiHeadAttentionConfig, generate_autoregressive_mask,
//! };
//!
//! let device = Device::flex();
//! let attention = MultiHeadAttentionConfig::new(32, 2).init(&device);
//! let x = Tensor::<3>::ones([1, 6, 32], &device);
//! let mask = generate_autoregressive_mask(1, 6, &device);
//! let output = attention.forward(MhaInput::self_attn(x).mask_attn(mask));
//! assert_eq!(output.context.dims(), [1, 6, 32]);
//! assert_eq!(output.weights().dims(), [1, 2, 6, 6]);
//! # }
//! ```
//!
//! # Flash attention
//!
//! The kernels of [`crate::attention`](mod@crate::attention) compute scores, softmax and values,
//! without a matrix of queries by keys. Burn's operations compute these cases, and materialize it:
//!
//! - a [`mask_attn`](MhaInput::mask_attn), even one that masks nothing, that is not from this
//!   module's [`generate_autoregressive_mask`];
//! - a [`mask_pad`](MhaInput::mask_pad) of more than 256 sequences, or of a causal attention with a
//!   cache or with separate queries and keys;
//! - dropout in training. The default probability is 0.1, as in burn-nn: set
//!   [`dropout`](MultiHeadAttentionConfig::dropout) to 0 to train with the kernels;
//! - heads wider than [`MAX_HEAD`](crate::attention::MAX_HEAD).
//!
//! In training, the first of these forwards of a module emits a [`tracing`] event of level `WARN`
//! with the reason; all others emit one of level `DEBUG`.
//!
//! With a `mask_pad`, the device sorts keys and values so that the padding of a sequence comes last,
//! for any mask. Two kinds of outputs differ from burn-nn's: without a key that is not padding, a
//! query attends to nothing; in causal self-attention, a query that is padding attends to earlier
//! padding.
//!
//! Activations in `f32`, and heads that are not a multiple of 16, use the kernels without tensor
//! cores: cast the input to bf16 on a GPU.
//!
//! Self-attention concatenates its three weights in each forward, to quantize its input once.
//! [`Nvfp4Attention`](super::Nvfp4Attention) stores them together.
//!
//! The other names of this module are burn-nn's own.

mod cache;
mod input;
pub(super) mod layer;
mod mask;
mod multi_head;
mod padded;
mod unfused;

// A name of this crate shadows the same name of burn-nn.
pub use burn_nn::attention::*;

pub use cache::MhaCache;
pub(super) use cache::OutputCache;
pub use input::MhaInput;
pub(super) use input::{Masks, Names};
pub(super) use mask::AttentionMask;
pub use mask::generate_autoregressive_mask;
pub use multi_head::{MhaOutput, MultiHeadAttention, MultiHeadAttentionConfig};
