//! Router of a mixture of experts: softmax, choice of experts, weights, load-balancing losses, and
//! sorting of tokens by expert.
//!
//! The order of every sum is fixed. Expert `e` belongs to lane `e % 32`; a lane processes its
//! experts in ascending order, and lanes are added in a tree: neighbors first, then neighboring
//! pairs, and so on. Sums over tokens are split into chunks of `ROUTER_CHUNK` tokens, in each of
//! which token `t` belongs to part `t % ROUTER_PLANES`; chunk `c` belongs to segment
//! `c % ROUTER_SEGMENTS`.

use super::{exp_of_negative, ln};

/// Lanes per row.
const LANES: usize = 32;
/// Tokens per chunk.
pub const ROUTER_CHUNK: usize = 32;
/// Parts per chunk.
pub const ROUTER_PLANES: usize = 8;
/// Number of segments of the chunks.
pub const ROUTER_SEGMENTS: usize = 16;

/// Parameters of the choice of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Router {
    /// Number of experts, 1 to 512.
    pub experts: usize,
    /// Experts per token, 1 to `experts`.
    pub top_k: usize,
    /// True to divide the weights of a token by their sum. Has no effect for a `top_k` of 1.
    pub normalize: bool,
}

impl Router {
    /// Checks the ranges of the parameters.
    ///
    /// # Errors
    /// Returns an error if the number of experts is not 1 to 512, or `top_k` is not 1 to `experts`.
    pub fn check(&self) -> Result<(), crate::Nvfp4Error> {
        let Self { experts, top_k, .. } = *self;
        if !(1..=512).contains(&experts) {
            return Err(crate::Nvfp4Error::value(
                "experts",
                experts.to_string(),
                "1 to 512",
            ));
        }
        if !(1..=experts).contains(&top_k) {
            return Err(crate::Nvfp4Error::value(
                "top_k",
                top_k.to_string(),
                format!("1 to {experts}, the number of experts"),
            ));
        }
        Ok(())
    }

    /// True if weights are divided by their sum.
    pub fn normalizes(&self) -> bool {
        self.normalize && self.top_k > 1
    }

    /// Returns the factors of the losses and of their gradients for `tokens` tokens.
    pub fn factors(&self, tokens: usize) -> RouterFactors {
        let (experts, tokens) = (self.experts as f64, tokens as f64);
        RouterFactors {
            balance: (experts / (tokens * tokens * self.top_k as f64)) as f32,
            mean: (1.0 / tokens) as f32,
            z: (2.0 / tokens) as f32,
        }
    }
}

/// Factors of sums over tokens, each rounded once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouterFactors {
    /// `experts / (tokens² · top_k)`: factor of count times sum of probabilities.
    pub balance: f32,
    /// `1 / tokens`.
    pub mean: f32,
    /// `2 / tokens`.
    pub z: f32,
}

/// Number of tokens that are present, and of the whole batch, over which losses are averaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchPart {
    /// Number of tokens with logits.
    pub tokens: usize,
    /// Number of tokens of the batch.
    pub of: usize,
}

/// Outputs of a router.
#[derive(Debug, Clone, PartialEq)]
pub struct Routed {
    /// Experts of each token, `[tokens, top_k]`: those of the largest logits, the largest first,
    /// and of equal ones the first. (0 is above -0, and NaN with a clear sign bit above all.)
    pub chosen: Vec<u32>,
    /// Weights of the experts, `[tokens, top_k]`.
    pub weights: Vec<f32>,
    /// Number of choices of each expert, `[experts]`.
    pub counts: Vec<u32>,
    /// Balance loss `experts · Σₑ fₑ · Pₑ`, where `f` is the share of the choices of each expert
    /// and `P` its mean probability: 1 if experts are balanced.
    pub balance: f32,
    /// Mean over tokens of `(log Σₑ exp(logitₑ))²`.
    pub z: f32,
}

/// Gradients of the outputs of a router.
#[derive(Debug, Clone, Copy)]
pub struct RouterGradients<'a> {
    /// Gradient of the weights, `[tokens, top_k]`.
    pub weights: &'a [f32],
    /// Gradient of [`Routed::balance`].
    pub balance: f32,
    /// Gradient of [`Routed::z`].
    pub z: f32,
}

/// Softmax of a row: exponentials, the reciprocal of their sum, and `log Σ exp`.
struct Softmax {
    exponentials: Vec<f32>,
    scale: f32,
    log_sum: f32,
}

impl Softmax {
    fn of(logits: &[f32]) -> Self {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let exponentials: Vec<f32> = logits.iter().map(|x| exp_of_negative(x - max)).collect();
        let sum = lane_sum(logits.len(), |expert, sum| sum + exponentials[expert]);
        Self {
            exponentials,
            scale: 1.0 / sum,
            log_sum: max + ln(sum),
        }
    }

    fn probability(&self, expert: usize) -> f32 {
        self.exponentials[expert] * self.scale
    }
}

/// Sums over experts in lane order; `add` adds a term to a partial sum.
fn lane_sum(experts: usize, add: impl Fn(usize, f32) -> f32) -> f32 {
    let mut lanes = [0f32; LANES];
    for (lane, sum) in lanes.iter_mut().enumerate() {
        *sum = (lane..experts)
            .step_by(LANES)
            .fold(0.0, |sum, e| add(e, sum));
    }
    let mut distance = 1;
    while distance < LANES {
        for lane in (0..LANES).step_by(2 * distance) {
            lanes[lane] += lanes[lane + distance];
        }
        distance *= 2;
    }
    lanes[0]
}

/// Returns a key that orders numbers by value, including their signs; no key is 0.
fn key(x: f32) -> u32 {
    let bits = x.to_bits();
    let key = match bits >> 31 {
        0 => bits | 0x8000_0000,
        _ => !bits,
    };
    key.max(1)
}

/// Returns the experts of the `top_k` largest logits.
fn choose(logits: &[f32], top_k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    // Stable sort: the first of equal logits stays first.
    order.sort_by_key(|&expert| std::cmp::Reverse(key(logits[expert])));
    order.truncate(top_k);
    order
}

/// Sums `columns` terms each over tokens, in the order of chunks and segments. `add` adds the terms
/// of a token to partial sums.
fn token_sums(tokens: usize, columns: usize, add: impl Fn(usize, &mut [f32])) -> Vec<f32> {
    let plus = |sums: &mut Vec<f32>, other: &[f32]| {
        sums.iter_mut().zip(other).for_each(|(sum, x)| *sum += x);
    };
    let chunk = |chunk: usize| {
        let mut sums = vec![0f32; columns];
        for part in 0..ROUTER_PLANES {
            let mut own = vec![0f32; columns];
            let from = chunk * ROUTER_CHUNK + part;
            for token in (from..(chunk + 1) * ROUTER_CHUNK).step_by(ROUTER_PLANES) {
                if token < tokens {
                    add(token, &mut own);
                }
            }
            plus(&mut sums, &own);
        }
        sums
    };
    let mut all = vec![0f32; columns];
    for segment in 0..ROUTER_SEGMENTS {
        let mut own = vec![0f32; columns];
        for number in (segment..tokens.div_ceil(ROUTER_CHUNK)).step_by(ROUTER_SEGMENTS) {
            plus(&mut own, &chunk(number));
        }
        plus(&mut all, &own);
    }
    all
}

/// Returns the contributions of these tokens to the balance loss and to the mean of the squared
/// log-sum-exps, given the number of choices of each expert.
fn losses_of(softmax: &[Softmax], counts: &[u32], factors: RouterFactors) -> [f32; 2] {
    let experts = counts.len();
    let sums = token_sums(softmax.len(), experts + 1, |token, sums| {
        let own = &softmax[token];
        for (sum, x) in sums.iter_mut().zip(&own.exponentials) {
            *sum = x.mul_add(own.scale, *sum);
        }
        sums[experts] = own.log_sum.mul_add(own.log_sum, sums[experts]);
    });
    let balance = (counts.iter().zip(&sums)).fold(0f32, |sum, (&count, &probability)| {
        (count as f32).mul_add(probability, sum)
    });
    [balance * factors.balance, sums[experts] * factors.mean]
}

/// Computes choices, weights and losses from the logits `[tokens, experts]`.
pub fn route(logits: &[f32], router: Router) -> Routed {
    let Router { experts, top_k, .. } = router;
    let rows: Vec<&[f32]> = logits.chunks_exact(experts).collect();
    let softmax: Vec<Softmax> = rows.iter().map(|row| Softmax::of(row)).collect();
    let mut chosen = Vec::with_capacity(rows.len() * top_k);
    let mut weights = Vec::with_capacity(rows.len() * top_k);
    let mut counts = vec![0u32; experts];
    for (row, softmax) in rows.iter().zip(&softmax) {
        let own = choose(row, top_k);
        let exponentials = own.iter().map(|&expert| softmax.exponentials[expert]);
        let scale = match router.normalizes() {
            true => 1.0 / exponentials.clone().fold(0.0, |sum, x| sum + x),
            false => softmax.scale,
        };
        weights.extend(exponentials.map(|x| x * scale));
        own.iter().for_each(|&expert| counts[expert] += 1);
        chosen.extend(own.iter().map(|&expert| expert as u32));
    }
    let [balance, z] = losses_of(&softmax, &counts, router.factors(rows.len()));
    Routed {
        chosen,
        weights,
        counts,
        balance,
        z,
    }
}

/// Computes the gradient of the logits of [`route`], `[tokens, experts]`. No gradient passes
/// through the choice, or through the counts.
pub fn route_backward(
    logits: &[f32],
    routed: &Routed,
    grads: RouterGradients<'_>,
    router: Router,
) -> Vec<f32> {
    let Router { experts, top_k, .. } = router;
    let by_losses = LossGradients {
        counts: &routed.counts,
        by: [grads.balance, grads.z],
        factors: router.factors(logits.len() / experts),
    };
    let mut out = Vec::with_capacity(logits.len());
    for (token, row) in logits.chunks_exact(experts).enumerate() {
        let own = Softmax::of(row);
        let slots = token * top_k..(token + 1) * top_k;
        let (weights, by_weights) = (
            &routed.weights[slots.clone()],
            &grads.weights[slots.clone()],
        );
        // Sum of the weights' gradients, each times its weight.
        let inner = (weights.iter().zip(by_weights)).fold(0f32, |sum, (w, dw)| w.mul_add(*dw, sum));
        for (expert, mut factor) in by_losses.of(&own).into_iter().enumerate() {
            if !router.normalizes() {
                factor -= inner;
            }
            let mut gradient = own.probability(expert) * factor;
            let slot = (routed.chosen[slots.clone()].iter()).position(|&it| it as usize == expert);
            if let Some(slot) = slot {
                let by_weight = match router.normalizes() {
                    true => by_weights[slot] - inner,
                    false => by_weights[slot],
                };
                gradient = weights[slot].mul_add(by_weight, gradient);
            }
            out.push(gradient);
        }
    }
    out
}

/// Gradients of the two losses, and the inputs of the losses.
struct LossGradients<'a> {
    /// Number of choices of each expert.
    counts: &'a [u32],
    /// Gradients of the balance loss, and of the mean of squares.
    by: [f32; 2],
    factors: RouterFactors,
}

impl LossGradients<'_> {
    /// Returns the gradient of each logit of a token, divided by its probability.
    fn of(&self, own: &Softmax) -> Vec<f32> {
        let [balance, z] = self.by;
        // Gradient of a probability through the balance loss.
        let balance = balance * self.factors.balance;
        let by_probability = |expert: usize| balance * self.counts[expert] as f32;
        let mean = lane_sum(self.counts.len(), |expert, sum| {
            own.probability(expert).mul_add(by_probability(expert), sum)
        });
        let by_square = z * self.factors.z;
        let factor =
            |&count: &u32| by_square.mul_add(own.log_sum, balance.mul_add(count as f32, -mean));
        self.counts.iter().map(factor).collect()
    }
}

/// Computes the contributions of the tokens with logits `[part.tokens, experts]` to the losses of
/// [`route`] of a batch, given the number of choices of each expert in the whole batch.
pub fn router_losses(
    logits: &[f32],
    counts: &[u32],
    (part, router): (BatchPart, Router),
) -> [f32; 2] {
    let rows = logits.chunks_exact(router.experts);
    let softmax: Vec<Softmax> = rows.map(Softmax::of).collect();
    losses_of(&softmax, counts, router.factors(part.of))
}

/// Computes the gradient of the logits of [`router_losses`], `[part.tokens, experts]`, from the
/// gradients of the losses. No gradient passes through the counts.
pub fn router_losses_backward(
    logits: &[f32],
    counts: &[u32],
    by: [f32; 2],
    (part, router): (BatchPart, Router),
) -> Vec<f32> {
    let by_losses = LossGradients {
        counts,
        by,
        factors: router.factors(part.of),
    };
    let gradient = |row: &[f32]| {
        let own = Softmax::of(row);
        let factors = by_losses.of(&own).into_iter().enumerate();
        let gradient = factors.map(|(expert, factor)| own.probability(expert) * factor);
        gradient.collect::<Vec<_>>()
    };
    let rows = logits.chunks_exact(router.experts);
    rows.flat_map(gradient).collect()
}

/// Choices sorted by expert, stable within an expert.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SortedChoices {
    /// Choice at each place.
    pub choices: Vec<u32>,
    /// Place of each choice.
    pub places: Vec<u32>,
    /// Start of each expert's choices, and the end of the last one's: `experts + 1` entries.
    pub offsets: Vec<u32>,
    /// Number of choices of each expert.
    pub counts: Vec<u32>,
}

/// Sorts `chosen` by expert. An index that is not an expert comes after all of them, and is not
/// counted.
pub fn sort_choices(chosen: &[u32], experts: usize) -> SortedChoices {
    let last = experts as u32;
    let mut choices: Vec<u32> = (0..chosen.len() as u32).collect();
    choices.sort_by_key(|&choice| chosen[choice as usize].min(last));
    let mut places = vec![0; chosen.len()];
    for (place, &choice) in choices.iter().enumerate() {
        places[choice as usize] = place as u32;
    }
    let before =
        |expert: u32| choices.partition_point(|&choice| chosen[choice as usize] < expert) as u32;
    let offsets: Vec<u32> = (0..=last).map(before).collect();
    SortedChoices {
        counts: offsets.windows(2).map(|pair| pair[1] - pair[0]).collect(),
        choices,
        places,
        offsets,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logits(tokens: usize, experts: usize) -> Vec<f32> {
        let value = |i: usize| ((i * 2_654_435_761) % 10_007) as f32 / 2500.0 - 2.0;
        (0..tokens * experts).map(value).collect()
    }

    /// Returns the loss `Σ g · weights + b · balance + z · z`, in f64, for given choices.
    fn loss(x: &[f64], routed: &Routed, grads: RouterGradients<'_>, router: Router) -> f64 {
        let Router { experts, top_k, .. } = router;
        let tokens = x.len() / experts;
        let (mut total, mut z) = (0.0, 0.0);
        let mut means = vec![0.0; experts];
        for (token, row) in x.chunks_exact(experts).enumerate() {
            let sum: f64 = row.iter().map(|x| x.exp()).sum();
            z += sum.ln().powi(2) / tokens as f64;
            (means.iter_mut().zip(row))
                .for_each(|(mean, x)| *mean += x.exp() / sum / tokens as f64);
            let slots = token * top_k..(token + 1) * top_k;
            let own = |slot: usize| row[routed.chosen[slot] as usize].exp();
            let scale = match router.normalizes() {
                true => slots.clone().map(own).sum(),
                false => sum,
            };
            let terms = slots.map(|slot| own(slot) / scale * grads.weights[slot] as f64);
            total += terms.sum::<f64>();
        }
        let shares = routed.counts.iter().map(|&count| count as f64);
        let balance: f64 = shares.zip(&means).map(|(count, mean)| count * mean).sum();
        let balance = balance * experts as f64 / (tokens * top_k) as f64;
        total + grads.balance as f64 * balance + grads.z as f64 * z
    }

    /// Compares the losses and their gradients with the formulas in f64, by differences.
    #[test]
    fn gradients_are_the_derivatives() {
        for (experts, top_k, normalize) in
            [(7, 2, true), (7, 2, false), (40, 1, true), (5, 5, true)]
        {
            let router = Router {
                experts,
                top_k,
                normalize,
            };
            let x = logits(9, experts);
            let routed = route(&x, router);
            let by_weights: Vec<f32> = (0..9 * top_k).map(|i| (i as f32).sin()).collect();
            let grads = RouterGradients {
                weights: &by_weights,
                balance: 0.7,
                z: 0.3,
            };
            let found = route_backward(&x, &routed, grads, router);
            let wide: Vec<f64> = x.iter().map(|&x| x as f64).collect();
            for (i, &found) in found.iter().enumerate() {
                let at = |step: f64| {
                    let mut moved = wide.clone();
                    moved[i] += step;
                    loss(&moved, &routed, grads, router)
                };
                let expected = (at(1e-4) - at(-1e-4)) / 2e-4;
                let error = (found as f64 - expected).abs();
                assert!(error < 1e-6, "{router:?} {i}: {found} {expected}");
            }
            let none = vec![0.0; 9 * top_k];
            let only = |balance, z| RouterGradients {
                weights: &none,
                balance,
                z,
            };
            let expected = loss(&wide, &routed, only(1.0, 0.0), router);
            assert!((routed.balance as f64 - expected).abs() < 1e-6);
            let expected = loss(&wide, &routed, only(0.0, 1.0), router);
            assert!((routed.z as f64 - expected).abs() < 1e-5);
        }
    }

    #[test]
    fn largest_logits_are_chosen() {
        let router = Router {
            experts: 4,
            top_k: 2,
            normalize: true,
        };
        let nan = f32::NAN;
        let x = [
            [1.0, 3.0, 3.0, 2.0],
            [-0.0, 0.0, -1.0, f32::NEG_INFINITY],
            [nan, nan, nan, nan],
        ];
        let routed = route(&x.concat(), router);
        assert_eq!(routed.chosen, [1, 2, 1, 0, 0, 1]);
        assert_eq!(routed.weights[..2], [0.5, 0.5]);
        assert_eq!(routed.weights[2..4], [0.5, 0.5]);
        assert_eq!(routed.counts, [2, 3, 1, 0]);
        assert!(routed.weights[4].is_nan() && routed.z.is_nan());
    }

    #[test]
    fn choices_are_sorted() {
        let sorted = sort_choices(&[2, 0, 9, 2, 1, 0], 4);
        assert_eq!(sorted.choices, [1, 5, 4, 0, 3, 2]);
        assert_eq!(sorted.places, [3, 0, 5, 4, 2, 1]);
        assert_eq!(sorted.offsets, [0, 2, 3, 5, 5]);
        assert_eq!(sorted.counts, [2, 1, 2, 0]);
    }
}
