//! For instances, tests and benchmarks: names of the kernels and of their arguments, and requests
//! that no layer makes.

pub use super::{
    amax::{
        AmaxOutLaunch, AmaxPlan, amax_of_matrix, amaxes,
        kernel::{AmaxTilesLaunch, amax_kernel, amax_tiles_kernel},
        run_prologue_with_amaxes,
        strips::{amax_lines_kernel, amax_strips_kernel},
    },
    dequantize::{
        ColumnsPlan, PackedSectorsLaunch, PackedWordsLaunch, WordsPlan,
        dequantize_col_pairs_kernel, dequantize_cols_kernel, dequantize_rows_kernel,
    },
    ms_eden::{
        arguments::{
            EdenDrawLaunch, EdenInputsLaunch, EdenOutLaunch, EdenPackedLaunch, EdenScalesArgs,
            EdenSignsLaunch, EdenStoredArgs, EdenValuesArgs,
        },
        kernel::{ms_eden_amax_kernel, ms_eden_kernel},
        position::{EdenPolicy, EdenTilesLaunch},
        screen::{EdenScreenLaunch, ScreenOutLaunch, ScreenPlan, ms_eden_screen_kernel},
        search::{EdenSearchLaunch, ms_eden_amax_pair_kernel},
    },
    mx::{
        columns::MxTilesLaunch,
        mx_dequantize_col_kernel, mx_dequantize_row_kernel, mx_quantize_col_kernel,
        mx_quantize_row_kernel, mx_requantize_across_kernel, mx_requantize_along_kernel,
        plan::{MxPlan, MxRowPlan},
        rows::MxRowsLaunch,
    },
    offset::advance_offset_kernel,
    packed_source::{PackedRowsLaunch, SourcePlan},
    per_token::{PerTokenPlan, TokenRowsLaunch, quantize_per_token_kernel},
    plan::{DrawLaunch, PackedOutLaunch, QuantOutArgs, QuantPlan, QuantTargetLaunch},
    prologue::{
        GateInputsLaunch, GatherInputsLaunch, LaunchedVariant, Prologue, PrologueInputsArgs,
        PrologueOutArgs, ProloguePlan, prologue_kernel, run_prologue,
    },
    rowwise::{RowGroupsLaunch, RowPlan, quantize_row_kernel},
    step::{QuantizeStep, Usages},
    swizzle::{
        ScaleShapeLaunch, swizzle, swizzle_batch, swizzle_kernel, swizzle_row_groups, unswizzle,
        unswizzle_batch, unswizzle_kernel, unswizzle_row_groups,
    },
    tile::{Grouping, ShapeLaunch, map_tiles_kernel},
    tile_memory::{TileGridLaunch, TilePlan},
    tiles::quantize_tiles_kernel,
};

use super::Quantize;
use crate::capabilities::Capabilities;

impl Quantize<'_> {
    /// Returns the kernels that the request launches on a device with these capabilities, in order.
    pub fn plan(&self, capabilities: &Capabilities) -> Vec<QuantizeStep> {
        self.steps(capabilities, false)
    }

    /// Returns the kernels that compute only the amax values; see [`Self::launch_amax`].
    pub fn plan_amax(&self, capabilities: &Capabilities) -> Vec<QuantizeStep> {
        self.steps(capabilities, true)
    }

    /// Requests columnwise tensors of groups one after another, for comparisons with tensors of
    /// single groups.
    pub fn stacked(mut self) -> Self {
        self.stacked = true;
        self
    }
}
