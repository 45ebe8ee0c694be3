//! What the backward of attention needs, and how it hands on gradients.

use burn_core::backend::{
    Backend, TensorMetadata,
    autodiff::{NodeId, grads::Gradients},
    tensor::FloatTensor,
};

use super::{
    AttentionForward, AttentionInputs, AttentionOps, AttentionRope, AttentionSequences,
    AttentionSpec,
};
use crate::ops::dtype::{cast, float_dtype};

/// Tensors saved for the backward.
#[derive(Clone, Debug)]
pub(super) struct Saved<B: Backend> {
    pub(super) forward: AttentionForward<B>,
    pub(super) sequences: AttentionSequences<B>,
    pub(super) rope: AttentionRope<B>,
    pub(super) spec: AttentionSpec,
}

impl<B: AttentionOps> Saved<B> {
    pub(super) fn backward(self, dout: FloatTensor<B>) -> AttentionInputs<B> {
        let dout = cast::<B>(dout, float_dtype(self.forward.out.dtype()));
        let Self {
            forward,
            sequences,
            rope,
            spec,
        } = self;
        B::nvfp4_attention_backward(forward, dout, sequences, rope, spec)
    }
}

/// Registers the gradients with the tracked nodes.
pub(super) fn register<B: Backend, const N: usize>(
    nodes: [Option<NodeId>; N],
    found: [FloatTensor<B>; N],
    grads: &mut Gradients,
) {
    for (node, grad) in nodes.into_iter().zip(found) {
        if let Some(node) = node {
            grads.register::<B>(node, grad);
        }
    }
}
