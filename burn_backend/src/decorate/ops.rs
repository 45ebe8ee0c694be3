//! Operations at the boundary of a decorated layer: they mark its parameters in the graph, and
//! replace their gradients.
//!
//! The tracker finds the GEMMs between them, and the fuser runs them.

use burn_core as burn;

use burn_core::backend::{
    Autodiff, AutodiffBackend,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    backend_extension,
    tensor::FloatTensor,
};
use burn_cubecl::CubeBackend;

use super::call::{BiasState, CallRef};
use super::counters::count;
use super::fill::filled_like;
use super::wgrad::weight_grad;
use crate::ops::{LinearSpec, MaybeTensor, Nvfp4KernelOps, QuantizedMatrix, inner};

/// Marks of the parameters of decorated layers, and replacement of their gradients.
///
/// `id` is the id of the call: the tracker reads it from the operation.
#[backend_extension(
    Cube: cfg(any(feature = "cpu", feature = "cuda")),
    Fusion: cfg(feature = "cubecl-backend"),
    Autodiff
)]
pub trait MarkOps: Nvfp4KernelOps {
    /// Returns the weight as the rest of the graph sees it. In strict mode it is all NaN, so that
    /// only a routed GEMM gives a number.
    #[fusion(dtype = weight, shape = weight)]
    fn nvfp4_mark_weight(weight: FloatTensor<Self>, call: CallRef, id: u64) -> FloatTensor<Self>;

    /// Returns a packed weight `w` as the rest of the graph sees it: all NaN, in the shape and dtype
    /// of `place`. `input` is the static global scale of the input, if any.
    #[fusion(dtype = place, shape = place)]
    fn nvfp4_mark_packed(
        place: FloatTensor<Self>,
        call: CallRef,
        id: u64,
        #[extension_type] w: QuantizedMatrix<Self>,
        #[extension_type] input: MaybeTensor<Self>,
    ) -> FloatTensor<Self>;

    /// Returns the bias as the rest of the graph sees it: -0.0, which adds nothing to any number,
    /// if the GEMM adds the bias itself before rounding.
    #[fusion(dtype = bias, shape = bias)]
    fn nvfp4_mark_bias(bias: FloatTensor<Self>, call: CallRef, id: u64) -> FloatTensor<Self>;

    /// Returns the NVFP4 gradient of the weight, instead of Burn's `grad`.
    #[fusion(dtype = grad, shape = grad)]
    fn nvfp4_take_weight_grad(grad: FloatTensor<Self>, call: CallRef, id: u64)
    -> FloatTensor<Self>;

    /// Returns the gradient of the bias as the layer computes it, instead of Burn's `grad`.
    #[fusion(dtype = grad, shape = grad)]
    fn nvfp4_take_bias_grad(grad: FloatTensor<Self>, call: CallRef, id: u64) -> FloatTensor<Self>;
}

impl MarkOps for CubeBackend {
    fn nvfp4_mark_weight(
        weight: FloatTensor<Self>,
        CallRef(call): CallRef,
        _id: u64,
    ) -> FloatTensor<Self> {
        let seen = if call.layer.is_strict() {
            filled_like(&weight, f32::NAN)
        } else {
            weight.clone()
        };
        call.state().weight = Some(weight);
        seen
    }

    fn nvfp4_mark_packed(
        place: FloatTensor<Self>,
        CallRef(call): CallRef,
        _id: u64,
        w: QuantizedMatrix<Self>,
        input: MaybeTensor<Self>,
    ) -> FloatTensor<Self> {
        call.state().packed = Some((w, input));
        filled_like(&place, f32::NAN)
    }

    fn nvfp4_mark_bias(
        bias: FloatTensor<Self>,
        CallRef(call): CallRef,
        _id: u64,
    ) -> FloatTensor<Self> {
        let mut state = call.state();
        match state.bias {
            BiasState::Added => {}
            _ if state.forward || state.output_shared => {
                count(&call.layer.counters.bias_after);
                state.bias = BiasState::Absent;
                return bias;
            }
            _ => state.bias = BiasState::Known(Box::new(bias.clone())),
        }
        drop(state);
        filled_like(&bias, -0.0)
    }

    fn nvfp4_take_weight_grad(
        grad: FloatTensor<Self>,
        CallRef(call): CallRef,
        _id: u64,
    ) -> FloatTensor<Self> {
        match weight_grad(&call, &grad) {
            Ok(grad) => {
                let LinearSpec {
                    wgrad_x, wgrad_dy, ..
                } = call.spec;
                call.layer.counters.wgrad.routed([wgrad_x, wgrad_dy]);
                grad
            }
            Err(why) => {
                call.layer.counters.wgrad.missed();
                if call.layer.is_strict() {
                    call.fail(&why);
                    // The fusion server catches the panic and stores its message in the gradient.
                    panic!("nvfp4 decorate: layer `{}`: {why}", call.layer.path);
                }
                grad
            }
        }
    }

    fn nvfp4_take_bias_grad(
        grad: FloatTensor<Self>,
        CallRef(call): CallRef,
        _id: u64,
    ) -> FloatTensor<Self> {
        // Burn's own sum adds the same numbers in another order.
        let own = call.state().bias_grad.take();
        own.unwrap_or(grad)
    }
}

/// Backward of a mark: replaces the gradient by that of the layer.
#[derive(Debug)]
struct MarkBackward<const WEIGHT: bool>;

impl<B: MarkOps, const WEIGHT: bool> Backward<B, 1> for MarkBackward<WEIGHT> {
    type State = CallRef;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let [parent] = ops.parents;
        let grad = grads.consume::<B>(&ops.node);
        let call = ops.state;
        let id = call.0.id;
        if let Some(parent) = parent {
            let grad = if WEIGHT {
                B::nvfp4_take_weight_grad(grad, call, id)
            } else {
                B::nvfp4_take_bias_grad(grad, call, id)
            };
            grads.register::<B>(parent.id, grad);
        }
    }
}

impl<B: MarkOps, C: CheckpointStrategy> MarkOps for Autodiff<B, C> {
    fn nvfp4_mark_weight(weight: FloatTensor<Self>, call: CallRef, id: u64) -> FloatTensor<Self> {
        let (weight, node) = weight.into_parts();
        match MarkBackward::<true>
            .prepare::<C>([node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => {
                prep.finish(call.clone(), B::nvfp4_mark_weight(weight, call, id))
            }
            OpsKind::UnTracked(prep) => prep.finish(B::nvfp4_mark_weight(weight, call, id)),
        }
    }

    fn nvfp4_mark_packed(
        place: FloatTensor<Self>,
        call: CallRef,
        id: u64,
        w: QuantizedMatrix<Self>,
        input: MaybeTensor<Self>,
    ) -> FloatTensor<Self> {
        let input = input.map(|input| input.into_primitive());
        let place = place.into_primitive();
        Self::from_inner(B::nvfp4_mark_packed(place, call, id, inner(w), input))
    }

    fn nvfp4_mark_bias(bias: FloatTensor<Self>, call: CallRef, id: u64) -> FloatTensor<Self> {
        call.0.state().bias_tracked = bias.is_tracked();
        let (bias, node) = bias.into_parts();
        match MarkBackward::<false>
            .prepare::<C>([node])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => prep.finish(call.clone(), B::nvfp4_mark_bias(bias, call, id)),
            OpsKind::UnTracked(prep) => prep.finish(B::nvfp4_mark_bias(bias, call, id)),
        }
    }

    fn nvfp4_take_weight_grad(
        _grad: FloatTensor<Self>,
        _call: CallRef,
        _id: u64,
    ) -> FloatTensor<Self> {
        panic!("gradients of decorated layers are not differentiable");
    }

    fn nvfp4_take_bias_grad(
        _grad: FloatTensor<Self>,
        _call: CallRef,
        _id: u64,
    ) -> FloatTensor<Self> {
        panic!("gradients of decorated layers are not differentiable");
    }
}
