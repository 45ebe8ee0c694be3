//! The random streams that the operands of a layer draw from.

use nvfp4_kernels::Nvfp4Error;
use serde::{Deserialize, Serialize};

/// Role of a stream: the rowwise quantized output gradient, in dgrad.
pub(crate) const ROLE_DGRAD: u64 = 0;
/// Role of a stream: the columnwise quantized output gradient, in wgrad.
pub(crate) const ROLE_WGRAD: u64 = 1;
/// Role of a stream: the weight in dgrad.
pub(crate) const ROLE_DGRAD_W: u64 = 2;
/// Role of a stream: the input in wgrad.
pub(crate) const ROLE_WGRAD_X: u64 = 3;
/// Role of a stream: the signs of MS-EDEN's transform in dgrad.
pub(crate) const ROLE_DGRAD_SIGNS: u64 = 4;
/// Role of a stream: the signs of MS-EDEN's transform in wgrad.
pub(crate) const ROLE_WGRAD_SIGNS: u64 = 5;
/// Role of a stream: the input in fprop.
pub(crate) const ROLE_FPROP_X: u64 = 6;
/// Role of a stream: the weight in fprop.
pub(crate) const ROLE_FPROP_W: u64 = 7;
/// Bits of a stream id that hold the role; the others hold the layer id.
const ROLE_BITS: u32 = 8;

/// Position of the rank in an offset; the bits below count the forwards.
pub(crate) const RANK_SHIFT: u32 = 48;

/// The stream of `role` in the layer with id `layer`.
pub(crate) fn stream(layer: u64, role: u64) -> u64 {
    layer << ROLE_BITS | role
}

/// The RNG state of one layer: everything that decides its random bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RngState {
    /// Seed of the run.
    pub seed: u64,
    /// Id of the layer, less than 2^56: layers with different ids never share bits.
    pub layer: u64,
    /// Training forwards so far. Each one draws at its own offset, and its backward uses the same.
    pub offset: u64,
    /// Signs of the Hadamard transform: bit `i` set negates element `i`.
    pub rht_signs: u16,
}

impl RngState {
    /// Layer ids are less than this.
    pub const LAYER_LIMIT: u64 = 1 << (64 - ROLE_BITS);

    /// Counts of forwards are less than this: the bits above hold the rank in a data-parallel run.
    pub const OFFSET_LIMIT: u64 = 1 << RANK_SHIFT;

    /// Fails unless the layer id and the offset are within their limits.
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
