//! GEMMs of packed and bf16 operands, dense and grouped.
//!
//! `product` and `grouped` are what callers see; `select` chooses kernel and tile. The kernels are
//! in `kernels`, one a file; [`cublaslt`] is NVIDIA's library, for FP4 tensor cores. `epilogue` is
//! what happens to a sum before it is written, `tiles` the shapes of tiles, `scheduler` their
//! order.

pub mod cublaslt;
// `#[cube]` generates public items that cannot carry documentation.
#[allow(missing_docs)]
mod arguments;
#[allow(missing_docs)]
mod epilogue;
mod grouped;
#[doc(hidden)]
pub mod kernels;
mod product;
#[allow(missing_docs)]
mod scheduler;
mod select;
mod tiles;
#[allow(missing_docs)]
mod workspace;

pub use epilogue::OutputAmax;
pub use grouped::{
    gemm_grouped_depth, gemm_grouped_depth_amax, gemm_grouped_rows, gemm_grouped_rows_amax,
};
pub use product::{
    Elements, Operand, Scale, Target, gemm, gemm_bf16, gemm_on, path_of, path_of_columns, product,
    product_amax,
};
pub use select::{decodes, kernel_of};
