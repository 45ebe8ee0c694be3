//! Scales of a group in shared memory, and quantization of blocks with them.

use cubecl::prelude::*;

use super::plan::QuantPlan;
use crate::{
    BlockScaling,
    cube::{
        block::{BlockPlan, Encoded, Multiplier, encode_block, quantize_with_amax, stays_below_7},
        philox::Random,
        scale::{GlobalScale, LARGEST_USUAL},
    },
};

/// Scale factors derived from amax values, once per cube and group: the two factors of a block's
/// scale, and the multiplier for every scale byte. If each stored row has its own amax, the factors
/// of every row of the tile: a block would take longer to derive them than to quantize by them.
#[derive(CubeType)]
pub(super) struct ScaleTable {
    /// Fields of [`GlobalScale`].
    pub scalars: Shared<[f32]>,
    /// Multipliers of the elements of a block, by scale byte.
    pub multipliers: Shared<[f32]>,
    /// `block` and `decode` of [`GlobalScale`] for each stored row, then `amax` and `encode`, which
    /// only four over six reads.
    lines: Shared<[Vector<f32, Const<2>>]>,
}

/// Stored rows of a tile, each of which has an amax.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct Lines {
    /// Index of the first one among the amax values.
    pub first: usize,
    /// Number of rows.
    pub count: usize,
    /// First row for which this unit derives factors; the stride is the number of units.
    pub own: usize,
}

#[cube]
impl ScaleTable {
    /// Allocates a table for tiles of `lines` stored rows with an amax each, or none.
    pub fn new(#[comptime] lines: usize) -> ScaleTable {
        ScaleTable {
            scalars: Shared::new_slice(4usize),
            multipliers: Shared::new_slice(128usize),
            lines: Shared::new_slice(comptime!(if lines == 0 { 1 } else { 2 * lines })),
        }
    }

    /// Fills the table with the factors of `lines`, for blocks of `multiple` times the values. All
    /// units of the cube must call it, and the caller synchronizes before and after.
    pub fn fill_lines(
        &mut self,
        amax: &[f32],
        lines: Lines,
        #[comptime] most: usize,
        #[comptime] multiple: f32,
        #[comptime] policy: BlockPlan,
    ) {
        let mut line = lines.own;
        while line < lines.count {
            let amax = amax[lines.first + line];
            let global = GlobalScale::from_amax(amax, policy.scaling).of_multiples(multiple);
            let mut factors = Vector::<f32, Const<2>>::empty();
            factors.insert(0usize, global.block);
            factors.insert(1usize, global.decode);
            self.lines[line] = factors;
            if comptime!(matches!(policy.scaling, BlockScaling::FourOverSix(_))) {
                let mut further = Vector::<f32, Const<2>>::empty();
                further.insert(0usize, global.amax);
                further.insert(1usize, global.encode);
                self.lines[most + line] = further;
            }
            line += CUBE_DIM as usize;
        }
    }

    /// Returns the scale of stored row `line` of a tile of at most `most` rows: its own if each row
    /// has one, otherwise the one for `all`.
    pub fn of_line(
        &self,
        all: &GlobalScale,
        line: usize,
        #[comptime] most: usize,
        #[comptime] plan: QuantPlan,
    ) -> GlobalScale {
        if comptime!(plan.per_row) {
            let factors = self.lines[line];
            let chooses = comptime!(matches!(plan.policy.scaling, BlockScaling::FourOverSix(_)));
            let further = if comptime!(chooses) {
                self.lines[most + line]
            } else {
                Vector::<f32, Const<2>>::new(0.0f32)
            };
            GlobalScale {
                amax: further.extract(0usize),
                encode: further.extract(1usize),
                block: factors.extract(0usize),
                decode: factors.extract(1usize),
            }
        } else {
            GlobalScale {
                amax: all.amax,
                encode: all.encode,
                block: all.block,
                decode: all.decode,
            }
        }
    }

    /// Fills the table by `count` units, of which this is number `unit`, for blocks of `multiple`
    /// times the values. The caller synchronizes before and after.
    pub fn fill(
        &mut self,
        amax: f32,
        unit: u32,
        count: u32,
        #[comptime] multiple: f32,
        #[comptime] policy: BlockPlan,
    ) {
        let global = GlobalScale::from_amax(amax, policy.scaling);
        let mut byte = unit;
        while byte < 128u32 {
            let multiplier = global.encode_multiplier(byte, policy.conversion);
            self.multipliers[byte as usize] = multiplier * comptime!(1.0 / multiple);
            byte += count;
        }
        let global = global.of_multiples(multiple);
        if unit == 0u32 {
            self.scalars[0] = global.amax;
            self.scalars[1] = global.encode;
            self.scalars[2] = global.block;
            self.scalars[3] = global.decode;
        }
    }

    /// Returns the multiplier of a block with this scale byte in a stored row of scale `global`.
    /// With an amax per stored row and PTX, uses [`GlobalScale::usual_multiplier`].
    pub fn multiplier(&self, scale: u32, global: &GlobalScale, #[comptime] plan: QuantPlan) -> f32 {
        let conversion = comptime!(plan.policy.conversion);
        if comptime!(!plan.per_row) {
            self.multipliers[scale as usize]
        } else if comptime!(conversion.has_ptx()) {
            global.usual_multiplier(scale)
        } else {
            global.encode_multiplier(scale, conversion)
        }
    }

    pub fn global(&self) -> GlobalScale {
        GlobalScale {
            amax: self.scalars[0],
            encode: self.scalars[1],
            block: self.scalars[2],
            decode: self.scalars[3],
        }
    }
}

/// Quantization parameters of a block.
#[derive(CubeType)]
pub(super) struct BlockRule {
    /// Amax of the block.
    pub amax: f32,
    /// Scale byte of the tile, for 16x16 tiles.
    pub scale: u32,
    /// Result of [`stays_below_7()`] for the whole tile, for 16x16 tiles.
    pub below_7: bool,
    /// Logical index of the block.
    pub index: u64,
}

/// Comptime configuration of [`quantize_by_table()`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct TablePlan {
    /// Index of the first value.
    pub first: usize,
    /// True if the block is part of a 16x16 tile.
    pub tiles: bool,
    /// True if the values are also given in bf16 pairs; see [`encode_block()`].
    pub in_pairs: bool,
    /// Configuration of the tensor.
    pub quant: QuantPlan,
}

/// Returns scale byte and codes of a block of `values`, which are also given as `pairs` if the plan
/// says so.
#[cube]
pub(super) fn quantize_by_table(
    values: &Array<f32>,
    pairs: &Array<u32>,
    rule: &BlockRule,
    global: &GlobalScale,
    table: &ScaleTable,
    random: &Random,
    #[comptime] by: TablePlan,
) -> Encoded {
    let (plan, tiles, first) = comptime!((by.quant, by.tiles, by.first));
    let policy = comptime!(plan.policy);
    if comptime!(!tiles && matches!(policy.scaling, BlockScaling::FourOverSix(_))) {
        quantize_with_amax(values, first, rule.amax, global, rule.index, random, policy)
    } else {
        let scale = if comptime!(tiles) {
            rule.scale
        } else {
            global.block_scale(rule.amax, policy.scaling, policy.conversion)
        };
        let factor = table.multiplier(scale, global, plan);
        let codes = if comptime!(!tiles && plan.per_row && policy.conversion.has_ptx()) {
            // False for NaN.
            if factor < LARGEST_USUAL && stays_below_7(rule.amax, factor) {
                let usual = Multiplier {
                    factor,
                    below_7: true.runtime(),
                    finite: true,
                };
                encode(values, pairs, &usual, rule, random, by)
            } else {
                let other = Multiplier {
                    factor: global.encode_multiplier(scale, policy.conversion),
                    below_7: false.runtime(),
                    finite: false,
                };
                encode(values, pairs, &other, rule, random, by)
            }
        } else {
            let below_7 = if comptime!(tiles) {
                rule.below_7
            } else {
                stays_below_7(rule.amax, factor)
            };
            let multiplier = Multiplier {
                factor,
                below_7,
                finite: false,
            };
            encode(values, pairs, &multiplier, rule, random, by)
        };
        Encoded { scale, codes }
    }
}

/// [`encode_block()`] with the parameters of `rule`.
#[cube]
fn encode(
    values: &Array<f32>,
    pairs: &Array<u32>,
    multiplier: &Multiplier,
    rule: &BlockRule,
    random: &Random,
    #[comptime] by: TablePlan,
) -> Vector<u32, Const<2>> {
    encode_block(
        values,
        by.first,
        pairs,
        multiplier,
        rule.index,
        random,
        by.in_pairs,
        by.quant.policy,
    )
}
