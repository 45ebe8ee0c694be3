//! Microscaling formats: quantization along either axis, from a matrix or an NVFP4 tensor, and
//! dequantization.
//!
//! The results match [`reference::mx_quantize`](crate::reference::mx_quantize) (numerics chapter,
//! section 10) byte for byte.

pub(super) mod columns;
mod dequantize;
pub(super) mod plan;
mod quantize;
mod requantize;
pub(super) mod rows;

pub use dequantize::*;
pub use quantize::*;
pub use requantize::*;
