//! Dequantization of microscaling formats.

use cubecl::prelude::*;

use super::{
    super::scale_order::in_form,
    columns::{TILE_COLS, TILE_ROWS, stage_pitch},
};
use crate::{
    MX_BLOCK, Nvfp4Error, StoredForm, Usage,
    cube::{
        codec::store,
        mx::{decode_element, decode_ue8m0},
    },
    format::block::ElementFormat,
    launch::{buffer, grid, tile_grid, vector_size},
    memory::address_type,
    tensor::{DeviceQuantized, FloatKind, Groups, Matrix},
};

/// Dequantizes a tensor in an MX format; see [`dequantize`](fn@crate::quantize::dequantize).
///
/// # Errors
/// Returns an error if a buffer is smaller than its shape.
pub(in crate::quantize) fn mx_dequantize(
    client: &Client,
    packed: &DeviceQuantized,
    out: FloatKind,
) -> Result<Matrix, Nvfp4Error> {
    packed.check_codes("packed", packed.layout.format)?;
    packed.check("packed")?;
    // GEMMs read tiles directly; dequantizing tiles is not performance-critical.
    let in_rows = match packed.layout.form.has_tiles() {
        false => None,
        true => Some(DeviceQuantized {
            // Groups only affect tiles of scales.
            groups: Groups::One,
            ..in_form(client, packed, StoredForm::Rows)?
        }),
    };
    let packed = in_rows.as_ref().unwrap_or(packed);
    packed.check_no_groups("packed")?;
    let result = Matrix::empty(client, packed.rows(), packed.cols(), out);
    if result.is_empty() {
        return Ok(result);
    }
    let (outer, inner, blocks) = (packed.outer(), packed.inner(), packed.blocks());
    let address = address_type(outer * blocks * MX_BLOCK);
    // SAFETY (of every argument): checked against, or allocated for, the shape.
    let codes = unsafe { buffer(&packed.codes, packed.code_bytes() / 4) };
    let scales = unsafe { buffer(&packed.scales, outer * blocks) };
    let element = packed.layout.format.element();
    match packed.usage() {
        Usage::Rowwise => {
            let width = vector_size(out, inner);
            let (count, dim) = grid(client, result.len() / width);
            // SAFETY: the kernel stays below the shape of the result.
            unsafe {
                mx_dequantize_row_kernel::launch_unchecked(
                    client,
                    count,
                    dim,
                    address,
                    width,
                    codes,
                    scales,
                    buffer(&result.handle, result.len() / width),
                    outer,
                    inner,
                    element,
                    out,
                    out.storage_type(),
                );
            }
        }
        Usage::Columnwise => {
            let width = vector_size(out, outer);
            let tiles = inner.div_ceil(TILE_ROWS) * outer.div_ceil(TILE_COLS);
            let (count, dim) = tile_grid(client, tiles);
            // SAFETY: the kernel masks every access by the shape.
            unsafe {
                mx_dequantize_col_kernel::launch_unchecked(
                    client,
                    count,
                    dim,
                    address,
                    width,
                    codes,
                    scales,
                    buffer(&result.handle, result.len() / width),
                    inner,
                    outer,
                    element,
                    out,
                    out.storage_type(),
                );
            }
        }
    }
    Ok(result)
}

/// Each unit decodes every `units`-th vector of the result.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn mx_dequantize_row_kernel<F: Numeric, N: Size>(
    codes: &[u32],
    scales: &[u8],
    out: &mut [Vector<F, N>],
    rows: usize,
    cols: usize,
    #[comptime] element: ElementFormat,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let width = N::value();
    let per_word = comptime!(32 / element.bits());
    let vectors = cols / width;
    let blocks = cols.div_ceil(32);
    let mut item = ABSOLUTE_POS;
    while item < rows * vectors {
        let row = item / vectors;
        let first = (item % vectors) * width;
        let block = row * blocks + first / 32usize;
        let scale = decode_ue8m0(u32::cast_from(scales[block]));
        let word = block * element.bits() + first % 32usize / per_word;
        let mut vector = Vector::<F, N>::empty();
        #[unroll]
        for w in 0..comptime!(width.div_ceil(per_word)) {
            let packed = codes[word + w];
            #[unroll]
            for i in 0..comptime!(width.min(per_word)) {
                // A vector with fewer elements than a word starts within one.
                let bits = comptime!(element.bits() as u32);
                let shift = comptime!(bits * i as u32) + bits * (first % per_word) as u32;
                let value = decode_element(packed >> shift, element) * scale;
                vector.insert(comptime!(w * per_word + i), store::<F>(value, kind));
            }
        }
        out[item] = vector;
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Each cube decodes every `cubes`-th tile of 128 x 64 of a matrix that is stored transposed. The
/// words of its 64 stored rows are gathered in shared memory.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn mx_dequantize_col_kernel<F: Numeric, N: Size>(
    codes: &[u32],
    scales: &[u8],
    out: &mut [Vector<F, N>],
    rows: usize,
    cols: usize,
    #[comptime] element: ElementFormat,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let width = N::value();
    let per_word = comptime!(32 / element.bits());
    let words = comptime!(element.bits());
    let pitch = comptime!(stage_pitch(element));
    let mut stage = Shared::<[u32]>::new_slice(comptime!(TILE_COLS * pitch));
    let mut factors = Shared::<[f32]>::new_slice(comptime!(TILE_COLS * TILE_ROWS / 32));
    let blocks = rows.div_ceil(32);
    let vectors = cols / width;
    let tile_cols = cols.div_ceil(TILE_COLS);
    let tiles = rows.div_ceil(TILE_ROWS) * tile_cols;
    let mut index = CUBE_POS;
    while index < tiles {
        let row0 = (index / tile_cols) * comptime!(TILE_ROWS);
        let col0 = (index % tile_cols) * comptime!(TILE_COLS);
        let mut item = UNIT_POS as usize;
        while item < comptime!(TILE_COLS * TILE_ROWS / per_word) {
            let col = item / comptime!(TILE_ROWS / per_word);
            let word = item % comptime!(TILE_ROWS / per_word);
            let block = row0 / 32usize + word / words;
            if col0 + col < cols && block < blocks {
                let at = (col0 + col) * blocks + block;
                stage[col * pitch + word] = codes[at * words + word % words];
                if word % words == comptime!(words - 1) {
                    let scale = decode_ue8m0(u32::cast_from(scales[at]));
                    factors[(word / words) * comptime!(TILE_COLS) + col] = scale;
                }
            }
            item += CUBE_DIM as usize;
        }
        sync_cube();
        let mut item = UNIT_POS as usize;
        while item < comptime!(TILE_COLS * TILE_ROWS / width) {
            let row = item / comptime!(TILE_COLS / width);
            let col = (item % comptime!(TILE_COLS / width)) * width;
            if row0 + row < rows && col0 + col < cols {
                let shift = comptime!(element.bits() as u32) * (row % per_word) as u32;
                let mut vector = Vector::<F, N>::empty();
                #[unroll]
                for i in 0..width {
                    let packed = stage[(col + i) * pitch + row / per_word];
                    let scale = factors[(row / 32usize) * comptime!(TILE_COLS) + col + i];
                    let value = decode_element(packed >> shift, element) * scale;
                    vector.insert(i, store::<F>(value, kind));
                }
                out[(row0 + row) * vectors + (col0 + col) / width] = vector;
            }
            item += CUBE_DIM as usize;
        }
        sync_cube();
        index += CUBE_COUNT;
    }
}
