//! Softmax cross entropy of rows of logits, and its gradient; also a natural logarithm with
//! identical bits on every device.
//!
//! The order of every sum is fixed. A row is split into blocks of 8 logits. Block `b` belongs to
//! lane `b % lanes` ([`cross_entropy_lanes`]), which processes its blocks in ascending order with a
//! running maximum and a sum of exponentials that is rescaled with each block. The lanes' sums,
//! each times `e^(its maximum - the row's)`, are then added in a tree: neighbors first, then
//! neighboring pairs, and so on.
//!
//! Kernels with another exponential (CUDA's, within 2 ulps) differ from the reference only by that
//! exponential.

use rayon::prelude::*;

use super::{
    Element, exp_of_negative,
    simd::{rows_per_task, with_fma},
};

/// Elements per block.
pub(super) const BLOCK: usize = 8;
/// Partial sums of the losses of rows.
pub const LOSS_LANES: usize = 1024;

/// Reduction of the losses of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum Reduction {
    /// Sum divided by the number of rows that are not ignored; 0 if there are none.
    #[default]
    Mean,
    /// Sum of the losses.
    Sum,
}

/// Softmax cross entropy with class indices as targets.
///
/// With `lse = ln(Σ e^x)`, the loss of a row `x` with target `t` is the sum of
/// `(1 - smoothing) (lse - x[t])`, `smoothing (lse - mean(x))` and `z_loss lse²`. A row whose
/// target is [`ignore`](Self::ignore) has a loss and a gradient of 0, and is not counted. Any other
/// target that is not a class gives a loss and a gradient of NaN.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CrossEntropy {
    /// Target of rows that are ignored.
    pub ignore: i32,
    /// Label smoothing: share of the probability that is spread over all classes, from 0 to 1.
    pub smoothing: f32,
    /// Factor of the squared log-sum-exp, at least 0.
    pub z_loss: f32,
    /// Reduction of the losses of rows.
    pub reduction: Reduction,
}

impl Default for CrossEntropy {
    /// Returns PyTorch's defaults: targets of -100 are ignored, no smoothing, no z-loss, mean.
    fn default() -> Self {
        Self {
            ignore: -100,
            smoothing: 0.0,
            z_loss: 0.0,
            reduction: Reduction::Mean,
        }
    }
}

impl CrossEntropy {
    /// Checks the ranges of the parameters.
    ///
    /// # Errors
    /// Returns an error if the smoothing is not within 0 and 1, or the factor of the z-loss is
    /// negative or not finite.
    pub fn check(&self) -> Result<(), crate::Nvfp4Error> {
        if !(0.0..=1.0).contains(&self.smoothing) {
            return Err(crate::Nvfp4Error::value(
                "smoothing",
                format!("{}", self.smoothing),
                "a number from 0 to 1",
            ));
        }
        if !(self.z_loss >= 0.0 && self.z_loss.is_finite()) {
            return Err(crate::Nvfp4Error::value(
                "z_loss",
                format!("{}", self.z_loss),
                "a finite number that is not negative",
            ));
        }
        Ok(())
    }
}

/// Returns the number of lanes that share the blocks of a row: one plane for short rows, so that
/// several rows fit in a cube.
pub const fn cross_entropy_lanes(vocab: usize) -> usize {
    if vocab <= 2048 {
        32
    } else if vocab <= 65536 {
        512
    } else {
        1024
    }
}

/// Polynomial of [`ln`], highest power first.
pub const LN_POLYNOMIAL: [f32; 9] = [
    7.037_683_6e-2,
    -1.151_461e-1,
    1.167_699_9e-1,
    -1.242_014_1e-1,
    1.424_932_3e-1,
    -1.666_805_8e-1,
    2.000_071_5e-1,
    -2.499_999_4e-1,
    3.333_333e-1,
];
/// Upper part of `ln 2`, with few bits.
pub const LN_2_HIGH: f32 = 0.693_359_4;
/// Remainder of `ln 2` after [`LN_2_HIGH`].
pub const LN_2_LOW: f32 = -2.121_944_4e-4;
/// `sqrt(1/2)`.
pub const SQRT_HALF: f32 = std::f32::consts::FRAC_1_SQRT_2;

/// Returns the natural logarithm of a normal positive number, within 2 ulps; NaN stays NaN. Cephes'
/// polynomial, by fused multiply-adds.
#[inline(always)]
pub fn ln(x: f32) -> f32 {
    if x.is_nan() {
        return x;
    }
    let bits = x.to_bits();
    let exponent = (bits >> 23) as i32 - 126;
    let mantissa = f32::from_bits((bits & 0x007F_FFFF) | 0x3F00_0000);
    let small = mantissa < SQRT_HALF;
    let exponent = (exponent - i32::from(small)) as f32;
    let r = if small {
        (mantissa + mantissa) - 1.0
    } else {
        mantissa - 1.0
    };
    let square = r * r;
    let mut y = LN_POLYNOMIAL[0];
    for coefficient in &LN_POLYNOMIAL[1..] {
        y = y.mul_add(r, *coefficient);
    }
    let y = exponent.mul_add(LN_2_LOW, (y * r) * square);
    let y = square.mul_add(-0.5, y);
    exponent.mul_add(LN_2_HIGH, r + y)
}

/// Losses of rows, total loss, and gradient.
#[derive(Debug, Clone, PartialEq)]
pub struct CrossEntropyResult<T> {
    /// Loss of each row, not scaled.
    pub rows: Vec<f32>,
    /// Total loss.
    pub loss: f32,
    /// Gradient of the loss with respect to the logits.
    pub gradient: Vec<T>,
}

/// Returns the factor of the losses and gradients of rows: 1 for the sum, `1 / count` for the mean,
/// or 0 if no row is counted.
pub fn target_scale(targets: &[i32], params: &CrossEntropy) -> f32 {
    if params.reduction == Reduction::Sum {
        return 1.0;
    }
    let counted = targets.iter().filter(|target| **target != params.ignore);
    match counted.count() {
        0 => 0.0,
        count => 1.0 / count as f32,
    }
}

/// Sums the losses of rows and multiplies by `scale`. Row `r` is added to partial sum `r % 1024`,
/// rows ascending; the partial sums are added in a tree, `s[i] += s[i + 512]`, then `+ 256` and so
/// on.
pub fn sum_losses(rows: &[f32], scale: f32) -> f32 {
    let mut sums = [0f32; LOSS_LANES];
    for (row, loss) in rows.iter().enumerate() {
        sums[row % LOSS_LANES] += loss;
    }
    let mut len = LOSS_LANES / 2;
    while len > 0 {
        for i in 0..len {
            sums[i] += sums[i + len];
        }
        len /= 2;
    }
    sums[0] * scale
}

/// Computes the cross entropy of `logits`, `targets.len()` rows of `vocab`, and its gradient.
///
/// # Panics
/// Panics if `logits` does not have one element per target and class, or there are rows without a
/// class.
pub fn cross_entropy<T: Element + Default>(
    logits: &[T],
    targets: &[i32],
    vocab: usize,
    params: &CrossEntropy,
) -> CrossEntropyResult<T> {
    let scale = target_scale(targets, params);
    let mut gradient = logits.to_vec();
    let rows = cross_entropy_rows(&mut gradient, targets, vocab, params, Some(scale));
    CrossEntropyResult {
        loss: sum_losses(&rows, scale),
        rows,
        gradient,
    }
}

/// Computes the losses of the rows of `logits`. If `scale` is given, the logits are replaced by
/// their gradient times `scale`.
///
/// # Panics
/// Panics like [`cross_entropy`].
pub fn cross_entropy_rows<T: Element>(
    logits: &mut [T],
    targets: &[i32],
    vocab: usize,
    params: &CrossEntropy,
    scale: Option<f32>,
) -> Vec<f32> {
    assert_eq!(
        logits.len(),
        targets.len() * vocab,
        "`logits` must hold rows * vocab elements"
    );
    if targets.is_empty() {
        return Vec::new();
    }
    assert!(vocab > 0, "`logits` must have a class");
    logits
        .par_chunks_mut(vocab)
        .zip(targets)
        .with_min_len(rows_per_task(vocab))
        .map(|(row, target)| cross_entropy_row(row, *target, params, scale))
        .collect()
}

/// A running maximum, the sum of exponentials relative to it, and the sum of the values.
#[derive(Clone, Copy)]
pub(super) struct Lane {
    pub max: f32,
    pub sum: f32,
    pub total: f32,
}

with_fma!(
    fn cross_entropy_row[T: Element](
        row: &mut [T],
        target: i32,
        params: &CrossEntropy,
        scale: Option<f32>,
    ) -> f32 = cross_entropy_row_body
);

#[inline(always)]
fn cross_entropy_row_body<T: Element>(
    row: &mut [T],
    target: i32,
    params: &CrossEntropy,
    scale: Option<f32>,
) -> f32 {
    if target == params.ignore {
        if scale.is_some() {
            row.fill(T::from_f32(0.0));
        }
        return 0.0;
    }
    let vocab = row.len();
    let whole = fold_row(row);
    let lse = whole.max + ln(whole.sum);
    let valid = usize::try_from(target).is_ok_and(|target| target < vocab);
    if !valid {
        if scale.is_some() {
            row.fill(T::from_f32(f32::NAN));
        }
        return f32::NAN;
    }
    let target = target as usize;
    let (smoothing, kept) = (params.smoothing, 1.0 - params.smoothing);
    let spread = 1.0 / vocab as f32;
    let mut loss = kept * (lse - row[target].to_f32());
    if smoothing > 0.0 {
        loss = smoothing.mul_add(whole.total.mul_add(-spread, lse), loss);
    }
    let loss = (params.z_loss * lse).mul_add(lse, loss);
    if let Some(scale) = scale {
        let by_lse = (2.0 * params.z_loss).mul_add(lse, 1.0);
        let factor = (by_lse * scale) * (1.0 / whole.sum);
        let uniform = (smoothing * spread) * scale;
        let gradient = |value: T| {
            let e = exp_of_negative(value.to_f32() - whole.max);
            e.mul_add(factor, -uniform)
        };
        let of_target = gradient(row[target]) - kept * scale;
        for value in row.iter_mut() {
            *value = T::from_f32(gradient(*value));
        }
        row[target] = T::from_f32(of_target);
    }
    loss
}

/// Computes the lanes of a row, and combines them.
#[inline(always)]
fn fold_row<T: Element>(row: &[T]) -> Lane {
    let count = cross_entropy_lanes(row.len());
    let start = Lane {
        max: f32::MIN,
        sum: 0.0,
        total: 0.0,
    };
    let mut lanes = vec![start; count];
    for (b, block) in row.chunks(BLOCK).enumerate() {
        let lane = &mut lanes[b % count];
        let mut values = [f32::NEG_INFINITY; BLOCK];
        let mut addends = [0f32; BLOCK];
        for ((value, addend), x) in values.iter_mut().zip(&mut addends).zip(block) {
            *value = x.to_f32();
            *addend = *value;
        }
        let max = values.iter().fold(lane.max, |max, value| max.max(*value));
        let sum = tree(&mut exponentials(values, max));
        lane.sum = lane.sum.mul_add(exp_of_negative(lane.max - max), sum);
        lane.max = max;
        lane.total += tree(&mut addends);
    }
    let max = lanes.iter().fold(f32::MIN, |max, lane| max.max(lane.max));
    let (mut sums, mut totals) = (vec![0f32; count], vec![0f32; count]);
    for ((sum, total), lane) in sums.iter_mut().zip(&mut totals).zip(&lanes) {
        *sum = lane.sum * exp_of_negative(lane.max - max);
        *total = lane.total;
    }
    Lane {
        max,
        sum: tree(&mut sums),
        total: tree(&mut totals),
    }
}

/// Returns the exponentials of values relative to their maximum.
#[inline(always)]
pub(super) fn exponentials(mut values: [f32; BLOCK], max: f32) -> [f32; BLOCK] {
    for value in &mut values {
        *value = exp_of_negative(*value - max);
    }
    values
}

/// Sums a power of two of values in a tree: neighbors, then neighboring pairs, and so on.
#[inline(always)]
pub(super) fn tree(values: &mut [f32]) -> f32 {
    let mut len = values.len();
    while len > 1 {
        len /= 2;
        for i in 0..len {
            values[i] = values[2 * i] + values[2 * i + 1];
        }
    }
    values[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithm_is_within_two_units() {
        let mut worst = 0f64;
        for bits in (0x3F00_0000u32..0x4880_0000).step_by(1013) {
            let x = f32::from_bits(bits);
            let expected = (x as f64).ln();
            let unit = 2f64.powi(expected.abs().max(1e-30).log2().floor() as i32 - 23);
            worst = worst.max((ln(x) as f64 - expected).abs() / unit);
        }
        assert!(worst <= 2.0, "{worst}");
        assert_eq!(ln(1.0), 0.0);
        assert!(ln(f32::NAN).is_nan());
    }

    /// Compares loss and gradient with `f64`, by the formula and by finite differences.
    #[test]
    fn gradient_is_that_of_the_loss() {
        let (rows, vocab) = (5, 37);
        let logits: Vec<f32> = (0..rows * vocab)
            .map(|i| ((i * 7919 % 1000) as f32 / 100.0) - 5.0)
            .collect();
        let targets = [0, 36, -100, 7, 20];
        for params in [
            CrossEntropy::default(),
            CrossEntropy {
                smoothing: 0.1,
                z_loss: 1e-2,
                ..CrossEntropy::default()
            },
            CrossEntropy {
                reduction: Reduction::Sum,
                ..CrossEntropy::default()
            },
        ] {
            let found = cross_entropy(&logits, &targets, vocab, &params);
            let loss = |x: &[f64]| exact_loss(x, &targets, vocab, &params);
            let wide: Vec<f64> = logits.iter().map(|x| *x as f64).collect();
            assert!((found.loss as f64 - loss(&wide)).abs() < 1e-5);
            for i in 0..wide.len() {
                let (mut up, mut down) = (wide.clone(), wide.clone());
                up[i] += 1e-5;
                down[i] -= 1e-5;
                let slope = (loss(&up) - loss(&down)) / 2e-5;
                assert!((found.gradient[i] as f64 - slope).abs() < 2e-6, "{i}");
            }
        }
    }

    fn exact_loss(x: &[f64], targets: &[i32], vocab: usize, params: &CrossEntropy) -> f64 {
        let (mut sum, mut count) = (0f64, 0f64);
        for (row, target) in x.chunks(vocab).zip(targets) {
            if *target == params.ignore {
                continue;
            }
            let max = row.iter().fold(f64::MIN, |a, b| a.max(*b));
            let lse = max + row.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
            let mean = row.iter().sum::<f64>() / vocab as f64;
            let smoothing = params.smoothing as f64;
            sum += (1.0 - smoothing) * (lse - row[*target as usize])
                + smoothing * (lse - mean)
                + params.z_loss as f64 * lse * lse;
            count += 1.0;
        }
        match params.reduction {
            Reduction::Mean => sum / count,
            Reduction::Sum => sum,
        }
    }

    #[test]
    fn rows_without_a_target_and_wrong_targets() {
        let logits = [1f32, 2.0, 3.0, 4.0];
        let ignored = cross_entropy(&logits, &[-100, -100], 2, &CrossEntropy::default());
        assert_eq!((ignored.loss, ignored.gradient), (0.0, vec![0.0; 4]));
        for wrong in [2, -1] {
            let found = cross_entropy(&logits, &[0, wrong], 2, &CrossEntropy::default());
            assert!(found.loss.is_nan() && found.rows[0].is_finite() && found.rows[1].is_nan());
            assert!(found.gradient[..2].iter().all(|x| x.is_finite()));
            assert!(found.gradient[2..].iter().all(|x| x.is_nan()));
        }
        let none = cross_entropy::<f32>(&[], &[], 0, &CrossEntropy::default());
        assert_eq!(none.loss, 0.0);
    }
}
