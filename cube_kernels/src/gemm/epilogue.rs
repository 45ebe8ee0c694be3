//! The epilogue: `fl(fl(sum · fl(α_a · α_b)) + bias)`, plus the previous contents of the output if
//! it accumulates, rounded once to the output's type. All paths with the full epilogue share it.

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

/// Granularity of the global scale factor of one operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Factor {
    /// No factor: 1.
    One,
    /// One amax for the operand.
    Tensor,
    /// One amax per stored row of the operand.
    PerRow,
    /// One amax per group of a grouped GEMM.
    PerGroup,
}

impl Factor {
    /// Returns the factor kind to load once per tile.
    pub const fn of_tile(self) -> Self {
        match self {
            Self::PerRow => Self::One,
            other => other,
        }
    }
}

/// Amax values that a GEMM computes of its output while it writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OutputAmax {
    /// One amax of the whole output.
    Whole,
    /// One amax per group of a grouped GEMM; zero for a group without elements.
    PerGroup,
}

/// Comptime configuration of an epilogue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EpilogueKind {
    /// Factor of the left operand.
    pub a: Factor,
    /// Factor of the right operand.
    pub b: Factor,
    /// True to add a bias to each row.
    pub bias: bool,
    /// True to add to the previous contents of the output.
    pub accumulate: bool,
    /// Output type.
    pub out: FloatKind,
    /// Amax to compute of the output as stored.
    pub amax: Option<OutputAmax>,
}

/// Returns `α` of a stored row or of `group`: `fl(amax / range)`.
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

/// Inputs of the epilogue besides the sums, and the amax values of the output that it raises.
/// Buffers that `kind` does not use may be any memory.
///
/// `c` aliases the output, although the compiler is told that pointers do not alias. This is sound
/// because an element of `c` is only read to compute the value that replaces it.
#[derive(CubeType, CubeLaunch)]
pub struct Epilogue {
    /// Amax values of `a`.
    pub a_amax: Box<[f32]>,
    /// Amax values of `b`.
    pub b_amax: Box<[f32]>,
    /// Bias per column, with a row per group.
    pub bias: Box<[f32]>,
    /// Previous contents of the output, in words.
    pub c: Box<[u32]>,
    /// Output amax values, as the bits of an `f32`.
    pub amax: Box<[Atomic<u32>]>,
    /// Divisor of an amax of `a`.
    pub a_range: f32,
    /// Divisor of an amax of `b`.
    pub b_range: f32,
    /// Power of two by which sums are multiplied first: kernels that decode elements in registers
    /// decode them as a fraction of their value.
    pub sum_scale: f32,
    /// Configuration.
    #[cube(comptime)]
    pub kind: EpilogueKind,
}

#[cube]
impl Epilogue {
    /// Returns `α` of `a` if a tile of `group` has a single one.
    pub fn a_tile_factor(&self, group: u32) -> f32 {
        let kind = comptime!(self.kind.a.of_tile());
        factor(&self.a_amax, 0u32, group, self.a_range, kind)
    }

    /// Returns `α` of `b` if a tile of `group` has a single one.
    pub fn b_tile_factor(&self, group: u32) -> f32 {
        let kind = comptime!(self.kind.b.of_tile());
        factor(&self.b_amax, 0u32, group, self.b_range, kind)
    }

    /// Returns `α` of stored row `row` of `a`, which belongs to `group`.
    pub fn a_factor(&self, row: u32, group: u32) -> f32 {
        factor(
            &self.a_amax,
            row,
            group,
            self.a_range,
            comptime!(self.kind.a),
        )
    }

    /// Returns `α` of stored row `row` of `b`, which belongs to `group`.
    pub fn b_factor(&self, row: u32, group: u32) -> f32 {
        factor(
            &self.b_amax,
            row,
            group,
            self.b_range,
            comptime!(self.kind.b),
        )
    }

    /// Returns `α` of stored row `row` of `a`; `tile` is the factor of its tile.
    pub fn a_row_factor(&self, row: u32, tile: f32) -> f32 {
        let mut value = tile;
        if comptime!(self.kind.a == Factor::PerRow) {
            value = self.a_amax[row as usize] / self.a_range;
        }
        value
    }

    /// Returns `α` of stored row `row` of `b`; `tile` is the factor of its tile.
    pub fn b_row_factor(&self, row: u32, tile: f32) -> f32 {
        let mut value = tile;
        if comptime!(self.kind.b == Factor::PerRow) {
            value = self.b_amax[row as usize] / self.b_range;
        }
        value
    }

    /// Returns the bias at `index`.
    pub fn load_bias(&self, index: usize) -> f32 {
        let mut value = 0.0f32;
        if comptime!(self.kind.bias) {
            value = self.bias[index];
        }
        value
    }

    /// Returns the previous contents of an output element: `pair` is the index of the even element
    /// of its pair, `odd` selects one of the two.
    pub fn load_c(&self, pair: usize, #[comptime] odd: u32) -> f32 {
        if comptime!(!self.kind.accumulate) {
            0.0f32.runtime()
        } else if comptime!(self.kind.out == FloatKind::F32) {
            f32::reinterpret(self.c[pair + comptime!(odd as usize)])
        } else {
            let word = self.c[pair / 2usize] >> comptime!(16 * odd);
            if comptime!(self.kind.out == FloatKind::Bf16) {
                f32::reinterpret(word << 16u32)
            } else {
                cvt_f32_f16(u32::reinterpret(word))
            }
        }
    }

    /// Raises the output amax, or that of `group`, to the largest `bits` of the plane. All units
    /// must be in the same group.
    pub fn atomic_amax(&self, group: u32, bits: u32) {
        if comptime!(self.kind.amax.is_some()) {
            let plane = plane_max(bits);
            if UNIT_POS_PLANE == 0u32 {
                self.atomic_amax_of_unit(group, plane);
            }
        }
    }

    /// [`atomic_amax`](Self::atomic_amax) by a single unit. The magnitude bits of floats order like
    /// the floats, with NaN above infinity, and a maximum does not depend on the order of its
    /// arguments.
    pub fn atomic_amax_of_unit(&self, group: u32, bits: u32) {
        if comptime!(self.kind.amax.is_some()) {
            let mut index = 0u32;
            if comptime!(self.kind.amax == Some(OutputAmax::PerGroup)) {
                index = group;
            }
            self.amax[index as usize].fetch_max(canonical(bits));
        }
    }
}

/// Epilogue inputs of one output element.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Addends {
    /// Product of the factors of both operands.
    pub alpha: f32,
    /// Bias of the column.
    pub bias: f32,
    /// Previous contents of the output.
    pub c: f32,
}

/// Returns the value of one output element (CUDA C++ only).
#[cube]
pub fn apply(sum: f32, with: Addends, #[comptime] kind: EpilogueKind) -> f32 {
    let scaled = sum * with.alpha;
    // Reinterpreted because a variable would reach the instruction as a pointer. The additions must
    // not be contracted with the multiplication, whose rounding is specified.
    if comptime!(kind.bias && kind.accumulate) {
        let biased = f32::reinterpret(ptx::add_rn(scaled, f32::reinterpret(with.bias)));
        ptx::add_rn(biased, f32::reinterpret(with.c))
    } else if comptime!(kind.bias) {
        ptx::add_rn(scaled, f32::reinterpret(with.bias))
    } else if comptime!(kind.accumulate) {
        ptx::add_rn(scaled, f32::reinterpret(with.c))
    } else {
        scaled
    }
}

/// [`apply()`] on any device. If the compiler may contract additions with the preceding
/// multiplication, as CUDA's does, `ordered` makes them separate instructions.
#[cube]
pub fn apply_on(
    sum: f32,
    with: Addends,
    #[comptime] ordered: bool,
    #[comptime] kind: EpilogueKind,
) -> f32 {
    if comptime!(ordered) {
        apply(sum, with, kind)
    } else {
        let mut value = sum * with.alpha;
        if comptime!(kind.bias) {
            value += with.bias;
        }
        if comptime!(kind.accumulate) {
            value += with.c;
        }
        value
    }
}

/// Rounds two neighbours to the 2-byte type `out` and packs them.
#[cube]
pub fn pack_pair(even: f32, odd: f32, #[comptime] out: FloatKind) -> u32 {
    if comptime!(out == FloatKind::Bf16) {
        cvt_rn_bf16x2(even, odd)
    } else {
        cvt_rn_f16x2(even, odd)
    }
}

/// Returns the magnitude bits of the larger of two neighbours, as `f32` after rounding to `out`.
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

/// Host side of [`Epilogue`]. Handles that `kind` does not use may be any memory.
pub(crate) struct EpilogueArgs {
    pub kind: EpilogueKind,
    pub a_amax: Handle,
    pub b_amax: Handle,
    pub ranges: [f32; 2],
    pub bias: Handle,
    /// Output amax buffer: as many `f32` as `kind.amax` requires.
    pub amax: Handle,
}

impl EpilogueArgs {
    /// Returns the number of amax values that `kind.amax` requires for `groups` groups. It is at
    /// least 1; kernels do not read that one if no amax is requested.
    pub fn amax_len(&self, groups: usize) -> usize {
        match self.kind.amax {
            Some(OutputAmax::PerGroup) => groups,
            Some(OutputAmax::Whole) | None => 1,
        }
    }

    /// Returns the launch arguments for `rows` stored rows of `a` and of `b` in `groups` groups,
    /// and output memory `c` with its length in words.
    ///
    /// # Safety
    /// The memory must hold everything that `kind` uses.
    pub unsafe fn launch(
        &self,
        rows: [usize; 2],
        groups: usize,
        c: (&Handle, usize),
        sum_scale: f32,
    ) -> EpilogueLaunch {
        // SAFETY: the caller guarantees it.
        let memory =
            |handle: &Handle, len: usize| unsafe { BufferArg::from_raw_parts(handle.clone(), len) };
        EpilogueLaunch::new(
            memory(&self.a_amax, rows[0]),
            memory(&self.b_amax, rows[1]),
            memory(&self.bias, rows[1]),
            memory(c.0, c.1),
            memory(&self.amax, self.amax_len(groups)),
            self.ranges[0],
            self.ranges[1],
            sum_scale,
            self.kind,
        )
    }
}

/// Row pitch in bytes of the 16 rows that a warp stages for its stores: 128 of data, plus 16
/// against bank conflicts.
const STAGING_ROW: usize = 144;
/// Bytes that a warp stages at a time.
pub(crate) const STAGING: usize = 16 * STAGING_ROW;

/// Portion of an output tile that one warp writes.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(crate) struct WarpTile {
    /// First row of the output.
    pub row: u32,
    /// End row of the group (exclusive).
    pub end: u32,
    /// First column.
    pub column: u32,
    /// Number of output columns.
    pub n: u32,
    /// Group index.
    pub group: u32,
    /// Shared memory address of the warp's `STAGING` bytes.
    pub staging: u32,
}

/// Applies the epilogue to the 16 x `tile_n` sums of one warp and writes them. For every eight
/// columns a thread holds two neighbours in row `lane / 4` and in the row 8 below ("Register
/// Fragments for wgmma"). They pass through shared memory so that eight threads write 128 bytes of
/// one row. `out` is in units of 16 bytes.
#[cube]
pub(crate) fn write_warp_tile<N: Size>(
    sums: Vector<f32, N>,
    tile: WarpTile,
    epilogue: &Epilogue,
    out: &mut [Vector<u32, Const<4>>],
    #[comptime] tile_n: usize,
) {
    let kind = comptime!(epilogue.kind);
    let lane = UNIT_POS % 32u32;
    let size = comptime!(kind.out.size());
    // Columns per 128 bytes.
    let width = comptime!(128 / kind.out.size());
    let upper = tile.row + lane / 4u32;
    let lower = upper + 8u32;
    // Rows and columns out of bounds read the factors of row and column 0, and are not written.
    let upper_in = select(upper < tile.end, upper, 0u32);
    let lower_in = select(lower < tile.end, lower, 0u32);
    let upper_factor = epilogue.a_factor(upper_in, tile.group);
    let lower_factor = epilogue.a_factor(lower_in, tile.group);
    let tile_factor = epilogue.b_tile_factor(tile.group);
    // The last chunk of a tile may be narrower.
    let right = min(tile.n, tile.column + comptime!(tile_n as u32));
    let mut largest = 0u32;
    #[unroll]
    for chunk in 0..comptime!(tile_n.div_ceil(width)) {
        // Wait until the warp has read the previous chunk.
        sync_plane();
        #[unroll]
        for j in 0..comptime!(usize::min(width, tile_n - chunk * width) / 8) {
            let first = comptime!((chunk * width / 8 + j) * 4);
            let column =
                tile.column + comptime!((chunk * width + j * 8) as u32) + (lane % 4u32) * 2u32;
            let inside = column < tile.n;
            let column = select(inside, column, 0u32);
            // Index of this column in the group's rows of `b` and in its bias.
            let own = tile.group * tile.n + column;
            let even_factor = epilogue.b_row_factor(own, tile_factor);
            let odd_factor = epilogue.b_row_factor(own + 1u32, tile_factor);
            let even_bias = epilogue.load_bias(own as usize);
            let odd_bias = epilogue.load_bias((own + 1u32) as usize);
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
                let pair = line as usize * tile.n as usize + column as usize;
                let even = Addends {
                    alpha: line_factor * even_factor,
                    bias: even_bias,
                    c: epilogue.load_c(pair, 0u32),
                };
                let even = apply(sums.extract(comptime!(first + 2 * half)), even, kind);
                let odd = Addends {
                    alpha: line_factor * odd_factor,
                    bias: odd_bias,
                    c: epilogue.load_c(pair, 1u32),
                };
                let odd = apply(sums.extract(comptime!(first + 2 * half + 1)), odd, kind);
                let target = tile.staging
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
                    if inside && row < tile.end {
                        largest = max(largest, rounded_magnitude(even, odd, comptime!(kind.out)));
                    }
                }
            }
        }
        sync_plane();
        #[unroll]
        for i in 0..4u32 {
            let row = tile.row + comptime!(i * 4) + lane / 8u32;
            let column = tile.column
                + comptime!((chunk * width) as u32)
                + (lane % 8u32) * comptime!(16 / size as u32);
            let words = ld_shared_v4(
                tile.staging
                    + (comptime!(i * 4) + lane / 8u32) * comptime!(STAGING_ROW as u32)
                    + (lane % 8u32) * 16u32,
            );
            if row < tile.end && column < right {
                let vector = row as usize * (tile.n as usize / comptime!(16 / size))
                    + column as usize / comptime!(16 / size);
                out[vector] = words;
            }
        }
    }
    epilogue.atomic_amax(tile.group, largest);
}
