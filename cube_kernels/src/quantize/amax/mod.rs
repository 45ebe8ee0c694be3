//! Amax of a matrix, of its rows, of its columns and of its groups, before and after the columnwise
//! transform.

mod fold;
mod kernel;
mod launch;
mod strips;

pub(super) use fold::atomic_amax;
pub(crate) use fold::{AmaxOut, Maxima, Running, STRIP, fold_words, leave_group, leave_plane};
pub use fold::{AmaxOutLaunch, AmaxPlan};
pub use kernel::*;
pub use launch::*;
pub(crate) use strips::{Strip, fold_strip};
pub use strips::{amax_lines_kernel, amax_strips_kernel};
