//! Gradients computed by a backward.

use burn_core::backend::{
    Backend,
    autodiff::{NodeId, grads::Gradients},
    tensor::FloatTensor,
};

/// Registers the computed gradients with the tracked nodes.
pub(super) fn register<B: Backend, const N: usize>(
    nodes: [Option<NodeId>; N],
    found: [Option<FloatTensor<B>>; N],
    grads: &mut Gradients,
) {
    for (node, grad) in nodes.into_iter().zip(found) {
        if let Some((node, grad)) = node.zip(grad) {
            grads.register::<B>(node, grad);
        }
    }
}
