//! The kernel of AdamW.

use cubecl::prelude::*;

use crate::{
    cube::{
        codec::{Conversion, INFINITY, canonical, load, magnitude_bits, store},
        exact::{fma, reciprocal, sqrt},
        philox::{self, Random, RoundKeys},
    },
    reference::philox::WEYL,
    tensor::FloatKind,
};

/// One parameter of a launch. Buffers that the plan does not use may be any memory.
#[derive(CubeType, CubeLaunch)]
pub struct AdamWSlot<G: CubePrimitive, W: CubePrimitive, M: CubePrimitive, P: CubePrimitive> {
    /// Gradient.
    pub gradient: Box<[G]>,
    /// Parameter in `f32`.
    pub weight: Box<[W]>,
    /// First moment: the running mean of the gradient.
    pub first: Box<[M]>,
    /// Second moment: the running mean of the squared gradient.
    pub second: Box<[M]>,
    /// Copy of the parameter in another type.
    pub copy: Box<[P]>,
    /// Start of its vectors among those of all parameters of the launch.
    pub start: usize,
    /// End of its vectors.
    pub end: usize,
    /// Weight decay.
    pub decay: f32,
    /// Low word of the key of its random bits.
    pub key_low: u32,
    /// High word of the key.
    pub key_high: u32,
    /// Index of its amax value.
    pub entry: usize,
}

/// Inputs shared by all parameters.
#[derive(CubeType, CubeLaunch)]
pub struct AdamWStep {
    /// [`words`](crate::reference::AdamWSchedule::words) of the schedule.
    pub schedule: Box<[u32]>,
    /// Norm of the gradients, and the factor by which they are multiplied.
    pub factor: Box<[f32]>,
    /// Decay of the first moment.
    pub beta_1: f32,
    /// `1 - beta_1`.
    pub rest_1: f32,
    /// Decay of the second moment.
    pub beta_2: f32,
    /// `1 - beta_2`.
    pub rest_2: f32,
    /// Term added to the root of the second moment.
    pub epsilon: f32,
}

/// Comptime choices of `adamw_kernel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AdamWPlan {
    /// Type of the gradients.
    pub gradient: FloatKind,
    /// Type of the moments: `F32`, or `Bf16` with stochastic rounding.
    pub moment: FloatKind,
    /// Type of the parameter's copy, if any.
    pub copy: Option<FloatKind>,
    /// True if gradients are multiplied by a factor.
    pub clip: bool,
    /// True if the amax of every new parameter is computed.
    pub amax: bool,
    /// True if planes can reduce.
    pub planes: bool,
    /// Conversion method.
    pub conversion: Conversion,
}

impl AdamWPlan {
    /// Returns the type of the parameter's copy.
    pub const fn copy_kind(&self) -> FloatKind {
        match self.copy {
            Some(kind) => kind,
            None => FloatKind::F32,
        }
    }
}

/// Numbers of a step, in registers.
#[derive(CubeType, Clone, Copy)]
struct Numbers {
    lr: f32,
    correction_1: f32,
    correction_2: f32,
    factor: f32,
    keep: f32,
}

/// A parameter in vectors of `N` elements.
type VectorSlot<G, M, P, N> = AdamWSlot<Vector<G, N>, Vector<f32, N>, Vector<M, N>, Vector<P, N>>;

/// Each unit updates every `units`-th vector of all parameters, one parameter after the other.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn adamw_kernel<G: Numeric, M: Numeric, P: Numeric, N: Size>(
    mut slots: Sequence<VectorSlot<G, M, P, N>>,
    step: AdamWStep,
    amax: &mut [Atomic<u32>],
    #[comptime] plan: AdamWPlan,
    #[define(G)] _gradient: ElemType,
    #[define(M)] _moment: ElemType,
    #[define(P)] _copy: ElemType,
) {
    let lr = f32::reinterpret(step.schedule[0]);
    let mut factor = 1.0f32;
    if comptime!(plan.clip) {
        factor = step.factor[1];
    }
    let mut item = ABSOLUTE_POS;
    #[unroll]
    for s in 0..slots.len() {
        let slot = slots.index_mut(s);
        let numbers = Numbers {
            lr,
            correction_1: f32::reinterpret(step.schedule[1]),
            correction_2: f32::reinterpret(step.schedule[2]),
            factor,
            keep: fma(-lr, slot.decay, 1.0f32, plan.conversion),
        };
        let mut largest = 0u32;
        while item < slot.end {
            let bits = update_vector::<G, M, P, N>(slot, item, &numbers, &step, plan);
            largest = max(largest, bits);
            item += CUBE_COUNT * CUBE_DIM as usize;
        }
        if comptime!(plan.amax) {
            raise(amax, slot.entry, canonical(largest), plan.planes);
        }
    }
}

/// Raises an entry to `bits` unless it is as large already. Atomics on one word are serialized, and
/// after the first of them few values are larger.
#[cube]
fn raise(amax: &mut [Atomic<u32>], entry: usize, bits: u32, #[comptime] planes: bool) {
    if comptime!(planes) {
        let plane = plane_max(bits);
        if UNIT_POS_PLANE == 0u32 {
            raise_alone(amax, entry, plane);
        }
    } else {
        raise_alone(amax, entry, bits);
    }
}

#[cube]
fn raise_alone(amax: &mut [Atomic<u32>], entry: usize, bits: u32) {
    // A unit's value is zero for parameters of which it has no vectors: skip the load.
    let mut held = bits;
    if bits != 0u32 {
        held = amax[entry].load();
    }
    if bits > held {
        amax[entry].fetch_max(bits);
    }
}

/// Updates a vector of every buffer. Returns the amax of the new parameter's vector.
#[cube]
fn update_vector<G: Numeric, M: Numeric, P: Numeric, N: Size>(
    slot: &mut VectorSlot<G, M, P, N>,
    item: usize,
    numbers: &Numbers,
    step: &AdamWStep,
    #[comptime] plan: AdamWPlan,
) -> u32 {
    let width = N::value();
    let conversion = comptime!(plan.conversion);
    // Without PTX, the code of an fma is too long to be unrolled often.
    let unrolled = comptime!(conversion.has_ptx());
    let vector = item - slot.start;
    let gradients = slot.gradient[vector];
    let weights = slot.weight[vector];
    let firsts = slot.first[vector];
    let seconds = slot.second[vector];
    let mut g = Array::<f32>::new(width);
    let mut w = Array::<f32>::new(width);
    let mut m = Array::<f32>::new(width);
    let mut v = Array::<f32>::new(width);
    #[unroll]
    for e in 0..width {
        g[e] = load::<G>(gradients.extract(e), plan.gradient);
        w[e] = weights.extract(e);
        m[e] = load::<M>(firsts.extract(e), plan.moment);
        v[e] = load::<M>(seconds.extract(e), plan.moment);
    }
    #[unroll(unrolled)]
    for e in 0..width {
        let gradient = g[e] * numbers.factor;
        let first = fma(m[e], step.beta_1, step.rest_1 * gradient, conversion);
        let square = step.rest_2 * (gradient * gradient);
        let second = fma(v[e], step.beta_2, square, conversion);
        let root = sqrt(second * numbers.correction_2, conversion) + step.epsilon;
        let direction = first * numbers.correction_1 * reciprocal(root, conversion);
        w[e] = fma(direction, -numbers.lr, w[e] * numbers.keep, conversion);
        m[e] = first;
        v[e] = second;
    }

    let mut new_weights = Vector::<f32, N>::empty();
    let mut new_firsts = Vector::<M, N>::empty();
    let mut new_seconds = Vector::<M, N>::empty();
    let mut copies = Vector::<P, N>::empty();
    let mut words = Array::<u32>::new(4usize);
    if comptime!(plan.moment == FloatKind::Bf16) {
        let random = Random {
            key_low: RoundKeys::of(slot.key_low, comptime!(WEYL[0])),
            key_high: RoundKeys::of(slot.key_high, comptime!(WEYL[1])),
            offset_low: step.schedule[3],
            offset_high: 0u32.runtime(),
        };
        words = philox::block_words(u64::cast_from(vector * width / 4usize), &random);
    }
    let mut largest = 0u32;
    #[unroll]
    for e in 0..width {
        new_weights.insert(e, w[e]);
        let mut stored = w[e];
        if comptime!(plan.copy.is_some()) {
            let copy = store::<P>(w[e], plan.copy_kind());
            copies.insert(e, copy);
            stored = load::<P>(copy, plan.copy_kind());
        }
        largest = max(largest, magnitude_bits(stored));
        if comptime!(plan.moment == FloatKind::Bf16) {
            let word = word_of(&words, vector, e, width);
            new_firsts.insert(
                e,
                M::cast_from(round_bf16_stochastic(m[e], word & 0xFFFFu32)),
            );
            new_seconds.insert(e, M::cast_from(round_bf16_stochastic(v[e], word >> 16u32)));
        } else {
            new_firsts.insert(e, M::cast_from(m[e]));
            new_seconds.insert(e, M::cast_from(v[e]));
        }
    }
    slot.weight[vector] = new_weights;
    slot.first[vector] = new_firsts;
    slot.second[vector] = new_seconds;
    if comptime!(plan.copy.is_some()) {
        slot.copy[vector] = copies;
    }
    largest
}

/// Returns the random word of element `e` of `vector`.
#[cube]
fn word_of(
    words: &Array<u32>,
    vector: usize,
    #[comptime] e: usize,
    #[comptime] width: usize,
) -> u32 {
    if comptime!(width == 4) {
        words[e]
    } else {
        let element = vector % 4usize;
        let low = select(element == 0usize, words[0], words[1]);
        let high = select(element == 2usize, words[2], words[3]);
        select(element < 2usize, low, high)
    }
}

/// See [`round_bf16_stochastic`](crate::reference::round_bf16_stochastic).
#[cube]
fn round_bf16_stochastic(value: f32, random: u32) -> u32 {
    let bits = u32::reinterpret(value);
    let nan = (bits >> 16u32) | 0x40u32;
    let rounded = (bits + random) >> 16u32;
    select(magnitude_bits(value) > INFINITY, nan, rounded)
}
