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
pub use super::{
    arguments::{GroupedProblemLaunch, MixedMatrixLaunch, PackedMatrixLaunch, ProblemShapeLaunch},
    dispatch::plan,
    epilogue::{EpilogueKind, EpilogueLaunch, Factor},
    instances::specialization::GemmInstance,
    materialize::{dequantize_unscaled_kernel, transpose_kernel, transposed},
    plan::Plan,
    problem::Device,
    scheduler::{GroupedDim, Schedule},
    tiles::{CmmaTile, Sm90Tile, W4a16MnTile, W4a16Tile},
};

use cubecl::{client::Client, server::Handle};

use super::{Problem, align_groups::AlignedGroups, materialize::decode_from};
use crate::{
    BLOCK, Nvfp4Error,
    capabilities::{Capabilities, GemmBackend},
    moe::GroupOffsets,
    tensor::DeviceQuantized,
};

impl Fault {
    /// Faults that apply to every form.
    pub const INJECTED: [Self; 9] = [
        Self::NoFullWait,
        Self::NoAccumulatorWait,
        Self::EarlyStageReuse,
        Self::WrongSwizzle,
        Self::WrongScaleColumn,
        Self::SharedScaleColumns,
        Self::WrongInstructionDescriptor,
        Self::WrongStride,
        Self::WrongScaleId,
    ];
    /// Faults that only apply to [`Sm100Form::TwoCta`].
    pub const OF_PAIRS: [Self; 3] = [Self::NoPeerWait, Self::WrongHalf, Self::HalfOfScales];
}

impl W4a16Tile {
    /// All tiles with compiled kernels. With 112 rows, 768 x 2304 has 126 tiles, one wave of an
    /// H100 with 132 SMs; with 128 rows it has 108.
    pub const ALL: [Self; 7] = {
        const fn tile(rows_a: usize, ways: usize) -> W4a16Tile {
            W4a16Tile { rows_a, ways }
        }
        [
            tile(256, 1),
            tile(192, 1),
            tile(128, 1),
            tile(112, 1),
            tile(128, 2),
            tile(64, 2),
            tile(32, 4),
        ]
    };
}

impl W4a16MnTile {
    /// All heights.
    pub const ALL: [Self; 2] = [Self::M128, Self::M64];
}

/// Returns a bf16 copy of `packed`, `outer` rows of `blocks * 16` elements, without the factor of
/// its amax.
pub fn decode(client: &Client, packed: &DeviceQuantized) -> Handle {
    decode_from(client, packed, &packed.scales, None)
}

/// Moves the groups along K of `packed` to multiples of 64 columns, as [`Tcgen05`] reads them.
///
/// # Errors
/// Returns an error if block scales are in tiles, or a number does not fit 32 bits.
pub fn align_groups(
    client: &Client,
    packed: &DeviceQuantized,
    groups: &GroupOffsets,
) -> Result<(), Nvfp4Error> {
    let aligned = AlignedGroups::of(client, groups, packed.blocks() * BLOCK)?;
    aligned.arrange(client, packed, groups)?;
    Ok(())
}

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
