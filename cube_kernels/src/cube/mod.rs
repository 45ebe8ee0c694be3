//! Building blocks of the kernels, one concept in each file: the twins of
//! [`reference`](mod@crate::reference) in CubeCL. Bit-equal to it by test, on every runtime.

#![allow(missing_docs)] // `#[cube]` generates public items that cannot carry documentation.

pub mod block;
pub mod codec;
pub mod hadamard;
pub mod philox;
pub mod ptx;
pub mod scale;
