//! Kernels of Hopper (sm_90a): TMA, `wgmma` and persistent grids. Dispatch asks `w4a16`,
//! `w4a16_mn_major`, `bf16` and `stream_k`, and compares their estimates; all of them run on H100
//! and H200.
//!
//! - [`bf16`]: dense and grouped GEMMs of bf16 operands. Packed operands are dequantized before.
//! - [`stream_k`]: as `bf16`, for outputs whose tiles do not fill the GPU evenly.
//! - [`w4a16`]: a packed `b` is dequantized in registers.
//! - [`w4a16_mn_major`]: a packed MN-major `b` is dequantized in registers.

pub(crate) mod bf16;
pub(crate) mod stream_k;
pub(crate) mod w4a16;
pub(crate) mod w4a16_mn_major;

pub use bf16::{DequantThenBf16, Sm90Plan, UNITS as SM90_UNITS, sm90_bf16_kernel};
pub use stream_k::{
    DequantThenStreamK, PartialTilesLaunch, StreamKPlan, StreamKProblemLaunch, sm90_stream_k_kernel,
};
pub use w4a16::{
    ArrangeSizeLaunch, ScheduledProblemLaunch, W4a16, W4a16Plan, arrange_kernel, sm90_w4a16_kernel,
};
pub use w4a16_mn_major::{W4a16MnMajor, W4a16MnMajorPlan, sm90_w4a16_mn_major_kernel};
