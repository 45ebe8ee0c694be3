//! Router of a mixture of experts, and sorting of tokens by expert, as a separate extension trait.
//!
//! Arguments are not checked here; [`experts`](crate::experts) checks them before anything is
//! queued.

#[cfg(any(feature = "cpu", feature = "cuda"))]
mod cube;
#[cfg(feature = "flex")]
mod flex;

use std::ops::Range;

use burn_core as burn;

use burn_core::backend::{
    Autodiff, AutodiffBackend, Backend, ExtensionType,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use nvfp4_formats::reference::{BatchPart, Router};

use super::gradients::register;

/// Result of a router.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct RoutedTensors<B: Backend> {
    /// Weights of the choices, token by token, then the balance loss and the mean of the squared
    /// log-sums: `f32[tokens * top_k + 2]`.
    pub weights: FloatTensor<B>,
    /// Experts of each token, `i32[tokens, top_k]`.
    pub chosen: IntTensor<B>,
    /// Number of choices per expert, `i32[experts]`.
    pub counts: IntTensor<B>,
}

/// Choices sorted by expert.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct SortedTensors<B: Backend> {
    /// Choice at each sorted position, `i32[slots]`.
    pub choices: IntTensor<B>,
    /// Sorted position of each choice, `i32[slots]`.
    pub places: IntTensor<B>,
    /// Offsets of each expert's choices, `u32[experts + 1]`.
    pub offsets: IntTensor<B>,
    /// Number of choices per expert, `i32[experts]`.
    pub counts: IntTensor<B>,
}

/// Choices of a range of experts, sorted by expert.
#[derive(ExtensionType, Clone, Debug)]
#[extension_type(fusion: cfg(feature = "cubecl-backend"))]
pub struct WindowTensors<B: Backend> {
    /// Choice at each position, `i32[slots]`; `slots` after those of the experts.
    pub choices: IntTensor<B>,
    /// Position of each choice, `i32[slots]`; `slots` for those of other experts.
    pub places: IntTensor<B>,
    /// Offsets of the choices of each of the experts, `u32[held + 1]`.
    pub offsets: IntTensor<B>,
    /// Extent of the choices of earlier experts, as in
    /// [`RowGroups::Window`](super::RowGroups::Window): `u32[5]`.
    pub earlier: IntTensor<B>,
    /// Number of choices per expert, `i32[experts]`.
    pub counts: IntTensor<B>,
}

/// Router on the primitives of a backend. The bits are those of
/// [`reference::route`](nvfp4_formats::reference::route) on every device.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(any(feature = "cpu", feature = "cuda")),
    Fusion: cfg(feature = "cubecl-backend"),
    Autodiff
)]
pub trait RoutingOps: Backend {
    /// Computes experts, weights and losses from `logits` (`f32[tokens, experts]`), differentiable
    /// by these.
    #[fusion(meta = meta::route)]
    fn nvfp4_route(logits: FloatTensor<Self>, router: Router) -> RoutedTensors<Self>;

    /// Computes the gradient by `logits`, given the gradient `grads` by [`RoutedTensors::weights`].
    /// Under `Autodiff` it is a constant.
    #[fusion(meta = meta::route_backward)]
    fn nvfp4_route_backward(
        logits: FloatTensor<Self>,
        #[extension_type] routed: RoutedTensors<Self>,
        grads: FloatTensor<Self>,
        router: Router,
    ) -> FloatTensor<Self>;

    /// Computes the contributions of the tokens of `logits` (`f32[tokens, experts]`) to the balance
    /// loss and the mean of the squared log-sums of a batch, `f32[2]`, given the number of choices
    /// per expert in the batch, `counts` (`i32[experts]`). Differentiable by the logits. The bits
    /// are those of [`reference::router_losses`](nvfp4_formats::reference::router_losses) on every
    /// device.
    #[fusion(meta = meta::router_losses)]
    fn nvfp4_router_losses(
        logits: FloatTensor<Self>,
        counts: IntTensor<Self>,
        part: BatchPart,
        router: Router,
    ) -> FloatTensor<Self>;

    /// Computes the gradient of [`nvfp4_router_losses`](Self::nvfp4_router_losses) by `logits`,
    /// given the gradients `grads` by the losses (`f32[2]`). Under `Autodiff` it is a constant.
    #[fusion(meta = meta::router_losses_backward)]
    fn nvfp4_router_losses_backward(
        logits: FloatTensor<Self>,
        counts: IntTensor<Self>,
        grads: FloatTensor<Self>,
        part: BatchPart,
        router: Router,
    ) -> FloatTensor<Self>;

    /// Sorts `chosen` (`i32`, any shape, expert indices) by expert. Indices out of range come last
    /// and are not counted.
    #[fusion(meta = meta::sort_choices)]
    fn nvfp4_sort_choices(chosen: IntTensor<Self>, experts: usize) -> SortedTensors<Self>;

    /// Version of [`nvfp4_sort_choices`](Self::nvfp4_sort_choices) for only the experts `held`: at
    /// least one of `experts`.
    #[fusion(meta = meta::sort_window)]
    fn nvfp4_sort_window(
        chosen: IntTensor<Self>,
        experts: usize,
        held: Range<usize>,
    ) -> WindowTensors<Self>;
}

#[cfg(feature = "cubecl-backend")]
mod meta {
    use burn_core::backend::fusion::custom::TensorSpec;
    use burn_core::tensor::{DType, Shape};
    use nvfp4_formats::reference::EARLIER_UNITS;

    use super::*;

    fn tensor<const D: usize>(shape: [usize; D], dtype: DType) -> TensorSpec {
        TensorSpec::new(Shape::new(shape), dtype)
    }

    pub(super) fn route(logits: &TensorSpec, router: &Router) -> RoutedTensorsMetadata {
        let tokens = logits.shape[0];
        RoutedTensorsMetadata {
            weights: tensor([tokens * router.top_k + 2], DType::F32),
            chosen: tensor([tokens, router.top_k], DType::I32),
            counts: tensor([router.experts], DType::I32),
        }
    }

    pub(super) fn route_backward(
        logits: &TensorSpec,
        _routed: &RoutedTensorsMetadata,
        _grads: &TensorSpec,
        _router: &Router,
    ) -> TensorSpec {
        logits.clone()
    }

    pub(super) fn router_losses(
        _logits: &TensorSpec,
        _counts: &TensorSpec,
        _part: &BatchPart,
        _router: &Router,
    ) -> TensorSpec {
        tensor([2], DType::F32)
    }

    pub(super) fn router_losses_backward(
        logits: &TensorSpec,
        _counts: &TensorSpec,
        _grads: &TensorSpec,
        _part: &BatchPart,
        _router: &Router,
    ) -> TensorSpec {
        logits.clone()
    }

    pub(super) fn sort_choices(chosen: &TensorSpec, experts: &usize) -> SortedTensorsMetadata {
        let slots = chosen.shape.num_elements();
        SortedTensorsMetadata {
            choices: tensor([slots], DType::I32),
            places: tensor([slots], DType::I32),
            offsets: tensor([experts + 1], DType::U32),
            counts: tensor([*experts], DType::I32),
        }
    }

    pub(super) fn sort_window(
        chosen: &TensorSpec,
        experts: &usize,
        held: &Range<usize>,
    ) -> WindowTensorsMetadata {
        let slots = chosen.shape.num_elements();
        WindowTensorsMetadata {
            choices: tensor([slots], DType::I32),
            places: tensor([slots], DType::I32),
            offsets: tensor([held.len() + 1], DType::U32),
            earlier: tensor([EARLIER_UNITS.len()], DType::U32),
            counts: tensor([*experts], DType::I32),
        }
    }
}

/// State saved for the backward of a router.
#[derive(Clone, Debug)]
struct SavedRoute<B: Backend> {
    logits: FloatTensor<B>,
    routed: RoutedTensors<B>,
    router: Router,
}

/// Router: parents `[logits]`.
#[derive(Debug)]
struct Route;

impl<B: RoutingOps> Backward<B, 1> for Route {
    type State = SavedRoute<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let SavedRoute {
            logits,
            routed,
            router,
        } = ops.state;
        let grad = grads.consume::<B>(&ops.node);
        let found = B::nvfp4_route_backward(logits, routed, grad, router);
        let nodes = ops.parents.map(|node| node.map(|node| node.id));
        register::<B, 1>(nodes, [Some(found)], grads);
    }
}

/// State saved for the backward of the losses of a batch.
#[derive(Clone, Debug)]
struct SavedLosses<B: Backend> {
    logits: FloatTensor<B>,
    counts: IntTensor<B>,
    part: BatchPart,
    router: Router,
}

/// Losses of a batch: parents `[logits]`.
#[derive(Debug)]
struct Losses;

impl<B: RoutingOps> Backward<B, 1> for Losses {
    type State = SavedLosses<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let SavedLosses {
            logits,
            counts,
            part,
            router,
        } = ops.state;
        let grad = grads.consume::<B>(&ops.node);
        let found = B::nvfp4_router_losses_backward(logits, counts, grad, part, router);
        let nodes = ops.parents.map(|node| node.map(|node| node.id));
        register::<B, 1>(nodes, [Some(found)], grads);
    }
}

impl<B: RoutingOps, C: CheckpointStrategy> RoutingOps for Autodiff<B, C> {
    fn nvfp4_route(logits: FloatTensor<Self>, router: Router) -> RoutedTensors<Self> {
        let (logits, node) = logits.into_parts();
        let step = Route.prepare::<C>([node]);
        let routed = B::nvfp4_route(logits.clone(), router);
        let (chosen, counts) = (routed.chosen.clone(), routed.counts.clone());
        let weights = routed.weights.clone();
        let weights = match step.compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let saved = SavedRoute {
                    logits,
                    routed,
                    router,
                };
                prep.finish(saved, weights)
            }
            OpsKind::UnTracked(prep) => prep.finish(weights),
        };
        RoutedTensors {
            weights,
            chosen,
            counts,
        }
    }

    fn nvfp4_route_backward(
        logits: FloatTensor<Self>,
        routed: RoutedTensors<Self>,
        grads: FloatTensor<Self>,
        router: Router,
    ) -> FloatTensor<Self> {
        let routed = RoutedTensors {
            weights: routed.weights.into_primitive(),
            chosen: routed.chosen,
            counts: routed.counts,
        };
        let (logits, grads) = (logits.into_primitive(), grads.into_primitive());
        let found = B::nvfp4_route_backward(logits, routed, grads, router);
        <Self as AutodiffBackend>::from_inner(found)
    }

    fn nvfp4_router_losses(
        logits: FloatTensor<Self>,
        counts: IntTensor<Self>,
        part: BatchPart,
        router: Router,
    ) -> FloatTensor<Self> {
        let (logits, node) = logits.into_parts();
        let step = Losses.prepare::<C>([node]);
        let losses = B::nvfp4_router_losses(logits.clone(), counts.clone(), part, router);
        match step.compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let saved = SavedLosses {
                    logits,
                    counts,
                    part,
                    router,
                };
                prep.finish(saved, losses)
            }
            OpsKind::UnTracked(prep) => prep.finish(losses),
        }
    }

    fn nvfp4_router_losses_backward(
        logits: FloatTensor<Self>,
        counts: IntTensor<Self>,
        grads: FloatTensor<Self>,
        part: BatchPart,
        router: Router,
    ) -> FloatTensor<Self> {
        let (logits, grads) = (logits.into_primitive(), grads.into_primitive());
        let found = B::nvfp4_router_losses_backward(logits, counts, grads, part, router);
        <Self as AutodiffBackend>::from_inner(found)
    }

    fn nvfp4_sort_choices(chosen: IntTensor<Self>, experts: usize) -> SortedTensors<Self> {
        let sorted = B::nvfp4_sort_choices(chosen, experts);
        SortedTensors {
            choices: sorted.choices,
            places: sorted.places,
            offsets: sorted.offsets,
            counts: sorted.counts,
        }
    }

    fn nvfp4_sort_window(
        chosen: IntTensor<Self>,
        experts: usize,
        held: Range<usize>,
    ) -> WindowTensors<Self> {
        let sorted = B::nvfp4_sort_window(chosen, experts, held);
        WindowTensors {
            choices: sorted.choices,
            places: sorted.places,
            offsets: sorted.offsets,
            earlier: sorted.earlier,
            counts: sorted.counts,
        }
    }
}
