//! Quantization of whole matrices.

use rayon::prelude::*;

use super::{
    Element,
    block::{
        encode_block, load_column_tile, load_row_tile, magnitude_bits, quantize_block, transpose,
    },
    block_scale, encode_multiplier,
    hadamard::transform_tile,
    scaling::GlobalScale,
};
use crate::{
    Amax, BLOCK, Hadamard, Nvfp4Error, Origin, PackedAxis, PackedTensor, Rounding, ScaleLayout,
};

/// The row-wise copy of a `rows` x `cols` matrix: 1x16 blocks along each row.
///
/// # Errors
/// When `x` does not hold `rows * cols` elements, `cols` is no multiple of 16, or a per-row `amax`
/// does not have `rows` values.
pub fn quantize_row<T: Element>(
    x: &[T],
    rows: usize,
    cols: usize,
    amax: &Amax,
    rounding: &Rounding,
) -> Result<PackedTensor, Nvfp4Error> {
    check_matrix(x.len(), rows, cols)?;
    check_packed_cols(cols)?;
    check_amax(amax, rows)?;
    let blocks = cols / BLOCK;
    let tensor_scale = tensor_scale(amax);
    let (mut codes, mut scales) = (vec![0u8; rows * blocks * 8], vec![0u8; rows * blocks]);
    codes
        .par_chunks_mut((blocks * 8).max(1))
        .zip(scales.par_chunks_mut(blocks.max(1)))
        .enumerate()
        .with_min_len(min_rows(cols))
        .for_each(|(row, (codes, scales))| {
            let global = tensor_scale.unwrap_or_else(|| GlobalScale::from_amax(amax.of(row)));
            let source = x[row * cols..][..cols].chunks_exact(BLOCK);
            for (index, source) in source.enumerate() {
                let block = std::array::from_fn(|i| source[i].to_f32());
                let logical = (row * blocks + index) as u64;
                let (scale, packed) = quantize_block(&block, &global, rounding, logical);
                scales[index] = scale;
                codes[index * 8..][..8].copy_from_slice(&packed);
            }
        });
    PackedTensor::from_parts(
        (rows, cols),
        PackedAxis::Cols,
        codes,
        (ScaleLayout::Compact, scales),
        amax.clone(),
        Origin::one_by_16(*rounding, None),
    )
}

/// The column-wise copy of a `rows` x `cols` matrix: 16x1 blocks down each column, stored
/// transposed as `[cols, ceil(rows / 16)]` blocks, the last one padded with zeros. With `hadamard`
/// each block is transformed first, and `amax` must be that of the transformed values.
///
/// # Errors
/// When `x` does not hold `rows * cols` elements, or a per-column `amax` does not have `cols`
/// values.
pub fn quantize_col<T: Element>(
    x: &[T],
    rows: usize,
    cols: usize,
    amax: &Amax,
    rounding: &Rounding,
    hadamard: Option<&Hadamard>,
) -> Result<PackedTensor, Nvfp4Error> {
    check_matrix(x.len(), rows, cols)?;
    check_amax(amax, cols)?;
    let blocks = rows.div_ceil(BLOCK);
    let tensor_scale = tensor_scale(amax);
    let (mut codes, mut scales) = (vec![0u8; cols * blocks * 8], vec![0u8; cols * blocks]);
    // One task is 16 columns, which are contiguous in the output and a cache line in the input.
    codes
        .par_chunks_mut((BLOCK * blocks * 8).max(1))
        .zip(scales.par_chunks_mut((BLOCK * blocks).max(1)))
        .enumerate()
        .for_each(|(chunk, (codes, scales))| {
            let col0 = chunk * BLOCK;
            for index in 0..blocks {
                let mut tile = load_row_tile(x, rows, cols, index * BLOCK, col0);
                if let Some(hadamard) = hadamard {
                    transform_tile(&mut tile, hadamard);
                }
                for (c, block) in transpose(&tile).into_iter().take(cols - col0).enumerate() {
                    let global =
                        tensor_scale.unwrap_or_else(|| GlobalScale::from_amax(amax.of(col0 + c)));
                    let logical = ((col0 + c) * blocks + index) as u64;
                    let (scale, packed) = quantize_block(&block, &global, rounding, logical);
                    scales[c * blocks + index] = scale;
                    codes[(c * blocks + index) * 8..][..8].copy_from_slice(&packed);
                }
            }
        });
    PackedTensor::from_parts(
        (rows, cols),
        PackedAxis::Rows,
        codes,
        (ScaleLayout::Compact, scales),
        amax.clone(),
        Origin::one_by_16(*rounding, hadamard.copied()),
    )
}

/// Both copies of a `rows` x `cols` matrix in 16x16 tiles, rounded to nearest: `(row-wise,
/// column-wise)`, the second the exact transpose of the first. Rows beyond the matrix count as
/// zeros.
///
/// # Errors
/// When `x` does not hold `rows * cols` elements, `cols` is no multiple of 16, or `amax` is not one
/// value for the tensor.
pub fn quantize_tile<T: Element>(
    x: &[T],
    rows: usize,
    cols: usize,
    amax: &Amax,
) -> Result<(PackedTensor, PackedTensor), Nvfp4Error> {
    check_matrix(x.len(), rows, cols)?;
    check_packed_cols(cols)?;
    let Some(global) = tensor_scale(amax) else {
        return Err(Nvfp4Error::value(
            "amax",
            "one for each row",
            "one for the tensor",
        ));
    };
    let (row_blocks, col_blocks) = (cols / BLOCK, rows.div_ceil(BLOCK));
    let mut row_codes = vec![0u8; rows * row_blocks * 8];
    let mut row_scales = vec![0u8; rows * row_blocks];
    let mut col_codes = vec![0u8; cols * col_blocks * 8];
    let mut col_scales = vec![0u8; cols * col_blocks];

    let tile_scale = |tile: &[[f32; BLOCK]; BLOCK]| {
        let bits = tile.iter().map(magnitude_bits).max().unwrap_or(0);
        let scale = block_scale(f32::from_bits(bits), &global);
        (scale, encode_multiplier(scale, &global))
    };
    // Each copy is written by its own pass over disjoint slices; the second pass reads the matrix
    // again, which costs less than a transposition of nibbles across threads.
    row_codes
        .par_chunks_mut((BLOCK * row_blocks * 8).max(1))
        .zip(row_scales.par_chunks_mut((BLOCK * row_blocks).max(1)))
        .enumerate()
        .for_each(|(chunk, (codes, scales))| {
            let row0 = chunk * BLOCK;
            for index in 0..row_blocks {
                let tile = load_column_tile(x, rows, cols, row0, index * BLOCK);
                let (scale, multiplier) = tile_scale(&tile);
                for r in 0..BLOCK.min(rows - row0) {
                    let block = std::array::from_fn(|c| tile[c][r]);
                    let packed = encode_block(&block, multiplier, &Rounding::Nearest, 0);
                    scales[r * row_blocks + index] = scale;
                    codes[(r * row_blocks + index) * 8..][..8].copy_from_slice(&packed);
                }
            }
        });
    col_codes
        .par_chunks_mut((BLOCK * col_blocks * 8).max(1))
        .zip(col_scales.par_chunks_mut((BLOCK * col_blocks).max(1)))
        .enumerate()
        .for_each(|(chunk, (codes, scales))| {
            for index in 0..col_blocks {
                let tile = load_column_tile(x, rows, cols, index * BLOCK, chunk * BLOCK);
                let (scale, multiplier) = tile_scale(&tile);
                for (c, block) in tile.iter().enumerate() {
                    let packed = encode_block(block, multiplier, &Rounding::Nearest, 0);
                    scales[c * col_blocks + index] = scale;
                    codes[(c * col_blocks + index) * 8..][..8].copy_from_slice(&packed);
                }
            }
        });

    let packed = |axis, codes, scales| {
        PackedTensor::from_parts(
            (rows, cols),
            axis,
            codes,
            (ScaleLayout::Compact, scales),
            amax.clone(),
            Origin::tile(),
        )
    };
    Ok((
        packed(PackedAxis::Cols, row_codes, row_scales)?,
        packed(PackedAxis::Rows, col_codes, col_scales)?,
    ))
}

/// The scale that all blocks share, or `None` where each stored row has its own.
fn tensor_scale(amax: &Amax) -> Option<GlobalScale> {
    match amax {
        Amax::Tensor(amax) => Some(GlobalScale::from_amax(*amax)),
        Amax::PerOuter(_) => None,
    }
}

/// Rows that make a task worth handing to another core.
fn min_rows(cols: usize) -> usize {
    (4096 / cols.max(1)).max(1)
}

pub(super) fn check_matrix(len: usize, rows: usize, cols: usize) -> Result<(), Nvfp4Error> {
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

pub(super) fn check_packed_cols(cols: usize) -> Result<(), Nvfp4Error> {
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

pub(super) fn check_amax(amax: &Amax, outer: usize) -> Result<(), Nvfp4Error> {
    match amax {
        Amax::PerOuter(values) if values.len() != outer => Err(Nvfp4Error::shape(
            "amax",
            format!("{} values", values.len()),
            format!("{outer}"),
        )),
        _ => Ok(()),
    }
}
