//! Attention without matrix instructions.

use cubecl::client::Client;

use super::{Attention, AttentionOutput, Backward};
use crate::Nvfp4Error;

/// Queues the forward of checked operands.
pub(super) fn forward(_client: &Client, _attention: &Attention, _output: &AttentionOutput) {}

/// Queues the backward of checked operands.
pub(super) fn backward(
    _client: &Client,
    _attention: &Attention,
    _backward: &Backward<'_>,
) -> Result<(), Nvfp4Error> {
    Ok(())
}
