//! AdamW in place, for the parameters of any module.
//!
//! [`AdamW::step`] updates all parameters in a few launches, clips gradients to a global norm on
//! the device and reads nothing back. It owns the buffers of parameters and moments while it
//! runs, and gives the same buffers back; one that is held elsewhere too (by a clone of the model,
//! say) is copied first. Parameters that are not `f32` have a copy in `f32` that takes the steps,
//! and are rounded from it.
//!
//! [`AdamWConfig::module_optimizer`] gives the same optimizer as Burn's own training loop takes it.
//!
//! [`ZeroAdamW`] is the same optimizer whose state is sharded over the ranks of a data-parallel
//! run.
//!
//! [`Muon`] updates matrices by their orthogonal momentum, and everything else by AdamW.
//!
//! A gradient that is NaN makes the norm NaN, and with it every parameter, as in PyTorch; without
//! clipping it makes the elements NaN that it belongs to. An infinite gradient makes its elements
//! NaN, and the others take a step of zero gradients.

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
