//! Amax of a matrix, of its rows, of its columns and of its groups, before and after the columnwise
//! transform.

mod fold;
pub(super) mod kernel;
mod launch;
pub(super) mod strips;

pub(super) use fold::atomic_amax;
pub(crate) use fold::{
    AmaxOut, Maxima, Running, STRIP, fold_words, leave_group, leave_plane, leave_row,
};
pub use fold::{AmaxOutLaunch, AmaxPlan};
pub use launch::*;
pub(crate) use strips::{Strip, fold_strip};
