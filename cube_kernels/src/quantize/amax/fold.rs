//! Reduction of elements to amax values: words in registers, words of 16 rows, planes, cubes.

use cubecl::prelude::*;

use super::super::tile::{self, Grouping, LoadPlan};
use crate::{
    HadamardSize,
    cube::{
        block::{block_amax, max_of_pairs},
        codec::{Conversion, INFINITY, QUIET_NAN, canonical, magnitude_bits, round_to_bf16},
        hadamard::{Signs, combine},
        ptx,
        words::unpack,
    },
    launch::per_word,
    tensor::{AmaxGranularity, FloatKind},
};

/// Rows of a strip: those of a block down a column, and of the smallest transform.
pub(crate) const STRIP: usize = 16;

/// Maximum number of planes per cube.
const PLANES: usize = 32;

/// Raises entry `index` of `out` to `bits`. With planes this takes one atomic per cube, since
/// atomics on one address serialize. All units of the cube must call it. Magnitudes are compared as
/// integers, so the result does not depend on the order of cubes.
#[cube]
pub(in crate::quantize) fn atomic_amax(
    out: &mut [Atomic<u32>],
    index: usize,
    bits: u32,
    #[comptime] planes: bool,
) {
    if comptime!(planes) {
        let mut maxima: Shared<[u32]> = Shared::new_slice(PLANES);
        let plane = plane_max(bits);
        if UNIT_POS_PLANE == 0u32 {
            maxima[(UNIT_POS / PLANE_DIM) as usize] = plane;
        }
        sync_cube();
        if UNIT_POS < PLANE_DIM {
            let mut largest = 0u32;
            if UNIT_POS < CUBE_DIM / PLANE_DIM {
                largest = maxima[UNIT_POS as usize];
            }
            let largest = plane_max(largest);
            if UNIT_POS == 0u32 {
                out[index].fetch_max(largest);
            }
        }
    } else {
        out[index].fetch_max(bits);
    }
}

/// Returns the larger of `bits` and the magnitude bits of the elements of a word (or of one
/// element).
#[cube]
fn fold<F: Numeric>(
    bits: u32,
    stored: F,
    #[comptime] elements: bool,
    #[comptime] conversion: Conversion,
    #[comptime] kind: FloatKind,
) -> u32 {
    let word = u32::cast_from(stored);
    let mut largest = bits;
    #[unroll]
    for half in 0..comptime!(if elements {
        1u32
    } else {
        per_word(kind) as u32
    }) {
        let value = unpack(word, half, kind);
        if comptime!(conversion.has_ptx()) {
            let so_far = f32::reinterpret(largest);
            largest = u32::reinterpret(ptx::max_nan_abs(so_far, value));
        } else {
            largest = max(largest, magnitude_bits(value));
        }
    }
    largest
}

/// Running amax: magnitude bits or, for words of two bf16, the largest and smallest value in each
/// half, which take half an instruction per element instead of two for magnitudes.
#[derive(CubeType)]
pub(crate) struct Running {
    magnitude: u32,
    high: u32,
    low: u32,
}

#[cube]
impl Running {
    pub fn new() -> Running {
        Running {
            magnitude: 0u32,
            high: 0u32,
            low: 0u32,
        }
    }

    /// Starts anew.
    pub fn clear(&mut self) {
        self.magnitude = 0u32;
        self.high = 0u32;
        self.low = 0u32;
    }

    pub fn fold<F: Numeric>(
        &mut self,
        stored: F,
        #[comptime] elements: bool,
        #[comptime] conversion: Conversion,
        #[comptime] kind: FloatKind,
    ) {
        if comptime!(conversion.has_ptx() && kind == FloatKind::Bf16 && !elements) {
            let word = u32::cast_from(stored);
            self.high = ptx::max_nan_bf16x2(self.high, word);
            self.low = ptx::min_nan_bf16x2(self.low, word);
        } else {
            self.magnitude = fold::<F>(self.magnitude, stored, elements, conversion, kind);
        }
    }

    pub fn bits(
        &self,
        #[comptime] elements: bool,
        #[comptime] conversion: Conversion,
        #[comptime] kind: FloatKind,
    ) -> u32 {
        if comptime!(conversion.has_ptx() && kind == FloatKind::Bf16 && !elements) {
            let both = ptx::max_nan_abs_bf16x2(self.high, self.low);
            larger_half(both)
        } else {
            self.magnitude
        }
    }
}

/// Returns the magnitude bits of the larger of a pair of bf16 magnitudes.
#[cube]
fn larger_half(both: u32) -> u32 {
    let low = f32::reinterpret(both << 16u32);
    u32::reinterpret(ptx::max_nan_abs(
        low,
        f32::reinterpret(both & 0xFFFF_0000u32),
    ))
}

/// Comptime configuration of `amax_tiles_kernel`, `amax_strips_kernel` and `amax_lines_kernel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AmaxPlan {
    /// Amax values for rowwise tensors.
    pub rows: Option<AmaxGranularity>,
    /// Amax values for columnwise tensors.
    pub cols: Option<AmaxGranularity>,
    /// Transform of the columns.
    pub hadamard: Option<HadamardSize>,
    /// True if the transform has the default signs, which are then built into the kernel.
    pub default_signs: bool,
    /// Representation of groups.
    pub grouping: Grouping,
    /// True if `x` is loaded by elements.
    pub elements: bool,
    /// Units per cube.
    pub units: usize,
    /// True if planes support reductions.
    pub planes: bool,
    /// Implementation of conversions and comparisons.
    pub conversion: Conversion,
    /// Element type of `x`.
    pub kind: FloatKind,
}

impl AmaxPlan {
    /// Returns true if strips of 16 rows of a matrix in memory suffice for the requested values:
    /// the transform spans no more rows.
    pub(super) fn has_strips(&self) -> bool {
        self.grouping == Grouping::One && tile::span(self.hadamard) == STRIP && !self.elements
    }

    /// Returns true if all requested values are of the whole matrix.
    pub(crate) fn is_whole(&self) -> bool {
        !self.has_own_rows() && !self.has_own_columns()
    }

    /// Returns true if each row has an amax.
    pub(crate) fn has_own_rows(&self) -> bool {
        self.rows == Some(AmaxGranularity::PerRow)
    }

    /// Returns true if each column has an amax.
    pub(super) fn has_own_columns(&self) -> bool {
        self.cols == Some(AmaxGranularity::PerRow)
    }

    pub(super) const fn load(&self) -> LoadPlan {
        LoadPlan {
            elements: self.elements,
            units: self.units,
            conversion: self.conversion,
            kind: self.kind,
        }
    }
}

/// Amax output buffers. A buffer that the plan does not use may be any memory.
#[derive(CubeType, CubeLaunch)]
pub struct AmaxOut {
    /// Amax values of rows.
    pub rows: Box<[Atomic<u32>]>,
    /// Amax values of columns.
    pub cols: Box<[Atomic<u32>]>,
}

/// Largest magnitudes that a unit has found.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Maxima {
    /// Largest of all elements.
    pub rows: u32,
    /// Largest of columns, without the factor of their transform.
    pub cols: u32,
}

#[cube]
impl Maxima {
    pub fn new() -> Maxima {
        Maxima {
            rows: 0u32,
            cols: 0u32,
        }
    }

    /// Includes further words, if a single amax of all is requested.
    pub fn include(&mut self, folded: &Folded, #[comptime] plan: AmaxPlan) {
        if comptime!(plan.rows == Some(AmaxGranularity::PerTensor)) {
            self.rows = max(self.rows, folded.all);
        }
        if comptime!(plan.cols == Some(AmaxGranularity::PerTensor)) {
            #[unroll]
            for half in 0..comptime!(4 / plan.kind.size()) {
                self.cols = max(self.cols, folded.columns[half]);
            }
        }
    }
}

/// Raises the amax values of a group to those of its units. All units of the cube must call it.
#[cube]
pub(crate) fn leave_group(
    out: &mut AmaxOut,
    group: usize,
    maxima: &Maxima,
    #[comptime] plan: AmaxPlan,
) {
    if comptime!(plan.rows == Some(AmaxGranularity::PerTensor)) {
        atomic_amax(&mut out.rows, group, canonical(maxima.rows), plan.planes);
    }
    if comptime!(plan.cols == Some(AmaxGranularity::PerTensor)) {
        let bits = canonical(with_factor(maxima.cols, plan.hadamard));
        atomic_amax(&mut out.cols, group, bits, plan.planes);
    }
}

/// Raises the amax of row `row` to `bits` of its units. All units of a plane must call it, if there
/// are planes.
#[cube]
pub(crate) fn leave_row(out: &mut AmaxOut, row: usize, bits: u32, #[comptime] plan: AmaxPlan) {
    if comptime!(plan.planes) {
        let largest = plane_max(canonical(bits));
        if UNIT_POS_PLANE == 0u32 {
            out.rows[row].fetch_max(largest);
        }
    } else {
        out.rows[row].fetch_max(canonical(bits));
    }
}

/// [`leave_group`] for the units of a single plane, if the other planes of the cube are elsewhere.
/// Requires a device with planes.
#[cube]
pub(crate) fn leave_plane(
    out: &mut AmaxOut,
    group: usize,
    maxima: &Maxima,
    #[comptime] plan: AmaxPlan,
) {
    if comptime!(plan.rows == Some(AmaxGranularity::PerTensor)) {
        let largest = plane_max(canonical(maxima.rows));
        if UNIT_POS_PLANE == 0u32 {
            out.rows[group].fetch_max(largest);
        }
    }
    if comptime!(plan.cols == Some(AmaxGranularity::PerTensor)) {
        let largest = plane_max(canonical(with_factor(maxima.cols, plan.hadamard)));
        if UNIT_POS_PLANE == 0u32 {
            out.cols[group].fetch_max(largest);
        }
    }
}

/// Returns the magnitude bits of the largest element of some words.
#[cube]
pub(super) fn words_amax(
    words: &Array<u32>,
    #[comptime] count: usize,
    #[comptime] conversion: Conversion,
    #[comptime] kind: FloatKind,
) -> u32 {
    if comptime!(conversion.has_ptx() && kind == FloatKind::Bf16) {
        let both = max_of_pairs(words, 0usize, count);
        let low = f32::reinterpret(both << 16u32);
        u32::reinterpret(ptx::max_nan_abs(
            low,
            f32::reinterpret(both & 0xFFFF_0000u32),
        ))
    } else {
        let mut bits = 0u32;
        #[unroll]
        for w in 0..count {
            bits = fold::<u32>(bits, words[w], false, conversion, kind);
        }
        bits
    }
}

/// Magnitude bits of the largest element of some words, and of each of their columns after the
/// transform (if any), without its [factor](with_factor).
#[derive(CubeType)]
pub(crate) struct Folded {
    /// Largest of all elements.
    pub all: u32,
    /// Largest of each column: one, or two of 16 bits.
    pub columns: Array<u32>,
}

/// Folds words down a column of words, as many as a unit has of a block or of a transform. If units
/// [share](tile::lanes) a transform, this unit is number `lane` of them, and all units of the plane
/// must call it.
#[cube]
pub(crate) fn fold_words(
    words: &Array<u32>,
    signs: &Signs,
    lane: usize,
    #[comptime] plan: AmaxPlan,
) -> Folded {
    let (conversion, kind) = comptime!((plan.conversion, plan.kind));
    let count = comptime!(tile::span(plan.hadamard) / tile::lanes(plan.hadamard, conversion));
    let per_word = comptime!(4 / kind.size());
    let mut all = 0u32;
    if comptime!(plan.rows == Some(AmaxGranularity::PerTensor)) {
        all = words_amax(words, count, conversion, kind);
    }
    let mut columns = Array::<u32>::new(per_word);
    if comptime!(plan.cols.is_some()) {
        let packed =
            comptime!(conversion.has_ptx() && kind == FloatKind::Bf16 && plan.hadamard.is_none());
        if comptime!(packed) {
            let both = max_of_pairs(words, 0usize, count);
            columns[0] = both << 16u32;
            columns[comptime!(per_word - 1)] = both & 0xFFFF_0000u32;
        } else {
            #[unroll]
            for half in 0..comptime!(per_word as u32) {
                let mut values = tile::unpack_column(
                    words,
                    signs,
                    lane,
                    half,
                    plan.hadamard,
                    plan.default_signs,
                    conversion,
                    kind,
                );
                columns[half as usize] = column_amax(&mut values, lane, count, plan);
            }
        }
    }
    Folded { all, columns }
}

/// Returns the magnitude bits of the largest value of a column, after the transform (if any)
/// without its factor.
#[cube]
fn column_amax(
    values: &mut Array<f32>,
    lane: usize,
    #[comptime] count: usize,
    #[comptime] plan: AmaxPlan,
) -> u32 {
    if comptime!(plan.hadamard == Some(HadamardSize::H16) && plan.conversion.has_ptx()) {
        h16_amax(values)
    } else {
        if comptime!(plan.hadamard.is_some()) {
            let size = comptime!(plan.hadamard.unwrap());
            tile::transform_values(values, lane, size, plan.conversion);
        }
        let mut bits = 0u32;
        #[unroll]
        for b in 0..comptime!(count / 16) {
            let part = block_amax(&*values, comptime!(b * 16), plan.conversion);
            bits = max(bits, magnitude_bits(part));
        }
        bits
    }
}

/// Returns the magnitude bits of the largest of 16 values after the transform, without its factor.
///
/// The last stage computes `a + b` and `a - b` of two values, the larger of which has the magnitude
/// of `|a| + |b|`: rounding is monotonic and ignores signs. Only two infinities turn one of the
/// former into NaN, and the latter into infinity at most. Requires PTX.
#[cube]
fn h16_amax(values: &mut Array<f32>) -> u32 {
    #[unroll]
    for stage in 0..3u32 {
        combine(values, stage, 16usize);
    }
    let mut sums = Array::<f32>::new(8usize);
    #[unroll]
    for i in 0..8usize {
        sums[i] = values[i].abs() + values[comptime!(i + 8)].abs();
    }
    let mut even = sums[0];
    let mut odd = sums[1];
    #[unroll]
    for i in 1..4usize {
        even = ptx::max_nan_abs(even, sums[comptime!(2 * i)]);
        odd = ptx::max_nan_abs(odd, sums[comptime!(2 * i + 1)]);
    }
    let mut bits = magnitude_bits(ptx::max_nan_abs(even, odd));
    if bits == INFINITY {
        #[unroll]
        for i in 0..8usize {
            let smaller = min(
                magnitude_bits(values[i]),
                magnitude_bits(values[comptime!(i + 8)]),
            );
            bits = select(smaller == INFINITY, QUIET_NAN, bits);
        }
    }
    bits
}

/// Applies the factor of the transform to the largest magnitude of columns and rounds it to bf16,
/// as transformed values are. Both preserve the order of magnitudes, so they commute with the
/// maximum.
#[cube]
pub(super) fn with_factor(bits: u32, #[comptime] hadamard: Option<HadamardSize>) -> u32 {
    if comptime!(hadamard.is_some()) {
        let factor = comptime!(hadamard.unwrap().factor());
        magnitude_bits(round_to_bf16(f32::reinterpret(bits) * factor))
    } else {
        bits
    }
}
