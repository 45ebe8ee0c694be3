//! GPTQ: compensates the rounding error of each column in the following columns.
//!
//! With H = `E[x xᵀ]` of the layer's input and H⁻¹ = Uᵀ U, quantizing column j of the weight with
//! error e changes the output least if the columns m > j move by −e U(j, m) / U(j, j) (Frantar et
//! al., arXiv 2210.17323). The scale of a block is chosen when its first column is reached, from
//! the weights at that point. Columns keep their order.

use rayon::prelude::*;

use super::BlockQuantizer;
use super::linalg::{inverse_upper_factor, subtract_products};
use crate::format::{e2m1, e4m3};
use crate::{BLOCK, Nvfp4Error, with_fma};

/// Rows per task: they share every row of U that is read.
const ROWS: usize = 32;
/// Number of columns whose errors are applied together to the rest of the row, and width of the
/// panels of that rest. The working set of U and of the rows fits in the caches.
const PANEL: usize = 128;
const TILE: usize = 256;

/// Damping of the authors: this fraction of the mean of H's diagonal is added to the diagonal.
pub const DAMPING: f64 = 0.01;

/// The upper triangular factor U of the inverse of an input's second moments.
#[derive(Debug, Clone)]
pub struct InverseFactor {
    k: usize,
    upper: Vec<f64>,
}

impl InverseFactor {
    /// Computes the factor for inputs with the second moments `hessian` `[k, k]`, after `damping`
    /// times the mean of their diagonal is added to it; see [`damped_diagonal`].
    ///
    /// # Errors
    /// Returns an error if the damped Hessian is not positive definite, which means that it has
    /// values that are not finite.
    pub fn new(mut hessian: Vec<f64>, k: usize, damping: f64) -> Result<Self, Nvfp4Error> {
        let diagonal: Vec<f64> = (0..k).map(|i| hessian[i * k + i]).collect();
        for (i, damped) in damped_diagonal(&diagonal, damping).into_iter().enumerate() {
            hessian[i * k + i] = damped;
        }
        let upper = inverse_upper_factor(&hessian, k)?;
        Ok(Self { k, upper })
    }

    /// Returns U `[k, k]`, row-major.
    pub fn upper(&self) -> &[f64] {
        &self.upper
    }
}

/// Returns the codes and scale bytes of the weight `values` `[n, k]`, whose inputs have the second
/// moments of `factor`. `weights` are `E[x²]`, the error weights in the search for block scales.
pub fn gptq(
    values: &[f32],
    factor: &InverseFactor,
    quantizer: &BlockQuantizer,
    weights: &[f32],
) -> (Vec<u8>, Vec<u8>) {
    let k = factor.k;
    let parts: Vec<(Vec<u8>, Vec<u8>)> = values
        .par_chunks(ROWS * k)
        .map(|rows| quantize_rows(rows, k, quantizer, &factor.upper, weights))
        .collect();
    let (codes, scales): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
    (codes.concat(), scales.concat())
}

/// Returns the `diagonal` of second moments, plus `damping` times its mean. An input that was always
/// zero gets 1 there before, so that its column is rounded to nearest.
pub fn damped_diagonal(diagonal: &[f64], damping: f64) -> Vec<f64> {
    let mean = diagonal.iter().sum::<f64>() / diagonal.len() as f64;
    let damped = diagonal.iter().map(|&moment| {
        let moment = if moment == 0.0 { 1.0 } else { moment };
        moment + damping * mean
    });
    damped.collect()
}

with_fma!(
    fn quantize_rows(
        values: &[f32],
        k: usize,
        quantizer: &BlockQuantizer,
        upper: &[f64],
        weights: &[f32],
    ) -> (Vec<u8>, Vec<u8>) = quantize_rows_body
);

#[inline(always)]
fn quantize_rows_body(
    values: &[f32],
    k: usize,
    quantizer: &BlockQuantizer,
    upper: &[f64],
    weights: &[f32],
) -> (Vec<u8>, Vec<u8>) {
    let rows = values.len() / k;
    let mut w: Vec<f64> = values.iter().map(|&value| f64::from(value)).collect();
    let mut codes = vec![0; values.len() / 2];
    let mut scales = vec![0; values.len() / BLOCK];
    let mut errors = vec![0.0; rows * PANEL];
    for start in (0..k).step_by(PANEL) {
        let end = (start + PANEL).min(k);
        for row in 0..rows {
            let w = &mut w[row * k..(row + 1) * k];
            let errors = &mut errors[row * PANEL..(row + 1) * PANEL];
            for block in (start..end).step_by(BLOCK) {
                let now: [f32; BLOCK] = std::array::from_fn(|i| w[block + i] as f32);
                let of_block = weights[block..].first_chunk().expect("k is whole blocks");
                let byte = quantizer.scale_byte(&now, of_block);
                scales[(row * k + block) / BLOCK] = byte;
                let scale = e4m3::decode(byte) * quantizer.global.decode();
                for j in block..block + BLOCK {
                    // Quantized as the only element of its block: elements are independent here.
                    let code = quantizer.rule.codes(&[w[j] as f32], byte, quantizer.global)[0];
                    codes[(row * k + j) / 2] |= code << (4 * (j % 2));
                    let u = &upper[j * k..(j + 1) * k];
                    let error = (w[j] - f64::from(e2m1::decode(code) * scale)) / u[j];
                    errors[j - start] = error;
                    for (w, u) in w[j + 1..end].iter_mut().zip(&u[j + 1..end]) {
                        *w -= error * u;
                    }
                }
            }
        }
        for tile in (end..k).step_by(TILE) {
            let tile = tile..(tile + TILE).min(k);
            for row in 0..rows {
                let errors = &errors[row * PANEL..][..end - start];
                let w = &mut w[row * k..(row + 1) * k][tile.clone()];
                subtract_products(w, errors, &upper[start * k + tile.start..], k);
            }
        }
    }
    (codes, scales)
}
