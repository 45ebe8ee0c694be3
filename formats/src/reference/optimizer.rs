//! AdamW and the clipping of gradients to a global norm.
//!
//! # Sums of squares
//!
//! A gradient is split into chunks of [`SQUARE_CHUNK`] elements. In a chunk, element `i` belongs to
//! lane `i mod 1024`, which adds its squares in ascending order by `fma`. Four consecutive lanes
//! are added as `(l0 + l1) + (l2 + l3)`, and the 256 results in a tree: entry `t` adds entry
//! `t + s` for `s = 128, 64, ..., 1`. The sums of all chunks are then added the same way: entry `t`
//! of 256 sums those with indices `t, t + 256, ...`, and the tree follows. No sum depends on the
//! launch geometry.

use half::bf16;
use rayon::prelude::*;

use super::{Element, philox::philox4x32, simd::with_fma};

/// Number of elements of a gradient whose squares are added together.
pub const SQUARE_CHUNK: usize = 16_384;
/// Number of sums that the tree adds.
pub const SQUARE_LANES: usize = 256;
/// Term added to the norm of gradients, which may be zero.
pub const NORM_EPSILON: f32 = 1e-6;

/// Constants of AdamW.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWParams {
    /// Decay of the first moment.
    pub beta_1: f64,
    /// Decay of the second moment.
    pub beta_2: f64,
    /// Term added to the root of the second moment.
    pub epsilon: f64,
}

/// Values that change between steps. Device memory contains them as [four words](Self::words).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWSchedule {
    /// Learning rate.
    pub learning_rate: f32,
    /// `1 / (1 - beta_1^t)` for step `t`, counted from 1.
    pub correction_1: f32,
    /// `1 / (1 - beta_2^t)`.
    pub correction_2: f32,
    /// Step modulo 2^32, from which random bits derive.
    pub step: u32,
}

impl AdamWSchedule {
    /// Returns the values of step `step`, counted from 1.
    pub fn new(params: &AdamWParams, learning_rate: f64, step: u64) -> Self {
        let correction = |beta: f64| (1.0 / (1.0 - beta.powf(step as f64))) as f32;
        Self {
            learning_rate: learning_rate as f32,
            correction_1: correction(params.beta_1),
            correction_2: correction(params.beta_2),
            step: step as u32,
        }
    }

    /// Returns the bits of the three numbers, in the order above, and the step.
    pub fn words(&self) -> [u32; 4] {
        [
            self.learning_rate.to_bits(),
            self.correction_1.to_bits(),
            self.correction_2.to_bits(),
            self.step,
        ]
    }

    /// Inverts [`words`](Self::words).
    pub fn from_words(words: [u32; 4]) -> Self {
        Self {
            learning_rate: f32::from_bits(words[0]),
            correction_1: f32::from_bits(words[1]),
            correction_2: f32::from_bits(words[2]),
            step: words[3],
        }
    }
}

/// Storage type of moments.
pub trait Moment: Copy + Send + Sync + 'static {
    /// Returns the exact value.
    fn to_f32(self) -> f32;

    /// Rounds `value` by 16 random bits, if it is not exactly representable.
    fn round(value: f32, random: u32) -> Self;

    /// True if [`round`](Self::round) uses its random bits.
    const RANDOM: bool;
}

impl Moment for f32 {
    fn to_f32(self) -> f32 {
        self
    }

    fn round(value: f32, _random: u32) -> Self {
        value
    }

    const RANDOM: bool = false;
}

impl Moment for bf16 {
    fn to_f32(self) -> f32 {
        Element::to_f32(self)
    }

    fn round(value: f32, random: u32) -> Self {
        bf16::from_bits(round_bf16_stochastic(value, random))
    }

    const RANDOM: bool = true;
}

/// Rounds `value` stochastically to one of the two adjacent bf16 and returns its bits: the one of
/// larger magnitude with probability `f / 2^16`, where `f` is the lower half of the value's bits.
/// `random` is below 2^16. Infinities are preserved, NaN is made quiet.
pub fn round_bf16_stochastic(value: f32, random: u32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    // The sum carries into the upper half with exactly this probability. The largest value may
    // carry to infinity, whose lower half is zero.
    (bits.wrapping_add(random) >> 16) as u16
}

/// One parameter in a step of AdamW.
#[derive(Debug)]
pub struct AdamWUpdate<'a, G, M> {
    /// Gradient.
    pub gradient: &'a [G],
    /// Parameter.
    pub weight: &'a mut [f32],
    /// First moment: the running mean of the gradient.
    pub first: &'a mut [M],
    /// Second moment: the running mean of the squared gradient.
    pub second: &'a mut [M],
    /// Weight decay, which is multiplied by the learning rate.
    pub decay: f32,
    /// Key of the random bits that round moments.
    pub key: [u32; 2],
}

/// Performs a step of AdamW on one parameter, in place. Gradients are multiplied by `factor` first.
///
/// Element `i` uses word `i mod 4` of block `i / 4` of Philox with the counter's offset
/// `schedule.step`: the lower half of the word rounds the first moment, the upper half the second
/// one. The parameter is updated with the unrounded moments.
pub fn adamw<G: Element, M: Moment>(
    params: &AdamWParams,
    schedule: &AdamWSchedule,
    factor: f32,
    update: AdamWUpdate<'_, G, M>,
) {
    let constants = AdamWConstants::new(params);
    const RUN: usize = 4096;
    update
        .weight
        .par_chunks_mut(RUN)
        .zip(update.first.par_chunks_mut(RUN))
        .zip(update.second.par_chunks_mut(RUN))
        .zip(update.gradient.par_chunks(RUN))
        .enumerate()
        .for_each(|(run, (((weight, first), second), gradient))| {
            let update = AdamWUpdate {
                gradient,
                weight,
                first,
                second,
                ..update
            };
            adamw_run(&constants, schedule, factor, run * RUN, update);
        });
}

with_fma!(
    fn adamw_run[G: Element, M: Moment](
        constants: &AdamWConstants,
        schedule: &AdamWSchedule,
        factor: f32,
        before: usize,
        update: AdamWUpdate<'_, G, M>,
    ) = adamw_run_body
);

/// Updates consecutive elements of a parameter; `before`, a multiple of four, elements precede
/// them.
#[inline(always)]
fn adamw_run_body<G: Element, M: Moment>(
    constants: &AdamWConstants,
    schedule: &AdamWSchedule,
    factor: f32,
    before: usize,
    update: AdamWUpdate<'_, G, M>,
) {
    let keep = (-schedule.learning_rate).mul_add(update.decay, 1.0);
    let mut words = [0; 4];
    let moments = update.first.iter_mut().zip(update.second);
    let elements = update.weight.iter_mut().zip(moments).zip(update.gradient);
    for (i, ((weight, (first, second)), gradient)) in elements.enumerate() {
        if M::RANDOM && i.is_multiple_of(4) {
            let block = (before + i) as u64 / 4;
            let counter = [block as u32, (block >> 32) as u32, schedule.step, 0];
            words = philox4x32(counter, update.key);
        }
        let gradient = gradient.to_f32() * factor;
        let m = (first.to_f32()).mul_add(constants.beta_1, constants.rest_1 * gradient);
        let square = constants.rest_2 * (gradient * gradient);
        let v = (second.to_f32()).mul_add(constants.beta_2, square);
        let root = (v * schedule.correction_2).sqrt() + constants.epsilon;
        let direction = m * schedule.correction_1 * (1.0 / root);
        *weight = direction.mul_add(-schedule.learning_rate, *weight * keep);
        let word = if M::RANDOM { words[i % 4] } else { 0 };
        *first = M::round(m, word & 0xFFFF);
        *second = M::round(v, word >> 16);
    }
}

/// Constants in the form that the arithmetic uses.
#[derive(Debug, Clone, Copy)]
pub struct AdamWConstants {
    /// Decay of the first moment.
    pub beta_1: f32,
    /// `1 - beta_1`.
    pub rest_1: f32,
    /// Decay of the second moment.
    pub beta_2: f32,
    /// `1 - beta_2`.
    pub rest_2: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
}

impl AdamWConstants {
    /// Returns the constants of `params`, each rounded once.
    pub fn new(params: &AdamWParams) -> Self {
        Self {
            beta_1: params.beta_1 as f32,
            rest_1: (1.0 - params.beta_1) as f32,
            beta_2: params.beta_2 as f32,
            rest_2: (1.0 - params.beta_2) as f32,
            epsilon: params.epsilon as f32,
        }
    }
}

/// Computes the sums of squares of the chunks of a gradient.
pub fn square_sums<G: Element>(gradient: &[G]) -> Vec<f32> {
    gradient
        .par_chunks(SQUARE_CHUNK)
        .map(sum_of_squares)
        .collect()
}

with_fma!(fn sum_of_squares[G: Element](chunk: &[G]) -> f32 = sum_of_squares_body);

/// Returns the sum of the squares of a chunk.
#[inline(always)]
fn sum_of_squares_body<G: Element>(chunk: &[G]) -> f32 {
    let mut lanes = [0.0f32; 4 * SQUARE_LANES];
    for row in chunk.chunks(lanes.len()) {
        for (lane, value) in lanes.iter_mut().zip(row) {
            let value = value.to_f32();
            *lane = value.mul_add(value, *lane);
        }
    }
    tree(std::array::from_fn(|t| {
        (lanes[4 * t] + lanes[4 * t + 1]) + (lanes[4 * t + 2] + lanes[4 * t + 3])
    }))
}

/// Returns the norm of the gradients, from the sums of squares of all chunks, and the factor that
/// scales gradients down to `max_norm` if the norm is larger. A NaN norm gives a NaN factor.
pub fn clip_factor(square_sums: &[f32], max_norm: f32) -> (f32, f32) {
    let mut lanes = [0.0f32; SQUARE_LANES];
    for row in square_sums.chunks(SQUARE_LANES) {
        for (lane, sum) in lanes.iter_mut().zip(row) {
            *lane += sum;
        }
    }
    let norm = tree(lanes).sqrt();
    let factor = 1.0 / (norm + NORM_EPSILON) * max_norm;
    (norm, if factor > 1.0 { 1.0 } else { factor })
}

fn tree(mut lanes: [f32; SQUARE_LANES]) -> f32 {
    let mut stride = SQUARE_LANES / 2;
    while stride > 0 {
        for t in 0..stride {
            lanes[t] += lanes[t + stride];
        }
        stride /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stochastic_rounding_follows_its_law_exactly() {
        for value in [1.0f32, -1.5, 1.000_123, -3.14159e-20, 2e-40, 65_504.4] {
            let fraction = value.to_bits() & 0xFFFF;
            let low = (value.to_bits() >> 16) as u16;
            let ups = (0..1 << 16)
                .map(|random| round_bf16_stochastic(value, random) - low)
                .map(u32::from)
                .sum::<u32>();
            assert_eq!(ups, fraction, "{value}");
        }
        for value in [f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0] {
            let rounded = bf16::from_bits(round_bf16_stochastic(value, 0xFFFF));
            assert_eq!(rounded.to_f32().to_bits(), value.to_bits());
        }
        let nan = f32::from_bits(0x7F80_0001);
        assert!(bf16::from_bits(round_bf16_stochastic(nan, 0xFFFF)).is_nan());
    }

    #[test]
    fn the_norm_is_that_of_all_elements() {
        for len in [0, 1, 5, 1024, 16_384, 16_385, 50_003] {
            let gradient: Vec<f32> = (0..len).map(|i| (i % 13) as f32 - 6.0).collect();
            let exact: f64 = gradient.iter().map(|g| f64::from(*g).powi(2)).sum();
            let (norm, factor) = clip_factor(&square_sums(&gradient), 2.0);
            assert!((f64::from(norm) - exact.sqrt()).abs() <= 1e-5 * exact.sqrt());
            let expected = (2.0 / (exact.sqrt() + 1e-6)).min(1.0);
            assert!((f64::from(factor) - expected).abs() < 1e-5, "{len}");
        }
        let (norm, factor) = clip_factor(&[1.0, f32::NAN], 1.0);
        assert!(norm.is_nan() && factor.is_nan());
        assert_eq!(clip_factor(&[f32::INFINITY], 1.0), (f32::INFINITY, 0.0));
    }
}
