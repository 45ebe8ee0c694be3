//! Building blocks of the kernels, one concept in each file: the twins of
//! [`reference`](mod@crate::reference) in CubeCL. Bit-equal to it by test, on every runtime.
//!
//! No kernel asks a buffer for its `len()`: in CubeCL 0.11.3 that is the size of the memory behind
//! the handle, which may be larger than the tensor. Counts are arguments.

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
