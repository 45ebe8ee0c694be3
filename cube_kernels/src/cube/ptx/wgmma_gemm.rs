//! GEMMs of one warpgroup from shared memory, of a fixed depth: asm blocks of `wgmma` instructions,
//! which either have completed at the end of the block, or are queued as a group that is still in
//! flight (sm_90a).
//!
//! A block has sums as inputs and outputs, as two sets of registers, which ptxas merges if it can.
//! Otherwise it copies all of them around each block, or waits for each instruction. It can merge
//! them if only a wait reads sums in flight, no sums are in flight from one iteration of a loop to
//! the next, and the last GEMM of an iteration waits in its own block.
//!
//! The text of a block is generated for its sizes. Registers of a block are numbered from its
//! results on, followed by its inputs in order.
//!
//! PTX ISA "Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async"; PTX 8.0, sm_90a.

use std::fmt::Write as _;

use cubecl::prelude::*;

use super::Major;
use crate::tensor::FloatKind;

/// Layout of an operand in shared memory for the instructions of a block: boxes with rows of 64
/// elements (128 bytes, swizzled).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WgmmaOperand {
    /// Contiguous dimension.
    pub major: Major,
    /// Bytes from one box to the next. For a K-major operand the next box follows after each 64
    /// elements along K. Boxes of an MN-major operand are arranged across K, and its descriptor
    /// contains this distance.
    pub box_bytes: usize,
}

impl WgmmaOperand {
    /// Returns the offset of instruction `step` (16 elements along K) from the first, in units of
    /// 16 bytes.
    const fn offset(self, step: usize) -> usize {
        match self.major {
            Major::K => (step / 4) * (self.box_bytes / 16) + (step % 4) * 2,
            Major::Mn => step * 128,
        }
    }
}

/// A block of instructions: 64 rows, `n` columns, `depth` elements along K.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WgmmaGemm {
    /// Columns.
    pub n: usize,
    /// Length of the K dimension, a multiple of 16.
    pub depth: usize,
    /// Operand type.
    pub kind: FloatKind,
    /// Left operand, if it is in shared memory.
    pub a: WgmmaOperand,
    /// Right operand.
    pub b: WgmmaOperand,
}

impl WgmmaGemm {
    /// Returns the accumulators per thread.
    pub const fn accumulators(self) -> usize {
        self.n / 2
    }

    /// Returns the registers per thread of a left operand in registers.
    pub const fn fragments(self) -> usize {
        self.depth / 4
    }

    fn instruction(self) -> String {
        let kind = match self.kind {
            FloatKind::F16 => "f16",
            _ => "bf16",
        };
        let n = self.n;
        format!("wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind}")
    }
}

/// Location of the left operand of a GEMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Left {
    /// In shared memory: one input, its descriptor.
    Shared,
    /// In registers: [`WgmmaGemm::fragments`] inputs.
    Registers,
}

/// State at the end of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlockEnd {
    /// No group is in flight: all have completed, including those of earlier blocks.
    Waits,
    /// The block's GEMM is a separate group that is still in flight; [`wgmma_wait()`] returns its
    /// results. Before a wait, only another block may read them.
    Runs,
}

/// Text of a block: its GEMMs are queued one after another.
struct Block {
    text: String,
    /// Number of result registers.
    results: usize,
    /// Number of result registers that the GEMMs so far write.
    written: usize,
    /// Index of the next input.
    input: usize,
}

impl Block {
    /// Creates a block with `results` result registers.
    fn new(results: usize) -> Self {
        Self {
            text: String::from("{ .reg .b64 a, b; .reg .pred none, all;\n"),
            results,
            written: 0,
            input: results,
        }
    }

    /// Lists the first `count` registers from number `first` on.
    fn registers(first: usize, count: usize) -> String {
        let names: Vec<_> = (first..first + count).map(|i| format!("%{i}")).collect();
        format!("{{{}}}", names.join(", "))
    }

    /// Initializes the results from number `first` on with the next `count` inputs.
    fn sums(mut self, first: usize, count: usize) -> Self {
        for i in 0..count {
            let _ = writeln!(self.text, "mov.f32 %{}, %{};", first + i, self.input + i);
        }
        self.input += count;
        self
    }

    /// Initializes the results from number `first` on with the next `count` inputs, scaled in
    /// groups of four: two of one row of a lane by the first input that follows them, and two of
    /// its other row by the second.
    fn scaled_sums(mut self, first: usize, count: usize) -> Self {
        for i in 0..count {
            let factor = self.input + count + i % 4 / 2;
            let _ = writeln!(
                self.text,
                "mul.rn.f32 %{}, %{}, %{factor};",
                first + i,
                self.input + i
            );
        }
        self.input += count + 2;
        self
    }

    /// Ends the initialization of registers: instructions follow.
    fn begin(mut self) -> Self {
        self.text += "setp.ne.b32 none, 0, 0; setp.eq.b32 all, 0, 0;\nwgmma.fence.sync.aligned;\n";
        self
    }

    /// Appends a GEMM into the next results, which it adds to if `accumulate`. Inputs are the left
    /// operand, and the descriptor of the right one.
    fn gemm(mut self, gemm: WgmmaGemm, left: Left, accumulate: bool) -> Self {
        let (d, instruction) = (
            Self::registers(self.written, gemm.accumulators()),
            gemm.instruction(),
        );
        let (a_trans, b_trans) = (gemm.a.major.transposes(), gemm.b.major.transposes());
        let first = self.input;
        let right = first
            + match left {
                Left::Shared => 1,
                Left::Registers => gemm.fragments(),
            };
        for step in 0..gemm.depth / 16 {
            let add = if accumulate || step > 0 {
                "all"
            } else {
                "none"
            };
            let b = gemm.b.offset(step);
            let _ = writeln!(self.text, "add.s64 b, %{right}, {b};");
            let _ = match left {
                Left::Shared => {
                    let a = gemm.a.offset(step);
                    writeln!(
                        self.text,
                        "add.s64 a, %{first}, {a};\n{instruction} {d}, a, b, {add}, 1, 1, \
                         {a_trans}, {b_trans};"
                    )
                }
                Left::Registers => {
                    let a = Self::registers(first + 4 * step, 4);
                    writeln!(
                        self.text,
                        "{instruction} {d}, {a}, b, {add}, 1, 1, {b_trans};"
                    )
                }
            };
        }
        self.written += gemm.accumulators();
        self.input = right + 1;
        self
    }

    /// Returns the complete text.
    fn end(self, end: BlockEnd) -> String {
        debug_assert!(self.written <= self.results);
        let rest = match end {
            BlockEnd::Waits => "wgmma.wait_group.sync.aligned 0; }",
            BlockEnd::Runs => "}",
        };
        self.text + "wgmma.commit_group.sync.aligned;\n" + rest
    }
}

/// Text of [`wgmma_shared_queued()`].
fn shared_queued_text(gemm: WgmmaGemm) -> String {
    let block = Block::new(gemm.accumulators()).begin();
    block.gemm(gemm, Left::Shared, false).end(BlockEnd::Runs)
}

/// Text of [`wgmma_registers()`].
fn registers_text(gemm: WgmmaGemm, end: BlockEnd) -> String {
    let sums = gemm.accumulators();
    let block = Block::new(sums).sums(0, sums).begin();
    block.gemm(gemm, Left::Registers, true).end(end)
}

/// Text of [`wgmma_registers_scaled()`].
fn registers_scaled_text(gemm: WgmmaGemm, end: BlockEnd) -> String {
    let sums = gemm.accumulators();
    let block = Block::new(sums).scaled_sums(0, sums).begin();
    block.gemm(gemm, Left::Registers, true).end(end)
}

/// Text of [`wgmma_wait()`] for `sums` results, with `pending` groups still in flight.
fn wait_text(sums: usize, pending: usize) -> String {
    let mut text = format!("wgmma.wait_group.sync.aligned {pending};\n");
    for i in 0..sums {
        let _ = writeln!(text, "mov.f32 %{i}, %{};", sums + i);
    }
    text
}

/// Queues `a · b` of `gemm`, 64 rows, as a group that stays in flight: both operands are in shared
/// memory, given by their descriptors. `S` is `gemm.accumulators()`; [`wgmma_wait()`] returns the
/// results.
///
/// PTX ISA "wgmma.mma_async"; PTX 8.0, sm_90a.
#[cube]
pub fn wgmma_shared_queued<S: Size>(a: u64, b: u64, #[comptime] gemm: WgmmaGemm) -> Vector<f32, S> {
    let a = u64::reinterpret(a);
    let b = u64::reinterpret(b);
    let sums: Vector<f32, S>;
    gpu_asm!(
        "// {d} {a} {b}
    {text}",
        d = out(_) sums, a = in(_) a, b = in(_) b, text = const shared_queued_text(gemm)
    );
    Vector::<f32, S>::reinterpret(sums)
}

/// Returns `sums`, the results of a queued group of `gemm`, once at most the last `pending` groups
/// are in flight, which must not include it.
///
/// PTX ISA "wgmma.wait_group"; PTX 8.0, sm_90a.
#[cube]
pub fn wgmma_wait<S: Size>(
    sums: Vector<f32, S>,
    #[comptime] gemm: WgmmaGemm,
    #[comptime] pending: usize,
) -> Vector<f32, S> {
    let sums = Vector::<f32, S>::reinterpret(sums);
    let result: Vector<f32, S>;
    gpu_asm!(
        "// {d} {c}
    {text}",
        d = out(_) result, c = in(_) sums, text = const wait_text(gemm.accumulators(), pending)
    );
    Vector::<f32, S>::reinterpret(result)
}

/// Waits until no group is in flight, but not before `sum` is known. `sum` is a sum of weights and
/// so never negative: ptxas moves a wait before concurrent computations, but not across a branch.
/// The code that this branch guards is never executed.
///
/// PTX ISA "wgmma.wait_group"; PTX 8.0, sm_90a.
#[cube]
pub fn wgmma_wait_behind(sum: f32) {
    let sum = f32::reinterpret(sum);
    gpu_asm!(
        "{{ .reg .pred p; setp.eq.f32 p, {}, 0fBF800000; @!p bra known; nanosleep.u32 0;
    known: }}
    wgmma.wait_group.sync.aligned 0;",
        in(_) sum
    );
}

/// Returns `diag(factors) · sums + a · b` of `gemm`: [`wgmma_registers()`] after multiplying the
/// two rows of a lane by the factors `low` and `high`.
#[cube]
pub fn wgmma_registers_scaled<S: Size, A: Size>(
    sums: Vector<f32, S>,
    low: f32,
    high: f32,
    a: Vector<u32, A>,
    b: u64,
    #[comptime] gemm: WgmmaGemm,
    #[comptime] end: BlockEnd,
) -> Vector<f32, S> {
    let sums = Vector::<f32, S>::reinterpret(sums);
    let low = f32::reinterpret(low);
    let high = f32::reinterpret(high);
    let a = Vector::<u32, A>::reinterpret(a);
    let b = u64::reinterpret(b);
    let result: Vector<f32, S>;
    gpu_asm!(
        "// {d} {c} {l} {h} {a} {b}
    {text}",
        d = out(_) result, c = in(_) sums, l = in(_) low, h = in(_) high, a = in(_) a, b = in(_) b,
        text = const registers_scaled_text(gemm, end)
    );
    Vector::<f32, S>::reinterpret(result)
}

/// Returns `sums + a · b` of `gemm`, 64 rows: the left operand is in registers, the right one given
/// by its descriptor. `S` is `gemm.accumulators()`, `A` is `gemm.fragments()`; fragments of 16
/// elements along K follow each other, four registers each.
///
/// PTX ISA "wgmma.mma_async"; PTX 8.0, sm_90a.
#[cube]
pub fn wgmma_registers<S: Size, A: Size>(
    sums: Vector<f32, S>,
    a: Vector<u32, A>,
    b: u64,
    #[comptime] gemm: WgmmaGemm,
    #[comptime] end: BlockEnd,
) -> Vector<f32, S> {
    let sums = Vector::<f32, S>::reinterpret(sums);
    let a = Vector::<u32, A>::reinterpret(a);
    let b = u64::reinterpret(b);
    let result: Vector<f32, S>;
    gpu_asm!(
        "// {d} {c} {a} {b}
    {text}",
        d = out(_) result, c = in(_) sums, a = in(_) a, b = in(_) b,
        text = const registers_text(gemm, end)
    );
    Vector::<f32, S>::reinterpret(result)
}

/// Returns the descriptor (`wgmma_descriptor`) of `operand` at `address`.
#[cube]
pub fn wgmma_operand(address: u32, #[comptime] operand: WgmmaOperand) -> u64 {
    let leading = comptime!(match operand.major {
        Major::K => 1,
        Major::Mn => operand.box_bytes as u64 / 16,
    });
    u64::cast_from((address & 0x3_ffffu32) >> 4u32)
        | (leading << 16u64)
        | (64u64 << 32u64)
        | (1u64 << 62u64)
}
