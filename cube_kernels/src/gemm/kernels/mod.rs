//! GEMM kernels, one per file. Re-exported for tests that compile them without launching.

// `#[cube]` generates public items that cannot carry documentation.
#[allow(missing_docs)]
pub(crate) mod cmma;
#[allow(missing_docs)]
pub(crate) mod cublaslt;
#[allow(missing_docs)]
pub(crate) mod scalar;
pub(crate) mod sm100_block_scaled;
#[allow(missing_docs)]
pub(crate) mod sm100_block_scaled_commands;
#[allow(missing_docs)]
pub(crate) mod sm100_block_scaled_cta;
#[allow(missing_docs)]
pub mod sm100_block_scaled_engine;
#[allow(missing_docs)]
pub mod sm100_block_scaled_operands;
#[allow(missing_docs)]
mod sm100_block_scaled_output;
#[allow(missing_docs)]
mod sm100_block_scaled_roles;
#[allow(missing_docs)]
pub(crate) mod sm100_block_scaled_stage;
#[allow(missing_docs)]
pub mod sm100_probe;
#[allow(missing_docs)]
pub(crate) mod sm120_block_scaled;
mod sm120_block_scaled_stage;
#[allow(missing_docs)]
pub(crate) mod sm90_bf16;
#[allow(missing_docs)]
pub(crate) mod sm90_stream_k;
#[allow(missing_docs)]
pub(crate) mod sm90_w4a16;
#[allow(missing_docs)]
pub(crate) mod sm90_w4a16_mn_major;
#[allow(missing_docs)]
mod sm90_w4a16_mn_major_output;
#[allow(missing_docs)]
mod sm90_w4a16_mn_major_stage;
#[allow(missing_docs)]
mod sm90_w4a16_mn_major_tiles;
#[allow(missing_docs)]
mod sm90_w4a16_output;
#[allow(missing_docs)]
mod small_m;
pub(crate) mod small_m_launch;
#[allow(missing_docs)]
mod small_m_mainloop;
#[allow(missing_docs)]
mod small_m_output;
mod small_m_shape;
#[allow(missing_docs)]
mod w4a16_arrange;

pub use super::{
    arguments::{GroupedProblemLaunch, MixedMatrixLaunch, PackedMatrixLaunch, ProblemShapeLaunch},
    epilogue::{EpilogueKind, EpilogueLaunch, Factor},
    materialize::{decode, dequantize_unscaled_kernel, transpose_kernel, transposed},
    problem::Plan,
    scheduler::{GroupedDim, Schedule},
    tiles::{
        CmmaTile, Fault, Multiply, Sm90Tile, Sm100Form, Sm100Tile, Sm120Tile, TensorCore,
        W4a16MnTile, W4a16Tile,
    },
};
pub use cmma::{CmmaPlan, UNITS as CMMA_UNITS, cmma_kernel};
pub use cublaslt::{add_rows_kernel, factors_kernel};
pub use scalar::{ScalarPlan, scalar_grouped_kernel, scalar_kernel};
pub use sm90_bf16::{Sm90Plan, UNITS as SM90_UNITS, sm90_bf16_kernel};
pub use sm90_stream_k::{
    PartialTilesLaunch, StreamKPlan, StreamKProblemLaunch, sm90_stream_k_kernel,
};
pub use sm90_w4a16::{ScheduledProblemLaunch, W4a16Plan, sm90_w4a16_kernel};
pub use sm90_w4a16_mn_major::sm90_w4a16_mn_major_kernel;
pub use sm90_w4a16_mn_major_tiles::W4a16MnMajorPlan;
pub use sm100_block_scaled_commands::{SoftwareTensorCore, SoftwareTensorCoreLaunch};
pub use sm100_block_scaled_cta::{sm100_block_scaled_kernel, units as sm100_units};
pub use sm100_block_scaled_operands::Sm100Plan;
pub use sm100_block_scaled_stage::{ScaleMaps, ScaleMapsLaunch, SwizzledScalesLaunch};
pub use sm120_block_scaled::{Sm120Plan, sm120_block_scaled_kernel};
pub use sm120_block_scaled_stage::Pieces;
pub use small_m::{small_m_kernel, small_m_norm_kernel};
pub use small_m_shape::{SmallMLeft, SmallMNorm, SmallMShape};
pub use w4a16_arrange::{ArrangeSizeLaunch, arrange_kernel};
