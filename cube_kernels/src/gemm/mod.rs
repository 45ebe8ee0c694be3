//! Products of packed and bf16 operands, dense and in groups.
//!
//! `product` and `grouped` are what callers see; `select` chooses kernel and tile. The kernels: `sm90`, the
//! bf16 product of Hopper, for which `workspace` decodes packed operands; `sm90_fused`, Hopper's product
//! with a packed weight that is decoded in registers; `small_m`, few rows with one; `sm120`, consumer
//! Blackwell's with block-scaled instructions; `matrix`, tile by tile on any GPU with matrix instructions;
//! `portable` and `grouped`, element by element anywhere; [`cublaslt`], NVIDIA's library, for FP4 tensor
//! cores. `epilogue` is what happens to a sum before it is written.

pub mod cublaslt;
// `#[cube]` generates public items that cannot carry documentation.
#[allow(missing_docs)]
mod epilogue;
#[allow(missing_docs)]
mod grouped;
#[allow(missing_docs)]
mod matrix;
#[allow(missing_docs)]
mod portable;
mod product;
mod select;
#[allow(missing_docs)]
mod sm120;
#[allow(missing_docs)]
mod sm90;
#[allow(missing_docs)]
mod sm90_fused;
#[allow(missing_docs)]
mod small_m;
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

/// The kernels themselves, for tests that compile them without launching.
#[doc(hidden)]
pub mod kernels {
    pub use super::{
        cublaslt::kernels::{add_rows_kernel, factors_kernel},
        epilogue::{EpilogueKind, Factor},
        grouped::{grouped_kernel, grouped_rows_with},
        matrix::{MatrixTile, UNITS as MATRIX_UNITS, matrix_kernel},
        portable::{Epilogue, scalar_kernel},
        product::{product_amax_with, product_as, product_with},
        select::{Plan, kernel_for, plan},
        sm90::{Grouping, Tile, UNITS as SM90_UNITS, sm90_kernel},
        sm90_fused::{FusedTile, Schedule, fused_kernel},
        sm120::{BlockScaledShape, Multiply, Pieces, sm120_kernel},
        small_m::{Left, Shape, small_m_kernel},
        workspace::{arrange_kernel, decode, decode_kernel, transpose_kernel, transposed},
    };
}
