//! GEMMs of one warpgroup from shared memory, of a fixed depth: a block of `wgmma` instructions,
//! which has ended when the block has (sm_90a).
//!
//! The text of a block is made for its sizes. Registers of a block are numbered from its results
//! on, then its inputs in order.
//!
//! PTX ISA "Asynchronous Warpgroup Level Matrix Instructions: wgmma.mma_async"; PTX 8.0, sm_90a.

use std::fmt::Write as _;

use cubecl::prelude::*;

use super::Major;
use crate::tensor::FloatKind;

/// How an operand in shared memory lies under the instructions of a block: in boxes of 64 elements
/// a row (128 bytes, swizzled).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WgmmaOperand {
    /// Which dimension is contiguous.
    pub major: Major,
    /// Bytes from one box to the next. Along a K-major operand's contraction the next box follows
    /// each 64 elements; those of an MN-major operand lie across it, and its descriptor has this
    /// distance.
    pub box_bytes: usize,
}

impl WgmmaOperand {
    /// How far instruction `step` of 16 elements of the contraction reads behind the first, in
    /// units of 16 bytes.
    const fn offset(self, step: usize) -> usize {
        match self.major {
            Major::K => (step / 4) * (self.box_bytes / 16) + (step % 4) * 2,
            Major::Mn => step * 128,
        }
    }
}

/// A block of instructions: 64 rows, `n` columns, `depth` elements of the contraction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WgmmaGemm {
    /// Columns.
    pub n: usize,
    /// Length of the contraction, a multiple of 16.
    pub depth: usize,
    /// Type of the operands.
    pub kind: FloatKind,
    /// The left operand, where it is in shared memory.
    pub a: WgmmaOperand,
    /// The right operand.
    pub b: WgmmaOperand,
}

impl WgmmaGemm {
    /// Accumulators of a thread.
    pub const fn accumulators(self) -> usize {
        self.n / 2
    }

    /// Registers of a thread's part of a left operand in registers.
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

    /// The first `count` registers from number `first` on.
    fn registers(first: usize, count: usize) -> String {
        let names: Vec<_> = (first..first + count).map(|i| format!("%{i}")).collect();
        format!("{{{}}}", names.join(", "))
    }

    /// Both operands in shared memory, sums begin at zero: inputs are the two descriptors.
    fn shared_text(self) -> String {
        let sums = self.accumulators();
        let (d, instruction) = (Self::registers(0, sums), self.instruction());
        let (a_trans, b_trans) = (self.a.major.transposes(), self.b.major.transposes());
        let mut text = String::from("{ .reg .b64 a, b;\nwgmma.fence.sync.aligned;\n");
        for step in 0..self.depth / 16 {
            let (a, b) = (self.a.offset(step), self.b.offset(step));
            let add = u32::from(step > 0);
            let _ = write!(
                text,
                "add.s64 a, %{sums}, {a}; add.s64 b, %{}, {b};\n{{ .reg .pred p; setp.ne.b32 p, \
                 {add}, 0;\n{instruction} {d}, a, b, p, 1, 1, {a_trans}, {b_trans}; }}\n",
                sums + 1,
            );
        }
        text + "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0; }"
    }

    /// The left operand in registers, added to sums: inputs are the sums, the fragments and the
    /// descriptor of the right operand.
    fn register_text(self) -> String {
        let sums = self.accumulators();
        let (d, instruction) = (Self::registers(0, sums), self.instruction());
        let (first, b_trans) = (2 * sums, self.b.major.transposes());
        let descriptor = first + self.fragments();
        let mut text = String::from("{ .reg .b64 b; .reg .pred p;\n");
        for i in 0..sums {
            let _ = writeln!(text, "mov.f32 %{i}, %{};", sums + i);
        }
        text += "setp.eq.b32 p, 0, 0;\nwgmma.fence.sync.aligned;\n";
        for step in 0..self.depth / 16 {
            let fragment = Self::registers(first + 4 * step, 4);
            let b = self.b.offset(step);
            let _ = write!(
                text,
                "add.s64 b, %{descriptor}, {b};\n{instruction} {d}, {fragment}, b, p, 1, 1, \
                 {b_trans};\n",
            );
        }
        text + "wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0; }"
    }
}

/// `a · b` of `gemm`, 64 rows: both operands in shared memory, given by their descriptors. `S` is
/// `gemm.accumulators()`.
///
/// PTX ISA "wgmma.mma_async"; PTX 8.0, sm_90a.
#[cube]
pub fn wgmma_shared<S: Size>(a: u64, b: u64, #[comptime] gemm: WgmmaGemm) -> Vector<f32, S> {
    let a = u64::reinterpret(a);
    let b = u64::reinterpret(b);
    let sums: Vector<f32, S>;
    gpu_asm!(
        "// {d} {a} {b}
    {text}",
        d = out(_) sums, a = in(_) a, b = in(_) b, text = const gemm.shared_text()
    );
    Vector::<f32, S>::reinterpret(sums)
}

/// `sums + a · b` of `gemm`, 64 rows: the left operand in registers, the right one given by its
/// descriptor. `S` is `gemm.accumulators()`, `A` is `gemm.fragments()`; fragments of 16 elements of
/// the contraction follow each other, four registers each.
///
/// PTX ISA "wgmma.mma_async"; PTX 8.0, sm_90a.
#[cube]
pub fn wgmma_registers<S: Size, A: Size>(
    sums: Vector<f32, S>,
    a: Vector<u32, A>,
    b: u64,
    #[comptime] gemm: WgmmaGemm,
) -> Vector<f32, S> {
    let sums = Vector::<f32, S>::reinterpret(sums);
    let a = Vector::<u32, A>::reinterpret(a);
    let b = u64::reinterpret(b);
    let result: Vector<f32, S>;
    gpu_asm!(
        "// {d} {c} {a} {b}
    {text}",
        d = out(_) result, c = in(_) sums, a = in(_) a, b = in(_) b,
        text = const gemm.register_text()
    );
    Vector::<f32, S>::reinterpret(result)
}

/// The [descriptor](super::wgmma_descriptor()) of `operand` at `address`.
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
