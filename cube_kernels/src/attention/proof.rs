//! What tests ask of attention besides its API.

use cubecl::client::Client;

use super::{
    Attention, AttentionOutput,
    decode::{self, KvCache, NewTokens},
};
use crate::{AttentionParams, Nvfp4Error};

pub use super::mma::supports as mma_supports;

/// Computes attention into existing memory, which tests fill with NaN.
///
/// # Errors
/// See [`forward`](super::forward); also returns an error if the memory does not match
/// [`AttentionOutput::empty`].
pub fn forward_into(
    client: &Client,
    attention: &Attention,
    output: &AttentionOutput,
) -> Result<(), Nvfp4Error> {
    super::forward_into(client, attention, output)
}

/// True if [`decode`](decode::decode) uses matrix instructions. Results are then within rounding of
/// [`reference::attention`](crate::reference::attention).
pub fn uses_mma(
    client: &Client,
    new: &NewTokens<'_>,
    cache: &KvCache,
    params: &AttentionParams,
) -> bool {
    decode::plan(client, new, cache, Some(params)).mma
}
