//! Attention by matrix instructions: not yet.

use cubecl::client::Client;

pub use super::Backward;
use super::{Attention, AttentionOutput, Heads};
use crate::Nvfp4Error;

/// Whether the kernels of this folder take `attention`.
///
/// # Errors
/// Why not.
pub fn supports(_client: &Client, _attention: &Attention) -> Result<(), String> {
    Err("there are no such kernels".into())
}

/// Whether every head begins where they can load it.
pub fn is_vectorized(_heads: &Heads) -> bool {
    false
}

/// Queues the forward.
///
/// # Errors
/// When a launch is refused.
pub fn forward(
    _client: &Client,
    _attention: &Attention,
    _output: &AttentionOutput,
) -> Result<(), Nvfp4Error> {
    unreachable!("nothing is supported")
}

/// Queues the backward.
///
/// # Errors
/// When a launch is refused.
pub fn backward(
    _client: &Client,
    _attention: &Attention,
    _backward: &Backward<'_>,
) -> Result<(), Nvfp4Error> {
    unreachable!("nothing is supported")
}
