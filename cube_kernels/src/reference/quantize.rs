//! Quantization of whole matrices.

use rayon::prelude::*;

use super::{
    Element,
    block::{encode_block, load_rows, load_tile, transpose},
    encode_multiplier,
    hadamard::{MAX_GROUP, transform_lanes},
    scaling::BlockScaler,
};
use crate::{
    Amax, BLOCK, BlockScaling, CopyPolicy, Hadamard, Nvfp4Error, Origin, PackedAxis, PackedTensor,
    Rounding, ScaleLayout, format::packed::BlockShape,
};

/// One packed copy of a `rows` x `cols` matrix: 1x16 blocks along each row ([`PackedAxis::Cols`]),
/// or 16x1 blocks down each column, stored transposed ([`PackedAxis::Rows`]), made as `policy` says
/// (specification, sections 4 to 8).
///
/// With a transform the packed axis is padded with zeros to a multiple of its size, all of which is
/// stored, and `amax` must be that of the transformed values ([`amax_rht`](super::amax_rht),
/// [`amax_rht_cols`](super::amax_rht_cols)). An `amax` for each stored row makes the copy
/// row-scaled (per token).
///
/// `first_block` is added to the logical index of each block before stochastic rounding draws its
/// bits: matrices that share a buffer and a stream pass the number of blocks before them.
///
/// # Errors
/// When `x` does not hold `rows * cols` elements, `cols` is no multiple of 16 for a row-wise copy,
/// `amax` has one value for each row but not as many as there are stored rows, or `policy` combines
/// four over six with stochastic rounding.
pub fn quantize<T: Element>(
    x: &[T],
    rows: usize,
    cols: usize,
    axis: PackedAxis,
    amax: &Amax,
    policy: &CopyPolicy,
    first_block: u64,
) -> Result<PackedTensor, Nvfp4Error> {
    let (outer, inner) = axis.stored_shape(rows, cols);
    check_matrix(x.len(), rows, cols)?;
    if axis == PackedAxis::Cols {
        check_packed_cols(cols)?;
    }
    check_amax(amax, outer)?;
    check_policy(policy)?;
    let origin = Origin::copy(policy);
    let blocks = origin.blocks(inner);
    let shared = match amax {
        Amax::Tensor(amax) => Some(BlockScaler::new(*amax, policy.scaling)),
        Amax::PerOuter(_) => None,
    };
    // 16 columns are contiguous in the output and a cache line or less in the input.
    let height = match axis {
        PackedAxis::Cols => 1,
        PackedAxis::Rows => BLOCK,
    };
    let (codes, scales) = fill_bands(outer, blocks, height, |band| {
        let scalers: [BlockScaler; BLOCK] = std::array::from_fn(|r| {
            let outer = (band.outer0 + r).min(outer - 1);
            shared.unwrap_or_else(|| BlockScaler::new(amax.of(outer), policy.scaling))
        });
        for_each_block(
            x,
            (rows, cols),
            axis,
            policy.hadamard.as_ref(),
            band.outer0,
            |r, index, block| {
                let scaler = &scalers[r];
                let scale = scaler.scale_byte(std::slice::from_ref(block));
                let multiplier = encode_multiplier(scale, &scaler.global);
                let logical = ((band.outer0 + r) * blocks + index) as u64;
                let logical = logical.wrapping_add(first_block);
                let packed = encode_block(block, multiplier, &policy.rounding, logical);
                band.put(r, index, scale, packed);
            },
        );
    });
    let scales = (ScaleLayout::Compact, scales);
    PackedTensor::from_parts((rows, cols), axis, codes, scales, amax.clone(), origin)
        .map(|packed| packed.with_scale_layout(policy.layout))
}

/// The row-wise copy of a `rows` x `cols` matrix with standard, compact scales: [`quantize`] along
/// [`PackedAxis::Cols`].
///
/// # Errors
/// As [`quantize`].
pub fn quantize_row<T: Element>(
    x: &[T],
    rows: usize,
    cols: usize,
    amax: &Amax,
    rounding: &Rounding,
) -> Result<PackedTensor, Nvfp4Error> {
    let policy = CopyPolicy::new(*rounding);
    quantize(x, rows, cols, PackedAxis::Cols, amax, &policy, 0)
}

/// The column-wise copy of a `rows` x `cols` matrix with standard, compact scales, transformed by
/// `hadamard` if there is one: [`quantize`] along [`PackedAxis::Rows`].
///
/// # Errors
/// As [`quantize`].
pub fn quantize_col<T: Element>(
    x: &[T],
    rows: usize,
    cols: usize,
    amax: &Amax,
    rounding: &Rounding,
    hadamard: Option<&Hadamard>,
) -> Result<PackedTensor, Nvfp4Error> {
    let policy = CopyPolicy {
        hadamard: hadamard.copied(),
        ..CopyPolicy::new(*rounding)
    };
    quantize(x, rows, cols, PackedAxis::Rows, amax, &policy, 0)
}

/// Both copies of a `rows` x `cols` matrix in 16x16 tiles, rounded to nearest: `(row-wise,
/// column-wise)`, with their scales in `layouts`, the second the exact transpose of the first. Each
/// tile has one scale, found by `scaling` (specification, sections 4, 7 and 8). Rows beyond the
/// matrix count as zeros.
///
/// # Errors
/// When `x` does not hold `rows * cols` elements, `cols` is no multiple of 16, or `amax` is not one
/// value for the tensor.
pub fn quantize_tile<T: Element>(
    x: &[T],
    rows: usize,
    cols: usize,
    amax: &Amax,
    scaling: BlockScaling,
    layouts: [ScaleLayout; 2],
) -> Result<(PackedTensor, PackedTensor), Nvfp4Error> {
    check_matrix(x.len(), rows, cols)?;
    check_packed_cols(cols)?;
    let Amax::Tensor(tensor_amax) = *amax else {
        return Err(Nvfp4Error::value(
            "amax",
            "one for each row",
            "one for the tensor",
        ));
    };
    let scaler = BlockScaler::new(tensor_amax, scaling);
    // Each copy is written by its own pass over disjoint slices; the second pass reads the matrix
    // again, which costs less than a transposition of nibbles across threads. Both find the scale
    // from the tile as it lies in the source, so they cannot disagree.
    let copy = |axis: PackedAxis, layout: ScaleLayout| {
        let (outer, inner) = axis.stored_shape(rows, cols);
        let blocks = inner.div_ceil(BLOCK);
        let (codes, scales) = fill_bands(outer, blocks, BLOCK, |band| {
            for index in 0..blocks {
                let corner = match axis {
                    PackedAxis::Cols => (band.outer0, index * BLOCK),
                    PackedAxis::Rows => (index * BLOCK, band.outer0),
                };
                let mut tile = load_tile(x, (rows, cols), corner);
                let scale = scaler.scale_byte(&tile);
                let multiplier = encode_multiplier(scale, &scaler.global);
                if axis == PackedAxis::Rows {
                    tile = transpose(&tile);
                }
                for (r, block) in tile.iter().take(outer - band.outer0).enumerate() {
                    let packed = encode_block(block, multiplier, &Rounding::Nearest, 0);
                    band.put(r, index, scale, packed);
                }
            }
        });
        let origin = Origin {
            block: BlockShape::Tile16x16,
            scaling,
            ..Origin::tile()
        };
        let scales = (ScaleLayout::Compact, scales);
        PackedTensor::from_parts((rows, cols), axis, codes, scales, amax.clone(), origin)
            .map(|packed| packed.with_scale_layout(layout))
    };
    Ok((
        copy(PackedAxis::Cols, layouts[0])?,
        copy(PackedAxis::Rows, layouts[1])?,
    ))
}

/// Up to 16 neighbouring stored rows of a packed matrix, which one task fills.
struct Band<'a> {
    /// The first of them.
    outer0: usize,
    /// Blocks in a stored row.
    blocks: usize,
    codes: &'a mut [u8],
    scales: &'a mut [u8],
}

impl Band<'_> {
    /// Writes block `index` of the band's row `r`.
    #[inline(always)]
    fn put(&mut self, r: usize, index: usize, scale: u8, codes: [u8; 8]) {
        let at = r * self.blocks + index;
        self.scales[at] = scale;
        self.codes[at * 8..][..8].copy_from_slice(&codes);
    }
}

/// Codes and compact scales of `outer` stored rows, filled in bands of `height` rows on all cores.
fn fill_bands(
    outer: usize,
    blocks: usize,
    height: usize,
    fill: impl Fn(&mut Band) + Sync,
) -> (Vec<u8>, Vec<u8>) {
    let (mut codes, mut scales) = (vec![0u8; outer * blocks * 8], vec![0u8; outer * blocks]);
    let len = height * blocks;
    codes
        .par_chunks_mut((len * 8).max(1))
        .zip(scales.par_chunks_mut(len.max(1)))
        .enumerate()
        // Bands that make a task worth handing to another core.
        .with_min_len((256 / len.max(1)).max(1))
        .for_each(|(band, (codes, scales))| {
            fill(&mut Band {
                outer0: band * height,
                blocks,
                codes,
                scales,
            });
        });
    (codes, scales)
}

/// Calls `visit` with each block of the band that starts at stored row `outer0` (one row for
/// [`PackedAxis::Cols`], up to 16 columns for [`PackedAxis::Rows`]), transformed: the row within the
/// band, the index of the block in that row, and the block.
#[inline(always)]
fn for_each_block<T: Element>(
    x: &[T],
    (rows, cols): (usize, usize),
    axis: PackedAxis,
    hadamard: Option<&Hadamard>,
    outer0: usize,
    mut visit: impl FnMut(usize, usize, &[f32; BLOCK]),
) {
    let group = hadamard.map_or(BLOCK, |hadamard| hadamard.size().elements());
    match axis {
        PackedAxis::Cols => {
            let mut buffer = [0f32; MAX_GROUP];
            let buffer = &mut buffer[..group];
            let source = x[outer0 * cols..][..cols].chunks(group);
            for (first, source) in source.enumerate() {
                let (values, padding) = buffer.split_at_mut(source.len());
                for (value, source) in values.iter_mut().zip(source) {
                    *value = source.to_f32();
                }
                padding.fill(0.0);
                if let Some(hadamard) = hadamard {
                    transform_lanes(buffer.as_chunks_mut::<1>().0, hadamard);
                }
                for (i, block) in buffer.as_chunks::<BLOCK>().0.iter().enumerate() {
                    visit(0, first * group / BLOCK + i, block);
                }
            }
        }
        PackedAxis::Rows => {
            let mut buffer = [[0f32; BLOCK]; MAX_GROUP];
            let buffer = &mut buffer[..group];
            for row0 in (0..rows).step_by(group) {
                load_rows(x, (rows, cols), (row0, outer0), buffer);
                if let Some(hadamard) = hadamard {
                    transform_lanes(buffer, hadamard);
                }
                for (i, tile) in buffer.as_chunks::<BLOCK>().0.iter().enumerate() {
                    let columns = transpose(tile);
                    for (c, block) in columns.iter().take(cols - outer0).enumerate() {
                        visit(c, row0 / BLOCK + i, block);
                    }
                }
            }
        }
    }
}

fn check_matrix(len: usize, rows: usize, cols: usize) -> Result<(), Nvfp4Error> {
    if rows.checked_mul(cols) == Some(len) {
        Ok(())
    } else {
        Err(Nvfp4Error::shape(
            "x",
            format!("{len} elements"),
            format!("{rows} x {cols}"),
        ))
    }
}

fn check_packed_cols(cols: usize) -> Result<(), Nvfp4Error> {
    if cols.is_multiple_of(BLOCK) {
        Ok(())
    } else {
        Err(Nvfp4Error::shape(
            "cols",
            format!("{cols}"),
            "a multiple of 16, the packed axis",
        ))
    }
}

fn check_amax(amax: &Amax, outer: usize) -> Result<(), Nvfp4Error> {
    match amax {
        Amax::PerOuter(values) if values.len() != outer => Err(Nvfp4Error::shape(
            "amax",
            format!("{} values", values.len()),
            format!("{outer}"),
        )),
        _ => Ok(()),
    }
}

fn check_policy(policy: &CopyPolicy) -> Result<(), Nvfp4Error> {
    match (policy.scaling, policy.rounding) {
        (BlockScaling::FourOverSix(_), Rounding::Stochastic(_)) => Err(Nvfp4Error::value(
            "policy",
            "four over six with stochastic rounding",
            "Rounding::Nearest, whose error is what four over six compares; choosing the scale by \
             the data would bias stochastic rounding",
        )),
        _ => Ok(()),
    }
}
