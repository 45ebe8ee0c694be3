//! Activations between linear layers, SwiGLU and GELU, forward and backward, each in one read and
//! one write of its matrices.
//!
//! Every element is rounded once, from `f32`, by operations that have the same bits on every
//! device: those of [`reference::activation`](crate::reference::activation). SwiGLU of rows in
//! whole vectors is the prologue of the quantization kernels, written:
//! [`run_prologue`](crate::quantize::run_prologue).

pub(crate) mod instances;
#[allow(missing_docs)] // `#[cube]` generates public items that cannot carry documentation.
mod kernel;
mod launch;

pub use launch::{activation, activation_backward, activation_of_groups, activation_with_amaxes};
