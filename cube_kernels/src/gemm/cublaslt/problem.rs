//! What the library is asked for.

use cubecl::server::Handle;

use crate::{
    Nvfp4Error,
    memory::check_memory,
    reference::swizzle::padded_len,
    tensor::{FloatKind, Matrix},
};

/// The most memory that an algorithm may ask for: what NVIDIA recommends for Hopper and Blackwell.
pub const WORKSPACE: usize = 32 << 20;

/// The element type of both operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CublasLtFormat {
    /// bfloat16.
    Bf16,
    /// FP8 E4M3 with one `f32` factor for each operand.
    E4m3,
    /// FP4 E2M1 with an E4M3 scale for each 16 elements along the contraction.
    Nvfp4,
}

impl CublasLtFormat {
    /// Bits of one element.
    pub const fn bits(self) -> usize {
        match self {
            Self::Bf16 => 16,
            Self::E4m3 => 8,
            Self::Nvfp4 => 4,
        }
    }

    /// The type that the library takes a bias in: that of the output, but bf16 with FP8 and FP4
    /// operands and an `f32` output.
    pub const fn bias(self, out: FloatKind) -> FloatKind {
        match (self, out) {
            (Self::E4m3 | Self::Nvfp4, FloatKind::F32) => FloatKind::Bf16,
            (_, out) => out,
        }
    }
}

/// What the library is asked for, without the memory: it has an algorithm for a problem or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CublasLtProblem {
    /// Type of both operands.
    pub format: CublasLtFormat,
    /// Rows of `a` and of the output.
    pub m: usize,
    /// Rows of `b`, columns of the output.
    pub n: usize,
    /// Elements of a row of `a` and `b`.
    pub k: usize,
    /// Type of the output.
    pub out: FloatKind,
    /// Whether `alpha` lies in device memory; otherwise it is one.
    pub alpha: bool,
    /// Whether there is a bias.
    pub bias: bool,
    /// Whether the output is added to.
    pub accumulate: bool,
    /// Bytes to whose multiples all matrices begin, at most 256.
    pub alignment: u32,
}

impl std::fmt::Display for CublasLtProblem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { m, n, k, .. } = self;
        write!(f, "{m} x {n} x {k}, {:?} to {:?}", self.format, self.out)?;
        for (has, what) in [
            (self.alpha, "alpha on the device"),
            (self.bias, "bias"),
            (self.accumulate, "accumulated"),
        ] {
            if has {
                write!(f, ", {what}")?;
            }
        }
        Ok(())
    }
}

impl CublasLtProblem {
    /// Checks the rules that hold on every device: rows of `a`, `b` and the output are multiples of
    /// 16 bytes, matrices begin at multiples of 16 bytes, no dimension is 0 or above 2^31 - 1. What
    /// else the library wants it says itself ([`supports`](super::supports)).
    ///
    /// # Errors
    /// Which names `k`, `n`, `m` or `alignment`.
    pub fn check(&self) -> Result<(), Nvfp4Error> {
        let rule = |argument, value: usize, unit: usize| {
            if value == 0 || value > i32::MAX as usize || !value.is_multiple_of(unit) {
                return Err(Nvfp4Error::value(
                    argument,
                    format!("{value}, {:?} to {:?}", self.format, self.out),
                    format!("a multiple of {unit} from {unit} to 2^31 - 1"),
                ));
            }
            Ok(())
        };
        rule("k", self.k, 128 / self.format.bits())?;
        rule("n", self.n, 16 / self.out.size())?;
        rule("m", self.m, 1)?;
        if self.alignment < 16 {
            return Err(Nvfp4Error::value(
                "alignment",
                format!("memory at multiples of {} bytes", self.alignment),
                "memory that begins at multiples of 16 bytes",
            ));
        }
        Ok(())
    }
}

/// One operand.
#[derive(Debug, Clone, Copy)]
pub struct CublasLtOperand<'a> {
    /// Stored rows.
    pub rows: usize,
    /// The elements, `rows` rows of `k`.
    pub data: &'a Handle,
    /// Scales, in the form that the [`CublasLtFormat`] says.
    pub scale: Option<&'a Handle>,
}

/// A GEMM with its memory.
#[derive(Debug, Clone, Copy)]
pub struct CublasLtGemm<'a> {
    /// Type of both operands.
    pub format: CublasLtFormat,
    /// Elements of a row of `a` and `b`.
    pub k: usize,
    /// The rows of the output.
    pub a: CublasLtOperand<'a>,
    /// The columns of the output.
    pub b: CublasLtOperand<'a>,
    /// Two `f32` in device memory, `alpha` and what the output is multiplied by before the sum is
    /// added, 1 or 0 as `accumulate` says. Without them `alpha` is one.
    pub alpha: Option<&'a Handle>,
    /// One value for each column of the output, of the type [`CublasLtFormat::bias`].
    pub bias: Option<&'a Matrix>,
    /// The output.
    pub out: &'a Matrix,
    /// Whether the output is added to.
    pub accumulate: bool,
}

impl CublasLtGemm<'_> {
    /// The problem that this GEMM is an instance of.
    pub fn problem(&self) -> CublasLtProblem {
        let handles = [self.a.data, self.b.data, &self.out.handle]
            .into_iter()
            .chain([self.a.scale, self.b.scale].into_iter().flatten())
            .chain(self.bias.map(|bias| &bias.handle));
        CublasLtProblem {
            format: self.format,
            m: self.a.rows,
            n: self.b.rows,
            k: self.k,
            out: self.out.dtype,
            alpha: self.alpha.is_some(),
            bias: self.bias.is_some(),
            accumulate: self.accumulate,
            alignment: handles.map(alignment).min().expect("there are operands"),
        }
    }

    /// Checks the problem, and that every buffer is as large as it has to be.
    ///
    /// # Errors
    /// Which names the argument.
    pub fn check(&self) -> Result<(), Nvfp4Error> {
        let problem = self.problem();
        problem.check()?;
        if (self.out.rows, self.out.cols) != (problem.m, problem.n) {
            return Err(Nvfp4Error::shape(
                "out",
                format!("{} x {}", self.out.rows, self.out.cols),
                format!("{} x {}", problem.m, problem.n),
            ));
        }
        self.out.check("out")?;
        for (names, side) in [(["a", "a.scale"], self.a), (["b", "b.scale"], self.b)] {
            let bytes = side.rows * self.k / 8 * self.format.bits();
            check_memory(names[0], side.data, bytes)?;
            let needed = match self.format {
                CublasLtFormat::Bf16 => None,
                CublasLtFormat::E4m3 => Some(4),
                CublasLtFormat::Nvfp4 => Some(padded_len(side.rows, self.k / crate::BLOCK)),
            };
            match (side.scale, needed) {
                (Some(scale), Some(needed)) => check_memory(names[1], scale, needed)?,
                (None, None) => {}
                (found, _) => {
                    return Err(Nvfp4Error::value(
                        names[1],
                        if found.is_some() { "scales" } else { "none" },
                        match self.format {
                            CublasLtFormat::Bf16 => "none with Bf16",
                            CublasLtFormat::E4m3 => "one f32 with E4m3",
                            CublasLtFormat::Nvfp4 => "block scales with Nvfp4",
                        },
                    ));
                }
            }
        }
        if let Some(alpha) = self.alpha {
            check_memory("alpha", alpha, 8)?;
        }
        if let Some(bias) = self.bias {
            bias.check("bias")?;
            let dtype = self.format.bias(problem.out);
            if (bias.len(), bias.dtype) != (problem.n, dtype) {
                return Err(Nvfp4Error::shape(
                    "bias",
                    format!("{} x {} of {:?}", bias.rows, bias.cols, bias.dtype),
                    format!("1 x {} of {dtype:?}", problem.n),
                ));
            }
        }
        Ok(())
    }
}

/// The largest power of two up to 256 at whose multiples this memory begins: allocations begin at
/// multiples of 512, a view into one anywhere.
fn alignment(handle: &Handle) -> u32 {
    1 << handle.offset_start.unwrap_or(0).trailing_zeros().min(8)
}
