//! In-place AdamW and Muon, for the parameters of any module.
//!
//! [`AdamW::step`] updates all parameters in a few launches, clips gradients to a global norm on
//! the device, and reads nothing back. It updates the buffers of parameters and moments in place; a
//! buffer that is also held elsewhere (by a clone of the model, for example) is copied first.
//! Parameters that are not `f32` have an `f32` master weight, which is updated and from which they
//! are rounded.
//!
//! [`AdamWConfig::module_optimizer`] returns the same optimizer for Burn's own training loop.
//!
//! [`ZeroAdamW`] is the same optimizer with its state sharded over the ranks of a data-parallel
//! run.
//!
//! [`Muon`] updates matrices by their orthogonalized momentum, and all other parameters by AdamW.
//!
//! With clipping, a NaN gradient makes the norm, and with it every parameter, NaN, as in PyTorch.
//! Without clipping it makes the elements NaN that it belongs to. With clipping, an infinite
//! gradient makes its elements NaN; the others take a step with zero gradients.

mod adamw;
mod clip;
mod config;
mod module_optimizer;
mod muon;
mod schedule;
mod zero;

pub use adamw::{AdamW, ParameterMoments};
pub use clip::clip_grad_norm;
pub use config::{AdamWConfig, MomentType};
pub use muon::{Muon, MuonConfig, MuonScale, MuonState, NewtonSchulz};
pub use zero::ZeroAdamW;
