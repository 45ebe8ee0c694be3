//! GEMM kernels, in a folder per architecture. The first page of each folder says which kernels it
//! has, what calls them, and whether they have run on hardware. Re-exported for tests that compile
//! them without launching.
//!
//! | folder | devices | has run on hardware |
//! |---|---|---|
//! | `portable` | any device; `cmma` needs matrix instructions | yes |
//! | `small_m` | sm_80 and later, up to 16 rows | yes, on sm_90 |
//! | `sm90` | Hopper | yes |
//! | `sm100` | data-center Blackwell | **no** |
//! | `sm120` | consumer Blackwell | **no** |
//! | `cublaslt` | sm_100 and sm_103, by NVIDIA's library | bf16 and FP8 yes, FP4 **no** |

// `#[cube]` generates public items that cannot carry documentation.
pub mod cublaslt;
#[allow(missing_docs)]
pub(crate) mod portable;
#[allow(missing_docs)]
pub mod sm100;
#[allow(missing_docs)]
pub(crate) mod sm120;
#[allow(missing_docs)]
pub(crate) mod sm90;
#[allow(missing_docs)]
pub(crate) mod small_m;

pub use super::{
    arguments::{GroupedProblemLaunch, MixedMatrixLaunch, PackedMatrixLaunch, ProblemShapeLaunch},
    epilogue::{EpilogueKind, EpilogueLaunch, Factor},
    materialize::{decode, dequantize_unscaled_kernel, transpose_kernel, transposed},
    plan::Plan,
    scheduler::{GroupedDim, Schedule},
    tiles::{
        CmmaTile, Fault, Multiply, Sm90Tile, Sm100Form, Sm100Tile, Sm120Tile, TensorCore,
        W4a16MnTile, W4a16Tile,
    },
};
pub use cublaslt::{CublasLtPlan, add_rows_kernel, factors_kernel};
pub use portable::{
    CMMA_UNITS, Cmma, CmmaPlan, Scalar, ScalarPlan, cmma_kernel, scalar_grouped_kernel,
    scalar_kernel,
};
pub use sm90::{
    ArrangeSizeLaunch, DequantThenBf16, DequantThenStreamK, PartialTilesLaunch, SM90_UNITS,
    ScheduledProblemLaunch, Sm90Plan, StreamKPlan, StreamKProblemLaunch, W4a16, W4a16MnMajor,
    W4a16MnMajorPlan, W4a16Plan, arrange_kernel, sm90_bf16_kernel, sm90_stream_k_kernel,
    sm90_w4a16_kernel, sm90_w4a16_mn_major_kernel,
};
pub use sm100::{
    ScaleMaps, ScaleMapsLaunch, Sm100Plan, SoftwareTensorCore, SoftwareTensorCoreLaunch,
    SwizzledScalesLaunch, Tcgen05, sm100_block_scaled_kernel, sm100_units,
};
pub use sm120::{BlockScaledMma, Pieces, Sm120Plan, sm120_block_scaled_kernel};
pub use small_m::{
    SmallM, SmallMLeft, SmallMNorm, SmallMShape, small_m_kernel, small_m_norm_kernel,
};
