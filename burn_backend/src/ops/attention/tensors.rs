//! The tensors of attention that cross the extension trait.

use burn_core as burn;

use burn_core::backend::{
    Backend, ExtensionType, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn_core::tensor::DType;

/// Queries, keys and values, or their gradients.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub enum AttentionInputs<B: Backend> {
    /// Three tensors.
    Separate {
        /// `[q_tokens, heads, head]`.
        q: FloatTensor<B>,
        /// `[k_tokens, kv_heads, head]`.
        k: FloatTensor<B>,
        /// `[k_tokens, kv_heads, head]`.
        v: FloatTensor<B>,
    },
    /// Columns of one matrix, `[tokens, (heads + 2 kv_heads) head]`: the output of one projection.
    Qkv(FloatTensor<B>),
}

impl<B: Backend> AttentionInputs<B> {
    /// Tokens of `q`.
    pub fn q_tokens(&self) -> usize {
        match self {
            Self::Separate { q, .. } => q.shape()[0],
            Self::Qkv(qkv) => qkv.shape()[0],
        }
    }

    /// Tokens of `k` and `v`.
    pub fn k_tokens(&self) -> usize {
        match self {
            Self::Separate { k, .. } => k.shape()[0],
            Self::Qkv(qkv) => qkv.shape()[0],
        }
    }

    /// Type of the elements.
    pub fn dtype(&self) -> DType {
        match self {
            Self::Separate { q, .. } => q.dtype(),
            Self::Qkv(qkv) => qkv.dtype(),
        }
    }

    /// The same with other tensors.
    pub(in crate::ops) fn map<C: Backend>(
        self,
        f: impl Fn(FloatTensor<B>) -> FloatTensor<C>,
    ) -> AttentionInputs<C> {
        match self {
            Self::Separate { q, k, v } => AttentionInputs::Separate {
                q: f(q),
                k: f(k),
                v: f(v),
            },
            Self::Qkv(qkv) => AttentionInputs::Qkv(f(qkv)),
        }
    }
}

/// Which tokens belong together.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub enum AttentionSequences<B: Backend> {
    /// So many sequences of equal length.
    Equal(usize),
    /// `u32[count + 1]`, ascending from 0: where sequences begin, and the last one ends.
    Offsets {
        /// Among the tokens of `q`.
        q: IntTensor<B>,
        /// Among those of `k` and `v`.
        k: IntTensor<B>,
    },
}

/// Tables of rotary positions, or none.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub enum AttentionRope<B: Backend> {
    /// Queries and keys are not rotated.
    Absent,
    /// Cosines and sines, `f32` of `positions * head / 2` elements, whatever their rank.
    Tables {
        /// Cosines.
        cos: FloatTensor<B>,
        /// Sines.
        sin: FloatTensor<B>,
    },
}

/// What the forward of attention gives, which is what its backward needs.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct AttentionForward<B: Backend> {
    /// Inputs, queries and keys rotated.
    #[extension_type]
    pub inputs: AttentionInputs<B>,
    /// `[q_tokens, heads * head]`, in the type of the inputs.
    pub out: FloatTensor<B>,
    /// Log-sum-exps, `f32[heads, q_tokens]`.
    pub lse: FloatTensor<B>,
}
