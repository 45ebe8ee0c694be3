//! Training by several ranks: groups of them, and what they do with tensors together.
//!
//! - [`ProcessGroup`] is a rank's end of a group, with collectives on tensors.
//! - [`functions`] are collectives that autodiff differentiates, of which parallel layers are made.
//! - [`average_gradients`] averages gradients over ranks, those of experts over the ranks that have
//!   them.
//! - [`DataParallel`] averages gradients over the devices of one process.

pub mod functions;

mod data;
mod gradients;
mod group;

pub use data::DataParallel;
pub(crate) use data::warn_of_distributed_weight;
pub use gradients::{GradientGroups, average_gradients};
pub use group::ProcessGroup;
