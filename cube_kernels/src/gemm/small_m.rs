//! The product of few rows of `a` with a packed `b` (decoding, 1 to 16 rows): bound by reading the
//! codes and scales of `b` once. They are expanded in registers, and no bf16 copy of `b` is in memory.
//!
//! `b` is the left operand of `mma.sync` (16 of its rows at a time) and `a` the right one (8 rows). A
//! lane takes 32 codes of a row from each 128: the order of the contraction inside an instruction is
//! free as long as both operands agree, so lane `4 g + c` reads 16 bytes of row `g` at `32 c`, and the
//! same columns of `a`. The warps of a cube share its rows and take turns along the contraction; their
//! sums are added in the order of the warps.

use cubecl::{prelude::*, server::Handle};

use super::{
    epilogue::{EpilogueKind, Factor, factor, finish, held},
    product::{Elements, Operand},
    sm90::EpilogueArgs,
};
use crate::{
    BLOCK,
    cube::ptx_sm90::{
        decode_e2m1x8_pairs, decode_e4m3x2, interleave_pairs, mma_16x8x16, pack_bf16, pack_f16,
    },
    device::{DevicePacked, FloatKind, address_type},
};

/// Most rows of `a`.
///
/// Measured (H100, N = K = 8192, microseconds, this kernel / tiles of the fused one, before the last
/// version of either): 1 row 19.7 / 33.2, 16 rows 22.6 / 38.0, 32 rows 33.7 / 30.8.
pub const MAX_ROWS: usize = 16;
/// Columns that a warp takes at a time.
const CHUNK: usize = 128;

/// How the rows of `a` are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Left {
    /// As codes, which every cube decodes for itself. Decoding them once, by a kernel before, was
    /// measured: the second launch and the wider reads cost more.
    Packed,
    /// As bf16.
    Bf16,
}

/// The shape of a cube's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Warps of a cube.
    pub warps: usize,
    /// Groups of 16 rows of `b`.
    pub strips: usize,
    /// Groups of 8 rows of `a`.
    pub columns: usize,
    /// The contraction is no multiple of `CHUNK`.
    pub tail: bool,
    /// How `a` is read.
    pub left: Left,
}

impl Shape {
    /// Rows of `b`.
    const fn rows(self) -> usize {
        16 * self.strips
    }

    /// Floats from one row of `a` to the next in the sums that warps exchange: four more than there
    /// are, so that the lanes of a warp write to different banks.
    const fn stride(self) -> usize {
        self.rows() + 4
    }

    /// Floats of the sums of one warp.
    const fn sums(self) -> usize {
        8 * self.columns * self.stride()
    }
}

/// `out[m, n] = α_a · α_b · Σ a[m, k] · b[n, k] (+ bias[n]) (+ out[m, n])` for the rows of `b` of one
/// cube. `codes` are in units of 32, `scales` of two, and `a`, where it is bf16, of eight elements.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn small_m_kernel(
    a: &[Vector<u32, Const<4>>],
    a_codes: &[Vector<u32, Const<4>>],
    a_scales: &[u16],
    codes: &[Vector<u32, Const<4>>],
    scales: &[u16],
    a_amax: &[f32],
    b_amax: &[f32],
    bias: &[f32],
    before: &[u32],
    out: &mut [u32],
    m: u32,
    n: u32,
    k: u32,
    a_range: f32,
    b_range: f32,
    #[comptime] shape: Shape,
    #[comptime] kind: EpilogueKind,
) {
    let strips = comptime!(shape.strips);
    let columns = comptime!(shape.columns);
    let mut exchange: Shared<[f32]> =
        Shared::new_aligned_slice(comptime!(shape.warps * shape.sums()), 16usize);
    let unit = UNIT_POS;
    let warp = unit / 32u32;
    let lane = unit % 32u32;
    let group = lane / 4u32;
    let quarter = lane % 4u32;
    let row0 = CUBE_POS as u32 * comptime!(shape.rows() as u32);
    // Vectors of 32 codes in a row.
    let width = k / 32u32;
    let chunks = k.div_ceil(comptime!(CHUNK as u32));

    // Rows outside read the last one, and are not written.
    let mut rows = Array::<usize>::new(comptime!(2 * shape.strips));
    #[unroll]
    for i in 0..comptime!(2 * strips) {
        let row = row0 + comptime!(i as u32 * 8) + group;
        rows[i] = (min(row, n - 1u32) * width) as usize;
    }
    let mut lines = Array::<usize>::new(comptime!(shape.columns));
    #[unroll]
    for i in 0..columns {
        let line = comptime!(i as u32 * 8) + group;
        lines[i] = (min(line, m - 1u32) * width) as usize;
    }
    let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!(shape.strips * shape.columns));
    #[unroll]
    for i in 0..comptime!(strips * columns) {
        sums[i] = Vector::new(0.0f32);
    }

    let mut next = Array::<Vector<u32, Const<4>>>::new(comptime!(2 * shape.strips));
    let mut next_scales = Array::<u16>::new(comptime!(2 * shape.strips));
    let mut words = Array::<Vector<u32, Const<4>>>::new(comptime!(2 * shape.strips));
    let mut word_scales = Array::<u16>::new(comptime!(2 * shape.strips));
    let mut chunk = warp;
    #[unroll]
    for i in 0..comptime!(2 * strips) {
        let at = min(chunk * 4u32 + quarter, width - 1u32) as usize;
        next[i] = codes[rows[i] + at];
        next_scales[i] = scales[rows[i] + at];
    }
    let is_packed = comptime!(shape.left == Left::Packed);
    let mut next_lines = Array::<Vector<u32, Const<4>>>::new(comptime!(shape.columns));
    let mut next_line_scales = Array::<u16>::new(comptime!(shape.columns));
    let mut line_words = Array::<Vector<u32, Const<4>>>::new(comptime!(shape.columns));
    let mut line_scales = Array::<u16>::new(comptime!(shape.columns));
    if comptime!(is_packed) {
        #[unroll]
        for j in 0..columns {
            let at = min(chunk * 4u32 + quarter, width - 1u32) as usize;
            next_lines[j] = a_codes[lines[j] + at];
            next_line_scales[j] = a_scales[lines[j] + at];
        }
    }
    while chunk < chunks {
        let at = chunk * 4u32 + quarter;
        #[unroll]
        for i in 0..comptime!(2 * strips) {
            words[i] = next[i];
            word_scales[i] = next_scales[i];
            if comptime!(shape.tail) {
                // Beyond the end nothing is added: zeros on both sides, since one of them may be
                // infinite.
                if at >= width {
                    words[i] = Vector::new(0u32);
                    word_scales[i] = 0u16;
                }
            }
        }
        let column = min(at, width - 1u32) as usize;
        if comptime!(is_packed) {
            #[unroll]
            for j in 0..columns {
                line_words[j] = next_lines[j];
                line_scales[j] = next_line_scales[j];
            }
        }
        // The next chunk is under way while this one is multiplied.
        chunk += comptime!(shape.warps as u32);
        if chunk < chunks {
            #[unroll]
            for i in 0..comptime!(2 * strips) {
                let ahead = min(chunk * 4u32 + quarter, width - 1u32) as usize;
                next[i] = codes[rows[i] + ahead];
                next_scales[i] = scales[rows[i] + ahead];
            }
            if comptime!(is_packed) {
                #[unroll]
                for j in 0..columns {
                    let ahead = min(chunk * 4u32 + quarter, width - 1u32) as usize;
                    next_lines[j] = a_codes[lines[j] + ahead];
                    next_line_scales[j] = a_scales[lines[j] + ahead];
                }
            }
        }
        #[unroll]
        for half in 0..2usize {
            // One block of 16 is two words.
            let mut factors = Array::<u32>::new(comptime!(2 * shape.strips));
            #[unroll]
            for i in 0..comptime!(2 * strips) {
                let both = decode_e4m3x2(u16::reinterpret(word_scales[i]));
                factors[i] = both.extract(half);
            }
            #[unroll]
            for part in 0..2usize {
                let word = comptime!(2 * half + part);
                let mut others = Array::<Vector<u32, Const<4>>>::new(comptime!(shape.columns));
                #[unroll]
                for j in 0..columns {
                    if comptime!(is_packed) {
                        let both = decode_e4m3x2(u16::reinterpret(line_scales[j]));
                        others[j] =
                            decode_e2m1x8_pairs(line_words[j].extract(word), both.extract(half));
                    } else {
                        others[j] = interleave_pairs(a[(lines[j] + column) * 4usize + word]);
                    }
                    // Two conditions, of which only the inner one is left to the kernel.
                    #[allow(clippy::collapsible_if)]
                    if comptime!(shape.tail) {
                        if at >= width {
                            others[j] = Vector::new(0u32);
                        }
                    }
                }
                #[unroll]
                for i in 0..strips {
                    let (low, high) = (comptime!(2 * i), comptime!(2 * i + 1));
                    let upper = decode_e2m1x8_pairs(
                        words[low].extract(word),
                        u32::reinterpret(factors[low]),
                    );
                    let lower = decode_e2m1x8_pairs(
                        words[high].extract(word),
                        u32::reinterpret(factors[high]),
                    );
                    #[unroll]
                    for j in 0..columns {
                        let at = comptime!(i * columns + j);
                        let other = others[j];
                        let sum = mma_16x8x16(
                            sums[at],
                            upper.extract(0usize),
                            lower.extract(0usize),
                            upper.extract(1usize),
                            lower.extract(1usize),
                            other.extract(0usize),
                            other.extract(1usize),
                        );
                        sums[at] = mma_16x8x16(
                            sum,
                            upper.extract(2usize),
                            lower.extract(2usize),
                            upper.extract(3usize),
                            lower.extract(3usize),
                            other.extract(2usize),
                            other.extract(3usize),
                        );
                    }
                }
            }
        }
    }

    // A lane has rows `group` and 8 below of a strip, for two neighbouring rows of `a`.
    let stride = comptime!(shape.stride() as u32);
    #[unroll]
    for i in 0..strips {
        #[unroll]
        for j in 0..columns {
            let sum = sums[comptime!(i * columns + j)];
            let base = warp * comptime!(shape.sums() as u32)
                + (comptime!(j as u32 * 8) + quarter * 2u32) * stride
                + comptime!(i as u32 * 16)
                + group;
            exchange[base as usize] = sum.extract(0usize);
            exchange[(base + stride) as usize] = sum.extract(1usize);
            exchange[(base + 8u32) as usize] = sum.extract(2usize);
            exchange[(base + stride + 8u32) as usize] = sum.extract(3usize);
        }
    }
    sync_cube();

    let whole_factor = factor(b_amax, 0u32, 0u32, b_range, comptime!(kind.b.of_tile()));
    let pairs = comptime!(shape.rows() as u32 / 2);
    let mut item = unit;
    while item < m * pairs {
        let line = item / pairs;
        let local = (item % pairs) * 2u32;
        let column = row0 + local;
        if column < n {
            let mut even = 0.0f32;
            let mut odd = 0.0f32;
            #[unroll]
            for w in 0..comptime!(shape.warps) {
                let base = comptime!((w * shape.sums()) as u32) + line * stride + local;
                even += exchange[base as usize];
                odd += exchange[(base + 1u32) as usize];
            }
            let line_factor = factor(a_amax, line, 0u32, a_range, kind.a);
            let mut even_factor = whole_factor;
            let mut odd_factor = whole_factor;
            if comptime!(kind.b == Factor::PerRow) {
                even_factor = factor(b_amax, column, 0u32, b_range, kind.b);
                odd_factor = factor(b_amax, column + 1u32, 0u32, b_range, kind.b);
            }
            let mut even_bias = 0.0f32;
            let mut odd_bias = 0.0f32;
            if comptime!(kind.bias) {
                even_bias = bias[column as usize];
                odd_bias = bias[(column + 1u32) as usize];
            }
            let pair = line as usize * n as usize + column as usize;
            // Decoded elements were 2^-8 times what they stand for.
            let unit = comptime!(if shape.left == Left::Packed {
                65536.0f32
            } else {
                256.0f32
            });
            let even = finish(
                even * unit,
                line_factor * even_factor,
                even_bias,
                held(before, pair, 0u32, kind),
                kind,
            );
            let odd = finish(
                odd * unit,
                line_factor * odd_factor,
                odd_bias,
                held(before, pair, 1u32, kind),
                kind,
            );
            if comptime!(kind.out == FloatKind::F32) {
                out[pair] = u32::reinterpret(even);
                out[pair + 1usize] = u32::reinterpret(odd);
            } else if comptime!(kind.out == FloatKind::Bf16) {
                out[pair / 2usize] = pack_bf16(f32::reinterpret(even), f32::reinterpret(odd));
            } else {
                out[pair / 2usize] = pack_f16(f32::reinterpret(even), f32::reinterpret(odd));
            }
        }
        item += CUBE_DIM;
    }
}

/// The shape for `m` rows of `a` and `n` of `b`: as many strips as keep all processors busy.
fn shape(client: &Client, m: usize, n: usize, k: usize) -> Shape {
    let processors = client.properties().hardware.num_streaming_multiprocessors;
    let enough = processors.unwrap_or(132) as usize * 3 / 4;
    let columns = m.div_ceil(8).next_power_of_two();
    // More strips share the decoding of `a`, fewer let two cubes run on a processor.
    let most = if columns == 1 { 2 } else { 4 };
    let strips = [4, 2, 1]
        .into_iter()
        .find(|&strips| strips <= most && n.div_ceil(16 * strips) >= enough)
        .unwrap_or(1);
    Shape {
        warps: 8,
        strips,
        columns,
        tail: !k.is_multiple_of(CHUNK),
        left: Left::Bf16,
    }
}

/// Whether this kernel takes a product of `m` rows with a contraction of `k` (as stored).
pub(super) fn takes(m: usize, k: usize) -> bool {
    m <= MAX_ROWS && k > 0 && k.is_multiple_of(2 * BLOCK)
}

/// Queues the product of `a` and the packed `b`, both `k` long, into `out`.
pub(super) fn launch(
    client: &Client,
    a: &Operand,
    b: &DevicePacked,
    k: usize,
    epilogue: &EpilogueArgs,
    out: &Handle,
) {
    let (m, n) = (a.outer(), b.outer());
    // SAFETY (of every argument): the caller checked the operands against their shapes. What the
    // kernel does not read of `a` is any memory.
    let buffer = |handle: &Handle, len| unsafe { BufferArg::from_raw_parts(handle.clone(), len) };
    let shape = shape(client, m, n, k);
    let unread = out;
    let (a_codes, a_scales, dense, left) = match a.elements {
        Elements::Packed(packed) => (&packed.codes, &packed.scales, unread, Left::Packed),
        Elements::Bf16(matrix) => (unread, unread, &matrix.handle, Left::Bf16),
    };
    let shape = Shape { left, ..shape };
    let words = m * n * epilogue.kind.out.size() / 4;
    // SAFETY: rows and columns outside are clamped where they are read and not written.
    unsafe {
        small_m_kernel::launch_unchecked(
            client,
            CubeCount::Static(n.div_ceil(shape.rows()) as u32, 1, 1),
            CubeDim::new_1d(32 * shape.warps as u32),
            address_type((n * k).max(m * n)),
            buffer(dense, m * k / 8),
            buffer(a_codes, m * k / 32),
            buffer(a_scales, m * k / 32),
            buffer(&b.codes, n * k / 32),
            buffer(&b.scales, n * k / 32),
            buffer(&epilogue.a_amax, m),
            buffer(&epilogue.b_amax, n),
            buffer(&epilogue.bias, n),
            buffer(out, words),
            buffer(out, words),
            m as u32,
            n as u32,
            k as u32,
            epilogue.ranges[0],
            epilogue.ranges[1],
            shape,
            epilogue.kind,
        );
    }
}
