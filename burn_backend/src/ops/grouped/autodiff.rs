//! The backwards of [`nvfp4_grouped_linear`](Nvfp4GroupedOps::nvfp4_grouped_linear),
//! [`nvfp4_moe_permute`](Nvfp4GroupedOps::nvfp4_moe_permute) and
//! [`nvfp4_moe_unpermute`](Nvfp4GroupedOps::nvfp4_moe_unpermute).

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

use nvfp4_kernels::{BlockScaling, Storage, Usage};

use super::super::autodiff::{
    constant, inner, inner_bias, inner_operand, linear, mx_constant, register,
};
use super::super::linear::{LinearBackend, LinearRequest};
use super::super::operands::cast;
use super::super::{
    Bias, EdenSpec, LinearContext, LinearSpec, MxPacked, Operand, OperandSpec, Packed, PackedPair,
    PairSpec, QuantizeSpec, float_dtype,
};
use super::operands::{stack, stack_again, stack_both, tokens, tokens_again, tokens_both};
use super::{GroupPairSpec, Nvfp4GroupedOps, RowGradients, RowGroups};

/// A weight of its own for each group of `tokens` rows in all.
#[derive(Clone, Debug)]
struct Groups<B: Backend> {
    offsets: IntTensor<B>,
    tokens: usize,
}

impl<B: Nvfp4GroupedOps> LinearBackend<B> for Groups<B> {
    /// Values are made for dense products alone.
    fn form(&self, _: &B::Device, _: [&OperandSpec; 2], _: (usize, usize, usize)) -> Storage {
        Storage::Packed
    }

    fn rows(
        &self,
        x: FloatTensor<B>,
        spec: &OperandSpec,
        usage: Usage,
        dtype: FloatDType,
        _: Storage,
    ) -> Operand<B> {
        tokens::<B>(x, &self.offsets, spec, usage, dtype)
    }

    fn rows_both(
        &self,
        x: FloatTensor<B>,
        row: &OperandSpec,
        col: &OperandSpec,
        dtype: FloatDType,
        _: [Storage; 2],
    ) -> (Operand<B>, Operand<B>) {
        tokens_both::<B>(x, &self.offsets, row, col, dtype)
    }

    fn rows_again(&self, forward: Operand<B>, spec: &OperandSpec, dtype: FloatDType) -> Operand<B> {
        tokens_again::<B>(forward, &self.offsets, spec, dtype)
    }

    fn weight(
        &self,
        w: FloatTensor<B>,
        spec: &OperandSpec,
        usage: Usage,
        dtype: FloatDType,
    ) -> Operand<B> {
        stack::<B>(w, spec, usage, dtype)
    }

    fn weight_both(
        &self,
        w: FloatTensor<B>,
        row: &OperandSpec,
        col: &OperandSpec,
        dtype: FloatDType,
    ) -> (Operand<B>, Operand<B>) {
        stack_both::<B>(w, row, col, dtype)
    }

    fn weight_again(
        &self,
        forward: Operand<B>,
        spec: &OperandSpec,
        dtype: FloatDType,
    ) -> Operand<B> {
        let experts = self.offsets.shape()[0] - 1;
        stack_again::<B>(forward, experts, spec, dtype)
    }

    fn product(
        &self,
        x: Operand<B>,
        w: Operand<B>,
        bias: Bias<B>,
        dtype: FloatDType,
    ) -> FloatTensor<B> {
        B::nvfp4_group_rows(x, w, bias, self.offsets.clone(), dtype)
    }

    fn weight_grad(&self, x: Operand<B>, dy: Operand<B>, dtype: FloatDType) -> FloatTensor<B> {
        B::nvfp4_group_depth(x, dy, self.offsets.clone(), self.tokens, dtype)
    }

    fn bias_grad(&self, dy: FloatTensor<B>) -> FloatTensor<B> {
        B::nvfp4_segment_sum(dy, self.offsets.clone())
    }

    fn offsets(&self) -> Option<&IntTensor<B>> {
        Some(&self.offsets)
    }
}

/// What a gather keeps until its backward.
#[derive(Clone, Debug)]
struct Gathered<B: Backend> {
    inverse: IntTensor<B>,
}

/// A gather of rows with a known inverse: parents `[x]`.
#[derive(Debug)]
struct GatherRows;

impl<B: Nvfp4GroupedOps> Backward<B, 1> for GatherRows {
    type State = Gathered<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let dy = grads.consume::<B>(&ops.node);
        let inverse = ops.state.inverse;
        let dx = Some(B::nvfp4_add_rows(dy, inverse));
        register::<B, _>(
            ops.parents.map(|node| node.map(|node| node.id)),
            [dx],
            grads,
        );
    }
}

/// What a combination keeps until its backward.
#[derive(Clone, Debug)]
struct Combined<B: Backend> {
    y: FloatTensor<B>,
    weights: FloatTensor<B>,
    places: IntTensor<B>,
    choices: IntTensor<B>,
}

/// A weighted sum of rows: parents `[y, weights]`.
#[derive(Debug)]
struct CombineRows;

impl<B: Nvfp4GroupedOps> Backward<B, 2> for CombineRows {
    type State = Combined<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let Combined {
            y,
            weights,
            places,
            choices,
        } = ops.state;
        let dout = cast::<B>(grads.consume::<B>(&ops.node), float_dtype(y.dtype()));
        let found = B::nvfp4_weigh_rows_backward(dout, y, weights, places, choices);
        let (dy, dweights) = (Some(found.rows), Some(found.weights));
        register::<B, _>(
            ops.parents.map(|node| node.map(|node| node.id)),
            [dy, dweights],
            grads,
        );
    }
}

/// Groups of the backend that does the work.
fn inner_groups<B: Backend, C: CheckpointStrategy>(
    groups: RowGroups<Autodiff<B, C>>,
) -> RowGroups<B> {
    match groups {
        RowGroups::Batch(count) => RowGroups::Batch(count),
        RowGroups::Offsets(offsets) => RowGroups::Offsets(offsets),
    }
}

impl<B: Nvfp4GroupedOps, C: CheckpointStrategy> Nvfp4GroupedOps for Autodiff<B, C> {
    fn nvfp4_quantize_stack(w: FloatTensor<Self>, spec: QuantizeSpec) -> Packed<Self> {
        constant(B::nvfp4_quantize_stack(w.into_primitive(), spec))
    }

    fn nvfp4_quantize_stack_tiles(
        w: FloatTensor<Self>,
        usage: Usage,
        scaling: BlockScaling,
    ) -> Packed<Self> {
        constant(B::nvfp4_quantize_stack_tiles(
            w.into_primitive(),
            usage,
            scaling,
        ))
    }

    fn nvfp4_quantize_stack_pair(w: FloatTensor<Self>, spec: PairSpec) -> PackedPair<Self> {
        let PackedPair { row, col } = B::nvfp4_quantize_stack_pair(w.into_primitive(), spec);
        PackedPair {
            row: constant(row),
            col: constant(col),
        }
    }

    fn nvfp4_quantize_groups(
        x: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        spec: QuantizeSpec,
    ) -> Packed<Self> {
        constant(B::nvfp4_quantize_groups(x.into_primitive(), offsets, spec))
    }

    fn nvfp4_quantize_groups_pair(
        x: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        spec: GroupPairSpec,
    ) -> PackedPair<Self> {
        let PackedPair { row, col } =
            B::nvfp4_quantize_groups_pair(x.into_primitive(), offsets, spec);
        PackedPair {
            row: constant(row),
            col: constant(col),
        }
    }

    fn nvfp4_eden_groups(
        x: FloatTensor<Self>,
        groups: RowGroups<Self>,
        spec: EdenSpec,
    ) -> Packed<Self> {
        let groups = inner_groups(groups);
        constant(B::nvfp4_eden_groups(x.into_primitive(), groups, spec))
    }

    fn nvfp4_eden_groups_packed(
        packed: Packed<Self>,
        groups: RowGroups<Self>,
        spec: EdenSpec,
    ) -> Packed<Self> {
        let (packed, groups) = (inner(packed), inner_groups(groups));
        constant(B::nvfp4_eden_groups_packed(packed, groups, spec))
    }

    fn nvfp4_mx_quantize_groups(
        x: FloatTensor<Self>,
        groups: RowGroups<Self>,
        usage: Usage,
    ) -> MxPacked<Self> {
        let groups = inner_groups(groups);
        mx_constant(B::nvfp4_mx_quantize_groups(
            x.into_primitive(),
            groups,
            usage,
        ))
    }

    fn nvfp4_mx_requantize_groups(
        packed: Packed<Self>,
        groups: RowGroups<Self>,
        usage: Usage,
        via: FloatDType,
    ) -> MxPacked<Self> {
        let (packed, groups) = (inner(packed), inner_groups(groups));
        mx_constant(B::nvfp4_mx_requantize_groups(packed, groups, usage, via))
    }

    fn nvfp4_broadcast_group_values(
        values: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        rows: usize,
    ) -> FloatTensor<Self> {
        let values = values.into_primitive();
        Self::from_inner(B::nvfp4_broadcast_group_values(values, offsets, rows))
    }

    fn nvfp4_group_rows(
        a: Operand<Self>,
        b: Operand<Self>,
        bias: Bias<Self>,
        offsets: IntTensor<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let (a, b, bias) = (inner_operand(a), inner_operand(b), inner_bias(bias));
        Self::from_inner(B::nvfp4_group_rows(a, b, bias, offsets, dtype))
    }

    fn nvfp4_group_depth(
        a: Operand<Self>,
        b: Operand<Self>,
        offsets: IntTensor<Self>,
        tokens: usize,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let (a, b) = (inner_operand(a), inner_operand(b));
        Self::from_inner(B::nvfp4_group_depth(a, b, offsets, tokens, dtype))
    }

    fn nvfp4_segment_sum(x: FloatTensor<Self>, offsets: IntTensor<Self>) -> FloatTensor<Self> {
        Self::from_inner(B::nvfp4_segment_sum(x.into_primitive(), offsets))
    }

    fn nvfp4_grouped_linear(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        bias: Bias<Self>,
        offsets: IntTensor<Self>,
        spec: LinearSpec,
        context: LinearContext,
    ) -> FloatTensor<Self> {
        let tokens = x.shape()[0];
        linear(x, w, bias, |x, w, bias, tracked| {
            let request = LinearRequest {
                x,
                w,
                bias,
                spec,
                context,
                tracked,
                grouping: Groups { offsets, tokens },
            };
            request.forward()
        })
    }

    fn nvfp4_moe_permute(
        x: FloatTensor<Self>,
        index: IntTensor<Self>,
        inverse: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        match GatherRows.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let y = B::nvfp4_moe_permute(x, index, inverse.clone());
                prep.finish(Gathered { inverse }, y)
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
        match CombineRows.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let saved = Combined {
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

    fn nvfp4_add_rows(x: FloatTensor<Self>, places: IntTensor<Self>) -> FloatTensor<Self> {
        Self::from_inner(B::nvfp4_add_rows(x.into_primitive(), places))
    }

    fn nvfp4_weigh_rows(
        x: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        places: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let (x, weights) = (x.into_primitive(), weights.into_primitive());
        Self::from_inner(B::nvfp4_weigh_rows(x, weights, places))
    }

    fn nvfp4_weigh_rows_backward(
        dout: FloatTensor<Self>,
        y: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        places: IntTensor<Self>,
        choices: IntTensor<Self>,
    ) -> RowGradients<Self> {
        let (dout, y) = (dout.into_primitive(), y.into_primitive());
        let weights = weights.into_primitive();
        let found = B::nvfp4_weigh_rows_backward(dout, y, weights, places, choices);
        RowGradients {
            rows: Self::from_inner(found.rows),
            weights: Self::from_inner(found.weights),
        }
    }
}
