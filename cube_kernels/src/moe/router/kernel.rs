//! Kernels of the router; see [`reference::route`](crate::reference::route).
//!
//! A plane of 32 units processes a token, and each unit the experts of its lane. Without planes, a
//! unit processes all experts of a token.

use cubecl::prelude::*;

use crate::{
    cube::{
        activation::{exp_of_negative, ln},
        codec::Conversion,
        exact::{fma, reciprocal},
        plane::{plane_largest, plane_largest_u32, plane_tree},
    },
    reference::{ROUTER_CHUNK, ROUTER_PLANES, ROUTER_SEGMENTS},
};

/// Lanes per row.
const LANES: usize = 32;
/// Bits of negative infinity, the value of padding experts after the last one.
const NEGATIVE_INFINITY: u32 = 0xFF80_0000;

/// Comptime choices of the router's kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RouterPlan {
    /// Experts per lane; there are at most 32 times as many experts.
    pub per_lane: usize,
    /// True if there are planes.
    pub planes: bool,
    /// True if weights are divided by their sum.
    pub normalizes: bool,
    /// True if only losses are computed, from given numbers of choices per expert.
    pub losses_only: bool,
    /// Conversion method.
    pub conversion: Conversion,
}

impl RouterPlan {
    /// Returns the number of experts of a row that a unit processes.
    const fn own(self) -> usize {
        if self.planes {
            self.per_lane
        } else {
            self.all()
        }
    }

    /// Returns the number of experts over all lanes.
    const fn all(self) -> usize {
        LANES * self.per_lane
    }
}

/// Sizes, and factors of sums over tokens.
#[derive(CubeType, CubeLaunch)]
pub struct RouterArgs {
    pub tokens: usize,
    pub experts: usize,
    pub top_k: usize,
    /// Factor of the balance loss.
    pub balance: f32,
    /// Factor of a mean over tokens.
    pub mean: f32,
    /// Factor of the gradient of the mean of squares.
    pub z: f32,
}

/// Returns the expert of value `i` of this unit.
#[cube]
fn expert_of(i: usize, #[comptime] plan: RouterPlan) -> usize {
    if comptime!(plan.planes) {
        UNIT_POS as usize % LANES + LANES * i
    } else {
        i
    }
}

/// Loads this unit's logits of a token.
#[cube]
fn load_row(
    logits: &[f32],
    token: usize,
    args: &RouterArgs,
    #[comptime] plan: RouterPlan,
) -> Array<f32> {
    let mut row = Array::<f32>::new(comptime!(plan.own()));
    #[unroll(plan.planes)]
    for i in 0..comptime!(plan.own()) {
        let expert = expert_of(i, plan);
        let mut value = f32::reinterpret(NEGATIVE_INFINITY.runtime());
        if expert < args.experts {
            value = logits[token * args.experts + expert];
        }
        row[i] = value;
    }
    row
}

/// Returns the sum of this row's `values` in lane order.
#[cube]
fn lane_sum(values: &Array<f32>, #[comptime] plan: RouterPlan) -> f32 {
    if comptime!(plan.planes) {
        let mut sum = 0.0f32;
        #[unroll]
        for i in 0..comptime!(plan.per_lane) {
            sum += values[i];
        }
        plane_tree(sum, plan.conversion)
    } else {
        let mut lanes = Array::<f32>::new(LANES);
        for lane in 0..LANES {
            let mut sum = 0.0f32;
            for i in 0..comptime!(plan.per_lane) {
                sum += values[lane + LANES * i];
            }
            lanes[lane] = sum;
        }
        tree(&mut lanes)
    }
}

/// Returns the sum of `a[i] · b[i]` in lane order, by fused multiply-adds.
#[cube]
fn lane_dot(a: &Array<f32>, b: &Array<f32>, #[comptime] plan: RouterPlan) -> f32 {
    if comptime!(plan.planes) {
        let mut sum = 0.0f32;
        #[unroll]
        for i in 0..comptime!(plan.per_lane) {
            sum = fma(a[i], b[i], sum, plan.conversion);
        }
        plane_tree(sum, plan.conversion)
    } else {
        let mut lanes = Array::<f32>::new(LANES);
        for lane in 0..LANES {
            let mut sum = 0.0f32;
            for i in 0..comptime!(plan.per_lane) {
                let at = lane + LANES * i;
                sum = fma(a[at], b[at], sum, plan.conversion);
            }
            lanes[lane] = sum;
        }
        tree(&mut lanes)
    }
}

/// Sums lanes in a tree that adds neighbors first.
#[cube]
fn tree(lanes: &mut Array<f32>) -> f32 {
    #[unroll]
    for stage in 0..5u32 {
        let distance = comptime!(1usize << stage);
        #[unroll]
        for pair in 0..comptime!(LANES / (2 * distance)) {
            let at = comptime!(2 * distance * pair);
            let other = lanes[comptime!(at + distance)];
            lanes[at] += other;
        }
    }
    lanes[0]
}

/// Returns the largest of this row's `values`.
#[cube]
fn row_max(values: &Array<f32>, #[comptime] plan: RouterPlan) -> f32 {
    let mut most = values[0];
    #[unroll(plan.planes)]
    for i in 1..comptime!(plan.own()) {
        most = max(most, values[i]);
    }
    if comptime!(plan.planes) {
        most = plane_largest(most, plan.conversion);
    }
    most
}

/// Normalization of a row's softmax.
#[derive(CubeType, Clone, Copy)]
struct Softmax {
    /// `1 / Σ exp(x - max)`.
    scale: f32,
    /// `log Σ exp(x)`.
    log_sum: f32,
}

/// Returns the exponentials of a row's logits minus the largest one, `max`.
#[cube]
fn exponentials(row: &Array<f32>, max: f32, #[comptime] plan: RouterPlan) -> Array<f32> {
    let mut values = Array::<f32>::new(comptime!(plan.own()));
    #[unroll(plan.planes)]
    for i in 0..comptime!(plan.own()) {
        values[i] = exp_of_negative(row[i] - max, plan.conversion);
    }
    values
}

/// Returns the softmax normalization of exponentials.
#[cube]
fn softmax(exponentials: &Array<f32>, max: f32, #[comptime] plan: RouterPlan) -> Softmax {
    let sum = lane_sum(exponentials, plan);
    Softmax {
        scale: reciprocal(sum, plan.conversion),
        log_sum: max + ln(sum, plan.conversion),
    }
}

/// Returns a key that orders numbers by value, including their signs; no key is 0.
#[cube]
fn key(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let mirrored = bits ^ 0xFFFF_FFFFu32;
    let key = select(bits >> 31u32 == 0u32, bits | 0x8000_0000u32, mirrored);
    max(key, 1u32)
}

/// Returns the expert with the largest key, the first one among equals; sets its key to 0.
#[cube]
fn take_largest(keys: &mut Array<u32>, #[comptime] plan: RouterPlan) -> u32 {
    let mut most = 0u32;
    let mut at = 0u32;
    #[unroll(plan.planes)]
    for i in 0..comptime!(plan.own()) {
        if keys[i] > most {
            most = keys[i];
            at = expert_of(i, plan) as u32;
        }
    }
    if comptime!(plan.planes) {
        let largest = plane_largest_u32(most, plan.conversion);
        // Minimum of the indices, as a maximum of their complements.
        let distance = select(most == largest, 0xFFFF_FFFFu32 - at, 0u32);
        at = 0xFFFF_FFFFu32 - plane_largest_u32(distance, plan.conversion);
    }
    #[unroll(plan.planes)]
    for i in 0..comptime!(plan.own()) {
        if expert_of(i, plan) as u32 == at {
            keys[i] = 0u32;
        }
    }
    at
}

/// Outputs of the router for each token.
#[derive(CubeType, CubeLaunch)]
pub struct RouterOut {
    /// Weights `f32[tokens, top_k]` followed by the two losses, or the losses alone.
    pub weights: Box<[f32]>,
    /// Chosen experts `u32[tokens, top_k]`, unless only losses are computed.
    pub chosen: Box<[u32]>,
}

/// Sums over the tokens of a chunk.
#[derive(CubeType, CubeLaunch)]
pub struct RouterSums {
    /// Sums of probabilities, and of squared log-sum-exps: `f32[chunks, experts + 1]`.
    pub values: Box<[f32]>,
    /// Numbers of choices: `u32[chunks, experts]`.
    pub counts: Box<[u32]>,
}

/// Routes tokens, one chunk of tokens per cube.
#[cube(launch_unchecked, create_dummy_kernel)]
pub fn route_kernel(
    logits: &[f32],
    out: &mut RouterOut,
    sums: &mut RouterSums,
    args: &RouterArgs,
    #[comptime] plan: RouterPlan,
) {
    let own = comptime!(plan.own());
    let all = comptime!(plan.all());
    let mut part_sums: Shared<[f32]> = Shared::new_slice(comptime!(ROUTER_PLANES * (all + 1)));
    let mut part_counts: Shared<[u32]> = Shared::new_slice(comptime!(ROUTER_PLANES * all));
    let lanes = comptime!(if plan.planes { LANES } else { 1 });
    let first = (UNIT_POS as usize % lanes) < 1usize;
    let mut part = UNIT_POS as usize / lanes;
    while part < ROUTER_PLANES {
        let mut probabilities = Array::<f32>::new(own);
        let mut counts = Array::<u32>::new(own);
        #[unroll(plan.planes)]
        for i in 0..own {
            probabilities[i] = 0.0f32;
            counts[i] = 0u32;
        }
        let mut squares = 0.0f32;
        for step in 0..comptime!(ROUTER_CHUNK / ROUTER_PLANES) {
            let token = CUBE_POS * ROUTER_CHUNK + part + step * ROUTER_PLANES;
            if token < args.tokens {
                let row = load_row(logits, token, args, plan);
                let max = row_max(&row, plan);
                let values = exponentials(&row, max, plan);
                let softmax = softmax(&values, max, plan);
                squares = fma(softmax.log_sum, softmax.log_sum, squares, plan.conversion);
                #[unroll(plan.planes)]
                for i in 0..own {
                    probabilities[i] =
                        fma(values[i], softmax.scale, probabilities[i], plan.conversion);
                }
                if comptime!(!plan.losses_only) {
                    let mut keys = Array::<u32>::new(own);
                    #[unroll(plan.planes)]
                    for i in 0..own {
                        keys[i] = select(expert_of(i, plan) < args.experts, key(row[i]), 0u32);
                    }
                    let start = token * args.top_k;
                    let mut scale = softmax.scale;
                    let mut sum = 0.0f32;
                    for slot in 0..args.top_k {
                        let expert = take_largest(&mut keys, plan);
                        #[unroll(plan.planes)]
                        for i in 0..own {
                            counts[i] += u32::cast_from(expert_of(i, plan) as u32 == expert);
                        }
                        let logit = logits[token * args.experts + expert as usize];
                        let exponential = exp_of_negative(logit - max, plan.conversion);
                        sum += exponential;
                        if first {
                            out.chosen[start + slot] = expert;
                            out.weights[start + slot] = exponential;
                        }
                    }
                    if comptime!(plan.normalizes) {
                        scale = reciprocal(sum, plan.conversion);
                    }
                    if first {
                        for slot in 0..args.top_k {
                            out.weights[start + slot] *= scale;
                        }
                    }
                }
            }
        }
        #[unroll(plan.planes)]
        for i in 0..own {
            part_sums[part * comptime!(all + 1) + expert_of(i, plan)] = probabilities[i];
            part_counts[part * all + expert_of(i, plan)] = counts[i];
        }
        if first {
            part_sums[part * comptime!(all + 1) + all] = squares;
        }
        part += CUBE_DIM as usize / lanes;
    }
    sync_cube();
    let mut column = UNIT_POS as usize;
    while column <= args.experts {
        let is_expert = column < args.experts;
        let from = select(is_expert, column, comptime!(all).runtime());
        let mut sum = 0.0f32;
        let mut count = 0u32;
        for part in 0..ROUTER_PLANES {
            sum += part_sums[part * comptime!(all + 1) + from];
            if is_expert {
                count += part_counts[part * all + column];
            }
        }
        sums.values[CUBE_POS * (args.experts + 1) + column] = sum;
        if is_expert {
            sums.counts[CUBE_POS * args.experts + column] = count;
        }
        column += CUBE_DIM as usize;
    }
}

/// Returns the offset of the two losses: after the weights, if any.
#[cube]
fn place_of_losses(args: &RouterArgs, #[comptime] plan: RouterPlan) -> usize {
    if comptime!(plan.losses_only) {
        0usize.runtime()
    } else {
        args.tokens * args.top_k
    }
}

/// Sums the chunks, with one cube: the number of choices of each expert, unless these are given,
/// and the two losses.
#[cube(launch_unchecked, create_dummy_kernel)]
pub fn route_sums_kernel(
    sums: &RouterSums,
    counts: &mut [u32],
    weights: &mut [f32],
    args: &RouterArgs,
    #[comptime] plan: RouterPlan,
) {
    let all = comptime!(plan.all());
    // Bits of floats, followed by counts.
    let mut parts: Shared<[u32]> = Shared::new_slice(comptime!(ROUTER_SEGMENTS * (all + 1)));
    let mut totals: Shared<[f32]> = Shared::new_slice(comptime!(all + 1));
    let mut terms: Shared<[f32]> = Shared::new_slice(all);
    let chunks = args.tokens.div_ceil(ROUTER_CHUNK);
    let columns = args.experts + 1;
    let mut item = UNIT_POS as usize;
    while item < ROUTER_SEGMENTS * columns {
        let column = item % columns;
        let mut sum = 0.0f32;
        let mut chunk = item / columns;
        while chunk < chunks {
            sum += sums.values[chunk * columns + column];
            chunk += ROUTER_SEGMENTS;
        }
        parts[item] = u32::reinterpret(sum);
        item += CUBE_DIM as usize;
    }
    sync_cube();
    let mut column = UNIT_POS as usize;
    while column < columns {
        let mut sum = 0.0f32;
        for segment in 0..ROUTER_SEGMENTS {
            sum += f32::reinterpret(parts[segment * columns + column]);
        }
        totals[column] = sum;
        column += CUBE_DIM as usize;
    }
    sync_cube();
    if comptime!(!plan.losses_only) {
        let mut item = UNIT_POS as usize;
        while item < ROUTER_SEGMENTS * args.experts {
            let expert = item % args.experts;
            let mut count = 0u32;
            let mut chunk = item / args.experts;
            while chunk < chunks {
                count += sums.counts[chunk * args.experts + expert];
                chunk += ROUTER_SEGMENTS;
            }
            parts[item] = count;
            item += CUBE_DIM as usize;
        }
        sync_cube();
    }
    let mut expert = UNIT_POS as usize;
    while expert < args.experts {
        if comptime!(!plan.losses_only) {
            let mut count = 0u32;
            for segment in 0..ROUTER_SEGMENTS {
                count += parts[segment * args.experts + expert];
            }
            counts[expert] = count;
        }
        terms[expert] = f32::cast_from(counts[expert]);
        expert += CUBE_DIM as usize;
    }
    sync_cube();
    if UNIT_POS == 0 {
        let mut balance = 0.0f32;
        for expert in 0..args.experts {
            balance = fma(terms[expert], totals[expert], balance, plan.conversion);
        }
        let losses = place_of_losses(args, plan);
        weights[losses] = balance * args.balance;
        weights[losses + 1] = totals[args.experts] * args.mean;
    }
}

/// Outputs of the router, for its backward.
#[derive(CubeType, CubeLaunch)]
pub struct RoutedArgs {
    /// Weights `f32[tokens, top_k]` followed by the two losses; not read for losses only.
    pub weights: Box<[f32]>,
    /// Gradients of `weights`, or of the losses alone.
    pub grads: Box<[f32]>,
    /// Chosen experts `u32[tokens, top_k]`; not read for losses only.
    pub chosen: Box<[u32]>,
    /// Number of choices of each expert, `u32[experts]`.
    pub counts: Box<[u32]>,
}

/// Each plane (or unit, without planes) computes the gradient of every `planes`-th token.
#[cube(launch_unchecked, create_dummy_kernel)]
pub fn route_backward_kernel(
    logits: &[f32],
    routed: &RoutedArgs,
    out: &mut [f32],
    args: &RouterArgs,
    #[comptime] plan: RouterPlan,
) {
    let own = comptime!(plan.own());
    let lanes = comptime!(if plan.planes { LANES } else { 1 });
    let losses = place_of_losses(args, plan);
    let balance = routed.grads[losses] * args.balance;
    let by_square = routed.grads[losses + 1] * args.z;
    let mut counts = Array::<f32>::new(own);
    let mut by_probability = Array::<f32>::new(own);
    #[unroll(plan.planes)]
    for i in 0..own {
        let expert = expert_of(i, plan);
        let mut count = 0.0f32;
        if expert < args.experts {
            count = f32::cast_from(routed.counts[expert]);
        }
        counts[i] = count;
        by_probability[i] = balance * count;
    }
    let mut token = ABSOLUTE_POS / lanes;
    while token < args.tokens {
        let row = load_row(logits, token, args, plan);
        let max = row_max(&row, plan);
        let mut values = exponentials(&row, max, plan);
        let softmax = softmax(&values, max, plan);
        #[unroll(plan.planes)]
        for i in 0..own {
            values[i] *= softmax.scale;
        }
        let start = token * args.top_k;
        let mut inner = 0.0f32;
        if comptime!(!plan.losses_only) {
            for slot in start..start + args.top_k {
                inner = fma(
                    routed.weights[slot],
                    routed.grads[slot],
                    inner,
                    plan.conversion,
                );
            }
        }
        let mean = lane_dot(&values, &by_probability, plan);
        #[unroll(plan.planes)]
        for i in 0..own {
            let aside = fma(balance, counts[i], -mean, plan.conversion);
            let mut factor = fma(by_square, softmax.log_sum, aside, plan.conversion);
            if comptime!(!plan.normalizes && !plan.losses_only) {
                factor -= inner;
            }
            values[i] *= factor;
        }
        if comptime!(!plan.losses_only) {
            for slot in start..start + args.top_k {
                let expert = routed.chosen[slot];
                let mut by_weight = routed.grads[slot];
                if comptime!(plan.normalizes) {
                    by_weight -= inner;
                }
                let weight = routed.weights[slot];
                #[unroll(plan.planes)]
                for i in 0..own {
                    if expert_of(i, plan) as u32 == expert {
                        values[i] = fma(weight, by_weight, values[i], plan.conversion);
                    }
                }
            }
        }
        #[unroll(plan.planes)]
        for i in 0..own {
            let expert = expert_of(i, plan);
            if expert < args.experts {
                out[token * args.experts + expert] = values[i];
            }
        }
        token += CUBE_COUNT * CUBE_DIM as usize / lanes;
    }
}

/// Choices sorted by expert.
#[derive(CubeType, CubeLaunch)]
pub struct SortedKeys {
    /// Experts in ascending order; choices of no expert come last.
    pub keys: Box<[u32]>,
    /// Choices.
    pub order: Box<[u32]>,
}

/// Returns the first place of sorted keys that are at least `expert`.
#[cube]
pub fn first_place(keys: &[u32], slots: usize, expert: u32) -> u32 {
    let mut low = 0usize;
    let mut high = slots;
    while low < high {
        let middle = (low + high) / 2usize;
        if keys[middle] < expert {
            low = middle + 1usize;
        } else {
            high = middle;
        }
    }
    low as u32
}

/// Computes the place of each choice, and the start of each expert's choices.
#[cube(launch_unchecked, create_dummy_kernel)]
pub fn choice_places_kernel(
    sorted: &SortedKeys,
    places: &mut [u32],
    offsets: &mut [u32],
    counts: &mut [u32],
    slots: usize,
    experts: usize,
) {
    let mut item = ABSOLUTE_POS;
    while item < slots {
        let choice = sorted.order[item] as usize;
        // Always true, unless the sorted choices were overwritten.
        if choice < slots {
            places[choice] = item as u32;
        }
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
    let mut expert = ABSOLUTE_POS;
    while expert <= experts {
        let start = first_place(&sorted.keys, slots, expert as u32);
        offsets[expert] = start;
        if expert < experts {
            let end = first_place(&sorted.keys, slots, expert as u32 + 1u32);
            counts[expert] = end - start;
        }
        expert += CUBE_COUNT * CUBE_DIM as usize;
    }
}
