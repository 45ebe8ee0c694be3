//! Masks of queries and keys.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use burn_core::tensor::{Bool, Device, Tensor};

use crate::ops::TensorIdentity;

/// Maximum number of causal masks that are known: one that is not used is evicted by later ones.
const MOST: usize = 256;

/// Results of [`generate_autoregressive_mask`], last used first.
static CAUSAL: Mutex<VecDeque<TensorIdentity>> = Mutex::new(VecDeque::new());

/// Mask of an attention: `[batch, queries, keys]`, true where the query does not attend to the key.
#[derive(Debug, Clone)]
pub(in crate::nn) enum AttentionMask {
    /// Result of [`generate_autoregressive_mask`]. The kernels support it.
    Causal(Tensor<3, Bool>),
    /// Any other mask.
    Other(Tensor<3, Bool>),
}

impl AttentionMask {
    /// Returns the mask, unless it is causal.
    pub(super) fn other(self) -> Option<Tensor<3, Bool>> {
        match self {
            Self::Causal(_) => None,
            Self::Other(mask) => Some(mask),
        }
    }
}

impl From<Tensor<3, Bool>> for AttentionMask {
    fn from(mask: Tensor<3, Bool>) -> Self {
        // The tensor itself: to fusion, a clone on another thread is another tensor.
        let mask = mask.into_dispatch();
        let is_causal = TensorIdentity::of(&mask).is_some_and(|mask| is_known(&mask));
        let mask = Tensor::from_dispatch(mask);
        match is_causal {
            true => Self::Causal(mask),
            false => Self::Other(mask),
        }
    }
}

/// Returns true if `mask` is a known causal mask, which becomes the last used one.
fn is_known(mask: &TensorIdentity) -> bool {
    let mut known = CAUSAL.lock().unwrap_or_else(PoisonError::into_inner);
    let place = known.iter().position(|known| known == mask);
    let found = place.and_then(|place| known.remove(place));
    let is_found = found.is_some();
    found.into_iter().for_each(|mask| known.push_front(mask));
    is_found
}

/// Returns a mask that hides later keys from each query, `[batch_size, seq_length, seq_length]`.
/// Replaces `burn_nn::attention::generate_autoregressive_mask`.
///
/// Attentions recognize the tensor, and its clones on the same thread, and use the causal kernels.
/// An operation on it returns another tensor, with which Burn's operations compute the attention.
/// [`MhaInput::causal`](super::MhaInput::causal) needs no tensor.
pub fn generate_autoregressive_mask(
    batch_size: usize,
    seq_length: usize,
    device: &Device,
) -> Tensor<3, Bool> {
    let mask = burn_nn::attention::generate_autoregressive_mask(batch_size, seq_length, device);
    let mask = mask.into_dispatch();
    if let Some(identity) = TensorIdentity::of(&mask) {
        let mut known = CAUSAL.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|known| !known.is_last_owner());
        known.truncate(MOST - 1);
        known.push_front(identity);
    }
    Tensor::from_dispatch(mask)
}
