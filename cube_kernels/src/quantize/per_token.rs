//! Per-token quantization in one read: the kernel computes a row's amax while it loads the row, and
//! quantizes the row from registers.

use cubecl::{prelude::*, server::Handle};

use super::{
    amax::{AmaxRequest, amaxes},
    plan::{Draw, QuantArgs, QuantOut, QuantPlan, QuantRequest, check_packed_cols},
    prologue::{
        self, Input, LaunchedVariant, Prologue, PrologueInputs, PrologueInputsExpand, check_gain,
        gain_arg, normalized_block, row_cubes,
    },
    request::{quantize, quantize_both},
    rowwise::{row_amax_of, row_block},
    tile::MAX_UNITS,
};
use crate::launch::buffer;
use crate::{
    BLOCK, Nvfp4Error, Storage, Usage,
    capabilities::{conversion_of, is_cpu},
    cube::{
        activation::SquareSum,
        block::quantize_with_amax,
        codec::{canonical, magnitude_bits},
        scale::{GlobalScale, swizzled_at},
        words::{block_words, load_block_words, unpack_block},
    },
    memory::{address_type, allocate},
    tensor::{AmaxGranularity, DeviceNvfp4Params, DeviceQuantized, FloatKind, Groups, Matrix},
};

/// Maximum number of blocks of a row that each unit keeps in registers between computing the amax
/// and quantizing. Blocks of a row beyond `units * KEPT` are read again.
const KEPT: usize = 4;

/// Quantizes `x` (or the result of a prologue) to a rowwise tensor with one amax per row, i.e. per
/// token, which it also computes. See [`reference::quantize`](crate::reference::quantize) with the
/// amax values of [`reference::amax_rows`](crate::reference::amax_rows).
///
/// # Errors
/// Returns an error if the columns of `x` are no multiple of 16, if the copy has a transform or
/// stochastic four over six, or if a buffer is smaller than its shape; for a prologue, also the
/// errors of [`run_prologue`](super::run_prologue()).
pub fn quantize_per_token<'a>(
    client: &Client,
    x: impl Into<Prologue<'a>>,
    copy: &DeviceNvfp4Params,
) -> Result<DeviceQuantized, Nvfp4Error> {
    launch(client, &Input::new(x.into())?, copy, RowNormArgs::None)
}

/// [`quantize_per_token`] of `x` after RMS normalization. Also computes `1 / sqrt(mean(x²) +
/// epsilon)` of each row (`f32`), with one read of `x`. `gain` has an `f32` per column.
///
/// # Errors
/// See [`quantize_per_token`]; also returns an error if `gain` is too short or does not start at a
/// multiple of 16 bytes.
pub fn quantize_per_token_rms_norm(
    client: &Client,
    x: &Matrix,
    gain: &Handle,
    epsilon: f32,
    copy: &DeviceNvfp4Params,
) -> Result<(DeviceQuantized, Handle), Nvfp4Error> {
    let input = Input::new(Prologue::Plain(x))?;
    check_gain(gain, x.cols)?;
    let rstd = allocate(client, x.rows * 4);
    let norm = RowNormArgs::Found(FoundNormLaunch::new(
        // SAFETY: allocated for it.
        unsafe { buffer(&rstd, x.rows) },
        gain_arg(gain, x.cols),
        epsilon,
        LaunchedVariant::FoundNorm,
    ));
    Ok((launch(client, &input, copy, norm)?, rstd))
}

fn launch(
    client: &Client,
    input: &Input,
    copy: &DeviceNvfp4Params,
    norm: RowNormArgs,
) -> Result<DeviceQuantized, Nvfp4Error> {
    let Input {
        matrix: x, words, ..
    } = input;
    check_packed_cols(x)?;
    check_no_transform(copy)?;
    let amax = allocate(client, x.rows * 4);
    let request = QuantRequest {
        amax: &amax,
        scope: AmaxGranularity::PerRow,
        copy: copy.clone(),
    };
    let conversion = conversion_of(client);
    let args = QuantArgs::new(
        client,
        x,
        &Groups::One,
        Usage::Rowwise,
        &request,
        Storage::Packed,
        conversion,
    )?;
    if x.is_empty() {
        return Ok(args.out);
    }
    // Swizzled scales are padded to 128 rows, which are written too.
    let rows = if args.plan.swizzled {
        x.rows.next_multiple_of(128)
    } else {
        x.rows
    };
    let blocks = x.cols / BLOCK;
    let (count, dim) = row_cubes(client, rows, blocks);
    // SAFETY: the kernel stays below the shapes it is given, and the buffers were checked for them.
    unsafe {
        quantize_per_token_kernel::launch_unchecked(
            client,
            count,
            dim,
            // With few long rows, the padding of swizzled scales makes more scales than elements.
            address_type(x.len().max(args.out.scale_bytes())),
            words.width,
            words.arg(),
            input.prologue_inputs(),
            norm,
            buffer(&args.out.amax, x.rows),
            args.memory(),
            args.draw(),
            TokenRowsLaunch::new(x.rows, rows, blocks),
            PerTokenPlan {
                quant: args.plan,
                kept_blocks: blocks.div_ceil(dim.x as usize).min(KEPT),
                planes: !is_cpu(client),
                kind: x.dtype,
            },
        );
    }
    Ok(args.out)
}

/// Quantizes `x` to a columnwise tensor with one amax per column of each group, which it also
/// computes; of the transformed values if `copy` has a transform. See
/// [`reference::quantize`](crate::reference::quantize) with the amax values of
/// [`reference::amax_cols`](crate::reference::amax_cols).
///
/// This takes two passes: no code of a column can be written before its last row was read. A strip
/// of 64 columns of 16 bits, the minimum whose rows are read in whole memory sectors, fills the
/// shared memory of an H100 with 1800 rows. Short matrices stay in its L2 cache (50 MB) between the
/// passes.
///
/// # Errors
/// See [`quantize`].
pub fn quantize_per_token_cols<'a>(
    client: &Client,
    x: impl Into<Prologue<'a>>,
    groups: &Groups,
    copy: &DeviceNvfp4Params,
) -> Result<DeviceQuantized, Nvfp4Error> {
    let request = AmaxRequest {
        rows: None,
        cols: Some((AmaxGranularity::PerRow, copy.hadamard)),
    };
    let x = x.into();
    let found = amaxes(client, x, groups, &request)?;
    let request = QuantRequest {
        amax: &found.cols.expect("asked for"),
        scope: AmaxGranularity::PerRow,
        copy: copy.clone(),
    };
    quantize(client, x, groups, Usage::Columnwise, &request)
}

/// Quantizes `x` to both tensors, `(rowwise, columnwise)`, with one amax per row, and per column of
/// each group. One read of `x` computes all amax values, another one both tensors.
///
/// # Errors
/// See [`quantize`]; also returns an error if the rowwise tensor has a transform.
pub fn quantize_per_token_both<'a>(
    client: &Client,
    x: impl Into<Prologue<'a>>,
    groups: &Groups,
    row: &DeviceNvfp4Params,
    col: &DeviceNvfp4Params,
) -> Result<(DeviceQuantized, DeviceQuantized), Nvfp4Error> {
    check_no_transform(row)?;
    let x = x.into();
    let request = AmaxRequest {
        rows: Some(AmaxGranularity::PerRow),
        cols: Some((AmaxGranularity::PerRow, col.hadamard)),
    };
    let found = amaxes(client, x, groups, &request)?;
    let (rows, cols) = (
        found.rows.expect("asked for"),
        found.cols.expect("asked for"),
    );
    let [row, col] = [(&rows, row), (&cols, col)].map(|(amax, copy)| QuantRequest {
        amax,
        scope: AmaxGranularity::PerRow,
        copy: copy.clone(),
    });
    quantize_both(client, x, groups, &row, &col)
}

fn check_no_transform(copy: &DeviceNvfp4Params) -> Result<(), Nvfp4Error> {
    if copy.hadamard.is_none() {
        return Ok(());
    }
    Err(Nvfp4Error::value(
        "hadamard",
        "a transform of a per-token copy along rows",
        "none: the maximum of a row is taken before any transform",
    ))
}

/// Comptime configuration of [`quantize_per_token_kernel()`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PerTokenPlan {
    /// Configuration of the tensor.
    pub quant: QuantPlan,
    /// Blocks of a row that each unit keeps in registers.
    pub kept_blocks: usize,
    /// True if planes support reductions.
    pub planes: bool,
    /// Element type of `x`.
    pub kind: FloatKind,
}

/// Rows of a matrix.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct TokenRows {
    /// Number of rows.
    pub rows: usize,
    /// Number of rows including those that pad swizzled scales.
    pub padded_rows: usize,
    /// Blocks per row.
    pub blocks: usize,
}

/// A block of a row of `blocks` blocks.
#[derive(CubeType, Clone, Copy)]
struct RowBlock {
    row: usize,
    block: usize,
    blocks: usize,
}

/// Normalization of the rows, with factors that the kernel computes first.
#[derive(CubeType, CubeLaunch)]
pub enum RowNorm {
    /// None.
    None,
    /// RMS normalization.
    Found(FoundNorm),
}

/// See [`RowNorm`].
#[derive(CubeType, CubeLaunch)]
pub struct FoundNorm {
    /// Output buffer of the factors.
    pub rstd: Box<[f32]>,
    /// Gain per column.
    pub gain: Box<[Vector<f32, Const<4>>]>,
    /// Epsilon, added to the mean square.
    pub epsilon: f32,
    /// [`LaunchedVariant::FoundNorm`].
    #[cube(comptime)]
    pub variant: LaunchedVariant,
}

#[cube]
impl RowNorm {
    /// Computes the factor of `row`, whose first blocks are in `kept`; the cube reads the others.
    fn find<N: Size>(
        &mut self,
        x: &[Vector<u32, N>],
        kept: &Array<u32>,
        row: usize,
        blocks: usize,
        #[comptime] plan: PerTokenPlan,
    ) -> f32 {
        let (kept_blocks, planes, kind) = comptime!((plan.kept_blocks, plan.planes, plan.kind));
        let conversion = comptime!(plan.quant.policy.conversion);
        #[comptime]
        match self {
            RowNorm::None => 0.0f32.runtime(),
            RowNorm::Found(norm) => {
                let mut sum = SquareSum::new(planes);
                sum.clear(planes);
                let width = N::value();
                let per_block = comptime!(block_words(kind) / width);
                let units = CUBE_DIM as usize;
                #[unroll]
                for k in 0..kept_blocks {
                    let values = unpack_block(&kept_block(kept, k, kind), kind);
                    // Blocks after the last one are zeros, and add nothing.
                    sum.add(&values, UNIT_POS as usize + k * units, planes, conversion);
                }
                let mut block = UNIT_POS as usize + kept_blocks * units;
                while block < blocks {
                    let words = load_block_words::<N>(x, (row * blocks + block) * per_block, kind);
                    sum.add(&unpack_block(&words, kind), block, planes, conversion);
                    block += units;
                }
                let rstd = sum.rstd(blocks * 16usize, norm.epsilon, planes, conversion);
                if UNIT_POS == 0u32 {
                    norm.rstd[row] = rstd;
                }
                rstd
            }
        }
    }

    /// Normalizes the kept blocks of a row.
    fn apply(
        &self,
        kept: &mut Array<u32>,
        rstd: f32,
        blocks: usize,
        #[comptime] plan: PerTokenPlan,
    ) {
        let (kept_blocks, kind) = comptime!((plan.kept_blocks, plan.kind));
        let conversion = comptime!(plan.quant.policy.conversion);
        #[comptime]
        match self {
            RowNorm::None => {}
            RowNorm::Found(norm) => {
                let count = comptime!(block_words(kind));
                #[unroll]
                for k in 0..kept_blocks {
                    let block = UNIT_POS as usize + k * CUBE_DIM as usize;
                    if block < blocks {
                        let words = kept_block(&*kept, k, kind);
                        let words =
                            normalized_block(&words, &norm.gain, rstd, block, conversion, kind);
                        #[unroll]
                        for w in 0..count {
                            kept[comptime!(k * count + w)] = words[w];
                        }
                    }
                }
            }
        }
    }

    /// Returns the words of a block that is not kept.
    fn load<N: Size>(
        &self,
        x: &[Vector<u32, N>],
        prologue: &PrologueInputs,
        rstd: f32,
        at: &RowBlock,
        #[comptime] plan: PerTokenPlan,
    ) -> Array<u32> {
        let conversion = comptime!(plan.quant.policy.conversion);
        let kind = comptime!(plan.kind);
        let (row, block) = (at.row, at.block);
        let words = prologue::load_block::<N>(x, prologue, row, block, at.blocks, conversion, kind);
        #[comptime]
        match self {
            RowNorm::None => words,
            RowNorm::Found(norm) => {
                normalized_block(&words, &norm.gain, rstd, block, conversion, kind)
            }
        }
    }
}

/// Loads block `block` of a row to slot `k` of `kept`; zeros after the last block.
#[cube]
fn keep_block<N: Size>(
    x: &[Vector<u32, N>],
    prologue: &PrologueInputs,
    kept: &mut Array<u32>,
    at: &RowBlock,
    #[comptime] k: usize,
    #[comptime] plan: PerTokenPlan,
) {
    let conversion = comptime!(plan.quant.policy.conversion);
    let kind = comptime!(plan.kind);
    let (row, block, blocks) = (at.row, at.block, at.blocks);
    let count = comptime!(block_words(kind));
    #[comptime]
    match prologue {
        PrologueInputs::Plain => {
            let width = N::value();
            let start = (row * blocks + block) * comptime!(count / width);
            #[unroll]
            for v in 0..comptime!(count / width) {
                let vector = if block < blocks {
                    x[start + v]
                } else {
                    Vector::<u32, N>::zero()
                };
                #[unroll]
                for w in 0..width {
                    kept[comptime!(k * count + v * width + w)] = vector.extract(w);
                }
            }
        }
        _ => {
            // Reloads the last block instead of branching, which would separate the loads.
            let inside = block < blocks;
            let block = min(block, blocks - 1usize);
            let words =
                prologue::load_block::<N>(x, prologue, row, block, blocks, conversion, kind);
            #[unroll]
            for w in 0..count {
                kept[comptime!(k * count + w)] = select(inside, words[w], 0u32);
            }
        }
    }
}

/// Each cube quantizes one row at a time. A unit's first blocks stay in its registers.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn quantize_per_token_kernel<N: Size>(
    x: &[Vector<u32, N>],
    prologue: PrologueInputs,
    mut norm: RowNorm,
    amax: &mut [f32],
    mut out: QuantOut,
    draw: Draw,
    of: TokenRows,
    #[comptime] per_token: PerTokenPlan,
) {
    let (plan, kind) = comptime!((per_token.quant, per_token.kind));
    let (kept_blocks, planes) = comptime!((per_token.kept_blocks, per_token.planes));
    let policy = comptime!(plan.policy);
    let random = draw.resolve(policy);
    let (rows, blocks) = (of.rows, of.blocks);
    let words_per_block = comptime!(block_words(kind));
    let units = CUBE_DIM as usize;
    let unit = UNIT_POS as usize;
    let padded_blocks = blocks.div_ceil(4);
    // One slot per plane, or per unit; two alternating sets, so that one barrier per row is enough.
    let slots = comptime!(if planes { MAX_UNITS / 32 } else { MAX_UNITS });
    let mut partial: Shared<[u32]> = Shared::new_slice(comptime!(2 * slots));
    let mut turn = 0usize;
    let mut row = CUBE_POS;
    while row < of.padded_rows {
        if row < rows {
            let mut kept = Array::<u32>::new(comptime!(kept_blocks * words_per_block));
            let mut bits = 0u32;
            // Issues all loads before waiting for the first.
            #[unroll]
            for k in 0..kept_blocks {
                let block = unit + k * units;
                let at = RowBlock { row, block, blocks };
                keep_block::<N>(x, &prologue, &mut kept, &at, k, per_token);
            }
            let rstd = norm.find::<N>(x, &kept, row, blocks, per_token);
            norm.apply(&mut kept, rstd, blocks, per_token);
            #[unroll]
            for k in 0..kept_blocks {
                let words = kept_block(&kept, k, kind);
                let values = row_block(&words, &draw.signs, plan, kind);
                // Blocks after the last one are zeros.
                let here = row_amax_of(&words, &values, false, plan, kind);
                bits = max(bits, magnitude_bits(here));
            }
            let mut block = unit + kept_blocks * units;
            while block < blocks {
                let at = RowBlock { row, block, blocks };
                let words = norm.load::<N>(x, &prologue, rstd, &at, per_token);
                let values = row_block(&words, &draw.signs, plan, kind);
                let here = row_amax_of(&words, &values, false, plan, kind);
                bits = max(bits, magnitude_bits(here));
                block += units;
            }
            if comptime!(planes) {
                let plane = plane_max(bits);
                if UNIT_POS_PLANE == 0u32 {
                    partial[turn * slots + unit / 32usize] = plane;
                }
                sync_cube();
                bits = 0u32;
                for p in 0..units / 32usize {
                    bits = max(bits, partial[turn * slots + p]);
                }
                turn = 1usize - turn;
            } else if units > 1usize {
                partial[turn * slots + unit] = bits;
                sync_cube();
                for p in 0..units {
                    bits = max(bits, partial[turn * slots + p]);
                }
                turn = 1usize - turn;
            }
            let row_amax = f32::reinterpret(canonical(bits));
            if unit == 0usize {
                amax[row] = row_amax;
            }
            let global = GlobalScale::from_amax(row_amax, policy.scaling);

            #[unroll]
            for k in 0..kept_blocks {
                let block = unit + k * units;
                if block < blocks {
                    let words = kept_block(&kept, k, kind);
                    let values = row_block(&words, &draw.signs, plan, kind);
                    let index = row * blocks + block;
                    let logical = draw.number(index, blocks, policy);
                    let largest = row_amax_of(&words, &values, false, plan, kind);
                    let encoded = quantize_with_amax(
                        &values, 0usize, largest, &global, logical, &random, policy,
                    );
                    out.store_codes(index, encoded.codes);
                    let place = scale_place(row, block, blocks, plan);
                    out.store_scale(place, encoded.scale);
                }
            }
            let mut block = unit + kept_blocks * units;
            while block < blocks {
                let at = RowBlock { row, block, blocks };
                let words = norm.load::<N>(x, &prologue, rstd, &at, per_token);
                let values = row_block(&words, &draw.signs, plan, kind);
                let index = row * blocks + block;
                let logical = draw.number(index, blocks, policy);
                let largest = row_amax_of(&words, &values, false, plan, kind);
                let encoded =
                    quantize_with_amax(&values, 0usize, largest, &global, logical, &random, policy);
                out.store_codes(index, encoded.codes);
                let place = scale_place(row, block, blocks, plan);
                out.store_scale(place, encoded.scale);
                block += units;
            }
        }
        if comptime!(plan.swizzled) {
            // Padding: blocks after the last one of a row, and all of the rows after the last one.
            let mut block = unit;
            if row < rows {
                block += blocks;
            }
            while block < padded_blocks * 4usize {
                let place = scale_place(row, block, blocks, plan);
                out.store_scale(place, 0u32.runtime());
                block += units;
            }
        }
        row += CUBE_COUNT;
    }
}

/// Returns the words of one of the blocks in registers.
#[cube]
fn kept_block(kept: &Array<u32>, #[comptime] k: usize, #[comptime] kind: FloatKind) -> Array<u32> {
    let count = comptime!(block_words(kind));
    let mut words = Array::<u32>::new(count);
    #[unroll]
    for w in 0..count {
        words[w] = kept[comptime!(k * count + w)];
    }
    words
}

/// Returns the index of the scale of a block of a rowwise tensor.
#[cube]
fn scale_place(row: usize, block: usize, blocks: usize, #[comptime] plan: QuantPlan) -> usize {
    if comptime!(plan.swizzled) {
        swizzled_at(row, block, blocks.div_ceil(4))
    } else {
        row * blocks + block
    }
}
