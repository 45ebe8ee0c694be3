//! RMSNorm and LayerNorm, with an optional fused residual addition.

use std::sync::{Arc, Mutex};

use burn_core as burn;

use burn_core::backend::{
    Autodiff, AutodiffBackend, Backend, ExtensionType, TensorMetadata,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    backend_extension,
    tensor::FloatTensor,
};
use nvfp4_formats::reference::Norm;

#[cfg(feature = "cubecl-backend")]
use super::super::MaybeTensorMetadata;
use super::super::dtype::cast;
use super::super::spec::OutputAmax;
use super::super::{MaybeTensor, float_dtype};

/// Kind and parameters of a norm.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct NormSpec {
    /// Kind of the norm.
    pub norm: Norm,
    /// ε, added to the mean square or to the variance.
    pub epsilon: f32,
    /// Amax values that the next layer needs to quantize the output; the pass that writes the
    /// output computes them. Does not affect any bit of the results.
    pub amax: Option<OutputAmax>,
    /// Amax values of the gradient of `x`, for the layer that computed `x`.
    pub grad_amax: Option<OutputAmax>,
}

/// Result of the forward of a norm.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct NormResult<B: Backend> {
    /// Sum of `x` and the residual, rounded to their dtype, if there is a residual.
    #[extension_type]
    pub sum: MaybeTensor<B>,
    /// Normalized rows, of the shape and dtype of `x`.
    pub normed: FloatTensor<B>,
    /// Row statistics for the backward: the factors, `f32[rows]`, and for [`Norm::Layer`] also the
    /// means after them, `f32[2 * rows]`.
    pub stats: FloatTensor<B>,
}

/// Gradients of a norm.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct NormGradients<B: Backend> {
    /// Gradient by the normalized tensor, and so by `x` and by the residual, in their shape and
    /// dtype.
    pub x: FloatTensor<B>,
    /// Gradient by the gain, `f32[cols]`.
    pub gain: FloatTensor<B>,
    /// Gradient by the bias, `f32[cols]`, if requested.
    #[extension_type]
    pub bias: MaybeTensor<B>,
}

/// Result of a norm for the following layers.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct NormOutput<B: Backend> {
    /// Normalized tensor: `x`, or the sum of `x` and the residual.
    pub sum: FloatTensor<B>,
    /// Normalized rows.
    pub normed: FloatTensor<B>,
}

/// Norms on the primitives of a backend.
///
/// Matrices are `[rows, cols]` with at least one column, of dtype `f32`, `bf16` or `f16`;
/// arithmetic is in `f32`. The bits are those of
/// [`reference::norm_forward`](nvfp4_formats::reference::norm_forward) and
/// [`reference::norm_backward`](nvfp4_formats::reference::norm_backward) on every device. Only
/// [`nvfp4_norm`](Self::nvfp4_norm) is differentiable; under `Autodiff` the results of the others
/// are constants.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(any(feature = "cpu", feature = "cuda")),
    Fusion: cfg(feature = "cubecl-backend"),
    Autodiff
)]
pub trait NormOps: Backend {
    /// Computes the norm of each row of `x`, or of the sum of `x` and `residual`, which has the
    /// same shape and dtype. `gain` and `bias` are `f32[cols]`; [`Norm::Rms`] has no bias.
    #[fusion(meta = meta::forward)]
    fn nvfp4_norm_forward(
        x: FloatTensor<Self>,
        #[extension_type] residual: MaybeTensor<Self>,
        gain: FloatTensor<Self>,
        #[extension_type] bias: MaybeTensor<Self>,
        spec: NormSpec,
    ) -> NormResult<Self>;

    /// Computes the gradients of [`nvfp4_norm_forward`](Self::nvfp4_norm_forward), given the
    /// gradient `grad` of the normalized rows, and the gradient `sum_grad` of the sum from its
    /// other uses. `x` is the tensor that was normalized; all three have one shape and dtype.
    /// `bias` is true if there is a bias.
    #[fusion(meta = meta::backward)]
    fn nvfp4_norm_backward(
        grad: FloatTensor<Self>,
        #[extension_type] sum_grad: MaybeTensor<Self>,
        x: FloatTensor<Self>,
        stats: FloatTensor<Self>,
        gain: FloatTensor<Self>,
        bias: bool,
        spec: NormSpec,
    ) -> NormGradients<Self>;

    /// Computes the sum and the norm of [`nvfp4_norm_forward`](Self::nvfp4_norm_forward).
    /// `Autodiff` overrides it with a backward that adds the gradients of both results in the pass
    /// that computes them. It keeps the sum and the statistics of its rows.
    #[fusion(default)]
    fn nvfp4_norm(
        x: FloatTensor<Self>,
        #[extension_type] residual: MaybeTensor<Self>,
        gain: FloatTensor<Self>,
        #[extension_type] bias: MaybeTensor<Self>,
        spec: NormSpec,
    ) -> NormOutput<Self> {
        let NormResult { sum, normed, .. } =
            Self::nvfp4_norm_forward(x.clone(), residual, gain, bias, spec);
        NormOutput {
            sum: sum.into_option().unwrap_or(x),
            normed,
        }
    }
}

#[cfg(feature = "cubecl-backend")]
mod meta {
    use burn_core::backend::fusion::custom::TensorSpec;
    use burn_core::tensor::{DType, Shape};

    use super::*;

    fn floats(len: usize) -> TensorSpec {
        TensorSpec::new(Shape::new([len]), DType::F32)
    }

    pub(super) fn forward(
        x: &TensorSpec,
        residual: &MaybeTensorMetadata,
        _gain: &TensorSpec,
        _bias: &MaybeTensorMetadata,
        spec: &NormSpec,
    ) -> NormResultMetadata {
        let rows = x.shape[0];
        NormResultMetadata {
            sum: match residual {
                MaybeTensorMetadata::Absent => MaybeTensorMetadata::Absent,
                MaybeTensorMetadata::Present(_) => MaybeTensorMetadata::Present(x.clone()),
            },
            normed: x.clone(),
            stats: floats(match spec.norm {
                Norm::Rms => rows,
                Norm::Layer => 2 * rows,
            }),
        }
    }

    pub(super) fn backward(
        _grad: &TensorSpec,
        _sum_grad: &MaybeTensorMetadata,
        x: &TensorSpec,
        _stats: &TensorSpec,
        _gain: &TensorSpec,
        bias: &bool,
        _spec: &NormSpec,
    ) -> NormGradientsMetadata {
        let cols = x.shape[1];
        NormGradientsMetadata {
            x: x.clone(),
            gain: floats(cols),
            bias: match bias {
                true => MaybeTensorMetadata::Present(floats(cols)),
                false => MaybeTensorMetadata::Absent,
            },
        }
    }
}

/// Gradients of a norm's two results, which arrive one after the other.
#[derive(Debug)]
struct Arrived<B: Backend> {
    sum: Option<FloatTensor<B>>,
    normed: Option<FloatTensor<B>>,
}

type Arrivals<B> = Arc<Mutex<Arrived<B>>>;

/// State saved for the backward of a norm.
#[derive(Clone, Debug)]
struct SavedNorm<B: Backend> {
    x: FloatTensor<B>,
    stats: FloatTensor<B>,
    gain: FloatTensor<B>,
    bias: bool,
    spec: NormSpec,
    arrivals: Arrivals<B>,
}

/// Norm whose results are those of two [`Arrival`]s: parents `[x, residual, gain, bias]`.
///
/// Autodiff's operations have one result each, but the gradients of both results are needed at
/// once. The nodes of the results therefore store their gradients, and this node, which runs after
/// both, computes the backward.
#[derive(Debug)]
struct NormStep;

impl<B: NormOps> Backward<B, 4> for NormStep {
    type State = SavedNorm<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 4>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let SavedNorm {
            x,
            stats,
            gain,
            bias,
            spec,
            arrivals,
        } = ops.state;
        let (sum_grad, grad) = {
            let mut arrived = arrivals.lock().expect("no panic while it is held");
            (arrived.sum.take(), arrived.normed.take())
        };
        let dtype = float_dtype(x.dtype());
        // If only the sum was used, the norm's gradient is zero.
        let grad = match grad {
            Some(grad) => cast::<B>(grad, dtype),
            None => B::float_zeros(x.shape(), &x.device(), dtype),
        };
        let sum_grad = sum_grad.map(|grad| cast::<B>(grad, dtype)).into();
        let found = B::nvfp4_norm_backward(grad, sum_grad, x, stats, gain, bias, spec);
        let [x_node, residual_node, gain_node, bias_node] = ops.parents;
        let found_for = [
            (x_node, Some(found.x.clone())),
            (residual_node, Some(found.x)),
            (gain_node, Some(found.gain)),
            (bias_node, found.bias.into_option()),
        ];
        for (node, grad) in found_for {
            if let Some((node, grad)) = node.zip(grad) {
                grads.register::<B>(node.id, grad);
            }
        }
    }
}

/// One of the results of a norm: parents `[norm]`.
#[derive(Debug)]
enum Arrival {
    Sum,
    Normed,
}

impl<B: Backend> Backward<B, 1> for Arrival {
    type State = Arrivals<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let grad = Some(grads.consume::<B>(&ops.node));
        let mut arrived = ops.state.lock().expect("no panic while it is held");
        match self {
            Self::Sum => arrived.sum = grad,
            Self::Normed => arrived.normed = grad,
        }
    }
}

impl<B: NormOps, C: CheckpointStrategy> NormOps for Autodiff<B, C> {
    fn nvfp4_norm_forward(
        x: FloatTensor<Self>,
        residual: MaybeTensor<Self>,
        gain: FloatTensor<Self>,
        bias: MaybeTensor<Self>,
        spec: NormSpec,
    ) -> NormResult<Self> {
        let [residual, bias] = [residual, bias].map(|tensor| tensor.map(|x| x.into_primitive()));
        let (x, gain) = (x.into_primitive(), gain.into_primitive());
        let made = B::nvfp4_norm_forward(x, residual, gain, bias, spec);
        let outer = <Self as AutodiffBackend>::from_inner;
        NormResult {
            sum: made.sum.map(outer),
            normed: outer(made.normed),
            stats: outer(made.stats),
        }
    }

    fn nvfp4_norm_backward(
        grad: FloatTensor<Self>,
        sum_grad: MaybeTensor<Self>,
        x: FloatTensor<Self>,
        stats: FloatTensor<Self>,
        gain: FloatTensor<Self>,
        bias: bool,
        spec: NormSpec,
    ) -> NormGradients<Self> {
        let [grad, x, stats, gain] = [grad, x, stats, gain].map(|tensor| tensor.into_primitive());
        let sum_grad = sum_grad.map(|grad| grad.into_primitive());
        let made = B::nvfp4_norm_backward(grad, sum_grad, x, stats, gain, bias, spec);
        let outer = <Self as AutodiffBackend>::from_inner;
        NormGradients {
            x: outer(made.x),
            gain: outer(made.gain),
            bias: made.bias.map(outer),
        }
    }

    fn nvfp4_norm(
        x: FloatTensor<Self>,
        residual: MaybeTensor<Self>,
        gain: FloatTensor<Self>,
        bias: MaybeTensor<Self>,
        spec: NormSpec,
    ) -> NormOutput<Self> {
        // A missing parent is a constant.
        let absent = <Self as AutodiffBackend>::from_inner(x.primitive().clone()).node();
        let again = <Self as AutodiffBackend>::from_inner(x.primitive().clone()).node();
        let (x, x_node) = x.into_parts();
        let (gain, gain_node) = gain.into_parts();
        let (residual, residual_node) = parts::<B, C>(residual.into_option(), absent);
        let (bias, bias_node) = parts::<B, C>(bias.into_option(), again);
        let biased = bias.is_some();
        let made =
            B::nvfp4_norm_forward(x.clone(), residual.into(), gain.clone(), bias.into(), spec);
        let sum = made.sum.into_option().unwrap_or(x);
        let nodes = [x_node, residual_node, gain_node, bias_node];
        let (node, arrivals) = match NormStep.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::UnTracked(_) => {
                return NormOutput {
                    sum: Self::from_inner(sum),
                    normed: Self::from_inner(made.normed),
                };
            }
            OpsKind::Tracked(prep) => {
                let arrivals = Arc::new(Mutex::new(Arrived {
                    sum: None,
                    normed: None,
                }));
                let saved = SavedNorm {
                    x: sum.clone(),
                    stats: made.stats,
                    gain,
                    bias: biased,
                    spec,
                    arrivals: arrivals.clone(),
                };
                (prep.finish(saved, sum.clone()), arrivals)
            }
        };
        let result = |arrival: Arrival, value: FloatTensor<B>| -> FloatTensor<Self> {
            let step = Backward::<B, 1>::prepare::<C>(arrival, [node.node()]);
            match step.compute_bound().stateful() {
                OpsKind::Tracked(prep) => prep.finish(arrivals.clone(), value),
                OpsKind::UnTracked(prep) => prep.finish(value),
            }
        };
        NormOutput {
            sum: result(Arrival::Sum, sum),
            normed: result(Arrival::Normed, made.normed),
        }
    }
}

type Guard = burn_core::backend::autodiff::ops::NodeGuard;

/// Returns a tensor that may be missing, and its node, or `absent`.
fn parts<B: Backend, C: CheckpointStrategy>(
    tensor: Option<FloatTensor<Autodiff<B, C>>>,
    absent: Guard,
) -> (Option<FloatTensor<B>>, Guard) {
    match tensor {
        None => (None, absent),
        Some(tensor) => {
            let (tensor, node) = tensor.into_parts();
            (Some(tensor), node)
        }
    }
}
