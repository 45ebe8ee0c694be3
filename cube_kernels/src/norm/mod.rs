//! RMSNorm and LayerNorm of rows, with the addition of a residual before them, forward and
//! backward, each in one read and one write of its matrices.
//!
//! Arithmetic is in `f32`; matrices are `f32`, `bf16` or `f16`. Every sum has an order that
//! depends on the shape alone: see [`reference::norm_forward`](crate::reference::norm_forward) and
//! [`reference::norm_backward`](crate::reference::norm_backward), whose bits these are.

#[allow(missing_docs)] // `#[cube]` generates public items that cannot carry documentation.
mod backward;
#[allow(missing_docs)]
pub(crate) mod forward;
pub(crate) mod instances;
mod launch;
pub(crate) mod plan;
#[allow(missing_docs)]
pub(crate) mod prologue;
#[allow(missing_docs)]
mod row;

pub use launch::{
    NormBackwardRequest, NormGradients, NormRequest, NormResult, norm, norm_backward,
};
