//! Attention on the primitives of a backend, as a separate extension trait.
//!
//! Arguments are not checked here; [`attention`](mod@crate::attention) checks them before anything
//! is queued.

mod autodiff;
#[cfg(feature = "flex")]
mod blocked;
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub(in crate::ops) mod cube;
#[cfg(feature = "flex")]
mod flex;
#[cfg(feature = "cubecl-backend")]
mod meta;
mod saved;
mod sinks;
mod sinks_autodiff;
mod spec;
mod tensors;

use burn_core as burn;

use burn_core::backend::{Backend, backend_extension, tensor::FloatTensor};

pub use spec::AttentionSpec;
pub use tensors::{AttentionForward, AttentionInputs, AttentionRope, AttentionSequences};
#[cfg(feature = "cubecl-backend")]
pub use tensors::{
    AttentionForwardMetadata, AttentionInputsMetadata, AttentionRopeMetadata,
    AttentionSequencesMetadata,
};

/// Attention without a tokens × tokens matrix; see
/// [`nvfp4_kernels::attention`](https://docs.rs/nvfp4-kernels) for the definition.
///
/// Only [`nvfp4_attention`](Self::nvfp4_attention) and
/// [`nvfp4_attention_with_sinks`](Self::nvfp4_attention_with_sinks) are differentiable; under
/// `Autodiff` the results of the other operations are constants.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(any(feature = "cpu", feature = "cuda")),
    Fusion: cfg(feature = "cubecl-backend"),
    Autodiff
)]
pub trait AttentionOps: Backend {
    /// Returns output and log-sum-exp, and the inputs with queries and keys rotated, in place if
    /// nothing else holds their memory.
    #[fusion(meta = meta::forward)]
    fn nvfp4_attention_forward(
        #[extension_type] inputs: AttentionInputs<Self>,
        #[extension_type] sequences: AttentionSequences<Self>,
        #[extension_type] rope: AttentionRope<Self>,
        spec: AttentionSpec,
    ) -> AttentionForward<Self>;

    /// Computes the gradients of the inputs before their rotation, in the form of the inputs, from
    /// the results of [`nvfp4_attention_forward`](Self::nvfp4_attention_forward) and the gradient
    /// of the output, which has the dtype of the output.
    #[fusion(meta = meta::backward)]
    fn nvfp4_attention_backward(
        #[extension_type] saved: AttentionForward<Self>,
        dout: FloatTensor<Self>,
        #[extension_type] sequences: AttentionSequences<Self>,
        #[extension_type] rope: AttentionRope<Self>,
        spec: AttentionSpec,
    ) -> AttentionInputs<Self>;

    /// Computes the output of attention. `Autodiff` overrides it with a backward that keeps the
    /// rotated inputs, the output and the log-sum-exp.
    #[fusion(default)]
    fn nvfp4_attention(
        #[extension_type] inputs: AttentionInputs<Self>,
        #[extension_type] sequences: AttentionSequences<Self>,
        #[extension_type] rope: AttentionRope<Self>,
        spec: AttentionSpec,
    ) -> FloatTensor<Self> {
        Self::nvfp4_attention_forward(inputs, sequences, rope, spec).out
    }
    /// Computes the output of attention in which every row also sees its head's sink: a logit of
    /// `sinks` (`[heads]`, of any float dtype) that has no value. `spec` asks for no amax.
    /// `Autodiff` overrides it with a backward, also by the sinks.
    #[fusion(default)]
    fn nvfp4_attention_with_sinks(
        #[extension_type] inputs: AttentionInputs<Self>,
        #[extension_type] sequences: AttentionSequences<Self>,
        #[extension_type] rope: AttentionRope<Self>,
        sinks: FloatTensor<Self>,
        spec: AttentionSpec,
    ) -> FloatTensor<Self> {
        let forward = Self::nvfp4_attention_forward(inputs, sequences, rope, spec);
        sinks::apply::<Self>(forward, sinks, spec).0.out
    }
}
