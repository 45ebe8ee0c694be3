//! RMSNorm and LayerNorm of rows, with an optional residual added first, forward and backward, each
//! with one read and one write of its matrices.
//!
//! Arithmetic is in `f32`; matrices are `f32`, `bf16` or `f16`. The order of every sum depends on
//! the shape alone: results are bit-identical to
//! [`reference::norm_forward`](crate::reference::norm_forward) and
//! [`reference::norm_backward`](crate::reference::norm_backward).

#[allow(missing_docs)] // `#[cube]` generates public items that cannot carry documentation.
mod backward;
#[allow(missing_docs)]
pub(crate) mod forward;
#[cfg(feature = "proof")]
pub(crate) mod instances;
mod launch;
#[allow(missing_docs)]
mod parts;
pub(crate) mod plan;
#[allow(missing_docs)]
pub(crate) mod prologue;
#[allow(missing_docs)]
mod row;

pub use launch::{
    NormBackwardRequest, NormGradients, NormRequest, NormResult, norm, norm_backward,
};
