//! Arguments of attention: operands, sequences, rotations and outputs.

use cubecl::{client::Client, server::Handle};

use crate::{
    Nvfp4Error,
    memory::{allocate, check_memory, is_aligned},
    policy::AttentionParams,
    tensor::FloatKind,
};

/// Largest head size.
pub const MAX_HEAD: usize = 256;

/// Largest number of tokens: sums of three token indices and a window fit 31 bits.
pub const MAX_TOKENS: usize = 1 << 29;

/// Heads of all tokens, `[tokens, heads, head]`, in device memory. The heads of a token are
/// contiguous, and tokens are `row_stride` elements apart, so that queries, keys and values may be
/// column ranges of one projection output.
#[derive(Debug, Clone)]
pub struct Heads {
    /// Memory of the heads.
    pub handle: Handle,
    /// Elements before the first head.
    pub offset: usize,
    /// Elements from one token to the next.
    pub row_stride: usize,
    /// Number of tokens of all sequences.
    pub tokens: usize,
    /// Heads per token.
    pub heads: usize,
    /// Elements per head.
    pub head: usize,
    /// Element type.
    pub dtype: FloatKind,
}

impl Heads {
    /// Returns contiguous heads: `row_stride` is `heads * head`.
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

    /// Allocates contiguous heads with undefined contents.
    pub fn empty(client: &Client, shape: [usize; 3], dtype: FloatKind) -> Self {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        Self::contiguous(allocate(client, bytes), shape, dtype)
    }

    /// Returns `heads` heads from `first` on.
    ///
    /// # Panics
    /// Panics if there are not that many heads.
    pub fn part(&self, first: usize, heads: usize) -> Self {
        assert!(first + heads <= self.heads, "heads of a part");
        Self {
            offset: self.offset + first * self.head,
            heads,
            ..self.clone()
        }
    }

    /// Returns `[tokens, heads, head]`.
    pub fn shape(&self) -> [usize; 3] {
        [self.tokens, self.heads, self.head]
    }

    /// Returns the number of elements up to the end of the last head.
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

    /// Returns an error unless shape and type equal those of `other`, which is called `name`.
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

/// Partition of the tokens into sequences: a query sees only keys of the same sequence. Positions
/// count from 0 in every sequence.
#[derive(Debug, Clone)]
pub enum Sequences {
    /// This many sequences of equal length, one after another, in `q` as well as in `k` and `v`;
    /// the lengths of `q` and of `k` may differ.
    Equal(usize),
    /// Sequences of any length, including 0. Each handle contains `count + 1` ascending `u32` token
    /// indices starting at 0: sequence `s` is the tokens from entry `s` up to entry `s + 1`. Tokens
    /// from the last entry on belong to no sequence: their output and gradients are 0, their
    /// log-sum-exp is `-inf`. The host does not read the entries: if they do not ascend, or exceed
    /// the number of tokens, results are unspecified, but no access is out of bounds.
    Offsets {
        /// Offsets of the tokens of `q`.
        q: Handle,
        /// Offsets of the tokens of `k` and `v`; may be the same handle.
        k: Handle,
        /// Number of sequences.
        count: usize,
    },
}

impl Sequences {
    /// Returns the sequences of the tokens of `q`.
    pub fn of_q(&self) -> TokenSequences<'_> {
        match self {
            Self::Equal(count) => TokenSequences::Equal(*count),
            Self::Offsets { q, count, .. } => TokenSequences::Offsets {
                starts: q,
                count: *count,
            },
        }
    }

    /// Returns the sequences of the tokens of `k` and `v`.
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
    /// This many sequences of equal length.
    Equal(usize),
    /// Sequences at offsets.
    Offsets {
        /// `count + 1` ascending `u32` token indices.
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

/// Operands of attention. Head `h` of `q` reads head `h / (q.heads / k.heads)` of `k` and `v`.
#[derive(Debug, Clone)]
pub struct Attention {
    /// Queries.
    pub q: Heads,
    /// Keys.
    pub k: Heads,
    /// Values, as many as there are keys.
    pub v: Heads,
    /// Partition of the tokens into sequences.
    pub sequences: Sequences,
    /// Mapping of scores to weights.
    pub params: AttentionParams,
}

impl Attention {
    /// Checks shapes, types and memory.
    ///
    /// # Errors
    /// Returns an error if the heads of `k` and `v` differ, or do not divide those of `q`, types or
    /// head sizes differ, memory is too small, or a parameter or the sequences are invalid.
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

    /// Returns the number of heads of `q` that read one head of `k` and `v`.
    pub fn group(&self) -> usize {
        self.q.heads / self.k.heads
    }
}

/// Result of [`forward`](super::forward), which is also the state saved for backward.
#[derive(Debug, Clone)]
pub struct AttentionOutput {
    /// Output `[tokens, heads, head]`, contiguous, in the type of `q`. 0 for rows that see no keys.
    pub out: Heads,
    /// Natural logarithm of the sum of the exponentials of a row's scores,
    /// `f32[heads, tokens of q]`; `-inf` for rows that see no keys.
    pub lse: Handle,
}

impl AttentionOutput {
    /// Allocates the output of `attention`, with undefined contents.
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
/// and element `i + head / 2` are a pair, which position `p` rotates by the angle of entry
/// `(p, i)`.
#[derive(Debug, Clone)]
pub struct Rope {
    /// Cosines.
    pub cos: Handle,
    /// Sines.
    pub sin: Handle,
    /// Number of positions; tokens further on are rotated like the last position.
    pub positions: usize,
}

impl Rope {
    /// Returns an error unless the tables fit the heads of `x`, and every token of sequences with
    /// known length has a position.
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

/// Output gradients, in shape and type those of `q`, `k` and `v`; they may be column ranges of one
/// buffer.
#[derive(Debug, Clone)]
pub struct AttentionGradients {
    /// Gradient of `q`.
    pub dq: Heads,
    /// Gradient of `k`.
    pub dk: Heads,
    /// Gradient of `v`.
    pub dv: Heads,
}

/// Inputs of the backward kernels besides the operands, and their outputs.
#[derive(Debug, Clone, Copy)]
pub struct Backward<'a> {
    /// Result of the forward.
    pub saved: &'a AttentionOutput,
    /// Gradient of the forward's output.
    pub dout: &'a Heads,
    /// Sum of `dout · out` of each row, `f32[heads, tokens of q]`.
    pub delta: &'a Handle,
    /// Rotation to undo in the gradients of `q` and `k`.
    pub rope: Option<&'a Rope>,
    /// Output gradients.
    pub gradients: &'a AttentionGradients,
}

/// True if every vector of `elements` elements of a head, and every 16 bytes, starts at a multiple
/// of its size.
pub(crate) fn is_vectorized(heads: &Heads, elements: usize) -> bool {
    let places = [heads.offset, heads.row_stride, heads.head];
    is_aligned(&heads.handle) && places.iter().all(|place| place.is_multiple_of(elements))
}
