//! Feed-forward as one differentiable operation: linear layer, activation, linear layer.
//!
//! The output of the activation is quantized for the second layer, and its gradient for the first
//! layer, by one operation each, which computes the amax values together with the activation. The
//! backward needs the input of the activation, the largest tensor of a block. Either it is kept, or
//! it is recomputed by the GEMM of the forward, whose packed, small operands are then kept instead.

use burn_core::backend::{
    Autodiff, AutodiffBackend, Backend, TensorMetadata,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, NodeGuard, Ops, OpsKind},
    },
    tensor::FloatTensor,
};

use super::gradients::register;
use super::layers::Activation;
use super::linear::{self, Fprop, LinearRequest, RequiresGrad, SavedForBackward};
use super::{
    LinearContext, LinearParams, LinearSpec, MaybeTensor, Nvfp4KernelOps, QuantizeSource,
    RowGroups, float_dtype,
};

/// Configuration of a feed-forward.
#[derive(Clone, Debug)]
pub struct FeedForwardSpec {
    /// Activation between the layers.
    pub activation: Activation,
    /// First layer.
    pub input: (LinearSpec, LinearContext),
    /// Second layer.
    pub output: (LinearSpec, LinearContext),
    /// True if the backward recomputes the input of the activation by the GEMM of the forward,
    /// instead of keeping it. Does not affect any bit of the results.
    pub recompute: bool,
}

/// Computes the output of a feed-forward whose gradients are not required.
pub(super) fn infer<B: Nvfp4KernelOps>(
    x: FloatTensor<B>,
    input: LinearParams<B>,
    output: LinearParams<B>,
    groups: RowGroups<B>,
    spec: FeedForwardSpec,
) -> FloatTensor<B> {
    let layer = |x, params, (spec, context): &(LinearSpec, LinearContext)| {
        linear::infer::<B>(x, params, &groups, (spec, context))
    };
    let hidden = layer(QuantizeSource::Matrix(x), input, &spec.input);
    let hidden = QuantizeSource::Activation {
        activation: spec.activation,
        x: hidden,
        grad: MaybeTensor::Absent,
    };
    layer(hidden, output, &spec.output)
}

/// Input of the activation, for the backward.
#[derive(Clone, Debug)]
enum Hidden<B: Backend> {
    Kept(FloatTensor<B>),
    Recomputed(Box<Fprop<B>>),
}

/// State saved for the backward.
#[derive(Clone, Debug)]
struct SavedFeedForward<B: Backend> {
    activation: Activation,
    input: SavedForBackward<B>,
    hidden: Hidden<B>,
    output: SavedForBackward<B>,
}

/// Backward: parents `[x, input.weight, input.bias, output.weight, output.bias]`.
#[derive(Debug)]
struct FeedForward;

impl<B: Nvfp4KernelOps> Backward<B, 5> for FeedForward {
    type State = SavedFeedForward<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 5>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let SavedFeedForward {
            activation,
            mut input,
            hidden,
            output,
        } = ops.state;
        let dy = QuantizeSource::Matrix(grads.consume::<B>(&ops.node));
        let nodes = ops.parents.map(|node| node.map(|node| node.id));
        let of_output = output.backward(dy);
        let found = [None, None, None, of_output.w, of_output.bias];
        register::<B, 5>(nodes, found, grads);
        // The second layer has an input gradient only if `x` or the first layer needs a gradient.
        let Some(grad) = of_output.x else {
            return;
        };
        let x = match hidden {
            Hidden::Kept(x) => x,
            Hidden::Recomputed(fprop) => input.run_again(*fprop),
        };
        let dy = QuantizeSource::Activation {
            activation,
            x,
            grad: MaybeTensor::Present(grad),
        };
        let of_input = input.backward(dy);
        let found = [of_input.x, of_input.w, of_input.bias, None, None];
        register::<B, 5>(nodes, found, grads);
    }
}

/// Parameter without its node, tracking flag, and node; a missing parameter is a constant.
type Untracked<B> = (Option<FloatTensor<B>>, bool, NodeGuard);

fn untracked<B: Backend, C: CheckpointStrategy>(
    tensor: MaybeTensor<Autodiff<B, C>>,
    constant: &FloatTensor<B>,
) -> Untracked<B> {
    match tensor.into_option() {
        Some(tensor) => {
            let is_tracked = tensor.is_tracked();
            let (tensor, node) = tensor.into_parts();
            (Some(tensor), is_tracked, node)
        }
        None => {
            let constant = <Autodiff<B, C> as AutodiffBackend>::from_inner(constant.clone());
            (None, false, constant.node())
        }
    }
}

/// Computes a feed-forward that autodiff tracks; `groups` are those of the inner backend.
pub(super) fn track<B: Nvfp4KernelOps, C: CheckpointStrategy>(
    x: FloatTensor<Autodiff<B, C>>,
    input: LinearParams<Autodiff<B, C>>,
    output: LinearParams<Autodiff<B, C>>,
    groups: RowGroups<B>,
    spec: FeedForwardSpec,
) -> FloatTensor<Autodiff<B, C>> {
    let x_tracked = x.is_tracked();
    // The guards keep the parents alive until the step is registered.
    let (x, x_node) = x.into_parts();
    let (in_w_tracked, out_w_tracked) = (input.weight.is_tracked(), output.weight.is_tracked());
    let (in_w, in_w_node) = input.weight.into_parts();
    let (out_w, out_w_node) = output.weight.into_parts();
    let (in_bias, in_bias_tracked, in_bias_node) = untracked::<B, C>(input.bias, &x);
    let (out_bias, out_bias_tracked, out_bias_node) = untracked::<B, C>(output.bias, &x);
    let nodes = [x_node, in_w_node, in_bias_node, out_w_node, out_bias_node];
    let step = FeedForward.prepare::<C>(nodes);

    let request = |x, (w, bias): (_, Option<FloatTensor<B>>), requires, (spec, context)| {
        let (of_x, of_w, of_bias) = requires;
        let bias_dtype = bias.as_ref().map(|bias| float_dtype(bias.dtype()));
        LinearRequest::<B> {
            x,
            w,
            groups: groups.clone(),
            spec,
            context,
            requires_grad: RequiresGrad {
                x: of_x,
                w: of_w,
                bias: bias_dtype.filter(|_| of_bias),
            },
            bias: bias.into(),
        }
    };
    let requires = (x_tracked, in_w_tracked, in_bias_tracked);
    let hidden_tracked = x_tracked || in_w_tracked || in_bias_tracked;
    let recompute = spec.recompute && hidden_tracked;
    let first = request(
        QuantizeSource::Matrix(x),
        (in_w, in_bias),
        requires,
        spec.input,
    );
    let (fprop, saved_input) = first.quantize(recompute);
    let kept = recompute.then(|| Box::new(fprop.kept()));
    let hidden = fprop.run();
    let source = QuantizeSource::Activation {
        activation: spec.activation,
        x: hidden.clone(),
        grad: MaybeTensor::Absent,
    };
    let requires = (hidden_tracked, out_w_tracked, out_bias_tracked);
    let second = request(source, (out_w, out_bias), requires, spec.output);
    let (y, saved_output) = second.forward();
    match step.compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            let saved = SavedFeedForward {
                activation: spec.activation,
                input: saved_input,
                hidden: kept.map_or(Hidden::Kept(hidden), Hidden::Recomputed),
                output: saved_output,
            };
            prep.finish(saved, y)
        }
        OpsKind::UnTracked(prep) => prep.finish(y),
    }
}

#[cfg(test)]
mod tests {
    use burn_core::backend::Dispatch;
    use burn_core::tensor::{DType, Distribution, Tensor};
    use nvfp4_formats::StoredForm;

    use super::super::Nvfp4Ops;
    use super::super::context::tests::{device, spec};
    use super::*;

    /// The form of the operands, and keeping or recomputing the input of the activation, change no
    /// bit of outputs and gradients.
    #[test]
    fn the_form_changes_no_bit() {
        let (device, dtype, gpu) = device();
        let [tokens, width, inner] = match gpu {
            true => [4096, 1024, 2048],
            false => [72, 48, 64],
        };
        let device = device.autodiff();
        let random = |rows, cols| {
            let normal = Distribution::Normal(0.0, 1.0);
            let tensor = Tensor::<2>::random([rows, cols], normal, (&device, DType::F32));
            tensor.cast(dtype).detach()
        };
        let leaves = [(tokens, width), (width, 2 * inner), (inner, width)]
            .map(|(rows, cols)| random(rows, cols).require_grad());
        let dy = random(tokens, width);
        for preset in ["quartet2", "nvidia"] {
            let layer = |reads| {
                let context = LinearContext {
                    reads,
                    ..LinearContext::default()
                };
                (spec(preset), context)
            };
            let bytes = |reads: Option<StoredForm>, recompute| {
                let [x, input, output] = leaves.clone().map(Tensor::into_dispatch);
                let params = |weight| LinearParams {
                    weight,
                    bias: MaybeTensor::Absent,
                };
                let spec = FeedForwardSpec {
                    activation: Activation::SwiGlu,
                    input: layer(reads),
                    output: layer(reads),
                    recompute,
                };
                let (input, output) = (params(input), params(output));
                let y = Dispatch::nvfp4_feed_forward(x, input, output, RowGroups::Whole, spec);
                let y = Tensor::<2>::from_dispatch(y);
                let grads = (y.clone() * dy.clone()).sum_dim(1).sum().backward();
                let mut all = vec![y.inner()];
                all.extend(
                    leaves
                        .iter()
                        .map(|leaf| leaf.grad(&grads).expect("a gradient")),
                );
                let bytes = all.into_iter().map(|x| x.into_data().as_bytes().to_vec());
                bytes.collect::<Vec<_>>()
            };
            let expected = bytes(Some(StoredForm::Rows), false);
            for reads in [Some(StoredForm::Rows), Some(StoredForm::Bf16Unscaled), None] {
                for recompute in [false, true] {
                    let same = bytes(reads, recompute) == expected;
                    assert!(same, "{preset}, {reads:?}, recompute: {recompute}");
                }
            }
        }
    }
}
