//! GPTQ: compensates the rounding error of each column in the following columns; see
//! [`nvfp4_formats::ptq::gptq()`].
//!
//! The weight is transposed, so that neighbouring units hold neighbouring rows of it. A panel of
//! [`PANEL`] columns is quantized by one kernel, in which a unit processes a row of the weight.
//! Then a product subtracts the panel's errors from the columns after it.

use cubecl::{prelude::*, server::Handle};
use nvfp4_formats::ptq::BlockQuantizer;

use super::block::{BlockPlan, Global, ScaledBlock, scale_byte};
use super::factor::InverseFactor;
use super::products::{Factors, Product, Target, subtract_products};
use super::round::{check, parts};
use crate::{
    BLOCK, Nvfp4Error,
    capabilities::conversion_of,
    cube::exact::product_f64,
    launch::{buffer, grid},
    memory::{address_type, allocate, download, upload},
};

/// Number of columns whose errors are applied together to the columns after them.
const PANEL: usize = 128;

/// Returns the codes and scale bytes of `values` (`[n, k]`), whose inputs have the second moments
/// of `factor`: [`nvfp4_formats::ptq::gptq()`]. `weights` are the `E[x²]` of the `k` input features.
/// Waits for the device.
///
/// # Errors
/// Returns an error if `k` is not a positive multiple of 16 or not that of `factor`, the values are
/// not whole rows, or the rule of `quantizer` has no kernel.
pub fn gptq(
    client: &Client,
    values: &[f32],
    factor: &InverseFactor,
    quantizer: &BlockQuantizer,
    weights: &[f32],
) -> Result<(Vec<u8>, Vec<u8>), Nvfp4Error> {
    let plan = BlockPlan::new(quantizer, conversion_of(client))?;
    check(values, weights)?;
    let (n, k) = (values.len() / weights.len(), weights.len());
    if factor.k() != k {
        let found = format!("of {} features", factor.k());
        return Err(Nvfp4Error::shape("factor", found, k.to_string()));
    }
    let len = n * k;
    if len == 0 {
        return Ok((vec![], vec![]));
    }
    let columns = transposed(client, values, k);
    let weights = upload(client, bytemuck::cast_slice(weights));
    let codes = allocate(client, len / 2);
    let scales = allocate(client, len / BLOCK);
    let errors = allocate(client, 8 * PANEL * n);
    for start in (0..k).step_by(PANEL) {
        let end = (start + PANEL).min(k);
        let (count, dim) = grid(client, n);
        // SAFETY: all buffers have room for the n rows and k columns, or the panel's.
        unsafe {
            compensate_panel_kernel::launch_unchecked(
                client,
                count,
                dim,
                address_type(len.max(k * k)),
                buffer(factor.rows().handle, k * k),
                buffer(&weights, k),
                buffer(&columns, len),
                PanelOutLaunch::new(
                    buffer(&errors, PANEL * n),
                    buffer(&codes, len / 8),
                    buffer(&scales, len / BLOCK),
                ),
                PanelColumnsLaunch::new(n, k, start, end),
                Global::arg(quantizer),
                plan,
            );
        }
        let product = Product {
            left: Factors {
                first: start * k + end,
                ..factor.rows()
            },
            right: Factors {
                handle: &errors,
                len: PANEL * n,
                first: 0,
                stride: n,
            },
            depth: end - start,
            target: Target {
                handle: &columns,
                len,
                first: end * n,
                stride: n,
                rows: k - end,
                cols: n,
                upper: false,
            },
        };
        subtract_products(client, &product);
    }
    Ok((
        download(client, &codes, len / 2)?,
        download(client, &scales, len / BLOCK)?,
    ))
}

/// Returns the columns of `values` (`[n, k]`) as rows, `f64[k, n]`.
fn transposed(client: &Client, values: &[f32], k: usize) -> Handle {
    let (len, n) = (values.len(), values.len() / k);
    let columns = allocate(client, 8 * len);
    for (first, part) in parts(client, values, k) {
        let (count, dim) = grid(client, part.len());
        // SAFETY: the part was allocated, and its rows are among those of the columns.
        unsafe {
            transpose_to_f64_kernel::launch_unchecked(
                client,
                count,
                dim,
                address_type(len),
                buffer(&part.handle, part.len()),
                buffer(&columns, len),
                first,
                part.rows,
                k,
                n,
            );
        }
    }
    columns
}

/// Each unit converts every `units`-th element of the `rows`, of all `n` those after the first
/// `first`.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn transpose_to_f64_kernel(
    values: &[f32],
    columns: &mut [f64],
    first: usize,
    rows: usize,
    cols: usize,
    n: usize,
) {
    let mut item = ABSOLUTE_POS;
    while item < rows * cols {
        let row = item % rows;
        let col = item / rows;
        columns[col * n + first + row] = f64::cast_from(values[row * cols + col]);
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Outputs of a panel.
#[derive(CubeType, CubeLaunch)]
pub struct PanelOut {
    /// Errors of the panel's columns, `[128, n]`.
    errors: Box<[f64]>,
    /// Codes of the weight, eight per word.
    codes: Box<[u32]>,
    /// Scale bytes of the weight.
    scales: Box<[u8]>,
}

/// Shape of the weight, and columns of a panel.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct PanelColumns {
    n: usize,
    k: usize,
    start: usize,
    end: usize,
}

/// Each unit quantizes the panel's columns of every `units`-th row of the weight, block by block.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn compensate_panel_kernel(
    upper: &[f64],
    weights: &[f32],
    columns: &mut [f64],
    mut out: PanelOut,
    shape: PanelColumns,
    global: Global,
    #[comptime] plan: BlockPlan,
) {
    let n = shape.n;
    let k = shape.k;
    let mut row = ABSOLUTE_POS;
    while row < n {
        let mut first = shape.start;
        while first < shape.end {
            let mut w = Array::<f64>::new(BLOCK);
            let mut block = Array::<f32>::new(BLOCK);
            let mut of_block = Array::<f32>::new(BLOCK);
            #[unroll]
            for i in 0..BLOCK {
                w[i] = columns[(first + i) * n + row];
                block[i] = f32::cast_from(w[i]);
                of_block[i] = weights[first + i];
            }
            let byte = scale_byte(&block, &of_block, &global, plan);
            let scaled = ScaledBlock::new(byte, &global, plan);
            let stored = (row * k + first) / BLOCK;
            out.scales[stored] = u8::cast_from(byte);
            let mut packed = Array::<u32>::new(2usize);
            packed[0] = 0u32;
            packed[1] = 0u32;
            // Becomes the error of each column.
            #[unroll]
            for j in 0..BLOCK {
                let code = scaled.code(f32::cast_from(w[j]), plan);
                packed[comptime!(j / 8)] |= code << comptime!(4 * (j % 8) as u32);
                let of_row = (first + j) * k + first;
                let error = (w[j] - f64::cast_from(scaled.value(code))) / upper[of_row + j];
                w[j] = error;
                out.errors[(first - shape.start + j) * n + row] = error;
                #[unroll]
                for later in comptime!(j + 1)..BLOCK {
                    w[later] -= product_f64(error, upper[of_row + later], plan.conversion);
                }
            }
            out.codes[stored * 2usize] = packed[0];
            out.codes[stored * 2usize + 1usize] = packed[1];
            let mut column = first + BLOCK;
            while column < shape.end {
                let mut value = columns[column * n + row];
                #[unroll]
                for j in 0..BLOCK {
                    let factor = upper[(first + j) * k + column];
                    value -= product_f64(w[j], factor, plan.conversion);
                }
                columns[column * n + row] = value;
                column += 1usize;
            }
            first += BLOCK;
        }
        row += CUBE_COUNT * CUBE_DIM as usize;
    }
}
