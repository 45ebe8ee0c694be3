//! The W4A16 GEMM of Hopper. It runs on H100 and H200.
//!
//! - `kernel`: the kernel, and its choice and launch.
//! - `arrange`: a pass before it, which rearranges `a`.
//! - `output`: its epilogue.

mod arrange;
mod kernel;
mod output;

pub use arrange::{ArrangeSizeLaunch, arrange_kernel};
pub(crate) use kernel::Sm90W4a16;
pub(super) use kernel::width_of;
pub use kernel::{ScheduledProblemLaunch, W4a16, W4a16Plan, sm90_w4a16_kernel};
pub(super) use output::TilePlace;
