//! For instances, tests and benchmarks: names of the kernels and of their plans, and questions to
//! dispatch about devices that are not there.

pub use super::kernels::{
    cublaslt::{
        self,
        kernel::{CublasLtPlan, add_rows_kernel, factors_kernel},
    },
    portable::{
        cmma::{Cmma, CmmaPlan, UNITS as CMMA_UNITS, cmma_kernel},
        scalar::{Scalar, ScalarPlan, scalar_grouped_kernel, scalar_kernel},
    },
    sm90::{
        bf16::{DequantThenBf16, Sm90Plan, UNITS as SM90_UNITS, sm90_bf16_kernel},
        stream_k::{
            DequantThenStreamK, PartialTilesLaunch, StreamKPlan, StreamKProblemLaunch,
            sm90_stream_k_kernel,
        },
        w4a16::{
            arrange::{ArrangeSizeLaunch, arrange_kernel},
            kernel::{ScheduledProblemLaunch, W4a16, W4a16Plan, sm90_w4a16_kernel},
        },
        w4a16_mn_major::{
            kernel::{W4a16MnMajor, sm90_w4a16_mn_major_kernel},
            tiles::W4a16MnMajorPlan,
        },
    },
    sm100::{
        self, Tcgen05,
        commands::{SoftwareTensorCore, SoftwareTensorCoreLaunch},
        cta::{sm100_block_scaled_kernel, units as sm100_units},
        operands::Sm100Plan,
        stage::{ScaleMaps, ScaleMapsLaunch, SwizzledScalesLaunch},
        tile::{Fault, Sm100Form, Sm100Tile, TensorCore},
    },
    sm120::{
        kernel::{BlockScaledMma, Sm120Plan, sm120_block_scaled_kernel},
        stage::Pieces,
        tile::{Multiply, Sm120Tile},
    },
    small_m::{
        SmallM,
        kernel::{small_m_kernel, small_m_norm_kernel},
        shape::{SmallMLeft, SmallMNorm, SmallMShape},
    },
};

use super::Problem;
use crate::capabilities::{Capabilities, GemmBackend};

/// Returns the backend for `problem` on a device with these capabilities, assuming that cuBLASLt
/// supports everything that it is meant for.
pub fn backend_of(capabilities: &Capabilities, problem: &Problem) -> GemmBackend {
    let device = Device {
        capabilities,
        // No backend depends on it.
        sms: 1,
        cublaslt: &|_| Ok(()),
        tcgen05: &|_| Ok(()),
    };
    match plan(&device, problem) {
        Ok(choice) => choice.backend,
        Err(_) => GemmBackend::Scalar,
    }
}
