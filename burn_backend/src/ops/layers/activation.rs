//! SwiGLU and GELU.

use burn_core as burn;

use burn_core::backend::{
    Autodiff, AutodiffBackend, Backend, TensorMetadata,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    backend_extension,
    tensor::FloatTensor,
};
use nvfp4_formats::reference::Activation;

use super::super::dtype::cast;
use super::super::float_dtype;

/// Activations on the primitives of a backend.
///
/// Matrices are `[rows, cols]`, of dtype `f32`, `bf16` or `f16`; each element is computed in `f32`
/// and rounded once. The bits are those of
/// [`reference::activation`](nvfp4_formats::reference::activation) on every device.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(any(feature = "cpu", feature = "cuda")),
    Fusion: cfg(feature = "cubecl-backend"),
    Autodiff
)]
pub trait ActivationOps: Backend {
    /// Applies `activation` to the rows of `x`. The result has the shape and dtype of `x`, but half
    /// the width for [`Activation::SwiGlu`]. `Autodiff` keeps only `x` for the backward.
    #[fusion(meta = meta::forward)]
    fn nvfp4_activation(x: FloatTensor<Self>, activation: Activation) -> FloatTensor<Self>;

    /// Computes the gradient of [`nvfp4_activation`](Self::nvfp4_activation) by `x`, in its shape
    /// and dtype, given the gradient `grad` of the output, which has the same dtype.
    #[fusion(meta = meta::backward)]
    fn nvfp4_activation_backward(
        grad: FloatTensor<Self>,
        x: FloatTensor<Self>,
        activation: Activation,
    ) -> FloatTensor<Self>;
}

#[cfg(feature = "cubecl-backend")]
mod meta {
    use burn_core::backend::fusion::custom::TensorSpec;
    use burn_core::tensor::Shape;

    use super::Activation;

    pub(super) fn forward(x: &TensorSpec, activation: &Activation) -> TensorSpec {
        let shape = Shape::new([x.shape[0], x.shape[1] / activation.inputs()]);
        TensorSpec::new(shape, x.dtype)
    }

    pub(super) fn backward(
        _grad: &TensorSpec,
        x: &TensorSpec,
        _activation: &Activation,
    ) -> TensorSpec {
        x.clone()
    }
}

/// Activation: parents `[x]`.
#[derive(Debug)]
struct ActivationStep;

impl<B: ActivationOps> Backward<B, 1> for ActivationStep {
    type State = (FloatTensor<B>, Activation);

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let (x, activation) = ops.state;
        let grad = cast::<B>(grads.consume::<B>(&ops.node), float_dtype(x.dtype()));
        let [node] = ops.parents;
        if let Some(node) = node {
            let grad = B::nvfp4_activation_backward(grad, x, activation);
            grads.register::<B>(node.id, grad);
        }
    }
}

impl<B: ActivationOps, C: CheckpointStrategy> ActivationOps for Autodiff<B, C> {
    fn nvfp4_activation(x: FloatTensor<Self>, activation: Activation) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        match ActivationStep
            .prepare::<C>([node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => {
                let out = B::nvfp4_activation(x.clone(), activation);
                prep.finish((x, activation), out)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::nvfp4_activation(x, activation)),
        }
    }

    fn nvfp4_activation_backward(
        grad: FloatTensor<Self>,
        x: FloatTensor<Self>,
        activation: Activation,
    ) -> FloatTensor<Self> {
        let (grad, x) = (grad.into_primitive(), x.into_primitive());
        Self::from_inner(B::nvfp4_activation_backward(grad, x, activation))
    }
}
