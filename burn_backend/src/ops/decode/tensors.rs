//! Tensors of decoding that cross the extension trait.

use burn_core as burn;

use burn_core::backend::{
    Autodiff, Backend, ExtensionType,
    autodiff::checkpoint::strategy::CheckpointStrategy,
    tensor::{FloatTensor, IntTensor},
};

/// Keys and values, `[batch * capacity * kv_heads * head]` each, in memory that the operations
/// write to even if other owners exist.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub enum KvTensors<B: Backend> {
    /// Floats in the dtype of the activations.
    Float {
        /// Keys.
        k: FloatTensor<B>,
        /// Values.
        v: FloatTensor<B>,
    },
    /// E4M3 elements, `u8`.
    E4m3 {
        /// Keys.
        k: IntTensor<B>,
        /// Values.
        v: IntTensor<B>,
    },
}

impl<B: Backend> KvTensors<B> {
    /// Replaces the tensors.
    pub(super) fn map<C: Backend>(
        self,
        float: impl Fn(FloatTensor<B>) -> FloatTensor<C>,
        codes: impl Fn(IntTensor<B>) -> IntTensor<C>,
    ) -> KvTensors<C> {
        match self {
            Self::Float { k, v } => KvTensors::Float {
                k: float(k),
                v: float(v),
            },
            Self::E4m3 { k, v } => KvTensors::E4m3 {
                k: codes(k),
                v: codes(v),
            },
        }
    }
}

/// Positions of the new tokens.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct ChunkPlaces<B: Backend> {
    /// Number of tokens already in each sequence, `u32[batch]`.
    pub starts: IntTensor<B>,
    /// Number of new tokens of each sequence, without padding, `u32[batch]`.
    pub counts: IntTensor<B>,
}

impl<B: Backend, C: CheckpointStrategy> ChunkPlaces<Autodiff<B, C>> {
    /// Converts to the inner backend.
    pub(super) fn inner(self) -> ChunkPlaces<B> {
        ChunkPlaces {
            starts: self.starts,
            counts: self.counts,
        }
    }
}

/// Queries or an output, and the cache.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct Attended<B: Backend> {
    /// Queries or output, `[tokens, heads * head]`, in the dtype of the inputs.
    pub out: FloatTensor<B>,
    /// Memory of the given cache.
    #[extension_type]
    pub cache: KvTensors<B>,
}

/// State that a decoding step changes, in memory that the operations write to.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct TokenState<B: Backend> {
    /// Next token of each sequence, `i32[batch]`.
    pub tokens: IntTensor<B>,
    /// Number of tokens in each sequence, `u32[batch]`.
    pub starts: IntTensor<B>,
    /// Number of tokens that a step adds to each sequence, `u32[batch]`.
    pub counts: IntTensor<B>,
    /// Tokens of the last steps, `i32[length, batch]`, row `step % length` of each.
    pub ring: IntTensor<B>,
    /// Number of steps so far of each sequence, `u32[batch]`.
    pub step: IntTensor<B>,
}
