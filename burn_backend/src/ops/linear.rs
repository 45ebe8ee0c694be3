//! What a linear layer computes when gradients will be asked for: the operands of its three products, made
//! once each, kept until the backward, and, for the weight, until it changes.
//!
//! One implementation for a weight that multiplies all rows and for a stack of them, one for each group of
//! rows: a [`LinearBackend`] makes the operands and multiplies them.

use burn_core::backend::{Backend, TensorMetadata, tensor::FloatTensor, tensor::IntTensor};
use burn_core::tensor::{FloatDType, Shape};
use nvfp4_kernels::{Storage, Usage};

use super::context::Slot;
use super::operands::{cast, quantize, quantize_pair, requantize, storage_of};
use super::probe::OperandSource;
use super::{
    BackwardSource, Bias, LinearContext, LinearSpec, Nvfp4Ops, Operand, OperandSpec, float_dtype,
};

/// Gradients of `x`, `w` and the bias, as far as they are required.
pub(crate) struct LinearGradients<B: Backend> {
    pub(crate) x: Option<FloatTensor<B>>,
    pub(crate) w: Option<FloatTensor<B>>,
    pub(crate) bias: Option<FloatTensor<B>>,
}

/// The state of a linear layer between forward and backward.
pub(crate) trait LinearBackward<B: Backend>:
    Clone + Send + std::fmt::Debug + 'static
{
    /// The gradients, from the gradient `dy` of the output (`[m, d_out]`).
    fn backward(self, dy: FloatTensor<B>) -> LinearGradients<B>;
}

/// Which gradients are required.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RequiresGrad {
    pub(crate) x: bool,
    pub(crate) w: bool,
    /// Type of the bias, if there is one and its gradient is required.
    pub(crate) bias: Option<FloatDType>,
}

/// Which rows of the input a weight multiplies, and with what operations.
///
/// `dtype` is the type of the activations, which operands that are not quantized have.
pub(crate) trait LinearBackend<B: Nvfp4Ops>:
    Clone + Send + std::fmt::Debug + 'static
{
    /// The form in which a product of what `specs` make, `m` x `n` with a contraction of `k`, takes an operand of
    /// rows fastest.
    fn form(
        &self,
        device: &B::Device,
        specs: [&OperandSpec; 2],
        shape: (usize, usize, usize),
    ) -> Storage;

    /// The operand of `x`, or of its gradient, contracted along `usage`, in 1x16 blocks in the form `form`.
    fn rows(
        &self,
        x: FloatTensor<B>,
        spec: &OperandSpec,
        usage: Usage,
        dtype: FloatDType,
        form: Storage,
    ) -> Operand<B>;

    /// Both of them: row-wise, column-wise, each in its form.
    fn rows_both(
        &self,
        x: FloatTensor<B>,
        row: &OperandSpec,
        col: &OperandSpec,
        dtype: FloatDType,
        forms: [Storage; 2],
    ) -> (Operand<B>, Operand<B>);

    /// The operand along the rows, of the values that the row-wise operand `forward` stands for.
    fn rows_again(&self, forward: Operand<B>, spec: &OperandSpec, dtype: FloatDType) -> Operand<B>;

    /// The operand of the weight, contracted along `usage`.
    fn weight(
        &self,
        w: FloatTensor<B>,
        spec: &OperandSpec,
        usage: Usage,
        dtype: FloatDType,
    ) -> Operand<B>;

    /// Both of them: row-wise, column-wise.
    fn weight_both(
        &self,
        w: FloatTensor<B>,
        row: &OperandSpec,
        col: &OperandSpec,
        dtype: FloatDType,
    ) -> (Operand<B>, Operand<B>);

    /// The row-wise operand, of the values that the column-wise operand `forward` stands for.
    fn weight_again(
        &self,
        forward: Operand<B>,
        spec: &OperandSpec,
        dtype: FloatDType,
    ) -> Operand<B>;

    /// The product of rows with the weight.
    fn product(
        &self,
        x: Operand<B>,
        w: Operand<B>,
        bias: Bias<B>,
        dtype: FloatDType,
    ) -> FloatTensor<B>;

    /// The product along the rows: the gradient of the weight.
    fn weight_grad(&self, x: Operand<B>, dy: Operand<B>, dtype: FloatDType) -> FloatTensor<B>;

    /// The sum of `dy` over the rows of each bias, in `f32`.
    fn bias_grad(&self, dy: FloatTensor<B>) -> FloatTensor<B>;

    /// Where each group of rows begins, if there are groups.
    fn offsets(&self) -> Option<&IntTensor<B>>;
}

/// One weight for all rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dense;

impl<B: Nvfp4Ops> LinearBackend<B> for Dense {
    fn form(
        &self,
        device: &B::Device,
        specs: [&OperandSpec; 2],
        shape: (usize, usize, usize),
    ) -> Storage {
        storage_of::<B>(device, specs, shape)
    }

    fn rows(
        &self,
        x: FloatTensor<B>,
        spec: &OperandSpec,
        usage: Usage,
        dtype: FloatDType,
        form: Storage,
    ) -> Operand<B> {
        quantize::<B>(x, spec, usage, dtype, form)
    }

    fn rows_both(
        &self,
        x: FloatTensor<B>,
        row: &OperandSpec,
        col: &OperandSpec,
        dtype: FloatDType,
        forms: [Storage; 2],
    ) -> (Operand<B>, Operand<B>) {
        quantize_pair::<B>(x, row, col, dtype, forms)
    }

    fn rows_again(&self, forward: Operand<B>, spec: &OperandSpec, dtype: FloatDType) -> Operand<B> {
        requantize::<B>(forward, spec, Usage::Columnwise, dtype)
    }

    fn weight(
        &self,
        w: FloatTensor<B>,
        spec: &OperandSpec,
        usage: Usage,
        dtype: FloatDType,
    ) -> Operand<B> {
        quantize::<B>(w, spec, usage, dtype, Storage::Packed)
    }

    fn weight_both(
        &self,
        w: FloatTensor<B>,
        row: &OperandSpec,
        col: &OperandSpec,
        dtype: FloatDType,
    ) -> (Operand<B>, Operand<B>) {
        quantize_pair::<B>(w, row, col, dtype, [Storage::Packed; 2])
    }

    fn weight_again(
        &self,
        forward: Operand<B>,
        spec: &OperandSpec,
        dtype: FloatDType,
    ) -> Operand<B> {
        requantize::<B>(forward, spec, Usage::Rowwise, dtype)
    }

    fn product(
        &self,
        x: Operand<B>,
        w: Operand<B>,
        bias: Bias<B>,
        dtype: FloatDType,
    ) -> FloatTensor<B> {
        B::nvfp4_product(x, w, bias, dtype)
    }

    fn weight_grad(&self, x: Operand<B>, dy: Operand<B>, dtype: FloatDType) -> FloatTensor<B> {
        B::nvfp4_product(x, dy, Bias::Absent, dtype)
    }

    /// One sum for each feature leaves a GPU idle. The rows are summed in two steps: the first has up to
    /// 256 times as many sums.
    fn bias_grad(&self, dy: FloatTensor<B>) -> FloatTensor<B> {
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
        B::float_reshape(B::float_sum_dim(sums, 0), Shape::new([features]))
    }

    fn offsets(&self) -> Option<&IntTensor<B>> {
        None
    }
}

/// What a tracked product keeps until its backward: the operands of the backward's products, in
/// their formats, and nothing else.
#[derive(Clone, Debug)]
pub(crate) struct SavedForBackward<B: Backend, G = Dense> {
    /// `x` for wgrad, if the weight needs a gradient.
    x: Option<Operand<B>>,
    /// `w` for dgrad, if the input needs a gradient.
    pub(crate) w: Option<Operand<B>>,
    /// Columns of `x`, rows of `w`.
    d_in: usize,
    x_dtype: FloatDType,
    w_dtype: FloatDType,
    /// Type of the bias, if there is one and it needs a gradient.
    bias_dtype: Option<FloatDType>,
    spec: LinearSpec,
    /// Without the weight's operands.
    context: LinearContext,
    grouping: G,
}

impl<B: Nvfp4Ops, G: LinearBackend<B>> LinearBackward<B> for SavedForBackward<B, G> {
    fn backward(self, dy: FloatTensor<B>) -> LinearGradients<B> {
        let (spec, dtype, grouping) = (self.spec, self.x_dtype, &self.grouping);
        let bias = self
            .bias_dtype
            .map(|dtype| cast::<B>(grouping.bias_grad(dy.clone()), dtype));
        let (row, col) = (spec.dgrad_dy, spec.wgrad_dy);
        let probe = self.context.probe.as_ref();
        let probed = probe.map(|probe| (probe, dy.clone()));
        let (device, tokens, d_out) = (dy.device(), dy.shape()[0], dy.shape()[1]);
        let form = |specs, shape| {
            self.context
                .storage(|| grouping.form(&device, specs, shape))
        };
        let row_form = form([&row, &spec.dgrad_w], (tokens, self.d_in, d_out));
        let col_form = form([&spec.wgrad_x, &col], (self.d_in, d_out, tokens));
        let (dy_row, dy_col) = match (&self.w, &self.x) {
            (Some(_), Some(_)) => {
                let forms = [row_form, col_form];
                let (row, col) = grouping.rows_both(dy, &row, &col, dtype, forms);
                (Some(row), Some(col))
            }
            (Some(_), None) => {
                let row = grouping.rows(dy, &row, Usage::Rowwise, dtype, row_form);
                (Some(row), None)
            }
            (None, Some(_)) => {
                let col = grouping.rows(dy, &col, Usage::Columnwise, dtype, col_form);
                (None, Some(col))
            }
            (None, None) => (None, None),
        };
        if let Some((probe, dy)) = probed {
            if let Some(operand) = &dy_row {
                let source = OperandSource::rows("dgrad.dy", dy.clone(), grouping.offsets());
                probe.record(source, operand, &row);
            }
            if let Some(operand) = &dy_col {
                let source = OperandSource::columns("wgrad.dy", dy, grouping.offsets());
                probe.record(source, operand, &col);
            }
        }
        let x = dy_row
            .zip(self.w)
            .map(|(dy, w)| grouping.product(dy, w, Bias::Absent, self.x_dtype));
        let w = self
            .x
            .zip(dy_col)
            .map(|(x, dy)| grouping.weight_grad(x, dy, self.w_dtype));
        LinearGradients { x, w, bias }
    }
}

/// A product to compute, with what decides what else is kept of it.
pub(crate) struct LinearRequest<B: Nvfp4Ops, G> {
    pub(crate) x: FloatTensor<B>,
    pub(crate) w: FloatTensor<B>,
    pub(crate) bias: Bias<B>,
    pub(crate) spec: LinearSpec,
    pub(crate) context: LinearContext,
    /// An operand that only an unwanted gradient would read is not made.
    pub(crate) tracked: RequiresGrad,
    pub(crate) grouping: G,
}

impl<B: Nvfp4Ops, G: LinearBackend<B>> LinearRequest<B, G> {
    /// The output, and what its backward needs of `x` and `w`.
    pub(crate) fn forward(self) -> (FloatTensor<B>, SavedForBackward<B, G>) {
        let x_dtype = float_dtype(self.x.dtype());
        let w_dtype = float_dtype(self.w.dtype());
        let (spec, grouping) = (self.spec, &self.grouping);
        let (w, saved_w) = self.weight(x_dtype);
        let context = self.context.without_weight();
        let probe = context.probe.as_ref();
        let probed = probe.map(|probe| (probe, self.x.clone()));
        let (device, tokens, d_in) = (self.x.device(), self.x.shape()[0], self.x.shape()[1]);
        let shape = (tokens, *self.w.shape().last().expect("a matrix"), d_in);
        let specs = [&spec.fprop_x, &spec.fprop_w];
        let form = || context.storage(|| grouping.form(&device, specs, shape));
        if let Some(probe) = probe {
            let source = OperandSource::weight("fprop.w", self.w.clone());
            probe.record(source, &w, &spec.fprop_w);
        }
        let (x, saved_x) = match (self.tracked.w, spec.source) {
            (false, _) => (
                grouping.rows(self.x, &spec.fprop_x, Usage::Rowwise, x_dtype, form()),
                None,
            ),
            (true, BackwardSource::Original) => {
                let (row, col) = (&spec.fprop_x, &spec.wgrad_x);
                let forms = [form(), Storage::Packed];
                let (x, saved) = grouping.rows_both(self.x, row, col, x_dtype, forms);
                (x, Some(saved))
            }
            (true, BackwardSource::Forward) => {
                let (row, form) = (&spec.fprop_x, Storage::Packed);
                let x = grouping.rows(self.x, row, Usage::Rowwise, x_dtype, form);
                let saved = grouping.rows_again(x.clone(), &spec.wgrad_x, x_dtype);
                (x, Some(saved))
            }
        };
        if let Some((probe, x_source)) = probed {
            let source = OperandSource::rows("fprop.x", x_source.clone(), grouping.offsets());
            probe.record(source, &x, &spec.fprop_x);
            if let Some(operand) = &saved_x {
                let source = OperandSource::columns("wgrad.x", x_source, grouping.offsets());
                probe.record(source, operand, &spec.wgrad_x);
            }
        }
        let y = grouping.product(x, w, self.bias, x_dtype);
        let saved = SavedForBackward {
            x: saved_x,
            w: saved_w,
            d_in,
            x_dtype,
            w_dtype,
            bias_dtype: self.tracked.bias,
            spec,
            context,
            grouping: self.grouping,
        };
        (y, saved)
    }

    /// `w` for the forward, and for dgrad if that will be asked for.
    fn weight(&self, dtype: FloatDType) -> (Operand<B>, Option<Operand<B>>) {
        let LinearSpec {
            fprop_w, dgrad_w, ..
        } = self.spec;
        // What is not quantized is not worth keeping, and what is drawn is drawn afresh.
        let is_kept = fprop_w.is_deterministic() && fprop_w != OperandSpec::HighPrecision;
        let weight = self.context.weight.as_ref().filter(|_| is_kept);
        let place =
            weight.map(|weight| weight.slot(format!("{:?}", self.w.device()), dtype, &self.spec));
        type Kept<B> = (Operand<B>, Option<Operand<B>>);
        let kept: Option<Kept<B>> = place.as_ref().and_then(Slot::get);
        let (forward, backward) = match kept {
            Some((forward, Some(backward))) => (forward, Some(backward)),
            Some((forward, None)) if !self.tracked.x => (forward, None),
            Some((forward, None)) if !dgrad_w.is_deterministic() => {
                let backward = self.dgrad_weight(&forward, dtype);
                return (forward, Some(backward));
            }
            _ => {
                let made = self.fresh_weight(dtype);
                if let Some(place) = place {
                    let (forward, backward) = made.clone();
                    let backward = backward.filter(|_| dgrad_w.is_deterministic());
                    place.put((forward, backward));
                }
                made
            }
        };
        (forward, backward.filter(|_| self.tracked.x))
    }

    /// `w` for the forward, and for dgrad if that will be asked for, of which nothing is kept.
    fn fresh_weight(&self, dtype: FloatDType) -> (Operand<B>, Option<Operand<B>>) {
        let LinearSpec {
            fprop_w,
            dgrad_w,
            source,
            ..
        } = &self.spec;
        let is_twin = *source == BackwardSource::Original
            || matches!((fprop_w, dgrad_w),
                (OperandSpec::Tiles(a), OperandSpec::Tiles(b)) if a == b);
        let w = self.w.clone();
        if self.tracked.x && is_twin {
            let (row, col) = self.grouping.weight_both(w, dgrad_w, fprop_w, dtype);
            return (col, Some(row));
        }
        let forward = self.grouping.weight(w, fprop_w, Usage::Columnwise, dtype);
        let backward = (self.tracked.x).then(|| self.dgrad_weight(&forward, dtype));
        (forward, backward)
    }

    /// `w` for dgrad, given what the forward multiplies.
    fn dgrad_weight(&self, forward: &Operand<B>, dtype: FloatDType) -> Operand<B> {
        let (spec, grouping) = (&self.spec.dgrad_w, &self.grouping);
        match self.spec.source {
            BackwardSource::Original => {
                grouping.weight(self.w.clone(), spec, Usage::Rowwise, dtype)
            }
            BackwardSource::Forward => grouping.weight_again(forward.clone(), spec, dtype),
        }
    }
}
