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
use burn_core::tensor::{FloatDType, Shape};
use nvfp4_kernels::PackedAxis;

use super::context::WeightKey;
use super::{
    BackwardSource, Bias, EdenSpec, LinearContext, LinearSpec, MxPacked, Nvfp4Ops, Operand,
    OperandSpec, Packed, PackedPair, PairSpec, QuantizeSpec, float_dtype,
    operands::{again, both, cast, one},
};
use crate::telemetry::Probe;

/// What a tracked product keeps until its backward: the operands of the backward's products, in
/// their formats, and nothing else.
#[derive(Clone, Debug)]
pub(crate) struct Saved<B: Backend> {
    /// `x` for wgrad, if the weight needs a gradient.
    x: Option<Operand<B>>,
    /// `w` for dgrad, if the input needs a gradient.
    pub(crate) w: Option<Operand<B>>,
    x_dtype: FloatDType,
    w_dtype: FloatDType,
    /// Type of the bias, if there is one and it needs a gradient.
    bias_dtype: Option<FloatDType>,
    spec: LinearSpec,
    probe: Option<Probe>,
}

/// Gradients of `x`, `w` and the bias: those that were asked for.
pub(crate) struct LinearGrads<B: Backend> {
    pub(crate) x: Option<FloatTensor<B>>,
    pub(crate) w: Option<FloatTensor<B>>,
    pub(crate) bias: Option<FloatTensor<B>>,
}

/// What gives the gradients of a linear product.
pub(crate) trait GradientsOf<B: Backend>: Clone + Send + std::fmt::Debug + 'static {
    /// The gradients, from the gradient `dy` of the output (`[m, d_out]`).
    fn backward(self, dy: FloatTensor<B>) -> LinearGrads<B>;
}

impl<B: Nvfp4Ops> GradientsOf<B> for Saved<B> {
    fn backward(self, dy: FloatTensor<B>) -> LinearGrads<B> {
        let bias = self
            .bias_dtype
            .map(|dtype| bias_grad::<B>(dy.clone(), dtype));
        let (spec, dtype) = (self.spec, self.x_dtype);
        let (row, col) = (spec.dgrad_dy, spec.wgrad_dy);
        let probed = self.probe.as_ref().map(|probe| (probe, dy.clone()));
        let (dy_row, dy_col) = match (&self.w, &self.x) {
            (Some(_), Some(_)) => {
                let (row, col) = both::<B>(dy, &row, &col, dtype);
                (Some(row), Some(col))
            }
            (Some(_), None) => (Some(one::<B>(dy, &row, PackedAxis::Cols, dtype)), None),
            (None, Some(_)) => (None, Some(one::<B>(dy, &col, PackedAxis::Rows, dtype))),
            (None, None) => (None, None),
        };
        if let (Some((probe, dy)), Some(operand)) = (probed, &dy_row) {
            probe.look("dgrad.dy", &dy, operand, &spec.dgrad_dy);
        }
        let x = dy_row
            .zip(self.w)
            .map(|(dy, w)| B::nvfp4_product(dy, w, Bias::Absent, self.x_dtype));
        let w = self
            .x
            .zip(dy_col)
            .map(|(x, dy)| B::nvfp4_product(x, dy, Bias::Absent, self.w_dtype));
        LinearGrads { x, w, bias }
    }
}

/// The sum of `dy` over its rows, in `f32`, rounded once to the type of the bias.
///
/// One sum for each feature leaves a GPU idle. The rows are summed in two steps: the first has up to 256
/// times as many sums.
fn bias_grad<B: Nvfp4Ops>(dy: FloatTensor<B>, dtype: FloatDType) -> FloatTensor<B> {
    let [rows, features] = [dy.shape()[0], dy.shape()[1]];
    let dy = cast::<B>(dy, FloatDType::F32);
    let parts = 1 << rows.trailing_zeros().min(8);
    let sums = match rows {
        0 => dy,
        _ => {
            let dy = B::float_reshape(dy, Shape::new([rows / parts, parts, features]));
            B::float_reshape(B::float_sum_dim(dy, 0), Shape::new([parts, features]))
        }
    };
    let sum = B::float_reshape(B::float_sum_dim(sums, 0), Shape::new([features]));
    cast::<B>(sum, dtype)
}

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

/// Which gradients will be asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tracked {
    pub(crate) x: bool,
    pub(crate) w: bool,
    /// Type of the bias, if there is one and its gradient will be asked for.
    pub(crate) bias: Option<FloatDType>,
}

/// The product without a bias, of which an `S` is kept: parents `[x, w]`.
#[derive(Debug)]
struct Linear<S>(PhantomData<S>);

impl<B: Backend, S: GradientsOf<B>> Backward<B, 2> for Linear<S> {
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

impl<B: Backend, S: GradientsOf<B>> Backward<B, 3> for LinearBias<S> {
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
    forward: impl FnOnce(FloatTensor<B>, FloatTensor<B>, Bias<B>, Tracked) -> (FloatTensor<B>, S),
) -> FloatTensor<Autodiff<B, C>>
where
    B: Backend,
    C: CheckpointStrategy,
    S: GradientsOf<B>,
{
    let tracked = Tracked {
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
            let tracked = Tracked {
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

/// The output of a product whose weight is not kept, and what its backward needs of `x` and `w`, of which
/// `tracked` says whether gradients will be asked for.
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub(crate) fn forward<B: Nvfp4Ops>(
    x: FloatTensor<B>,
    w: FloatTensor<B>,
    bias: Bias<B>,
    spec: LinearSpec,
    tracked: Tracked,
    probe: Option<Probe>,
) -> (FloatTensor<B>, Saved<B>) {
    let product = Product {
        x,
        w,
        bias,
        spec,
        context: LinearContext {
            weights: None,
            probe,
        },
        w_node: 0,
        tracked,
    };
    product.forward()
}

/// A product to compute, with what decides what else is kept of it.
struct Product<B: Nvfp4Ops> {
    x: FloatTensor<B>,
    w: FloatTensor<B>,
    bias: Bias<B>,
    spec: LinearSpec,
    context: LinearContext,
    /// Identity of `w`.
    w_node: u64,
    /// An operand that only an unwanted gradient would read is not made.
    tracked: Tracked,
}

impl<B: Nvfp4Ops> Product<B> {
    /// The output, and what its backward needs of `x` and `w`.
    fn forward(self) -> (FloatTensor<B>, Saved<B>) {
        let x_dtype = float_dtype(self.x.dtype());
        let w_dtype = float_dtype(self.w.dtype());
        let spec = self.spec;
        let (w, saved_w) = self.weight(x_dtype);
        let probe = self.context.probe.clone();
        let probed = probe.as_ref().map(|probe| (probe, self.x.clone()));
        if let Some(probe) = &probe {
            probe.look("fprop.w", &self.w, &w, &spec.fprop_w);
        }
        let (x, saved_x) = match (self.tracked.w, spec.source) {
            (false, _) => (
                one::<B>(self.x, &spec.fprop_x, PackedAxis::Cols, x_dtype),
                None,
            ),
            (true, BackwardSource::Original) => {
                let (x, saved) = both::<B>(self.x, &spec.fprop_x, &spec.wgrad_x, x_dtype);
                (x, Some(saved))
            }
            (true, BackwardSource::Forward) => {
                let x = one::<B>(self.x, &spec.fprop_x, PackedAxis::Cols, x_dtype);
                let saved = again::<B>(x.clone(), &spec.wgrad_x, PackedAxis::Rows, x_dtype);
                (x, Some(saved))
            }
        };
        if let Some((probe, source)) = probed {
            probe.look("fprop.x", &source, &x, &spec.fprop_x);
        }
        let y = B::nvfp4_product(x, w, self.bias, x_dtype);
        let saved = Saved {
            x: saved_x,
            w: saved_w,
            x_dtype,
            w_dtype,
            bias_dtype: self.tracked.bias,
            spec,
            probe,
        };
        (y, saved)
    }

    /// `w` for the forward, and for dgrad if that will be asked for.
    fn weight(&self, dtype: FloatDType) -> (Operand<B>, Option<Operand<B>>) {
        let LinearSpec {
            fprop_w,
            dgrad_w,
            source,
            ..
        } = self.spec;
        // What is not quantized is not worth keeping, and what is drawn is drawn afresh.
        let cache = self
            .context
            .weights
            .as_ref()
            .filter(|_| fprop_w.is_deterministic() && fprop_w != OperandSpec::HighPrecision);
        let device = cache.map(|_| format!("{:?}", self.w.device()));
        let key = WeightKey {
            node: self.w_node,
            dtype,
            spec: LinearSpec {
                fprop_w,
                dgrad_w,
                source,
                ..LinearSpec::high_precision()
            },
        };
        type Kept<B> = (Operand<B>, Option<Operand<B>>);
        let kept: Option<Kept<B>> = cache
            .zip(device.as_deref())
            .and_then(|(cache, device)| cache.get(device, &key));
        let (forward, backward) = match kept {
            Some((forward, Some(backward))) => (forward, Some(backward)),
            Some((forward, None)) if !self.tracked.x => (forward, None),
            Some((forward, None)) if !dgrad_w.is_deterministic() => {
                let backward = self.dgrad_weight(&forward, dtype);
                return (forward, Some(backward));
            }
            _ => {
                let is_twin = source == BackwardSource::Original
                    || matches!((fprop_w, dgrad_w),
                        (OperandSpec::Tiles(a), OperandSpec::Tiles(b)) if a == b);
                let made = if !self.tracked.x {
                    (
                        one::<B>(self.w.clone(), &fprop_w, PackedAxis::Rows, dtype),
                        None,
                    )
                } else if is_twin {
                    let (row, col) = both::<B>(self.w.clone(), &dgrad_w, &fprop_w, dtype);
                    (col, Some(row))
                } else {
                    let forward = one::<B>(self.w.clone(), &fprop_w, PackedAxis::Rows, dtype);
                    let backward = self.dgrad_weight(&forward, dtype);
                    (forward, Some(backward))
                };
                if let Some((cache, device)) = cache.zip(device) {
                    let (forward, backward) = made.clone();
                    let backward = backward.filter(|_| dgrad_w.is_deterministic());
                    cache.put(&device, key, (forward, backward));
                }
                made
            }
        };
        (forward, backward.filter(|_| self.tracked.x))
    }

    /// `w` for dgrad, given what the forward multiplies.
    fn dgrad_weight(&self, forward: &Operand<B>, dtype: FloatDType) -> Operand<B> {
        let (spec, axis) = (&self.spec.dgrad_w, PackedAxis::Cols);
        match self.spec.source {
            BackwardSource::Original => one::<B>(self.w.clone(), spec, axis, dtype),
            BackwardSource::Forward => again::<B>(forward.clone(), spec, axis, dtype),
        }
    }
}

impl<B: Nvfp4Ops, C: CheckpointStrategy> Nvfp4Ops for Autodiff<B, C> {
    fn nvfp4_quantize(x: FloatTensor<Self>, spec: QuantizeSpec) -> Packed<Self> {
        constant(B::nvfp4_quantize(x.into_primitive(), spec))
    }

    fn nvfp4_quantize_pair(x: FloatTensor<Self>, spec: PairSpec) -> PackedPair<Self> {
        let PackedPair { row, col } = B::nvfp4_quantize_pair(x.into_primitive(), spec);
        PackedPair {
            row: constant(row),
            col: constant(col),
        }
    }

    fn nvfp4_eden(x: FloatTensor<Self>, spec: EdenSpec) -> Packed<Self> {
        constant(B::nvfp4_eden(x.into_primitive(), spec))
    }

    fn nvfp4_eden_packed(packed: Packed<Self>, spec: EdenSpec) -> Packed<Self> {
        constant(B::nvfp4_eden_packed(inner(packed), spec))
    }

    fn nvfp4_mx_quantize(x: FloatTensor<Self>, axis: PackedAxis) -> MxPacked<Self> {
        mx_constant(B::nvfp4_mx_quantize(x.into_primitive(), axis))
    }

    fn nvfp4_mx_requantize(
        packed: Packed<Self>,
        axis: PackedAxis,
        via: FloatDType,
    ) -> MxPacked<Self> {
        mx_constant(B::nvfp4_mx_requantize(inner(packed), axis, via))
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
        let w_node = w.id().value;
        linear(x, w, bias, |x, w, bias, tracked| {
            let product = Product::<B> {
                x,
                w,
                bias,
                spec,
                context,
                w_node,
                tracked,
            };
            product.forward()
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
fn mx_constant<B: Nvfp4Ops, C: CheckpointStrategy>(
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
        Operand::Mxfp8(packed) => Operand::Mxfp8(mx_inner(packed)),
        Operand::Float(x, axis) => Operand::Float(x.into_primitive(), axis),
    }
}

/// A bias of the backend that does the work.
pub(super) fn inner_bias<B: Backend, C: CheckpointStrategy>(bias: Bias<Autodiff<B, C>>) -> Bias<B> {
    match bias {
        Bias::Absent => Bias::Absent,
        Bias::Vector(bias) => Bias::Vector(bias.into_primitive()),
    }
}
