//! The backwards of [`nvfp4_linear`](Nvfp4Ops::nvfp4_linear),
//! [`nvfp4_moe_permute`](Nvfp4Ops::nvfp4_moe_permute) and
//! [`nvfp4_moe_unpermute`](Nvfp4Ops::nvfp4_moe_unpermute).

use burn_core::backend::{
    Autodiff, AutodiffBackend, Backend, TensorMetadata,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    tensor::{FloatTensor, IntTensor},
};
use burn_core::tensor::FloatDType;
use nvfp4_kernels::Usage;

use super::feed_forward;
use super::gradients::register;
use super::layers::Activation;
use super::linear::{LinearRequest, RequiresGrad, SavedForBackward};
use super::operands::{QuantSource, cast};
use super::{
    FeedForwardSpec, GemmGroups, LinearContext, LinearParams, LinearSpec, MaybeTensor, Nvfp4Ops,
    Operand, QuantParams, QuantUsages, QuantizedData, QuantizedMatrix, QuantizedPair, RowGroups,
    UnpermuteGradients, float_dtype,
};

/// The backward of a linear layer without a bias: parents `[x, w]`.
#[derive(Debug)]
struct Linear;

impl<B: Nvfp4Ops> Backward<B, 2> for Linear {
    type State = SavedForBackward<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let dy = QuantSource::Matrix(grads.consume::<B>(&ops.node));
        let found = ops.state.backward(dy);
        let nodes = ops.parents.map(|node| node.map(|node| node.id));
        register::<B, 2>(nodes, [found.x, found.w], grads);
    }
}

/// The backward of a linear layer with a bias: parents `[x, w, bias]`.
#[derive(Debug)]
struct LinearBias;

impl<B: Nvfp4Ops> Backward<B, 3> for LinearBias {
    type State = SavedForBackward<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 3>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let dy = QuantSource::Matrix(grads.consume::<B>(&ops.node));
        let found = ops.state.backward(dy);
        let nodes = ops.parents.map(|node| node.map(|node| node.id));
        register::<B, 3>(nodes, [found.x, found.w, found.bias], grads);
    }
}

/// A gather of rows, whose inverse is its state: parents `[x]`.
#[derive(Debug)]
struct Permute;

impl<B: Nvfp4Ops> Backward<B, 1> for Permute {
    type State = IntTensor<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let dy = grads.consume::<B>(&ops.node);
        let dx = B::nvfp4_sum_rows(dy, MaybeTensor::Absent, ops.state);
        let nodes = ops.parents.map(|node| node.map(|node| node.id));
        register::<B, 1>(nodes, [Some(dx)], grads);
    }
}

/// The arguments of an unpermutation.
#[derive(Clone, Debug)]
struct SavedUnpermute<B: Backend> {
    y: FloatTensor<B>,
    weights: FloatTensor<B>,
    places: IntTensor<B>,
    choices: IntTensor<B>,
}

/// A weighted sum of rows: parents `[y, weights]`.
#[derive(Debug)]
struct Unpermute;

impl<B: Nvfp4Ops> Backward<B, 2> for Unpermute {
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
        } = ops.state;
        let dout = cast::<B>(grads.consume::<B>(&ops.node), float_dtype(y.dtype()));
        let found = B::nvfp4_moe_unpermute_backward(dout, y, weights, places, choices);
        let nodes = ops.parents.map(|node| node.map(|node| node.id));
        let found = [Some(found.rows), Some(found.weights)];
        register::<B, 2>(nodes, found, grads);
    }
}

impl<B: Nvfp4Ops, C: CheckpointStrategy> Nvfp4Ops for Autodiff<B, C> {
    fn nvfp4_quantize(
        x: FloatTensor<Self>,
        groups: RowGroups<Self>,
        usages: QuantUsages,
    ) -> QuantizedPair<Self> {
        B::nvfp4_quantize(x.into_primitive(), inner_groups(groups), usages).map(constant)
    }

    fn nvfp4_quantize_activation(
        x: FloatTensor<Self>,
        grad: MaybeTensor<Self>,
        groups: RowGroups<Self>,
        activation: Activation,
        usages: QuantUsages,
    ) -> QuantizedPair<Self> {
        let (x, grad) = (x.into_primitive(), grad.map(|grad| grad.into_primitive()));
        let groups = inner_groups(groups);
        B::nvfp4_quantize_activation(x, grad, groups, activation, usages).map(constant)
    }

    fn nvfp4_requantize(
        source: QuantizedMatrix<Self>,
        groups: RowGroups<Self>,
        usage: Usage,
        params: QuantParams,
        via: FloatDType,
    ) -> QuantizedMatrix<Self> {
        let (source, groups) = (inner(source), inner_groups(groups));
        constant(B::nvfp4_requantize(source, groups, usage, params, via))
    }

    fn nvfp4_dequantize(
        source: QuantizedMatrix<Self>,
        groups: RowGroups<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let (source, groups) = (inner(source), inner_groups(groups));
        Self::from_inner(B::nvfp4_dequantize(source, groups, dtype))
    }

    fn nvfp4_gemm(
        a: Operand<Self>,
        b: Operand<Self>,
        bias: MaybeTensor<Self>,
        groups: GemmGroups<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let (a, b) = (inner_operand(a), inner_operand(b));
        let bias = bias.map(|bias| bias.into_primitive());
        let groups = match groups {
            GemmGroups::None => GemmGroups::None,
            GemmGroups::M(offsets) => GemmGroups::M(offsets),
            GemmGroups::K { offsets, tokens } => GemmGroups::K { offsets, tokens },
        };
        Self::from_inner(B::nvfp4_gemm(a, b, bias, groups, dtype))
    }

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
            x: QuantSource::Matrix(x),
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

    fn nvfp4_feed_forward(
        x: FloatTensor<Self>,
        input: LinearParams<Self>,
        output: LinearParams<Self>,
        groups: RowGroups<Self>,
        spec: FeedForwardSpec,
    ) -> FloatTensor<Self> {
        feed_forward::track(x, input, output, inner_groups(groups), spec)
    }

    fn nvfp4_broadcast_group_values(
        values: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        rows: usize,
    ) -> FloatTensor<Self> {
        let values = values.into_primitive();
        Self::from_inner(B::nvfp4_broadcast_group_values(values, offsets, rows))
    }

    fn nvfp4_segment_sum(x: FloatTensor<Self>, offsets: IntTensor<Self>) -> FloatTensor<Self> {
        Self::from_inner(B::nvfp4_segment_sum(x.into_primitive(), offsets))
    }

    fn nvfp4_moe_permute(
        x: FloatTensor<Self>,
        index: IntTensor<Self>,
        inverse: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        match Permute.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let y = B::nvfp4_moe_permute(x, index, inverse.clone());
                prep.finish(inverse, y)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::nvfp4_moe_permute(x, index, inverse)),
        }
    }

    fn nvfp4_moe_unpermute(
        y: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        places: IntTensor<Self>,
        choices: IntTensor<Self>,
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
                };
                prep.finish(saved, B::nvfp4_moe_unpermute(y, weights, places, choices))
            }
            OpsKind::UnTracked(prep) => {
                prep.finish(B::nvfp4_moe_unpermute(y, weights, places, choices))
            }
        }
    }

    fn nvfp4_moe_unpermute_backward(
        dout: FloatTensor<Self>,
        y: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        places: IntTensor<Self>,
        choices: IntTensor<Self>,
    ) -> UnpermuteGradients<Self> {
        let (dout, y) = (dout.into_primitive(), y.into_primitive());
        let weights = weights.into_primitive();
        let found = B::nvfp4_moe_unpermute_backward(dout, y, weights, places, choices);
        UnpermuteGradients {
            rows: Self::from_inner(found.rows),
            weights: Self::from_inner(found.weights),
        }
    }

    fn nvfp4_sum_rows(
        x: FloatTensor<Self>,
        weights: MaybeTensor<Self>,
        places: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let weights = weights.map(|weights| weights.into_primitive());
        Self::from_inner(B::nvfp4_sum_rows(x.into_primitive(), weights, places))
    }
}

/// A quantized matrix as a constant of the autodiff backend.
pub(super) fn constant<B: Backend, C: CheckpointStrategy>(
    quantized: QuantizedMatrix<B>,
) -> QuantizedMatrix<Autodiff<B, C>> {
    let outer = <Autodiff<B, C> as AutodiffBackend>::from_inner;
    QuantizedMatrix {
        data: match quantized.data {
            QuantizedData::Packed { codes, scales } => QuantizedData::Packed { codes, scales },
            QuantizedData::Bf16Unscaled(values) => QuantizedData::Bf16Unscaled(outer(values)),
        },
        amax: quantized.amax.map(outer),
        layout: quantized.layout,
    }
}

/// A quantized matrix of the inner backend.
fn inner<B: Nvfp4Ops, C: CheckpointStrategy>(
    quantized: QuantizedMatrix<Autodiff<B, C>>,
) -> QuantizedMatrix<B> {
    QuantizedMatrix {
        data: match quantized.data {
            QuantizedData::Packed { codes, scales } => QuantizedData::Packed { codes, scales },
            QuantizedData::Bf16Unscaled(values) => {
                QuantizedData::Bf16Unscaled(values.into_primitive())
            }
        },
        amax: quantized.amax.map(|amax| amax.into_primitive()),
        layout: quantized.layout,
    }
}

/// An operand of the inner backend.
fn inner_operand<B: Nvfp4Ops, C: CheckpointStrategy>(
    operand: Operand<Autodiff<B, C>>,
) -> Operand<B> {
    match operand {
        Operand::Quantized(quantized) => Operand::Quantized(inner(quantized)),
        Operand::Float(x, usage) => Operand::Float(x.into_primitive(), usage),
    }
}

/// Groups of the inner backend.
pub(super) fn inner_groups<B: Backend, C: CheckpointStrategy>(
    groups: RowGroups<Autodiff<B, C>>,
) -> RowGroups<B> {
    match groups {
        RowGroups::Whole => RowGroups::Whole,
        RowGroups::Batch(count) => RowGroups::Batch(count),
        RowGroups::Offsets(offsets) => RowGroups::Offsets(offsets),
    }
}
