//! Quantization from a given amax: row-wise, column-wise, and 16x16 tiles.

use cubecl::{prelude::*, server::Handle};

use super::launch::{BlockArgs, grid, vector_size};
use crate::{
    BLOCK, Hadamard, Nvfp4Error, PackedAxis,
    cube::{
        block::{
            BlockPolicy, block_amax, encode_block, load_col_block, load_row_block, resolve_offset,
        },
        codec::magnitude_bits,
        hadamard::transform,
        philox::Random,
        scale::GlobalScale,
    },
    device::{DevicePacked, DeviceRounding, FloatKind, Matrix, address_type},
};

/// The row-wise copy of `x`: 1x16 blocks along each row. See
/// [`reference::quantize_row`](crate::reference::quantize_row).
///
/// # Errors
/// When the columns of `x` are no multiple of 16, or a buffer is smaller than its shape.
pub fn quantize_row(
    client: &Client,
    x: &Matrix,
    amax: &Handle,
    rounding: DeviceRounding,
) -> Result<DevicePacked, Nvfp4Error> {
    check(x, amax, &rounding)?;
    check_packed_cols(x)?;
    let out = DevicePacked::empty(client, (x.rows, x.cols), PackedAxis::Cols, amax);
    if x.is_empty() {
        return Ok(out);
    }
    let args = BlockArgs::new(client, &rounding, None);
    let width = vector_size(x.dtype, BLOCK);
    let blocks = x.len() / BLOCK;
    let (count, dim) = grid(client, blocks);
    // SAFETY: the kernel stays below the number of blocks, and the buffers were checked for it.
    unsafe {
        quantize_row_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(x.len()),
            width,
            BufferArg::from_raw_parts(x.handle.clone(), x.len() / width),
            BufferArg::from_raw_parts(amax.clone(), 1),
            BufferArg::from_raw_parts(out.codes.clone(), blocks),
            BufferArg::from_raw_parts(out.scales.clone(), blocks),
            args.offset(amax),
            args.random(),
            blocks,
            args.policy,
            x.dtype,
            x.dtype.storage_type(),
        );
    }
    Ok(out)
}

/// The column-wise copy of `x`: 16x1 blocks down each column, stored transposed, the last block
/// padded with zeros; transformed first with `hadamard`, in which case `amax` is that of the
/// transformed values. See [`reference::quantize_col`](crate::reference::quantize_col).
///
/// # Errors
/// When a buffer is smaller than its shape.
pub fn quantize_col(
    client: &Client,
    x: &Matrix,
    amax: &Handle,
    rounding: DeviceRounding,
    hadamard: Option<Hadamard>,
) -> Result<DevicePacked, Nvfp4Error> {
    check(x, amax, &rounding)?;
    let out = DevicePacked::empty(client, (x.rows, x.cols), PackedAxis::Rows, amax);
    if x.is_empty() {
        return Ok(out);
    }
    let args = BlockArgs::new(client, &rounding, hadamard);
    let blocks = out.outer() * out.blocks();
    let (count, dim) = grid(client, blocks);
    // SAFETY: as in `quantize_row`.
    unsafe {
        quantize_col_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(out.outer() * out.blocks() * BLOCK),
            BufferArg::from_raw_parts(x.handle.clone(), x.len()),
            BufferArg::from_raw_parts(amax.clone(), 1),
            BufferArg::from_raw_parts(out.codes.clone(), blocks),
            BufferArg::from_raw_parts(out.scales.clone(), blocks),
            args.offset(amax),
            args.random(),
            x.rows,
            x.cols,
            args.signs,
            args.policy,
            x.dtype,
            x.dtype.storage_type(),
        );
    }
    Ok(out)
}

/// Both copies of `x` in 16x16 tiles, rounded to nearest: `(row-wise, column-wise)`, the second the
/// exact transpose of the first. See
/// [`reference::quantize_tile`](crate::reference::quantize_tile).
///
/// # Errors
/// When the columns of `x` are no multiple of 16, or a buffer is smaller than its shape.
pub fn quantize_tile(
    client: &Client,
    x: &Matrix,
    amax: &Handle,
) -> Result<(DevicePacked, DevicePacked), Nvfp4Error> {
    check(x, amax, &DeviceRounding::Nearest)?;
    check_packed_cols(x)?;
    let shape = (x.rows, x.cols);
    let row = DevicePacked::empty(client, shape, PackedAxis::Cols, amax);
    let col = DevicePacked::empty(client, shape, PackedAxis::Rows, amax);
    if x.is_empty() {
        return Ok((row, col));
    }
    let args = BlockArgs::new(client, &DeviceRounding::Nearest, None);
    let (row_blocks, col_blocks) = (row.outer() * row.blocks(), col.outer() * col.blocks());
    let width = vector_size(x.dtype, BLOCK);
    let (count, dim) = grid(client, x.rows.div_ceil(BLOCK) * (x.cols / BLOCK));
    // SAFETY: as in `quantize_row`.
    unsafe {
        quantize_tile_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(col_blocks * BLOCK),
            width,
            BufferArg::from_raw_parts(x.handle.clone(), x.len() / width),
            BufferArg::from_raw_parts(amax.clone(), 1),
            BufferArg::from_raw_parts(row.codes.clone(), row_blocks),
            BufferArg::from_raw_parts(row.scales.clone(), row_blocks),
            BufferArg::from_raw_parts(col.codes.clone(), col_blocks * 2),
            BufferArg::from_raw_parts(col.scales.clone(), col_blocks),
            x.rows,
            x.cols,
            args.policy,
            x.dtype,
            x.dtype.storage_type(),
        );
    }
    Ok((row, col))
}

fn check(x: &Matrix, amax: &Handle, rounding: &DeviceRounding) -> Result<(), Nvfp4Error> {
    x.check("x")?;
    let words = |argument, handle: &Handle, needed: u64| {
        if handle.size_in_used() < needed {
            let found = format!("{} bytes of memory", handle.size_in_used());
            return Err(Nvfp4Error::shape(
                argument,
                found,
                format!("at least {needed}"),
            ));
        }
        Ok(())
    };
    words("amax", amax, 4)?;
    if let DeviceRounding::StochasticAt(_, offset) = rounding {
        words("offset", offset, 8)?;
    }
    Ok(())
}

fn check_packed_cols(x: &Matrix) -> Result<(), Nvfp4Error> {
    if x.cols.is_multiple_of(BLOCK) {
        return Ok(());
    }
    Err(Nvfp4Error::shape(
        "x",
        format!("{} x {}", x.rows, x.cols),
        "columns, the packed axis, in a multiple of 16",
    ))
}

/// One unit quantizes every `units`-th block.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn quantize_row_kernel<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    amax: &[f32],
    codes: &mut [Vector<u32, Const<2>>],
    scales: &mut [u8],
    offset: &[u32],
    random: Random,
    blocks: usize,
    #[comptime] policy: BlockPolicy,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let global = GlobalScale::from_amax(amax[0]);
    let random = resolve_offset(&random, offset, policy);
    let width = N::value();
    let per_block = comptime!(16 / width);
    let mut index = ABSOLUTE_POS;
    while index < blocks {
        let block = load_row_block::<F, N>(x, index * per_block, kind);
        let scale = global.block_scale(block_amax(&block));
        let multiplier = global.encode_multiplier(scale);
        let logical = u64::cast_from(index);
        codes[index] = encode_block(&block, multiplier, logical, &random, policy);
        scales[index] = u8::cast_from(scale);
        index += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// One unit quantizes every `units`-th block; neighbours take neighbouring columns, so that their
/// loads coalesce.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn quantize_col_kernel<F: Numeric>(
    x: &[F],
    amax: &[f32],
    codes: &mut [Vector<u32, Const<2>>],
    scales: &mut [u8],
    offset: &[u32],
    random: Random,
    rows: usize,
    cols: usize,
    signs: u32,
    #[comptime] policy: BlockPolicy,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let global = GlobalScale::from_amax(amax[0]);
    let random = resolve_offset(&random, offset, policy);
    let blocks = rows.div_ceil(16);
    let mut item = ABSOLUTE_POS;
    while item < cols * blocks {
        let col = item % cols;
        let group = item / cols;
        let mut block = load_col_block::<F>(x, group * 16, col, rows, cols, kind);
        if comptime!(policy.hadamard) {
            transform(&mut block, signs);
        }
        let scale = global.block_scale(block_amax(&block));
        let multiplier = global.encode_multiplier(scale);
        let index = col * blocks + group;
        let logical = u64::cast_from(index);
        codes[index] = encode_block(&block, multiplier, logical, &random, policy);
        scales[index] = u8::cast_from(scale);
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// One unit quantizes every `units`-th 16x16 tile: a first pass over it finds the maximum, a second
/// writes the row-wise copy while the column-wise codes gather in registers.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn quantize_tile_kernel<F: Numeric, N: Size>(
    x: &[Vector<F, N>],
    amax: &[f32],
    row_codes: &mut [Vector<u32, Const<2>>],
    row_scales: &mut [u8],
    col_codes: &mut [u32],
    col_scales: &mut [u8],
    rows: usize,
    cols: usize,
    #[comptime] policy: BlockPolicy,
    #[comptime] kind: FloatKind,
    #[define(F)] _storage: ElemType,
) {
    let global = GlobalScale::from_amax(amax[0]);
    // Tiles round to nearest: nothing is drawn.
    let random = Random {
        key_low: 0u32,
        key_high: 0u32,
        offset_low: 0u32,
        offset_high: 0u32,
    };
    let row_blocks = cols / 16;
    let col_blocks = rows.div_ceil(16);
    let width = N::value();
    let per_block = comptime!(16 / width);
    let mut tile = ABSOLUTE_POS;
    while tile < row_blocks * col_blocks {
        let tile_row = tile / row_blocks;
        let tile_col = tile % row_blocks;
        let row0 = tile_row * 16;
        let present = min(rows - row0, 16usize);

        let mut bits = 0u32;
        let mut r = 0usize;
        while r < present {
            let block =
                load_row_block::<F, N>(x, ((row0 + r) * row_blocks + tile_col) * per_block, kind);
            bits = max(bits, magnitude_bits(block_amax(&block)));
            r += 1usize;
        }
        let scale = global.block_scale(f32::reinterpret(bits));
        let multiplier = global.encode_multiplier(scale);

        // Rows beyond the matrix are zeros: code 0, unless the tile holds a NaN.
        let padding = select(multiplier.is_nan(), 7u32, 0u32);
        #[unroll]
        for half in 0..2usize {
            let mut gathered = Array::<u32>::new(16usize);
            #[unroll]
            for c in 0..16usize {
                gathered[c] = 0u32;
            }
            let mut r = 0usize;
            while r < 8usize {
                let row = row0 + half * 8usize + r;
                if row < rows {
                    let index = row * row_blocks + tile_col;
                    let block = load_row_block::<F, N>(x, index * per_block, kind);
                    let packed = encode_block(&block, multiplier, 0u64, &random, policy);
                    #[unroll]
                    for c in 0..16usize {
                        let word = packed.extract(comptime!(c / 8));
                        let code = (word >> comptime!(4 * (c as u32 % 8))) & 0xFu32;
                        gathered[c] |= code << (4u32 * r as u32);
                    }
                    row_codes[index] = packed;
                    row_scales[index] = u8::cast_from(scale);
                } else {
                    #[unroll]
                    for c in 0..16usize {
                        gathered[c] |= padding << (4u32 * r as u32);
                    }
                }
                r += 1usize;
            }
            #[unroll]
            for c in 0..16usize {
                let index = (tile_col * 16usize + c) * col_blocks + tile_row;
                col_codes[index * 2usize + half] = gathered[c];
                if comptime!(half == 0) {
                    col_scales[index] = u8::cast_from(scale);
                }
            }
        }
        tile += CUBE_COUNT * CUBE_DIM as usize;
    }
}
