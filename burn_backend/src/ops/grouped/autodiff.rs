//! The backwards of [`nvfp4_grouped_linear`](Nvfp4GroupedOps::nvfp4_grouped_linear),
//! [`nvfp4_gather_rows`](Nvfp4GroupedOps::nvfp4_gather_rows) and
//! [`nvfp4_combine_rows`](Nvfp4GroupedOps::nvfp4_combine_rows).

use burn_core::backend::{
    Autodiff, AutodiffBackend, Backend, Scalar, TensorMetadata,
    autodiff::{
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    tensor::{FloatTensor, IntTensor},
};
use burn_core::tensor::{FloatDType, Shape};

use super::super::autodiff::{constant, inner, register};
use super::super::operands::cast;
use super::super::{Bias, Packed, PackedPair, PairSpec, QuantizeSpec, float_dtype};
use super::{
    GroupPairSpec, GroupedPrecision, GroupedSpec, Nvfp4GroupedOps, rows_at, stack_for_forward,
};

/// The operands of a product in NVFP4, and nothing that was not quantized.
#[derive(Clone, Debug)]
struct PackedOperands<B: Backend> {
    /// The column-wise copy of `x`, if the weight needs a gradient.
    x_col: Option<Packed<B>>,
    /// The row-wise copies of `w`, if the input needs a gradient.
    w_row: Option<Packed<B>>,
    spec: GroupedSpec,
}

/// The operands that a tracked product keeps until its backward.
#[derive(Clone, Debug)]
enum Operands<B: Backend> {
    /// Packed ones.
    Nvfp4(Box<PackedOperands<B>>),
    /// `x`, if the weight needs a gradient, and `w`, if the input needs one.
    Input {
        x: Option<FloatTensor<B>>,
        w: Option<FloatTensor<B>>,
    },
}

/// What a tracked product keeps until its backward.
#[derive(Clone, Debug)]
struct Saved<B: Backend> {
    operands: Operands<B>,
    offsets: IntTensor<B>,
    tokens: usize,
    x_dtype: FloatDType,
    w_dtype: FloatDType,
    /// Type of the bias, if there is one and it needs a gradient.
    bias_dtype: Option<FloatDType>,
}

/// Gradients of `x`, `w` and the bias: those that were asked for.
struct LinearGrads<B: Backend> {
    x: Option<FloatTensor<B>>,
    w: Option<FloatTensor<B>>,
    bias: Option<FloatTensor<B>>,
}

impl<B: Nvfp4GroupedOps> Saved<B> {
    /// The gradients, from the gradient `dy` of the output (`[tokens, d_out]`).
    fn backward(self, dy: FloatTensor<B>) -> LinearGrads<B> {
        let Self {
            operands,
            offsets,
            tokens,
            x_dtype,
            w_dtype,
            bias_dtype,
        } = self;
        let bias = bias_dtype
            .map(|dtype| cast::<B>(B::nvfp4_group_sums(dy.clone(), offsets.clone()), dtype));
        let (x, w) = match operands {
            Operands::Nvfp4(packed) => {
                let PackedOperands { x_col, w_row, spec } = *packed;
                let (dy_row, dy_col) = match (&w_row, &x_col) {
                    (Some(_), Some(_)) => {
                        let pair =
                            B::nvfp4_quantize_groups_pair(dy, offsets.clone(), spec.gradient);
                        (Some(pair.row), Some(pair.col))
                    }
                    (Some(_), None) => {
                        let spec = spec.gradient.row_alone();
                        (
                            Some(B::nvfp4_quantize_groups(dy, offsets.clone(), spec)),
                            None,
                        )
                    }
                    (None, Some(_)) => {
                        let spec = spec.gradient.col_alone();
                        (
                            None,
                            Some(B::nvfp4_quantize_groups(dy, offsets.clone(), spec)),
                        )
                    }
                    (None, None) => (None, None),
                };
                let x = dy_row.zip(w_row).map(|(dy, w)| {
                    B::nvfp4_matmul_group_rows(dy, w, Bias::Absent, offsets.clone(), x_dtype)
                });
                let w = x_col
                    .zip(dy_col)
                    .map(|(x, dy)| B::nvfp4_matmul_group_depth(x, dy, offsets, tokens, w_dtype));
                (x, w)
            }
            Operands::Input { x, w } => {
                let dx = w.map(|w| {
                    let dy = dy.clone();
                    B::nvfp4_float_group_rows(dy, w, Bias::Absent, offsets.clone(), true)
                });
                let dw = x.map(|x| B::nvfp4_float_group_depth(x, dy, offsets, w_dtype));
                (dx, dw)
            }
        };
        LinearGrads { x, w, bias }
    }
}

/// The product without a bias: parents `[x, w]`.
#[derive(Debug)]
struct Linear;

impl<B: Nvfp4GroupedOps> Backward<B, 2> for Linear {
    type State = Saved<B>;

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
struct LinearBias;

impl<B: Nvfp4GroupedOps> Backward<B, 3> for LinearBias {
    type State = Saved<B>;

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

/// The output, and what its backward needs of `x` and `w`.
///
/// `x_tracked` and `w_tracked` say which gradients will be asked for; what only an unwanted gradient
/// would read is neither made nor kept.
fn forward<B: Nvfp4GroupedOps>(
    x: FloatTensor<B>,
    w: FloatTensor<B>,
    bias: Bias<B>,
    offsets: IntTensor<B>,
    precision: GroupedPrecision,
    (x_tracked, w_tracked): (bool, bool),
    bias_dtype: Option<FloatDType>,
) -> (FloatTensor<B>, Saved<B>) {
    let x_dtype = float_dtype(x.dtype());
    let w_dtype = float_dtype(w.dtype());
    let tokens = x.shape()[0];
    let (y, operands) = match precision {
        GroupedPrecision::Nvfp4(spec) => {
            let (x_row, x_col) = if w_tracked {
                let pair = B::nvfp4_quantize_groups_pair(x, offsets.clone(), spec.input);
                (pair.row, Some(pair.col))
            } else {
                let row = spec.input.row_alone();
                (B::nvfp4_quantize_groups(x, offsets.clone(), row), None)
            };
            let (w_row, w_col) = if x_tracked {
                let PackedPair { row, col } = B::nvfp4_quantize_stack_pair(w, spec.weight);
                (Some(row), col)
            } else {
                (None, stack_for_forward::<B>(w, &spec))
            };
            let y = B::nvfp4_matmul_group_rows(x_row, w_col, bias, offsets.clone(), x_dtype);
            let packed = PackedOperands { x_col, w_row, spec };
            (y, Operands::Nvfp4(Box::new(packed)))
        }
        GroupedPrecision::Input => {
            let y = B::nvfp4_float_group_rows(x.clone(), w.clone(), bias, offsets.clone(), false);
            let operands = Operands::Input {
                x: w_tracked.then_some(x),
                w: x_tracked.then_some(w),
            };
            (y, operands)
        }
    };
    let saved = Saved {
        operands,
        offsets,
        tokens,
        x_dtype,
        w_dtype,
        bias_dtype,
    };
    (y, saved)
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
        let dtype = float_dtype(dy.dtype());
        let dx = (0..inverse.shape()[1])
            .map(|copy| rows_at::<B>(dy.clone(), inverse.clone(), copy))
            .reduce(B::float_add)
            .map(|sum| cast::<B>(sum, dtype));
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
    /// The rows, if the weights need a gradient.
    y: Option<FloatTensor<B>>,
    /// The weights, if the rows need a gradient.
    weights: Option<FloatTensor<B>>,
    places: IntTensor<B>,
    choices: IntTensor<B>,
    y_dtype: FloatDType,
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
        let dout = cast::<B>(grads.consume::<B>(&ops.node), FloatDType::F32);
        let Combined {
            y,
            weights,
            places,
            choices,
            y_dtype,
        } = ops.state;
        let [tokens, copies] = [places.shape()[0], places.shape()[1]];
        let slots = tokens * copies;
        // Each slot went to one token, with one weight.
        let dy = weights.map(|weights| {
            let weights = B::float_reshape(weights, Shape::new([slots, 1]));
            let weights = B::float_select(weights, 0, choices.clone());
            let token = B::int_div_scalar(choices, Scalar::from(copies as i64));
            let rows = B::float_select(dout.clone(), 0, token);
            cast::<B>(B::float_mul(rows, weights), y_dtype)
        });
        let dweights = y.map(|y| {
            let columns = (0..copies).map(|copy| {
                let picked = rows_at::<B>(y.clone(), places.clone(), copy);
                B::float_sum_dim(B::float_mul(picked, dout.clone()), 1)
            });
            B::float_cat(columns.collect(), 1)
        });
        register::<B, _>(
            ops.parents.map(|node| node.map(|node| node.id)),
            [dy, dweights],
            grads,
        );
    }
}

impl<B: Nvfp4GroupedOps, C: CheckpointStrategy> Nvfp4GroupedOps for Autodiff<B, C> {
    fn nvfp4_quantize_stack(w: FloatTensor<Self>, spec: QuantizeSpec) -> Packed<Self> {
        constant(B::nvfp4_quantize_stack(w.into_primitive(), spec))
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

    fn nvfp4_matmul_group_rows(
        a: Packed<Self>,
        b: Packed<Self>,
        bias: Bias<Self>,
        offsets: IntTensor<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        let bias = inner_bias(bias);
        Self::from_inner(B::nvfp4_matmul_group_rows(
            inner(a),
            inner(b),
            bias,
            offsets,
            dtype,
        ))
    }

    fn nvfp4_matmul_group_depth(
        a: Packed<Self>,
        b: Packed<Self>,
        offsets: IntTensor<Self>,
        tokens: usize,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        Self::from_inner(B::nvfp4_matmul_group_depth(
            inner(a),
            inner(b),
            offsets,
            tokens,
            dtype,
        ))
    }

    fn nvfp4_group_sums(x: FloatTensor<Self>, offsets: IntTensor<Self>) -> FloatTensor<Self> {
        Self::from_inner(B::nvfp4_group_sums(x.into_primitive(), offsets))
    }

    fn nvfp4_float_group_rows(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        bias: Bias<Self>,
        offsets: IntTensor<Self>,
        transposed: bool,
    ) -> FloatTensor<Self> {
        Self::from_inner(B::nvfp4_float_group_rows(
            x.into_primitive(),
            w.into_primitive(),
            inner_bias(bias),
            offsets,
            transposed,
        ))
    }

    fn nvfp4_float_group_depth(
        x: FloatTensor<Self>,
        dy: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        dtype: FloatDType,
    ) -> FloatTensor<Self> {
        Self::from_inner(B::nvfp4_float_group_depth(
            x.into_primitive(),
            dy.into_primitive(),
            offsets,
            dtype,
        ))
    }

    fn nvfp4_grouped_linear(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        bias: Bias<Self>,
        offsets: IntTensor<Self>,
        precision: GroupedPrecision,
    ) -> FloatTensor<Self> {
        let tracked = (x.is_tracked(), w.is_tracked());
        // The guards keep the parents alive until the step is registered.
        let (x, x_node) = x.into_parts();
        let (w, w_node) = w.into_parts();
        match bias {
            Bias::Absent => {
                let nodes = [x_node, w_node];
                match Linear.prepare::<C>(nodes).compute_bound().stateful() {
                    OpsKind::Tracked(prep) => {
                        let (y, saved) =
                            forward::<B>(x, w, Bias::Absent, offsets, precision, tracked, None);
                        prep.finish(saved, y)
                    }
                    OpsKind::UnTracked(prep) => {
                        let bias = Bias::Absent;
                        prep.finish(B::nvfp4_grouped_linear(x, w, bias, offsets, precision))
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
                        let (y, saved) =
                            forward::<B>(x, w, bias, offsets, precision, tracked, bias_dtype);
                        prep.finish(saved, y)
                    }
                    OpsKind::UnTracked(prep) => {
                        prep.finish(B::nvfp4_grouped_linear(x, w, bias, offsets, precision))
                    }
                }
            }
        }
    }

    fn nvfp4_gather_rows(
        x: FloatTensor<Self>,
        index: IntTensor<Self>,
        inverse: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let (x, node) = x.into_parts();
        match GatherRows.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let y = B::nvfp4_gather_rows(x, index, inverse.clone());
                prep.finish(Gathered { inverse }, y)
            }
            OpsKind::UnTracked(prep) => prep.finish(B::nvfp4_gather_rows(x, index, inverse)),
        }
    }

    fn nvfp4_combine_rows(
        y: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        places: IntTensor<Self>,
        choices: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let (y_tracked, weights_tracked) = (y.is_tracked(), weights.is_tracked());
        let (y, y_node) = y.into_parts();
        let (weights, weights_node) = weights.into_parts();
        let nodes = [y_node, weights_node];
        match CombineRows.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let saved = Combined {
                    y: weights_tracked.then(|| y.clone()),
                    weights: y_tracked.then(|| weights.clone()),
                    places: places.clone(),
                    choices: choices.clone(),
                    y_dtype: float_dtype(y.dtype()),
                };
                prep.finish(saved, B::nvfp4_combine_rows(y, weights, places, choices))
            }
            OpsKind::UnTracked(prep) => {
                prep.finish(B::nvfp4_combine_rows(y, weights, places, choices))
            }
        }
    }
}

/// A bias of the backend that does the work.
fn inner_bias<B: Backend, C: CheckpointStrategy>(bias: Bias<Autodiff<B, C>>) -> Bias<B> {
    match bias {
        Bias::Absent => Bias::Absent,
        Bias::Vector(bias) => Bias::Vector(bias.into_primitive()),
    }
}
