//! What happens to a sum before it is written, on every path that has the full epilogue:
//! `fl(fl(sum · fl(α_a · α_b)) + bias)`, plus what the output held, rounded once to its type.

use cubecl::prelude::*;

use crate::{
    cube::{
        codec::{canonical, magnitude_bits},
        ptx::{self, cvt_f32_f16, cvt_rn_bf16x2, cvt_rn_f16x2},
    },
    tensor::FloatKind,
};

/// Where the factor of one operand comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Factor {
    /// The operand is what it says: a factor of one.
    One,
    /// One maximum for the operand.
    Tensor,
    /// One maximum for each stored row of the operand.
    PerRow,
    /// One maximum for each group of a grouped product.
    PerGroup,
}

impl Factor {
    /// What can be computed once for a tile.
    pub const fn of_tile(self) -> Self {
        match self {
            Self::PerRow => Self::One,
            other => other,
        }
    }
}

/// Which maxima of its output a product finds while it writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OutputAmax {
    /// One, of all that it writes.
    Whole,
    /// One for each group of a grouped product; that of a group without elements is zero.
    PerGroup,
}

/// The comptime choices of an epilogue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EpilogueKind {
    /// The factor of the left operand.
    pub a: Factor,
    /// The factor of the right operand.
    pub b: Factor,
    /// Add a bias to each row.
    pub bias: bool,
    /// Add to what the output holds.
    pub accumulate: bool,
    /// Type of the output.
    pub out: FloatKind,
    /// Find the largest magnitudes of the output, as it is stored.
    pub amax: Option<OutputAmax>,
}

/// `α` of one stored row: `fl(amax / range)`.
#[cube]
pub fn factor(amax: &[f32], row: u32, group: u32, range: f32, #[comptime] kind: Factor) -> f32 {
    let mut value = 1.0f32;
    if comptime!(kind == Factor::Tensor) {
        value = amax[0] / range;
    }
    if comptime!(kind == Factor::PerRow) {
        value = amax[row as usize] / range;
    }
    if comptime!(kind == Factor::PerGroup) {
        value = amax[group as usize] / range;
    }
    value
}

/// The value of one output element. `before` is what the output held.
#[cube]
pub fn finish(sum: f32, alpha: f32, bias: f32, before: f32, #[comptime] kind: EpilogueKind) -> f32 {
    let scaled = sum * alpha;
    // Reinterpreted: a variable would reach the instruction as a pointer. The additions must not be
    // contracted with the multiplication, whose rounding is specified.
    if comptime!(kind.bias && kind.accumulate) {
        let biased = f32::reinterpret(ptx::add_rn(scaled, f32::reinterpret(bias)));
        ptx::add_rn(biased, f32::reinterpret(before))
    } else if comptime!(kind.bias) {
        ptx::add_rn(scaled, f32::reinterpret(bias))
    } else if comptime!(kind.accumulate) {
        ptx::add_rn(scaled, f32::reinterpret(before))
    } else {
        scaled
    }
}

/// [`finish()`] on any device. `ordered` says whether the compiler may contract additions with the
/// multiplication before them, as CUDA's does: then they are its own instructions.
#[cube]
pub fn finish_on(
    sum: f32,
    alpha: f32,
    bias: f32,
    before: f32,
    #[comptime] ordered: bool,
    #[comptime] kind: EpilogueKind,
) -> f32 {
    if comptime!(ordered) {
        finish(sum, alpha, bias, before, kind)
    } else {
        let mut value = sum * alpha;
        if comptime!(kind.bias) {
            value += bias;
        }
        if comptime!(kind.accumulate) {
            value += before;
        }
        value
    }
}

/// What the output held in an element: `pair` is the even element of a pair, `odd` which of the two.
#[cube]
pub fn held(
    before: &[u32],
    pair: usize,
    #[comptime] odd: u32,
    #[comptime] kind: EpilogueKind,
) -> f32 {
    if comptime!(!kind.accumulate) {
        0.0f32.runtime()
    } else if comptime!(kind.out == FloatKind::F32) {
        f32::reinterpret(before[pair + comptime!(odd as usize)])
    } else {
        let word = before[pair / 2usize] >> comptime!(16 * odd);
        if comptime!(kind.out == FloatKind::Bf16) {
            f32::reinterpret(word << 16u32)
        } else {
            cvt_f32_f16(u32::reinterpret(word))
        }
    }
}

/// Two neighbours, rounded to `out`, which has two bytes.
#[cube]
pub fn pack_pair(even: f32, odd: f32, #[comptime] out: FloatKind) -> u32 {
    if comptime!(out == FloatKind::Bf16) {
        cvt_rn_bf16x2(f32::reinterpret(even), f32::reinterpret(odd))
    } else {
        cvt_rn_f16x2(f32::reinterpret(even), f32::reinterpret(odd))
    }
}

/// The magnitude bits of the larger of two neighbours, as `f32` and after rounding to `out`.
#[cube]
pub fn rounded_magnitude(even: f32, odd: f32, #[comptime] out: FloatKind) -> u32 {
    let mut low = magnitude_bits(even);
    let mut high = magnitude_bits(odd);
    if comptime!(out == FloatKind::Bf16) {
        let word = pack_pair(even, odd, out);
        low = magnitude_bits(f32::reinterpret(word << 16u32));
        high = magnitude_bits(f32::reinterpret(word & 0xffff_0000u32));
    }
    if comptime!(out == FloatKind::F16) {
        let word = pack_pair(even, odd, out);
        low = magnitude_bits(cvt_f32_f16(u32::reinterpret(word)));
        high = magnitude_bits(cvt_f32_f16(word >> 16u32));
    }
    max(low, high)
}

/// Raises the maximum of the output, or of `group`, to the largest `bits` of the plane, all of one group. The
/// magnitude bits of floats are in the order of the floats, with NaN above infinity, and a maximum does not
/// depend on the order of its arguments.
#[cube]
pub fn raise(amax: &mut [Atomic<u32>], group: u32, bits: u32, #[comptime] kind: EpilogueKind) {
    let plane = plane_max(bits);
    if UNIT_POS_PLANE == 0u32 {
        raise_alone(amax, group, plane, kind);
    }
}

/// [`raise()`] by one unit.
#[cube]
pub fn raise_alone(
    amax: &mut [Atomic<u32>],
    group: u32,
    bits: u32,
    #[comptime] kind: EpilogueKind,
) {
    let mut index = 0u32;
    if comptime!(kind.amax == Some(OutputAmax::PerGroup)) {
        index = group;
    }
    amax[index as usize].fetch_max(canonical(bits));
}
