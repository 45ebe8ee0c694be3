//! Backwards of [`nvfp4_linear`](Nvfp4Ops::nvfp4_linear),
//! [`nvfp4_add_linear`](Nvfp4Ops::nvfp4_add_linear),
//! [`nvfp4_moe_permute`](Nvfp4Ops::nvfp4_moe_permute) and
//! [`nvfp4_moe_unpermute`](Nvfp4Ops::nvfp4_moe_unpermute).

use burn_core::backend::{
    Autodiff, Backend, TensorMetadata,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    tensor::{FloatTensor, IntTensor},
};

use super::dtype::cast;
use super::feed_forward;
use super::gradients::register;
use super::kernels::inner_groups;
use super::linear::{self, LinearRequest, RequiresGrad, SavedForBackward};
use super::{
    FeedForwardSpec, GatherSpec, LinearContext, LinearParams, LinearSpec, MaybeTensor, Named,
    Nvfp4KernelOps, Nvfp4Ops, QuantizeSource, RowGroups, float_dtype,
};

/// Backward of a linear layer without a bias: parents `[x, w]`.
#[derive(Debug)]
struct Linear;

impl<B: Nvfp4KernelOps> Backward<B, 2> for Linear {
    type State = SavedForBackward<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let dy = QuantizeSource::Matrix(grads.consume::<B>(&ops.node));
        let found = ops.state.backward(dy);
        let nodes = ops.parents.map(|node| node.map(|node| node.id));
        register::<B, 2>(nodes, [found.x, found.w], grads);
    }
}

/// Backward of a linear layer with a bias: parents `[x, w, bias]`.
#[derive(Debug)]
struct LinearBias;

impl<B: Nvfp4KernelOps> Backward<B, 3> for LinearBias {
    type State = SavedForBackward<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 3>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let dy = QuantizeSource::Matrix(grads.consume::<B>(&ops.node));
        let found = ops.state.backward(dy);
        let nodes = ops.parents.map(|node| node.map(|node| node.id));
        register::<B, 3>(nodes, [found.x, found.w, found.bias], grads);
    }
}

/// Backward of a linear layer that is added to a matrix: parents `[added, x, w]`.
#[derive(Debug)]
struct AddLinear;

impl<B: Nvfp4KernelOps> Backward<B, 3> for AddLinear {
    type State = SavedForBackward<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 3>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let dy = grads.consume::<B>(&ops.node);
        let found = ops.state.backward(QuantizeSource::Matrix(dy.clone()));
        let nodes = ops.parents.map(|node| node.map(|node| node.id));
        register::<B, 3>(nodes, [Some(dy), found.x, found.w], grads);
    }
}

/// Gather of rows, with the inverse index as its state: parents `[x]`.
#[derive(Debug)]
struct Permute;

impl<B: Nvfp4KernelOps> Backward<B, 1> for Permute {
    type State = (IntTensor<B>, Named);

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let dy = grads.consume::<B>(&ops.node);
        let (inverse, named) = ops.state;
        let dx = B::nvfp4_sum_rows(dy, MaybeTensor::Absent, inverse, named);
        let nodes = ops.parents.map(|node| node.map(|node| node.id));
        register::<B, 1>(nodes, [Some(dx)], grads);
    }
}

/// Arguments of an unpermutation.
#[derive(Clone, Debug)]
struct SavedUnpermute<B: Backend> {
    y: FloatTensor<B>,
    weights: FloatTensor<B>,
    places: IntTensor<B>,
    choices: IntTensor<B>,
    named: Named,
}

/// Weighted sum of rows: parents `[y, weights]`.
#[derive(Debug)]
struct Unpermute;

impl<B: Nvfp4KernelOps> Backward<B, 2> for Unpermute {
    type State = SavedUnpermute<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let SavedUnpermute {
            y,
            weights,
            places,
            choices,
            named,
        } = ops.state;
        let dout = cast::<B>(grads.consume::<B>(&ops.node), float_dtype(y.dtype()));
        let found = B::nvfp4_moe_unpermute_backward(dout, y, weights, places, choices, named);
        let nodes = ops.parents.map(|node| node.map(|node| node.id));
        let found = [Some(found.rows), Some(found.weights)];
        register::<B, 2>(nodes, found, grads);
    }
}

impl<B: Nvfp4Ops, C: CheckpointStrategy> Nvfp4Ops for Autodiff<B, C> {
    fn nvfp4_linear(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        bias: MaybeTensor<Self>,
        groups: RowGroups<Self>,
        spec: LinearSpec,
        context: LinearContext,
    ) -> FloatTensor<Self> {
        let bias = bias.into_option();
        let requires_grad = RequiresGrad {
            x: x.is_tracked(),
            w: w.is_tracked(),
            bias: (bias.as_ref())
                .filter(|bias| bias.is_tracked())
                .map(|bias| float_dtype(bias.dtype())),
        };
        // The guards keep the parents alive until the step is registered.
        let (x, x_node) = x.into_parts();
        let (w, w_node) = w.into_parts();
        let request = |bias| LinearRequest::<B> {
            x: QuantizeSource::Matrix(x),
            w,
            bias,
            groups: inner_groups(groups),
            spec,
            context,
            requires_grad,
        };
        match bias {
            None => {
                let step = Linear.prepare::<C>([x_node, w_node]);
                let (y, saved) = request(MaybeTensor::Absent).forward();
                match step.compute_bound().stateful() {
                    OpsKind::Tracked(prep) => prep.finish(saved, y),
                    OpsKind::UnTracked(prep) => prep.finish(y),
                }
            }
            Some(bias) => {
                let (bias, bias_node) = bias.into_parts();
                let step = LinearBias.prepare::<C>([x_node, w_node, bias_node]);
                let (y, saved) = request(MaybeTensor::Present(bias)).forward();
                match step.compute_bound().stateful() {
                    OpsKind::Tracked(prep) => prep.finish(saved, y),
                    OpsKind::UnTracked(prep) => prep.finish(y),
                }
            }
        }
    }

    fn nvfp4_add_linear(
        added: FloatTensor<Self>,
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        spec: LinearSpec,
    ) -> FloatTensor<Self> {
        let requires_grad = RequiresGrad {
            x: x.is_tracked(),
            w: w.is_tracked(),
            bias: None,
        };
        let (added, added_node) = added.into_parts();
        let (x, x_node) = x.into_parts();
        let (w, w_node) = w.into_parts();
        let step = AddLinear.prepare::<C>([added_node, x_node, w_node]);
        let (y, saved) = linear::add::<B>(added, [x, w], spec, requires_grad);
        match step.compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(saved, y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }

    fn nvfp4_feed_forward(
        x: FloatTensor<Self>,
        input: LinearParams<Self>,
        output: LinearParams<Self>,
        groups: RowGroups<Self>,
        spec: FeedForwardSpec,
    ) -> FloatTensor<Self> {
        feed_forward::track(x, input, output, inner_groups(groups), spec)
    }

    fn nvfp4_moe_permute(
        x: FloatTensor<Self>,
        index: IntTensor<Self>,
        inverse: IntTensor<Self>,
        groups: RowGroups<Self>,
        spec: GatherSpec,
    ) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        let y = B::nvfp4_moe_permute(x, index, inverse.clone(), inner_groups(groups), spec);
        match Permute.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((inverse, spec.named), y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }

    fn nvfp4_moe_unpermute(
        y: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        places: IntTensor<Self>,
        choices: IntTensor<Self>,
        named: Named,
    ) -> FloatTensor<Self> {
        let (y, y_node) = y.into_parts();
        let (weights, weights_node) = weights.into_parts();
        let nodes = [y_node, weights_node];
        match Unpermute.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let saved = SavedUnpermute {
                    y: y.clone(),
                    weights: weights.clone(),
                    places: places.clone(),
                    choices: choices.clone(),
                    named,
                };
                let out = B::nvfp4_moe_unpermute(y, weights, places, choices, named);
                prep.finish(saved, out)
            }
            OpsKind::UnTracked(prep) => {
                prep.finish(B::nvfp4_moe_unpermute(y, weights, places, choices, named))
            }
        }
    }
}
