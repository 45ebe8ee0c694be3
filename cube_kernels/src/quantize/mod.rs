//! Launches of the quantization kernels.
//!
//! Each function checks its arguments, allocates its output, queues the kernels and returns without
//! waiting; nothing is read back. All kernels use 64-bit indices if a tensor requires them, and
//! support any number of units per cube.

// `#[cube]` generates public items that cannot carry documentation.
#[allow(missing_docs)]
pub(crate) mod amax;
#[allow(missing_docs)]
mod block_2d;
#[allow(missing_docs)]
mod columnwise;
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
mod prologue;
#[allow(missing_docs)]
mod random_bits;
mod request;
#[allow(missing_docs)]
mod rowwise;
mod scale_order;
#[allow(missing_docs)]
mod scale_table;
#[allow(missing_docs)]
mod swizzle;
#[allow(missing_docs)]
pub(crate) mod tile;
#[allow(missing_docs)]
mod tile_memory;
#[allow(missing_docs)]
mod tiles;

pub use amax::{AmaxRequest, Amaxes, amax, amaxes, run_prologue_with_amaxes};
pub use dequantize::dequantize;
pub use describe::describe;
pub use ms_eden::{
    EdenForm, EdenRandom, EdenSource, EdenTransform, RedrawnSigns, ms_eden, ms_eden_amax,
    ms_eden_amax_pair, ms_eden_as,
};
pub use mx::{MxForm, mx_dequantize, mx_quantize, mx_quantize_groups, mx_requantize};
pub use offset::advance_offset;
pub use per_token::quantize_per_token;
pub use plan::QuantRequest;
pub(crate) use prologue::run_prologue_of_groups;
pub use prologue::{Prologue, run_prologue};
pub use random_bits::{answer_random_bits, has_stochastic_instruction, match_random_bits};
pub use request::{
    quantize, quantize_both, quantize_col, quantize_in_both_storages, quantize_operands,
    quantize_row, quantize_side_by_side, quantize_tile, quantize_tile_copy, quantize_tile_with,
};
pub use scale_order::{scales_in_rows, scales_in_tiles};
pub use swizzle::{
    swizzle, swizzle_batch, swizzle_block_groups, swizzle_row_groups, unswizzle, unswizzle_batch,
    unswizzle_block_groups, unswizzle_row_groups,
};

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
            GateInputsLaunch, LaunchedVariant, PrologueInputsArgs, PrologueOutArgs, ProloguePlan,
            prologue_kernel,
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
