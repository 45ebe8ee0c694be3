//! Attention over a key-value cache on the primitives of a backend, and selection of the next
//! token, as a separate extension trait.
//!
//! Arguments are not checked here; [`decode`](mod@crate::decode) checks them before anything is
//! queued.

#[cfg(any(feature = "cpu", feature = "cuda"))]
mod cube;
#[cfg(feature = "flex")]
mod flex;
#[cfg(feature = "cubecl-backend")]
mod meta;
mod tensors;

use burn_core as burn;

use burn_core::backend::{
    Autodiff, AutodiffBackend, Backend,
    autodiff::checkpoint::strategy::CheckpointStrategy,
    backend_extension,
    tensor::{FloatTensor, IntTensor},
};

use super::attention::{AttentionInputs, AttentionRope, AttentionSpec};

pub use tensors::{Attended, ChunkPlaces, KvTensors, TokenState};
#[cfg(feature = "cubecl-backend")]
pub use tensors::{AttendedMetadata, ChunkPlacesMetadata, KvTensorsMetadata, TokenStateMetadata};

/// Parameters of decoding other than its tensors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecodeSpec {
    /// Attention parameters.
    pub attention: AttentionSpec,
    /// Number of sequences.
    pub batch: usize,
    /// Maximum number of tokens per sequence.
    pub capacity: usize,
    /// Scales of keys and of values.
    pub scales: [f32; 2],
}

/// Operations on a cache, which they update in place. Their results are constants to autodiff.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(any(feature = "cpu", feature = "cuda")),
    Fusion: cfg(feature = "cubecl-backend"),
    Autodiff
)]
pub trait DecodeOps: Backend {
    /// Rotates and appends the new keys, and appends the new values, to the cache. Returns the
    /// rotated queries, `[tokens, heads * head]`.
    #[fusion(meta = meta::attended)]
    fn nvfp4_append_kv(
        #[extension_type] inputs: AttentionInputs<Self>,
        #[extension_type] cache: KvTensors<Self>,
        #[extension_type] places: ChunkPlaces<Self>,
        #[extension_type] rope: AttentionRope<Self>,
        spec: DecodeSpec,
    ) -> Attended<Self>;

    /// Appends the new keys and values, and computes the attention of the new queries over the
    /// cache, `[tokens, heads * head]`.
    #[fusion(meta = meta::attended)]
    fn nvfp4_decode(
        #[extension_type] inputs: AttentionInputs<Self>,
        #[extension_type] cache: KvTensors<Self>,
        #[extension_type] places: ChunkPlaces<Self>,
        #[extension_type] rope: AttentionRope<Self>,
        spec: DecodeSpec,
    ) -> Attended<Self>;

    /// Sets the next token to the most probable token of each row of `logits`
    /// (`f32[batch, vocab]`), on ties the first, and adds the counts to the lengths. A row with
    /// NaN, or without a number above `-inf`, gives -1.
    #[fusion(meta = meta::choose)]
    fn nvfp4_choose_greedy(
        logits: FloatTensor<Self>,
        #[extension_type] state: TokenState<Self>,
    ) -> TokenState<Self>;

    /// Writes the words of `from` to the memory of `out`, even if other owners exist. Both have one
    /// shape and one dtype of 32 bits.
    #[fusion(meta = meta::write)]
    fn nvfp4_write_words(out: IntTensor<Self>, from: IntTensor<Self>) -> IntTensor<Self>;
}

impl<B: DecodeOps, C: CheckpointStrategy> DecodeOps for Autodiff<B, C> {
    fn nvfp4_append_kv(
        inputs: AttentionInputs<Self>,
        cache: KvTensors<Self>,
        places: ChunkPlaces<Self>,
        rope: AttentionRope<Self>,
        spec: DecodeSpec,
    ) -> Attended<Self> {
        let inputs = inputs.map(|tensor| tensor.into_primitive());
        let cache = cache.map(|tensor| tensor.into_primitive(), |codes| codes);
        let (places, rope) = (places.inner(), inner_rope(rope));
        outer(B::nvfp4_append_kv(inputs, cache, places, rope, spec))
    }

    fn nvfp4_decode(
        inputs: AttentionInputs<Self>,
        cache: KvTensors<Self>,
        places: ChunkPlaces<Self>,
        rope: AttentionRope<Self>,
        spec: DecodeSpec,
    ) -> Attended<Self> {
        let inputs = inputs.map(|tensor| tensor.into_primitive());
        let cache = cache.map(|tensor| tensor.into_primitive(), |codes| codes);
        let (places, rope) = (places.inner(), inner_rope(rope));
        outer(B::nvfp4_decode(inputs, cache, places, rope, spec))
    }

    fn nvfp4_choose_greedy(logits: FloatTensor<Self>, state: TokenState<Self>) -> TokenState<Self> {
        let TokenState {
            tokens,
            starts,
            counts,
            ring,
            step,
        } = state;
        let state = TokenState {
            tokens,
            starts,
            counts,
            ring,
            step,
        };
        let TokenState {
            tokens,
            starts,
            counts,
            ring,
            step,
        } = B::nvfp4_choose_greedy(logits.into_primitive(), state);
        TokenState {
            tokens,
            starts,
            counts,
            ring,
            step,
        }
    }

    fn nvfp4_write_words(out: IntTensor<Self>, from: IntTensor<Self>) -> IntTensor<Self> {
        B::nvfp4_write_words(out, from)
    }
}

fn inner_rope<B: Backend, C: CheckpointStrategy>(
    rope: AttentionRope<Autodiff<B, C>>,
) -> AttentionRope<B> {
    match rope {
        AttentionRope::Absent => AttentionRope::Absent,
        AttentionRope::Tables { cos, sin } => AttentionRope::Tables {
            cos: cos.into_primitive(),
            sin: sin.into_primitive(),
        },
    }
}

fn outer<B: Backend, C: CheckpointStrategy>(found: Attended<B>) -> Attended<Autodiff<B, C>> {
    let outer = <Autodiff<B, C> as AutodiffBackend>::from_inner;
    Attended {
        out: outer(found.out),
        cache: found.cache.map(outer, |codes| codes),
    }
}
