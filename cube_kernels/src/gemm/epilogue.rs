//! What happens to a sum before it is written, on every path that has the full epilogue:
//! `fl(fl(sum · fl(α_a · α_b)) + bias)`, plus what the output held, rounded once to its type.

use cubecl::{prelude::*, server::Handle};

use crate::{
    cube::{
        codec::{canonical, magnitude_bits},
        ptx::{
            self, cvt_f32_f16, cvt_rn_bf16x2, cvt_rn_f16x2, ld_shared_v4, st_shared, st_shared_v2,
        },
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
    /// One amax for each group of a grouped GEMM.
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

/// Which amax values of its output a GEMM finds while it writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OutputAmax {
    /// One, of all that it writes.
    Whole,
    /// One for each group of a grouped GEMM; that of a group without elements is zero.
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

/// What the epilogue reads. Handles that `kind` does not ask for are any other.
pub(crate) struct EpilogueArgs {
    pub kind: EpilogueKind,
    pub a_amax: Handle,
    pub b_amax: Handle,
    pub ranges: [f32; 2],
    pub bias: Handle,
    /// As many `f32` as `kind.amax` asks for, which the output's largest magnitudes raise.
    pub amax: Handle,
}

impl EpilogueArgs {
    /// How many amax values `kind.amax` asks for, of a GEMM in `groups` groups; at least one, which no kernel
    /// reads where it asks for none.
    pub fn amax_len(&self, groups: usize) -> usize {
        match self.kind.amax {
            Some(OutputAmax::PerGroup) => groups,
            Some(OutputAmax::Whole) | None => 1,
        }
    }
}

/// Bytes between the 16 rows that a warp stages for its stores: 128 of data, and 16 that spread rows
/// over the banks.
const STAGING_ROW: usize = 144;
/// Bytes that a warp stages at a time.
pub(crate) const STAGING: usize = 16 * STAGING_ROW;

/// Finishes the 16 x `tile_n` sums of one warp and writes them: eight columns at a time a thread has
/// two neighbours in rows `lane / 4` and 8 below ("Register Fragments for wgmma"), which go through
/// shared memory so that eight threads write 128 bytes of one row.
#[cube]
pub(crate) fn write_tile<N: Size>(
    sums: Vector<f32, N>,
    row0: u32,
    end: u32,
    column0: u32,
    group: u32,
    a_amax: &[f32],
    b_amax: &[f32],
    bias: &[f32],
    before: &[u32],
    out: &mut [Vector<u32, Const<4>>],
    amax: &mut [Atomic<u32>],
    n: u32,
    a_range: f32,
    b_range: f32,
    stage_at: u32,
    #[comptime] tile_n: usize,
    #[comptime] kind: EpilogueKind,
) {
    let lane = UNIT_POS % 32u32;
    let size = comptime!(kind.out.size());
    // Columns of 128 bytes.
    let width = comptime!(128 / kind.out.size());
    let upper = row0 + lane / 4u32;
    let lower = upper + 8u32;
    // Rows and columns outside read the factors of row and column 0, and are not written.
    let upper_in = select(upper < end, upper, 0u32);
    let lower_in = select(lower < end, lower, 0u32);
    let upper_factor = factor(a_amax, upper_in, group, a_range, kind.a);
    let lower_factor = factor(a_amax, lower_in, group, a_range, kind.a);
    let whole_factor = factor(b_amax, 0u32, group, b_range, comptime!(kind.b.of_tile()));
    // The last chunk of a tile may be narrower.
    let right = min(n, column0 + comptime!(tile_n as u32));
    let mut largest = 0u32;
    #[unroll]
    for chunk in 0..comptime!(tile_n.div_ceil(width)) {
        // The warp has read the chunk before.
        sync_plane();
        #[unroll]
        for j in 0..comptime!(usize::min(width, tile_n - chunk * width) / 8) {
            let first = comptime!((chunk * width / 8 + j) * 4);
            let column = column0 + comptime!((chunk * width + j * 8) as u32) + (lane % 4u32) * 2u32;
            let inside = column < n;
            let column = select(inside, column, 0u32);
            // Where the group's own rows of `b` and its bias have this column.
            let own = group * n + column;
            let mut even_factor = whole_factor;
            let mut odd_factor = whole_factor;
            if comptime!(kind.b == Factor::PerRow) {
                even_factor = factor(b_amax, own, group, b_range, kind.b);
                odd_factor = factor(b_amax, own + 1u32, group, b_range, kind.b);
            }
            let mut even_bias = 0.0f32;
            let mut odd_bias = 0.0f32;
            if comptime!(kind.bias) {
                even_bias = bias[own as usize];
                odd_bias = bias[(own + 1u32) as usize];
            }
            #[unroll]
            for half in 0..2usize {
                let line = if comptime!(half == 0) {
                    upper_in
                } else {
                    lower_in
                };
                let line_factor = if comptime!(half == 0) {
                    upper_factor
                } else {
                    lower_factor
                };
                let pair = line as usize * n as usize + column as usize;
                let even = finish(
                    sums.extract(comptime!(first + 2 * half)),
                    line_factor * even_factor,
                    even_bias,
                    held(before, pair, 0u32, kind),
                    kind,
                );
                let odd = finish(
                    sums.extract(comptime!(first + 2 * half + 1)),
                    line_factor * odd_factor,
                    odd_bias,
                    held(before, pair, 1u32, kind),
                    kind,
                );
                let target = stage_at
                    + (lane / 4u32) * comptime!(STAGING_ROW as u32)
                    + (lane % 4u32) * comptime!(2 * size as u32)
                    + comptime!((half * 8 * STAGING_ROW + j * 8 * size) as u32);
                if comptime!(kind.out == FloatKind::F32) {
                    st_shared_v2(target, u32::reinterpret(even), u32::reinterpret(odd));
                } else {
                    st_shared(target, pack_pair(even, odd, comptime!(kind.out)));
                }
                if comptime!(kind.amax.is_some()) {
                    let row = if comptime!(half == 0) { upper } else { lower };
                    if inside && row < end {
                        largest = max(largest, rounded_magnitude(even, odd, comptime!(kind.out)));
                    }
                }
            }
        }
        sync_plane();
        #[unroll]
        for i in 0..4u32 {
            let row = row0 + comptime!(i * 4) + lane / 8u32;
            let column = column0
                + comptime!((chunk * width) as u32)
                + (lane % 8u32) * comptime!(16 / size as u32);
            let words = ld_shared_v4(
                stage_at
                    + (comptime!(i * 4) + lane / 8u32) * comptime!(STAGING_ROW as u32)
                    + (lane % 8u32) * 16u32,
            );
            if row < end && column < right {
                let vector = row as usize * (n as usize / comptime!(16 / size))
                    + column as usize / comptime!(16 / size);
                out[vector] = words;
            }
        }
    }
    if comptime!(kind.amax.is_some()) {
        raise(amax, group, largest, kind);
    }
}
