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
