//! From codes back to values.

use cubecl::prelude::*;

use super::launch::grid;
use crate::{
    BLOCK, Nvfp4Error, PackedAxis,
    cube::codec::{decode_e2m1, decode_e4m3, store},
    device::{DevicePacked, FloatKind, Matrix, address_type},
};

/// The matrix that `packed` stands for, `rows` x `cols` in the orientation of its source, rounded
/// once to `out`. See [`reference::dequantize`](crate::reference::dequantize).
///
/// # Errors
/// When a buffer is smaller than its shape.
pub fn dequantize(
    client: &Client,
    packed: &DevicePacked,
    out: FloatKind,
) -> Result<Matrix, Nvfp4Error> {
    packed.check("packed")?;
    let result = Matrix::empty(client, packed.rows, packed.cols, out);
    if result.is_empty() {
        return Ok(result);
    }
    let blocks = packed.outer() * packed.blocks();
    let (count, dim) = grid(client, blocks);
    // SAFETY: the kernel stays below the number of blocks and the shape of the result.
    unsafe {
        dequantize_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(blocks * BLOCK),
            BufferArg::from_raw_parts(packed.codes.clone(), blocks),
            BufferArg::from_raw_parts(packed.scales.clone(), blocks),
            BufferArg::from_raw_parts(packed.amax.clone(), 1),
            BufferArg::from_raw_parts(result.handle.clone(), result.len()),
            packed.outer(),
            packed.inner(),
            packed.axis == PackedAxis::Rows,
            out,
            out.storage_type(),
        );
    }
    Ok(result)
}

/// One unit decodes every `units`-th block. Of a transposed copy neighbours take neighbouring
/// stored rows, which are neighbouring columns of the result.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn dequantize_kernel<F: Numeric>(
    codes: &[Vector<u32, Const<2>>],
    scales: &[u8],
    amax: &[f32],
    out: &mut [F],
    outer: usize,
    inner: usize,
    #[comptime] transposed: bool,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let factor = amax[0] / 2688.0f32;
    let blocks = inner.div_ceil(16);
    let mut item = ABSOLUTE_POS;
    while item < outer * blocks {
        let mut row = item / blocks;
        let mut group = item % blocks;
        if comptime!(transposed) {
            row = item % outer;
            group = item / outer;
        }
        let index = row * blocks + group;
        let scale = decode_e4m3(u32::cast_from(scales[index]));
        let words = codes[index];
        #[unroll]
        for i in 0..16usize {
            let word = words.extract(comptime!(i / 8));
            let value = decode_e2m1(word >> comptime!(4 * (i as u32 % 8))) * scale * factor;
            let position = group * 16usize + i;
            if comptime!(transposed) {
                if position < inner {
                    out[position * outer + row] = store::<F>(value, kind);
                }
            } else {
                out[row * inner + position] = store::<F>(value, kind);
            }
        }
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}
