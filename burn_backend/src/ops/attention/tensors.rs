//! Tensors of attention that cross the extension trait.

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
    /// Three separate tensors.
    Separate {
        /// Queries, `[q_tokens, heads, head]`.
        q: FloatTensor<B>,
        /// Keys, `[k_tokens, kv_heads, head]`.
        k: FloatTensor<B>,
        /// Values, `[k_tokens, kv_heads, head]`.
        v: FloatTensor<B>,
    },
    /// Columns of one matrix, `[tokens, (heads + 2 kv_heads) head]`: the output of a fused
    /// projection.
    Qkv(FloatTensor<B>),
}

impl<B: Backend> AttentionInputs<B> {
    /// Number of tokens of `q`.
    pub fn q_tokens(&self) -> usize {
        match self {
            Self::Separate { q, .. } => q.shape()[0],
            Self::Qkv(qkv) => qkv.shape()[0],
        }
    }

    /// Number of tokens of `k` and `v`.
    pub fn k_tokens(&self) -> usize {
        match self {
            Self::Separate { k, .. } => k.shape()[0],
            Self::Qkv(qkv) => qkv.shape()[0],
        }
    }

    /// Returns the dtype of the elements.
    pub fn dtype(&self) -> DType {
        match self {
            Self::Separate { q, .. } => q.dtype(),
            Self::Qkv(qkv) => qkv.dtype(),
        }
    }

    /// Replaces the tensors.
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

/// Grouping of tokens into sequences.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub enum AttentionSequences<B: Backend> {
    /// This number of sequences of equal length.
    Equal(usize),
    /// Offsets of the sequences, `u32[count + 1]`, ascending from 0.
    Offsets {
        /// Offsets among the tokens of `q`.
        q: IntTensor<B>,
        /// Offsets among the tokens of `k` and `v`.
        k: IntTensor<B>,
    },
}

/// Tables of rotary positions, or none.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub enum AttentionRope<B: Backend> {
    /// Queries and keys are not rotated.
    Absent,
    /// Cosines and sines, `f32` with `positions * head / 2` elements, of any rank.
    Tables {
        /// Cosines.
        cos: FloatTensor<B>,
        /// Sines.
        sin: FloatTensor<B>,
    },
}

/// Results of the forward of attention, as needed by its backward.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct AttentionForward<B: Backend> {
    /// Inputs with rotated queries and keys.
    #[extension_type]
    pub inputs: AttentionInputs<B>,
    /// Output, `[q_tokens, heads * head]`, in the dtype of the inputs.
    pub out: FloatTensor<B>,
    /// Log-sum-exps, `f32[heads, q_tokens]`.
    pub lse: FloatTensor<B>,
}
