//! The tensors of decoding that cross the extension trait.

use burn_core as burn;

use burn_core::backend::{
    Autodiff, Backend, ExtensionType,
    autodiff::checkpoint::strategy::CheckpointStrategy,
    tensor::{FloatTensor, IntTensor},
};

/// Keys and values, `[batch * capacity * kv_heads * head]` each, in memory that the operations
/// write to, whoever else holds it.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub enum KvTensors<B: Backend> {
    /// In the type of the activations.
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
    /// The same with other tensors.
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

/// Where the new tokens lie.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct ChunkPlaces<B: Backend> {
    /// Tokens that each sequence has: `u32[batch]`.
    pub starts: IntTensor<B>,
    /// New tokens of each that are no padding: `u32[batch]`.
    pub counts: IntTensor<B>,
}

impl<B: Backend, C: CheckpointStrategy> ChunkPlaces<Autodiff<B, C>> {
    /// The same of the inner backend.
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
    /// `[tokens, heads * head]`, in the type of the inputs.
    pub out: FloatTensor<B>,
    /// The memory of the cache that was given.
    #[extension_type]
    pub cache: KvTensors<B>,
}

/// What decoding changes from step to step, in memory that the operations write to.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct TokenState<B: Backend> {
    /// The token that comes next in each sequence: `i32[batch]`.
    pub tokens: IntTensor<B>,
    /// Tokens that each sequence has: `u32[batch]`.
    pub starts: IntTensor<B>,
    /// How many are added by a step: `u32[batch]`.
    pub counts: IntTensor<B>,
    /// The tokens of the last steps: `i32[length, batch]`, row `step % length` of each.
    pub ring: IntTensor<B>,
    /// Steps so far: `u32[1]`.
    pub step: IntTensor<B>,
}
