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
#[allow(missing_docs)]
mod tile;

pub use amax::{AmaxRequest, Amaxes, amax, amaxes};
pub use dequantize::dequantize;
pub use launch::CopyRequest;
pub use quantize::{
    quantize, quantize_both, quantize_col, quantize_row, quantize_tile, quantize_tile_with,
};

/// The kernels themselves, for tests that compile them without launching.
#[doc(hidden)]
pub mod kernels {
    pub use super::{
        amax::{AmaxPlan, amax_kernel, amax_tiles_kernel},
        dequantize::{dequantize_cols_kernel, dequantize_rows_kernel},
        launch::CopyPlan,
        quantize::{TilePlan, quantize_row_kernel, quantize_tiles_kernel},
        tile::{Grouping, ShapeLaunch},
    };
}
