//! The backward of [`nvfp4_linear`](Nvfp4Ops::nvfp4_linear).

use burn_core::backend::{
    Autodiff, AutodiffBackend, Backend, TensorMetadata,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    tensor::FloatTensor,
};
use burn_core::tensor::{FloatDType, Shape};
use nvfp4_kernels::PackedAxis;

use super::{
    Bias, LinearSpec, Nvfp4Ops, Packed, PackedPair, PairSpec, QuantizeSpec, float_dtype,
    weight_for_forward,
};

/// What a tracked product keeps until its backward: packed operands, and nothing that was not
/// quantized.
#[derive(Clone, Debug)]
pub(crate) struct Saved<B: Backend> {
    /// The column-wise copy of `x`, if the weight needs a gradient.
    x_col: Option<Packed<B>>,
    /// The row-wise copy of `w`, if the input needs a gradient.
    pub(crate) w_row: Option<Packed<B>>,
    x_dtype: FloatDType,
    w_dtype: FloatDType,
    /// Type of the bias, if there is one and it needs a gradient.
    bias_dtype: Option<FloatDType>,
    spec: LinearSpec,
}

/// Gradients of `x`, `w` and the bias: those that were asked for.
pub(crate) struct LinearGrads<B: Backend> {
    pub(crate) x: Option<FloatTensor<B>>,
    pub(crate) w: Option<FloatTensor<B>>,
    pub(crate) bias: Option<FloatTensor<B>>,
}

impl<B: Nvfp4Ops> Saved<B> {
    /// The gradients, from the gradient `dy` of the output (`[m, d_out]`).
    pub(crate) fn backward(self, dy: FloatTensor<B>) -> LinearGrads<B> {
        let bias = self
            .bias_dtype
            .map(|dtype| bias_grad::<B>(dy.clone(), dtype));
        let spec = self.spec;
        let (dy_row, dy_col) = match (&self.w_row, &self.x_col) {
            (Some(_), Some(_)) => {
                let pair = B::nvfp4_quantize_pair(
                    dy,
                    PairSpec::Blocks {
                        row: spec.dgrad,
                        col: spec.wgrad,
                        hadamard: spec.hadamard,
                    },
                );
                (Some(pair.row), Some(pair.col))
            }
            (Some(_), None) => {
                let row = QuantizeSpec {
                    axis: PackedAxis::Cols,
                    rounding: spec.dgrad,
                    hadamard: None,
                };
                (Some(B::nvfp4_quantize(dy, row)), None)
            }
            (None, Some(_)) => {
                let col = QuantizeSpec {
                    axis: PackedAxis::Rows,
                    rounding: spec.wgrad,
                    hadamard: spec.hadamard,
                };
                (None, Some(B::nvfp4_quantize(dy, col)))
            }
            (None, None) => (None, None),
        };
        let x = dy_row
            .zip(self.w_row)
            .map(|(dy, w)| B::nvfp4_matmul(dy, w, Bias::Absent, self.x_dtype));
        let w = self
            .x_col
            .zip(dy_col)
            .map(|(x, dy)| B::nvfp4_matmul(x, dy, Bias::Absent, self.w_dtype));
        LinearGrads { x, w, bias }
    }
}

/// The sum of `dy` over its rows, in `f32`, rounded once to the type of the bias.
fn bias_grad<B: Backend>(dy: FloatTensor<B>, dtype: FloatDType) -> FloatTensor<B> {
    let features = dy.shape()[1];
    let dy = cast::<B>(dy, FloatDType::F32);
    let sum = B::float_reshape(B::float_sum_dim(dy, 0), Shape::new([features]));
    cast::<B>(sum, dtype)
}

fn cast<B: Backend>(tensor: FloatTensor<B>, dtype: FloatDType) -> FloatTensor<B> {
    if float_dtype(tensor.dtype()) == dtype {
        tensor
    } else {
        B::float_cast(tensor, dtype)
    }
}

/// The product without a bias: parents `[x, w]`.
#[derive(Debug)]
struct Linear;

impl<B: Nvfp4Ops> Backward<B, 2> for Linear {
    type State = Saved<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let [x, w] = ops.parents;
        let found = ops.state.backward(grads.consume::<B>(&ops.node));
        for (node, grad) in [(x, found.x), (w, found.w)] {
            if let Some((node, grad)) = node.zip(grad) {
                grads.register::<B>(node.id, grad);
            }
        }
    }
}

/// The product with a bias: parents `[x, w, bias]`.
#[derive(Debug)]
struct LinearBias;

impl<B: Nvfp4Ops> Backward<B, 3> for LinearBias {
    type State = Saved<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 3>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let [x, w, bias] = ops.parents;
        let found = ops.state.backward(grads.consume::<B>(&ops.node));
        for (node, grad) in [(x, found.x), (w, found.w), (bias, found.bias)] {
            if let Some((node, grad)) = node.zip(grad) {
                grads.register::<B>(node.id, grad);
            }
        }
    }
}

/// The output, and what its backward needs of `x` and `w`.
///
/// `x_tracked` and `w_tracked` say which gradients will be asked for; a copy that only an unwanted
/// gradient would read is not made.
pub(crate) fn forward<B: Nvfp4Ops>(
    x: FloatTensor<B>,
    w: FloatTensor<B>,
    bias: Bias<B>,
    spec: LinearSpec,
    (x_tracked, w_tracked): (bool, bool),
    bias_dtype: Option<FloatDType>,
) -> (FloatTensor<B>, Saved<B>) {
    let x_dtype = float_dtype(x.dtype());
    let w_dtype = float_dtype(w.dtype());
    let row = LinearSpec::input_row();
    let (x_row, x_col) = if w_tracked {
        let PackedPair { row, col } = B::nvfp4_quantize_pair(
            x,
            PairSpec::Blocks {
                row: row.rounding,
                col: row.rounding,
                hadamard: spec.hadamard,
            },
        );
        (row, Some(col))
    } else {
        (B::nvfp4_quantize(x, row), None)
    };
    let (w_row, w_col) = if x_tracked {
        let PackedPair { row, col } = B::nvfp4_quantize_pair(w, spec.weight());
        (Some(row), col)
    } else {
        (None, weight_for_forward::<B>(w, &spec))
    };
    let y = B::nvfp4_matmul(x_row, w_col, bias, x_dtype);
    (
        y,
        Saved {
            x_col,
            w_row,
            x_dtype,
            w_dtype,
            bias_dtype,
            spec,
        },
    )
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

    fn nvfp4_dequantize(packed: Packed<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        Self::from_inner(B::nvfp4_dequantize(inner(packed), dtype))
    }

    fn nvfp4_matmul(
        a: Packed<Self>,
        b: Packed<Self>,
        bias: Bias<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let bias = match bias {
            Bias::Absent => Bias::Absent,
            Bias::Vector(bias) => Bias::Vector(bias.into_primitive()),
        };
        Self::from_inner(B::nvfp4_matmul(inner(a), inner(b), bias, dtype))
    }

    fn nvfp4_linear(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        bias: Bias<Self>,
        spec: LinearSpec,
    ) -> FloatTensor<Self> {
        let tracked = (x.is_tracked(), w.is_tracked());
        // The guards keep the parents alive until the step is registered.
        let (x, x_node) = x.into_parts();
        let (w, w_node) = w.into_parts();
        match bias {
            Bias::Absent => {
                match Linear
                    .prepare::<C>([x_node, w_node])
                    .compute_bound()
                    .stateful()
                {
                    OpsKind::Tracked(prep) => {
                        let (y, saved) = forward::<B>(x, w, Bias::Absent, spec, tracked, None);
                        prep.finish(saved, y)
                    }
                    OpsKind::UnTracked(prep) => {
                        prep.finish(B::nvfp4_linear(x, w, Bias::Absent, spec))
                    }
                }
            }
            Bias::Vector(bias) => {
                let bias_dtype = bias.is_tracked().then(|| float_dtype(bias.dtype()));
                let (bias, bias_node) = bias.into_parts();
                let bias = Bias::Vector(bias);
                let nodes = [x_node, w_node, bias_node];
                match LinearBias.prepare::<C>(nodes).compute_bound().stateful() {
                    OpsKind::Tracked(prep) => {
                        let (y, saved) = forward::<B>(x, w, bias, spec, tracked, bias_dtype);
                        prep.finish(saved, y)
                    }
                    OpsKind::UnTracked(prep) => prep.finish(B::nvfp4_linear(x, w, bias, spec)),
                }
            }
        }
    }
}

/// A packed matrix as a constant of the autodiff backend.
fn constant<B: Nvfp4Ops, C: CheckpointStrategy>(packed: Packed<B>) -> Packed<Autodiff<B, C>> {
    Packed {
        codes: packed.codes,
        scales: packed.scales,
        amax: <Autodiff<B, C> as AutodiffBackend>::from_inner(packed.amax),
        layout: packed.layout,
    }
}

/// A packed matrix of the backend that does the work.
fn inner<B: Nvfp4Ops, C: CheckpointStrategy>(packed: Packed<Autodiff<B, C>>) -> Packed<B> {
    Packed {
        codes: packed.codes,
        scales: packed.scales,
        amax: packed.amax.into_primitive(),
        layout: packed.layout,
    }
}
