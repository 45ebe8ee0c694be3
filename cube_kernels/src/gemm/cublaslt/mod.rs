//! GEMMs by NVIDIA's cuBLASLt: the FP4 tensor cores of compute capability 10.0 and 10.3, and bf16
//! and FP8 wherever the library has them.
//!
//! `out[m, n] = alpha · Σ a[m, k] · b[n, k] + bias[n] (+ what out held)`, both operands stored
//! along `k`. The library is column-major: our row-major `out` is its `D = op(A) · op(B)` of `n`
//! rows and `m` columns, its `A` is our `b`, transposed, its `B` our `a`. Both have `k` rows and a
//! leading dimension of `k` ("TN", the only orientation with FP4 and FP8), and the bias runs along
//! the rows of `D`, which are our columns.
//!
//! | [`CublasLtFormat`] | elements | scales | rows of 16 bytes are |
//! |---|---|---|---|
//! | `Bf16` | bf16 | none | 8 elements |
//! | `E4m3` | FP8 E4M3 | one `f32` for each operand, on the device, multiplied | 16 |
//! | `Nvfp4` | E2M1, the lower half of a byte first | an E4M3 byte for each 16 elements, in 128x4 tiles ([`quantize::swizzle`](crate::quantize::swizzle())) | 32 |
//!
//! Three ways through the same code, so that all of it but the FP4 instruction itself is tested on
//! a GPU without FP4: descriptors, epilogue arguments, memory, order. **The FP4 GEMM has never run
//! on hardware**: on compute capability 9.0 the library answers that it does not support it, which
//! [`supports`] turns into [`Nvfp4Error::Unsupported`].
//!
//! # Order
//!
//! The library's kernels are queued on the very stream that CubeCL's launches of the same client
//! are queued on. CubeCL hands out no stream, but a task on its device thread may ask the server
//! for it (`WriteScoped::write_streams`, then `MultiStream::resolve`, both public in
//! `cubecl-server`), and that is what `queue` submits: one task, in the same queue as launches,
//! that does what CubeCL's own launch does, and waits for every other stream whose memory is used.
//! It skips where an input was never written and marks the output when it fails (so that reading
//! the output says why), keeps memory of other streams alive, and tells a graph that is being
//! captured which memory it uses. No host synchronisation, no second stream, no waiting kernel, and
//! a captured graph holds the GEMM like any launch.
//!
//! Measured (H100, host time of a small GEMM): 15 us a call, 51 us between two synchronisations.
//!
//! What was considered instead: a stream of our own, a kernel that sets a flag for
//! `cuStreamWaitValue32`, `cuStreamWriteValue32` back, and a kernel that waits for that. All work
//! would be submitted in the order of its dependencies, so one hardware queue would do; but the
//! waiting kernel holds a slot of an SM while the library's kernels need one, each stream of a
//! process has its own, a kernel that wants all SMs at once would never start, and a captured graph
//! would hold the waiting without the GEMM. It is not needed.
//!
//! # Memory
//!
//! One library handle for each device lives as long as the process. The workspace that an algorithm
//! asks for (at most [`WORKSPACE`] bytes) comes from CubeCL's pool for each call, which reuses it
//! in the order of the stream: GEMMs on two streams never share one.

use cubecl::{client::Client, server::Handle};

use crate::{
    Nvfp4Error,
    memory::check_memory,
    reference::swizzle::padded_len,
    tensor::{FloatKind, Matrix},
};

#[cfg(feature = "cuda")]
mod library;
#[cfg_attr(not(feature = "cuda"), path = "absent.rs")]
mod queue;

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
    /// else the library wants it says itself ([`supports`]).
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

/// Whether the library takes `problem` on the device behind `client`. It is asked once for each
/// problem, which waits for the device thread (not for the device).
///
/// # Errors
/// [`Nvfp4Error::Unsupported`] when the library is not there or has no algorithm, and as
/// [`CublasLtProblem::check`].
pub fn supports(client: &Client, problem: &CublasLtProblem) -> Result<(), Nvfp4Error> {
    problem.check()?;
    queue::plan(client, problem).map(drop)
}

/// Queues a GEMM behind everything that was queued through `client` before.
///
/// # Errors
/// As [`supports`] and [`CublasLtGemm::check`]. What goes wrong later is said by a read of the
/// output.
pub fn gemm(client: &Client, gemm: &CublasLtGemm) -> Result<(), Nvfp4Error> {
    gemm.check()?;
    queue::submit(client, gemm)
}
