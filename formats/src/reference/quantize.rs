//! Quantization of whole matrices.

use std::mem::MaybeUninit;

use rayon::prelude::*;

use super::{
    Element, Elements,
    block::{encode_tile, load_blocks},
    hadamard::{MAX_GROUP, transform_lanes},
    load::load_rows,
    scaling::Scaler,
    simd::{self, Isa, Lanes, Task, Tile, lanes},
};
use crate::{
    Amax, BLOCK, BlockPosition, BlockScaling, BlockShape, Format, Hadamard, Layout, Nvfp4Error,
    Origin, QuantParams, QuantRounding, QuantizedTensor, Rounding, StoredForm, Usage,
};

/// Quantizes a `rows` x `cols` matrix to one packed tensor with compact scales, as specified by
/// `params` (numerics, sections 4 to 8): 1x16 blocks along each row ([`Usage::Rowwise`]), or 16x1
/// blocks along each column, stored transposed ([`Usage::Columnwise`]).
///
/// With a transform, the contraction is padded with zeros to a multiple of its size, all of which
/// is stored, and `amax` must be that of the transformed values ([`amax_rht`](super::amax_rht),
/// [`amax_rht_cols`](super::amax_rht_cols)). One `amax` per stored row gives a row-scaled tensor
/// (per token), whatever the granularity of `params`.
///
/// `first_block` is added to the logical index of each block, as given by the
/// [position](crate::BlockPosition) of the stream, before stochastic rounding draws its bits:
/// matrices that share a buffer and a stream pass the number of blocks before them.
///
/// # Errors
/// Returns an error if `x` does not have `rows * cols` elements, `cols` is not a multiple of 16 for
/// a rowwise tensor, the length of a per-row `amax` is not the number of stored rows, or `params`
/// are not those of NVFP4 in 1x16 blocks or combine four over six with stochastic rounding.
pub fn quantize<T: Element>(
    x: &[T],
    rows: usize,
    cols: usize,
    usage: Usage,
    amax: &Amax,
    params: &QuantParams,
    first_block: u64,
) -> Result<QuantizedTensor, Nvfp4Error> {
    let (outer, _) = usage.stored_shape(rows, cols);
    check_matrix(x.len(), rows, cols)?;
    if usage == Usage::Rowwise {
        check_packed_cols(cols)?;
    }
    check_amax(amax, outer)?;
    let rounding = rounding_of(params)?;
    let layout = Layout {
        amax: amax.granularity(),
        ..params.layout((rows, cols), usage, StoredForm::Rows)
    };
    Source {
        x: T::elements(x),
        layout,
        amax,
        origin: Origin::block_1d(rounding),
        first_block,
    }
    .pack()
}

/// Quantizes a `rows` x `cols` matrix to a rowwise tensor with standard, compact scales:
/// [`quantize`] along [`Usage::Rowwise`].
///
/// # Errors
/// Returns the errors of [`quantize`].
pub fn quantize_row<T: Element>(
    x: &[T],
    rows: usize,
    cols: usize,
    amax: &Amax,
    rounding: &Rounding,
) -> Result<QuantizedTensor, Nvfp4Error> {
    let params = QuantParams::nvfp4(*rounding);
    quantize(x, rows, cols, Usage::Rowwise, amax, &params, 0)
}

/// Quantizes a `rows` x `cols` matrix to a columnwise tensor with standard, compact scales,
/// transformed by `hadamard`, if any: [`quantize`] along [`Usage::Columnwise`].
///
/// # Errors
/// Returns the errors of [`quantize`].
pub fn quantize_col<T: Element>(
    x: &[T],
    rows: usize,
    cols: usize,
    amax: &Amax,
    rounding: &Rounding,
    hadamard: Option<&Hadamard>,
) -> Result<QuantizedTensor, Nvfp4Error> {
    let params = QuantParams {
        hadamard: hadamard.copied(),
        ..QuantParams::nvfp4(*rounding)
    };
    quantize(x, rows, cols, Usage::Columnwise, amax, &params, 0)
}

/// Quantizes a `rows` x `cols` matrix in 16x16 tiles, rounded to nearest. Returns the rowwise and
/// the columnwise tensor, of which one is the exact transpose of the other. Each tile has one scale, chosen by `scaling` (numerics, sections 4, 7 and 8). Rows beyond the
/// matrix count as zeros.
///
/// # Errors
/// Returns an error if `x` does not have `rows * cols` elements, `cols` is not a multiple of 16, or
/// `amax` is not one value for the tensor.
pub fn quantize_tile<T: Element>(
    x: &[T],
    rows: usize,
    cols: usize,
    amax: &Amax,
    scaling: BlockScaling,
) -> Result<(QuantizedTensor, QuantizedTensor), Nvfp4Error> {
    // Each tensor is written by its own pass over disjoint slices. The second pass reads the matrix
    // again, which costs less than transposing nibbles across threads.
    let copy = |usage| quantize_tile_copy(x, rows, cols, usage, amax, scaling);
    Ok((copy(Usage::Rowwise)?, copy(Usage::Columnwise)?))
}

/// Returns the tensor of [`quantize_tile`] along `usage`.
///
/// # Errors
/// Returns the errors of [`quantize_tile`].
pub fn quantize_tile_copy<T: Element>(
    x: &[T],
    rows: usize,
    cols: usize,
    usage: Usage,
    amax: &Amax,
    scaling: BlockScaling,
) -> Result<QuantizedTensor, Nvfp4Error> {
    check_matrix(x.len(), rows, cols)?;
    check_packed_cols(cols)?;
    if !matches!(amax, Amax::Tensor(_)) {
        return Err(Nvfp4Error::value(
            "amax",
            format!("{:?}", amax.granularity()),
            "one for the tensor",
        ));
    }
    let source = Source {
        x: T::elements(x),
        layout: Layout {
            scaling,
            ..Layout::nvfp4(rows, cols, usage)
        },
        amax,
        origin: Origin::block_2d(),
        first_block: 0,
    };
    source.pack()
}

/// A matrix and its quantization parameters, shared by all tasks of one tensor.
struct Source<'a> {
    x: Elements<'a>,
    /// Layout of the result, with block scales in rows.
    layout: Layout,
    amax: &'a Amax,
    origin: Origin,
    first_block: u64,
}

/// Blocks of the rowwise tensor per task: 64 KiB of `f32`, and a multiple of 16.
const RUN: usize = 1024;

/// Largest number of columns per task. 16 rows of them are read at a time, and the codes of 128
/// rows are gathered before they are written, so that whole cache lines are read and written.
const COLUMNS: usize = 256;

/// Blocks of a column that are written together: a cache line of codes.
const GATHERED: usize = 8;

impl Source<'_> {
    /// Returns the quantized tensor.
    fn pack(&self) -> Result<QuantizedTensor, Nvfp4Error> {
        let usage = self.layout.usage;
        let (outer, blocks) = (self.layout.outer(), self.layout.blocks());
        let count = outer * blocks;
        let (mut codes, mut scales) = (Vec::with_capacity(count * 8), Vec::with_capacity(count));
        // Number of blocks, in consecutive stored rows, per task.
        let len = match (usage, self.origin.block) {
            (Usage::Rowwise, BlockShape::Block1d) => RUN,
            (Usage::Rowwise, BlockShape::Block2d) => BLOCK * blocks,
            (Usage::Columnwise, _) => {
                // Four tasks per core, so that no core waits long for the last one.
                let columns = outer.div_ceil(4 * rayon::current_num_threads());
                columns.next_multiple_of(BLOCK).min(COLUMNS) * blocks
            }
        };
        codes.spare_capacity_mut()[..count * 8]
            .par_chunks_mut((len * 8).max(1))
            .zip(scales.spare_capacity_mut()[..count].par_chunks_mut(len.max(1)))
            .enumerate()
            .for_each(|(task, (codes, scales))| {
                simd::run(Part {
                    source: self,
                    blocks,
                    first: task * len,
                    codes: zeroed(codes),
                    scales: zeroed(scales),
                });
            });
        // SAFETY: the chunks cover these lengths, and every one was zeroed.
        unsafe {
            codes.set_len(count * 8);
            scales.set_len(count);
        }
        let amax = self.amax.clone();
        QuantizedTensor::from_parts(self.layout, codes, scales, amax, self.origin)
    }
}

/// Zeroes new memory in the task that writes it: in parallel, and while the memory is in the cache.
fn zeroed(bytes: &mut [MaybeUninit<u8>]) -> &mut [u8] {
    bytes.fill(MaybeUninit::new(0));
    // SAFETY: all were just written.
    unsafe { bytes.assume_init_mut() }
}

/// Consecutive blocks of a packed tensor, which one task fills.
struct Part<'a> {
    source: &'a Source<'a>,
    /// Blocks per stored row.
    blocks: usize,
    /// First block, counted over the whole tensor.
    first: usize,
    codes: &'a mut [u8],
    scales: &'a mut [u8],
}

impl Task for Part<'_> {
    #[inline(always)]
    fn compute<I: Isa>(self, isa: I) {
        match (self.source.layout.usage, self.source.origin.block) {
            (Usage::Rowwise, BlockShape::Block1d) => self.pack_run(isa),
            (Usage::Rowwise, BlockShape::Block2d) => self.pack_tiles(isa),
            (Usage::Columnwise, _) => self.pack_columns(isa),
        }
    }
}

impl Part<'_> {
    /// Packs a run of the rowwise tensor: the lanes are consecutive blocks, which may cross rows.
    #[inline(always)]
    fn pack_run<I: Isa>(self, isa: I) {
        let Source { x, layout, .. } = *self.source;
        let shape = (layout.rows, layout.cols);
        let hadamard = layout.hadamard.as_ref();
        let last_row = shape.0 - 1;
        let mut rows = [[0f32; BLOCK]; BLOCK];
        let codes = self.codes.chunks_mut(BLOCK * 8);
        for (i, (codes, scales)) in codes.zip(self.scales.chunks_mut(BLOCK)).enumerate() {
            let first = self.first + i * BLOCK;
            load_blocks(x, shape.1, self.blocks, first, hadamard, &mut rows);
            let scaler = self
                .source
                .scaler(|lane| ((first + lane) / self.blocks).min(last_row));
            let index = self.source.run_indices(first, self.blocks);
            let tile = isa.transpose(&rows);
            let (bytes, words) = self.source.quantize(&tile, &tile, &scaler, &index);
            for (scale, byte) in scales.iter_mut().zip(bytes) {
                *scale = byte as u8;
            }
            for (codes, word) in codes.chunks_exact_mut(8).zip(words) {
                codes.copy_from_slice(&word.to_le_bytes());
            }
        }
    }

    /// Packs 16 rows of the rowwise tensor in tiles: the lanes are the rows.
    #[inline(always)]
    fn pack_tiles<I: Isa>(self, isa: I) {
        let row0 = self.first / self.blocks;
        let scaler = self.source.scaler(|_| 0);
        let mut rows = [[0f32; BLOCK]; BLOCK];
        for index in 0..self.blocks {
            load_rows(
                isa,
                self.source.x,
                (self.source.layout.rows, self.source.layout.cols),
                (row0, index * BLOCK),
                &mut rows,
            );
            let tile = isa.transpose(&rows);
            // Tiles round to nearest, so no random bits are drawn.
            let (bytes, words) = self.source.quantize(&tile, &tile, &scaler, &[0; BLOCK]);
            for r in 0..self.scales.len() / self.blocks {
                let at = r * self.blocks + index;
                self.scales[at] = bytes[r] as u8;
                self.codes[at * 8..][..8].copy_from_slice(&words[r].to_le_bytes());
            }
        }
    }

    /// Packs all rows of some columns: the lanes are consecutive columns.
    #[inline(always)]
    fn pack_columns<I: Isa>(self, isa: I) {
        let Source { x, layout, .. } = *self.source;
        let shape = (layout.rows, layout.cols);
        let (columns, col0) = (self.scales.len() / self.blocks, self.first / self.blocks);
        let hadamard = layout.hadamard.as_ref();
        let group = layout.unit() / BLOCK;
        let mut buffer = [[0f32; BLOCK]; MAX_GROUP];
        let buffer = &mut buffer[..group * BLOCK];
        let mut gathered_codes = [[0u8; GATHERED * 8]; COLUMNS];
        let mut gathered_scales = [[0u8; GATHERED]; COLUMNS];
        for first in (0..self.blocks).step_by(GATHERED) {
            let count = GATHERED.min(self.blocks - first);
            for group0 in (first..first + count).step_by(group) {
                for chunk in (0..columns).step_by(BLOCK) {
                    let col = |lane: usize| col0 + chunk + lane;
                    let scaler = self.source.scaler(|lane| col(lane).min(shape.1 - 1));
                    load_rows(isa, x, shape, (group0 * BLOCK, col(0)), buffer);
                    if let Some(hadamard) = hadamard {
                        transform_lanes(buffer, hadamard);
                    }
                    for (i, tile) in buffer.as_chunks::<BLOCK>().0.iter().enumerate() {
                        let index = self.source.column_indices(col(0), group0 + i, self.blocks);
                        let by_row;
                        let decides = match self.source.origin.block {
                            BlockShape::Block1d => tile,
                            BlockShape::Block2d => {
                                by_row = isa.transpose(tile);
                                &by_row
                            }
                        };
                        let (bytes, words) = self.source.quantize(tile, decides, &scaler, &index);
                        let at = group0 + i - first;
                        for lane in 0..BLOCK {
                            gathered_scales[chunk + lane][at] = bytes[lane] as u8;
                            gathered_codes[chunk + lane][at * 8..][..8]
                                .copy_from_slice(&words[lane].to_le_bytes());
                        }
                    }
                }
            }
            for c in 0..columns {
                let at = c * self.blocks + first;
                let (scales, codes) = (&mut self.scales[at..], &mut self.codes[at * 8..]);
                if count == GATHERED {
                    // The constant length gives two moves instead of two calls.
                    scales[..GATHERED].copy_from_slice(&gathered_scales[c]);
                    codes[..GATHERED * 8].copy_from_slice(&gathered_codes[c]);
                } else {
                    scales[..count].copy_from_slice(&gathered_scales[c][..count]);
                    codes[..count * 8].copy_from_slice(&gathered_codes[c][..count * 8]);
                }
            }
        }
    }
}

impl Source<'_> {
    /// Returns the position of the tensor in the logical output.
    #[inline(always)]
    fn position(&self) -> BlockPosition {
        match &self.origin.rounding {
            Rounding::Nearest => BlockPosition::default(),
            Rounding::Stochastic(stream) => stream.position,
        }
    }

    /// Returns the logical indices of 16 consecutive blocks, the first of which is block `first` of
    /// the tensor; its stored rows have `blocks` blocks.
    #[inline(always)]
    fn run_indices(&self, first: usize, blocks: usize) -> Lanes<u64> {
        let position = self.position();
        match position.row_blocks {
            None => {
                let offset = self.first_block.wrapping_add(position.first);
                lanes(|lane| offset.wrapping_add((first + lane) as u64))
            }
            Some(_) => lanes(|lane| {
                let (row, block) = ((first + lane) / blocks, (first + lane) % blocks);
                let index = position.index(row as u64, block as u64, blocks as u64);
                self.first_block.wrapping_add(index)
            }),
        }
    }

    /// Returns the logical indices of block `block` of 16 stored rows from `row` on, with `blocks`
    /// blocks each.
    #[inline(always)]
    fn column_indices(&self, row: usize, block: usize, blocks: usize) -> Lanes<u64> {
        let position = self.position();
        lanes(|lane| {
            let index = position.index((row + lane) as u64, block as u64, blocks as u64);
            self.first_block.wrapping_add(index)
        })
    }

    /// Returns the scaling rule for 16 blocks; `outer` returns the stored row of each.
    #[inline(always)]
    fn scaler(&self, outer: impl Fn(usize) -> usize) -> Scaler {
        let amax = match self.amax {
            Amax::Absent => unreachable!("NVFP4 has a global scale"),
            Amax::Tensor(amax) => [*amax; BLOCK],
            Amax::PerRow(amax) => lanes(|lane| amax[outer(lane)]),
        };
        Scaler::new(amax, self.layout.scaling)
    }

    /// Returns scale bytes and codes of the 16 blocks of `tile`, whose random bits are those of
    /// `index`. `decides` determines the scales: it is `tile`, or its transpose if the lanes must
    /// be the source's rows.
    #[inline(always)]
    fn quantize(
        &self,
        tile: &Tile,
        decides: &Tile,
        scaler: &Scaler,
        index: &Lanes<u64>,
    ) -> (Lanes<u32>, Lanes<u64>) {
        let bytes = scaler.scale_bytes(decides, self.origin.block);
        let multipliers = scaler.multipliers(&bytes);
        let words = encode_tile(tile, &multipliers, &self.origin.rounding, index);
        (bytes, words)
    }
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
        Amax::Absent => Err(Nvfp4Error::value("amax", "none", "one or one for each row")),
        Amax::PerRow(values) if values.len() != outer => Err(Nvfp4Error::shape(
            "amax",
            format!("{} values", values.len()),
            format!("{outer}"),
        )),
        _ => Ok(()),
    }
}

/// Returns the rounding of elements by `params`, which must be those of NVFP4 in 1x16 blocks.
fn rounding_of(params: &QuantParams) -> Result<Rounding, Nvfp4Error> {
    match (params.scaling, params.rounding) {
        (BlockScaling::FourOverSix(_), QuantRounding::Elements(Rounding::Stochastic(_))) => {
            Err(Nvfp4Error::value(
                "params",
                "four over six with stochastic rounding",
                "Rounding::Nearest, whose error is what four over six compares; choosing the scale \
                 by the data would bias stochastic rounding",
            ))
        }
        (_, QuantRounding::Elements(rounding))
            if params.format == Format::Nvfp4 && !params.is_2d() =>
        {
            Ok(rounding)
        }
        _ => Err(Nvfp4Error::value(
            "params",
            format!("{params:?}"),
            "NVFP4 in 1x16 blocks, without MS-EDEN",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ErrorNorm, HadamardSize, RandomStream, reference::simd::Baseline};

    /// Compares with the bytes without wide vectors, as a processor without AVX2 computes them.
    #[test]
    fn instruction_sets_agree() {
        let (rows, cols) = (150, 48);
        let x: Vec<f32> = (0..rows * cols)
            .map(|i| (i as f32 * 0.7).sin() * (i as f32 * 0.01).exp2())
            .collect();
        let amax = Amax::Tensor(crate::reference::amax(&x));
        let stochastic = Rounding::Stochastic(RandomStream::new(1, 2, 3));
        let large = Hadamard::seeded_with_size(HadamardSize::H128, 1);
        let plain = Layout::nvfp4(rows, cols, Usage::Rowwise);
        let transformed = |hadamard| Layout {
            hadamard: Some(hadamard),
            ..plain
        };
        let nearest = Origin::default();
        let mut kinds = vec![
            (nearest, plain),
            (Origin::block_1d(stochastic), plain),
            (
                Origin::block_1d(stochastic),
                transformed(Hadamard::default()),
            ),
            (nearest, transformed(large)),
        ];
        for scaling in [
            BlockScaling::Standard,
            BlockScaling::Headroom,
            BlockScaling::FourOverSix(ErrorNorm::Mse),
        ] {
            for origin in [Origin::block_2d(), nearest] {
                kinds.push((origin, Layout { scaling, ..plain }));
            }
        }
        for (origin, layout) in kinds {
            for usage in [Usage::Rowwise, Usage::Columnwise] {
                let source = Source {
                    x: Elements::F32(&x),
                    layout: Layout { usage, ..layout },
                    amax: &amax,
                    origin,
                    first_block: 5,
                };
                let packed = source.pack().unwrap();
                // Runs one task after the other, each on its own 16 stored rows.
                let len = BLOCK * packed.blocks();
                let mut codes = vec![0; packed.codes().len()];
                let mut scales = vec![0; packed.scales().len()];
                let parts = codes.chunks_mut(len * 8).zip(scales.chunks_mut(len));
                for (task, (codes, scales)) in parts.enumerate() {
                    Part {
                        source: &source,
                        blocks: packed.blocks(),
                        first: task * len,
                        codes,
                        scales,
                    }
                    .compute(Baseline);
                }
                assert_eq!(packed.codes(), codes, "{usage:?} {origin:?} {layout:?}");
                assert_eq!(packed.scales(), scales, "{usage:?} {origin:?} {layout:?}");
            }
        }
    }
}
