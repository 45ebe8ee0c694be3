//! Masks of queries and keys.

use burn_core::tensor::{Bool, Device, Tensor};

/// Mask of an attention, for [`MhaInput::mask_attn`](super::MhaInput::mask_attn).
///
/// A tensor converts into it, and it converts into a tensor, for burn-nn's own modules.
#[derive(Debug, Clone)]
pub enum AttentionMask {
    /// Hides later keys from each query. The kernels support it. Made by
    /// [`generate_autoregressive_mask`].
    Causal {
        /// Number of sequences.
        batch: usize,
        /// Number of queries and of keys.
        time: usize,
        /// Device of the tensor that it converts into.
        device: Device,
    },
    /// `[batch, queries, keys]`, true where the query does not attend to the key.
    Tensor(Tensor<3, Bool>),
}

impl AttentionMask {
    /// Returns the mask that is given by a tensor.
    pub(super) fn tensor(self) -> Option<Tensor<3, Bool>> {
        match self {
            Self::Causal { .. } => None,
            Self::Tensor(mask) => Some(mask),
        }
    }
}

impl From<Tensor<3, Bool>> for AttentionMask {
    fn from(mask: Tensor<3, Bool>) -> Self {
        Self::Tensor(mask)
    }
}

impl From<AttentionMask> for Tensor<3, Bool> {
    /// Returns `[batch, queries, keys]`.
    fn from(mask: AttentionMask) -> Self {
        match mask {
            AttentionMask::Causal {
                batch,
                time,
                device,
            } => burn_nn::attention::generate_autoregressive_mask(batch, time, &device),
            AttentionMask::Tensor(mask) => mask,
        }
    }
}

/// Returns a mask that hides later keys from each query, for `batch_size` sequences of `seq_length`
/// positions. Replaces `burn_nn::attention::generate_autoregressive_mask`. It is not a tensor, so
/// that the kernels compute the attention.
pub fn generate_autoregressive_mask(
    batch_size: usize,
    seq_length: usize,
    device: &Device,
) -> AttentionMask {
    AttentionMask::Causal {
        batch: batch_size,
        time: seq_length,
        device: device.clone(),
    }
}
