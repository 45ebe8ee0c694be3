//! Products of packed operands.

// `#[cube]` generates public items that cannot carry documentation.
#[allow(missing_docs)]
mod portable;

pub use portable::{gemm, gemm_on};

/// The kernels themselves, for tests that compile them without launching.
#[doc(hidden)]
pub mod kernels {
    pub use super::portable::{Epilogue, matrix_kernel, scalar_kernel};
}
