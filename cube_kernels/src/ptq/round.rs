//! Weights whose blocks are quantized independently.

use cubecl::{bytes::Bytes, prelude::*};
use nvfp4_formats::ptq::BlockQuantizer;

use super::block::{BlockPlan, Global, ScaledBlock, scale_byte};
use crate::{
    BLOCK, Nvfp4Error,
    capabilities::conversion_of,
    launch::{buffer, grid},
    memory::{address_type, allocate, download, upload},
    tensor::{FloatKind, Matrix},
};

/// Number of elements that are copied to the device at a time: few enough for the pinned memory that
/// CubeCL copies from, and for memory that the allocator reuses.
const PART: usize = 1 << 21;

/// Returns the codes and scale bytes of `values` (`[n, k]`), with each block quantized
/// independently: [`nvfp4_formats::ptq::round_rows`]. `weights` are the `E[x²]` of the `k` input
/// features. Waits for the device.
///
/// # Errors
/// Returns an error if `k` is not a positive multiple of 16, the values are not whole rows, or the
/// rule of `quantizer` has no kernel.
pub fn round_rows(
    client: &Client,
    values: &[f32],
    quantizer: &BlockQuantizer,
    weights: &[f32],
) -> Result<(Vec<u8>, Vec<u8>), Nvfp4Error> {
    let plan = BlockPlan::new(quantizer, conversion_of(client))?;
    check(values, weights)?;
    let (len, k) = (values.len(), weights.len());
    let codes = allocate(client, len / 2);
    let scales = allocate(client, len / BLOCK);
    let weights = upload(client, bytemuck::cast_slice(weights));
    for (first, part) in parts(client, values, k) {
        let blocks = part.len() / BLOCK;
        let (count, dim) = grid(client, blocks);
        // SAFETY: the part was allocated; codes and scales have room for all blocks.
        unsafe {
            round_rows_kernel::launch_unchecked(
                client,
                count,
                dim,
                address_type(len),
                buffer(&part.handle, part.len()),
                buffer(&weights, k),
                buffer(&codes, len / 8),
                buffer(&scales, len / BLOCK),
                Global::arg(quantizer),
                PartBlocksLaunch::new(first * (k / BLOCK), blocks, k / BLOCK),
                plan,
            );
        }
    }
    Ok((
        download(client, &codes, len / 2)?,
        download(client, &scales, len / BLOCK)?,
    ))
}

/// Copies rows of `k` `values` to the device, several at a time; each item has the number of rows
/// before it.
pub(super) fn parts(
    client: &Client,
    values: &[f32],
    k: usize,
) -> impl Iterator<Item = (usize, Matrix)> {
    let rows = (PART / k).max(1);
    values
        .chunks(rows * k)
        .enumerate()
        .map(move |(part, values)| {
            let matrix = Matrix {
                handle: client.create(Bytes::from_elems(values.to_vec())),
                rows: values.len() / k,
                cols: k,
                dtype: FloatKind::F32,
            };
            (part * rows, matrix)
        })
}

/// Checks the values of a weight `[n, k]` of whole blocks, and the error weights of its `k` features.
///
/// # Errors
/// Returns an error that names the argument.
pub(super) fn check(values: &[f32], weights: &[f32]) -> Result<(), Nvfp4Error> {
    let k = weights.len();
    if k == 0 || !k.is_multiple_of(BLOCK) {
        return Err(Nvfp4Error::shape(
            "weights",
            format!("{k} features"),
            format!("a positive multiple of {BLOCK}"),
        ));
    }
    if !values.len().is_multiple_of(k) {
        return Err(Nvfp4Error::shape(
            "values",
            format!("{} values", values.len()),
            format!("rows of {k}"),
        ));
    }
    Ok(())
}

/// Blocks of some rows of a weight.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct PartBlocks {
    /// Number of blocks before these.
    first: usize,
    /// Number of these.
    count: usize,
    /// Blocks per row.
    per_row: usize,
}

/// Each unit quantizes every `units`-th block.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn round_rows_kernel(
    values: &[f32],
    weights: &[f32],
    codes: &mut [u32],
    scales: &mut [u8],
    global: Global,
    blocks: PartBlocks,
    #[comptime] plan: BlockPlan,
) {
    let mut item = ABSOLUTE_POS;
    while item < blocks.count {
        let column = item % blocks.per_row;
        let mut block = Array::<f32>::new(BLOCK);
        let mut of_block = Array::<f32>::new(BLOCK);
        #[unroll]
        for i in 0..BLOCK {
            block[i] = values[item * BLOCK + i];
            of_block[i] = weights[column * BLOCK + i];
        }
        let byte = scale_byte(&block, &of_block, &global, plan);
        let scaled = ScaledBlock::new(byte, &global, plan);
        #[unroll]
        for word in 0..2usize {
            let mut packed = 0u32;
            #[unroll]
            for i in 0..8usize {
                let code = scaled.code(block[comptime!(8 * word + 7 - i)], plan);
                packed = packed * 16u32 + code;
            }
            codes[(blocks.first + item) * 2usize + word] = packed;
        }
        scales[blocks.first + item] = u8::cast_from(byte);
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}
