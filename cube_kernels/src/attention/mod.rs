//! Attention, `softmax(mask(scale · q kᵀ)) v`, forward and backward, without a matrix of tokens by
//! tokens in memory.
//!
//! - [`forward`] gives the output and the log-sum-exp of each row of scores; from these
//!   [`backward`] computes the weights again, block by block.
//! - [`decode`](mod@decode) attends to a cache of keys and values, and writes to it.
//! - [`rope()`] rotates queries and keys by their positions, or back.
//! - `mma` has kernels by matrix instructions for CUDA GPUs, bf16 and f16; `scalar` has kernels for
//!   every device and type, which are the twins of
//!   [`reference::attention`](crate::reference::attention).
//!
//! Every sum has an order that depends on its operands' shapes alone: results repeat bit for bit,
//! and a sequence has the same bits in any company that the same kernels compute. Chapter
//! "Attention" of the book has the formulas.

#[allow(missing_docs)]
pub mod decode;
#[allow(missing_docs)]
mod delta;
pub(crate) mod instances;
// `#[cube]` generates public items that cannot carry documentation.
#[allow(missing_docs)]
pub mod mma;
#[allow(missing_docs)]
mod rope;
#[allow(missing_docs)]
mod scalar;
#[allow(missing_docs)]
pub mod sm90;

use cubecl::{client::Client, server::Handle};

use crate::{
    Nvfp4Error,
    capabilities::{Capabilities, GemmBackend},
    describe::CodePath,
    memory::{allocate, check_memory, is_aligned},
    tensor::FloatKind,
};

pub use crate::policy::AttentionParams;
pub use rope::{Rotation, rope};

/// The kernels themselves, for tests that compile them without launching.
#[doc(hidden)]
pub mod kernels {
    pub use super::{
        delta::{DeltaPlan, DeltaShapeLaunch, DeltaViewLaunch, delta_kernel},
        rope::{RopePlan, RopeShapeLaunch, RotationsLaunch, rope_kernel},
        scalar::kernels::*,
    };
}

/// The widest head.
pub const MAX_HEAD: usize = 256;

/// The most tokens: sums of three token numbers and a window fit 31 bits.
pub const MAX_TOKENS: usize = 1 << 29;

/// Heads of all tokens, `[tokens, heads, head]`, in device memory: the heads of a token lie one
/// after another, and tokens `row_stride` elements apart. Columns of the output of a projection to
/// queries, keys and values are one.
#[derive(Debug, Clone)]
pub struct Heads {
    /// The memory.
    pub handle: Handle,
    /// Elements before the first.
    pub offset: usize,
    /// Elements from a token to the next.
    pub row_stride: usize,
    /// Tokens of all sequences.
    pub tokens: usize,
    /// Heads of a token.
    pub heads: usize,
    /// Elements of a head.
    pub head: usize,
    /// Their type.
    pub dtype: FloatKind,
}

impl Heads {
    /// Heads that fill their memory: `row_stride` is `heads * head`.
    pub fn contiguous(handle: Handle, [tokens, heads, head]: [usize; 3], dtype: FloatKind) -> Self {
        Self {
            handle,
            offset: 0,
            row_stride: heads * head,
            tokens,
            heads,
            head,
            dtype,
        }
    }

    /// Contiguous heads with undefined contents.
    pub fn empty(client: &Client, shape: [usize; 3], dtype: FloatKind) -> Self {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        Self::contiguous(allocate(client, bytes), shape, dtype)
    }

    /// `heads` heads from `first` on.
    ///
    /// # Panics
    /// When there are not as many.
    pub fn part(&self, first: usize, heads: usize) -> Self {
        assert!(first + heads <= self.heads, "heads of a part");
        Self {
            offset: self.offset + first * self.head,
            heads,
            ..self.clone()
        }
    }

    /// `[tokens, heads, head]`.
    pub fn shape(&self) -> [usize; 3] {
        [self.tokens, self.heads, self.head]
    }

    /// Elements of memory up to the last.
    pub(crate) fn span(&self) -> usize {
        match self.tokens * self.heads {
            0 => 0,
            _ => self.offset + (self.tokens - 1) * self.row_stride + self.heads * self.head,
        }
    }

    fn check(&self, argument: &'static str) -> Result<(), Nvfp4Error> {
        if self.head == 0 || self.head > MAX_HEAD {
            return Err(Nvfp4Error::shape(
                argument,
                format!("heads of {}", self.head),
                format!("1 to {MAX_HEAD}"),
            ));
        }
        if self.heads == 0 || self.heads > u16::MAX as usize {
            return Err(Nvfp4Error::shape(
                argument,
                format!("{} heads", self.heads),
                format!("1 to {}", u16::MAX),
            ));
        }
        if self.row_stride < self.heads * self.head {
            return Err(Nvfp4Error::shape(
                argument,
                format!("tokens {} elements apart", self.row_stride),
                format!("at least {} x {}, the heads of one", self.heads, self.head),
            ));
        }
        if self.tokens > MAX_TOKENS {
            return Err(Nvfp4Error::shape(
                argument,
                format!("{} tokens", self.tokens),
                format!("at most {MAX_TOKENS}"),
            ));
        }
        check_memory(argument, &self.handle, self.span() * self.dtype.size())
    }

    /// An error unless shape and type are those of `other`, called `name`.
    fn check_like(
        &self,
        argument: &'static str,
        name: &str,
        other: &Self,
    ) -> Result<(), Nvfp4Error> {
        self.check(argument)?;
        if self.shape() != other.shape() {
            return Err(Nvfp4Error::shape(
                argument,
                format!("{:?}", self.shape()),
                format!("{:?}, as `{name}`", other.shape()),
            ));
        }
        self.check_type(argument, name, other)
    }

    fn check_type(
        &self,
        argument: &'static str,
        name: &str,
        other: &Self,
    ) -> Result<(), Nvfp4Error> {
        if self.dtype == other.dtype {
            return Ok(());
        }
        Err(Nvfp4Error::DType {
            argument,
            found: format!("{:?}", self.dtype),
            expected: format!("{:?}, as `{name}`", other.dtype),
        })
    }
}

/// Which tokens belong together: a query sees keys of its own sequence. Positions count from 0 in
/// every sequence.
#[derive(Debug, Clone)]
pub enum Sequences {
    /// So many sequences of equal length, one after another, in `q` as in `k` and `v`; the lengths
    /// of `q` and of `k` may differ.
    Equal(usize),
    /// Sequences of any lengths, 0 included. Each handle holds `count + 1` ascending `u32` token
    /// numbers from 0 on: sequence `s` is the tokens from entry `s` to entry `s + 1`. Tokens behind
    /// the last entry belong to nobody: their output and gradients are 0, their log-sum-exp is
    /// `-inf`. They are not read back: with entries that do not ascend, or exceed the tokens,
    /// results are not specified, but nothing outside a buffer is touched.
    Offsets {
        /// For the tokens of `q`.
        q: Handle,
        /// For those of `k` and `v`; it may be the same.
        k: Handle,
        /// Number of sequences.
        count: usize,
    },
}

impl Sequences {
    /// Those of the tokens of `q`.
    pub fn of_q(&self) -> TokenSequences<'_> {
        match self {
            Self::Equal(count) => TokenSequences::Equal(*count),
            Self::Offsets { q, count, .. } => TokenSequences::Offsets {
                starts: q,
                count: *count,
            },
        }
    }

    /// Those of the tokens of `k` and `v`.
    pub fn of_k(&self) -> TokenSequences<'_> {
        match self {
            Self::Equal(count) => TokenSequences::Equal(*count),
            Self::Offsets { k, count, .. } => TokenSequences::Offsets {
                starts: k,
                count: *count,
            },
        }
    }
}

/// One side of [`Sequences`].
#[derive(Debug, Clone, Copy)]
pub enum TokenSequences<'a> {
    /// So many of equal length.
    Equal(usize),
    /// `count + 1` ascending `u32` token numbers.
    Offsets {
        /// They.
        starts: &'a Handle,
        /// Number of sequences.
        count: usize,
    },
}

impl TokenSequences<'_> {
    pub(crate) fn check(&self, argument: &'static str, tokens: usize) -> Result<(), Nvfp4Error> {
        let (Self::Equal(count) | Self::Offsets { count, .. }) = *self;
        if count == 0 || count > MAX_TOKENS {
            return Err(Nvfp4Error::value(
                "sequences",
                format!("{count} sequences"),
                format!("1 to {MAX_TOKENS}"),
            ));
        }
        match self {
            Self::Equal(count) if !tokens.is_multiple_of(*count) => Err(Nvfp4Error::shape(
                argument,
                format!("{tokens} tokens"),
                format!("a multiple of {count}, the sequences of equal length"),
            )),
            Self::Equal(_) => Ok(()),
            Self::Offsets { starts, count } => {
                check_memory("sequences.offsets", starts, (count + 1) * 4)
            }
        }
    }
}

/// The operands of attention. Head `h` of `q` reads head `h / (q.heads / k.heads)` of `k` and `v`.
#[derive(Debug, Clone)]
pub struct Attention {
    /// Queries.
    pub q: Heads,
    /// Keys.
    pub k: Heads,
    /// Values, as many as keys.
    pub v: Heads,
    /// Which tokens belong together.
    pub sequences: Sequences,
    /// How scores become weights.
    pub params: AttentionParams,
}

impl Attention {
    /// An error unless shapes, types and memory fit.
    ///
    /// # Errors
    /// When heads of `k` and `v` differ, or do not divide those of `q`, types or sizes of heads
    /// differ, memory is too small, or a parameter or the sequences cannot be.
    pub fn check(&self) -> Result<(), Nvfp4Error> {
        let Self {
            q,
            k,
            v,
            sequences,
            params,
        } = self;
        q.check("q")?;
        k.check("k")?;
        v.check_like("v", "k", k)?;
        k.check_type("k", "q", q)?;
        if k.head != q.head {
            return Err(Nvfp4Error::shape(
                "k",
                format!("heads of {}", k.head),
                format!("{}, as in `q`", q.head),
            ));
        }
        if !q.heads.is_multiple_of(k.heads) {
            return Err(Nvfp4Error::shape(
                "k",
                format!("{} heads", k.heads),
                format!("a divisor of {}, the heads of `q`", q.heads),
            ));
        }
        sequences.of_q().check("q", q.tokens)?;
        sequences.of_k().check("k", k.tokens)?;
        params.check()
    }

    /// Heads of `q` that read one head of `k` and `v`.
    pub fn group(&self) -> usize {
        self.q.heads / self.k.heads
    }
}

/// What [`forward`] gives, and what the backward needs of it.
#[derive(Debug, Clone)]
pub struct AttentionOutput {
    /// `[tokens, heads, head]`, contiguous, in the type of `q`. 0 for rows that see nothing.
    pub out: Heads,
    /// Natural logarithm of the sum of the exponentials of a row's scores, `f32[heads, tokens of
    /// q]`; `-inf` for rows that see nothing.
    pub lse: Handle,
}

impl AttentionOutput {
    /// Memory for the output of `attention`, with undefined contents.
    pub fn empty(client: &Client, attention: &Attention) -> Self {
        let q = &attention.q;
        Self {
            out: Heads::empty(client, q.shape(), q.dtype),
            lse: allocate(client, q.heads * q.tokens * 4),
        }
    }

    fn check(&self, attention: &Attention) -> Result<(), Nvfp4Error> {
        let q = &attention.q;
        self.out.check_like("out", "q", q)?;
        if self.out.offset != 0 || self.out.row_stride != q.heads * q.head {
            return Err(Nvfp4Error::shape(
                "out",
                format!(
                    "tokens {} elements apart from {} on",
                    self.out.row_stride, self.out.offset
                ),
                "heads that fill their memory",
            ));
        }
        check_memory("lse", &self.lse, q.heads * q.tokens * 4)
    }
}

/// Tables of rotary positions in device memory, `f32[positions, head / 2]`: element `i` of a head
/// and element `i + head / 2` are a pair, which position `p` turns by the angle of entry `(p, i)`.
#[derive(Debug, Clone)]
pub struct Rope {
    /// Cosines.
    pub cos: Handle,
    /// Sines.
    pub sin: Handle,
    /// Positions; tokens further on are turned as the last.
    pub positions: usize,
}

impl Rope {
    /// An error unless the tables fit heads of `x`, in sequences of known length all of which have
    /// a position.
    pub(crate) fn check(&self, x: &Heads, sequences: TokenSequences<'_>) -> Result<(), Nvfp4Error> {
        if !x.head.is_multiple_of(2) {
            return Err(Nvfp4Error::shape(
                "x",
                format!("heads of {}", x.head),
                "an even size, for rotary positions",
            ));
        }
        let longest = match sequences {
            TokenSequences::Equal(count) => x.tokens / count.max(1),
            TokenSequences::Offsets { .. } => 1,
        };
        if self.positions < longest.max(1) || self.positions > MAX_TOKENS {
            return Err(Nvfp4Error::value(
                "rope.positions",
                self.positions.to_string(),
                format!("at least {}, the length of the sequences", longest.max(1)),
            ));
        }
        let bytes = self.positions * (x.head / 2) * 4;
        check_memory("rope.cos", &self.cos, bytes)?;
        check_memory("rope.sin", &self.sin, bytes)
    }
}

/// Where gradients are written, in shape and type those of `q`, `k` and `v`; they may be parts of
/// one buffer.
#[derive(Debug, Clone)]
pub struct AttentionGradients {
    /// Of `q`.
    pub dq: Heads,
    /// Of `k`.
    pub dk: Heads,
    /// Of `v`.
    pub dv: Heads,
}

/// What the backward kernels read beside the operands, and where they write.
#[derive(Debug, Clone, Copy)]
pub struct Backward<'a> {
    /// What the forward gave.
    pub saved: &'a AttentionOutput,
    /// The gradient of its output.
    pub dout: &'a Heads,
    /// The sum of `dout · out` of each row, `f32[heads, tokens of q]`.
    pub delta: &'a Handle,
    /// How gradients of `q` and `k` are rotated back.
    pub rope: Option<&'a Rope>,
    /// Where gradients are written.
    pub gradients: &'a AttentionGradients,
}

/// The attention of `attention`.
///
/// A row that sees nothing has output 0 and log-sum-exp `-inf` (0 with `quiet_softmax`). NaN in a
/// query, or in a key or value that it sees, gives NaN in its row, and in no other.
///
/// # Errors
/// When [`Attention::check`] fails.
pub fn forward(client: &Client, attention: &Attention) -> Result<AttentionOutput, Nvfp4Error> {
    attention.check()?;
    let output = AttentionOutput::empty(client, attention);
    forward_into(client, attention, &output)?;
    Ok(output)
}

/// [`forward`] into memory that there is.
///
/// # Errors
/// When [`Attention::check`] fails, or the memory is not what [`AttentionOutput::empty`] gives.
pub fn forward_into(
    client: &Client,
    attention: &Attention,
    output: &AttentionOutput,
) -> Result<(), Nvfp4Error> {
    attention.check()?;
    output.check(attention)?;
    if attention.q.tokens == 0 {
        return Ok(());
    }
    match kernel(client, attention) {
        AttentionKernel::Sm90 => sm90::forward(client, attention, output),
        AttentionKernel::Mma => mma::forward(client, attention, output),
        AttentionKernel::Scalar => scalar::forward(client, attention, output),
    }
    Ok(())
}

/// The gradients of the operands of `attention`, from `saved`, which [`forward`] gave for them, and
/// the gradient `dout` of its output.
///
/// With `rope`, `q` and `k` are rotated ones, and their gradients are rotated back: `dq` and `dk`
/// are those of what was rotated.
///
/// # Errors
/// When [`Attention::check`] fails, or `dout`, `saved`, `rope` or the memory of the gradients does
/// not fit the operands.
pub fn backward(
    client: &Client,
    attention: &Attention,
    saved: &AttentionOutput,
    dout: &Heads,
    rope: Option<&Rope>,
    gradients: &AttentionGradients,
) -> Result<(), Nvfp4Error> {
    let Attention {
        q, k, v, sequences, ..
    } = attention;
    attention.check()?;
    saved.check(attention)?;
    dout.check_like("dout", "q", q)?;
    gradients.dq.check_like("dq", "q", q)?;
    gradients.dk.check_like("dk", "k", k)?;
    gradients.dv.check_like("dv", "v", v)?;
    if let Some(rope) = rope {
        rope.check(q, sequences.of_q())?;
        rope.check(k, sequences.of_k())?;
    }
    let delta = &delta::delta(client, &saved.out, dout);
    let backward = Backward {
        saved,
        dout,
        delta,
        rope,
        gradients,
    };
    let written = [&gradients.dq, &gradients.dk, &gradients.dv];
    let vectorized = mma::is_vectorized(dout) && written.into_iter().all(mma::is_vectorized);
    match kernel(client, attention) {
        AttentionKernel::Sm90 if vectorized => sm90::backward(client, attention, &backward),
        AttentionKernel::Mma if vectorized => mma::backward(client, attention, &backward),
        _ => scalar::backward(client, attention, &backward),
    }
    Ok(())
}

/// The kernels that compute attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AttentionKernel {
    /// `wgmma` and TMA: compute capability 9.0, bf16, heads of 64 and 128, sequences of equal
    /// length.
    Sm90,
    /// `mma.sync`: compute capability 8.0 and later, bf16 and f16, heads of a multiple of 16.
    Mma,
    /// No matrix instructions: every device, type and size.
    Scalar,
}

/// The kernels that compute `attention`: the first of [`AttentionKernel`] that takes it, from the
/// one on that the environment variable `NVFP4_ATTENTION` names (`sm90`, `mma`, `scalar`).
pub fn kernel(client: &Client, attention: &Attention) -> AttentionKernel {
    let asked = std::env::var("NVFP4_ATTENTION");
    let asked = asked.as_deref().unwrap_or("sm90");
    if asked == "sm90" && sm90::supports(client, attention).is_ok() {
        return AttentionKernel::Sm90;
    }
    if asked != "scalar" && mma::supports(client, attention).is_ok() {
        return AttentionKernel::Mma;
    }
    AttentionKernel::Scalar
}

/// Whether every vector of `elements` of a head, and every 16 bytes, begin at a multiple of their
/// size.
pub(crate) fn is_vectorized(heads: &Heads, elements: usize) -> bool {
    let places = [heads.offset, heads.row_stride, heads.head];
    is_aligned(&heads.handle) && places.iter().all(|place| place.is_multiple_of(elements))
}

/// How attention runs on a device with these capabilities.
pub fn describe(capabilities: &Capabilities) -> Vec<CodePath> {
    let row =
        |operation, kernel: &str, reason: &str| CodePath::new(operation, "CubeCL", kernel, reason);
    let scalar = "online softmax, a group of threads for each row";
    let (kernel, why) = match (capabilities.gemm, capabilities.conversion.has_ptx()) {
        (GemmBackend::Sm90Wgmma, _) => (
            "online softmax, wgmma and TMA; mma.sync.m16n8k16 for f16, other heads than of 64 and \
             128, and packed sequences",
            "compute capability 9.0",
        ),
        (_, true) => (
            "online softmax, mma.sync.m16n8k16",
            "compute capability 8.0 and later; heads of a multiple of 16, aligned to 16 bytes",
        ),
        (_, false) => (scalar, "the device has no matrix instructions of PTX"),
    };
    vec![
        row("attention, bf16 and f16", kernel, why),
        row(
            "attention, f32",
            scalar,
            "matrix instructions have no operands of this precision",
        ),
    ]
}
