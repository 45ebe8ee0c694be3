//! Gradients that a backward found.

use burn_core::backend::{
    Backend,
    autodiff::{NodeId, grads::Gradients},
    tensor::FloatTensor,
};

/// Registers the gradients that were found with the nodes that are tracked.
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
