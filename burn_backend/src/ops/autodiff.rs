//! The backward of [`nvfp4_linear`](Nvfp4Ops::nvfp4_linear).

use std::marker::PhantomData;

use burn_core::backend::{
    Autodiff, AutodiffBackend, Backend, TensorMetadata,
    autodiff::{
        NodeId,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    tensor::FloatTensor,
};
use burn_core::tensor::FloatDType;
use nvfp4_kernels::{BlockScaling, Storage, Usage};

use super::linear::{Dense, LinearBackward, LinearRequest, RequiresGrad};
use super::{
    Bias, CopySpec, Decoded, EdenSpec, LinearContext, LinearSpec, MxPacked, Nvfp4Ops, Operand,
    OperandPair, Packed, PackedPair, PairSpec, QuantizeSpec, float_dtype,
};

/// Hand the gradients that were found to the nodes that are tracked.
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

/// The product without a bias, of which an `S` is kept: parents `[x, w]`.
#[derive(Debug)]
struct Linear<S>(PhantomData<S>);

impl<B: Backend, S: LinearBackward<B>> Backward<B, 2> for Linear<S> {
    type State = S;

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let found = ops.state.backward(grads.consume::<B>(&ops.node));
        register::<B, 2>(
            ops.parents.map(|node| node.map(|node| node.id)),
            [found.x, found.w],
            grads,
        );
    }
}

/// The product with a bias: parents `[x, w, bias]`.
#[derive(Debug)]
struct LinearBias<S>(PhantomData<S>);

impl<B: Backend, S: LinearBackward<B>> Backward<B, 3> for LinearBias<S> {
    type State = S;

    fn backward(
        self,
        ops: Ops<Self::State, 3>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let found = ops.state.backward(grads.consume::<B>(&ops.node));
        register::<B, 3>(
            ops.parents.map(|node| node.map(|node| node.id)),
            [found.x, found.w, found.bias],
            grads,
        );
    }
}

/// A linear product on the autodiff backend: `forward` computes it on the backend below, and says what
/// its backward needs.
pub(super) fn linear<B, C, S>(
    x: FloatTensor<Autodiff<B, C>>,
    w: FloatTensor<Autodiff<B, C>>,
    bias: Bias<Autodiff<B, C>>,
    forward: impl FnOnce(FloatTensor<B>, FloatTensor<B>, Bias<B>, RequiresGrad) -> (FloatTensor<B>, S),
) -> FloatTensor<Autodiff<B, C>>
where
    B: Backend,
    C: CheckpointStrategy,
    S: LinearBackward<B>,
{
    let tracked = RequiresGrad {
        x: x.is_tracked(),
        w: w.is_tracked(),
        bias: None,
    };
    // The guards keep the parents alive until the step is registered.
    let (x, x_node) = x.into_parts();
    let (w, w_node) = w.into_parts();
    match bias {
        Bias::Absent => {
            let step = Linear::<S>(PhantomData).prepare::<C>([x_node, w_node]);
            let (y, saved) = forward(x, w, Bias::Absent, tracked);
            match step.compute_bound().stateful() {
                OpsKind::Tracked(prep) => prep.finish(saved, y),
                OpsKind::UnTracked(prep) => prep.finish(y),
            }
        }
        Bias::Vector(bias) => {
            let tracked = RequiresGrad {
                bias: bias.is_tracked().then(|| float_dtype(bias.dtype())),
                ..tracked
            };
            let (bias, bias_node) = bias.into_parts();
            let step = LinearBias::<S>(PhantomData).prepare::<C>([x_node, w_node, bias_node]);
            let (y, saved) = forward(x, w, Bias::Vector(bias), tracked);
            match step.compute_bound().stateful() {
                OpsKind::Tracked(prep) => prep.finish(saved, y),
                OpsKind::UnTracked(prep) => prep.finish(y),
            }
        }
    }
}

impl<B: Nvfp4Ops, C: CheckpointStrategy> Nvfp4Ops for Autodiff<B, C> {
    fn nvfp4_quantize(x: FloatTensor<Self>, spec: QuantizeSpec) -> Packed<Self> {
        constant(B::nvfp4_quantize(x.into_primitive(), spec))
    }

    fn nvfp4_quantize_tiles(
        x: FloatTensor<Self>,
        usage: Usage,
        scaling: BlockScaling,
    ) -> Packed<Self> {
        constant(B::nvfp4_quantize_tiles(x.into_primitive(), usage, scaling))
    }

    fn nvfp4_quantize_pair(x: FloatTensor<Self>, spec: PairSpec) -> PackedPair<Self> {
        let PackedPair { row, col } = B::nvfp4_quantize_pair(x.into_primitive(), spec);
        PackedPair {
            row: constant(row),
            col: constant(col),
        }
    }

    fn nvfp4_quantize_decoded(x: FloatTensor<Self>, spec: QuantizeSpec) -> Decoded<Self> {
        decoded_constant(B::nvfp4_quantize_decoded(x.into_primitive(), spec))
    }

    fn nvfp4_quantize_forms(
        x: FloatTensor<Self>,
        row: (CopySpec, Storage),
        col: (CopySpec, Storage),
    ) -> OperandPair<Self> {
        let OperandPair { row, col } = B::nvfp4_quantize_forms(x.into_primitive(), row, col);
        OperandPair {
            row: operand_constant(row),
            col: operand_constant(col),
        }
    }

    fn nvfp4_eden(x: FloatTensor<Self>, spec: EdenSpec) -> Packed<Self> {
        constant(B::nvfp4_eden(x.into_primitive(), spec))
    }

    fn nvfp4_eden_packed(packed: Packed<Self>, spec: EdenSpec) -> Packed<Self> {
        constant(B::nvfp4_eden_packed(inner(packed), spec))
    }

    fn nvfp4_mx_quantize(x: FloatTensor<Self>, usage: Usage) -> MxPacked<Self> {
        mx_constant(B::nvfp4_mx_quantize(x.into_primitive(), usage))
    }

    fn nvfp4_mx_requantize(packed: Packed<Self>, usage: Usage, via: FloatDType) -> MxPacked<Self> {
        mx_constant(B::nvfp4_mx_requantize(inner(packed), usage, via))
    }

    fn nvfp4_dequantize(packed: Packed<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        Self::from_inner(B::nvfp4_dequantize(inner(packed), dtype))
    }

    fn nvfp4_mx_dequantize(packed: MxPacked<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        Self::from_inner(B::nvfp4_mx_dequantize(mx_inner(packed), dtype))
    }

    fn nvfp4_product(
        a: Operand<Self>,
        b: Operand<Self>,
        bias: Bias<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let (a, b) = (inner_operand(a), inner_operand(b));
        Self::from_inner(B::nvfp4_product(a, b, inner_bias(bias), dtype))
    }

    fn nvfp4_linear(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        bias: Bias<Self>,
        spec: LinearSpec,
        context: LinearContext,
    ) -> FloatTensor<Self> {
        linear(x, w, bias, |x, w, bias, tracked| {
            let request = LinearRequest {
                x,
                w,
                bias,
                spec,
                context,
                tracked,
                grouping: Dense,
            };
            request.forward()
        })
    }
}

/// A packed matrix as a constant of the autodiff backend.
pub(super) fn constant<B: Nvfp4Ops, C: CheckpointStrategy>(
    packed: Packed<B>,
) -> Packed<Autodiff<B, C>> {
    Packed {
        codes: packed.codes,
        scales: packed.scales,
        amax: <Autodiff<B, C> as AutodiffBackend>::from_inner(packed.amax),
        layout: packed.layout,
    }
}

/// Values as a constant of the autodiff backend.
fn decoded_constant<B: Nvfp4Ops, C: CheckpointStrategy>(
    decoded: Decoded<B>,
) -> Decoded<Autodiff<B, C>> {
    Decoded {
        values: <Autodiff<B, C> as AutodiffBackend>::from_inner(decoded.values),
        amax: <Autodiff<B, C> as AutodiffBackend>::from_inner(decoded.amax),
        layout: decoded.layout,
    }
}

/// An operand as a constant of the autodiff backend.
fn operand_constant<B: Nvfp4Ops, C: CheckpointStrategy>(
    operand: Operand<B>,
) -> Operand<Autodiff<B, C>> {
    match operand {
        Operand::Nvfp4(packed) => Operand::Nvfp4(constant(packed)),
        Operand::Decoded(decoded) => Operand::Decoded(decoded_constant(decoded)),
        Operand::Mxfp8(packed) => Operand::Mxfp8(mx_constant(packed)),
        Operand::Float(x, usage) => {
            Operand::Float(<Autodiff<B, C> as AutodiffBackend>::from_inner(x), usage)
        }
    }
}

/// A packed matrix of the backend that does the work.
pub(super) fn inner<B: Nvfp4Ops, C: CheckpointStrategy>(
    packed: Packed<Autodiff<B, C>>,
) -> Packed<B> {
    Packed {
        codes: packed.codes,
        scales: packed.scales,
        amax: packed.amax.into_primitive(),
        layout: packed.layout,
    }
}

/// An MXFP8 matrix as a constant of the autodiff backend.
pub(super) fn mx_constant<B: Nvfp4Ops, C: CheckpointStrategy>(
    packed: MxPacked<B>,
) -> MxPacked<Autodiff<B, C>> {
    MxPacked {
        codes: packed.codes,
        scales: packed.scales,
        layout: packed.layout,
    }
}

/// An MXFP8 matrix of the backend that does the work.
fn mx_inner<B: Nvfp4Ops, C: CheckpointStrategy>(packed: MxPacked<Autodiff<B, C>>) -> MxPacked<B> {
    MxPacked {
        codes: packed.codes,
        scales: packed.scales,
        layout: packed.layout,
    }
}

/// An operand of the backend that does the work.
pub(super) fn inner_operand<B: Nvfp4Ops, C: CheckpointStrategy>(
    operand: Operand<Autodiff<B, C>>,
) -> Operand<B> {
    match operand {
        Operand::Nvfp4(packed) => Operand::Nvfp4(inner(packed)),
        Operand::Decoded(decoded) => Operand::Decoded(Decoded {
            values: decoded.values.into_primitive(),
            amax: decoded.amax.into_primitive(),
            layout: decoded.layout,
        }),
        Operand::Mxfp8(packed) => Operand::Mxfp8(mx_inner(packed)),
        Operand::Float(x, usage) => Operand::Float(x.into_primitive(), usage),
    }
}

/// A bias of the backend that does the work.
pub(super) fn inner_bias<B: Backend, C: CheckpointStrategy>(bias: Bias<Autodiff<B, C>>) -> Bias<B> {
    match bias {
        Bias::Absent => Bias::Absent,
        Bias::Vector(bias) => Bias::Vector(bias.into_primitive()),
    }
}
