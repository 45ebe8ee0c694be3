//! Random streams of the operands of a layer.

use nvfp4_formats::Nvfp4Error;
use serde::{Deserialize, Serialize};

/// Stream role: row-wise quantized output gradient, in dgrad.
pub(crate) const ROLE_DGRAD: u64 = 0;
/// Stream role: column-wise quantized output gradient, in wgrad.
pub(crate) const ROLE_WGRAD: u64 = 1;
/// Stream role: weight in dgrad.
pub(crate) const ROLE_DGRAD_W: u64 = 2;
/// Stream role: input in wgrad.
pub(crate) const ROLE_WGRAD_X: u64 = 3;
/// Stream role: signs of MS-EDEN's transform in dgrad.
pub(crate) const ROLE_DGRAD_SIGNS: u64 = 4;
/// Stream role: signs of MS-EDEN's transform in wgrad.
pub(crate) const ROLE_WGRAD_SIGNS: u64 = 5;
/// Stream role: input in fprop.
pub(crate) const ROLE_FPROP_X: u64 = 6;
/// Stream role: weight in fprop.
pub(crate) const ROLE_FPROP_W: u64 = 7;
/// Number of bits of a stream id for the role; the other bits hold the layer id.
const ROLE_BITS: u32 = 8;

/// Bit position of the rank in an offset; the lower bits count the forwards.
pub(crate) const RANK_SHIFT: u32 = 48;

/// Returns the stream of `role` in the layer with id `layer`.
pub(crate) fn stream(layer: u64, role: u64) -> u64 {
    layer << ROLE_BITS | role
}

/// RNG state of one layer: everything that determines its random bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RngState {
    /// Seed of the run.
    pub seed: u64,
    /// Id of the layer, less than 2^56: layers with different ids never share bits.
    pub layer: u64,
    /// Number of training forwards so far. Each one draws at a different offset, and its backward
    /// at the same one.
    pub offset: u64,
    /// Signs of the Hadamard transform: a set bit `i` negates element `i`.
    pub rht_signs: u16,
}

impl RngState {
    /// Exclusive upper limit of layer ids.
    pub const LAYER_LIMIT: u64 = 1 << (64 - ROLE_BITS);

    /// Exclusive upper limit of the count of forwards: the bits above hold the rank in a
    /// data-parallel run.
    pub const OFFSET_LIMIT: u64 = 1 << RANK_SHIFT;

    /// Returns an error if the layer id or the offset is not within its limit.
    pub(crate) fn check(&self) -> Result<(), Nvfp4Error> {
        if self.layer >= Self::LAYER_LIMIT {
            return Err(Nvfp4Error::value(
                "layer",
                self.layer.to_string(),
                format!("less than {} (2^56)", Self::LAYER_LIMIT),
            ));
        }
        if self.offset >= Self::OFFSET_LIMIT {
            return Err(Nvfp4Error::value(
                "offset",
                self.offset.to_string(),
                format!("less than {} (2^48)", Self::OFFSET_LIMIT),
            ));
        }
        Ok(())
    }
}
