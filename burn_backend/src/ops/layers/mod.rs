//! What stands between linear layers: norms and activations, each an extension trait of its own.
//!
//! As in [`ops`](super), arguments are trusted here: [`functions`](crate::functions) checks them
//! before anything is queued.

mod activation;
mod norm;

pub use super::spec::OutputAmax;
pub use activation::ActivationOps;
pub use norm::{NormGradients, NormOps, NormOutput, NormResult, NormSpec};
#[cfg(feature = "cubecl-backend")]
pub use norm::{NormGradientsMetadata, NormOutputMetadata, NormResultMetadata};
pub use nvfp4_kernels::reference::{Activation, Gelu, Norm};
