//! Quantization to NVFP4 and MX formats, amax values, and dequantization.
//!
//! A [`Quantize`] request is complete when it is built: [`Quantize::check`] validates it,
//! [`Quantize::plan`] chooses the kernels and [`Quantize::launch`] queues them, in this order.
//! [`ComputeAmax`] is the request for amax values alone. Launches allocate their output, queue the
//! kernels and return without waiting; nothing is read back. All kernels use 64-bit indices if a
//! tensor requires them, and support any number of units per cube.
//!
//! Modules, bottom up:
//!
//! - `target`, `source`, `step`: the parts of requests and plans.
//! - `tile`, `scale_table`, `prologue` and others: the building blocks of kernels.
//! - `amax`, `rowwise`, `per_token`, `tiles` (with `columnwise` and `block_2d`), `ms_eden`, `mx`: the
//!   kernels and their launches.
//! - `check`, `compute_amax`, `request`: the requests, and the choice of kernels.
//! - `describe`: the kernels of a device, for `nvfp4 doctor`.

// `#[cube]` generates public items that cannot carry documentation.
#[allow(missing_docs)]
pub(crate) mod amax;
#[allow(missing_docs)]
mod block_2d;
mod check;
#[allow(missing_docs)]
mod columnwise;
mod compute_amax;
#[allow(missing_docs)]
mod dequantize;
mod describe;
pub(crate) mod instances;
#[allow(missing_docs)]
mod ms_eden;
#[allow(missing_docs)]
mod mx;
#[allow(missing_docs)]
mod offset;
#[allow(missing_docs)]
mod packed_source;
#[allow(missing_docs)]
mod per_token;
#[allow(missing_docs)]
// `#[cube]` expands `match` over enums of buffers, not `if let`.
#[allow(clippy::single_match)]
pub(crate) mod plan;
#[allow(missing_docs)]
pub(crate) mod prologue;
#[allow(missing_docs)]
mod random_bits;
mod request;
#[allow(missing_docs)]
mod rowwise;
mod scale_order;
#[allow(missing_docs)]
mod scale_table;
mod source;
mod step;
#[allow(missing_docs)]
mod swizzle;
mod target;
#[allow(missing_docs)]
pub(crate) mod tile;
#[allow(missing_docs)]
mod tile_memory;
#[allow(missing_docs)]
mod tiles;

pub use amax::{AmaxRequest, Amaxes};
pub use compute_amax::{ComputeAmax, ComputedAmax};
pub use dequantize::dequantize;
pub use describe::describe;
pub use mx::mx_dequantize;
pub use offset::advance_offset;
pub use random_bits::{answer_random_bits, has_stochastic_instruction, match_random_bits};
pub use request::{Quantize, Quantized, QuantizedAmax};
pub use scale_order::{scales_in_rows, scales_in_tiles};
pub use source::Source;
pub use step::{QuantizePlan, QuantizeStep, Usages};
pub use swizzle::{
    swizzle, swizzle_batch, swizzle_block_groups, swizzle_row_groups, unswizzle, unswizzle_batch,
    unswizzle_block_groups, unswizzle_row_groups,
};
pub use target::{DeviceRounding, EdenRandom, RedrawnSigns, TargetSpec};

/// The kernels, for tests that compile them without launching.
#[doc(hidden)]
pub mod kernels {
    pub use super::{
        amax::{
            AmaxOutLaunch, AmaxPlan, AmaxTilesLaunch, amax_kernel, amax_lines_kernel,
            amax_strips_kernel, amax_tiles_kernel,
        },
        dequantize::{
            ColumnsPlan, PackedSectorsLaunch, PackedWordsLaunch, WordsPlan,
            dequantize_col_pairs_kernel, dequantize_cols_kernel, dequantize_rows_kernel,
        },
        ms_eden::{
            EdenDrawLaunch, EdenInputsLaunch, EdenOutLaunch, EdenPackedLaunch, EdenPolicy,
            EdenScalesArgs, EdenScreenLaunch, EdenSearchLaunch, EdenSignsLaunch, EdenStoredArgs,
            EdenTilesLaunch, EdenValuesArgs, ScreenOutLaunch, ScreenPlan, ms_eden_amax_kernel,
            ms_eden_amax_pair_kernel, ms_eden_kernel, ms_eden_screen_kernel,
        },
        mx::{
            MxPlan, MxRowPlan, MxRowsLaunch, MxTilesLaunch, mx_dequantize_col_kernel,
            mx_dequantize_row_kernel, mx_quantize_col_kernel, mx_quantize_row_kernel,
            mx_requantize_across_kernel, mx_requantize_along_kernel,
        },
        offset::advance_offset_kernel,
        packed_source::{PackedRowsLaunch, SourcePlan},
        per_token::{PerTokenPlan, TokenRowsLaunch, quantize_per_token_kernel},
        plan::{DrawLaunch, PackedOutLaunch, QuantOutArgs, QuantPlan, QuantTargetLaunch},
        prologue::{
            GateInputsLaunch, LaunchedVariant, Prologue, PrologueInputsArgs, PrologueOutArgs,
            ProloguePlan, prologue_kernel, run_prologue,
        },
        random_bits::random_bits_kernel,
        rowwise::{RowGroupsLaunch, RowPlan, quantize_row_kernel},
        swizzle::{
            BlockStartsLaunch, ScaleShapeLaunch, swizzle_block_groups_kernel, swizzle_kernel,
            unswizzle_block_groups_kernel, unswizzle_kernel,
        },
        tile::{Grouping, ShapeLaunch, map_tiles_kernel},
        tile_memory::{TileGridLaunch, TilePlan},
        tiles::quantize_tiles_kernel,
    };
    pub use crate::launch::set_units;
}
