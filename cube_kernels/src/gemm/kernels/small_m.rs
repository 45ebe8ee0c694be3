//! The product of few rows of `a` with a packed `b` (decoding, 1 to 16 rows): bound by reading the
//! codes and scales of `b` once. They are expanded in registers, and no bf16 copy of `b` is in memory.
//!
//! `b` is the left operand of `mma.sync` (16 of its rows at a time) and `a` the right one (8 rows). A
//! lane takes 32 codes of a row from each 128: the order of the contraction inside an instruction is
//! free as long as both operands agree, so lane `4 g + c` reads 16 bytes of row `g` at `32 c`, and the
//! same columns of `a`. The warps of a cube share its rows and take turns along the contraction; their
//! sums are added in the order of the warps.

use cubecl::{prelude::*, server::Handle};

use super::{sm90_bf16::check_sm90, sm120_nvfp4::check_sm120};
use crate::{
    BLOCK, Nvfp4Error,
    capabilities::{Capabilities, GemmBackend},
    cube::{
        codec::{decode_e2m1x8_pairs, decode_e4m3x2, decode_e4m3x2_sm80, interleave_pairs},
        ptx::{
            cvt_rn_bf16x2, cvt_rn_f16x2, cvta_to_global, ld_global_nc_no_allocate_v2,
            ld_global_nc_no_allocate_v4, ld_global_nc_u8, ld_global_nc_u16, mma_m16n8k16_bf16,
        },
    },
    gemm::{
        epilogue::{EpilogueKind, Factor, factor, finish, held, raise, rounded_magnitude},
        operand::OperandLayout,
        problem::{
            Candidate, Device, GemmShape, Kernel, Launch, Plan, Problem, Refusal, UNALIGNED,
            misfit, sms,
        },
        scheduler::GroupedDim,
    },
    memory::address_type,
    tensor::FloatKind,
};

/// Columns that a warp takes at a time.
const CHUNK: usize = 128;
/// Most rows of `a`.
///
/// Measured (H100, N = K = 8192, microseconds, this kernel / tiles of the fused one, before the last
/// version of either): 1 row 19.7 / 33.2, 16 rows 22.6 / 38.0, 32 rows 33.7 / 30.8.
pub const MAX_ROWS: usize = 16;

/// How the rows of `a` are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SmallMLeft {
    /// As codes, which every cube decodes for itself. Decoding them once, by a kernel before, was
    /// measured: the second launch and the wider reads cost more.
    Packed,
    /// As bf16.
    Bf16,
}

/// The shape of a cube's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SmallMShape {
    /// Warps of a cube.
    pub warps: usize,
    /// Groups of 16 rows of `b`.
    pub strips: usize,
    /// Groups of 8 rows of `a`.
    pub columns: usize,
    /// Chunks of a warp that are on the way at a time.
    pub ahead: usize,
    /// The contraction is no multiple of `CHUNK`.
    pub tail: bool,
    /// It is an odd number of blocks, so that rows do not begin at multiples of 16 bytes and end in half a
    /// vector.
    pub halves: bool,
    /// How `a` is read.
    pub left: SmallMLeft,
    /// The device has an instruction that converts E4M3.
    pub converts: bool,
}

impl SmallMShape {
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

/// Vector number `index` of the codes of a row, whose first block is number `first` of those at `from`. Where
/// rows end in half a vector, the last block stands for the one behind it.
#[cube]
fn load_codes(
    from: u64,
    first: usize,
    index: u32,
    blocks: u32,
    #[comptime] halves: bool,
) -> Vector<u32, Const<4>> {
    let block = first + 2usize * index as usize;
    let address = from + u64::cast_from(block) * 8u64;
    if comptime!(halves) {
        let second = first + min(2u32 * index + 1u32, blocks - 1u32) as usize;
        let low = ld_global_nc_no_allocate_v2(address);
        let high = ld_global_nc_no_allocate_v2(from + u64::cast_from(second) * 8u64);
        let mut words = Vector::<u32, Const<4>>::new(0u32);
        words.insert(0usize, low.extract(0usize));
        words.insert(1usize, low.extract(1usize));
        words.insert(2usize, high.extract(0usize));
        words.insert(3usize, high.extract(1usize));
        words
    } else {
        ld_global_nc_no_allocate_v4(address)
    }
}

/// The two scales of [`load_codes()`]'s vector.
#[cube]
fn load_scales(from: u64, first: usize, index: u32, blocks: u32, #[comptime] halves: bool) -> u16 {
    let block = first + 2usize * index as usize;
    let address = from + u64::cast_from(block);
    if comptime!(halves) {
        let second = first + min(2u32 * index + 1u32, blocks - 1u32) as usize;
        let high = ld_global_nc_u8(from + u64::cast_from(second));
        u16::cast_from(ld_global_nc_u8(address) | (high << 8u32))
    } else {
        u16::cast_from(ld_global_nc_u16(address))
    }
}

/// Two scales as [`decode_e2m1x8_pairs()`] takes them.
#[cube]
fn decode_scales(bytes: u16, #[comptime] shape: SmallMShape) -> Vector<u32, Const<2>> {
    if comptime!(shape.converts) {
        decode_e4m3x2(bytes)
    } else {
        decode_e4m3x2_sm80(bytes)
    }
}

/// `out[m, n] = α_a · α_b · Σ a[m, k] · b[n, k] (+ bias[n]) (+ out[m, n])` for the rows of `b` of one
/// cube. `a`, where it is bf16, is in units of eight elements.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn small_m_kernel(
    a: &[Vector<u32, Const<4>>],
    a_codes: &[u32],
    a_scales: &[u8],
    codes: &[u32],
    scales: &[u8],
    a_amax: &[f32],
    b_amax: &[f32],
    bias: &[f32],
    before: &[u32],
    out: &mut [u32],
    amax: &mut [Atomic<u32>],
    m: u32,
    n: u32,
    k: u32,
    a_range: f32,
    b_range: f32,
    #[comptime] shape: SmallMShape,
    #[comptime] kind: EpilogueKind,
) {
    let strips = comptime!(shape.strips);
    let columns = comptime!(shape.columns);
    let is_packed = comptime!(shape.left == SmallMLeft::Packed);
    let mut exchange: Shared<[f32]> =
        Shared::new_aligned_slice(comptime!(shape.warps * shape.sums()), 16usize);
    let unit = UNIT_POS;
    let warp = unit / 32u32;
    let lane = unit % 32u32;
    let group = lane / 4u32;
    let quarter = lane % 4u32;
    let row0 = CUBE_POS as u32 * comptime!(shape.rows() as u32);
    let halves = comptime!(shape.halves);
    // Blocks in a row, and vectors of two of them.
    let blocks = k / 16u32;
    let width = blocks.div_ceil(2u32);
    let chunks = width.div_ceil(4u32);

    // Rows outside read the last one, and are not written.
    let mut rows = Array::<usize>::new(comptime!(2 * shape.strips));
    #[unroll]
    for i in 0..comptime!(2 * strips) {
        let row = row0 + comptime!(i as u32 * 8) + group;
        rows[i] = (min(row, n - 1u32) * blocks) as usize;
    }
    let mut lines = Array::<usize>::new(comptime!(shape.columns));
    #[unroll]
    for i in 0..columns {
        let line = comptime!(i as u32 * 8) + group;
        lines[i] = (min(line, m - 1u32) * blocks) as usize;
    }
    let mut sums = Array::<Vector<f32, Const<4>>>::new(comptime!(shape.strips * shape.columns));
    #[unroll]
    for i in 0..comptime!(strips * columns) {
        sums[i] = Vector::new(0.0f32);
    }

    let b_codes = cvta_to_global::<u32>(codes.as_ptr());
    let b_scales = cvta_to_global::<u8>(scales.as_ptr());
    let left_codes = cvta_to_global::<u32>(a_codes.as_ptr());
    let left_scales = cvta_to_global::<u8>(a_scales.as_ptr());
    // Of each chunk that is on the way.
    let mut words = Array::<Vector<u32, Const<4>>>::new(comptime!(shape.ahead * 2 * shape.strips));
    let mut word_scales = Array::<u16>::new(comptime!(shape.ahead * 2 * shape.strips));
    let mut line_words =
        Array::<Vector<u32, Const<4>>>::new(comptime!(shape.ahead * shape.columns));
    let mut line_scales = Array::<u16>::new(comptime!(shape.ahead * shape.columns));
    #[unroll]
    for set in 0..comptime!(shape.ahead) {
        let chunk = warp + comptime!((set * shape.warps) as u32);
        let at = min(chunk * 4u32 + quarter, width - 1u32);
        if comptime!(is_packed) {
            #[unroll]
            for j in 0..columns {
                let to = comptime!(set * columns + j);
                line_words[to] = load_codes(left_codes, lines[j], at, blocks, halves);
                line_scales[to] = load_scales(left_scales, lines[j], at, blocks, halves);
            }
        }
        #[unroll]
        for i in 0..comptime!(2 * strips) {
            let to = comptime!(set * 2 * strips + i);
            words[to] = load_codes(b_codes, rows[i], at, blocks, halves);
            word_scales[to] = load_scales(b_scales, rows[i], at, blocks, halves);
        }
    }
    let mut first = warp;
    while first < chunks {
        #[unroll]
        for set in 0..comptime!(shape.ahead) {
            let chunk = first + comptime!((set * shape.warps) as u32);
            if chunk < chunks {
                let at = chunk * 4u32 + quarter;
                let column = min(at, width - 1u32);
                let next = chunk + comptime!((shape.ahead * shape.warps) as u32);
                let ahead = min(next * 4u32 + quarter, width - 1u32);
                #[unroll]
                for half in 0..2usize {
                    // Beyond the end nothing is added: zeros on both sides, since one of them may be infinite.
                    let inside = at * 2u32 + comptime!(half as u32) < blocks;
                    // One block of 16 is two words.
                    let mut others =
                        Array::<Vector<u32, Const<4>>>::new(comptime!(2 * shape.columns));
                    #[unroll]
                    for j in 0..columns {
                        let line = comptime!(set * columns + j);
                        #[unroll]
                        for part in 0..2usize {
                            let word = comptime!(2 * half + part);
                            let to = comptime!(2 * j + part);
                            if comptime!(is_packed) {
                                let factors =
                                    decode_scales(u16::reinterpret(line_scales[line]), shape);
                                others[to] = decode_e2m1x8_pairs(
                                    line_words[line].extract(word),
                                    factors.extract(half),
                                );
                            } else {
                                // Two to a block; those behind the last block read its last.
                                let mut vector = column * 4u32 + comptime!(word as u32);
                                if comptime!(halves) {
                                    vector = min(vector, 2u32 * blocks - 1u32);
                                }
                                let vector = lines[j] * 2usize + vector as usize;
                                others[to] = interleave_pairs(a[vector]);
                            }
                            // Two conditions, of which only the inner one is left to the kernel.
                            #[allow(clippy::collapsible_if)]
                            if comptime!(shape.tail) {
                                if !inside {
                                    others[to] = Vector::new(0u32);
                                }
                            }
                        }
                    }
                    // As above.
                    #[allow(clippy::collapsible_if)]
                    if comptime!(is_packed && half == 1) {
                        if next < chunks {
                            #[unroll]
                            for j in 0..columns {
                                let to = comptime!(set * columns + j);
                                line_words[to] =
                                    load_codes(left_codes, lines[j], ahead, blocks, halves);
                                line_scales[to] =
                                    load_scales(left_scales, lines[j], ahead, blocks, halves);
                            }
                        }
                    }
                    #[unroll]
                    for i in 0..strips {
                        let low = comptime!(set * 2 * strips + 2 * i);
                        let high = comptime!(set * 2 * strips + 2 * i + 1);
                        let low_factor = decode_scales(u16::reinterpret(word_scales[low]), shape);
                        let high_factor = decode_scales(u16::reinterpret(word_scales[high]), shape);
                        #[unroll]
                        for part in 0..2usize {
                            let word = comptime!(2 * half + part);
                            let mut low_word = words[low].extract(word);
                            let mut high_word = words[high].extract(word);
                            let mut low_scale = low_factor.extract(half);
                            let mut high_scale = high_factor.extract(half);
                            // As above.
                            #[allow(clippy::collapsible_if)]
                            if comptime!(shape.tail) {
                                if !inside {
                                    low_word = 0u32;
                                    high_word = 0u32;
                                    low_scale = 0u32;
                                    high_scale = 0u32;
                                }
                            }
                            let upper = decode_e2m1x8_pairs(
                                u32::reinterpret(low_word),
                                u32::reinterpret(low_scale),
                            );
                            let lower = decode_e2m1x8_pairs(
                                u32::reinterpret(high_word),
                                u32::reinterpret(high_scale),
                            );
                            #[unroll]
                            for j in 0..columns {
                                let at = comptime!(i * columns + j);
                                let other = others[comptime!(2 * j + part)];
                                let sum = mma_m16n8k16_bf16(
                                    sums[at],
                                    upper.extract(0usize),
                                    lower.extract(0usize),
                                    upper.extract(1usize),
                                    lower.extract(1usize),
                                    other.extract(0usize),
                                    other.extract(1usize),
                                );
                                sums[at] = mma_m16n8k16_bf16(
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
                        // What the lane held of these rows is multiplied: the next is under way while
                        // the other strips are.
                        #[allow(clippy::collapsible_if)]
                        if comptime!(half == 1) {
                            if next < chunks {
                                #[unroll]
                                for row in 0..2usize {
                                    let from = rows[comptime!(2 * i + row)];
                                    let to = comptime!(set * 2 * strips + 2 * i + row);
                                    words[to] = load_codes(b_codes, from, ahead, blocks, halves);
                                    word_scales[to] =
                                        load_scales(b_scales, from, ahead, blocks, halves);
                                }
                            }
                        }
                    }
                }
            }
        }
        first += comptime!((shape.ahead * shape.warps) as u32);
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
    let mut largest = 0u32;
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
            let unit = comptime!(if shape.left == SmallMLeft::Packed {
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
                out[pair / 2usize] = cvt_rn_bf16x2(f32::reinterpret(even), f32::reinterpret(odd));
            } else {
                out[pair / 2usize] = cvt_rn_f16x2(f32::reinterpret(even), f32::reinterpret(odd));
            }
            if comptime!(kind.amax.is_some()) {
                largest = max(largest, rounded_magnitude(even, odd, comptime!(kind.out)));
            }
        }
        item += CUBE_DIM;
    }
    if comptime!(kind.amax.is_some()) {
        raise(amax, 0u32, largest, kind);
    }
}

/// The shape for `m` rows of `a` and `n` of `b`: as many strips as keep all processors busy, and as many warps
/// and chunks under way as registers allow.
fn shape(
    client: &Client,
    capabilities: &Capabilities,
    (m, n, k): (usize, usize, usize),
    left: SmallMLeft,
) -> SmallMShape {
    let enough = sms(client) * 3 / 4;
    let columns = m.div_ceil(8).next_power_of_two();
    let (warps, ahead) = if columns == 1 { (16, 1) } else { (8, 2) };
    SmallMShape {
        warps,
        strips: if n.div_ceil(32) >= enough { 2 } else { 1 },
        columns,
        ahead,
        tail: !k.is_multiple_of(CHUNK),
        halves: !k.is_multiple_of(2 * BLOCK),
        left,
        converts: capabilities.compute_capability >= Some(89),
    }
}

/// The GEMM of few rows with a packed weight.
pub(crate) struct SmallM;

impl Kernel for SmallM {
    fn name(&self) -> &'static str {
        "small_m"
    }

    /// That of the device where its own kernels take the sizes, and otherwise the portable one.
    fn backend(&self, device: &Device, problem: &Problem) -> GemmBackend {
        if check_sm90(device, problem).is_ok() {
            GemmBackend::Sm90Wgmma
        } else if check_sm120(device, problem).is_ok() {
            GemmBackend::Sm120BlockScaled
        } else {
            GemmBackend::Cmma
        }
    }

    fn supports(&self, device: &Device, problem: &Problem) -> Result<(), Refusal> {
        let GemmShape { m, n, k } = problem.shape;
        let has_instructions = device
            .capabilities
            .compute_capability
            .is_some_and(|sm| sm >= 80);
        match problem {
            _ if !has_instructions || device.capabilities.gemm == GemmBackend::Scalar => {
                Err(Refusal::Device("the device has no mma.sync of sm_80"))
            }
            _ if problem.b != OperandLayout::Packed => Err(Refusal::Operands("`b` is not packed")),
            _ if m > MAX_ROWS => Err(Refusal::Operands("m is above 16")),
            _ if problem.grouped != GroupedDim::None => Err(Refusal::Operands("there are groups")),
            _ if k == 0 || !k.is_multiple_of(BLOCK) || !n.is_multiple_of(2) => {
                Err(Refusal::Operands("k is no multiple of 16, or n is odd"))
            }
            _ if !problem.aligned => Err(Refusal::Operands(UNALIGNED)),
            _ if problem.a == OperandLayout::MnMajor && check_sm90(device, problem).is_ok() => Err(
                Refusal::Operands("`a` is MN-major, which sm90_bf16 reads as it is"),
            ),
            _ if problem.backend == Some(GemmBackend::Cmma) => {
                Err(Refusal::Operands("the tiles of Cmma were asked for"))
            }
            _ => Ok(()),
        }
    }

    fn plan(&self, _device: &Device, _problem: &Problem) -> Candidate {
        Plan::SmallM.into()
    }

    fn launch(&self, launch: &Launch, plan: Plan) -> Result<(), Nvfp4Error> {
        let GemmShape { m, k, .. } = launch.shape;
        let takes = m <= MAX_ROWS && k > 0 && k.is_multiple_of(BLOCK);
        if plan != Plan::SmallM || !launch.b.is_packed() || !takes {
            return Err(misfit(plan, launch));
        }
        queue(launch);
        Ok(())
    }
}

/// Queues the GEMM.
fn queue(launch: &Launch) {
    let Launch {
        client,
        capabilities,
        a,
        b,
        epilogue,
        output,
        ..
    } = *launch;
    let GemmShape { m, n, k } = launch.shape;
    let out = &output.matrix().handle;
    // SAFETY (of every argument): the caller checked the operands against their shapes. What the
    // kernel does not read of `a` is any memory.
    let buffer = |handle: &Handle, len| unsafe { BufferArg::from_raw_parts(handle.clone(), len) };
    let left = if a.is_packed() {
        SmallMLeft::Packed
    } else {
        SmallMLeft::Bf16
    };
    let shape = shape(client, capabilities, (m, n, k), left);
    let words = m * n * epilogue.kind.out.size() / 4;
    // SAFETY: rows and columns outside are clamped where they are read and not written.
    unsafe {
        small_m_kernel::launch_unchecked(
            client,
            CubeCount::Static(n.div_ceil(shape.rows()) as u32, 1, 1),
            CubeDim::new_1d(32 * shape.warps as u32),
            address_type((n * k).max(m * n)),
            buffer(&a.dense, m * k / 8),
            buffer(&a.codes, m * k / 8),
            buffer(&a.scales, m * k / BLOCK),
            buffer(&b.codes, n * k / 8),
            buffer(&b.scales, n * k / BLOCK),
            buffer(&epilogue.a_amax, m),
            buffer(&epilogue.b_amax, n),
            buffer(&epilogue.bias, n),
            buffer(out, words),
            buffer(out, words),
            buffer(&epilogue.amax, epilogue.amax_len(1)),
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
