//! GEMM of two packed operands.

use rayon::prelude::*;

use super::{
    decode_blocks,
    dequantize::{compact_scales, decode_rows, transpose},
    panels::panels,
    scaling::SCALE_RANGE,
};
use crate::{BLOCK, Nvfp4Error, QuantizedTensor};

/// Returns the factor of a GEMM whose operands have the given amax values and standard scales:
/// `fl(fl(a / 2688) · fl(b / 2688))`.
#[inline]
pub fn alpha(amax_a: f32, amax_b: f32) -> f32 {
    (amax_a / SCALE_RANGE) * (amax_b / SCALE_RANGE)
}

/// Computes `out[m, n] = fl(fl(alpha · acc) + bias[n])` in `f32`. `acc` is the sum of
/// `a[m, k] · b[n, k]` over `k`, and `alpha = fl(fl(amax_a / range_a) · fl(amax_b / range_b))` for
/// stored row `m` of `a` and `n` of `b` (numerics, sections 5 and 12).
///
/// The summation order is fixed: `k` ascends from 0 through the padding, one addition at a time,
/// from an accumulator of +0. Each product of decoded elements is exact, so a fused multiply-add
/// gives the same sum. Other paths use other orders and are tested against an error bound.
///
/// # Errors
/// Returns an error if the operands differ in K, before or after padding to the size of a
/// transform, or `bias` does not have one value per column.
pub fn gemm_f32(
    a: &QuantizedTensor,
    b: &QuantizedTensor,
    bias: Option<&[f32]>,
) -> Result<Vec<f32>, Nvfp4Error> {
    let (m, n, _) = check(a, b, bias)?;
    let mut out = vec![0f32; m * n];
    add_products(a, b, &mut out, |acc, x, y| *acc += x * y);
    out.par_chunks_mut(n.max(1))
        .enumerate()
        .for_each(|(row, out)| {
            for (col, acc) in out.iter_mut().enumerate() {
                let scaled = *acc * (factor(a, row) * factor(b, col));
                *acc = bias.map_or(scaled, |bias| scaled + bias[col]);
            }
        });
    Ok(out)
}

/// Adds `a[m, k] · b[n, k]` to each element of `out`, with ascending `k`. Decodes one panel of `b`
/// at a time.
fn add_products<T: Send>(
    a: &QuantizedTensor,
    b: &QuantizedTensor,
    out: &mut [T],
    add: impl Fn(&mut T, f32, f32) + Sync,
) {
    let (n, k) = (b.outer(), b.blocks() * BLOCK);
    let left = decode_blocks(a);
    let scales = compact_scales(b);
    for panel in panels(n, k) {
        let right = decode_rows(b, &scales, panel.clone());
        let right = transpose(&right, panel.len(), k);
        out.par_chunks_mut(n.max(1))
            .enumerate()
            .for_each(|(row, out)| {
                let right = right.chunks_exact(panel.len().max(1));
                for (&x, right) in left[row * k..][..k].iter().zip(right) {
                    for (acc, &y) in out[panel.clone()].iter_mut().zip(right) {
                        add(acc, x, y);
                    }
                }
            });
    }
}

/// Computes [`gemm_f32`] in `f64`, including `alpha`: the exact result that the `f32` paths
/// approximate.
///
/// # Errors
/// Returns the errors of [`gemm_f32`].
pub fn gemm_f64(
    a: &QuantizedTensor,
    b: &QuantizedTensor,
    bias: Option<&[f32]>,
) -> Result<Vec<f64>, Nvfp4Error> {
    let (m, n, _) = check(a, b, bias)?;
    let factor = |x: &QuantizedTensor, outer| x.amax().of(outer) as f64 / x.range() as f64;
    let mut out = vec![0f64; m * n];
    add_products(a, b, &mut out, |acc, x, y| *acc += x as f64 * y as f64);
    out.par_chunks_mut(n.max(1))
        .enumerate()
        .for_each(|(row, out)| {
            for (col, acc) in out.iter_mut().enumerate() {
                *acc *= factor(a, row) * factor(b, col);
                *acc += bias.map_or(0.0, |bias| bias[col] as f64);
            }
        });
    Ok(out)
}

/// Returns the contribution of an operand's stored row `outer` to `alpha`.
fn factor(operand: &QuantizedTensor, outer: usize) -> f32 {
    operand.amax().of(outer) / operand.range()
}

fn check(
    a: &QuantizedTensor,
    b: &QuantizedTensor,
    bias: Option<&[f32]>,
) -> Result<(usize, usize, usize), Nvfp4Error> {
    if a.inner() != b.inner() {
        return Err(Nvfp4Error::shape(
            "b",
            format!("{} x {} (stored)", b.outer(), b.inner()),
            format!("a contraction of {}, that of `a`", a.inner()),
        ));
    }
    if a.layout().hadamard != b.layout().hadamard {
        return Err(Nvfp4Error::value(
            "b",
            format!("{:?}", b.layout().hadamard),
            format!("the transform of `a`, {:?}", a.layout().hadamard),
        ));
    }
    if let Some(bias) = bias
        && bias.len() != b.outer()
    {
        return Err(Nvfp4Error::shape(
            "bias",
            format!("{}", bias.len()),
            format!("{}", b.outer()),
        ));
    }
    Ok((a.outer(), b.outer(), a.blocks() * BLOCK))
}
