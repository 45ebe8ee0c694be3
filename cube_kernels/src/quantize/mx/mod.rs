//! Microscaling formats: quantization along either axis, from a matrix or an NVFP4 tensor, and
//! dequantization.
//!
//! The results match [`reference::mx_quantize`](crate::reference::mx_quantize) (numerics chapter,
//! section 10) byte for byte.

mod columns;
mod dequantize;
mod plan;
mod quantize;
mod requantize;
mod rows;

pub use columns::*;
pub use dequantize::*;
pub use plan::*;
pub use quantize::*;
pub use requantize::*;
pub use rows::*;
