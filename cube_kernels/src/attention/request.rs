//! What attention is asked for: operands, sequences, rotations, and where results go.

use cubecl::{client::Client, server::Handle};

use crate::{
    Nvfp4Error,
    memory::{allocate, check_memory, is_aligned},
    policy::AttentionParams,
    tensor::FloatKind,
};

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

    pub(super) fn check(&self, argument: &'static str) -> Result<(), Nvfp4Error> {
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
    pub(super) fn check_like(
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

    pub(super) fn check_type(
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

/// What [`forward`](super::forward) gives, and what the backward needs of it.
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

    pub(super) fn check(&self, attention: &Attention) -> Result<(), Nvfp4Error> {
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

/// Whether every vector of `elements` of a head, and every 16 bytes, begin at a multiple of their
/// size.
pub(crate) fn is_vectorized(heads: &Heads, elements: usize) -> bool {
    let places = [heads.offset, heads.row_stride, heads.head];
    is_aligned(&heads.handle) && places.iter().all(|place| place.is_multiple_of(elements))
}
