//! Activations between linear layers: SwiGLU and GELU, forward and backward, each with one read and
//! one write of its matrices.
//!
//! Every element is computed in `f32` and rounded once, by operations that give identical bits on
//! every device: those of [`reference::activation`](crate::reference::activation). If rows are
//! whole vectors, SwiGLU is the fused prologue of the quantization kernels with a dense output.

#[cfg(feature = "proof")]
pub(crate) mod instances;
#[allow(missing_docs)] // `#[cube]` generates public items that cannot carry documentation.
mod kernel;
mod launch;

pub use launch::{activation, activation_backward, activation_of_groups};
pub(crate) use launch::{check_activation, prologue_of};
