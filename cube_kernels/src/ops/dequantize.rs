//! From codes back to values.

use cubecl::prelude::*;

use super::launch::grid;
use crate::{
    BLOCK, Nvfp4Error, PackedAxis,
    cube::codec::{BlockFactors, store},
    device::{AmaxScope, DevicePacked, FloatKind, Matrix, address_type, is_aligned},
};

/// The matrix that `packed` stands for, `rows` x `cols` in the orientation of its source, rounded
/// once to `out`. See [`reference::dequantize`](crate::reference::dequantize). Values of a transformed
/// copy stay transformed.
///
/// # Errors
/// When a buffer is smaller than its shape, or the copy has groups or swizzled scales.
pub fn dequantize(
    client: &Client,
    packed: &DevicePacked,
    out: FloatKind,
) -> Result<Matrix, Nvfp4Error> {
    packed.check("packed")?;
    packed.check_compact("packed")?;
    let result = Matrix::empty(client, packed.rows, packed.cols, out);
    if result.is_empty() {
        return Ok(result);
    }
    let blocks = packed.code_blocks();
    let transposed = packed.axis == PackedAxis::Rows;
    let address = address_type(blocks * BLOCK);
    // SAFETY (of every argument): the buffers were checked against the shapes.
    unsafe {
        let scales = BufferArg::from_raw_parts(packed.scales.clone(), blocks);
        let amax = BufferArg::from_raw_parts(packed.amax.clone(), packed.amax_len());
        let (range, per_outer) = (packed.scaling.range(), packed.scope == AmaxScope::Outer);
        let whole_sectors = packed.outer().is_multiple_of(2)
            && packed.blocks().is_multiple_of(BLOCKS)
            && is_aligned(&packed.codes)
            && is_aligned(&packed.scales);
        if transposed && whole_sectors {
            let items = packed.outer() / 2 * (packed.blocks() / BLOCKS);
            let (count, dim) = grid(client, items);
            dequantize_col_pairs_kernel::launch_unchecked(
                client,
                count,
                dim,
                address,
                BufferArg::from_raw_parts(packed.codes.clone(), blocks / 2),
                BufferArg::from_raw_parts(packed.scales.clone(), blocks / BLOCKS),
                amax,
                BufferArg::from_raw_parts(result.handle.clone(), result.len() / 2),
                packed.outer(),
                packed.inner(),
                packed.blocks(),
                range,
                per_outer,
                out,
                out.storage_type(),
            );
        } else if transposed {
            let (count, dim) = grid(client, blocks);
            dequantize_cols_kernel::launch_unchecked(
                client,
                count,
                dim,
                address,
                BufferArg::from_raw_parts(packed.codes.clone(), blocks),
                scales,
                amax,
                BufferArg::from_raw_parts(result.handle.clone(), result.len()),
                packed.outer(),
                packed.inner(),
                packed.blocks(),
                range,
                per_outer,
                out,
                out.storage_type(),
            );
        } else {
            // Eight codes make 16 bytes of 16-bit values.
            let words = blocks * 2;
            let (count, dim) = grid(client, words);
            dequantize_rows_kernel::launch_unchecked(
                client,
                count,
                dim,
                address,
                BufferArg::from_raw_parts(packed.codes.clone(), words),
                scales,
                amax,
                BufferArg::from_raw_parts(result.handle.clone(), words),
                words,
                packed.blocks() * 2,
                range,
                per_outer,
                out,
                out.storage_type(),
            );
        }
    }
    Ok(result)
}

/// One unit decodes every `units`-th word of eight codes into one vector.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn dequantize_rows_kernel<F: Numeric>(
    codes: &[u32],
    scales: &[u8],
    amax: &[f32],
    out: &mut [Vector<F, Const<8>>],
    words: usize,
    row_words: usize,
    range: f32,
    #[comptime] per_outer: bool,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let tensor = amax[0] / range;
    let mut item = ABSOLUTE_POS;
    while item < words {
        let factor = if comptime!(per_outer) {
            amax[item / row_words] / range
        } else {
            tensor
        };
        let word = codes[item];
        let factors = BlockFactors::new(u32::cast_from(scales[item / 2usize]), factor);
        let mut vector = Vector::<F, Const<8>>::empty();
        #[unroll]
        for i in 0..8usize {
            let value = factors.decode(word >> comptime!(4 * i as u32));
            vector.insert(i, store::<F>(value, kind));
        }
        out[item] = vector;
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Blocks of a stored row that a unit decodes: 32 bytes of codes, a sector of memory.
const BLOCKS: usize = 4;

/// One unit decodes `BLOCKS` blocks of each of two stored rows of a transposed copy, and stores pairs of
/// the result; neighbours take neighbouring stored rows, which are neighbouring columns of the result.
/// Whole sectors are loaded at once: neighbours' lie in other rows, and would be gone from the cache before
/// a second load of each.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn dequantize_col_pairs_kernel<F: Numeric>(
    codes: &[Vector<u32, Const<4>>],
    scales: &[u32],
    amax: &[f32],
    out: &mut [Vector<F, Const<2>>],
    outer: usize,
    inner: usize,
    blocks: usize,
    range: f32,
    #[comptime] per_outer: bool,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let tensor = amax[0] / range;
    let pairs = outer / 2usize;
    let quads = blocks / BLOCKS;
    let mut item = ABSOLUTE_POS;
    while item < pairs * quads {
        let quad = item / pairs;
        let pair = item - quad * pairs;
        let mut low_factor = tensor;
        let mut high_factor = tensor;
        if comptime!(per_outer) {
            low_factor = amax[2usize * pair] / range;
            high_factor = amax[2usize * pair + 1usize] / range;
        }
        let low = 2usize * pair * quads + quad;
        let high = low + quads;
        let low_scales = scales[low];
        let high_scales = scales[high];
        let mut low_codes = Array::<Vector<u32, Const<4>>>::new(2usize);
        let mut high_codes = Array::<Vector<u32, Const<4>>>::new(2usize);
        #[unroll]
        for half in 0..2usize {
            low_codes[half] = codes[2usize * low + half];
            high_codes[half] = codes[2usize * high + half];
        }
        let start = quad * comptime!(BLOCKS * 16);
        let mut target = start * pairs + pair;
        #[unroll]
        for b in 0..BLOCKS {
            let shift = comptime!(8 * b as u32);
            let low_factors = BlockFactors::new((low_scales >> shift) & 0xFFu32, low_factor);
            let high_factors = BlockFactors::new((high_scales >> shift) & 0xFFu32, high_factor);
            #[unroll]
            for i in 0..16usize {
                let shift = comptime!(4 * (i as u32 % 8));
                let word = comptime!(2 * (b % 2) + i / 8);
                let low_code = low_codes[comptime!(b / 2)].extract(word) >> shift;
                let high_code = high_codes[comptime!(b / 2)].extract(word) >> shift;
                let mut values = Vector::<F, Const<2>>::empty();
                values.insert(0usize, store::<F>(low_factors.decode(low_code), kind));
                values.insert(1usize, store::<F>(high_factors.decode(high_code), kind));
                if start + comptime!(b * 16 + i) < inner {
                    out[target] = values;
                }
                target += pairs;
            }
        }
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// One unit decodes every `units`-th block of a transposed copy of an odd number of stored rows;
/// neighbours take neighbouring stored rows, which are neighbouring columns of the result.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn dequantize_cols_kernel<F: Numeric>(
    codes: &[Vector<u32, Const<2>>],
    scales: &[u8],
    amax: &[f32],
    out: &mut [F],
    outer: usize,
    inner: usize,
    blocks: usize,
    range: f32,
    #[comptime] per_outer: bool,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let tensor = amax[0] / range;
    let mut item = ABSOLUTE_POS;
    while item < outer * blocks {
        let row = item % outer;
        let factor = if comptime!(per_outer) {
            amax[row] / range
        } else {
            tensor
        };
        let group = item / outer;
        let index = row * blocks + group;
        let factors = BlockFactors::new(u32::cast_from(scales[index]), factor);
        let words = codes[index];
        #[unroll]
        for i in 0..16usize {
            let word = words.extract(comptime!(i / 8));
            let value = factors.decode(word >> comptime!(4 * (i as u32 % 8)));
            let position = group * 16usize + i;
            if position < inner {
                out[position * outer + row] = store::<F>(value, kind);
            }
        }
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}
