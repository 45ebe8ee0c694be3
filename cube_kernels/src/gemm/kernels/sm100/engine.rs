//! Software model of the tensor cores of sm_100, for the `sm100_block_scaled` kernel on other GPUs:
//! executes `tcgen05.cp` and `tcgen05.mma` from their descriptors.
//!
//! A command contains all operands of an instruction. The functions here decode every field of a
//! descriptor. A field that violates the PTX ISA, or an address out of bounds, is counted as a
//! violation. Tensor memory is device memory, one word for each lane of each column,
//! `[column][lane]`. Nothing here is specific to CUDA: a test runs the same functions on CubeCL's
//! CPU runtime.
//!
//! In a pair of CTAs, the model executes the commands of the even one for both. Lanes from 128 on
//! belong to the odd CTA, whose shared memory the model reads ([`Peer`]), and whose tensor memory
//! follows that of the even one.
//!
//! It models the documentation, and cannot show that hardware behaves the same way.

use cubecl::prelude::*;

use crate::cube::{
    codec::decode_e4m3,
    mx::{decode_element, decode_ue8m0},
    ptx::{BlockScaled, TMEM_COLUMNS, TMEM_LANES, instruction_descriptor, ld_shared_cluster, mapa},
};

/// Words of tensor memory.
pub const TMEM_WORDS: usize = TMEM_COLUMNS * TMEM_LANES;

/// Shared memory descriptor with an invalid field.
pub const BAD_SHARED: usize = 0;
/// Instruction descriptor that does not match the format.
pub const BAD_INSTRUCTION: usize = 1;
/// Tensor memory address that has lanes, is out of bounds, or overlaps the accumulators.
pub const BAD_TMEM: usize = 2;
/// Address outside the operands.
pub const BAD_BOUNDS: usize = 3;
/// Number of violation kinds.
pub const VIOLATIONS: usize = 4;

/// `tcgen05.cp`.
pub const COPY: u32 = 0;
/// `tcgen05.mma`.
pub const MMA: u32 = 1;
/// `tcgen05.commit`.
pub const COMMIT: u32 = 2;
/// End of the commands.
pub const STOP: u32 = 3;

/// An instruction with its operands. Unused fields are zero.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Command {
    /// Opcode.
    pub opcode: u32,
    /// Address of the accumulators, destination of a copy, or barrier of a commit.
    pub target: u32,
    /// Descriptor of `a`, or of the source of a copy.
    pub a: u64,
    /// Descriptor of `b`.
    pub b: u64,
    /// Instruction descriptor.
    pub idesc: u32,
    /// Address of the scales of `a`.
    pub a_scales: u32,
    /// Address of the scales of `b`.
    pub b_scales: u32,
    /// 0 to replace the accumulators.
    pub accumulate: u32,
}

/// Location of the shared memory of the odd CTA of a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Peer {
    /// No odd CTA.
    None,
    /// In the same slice, after that of the even CTA.
    #[allow(dead_code, reason = "only tests of the model have this layout")]
    Adjacent,
    /// In its SM, at the same addresses.
    Cluster,
}

impl Peer {
    /// Returns the number of CTAs for which a command is executed.
    pub const fn ctas(self) -> u32 {
        match self {
            Self::None => 1,
            Self::Adjacent | Self::Cluster => 2,
        }
    }
}

/// Location of shared and tensor memory.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct Memory {
    /// Address of the operands in the shared window.
    pub shared: u32,
    /// Bytes of the operands.
    pub bytes: u32,
    /// First word of the CTA's tensor memory.
    pub tmem: usize,
    /// Location of the shared memory of the odd CTA.
    #[cube(comptime)]
    pub peer: Peer,
}

#[cube]
impl Memory {
    /// Returns the index of the word at `column` and `lane` of tensor memory. Lanes from 128 on
    /// belong to the odd CTA.
    fn word(&self, column: u32, lane: u32) -> usize {
        let cta = (lane / comptime!(TMEM_LANES as u32)) as usize;
        let lane = lane % comptime!(TMEM_LANES as u32);
        self.tmem + cta * comptime!(TMEM_WORDS) + (column * 128u32 + lane) as usize
    }
}

/// Adds one to violation counter `kind` if `is_bad`.
#[cube]
fn report(violations: &[Atomic<u32>], #[comptime] kind: usize, is_bad: bool) {
    if is_bad {
        violations[kind].fetch_add(1u32);
    }
}

/// Returns bits `from` to `from + count - 1`.
#[cube]
fn field(descriptor: u64, #[comptime] from: u32, #[comptime] count: u32) -> u32 {
    u32::cast_from((descriptor >> comptime!(from as u64)) & comptime!((1u64 << count) - 1))
}

/// Decoded shared memory descriptor.
#[derive(CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub struct SharedOperand {
    /// Address of the first row.
    pub start: u32,
    /// Bytes from one group of eight rows to the next.
    pub stride: u32,
    /// Swizzle mask: 7 permutes eight chunks of 16 bytes, 0 none.
    pub mask: u32,
    /// True if a field is invalid.
    pub is_bad: bool,
}

/// Decodes a shared memory descriptor whose bits 61 to 63 must be `swizzle`.
#[cube]
pub fn decode_shared(descriptor: u64, #[comptime] swizzle: u32) -> SharedOperand {
    let start = field(descriptor, 0u32, 14u32) * 16u32;
    let stride = field(descriptor, 32u32, 14u32) * 16u32;
    let mode = field(descriptor, 61u32, 3u32);
    // Reserved fields that must be zero: two bits and two bits between the offsets, a base offset
    // and the mode of the leading dimension, and the eight bits that follow.
    let zeros = field(descriptor, 14u32, 2u32)
        | field(descriptor, 30u32, 2u32)
        | field(descriptor, 49u32, 3u32)
        | field(descriptor, 52u32, 1u32)
        | field(descriptor, 53u32, 8u32);
    let constant = field(descriptor, 46u32, 3u32);
    SharedOperand {
        start,
        stride,
        mask: select(mode == 2u32, 7u32, 0u32),
        is_bad: zeros != 0u32 || constant != 1u32 || mode != swizzle,
    }
}

/// Returns the address of byte `byte` of row `row` of a K-major operand with rows of 128 bytes. The
/// swizzle permutes the 16-byte chunks of absolute addresses.
#[cube]
pub fn code_address(operand: SharedOperand, row: u32, byte: u32) -> u32 {
    let linear = operand.start + (row / 8u32) * operand.stride + (row % 8u32) * 128u32 + byte;
    linear ^ (((linear >> 7u32) & operand.mask) << 4u32)
}

/// Loads the word at `address` of the shared memory of CTA `cta`; zero outside the operands.
#[cube]
fn load_word(
    shared: &[u32],
    memory: Memory,
    cta: u32,
    address: u32,
    violations: &[Atomic<u32>],
) -> u32 {
    let inside = address >= memory.shared && address - memory.shared < memory.bytes;
    report(violations, BAD_BOUNDS, !inside);
    let offset = select(inside, address - memory.shared, 0u32);
    let word = match comptime!(memory.peer) {
        Peer::None => shared[offset as usize / 4usize],
        Peer::Adjacent => shared[(cta * memory.bytes + offset) as usize / 4usize],
        Peer::Cluster => ld_shared_cluster(mapa(memory.shared + offset, cta)),
    };
    select(inside, word, 0u32)
}

/// Executes `tcgen05.cp.32x128b.warpx4` for lane `lane`: 32 lines of 16 bytes go to four columns,
/// line `i` to lanes `i`, `i + 32`, `i + 64` and `i + 96`.
#[cube]
pub fn execute_copy(
    shared: &[u32],
    tmem: &mut [u32],
    memory: Memory,
    command: Command,
    lane: u32,
    violations: &[Atomic<u32>],
) {
    let source = decode_shared(command.a, 0u32);
    let column = command.target & 0xffffu32;
    let is_outside = command.target >> 16u32 != 0u32 || column + 4u32 > 512u32;
    if lane == 0u32 {
        report(violations, BAD_SHARED, source.is_bad);
        report(violations, BAD_TMEM, is_outside);
    }
    if !is_outside {
        let line = lane % 32u32;
        let cta = lane / comptime!(TMEM_LANES as u32);
        let address = source.start + (line / 8u32) * source.stride + (line % 8u32) * 16u32;
        #[unroll]
        for i in 0..4u32 {
            let word = load_word(shared, memory, cta, address + comptime!(4 * i), violations);
            tmem[memory.word(column + i, lane)] = word;
        }
    }
}

/// Returns true unless `idesc` is a valid descriptor of `kind` with M = 128 for each of `ctas`
/// CTAs, dense, K-major, not negated. NVFP4 scales begin at the first byte of their words; MXFP8
/// may use any byte of them. In a pair, each CTA has a multiple of 8 rows of `b`.
#[cube]
pub fn is_bad_instruction(
    idesc: u32,
    #[comptime] kind: BlockScaled,
    #[comptime] ctas: u32,
) -> bool {
    let n = (idesc >> 17u32) & 0x3fu32;
    let free = comptime!(match kind {
        BlockScaled::Nvfp4 => 0x3fu32 << 17,
        BlockScaled::Mxfp8 => 0x3f << 17 | 3 << 4 | 3 << 29,
    });
    // Types, and M / 128; every other bit is zero.
    let expected = comptime!(instruction_descriptor(kind, 128 * ctas, 8) & !free);
    idesc & comptime!(!free) != expected || n == 0u32 || n > 32u32 || n / ctas * ctas != n
}

/// Executes `tcgen05.mma` of `kind` for lane `lane`: row `lane` of the accumulators of all CTAs, 32
/// bytes of columns of both operands. Columns ascend and every product is exact, as in the scalar
/// kernel.
#[cube]
pub fn execute_mma(
    shared: &[u32],
    tmem: &mut [u32],
    memory: Memory,
    command: Command,
    lane: u32,
    violations: &[Atomic<u32>],
    #[comptime] kind: BlockScaled,
) {
    let a = decode_shared(command.a, 2u32);
    let b = decode_shared(command.b, 2u32);
    let n = ((command.idesc >> 17u32) & 0x3fu32) * 8u32;
    let b_columns = n.div_ceil(128u32) * 4u32;
    let lanes = (command.target | command.a_scales | command.b_scales) >> 16u32;
    let d_end = command.target + n;
    let is_outside = lanes != 0u32
        || d_end > 512u32
        || command.a_scales + 4u32 > 512u32
        || command.b_scales + b_columns > 512u32
        || (command.a_scales < d_end && command.a_scales + 4u32 > command.target)
        || (command.b_scales < d_end && command.b_scales + b_columns > command.target);
    let is_bad = is_bad_instruction(command.idesc, kind, comptime!(memory.peer.ctas()));
    // The leading dimension's offset is unused, and every kernel here sets it to 16 bytes.
    let leading = field(command.a, 16u32, 14u32) != 1u32 || field(command.b, 16u32, 14u32) != 1u32;
    // The stride must be that of rows of 128 bytes.
    let strides = a.stride != 1024u32 || b.stride != 1024u32;
    if lane == 0u32 {
        report(
            violations,
            BAD_SHARED,
            a.is_bad || b.is_bad || leading || strides,
        );
        report(violations, BAD_INSTRUCTION, is_bad);
        report(violations, BAD_TMEM, is_outside);
    }
    if !is_outside && !is_bad {
        multiply_row(shared, tmem, memory, command, lane, violations, kind);
    }
}

/// Returns the scale for word `word` of an instruction's columns, from a row's word of scales.
/// NVFP4 has two words of codes per scale; MXFP8 has one scale, byte `id`.
#[cube]
fn scale_of(scales: u32, id: u32, #[comptime] word: usize, #[comptime] kind: BlockScaled) -> f32 {
    match comptime!(kind) {
        BlockScaled::Nvfp4 => decode_e4m3((scales >> comptime!(8 * (word as u32 / 2))) & 0xffu32),
        BlockScaled::Mxfp8 => decode_ue8m0((scales >> (8u32 * id)) & 0xffu32),
    }
}

/// [`execute_mma()`] for a command without violations.
#[cube]
fn multiply_row(
    shared: &[u32],
    tmem: &mut [u32],
    memory: Memory,
    command: Command,
    lane: u32,
    violations: &[Atomic<u32>],
    #[comptime] kind: BlockScaled,
) {
    let a = decode_shared(command.a, 2u32);
    let b = decode_shared(command.b, 2u32);
    let n = ((command.idesc >> 17u32) & 0x3fu32) * 8u32;
    let (a_id, b_id) = (
        (command.idesc >> 29u32) & 3u32,
        (command.idesc >> 4u32) & 3u32,
    );
    let element = comptime!(kind.format().element());
    let per_word = comptime!(32 / element.bits());
    let (cta, row) = (
        lane / comptime!(TMEM_LANES as u32),
        lane % comptime!(TMEM_LANES as u32),
    );
    let quadrant = row / 32u32;
    // Rows of `b` per CTA.
    let rows = n / comptime!(memory.peer.ctas());
    // The scales of a row are in the lanes that are equal to it modulo 32, which includes the
    // quadrant of the lane that reads them.
    let a_word = tmem[memory.word(command.a_scales + quadrant, lane)];
    let mut left = Array::<f32>::new(comptime!(kind.step_k()));
    #[unroll]
    for word in 0..8usize {
        let address = code_address(a, row, comptime!(4 * word as u32).runtime());
        let codes = load_word(shared, memory, cta, address, violations);
        let scale = scale_of(a_word, a_id, word, kind);
        #[unroll]
        for i in 0..per_word {
            let code = codes >> comptime!((element.bits() * i) as u32);
            left[comptime!(per_word * word + i)] = decode_element(code, element) * scale;
        }
    }
    for column in 0..n {
        let scales = command.b_scales + column / 32u32;
        let from = lane - lane % 32u32 + column % 32u32;
        let b_word = tmem[memory.word(scales, from)];
        let at = memory.word(command.target + column, lane);
        let mut sum = 0.0f32;
        if command.accumulate != 0u32 {
            sum = f32::reinterpret(tmem[at]);
        }
        #[unroll]
        for word in 0..8usize {
            let address = code_address(b, column % rows, comptime!(4 * word as u32).runtime());
            let codes = load_word(shared, memory, column / rows, address, violations);
            let scale = scale_of(b_word, b_id, word, kind);
            #[unroll]
            for i in 0..per_word {
                let code = codes >> comptime!((element.bits() * i) as u32);
                // The product is exact, so contracting this sum changes nothing.
                let right = decode_element(code, element) * scale;
                sum += left[comptime!(per_word * word + i)] * right;
            }
        }
        tmem[at] = u32::reinterpret(sum);
    }
}
