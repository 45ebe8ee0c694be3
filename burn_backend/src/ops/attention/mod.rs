//! Attention on the primitives of a backend: an extension trait of its own.
//!
//! Arguments are trusted here; [`attention`](mod@crate::attention) checks them before anything is
//! queued.

mod autodiff;
#[cfg(feature = "flex")]
mod blocked;
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub(in crate::ops) mod cube;
#[cfg(feature = "flex")]
mod flex;
#[cfg(feature = "cubecl-backend")]
mod meta;
mod tensors;

use burn_core as burn;

use burn_core::backend::{Backend, backend_extension, tensor::FloatTensor};
use nvfp4_kernels::AttentionParams;

use super::spec::OutputAmax;

pub use tensors::{AttentionForward, AttentionInputs, AttentionRope, AttentionSequences};
#[cfg(feature = "cubecl-backend")]
pub use tensors::{
    AttentionForwardMetadata, AttentionInputsMetadata, AttentionRopeMetadata,
    AttentionSequencesMetadata,
};

/// What attention computes beside its tensors.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionSpec {
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head: usize,
    /// How scores become weights.
    pub params: AttentionParams,
    /// What the layer behind the attention needs to quantize its output, which the pass that writes
    /// the output then finds, where it can. No bit of a result depends on it.
    pub amax: Option<OutputAmax>,
}

/// Attention without a matrix of tokens by tokens; see
/// [`nvfp4_kernels::attention`](https://docs.rs/nvfp4-kernels) for what is computed.
///
/// Only [`nvfp4_attention`](Self::nvfp4_attention) is differentiable; under `Autodiff` the results
/// of the other operations are constants.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(any(feature = "cpu", feature = "cuda")),
    Fusion: cfg(feature = "cubecl-backend"),
    Autodiff
)]
pub trait AttentionOps: Backend {
    /// Output and log-sum-exp, and the inputs with queries and keys rotated: in place where nobody
    /// else holds their memory.
    #[fusion(meta = meta::forward)]
    fn nvfp4_attention_forward(
        #[extension_type] inputs: AttentionInputs<Self>,
        #[extension_type] sequences: AttentionSequences<Self>,
        #[extension_type] rope: AttentionRope<Self>,
        spec: AttentionSpec,
    ) -> AttentionForward<Self>;

    /// The gradients of the inputs before their rotation, in the form of the inputs, from what
    /// [`nvfp4_attention_forward`](Self::nvfp4_attention_forward) gave and the gradient of the
    /// output, of the output's type.
    #[fusion(meta = meta::backward)]
    fn nvfp4_attention_backward(
        #[extension_type] saved: AttentionForward<Self>,
        dout: FloatTensor<Self>,
        #[extension_type] sequences: AttentionSequences<Self>,
        #[extension_type] rope: AttentionRope<Self>,
        spec: AttentionSpec,
    ) -> AttentionInputs<Self>;

    /// The output of attention. `Autodiff` overrides it with a backward that keeps the rotated
    /// inputs, the output and the log-sum-exp.
    #[fusion(default)]
    fn nvfp4_attention(
        #[extension_type] inputs: AttentionInputs<Self>,
        #[extension_type] sequences: AttentionSequences<Self>,
        #[extension_type] rope: AttentionRope<Self>,
        spec: AttentionSpec,
    ) -> FloatTensor<Self> {
        Self::nvfp4_attention_forward(inputs, sequences, rope, spec).out
    }
}
