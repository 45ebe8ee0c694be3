//! Weights whose blocks are quantized independently.

use cubecl::prelude::*;
use nvfp4_formats::ptq::BlockQuantizer;

use super::block::{BlockPlan, Global, ScaledBlock, scale_byte};
use crate::{
    BLOCK, Nvfp4Error,
    capabilities::conversion_of,
    launch::{buffer, grid},
    memory::{address_type, allocate, download, upload},
    tensor::{FloatKind, Matrix},
};

/// Returns the codes and scale bytes of `values` (`f32[n, k]`), with each block quantized
/// independently: [`nvfp4_formats::ptq::round_rows`]. `weights` are the `E[x²]` of the `k` input
/// features. Waits for the device.
///
/// # Errors
/// Returns an error if the type, the width or the number of weights does not match, or the rule of
/// `quantizer` has no kernel.
pub fn round_rows(
    client: &Client,
    values: &Matrix,
    quantizer: &BlockQuantizer,
    weights: &[f32],
) -> Result<(Vec<u8>, Vec<u8>), Nvfp4Error> {
    let plan = BlockPlan::new(quantizer, conversion_of(client))?;
    check(values, weights)?;
    let (len, k) = (values.len(), values.cols);
    let codes = allocate(client, len / 2);
    let scales = allocate(client, len / BLOCK);
    if len == 0 {
        return Ok((vec![], vec![]));
    }
    let (count, dim) = grid(client, len / BLOCK);
    // SAFETY: the values were checked; codes and scales have room for all blocks.
    unsafe {
        round_rows_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(len),
            buffer(&values.handle, len),
            buffer(&upload(client, bytemuck::cast_slice(weights)), k),
            buffer(&codes, len / 8),
            buffer(&scales, len / BLOCK),
            Global::arg(quantizer),
            len / BLOCK,
            k / BLOCK,
            plan,
        );
    }
    Ok((
        download(client, &codes, len / 2)?,
        download(client, &scales, len / BLOCK)?,
    ))
}

/// Checks a weight `f32[n, k]` of whole blocks, and the error weights of its features.
///
/// # Errors
/// Returns an error that names the argument.
pub(super) fn check(values: &Matrix, weights: &[f32]) -> Result<(), Nvfp4Error> {
    values.check("values")?;
    if values.dtype != FloatKind::F32 || !values.cols.is_multiple_of(BLOCK) {
        return Err(Nvfp4Error::shape(
            "values",
            format!("{:?} of width {}", values.dtype, values.cols),
            format!("F32 of a width that is a multiple of {BLOCK}"),
        ));
    }
    if weights.len() != values.cols {
        return Err(Nvfp4Error::shape(
            "weights",
            format!("{} weights", weights.len()),
            values.cols.to_string(),
        ));
    }
    Ok(())
}

/// Each unit quantizes every `units`-th block.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn round_rows_kernel(
    values: &[f32],
    weights: &[f32],
    codes: &mut [u32],
    scales: &mut [u8],
    global: Global,
    blocks: usize,
    row_blocks: usize,
    #[comptime] plan: BlockPlan,
) {
    let mut item = ABSOLUTE_POS;
    while item < blocks {
        let column = item % row_blocks;
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
            codes[item * 2usize + word] = packed;
        }
        scales[item] = u8::cast_from(byte);
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}
