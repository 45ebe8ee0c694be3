//! CubeCL building blocks of the kernels, one concept per file: counterparts of
//! [`reference`](mod@crate::reference). Tests check that they are bit-identical to it on every
//! runtime.
//!
//! Kernels never use a buffer's `len()`: in CubeCL 0.11.3 it is the size of the memory of the
//! handle, which may be larger than the tensor. Counts are passed as arguments.

#![allow(missing_docs)] // `#[cube]` generates public items that cannot carry documentation.

pub mod activation;
pub mod arrival;
pub mod block;
pub mod codec;
pub mod eden;
pub mod exact;
pub mod hadamard;
pub mod mx;
pub mod overlap;
pub mod philox;
pub mod plane;
pub mod ptx;
pub mod row_blocks;
pub mod scale;
pub mod unscaled;
pub mod w4a16_order;
pub mod warp_sums;
pub mod words;
