//! Problem description for the library.

use cubecl::server::Handle;

use crate::{
    Nvfp4Error,
    memory::check_memory,
    reference::swizzle::padded_len,
    tensor::{FloatKind, Matrix},
};

/// Element type of both operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CublasLtFormat {
    /// bfloat16.
    Bf16,
    /// FP8 E4M3 with one `f32` factor per operand.
    #[allow(
        dead_code,
        reason = "only tests multiply FP8, to test a GEMM with scales without FP4"
    )]
    E4m3,
    /// FP4 E2M1 with an E4M3 scale per 16 elements along K.
    Nvfp4,
}

impl CublasLtFormat {
    /// Returns the bits per element.
    pub const fn bits(self) -> usize {
        match self {
            Self::Bf16 => 16,
            Self::E4m3 => 8,
            Self::Nvfp4 => 4,
        }
    }

    /// Returns the bias type that the library requires: the output's type, except bf16 for FP8 or
    /// FP4 operands with an `f32` output.
    pub const fn bias(self, out: FloatKind) -> FloatKind {
        match (self, out) {
            (Self::E4m3 | Self::Nvfp4, FloatKind::F32) => FloatKind::Bf16,
            (_, out) => out,
        }
    }
}

/// A GEMM without its memory, which determines if the library has an algorithm for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CublasLtProblem {
    /// Type of both operands.
    pub format: CublasLtFormat,
    /// Rows of `a` and of the output.
    pub m: usize,
    /// Rows of `b`, columns of the output.
    pub n: usize,
    /// Elements per row of `a` and `b`.
    pub k: usize,
    /// Output type.
    pub out: FloatKind,
    /// True if `alpha` is in device memory; otherwise it is 1.
    pub alpha: bool,
    /// True if there is a bias.
    pub bias: bool,
    /// True to accumulate into the output.
    pub accumulate: bool,
    /// Alignment of all matrices in bytes, at most 256.
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
    /// 16 bytes, matrices begin at multiples of 16 bytes, and no dimension is 0 or above 2^31 - 1.
    /// The library reports its further requirements ([`supports`](super::supports)).
    ///
    /// # Errors
    /// Returns an error that names `k`, `n`, `m` or `alignment`.
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
    /// Elements, `rows` rows of `k`.
    pub data: &'a Handle,
    /// Scales, in the form that the [`CublasLtFormat`] requires.
    pub scale: Option<&'a Handle>,
}

/// A GEMM with its memory.
#[derive(Debug, Clone, Copy)]
pub struct CublasLtGemm<'a> {
    /// Type of both operands.
    pub format: CublasLtFormat,
    /// Elements per row of `a` and `b`.
    pub k: usize,
    /// Left operand: rows of the output.
    pub a: CublasLtOperand<'a>,
    /// Right operand: columns of the output.
    pub b: CublasLtOperand<'a>,
    /// Two `f32` in device memory: `alpha` and `beta`, the factor of the output's previous
    /// contents, 1 or 0 as in `accumulate`. If absent, `alpha` is 1.
    pub alpha: Option<&'a Handle>,
    /// Bias per column of the output, of type [`CublasLtFormat::bias`].
    pub bias: Option<&'a Matrix>,
    /// Output.
    pub out: &'a Matrix,
    /// True to accumulate into the output.
    pub accumulate: bool,
}

impl CublasLtGemm<'_> {
    /// Returns the problem of this GEMM.
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

    /// Checks the problem and the sizes of all buffers.
    ///
    /// # Errors
    /// Returns an error that names the argument.
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

/// Returns the largest power of two up to 256 to which this memory is aligned. Allocations begin at
/// multiples of 512, a view into one anywhere.
fn alignment(handle: &Handle) -> u32 {
    1 << handle.offset_start.unwrap_or(0).trailing_zeros().min(8)
}
