//! Norms and activations between linear layers, each as a separate extension trait.
//!
//! As in [`ops`](super), arguments are not checked here: [`functions`](crate::functions) checks
//! them before anything is queued.

mod activation;
mod norm;

pub use super::spec::OutputAmax;
pub use activation::ActivationOps;
pub use norm::{NormGradients, NormOps, NormOutput, NormResult, NormSpec};
#[cfg(feature = "cubecl-backend")]
pub use norm::{NormGradientsMetadata, NormOutputMetadata, NormResultMetadata};
pub use nvfp4_formats::reference::{Activation, Gelu, Norm};
