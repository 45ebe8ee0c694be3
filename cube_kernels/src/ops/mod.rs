//! Launching the quantization kernels.
//!
//! Each function checks its arguments, allocates its output, queues the kernels and returns without
//! waiting; nothing is read back. All kernels index with 64 bits where a tensor needs it, and are
//! written for any number of units in a cube.

// `#[cube]` generates public items that cannot carry documentation.
#[allow(missing_docs)]
mod amax;
#[allow(missing_docs)]
mod dequantize;
pub(crate) mod launch;
#[allow(missing_docs)]
mod quantize;

pub use amax::amax;
pub use dequantize::dequantize;
pub use quantize::{quantize_col, quantize_row, quantize_tile};

/// The kernels themselves, for tests that compile them without launching.
#[doc(hidden)]
pub mod kernels {
    pub use super::{
        amax::{amax_cols_kernel, amax_kernel},
        dequantize::dequantize_kernel,
        quantize::{quantize_col_kernel, quantize_row_kernel, quantize_tile_kernel},
    };
}
