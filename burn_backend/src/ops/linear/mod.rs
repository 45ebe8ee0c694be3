//! Linear layer with gradients: quantizes each operand of its three GEMMs once, and computes the
//! backward.
//!
//! One implementation covers both a single weight for all rows and a stack of weights, one per
//! group of rows.

mod branch;
mod fprop;
pub(super) mod plan;
mod request;
mod weight;

use burn_core::backend::{Backend, TensorMetadata, tensor::FloatTensor, tensor::IntTensor};
use burn_core::tensor::FloatDType;
use nvfp4_formats::{StoredForm, Usage};

use super::context::Slot;
use super::dtype::cast;
use super::operands::{quantize, quantize_kept, quantize_pair, requantize};
use super::probe::OperandSource;
use super::sharding::{LinearSharding, Role};
use super::{
    BackwardSource, BranchPoint, GemmGroups, LinearContext, LinearParams, LinearSpec, MaybeTensor,
    Nvfp4KernelOps, Operand, OtherRows, QuantizeSource, RowGroups, float_dtype,
};
use branch::MadeBeside;
pub(super) use fprop::Fprop;
use fprop::FpropWeight;
use plan::{LinearPlan, PlannedLayer};
use request::SavedOperand;
pub(crate) use request::{LinearRequest, RequiresGrad};
use weight::{CachedOperands, SavedWeight, weight_slot};

/// Gradients of `x`, `w` and the bias that are required and do not
/// [wait](super::collective::Waiting).
pub(crate) struct LinearGradients<B: Backend> {
    pub(crate) x: Option<FloatTensor<B>>,
    pub(crate) w: Option<FloatTensor<B>>,
    pub(crate) bias: Option<FloatTensor<B>>,
}

/// State saved for the backward: the operands of its GEMMs, or the tensors they are derived from.
/// Only quantized tensors if the operands are quantized.
#[derive(Clone, Debug)]
pub(crate) struct SavedForBackward<B: Backend> {
    /// `x` for wgrad, if the weight needs a gradient.
    x: Option<SavedOperand<B>>,
    /// `w` for dgrad, if the input needs a gradient.
    pub(crate) w: Option<SavedWeight<B>>,
    /// Columns of `x`, rows of `w`.
    d_in: usize,
    plan: LinearPlan,
    x_dtype: FloatDType,
    w_dtype: FloatDType,
    /// Dtype of the bias, if it needs a gradient.
    bias_dtype: Option<FloatDType>,
    spec: LinearSpec,
    /// Context without the weight cache.
    context: LinearContext,
    groups: RowGroups<B>,
}

/// Returns the source values for the telemetry of an operand of `role`, given this rank's values
/// `x`.
fn probed<B: Nvfp4KernelOps>(
    x: FloatTensor<B>,
    role: Role,
    sharding: Option<&LinearSharding>,
) -> FloatTensor<B> {
    match sharding {
        Some(sharding) => sharding.sources::<B>(x, role),
        None => x,
    }
}

impl<B: Nvfp4KernelOps> SavedForBackward<B> {
    /// Runs `fprop`, the forward GEMM of the layer, again.
    pub(super) fn run_again(&mut self, fprop: Fprop<B>) -> FloatTensor<B> {
        let (fprop, gathered) = fprop.gathered();
        // Gathered once for both GEMMs, if the operand of dgrad is derived from that of fprop.
        if let Some(w) = gathered
            && self.w.is_some()
            && !self.spec.has_weight_pair()
        {
            self.w = Some(SavedWeight::Whole(SavedOperand::Forward(w)));
        }
        fprop.run()
    }

    /// Computes the gradients from the gradient `dy` of the output (`[m, d_out]`).
    pub(crate) fn backward(self, dy: QuantizeSource<B>) -> LinearGradients<B> {
        let (spec, dtype, groups) = (self.spec, self.x_dtype, &self.groups);
        let probe = self.context.probe.as_ref();
        let dy = match self.bias_dtype.is_some() || probe.is_some() {
            true => dy.materialized(),
            false => dy,
        };
        let values = || dy.clone().into_values();
        let sharding = self.context.sharding.as_ref();
        let bias = self.bias_dtype.map(|dtype| {
            let grad = match sharding {
                Some(sharding) => sharding.bias_grad::<B>(values(), |dy| bias_grad(dy, groups)),
                None => bias_grad(values(), groups),
            };
            cast::<B>(grad, dtype)
        });
        let probed =
            probe.map(|probe| (probe, probed::<B>(values(), Role::OutputGradient, sharding)));
        let tokens = dy.shape().0;
        let written = (self.context.reduce_dtype).of_wgrad(dtype, self.w_dtype);
        let plan = match sharding {
            None => self.plan,
            // With sharded tokens, `dy` may have another number of them than `x`.
            Some(_) => {
                let layer = PlannedLayer {
                    spec: &spec,
                    groups,
                    reads: self.context.assumed_reads(),
                    shape: (tokens, self.d_in, dy.shape().1),
                    dtypes: [dtype, written],
                    bias: false,
                };
                layer.gradients(&dy.device(), self.plan)
            }
        };
        let made = MadeBeside::new(
            (self.w.as_ref(), self.x.as_ref()),
            (&spec, &self.context, groups),
            [plan.dgrad, plan.wgrad],
            dtype,
        );
        let (row, col) = self.quantize_dy(dy, &plan);
        let (saved_w, saved_x) = match made {
            Some(made) => made.join(self.w, self.x),
            None => (self.w, self.x),
        };
        if let Some((probe, dy)) = probed {
            let offsets = groups.offsets();
            if let Some(operand) = &row {
                let source = OperandSource::rows("dgrad.dy", dy.clone(), offsets);
                probe.record(source, operand, &spec.dgrad_dy);
            }
            if let Some(operand) = &col {
                let source = OperandSource::columns("wgrad.dy", dy, offsets);
                probe.record(source, operand, &spec.wgrad_dy);
            }
        }
        let (dgrad, wgrad) = (groups.of_rows(), groups.of_tokens(tokens));
        let x = row.zip(saved_w).map(|(dy, w)| {
            let w = w.operand(groups, (&spec, plan.dgrad), dtype);
            match sharding {
                Some(sharding) => sharding.dgrad(dy, w, dtype),
                None => B::nvfp4_gemm(dy, w, MaybeTensor::Absent, dgrad, dtype),
            }
        });
        let w = saved_x.zip(col).map(|(x, dy)| {
            let asked = (&spec.wgrad_x, plan.wgrad);
            let x = x.operand(groups, asked, Usage::Columnwise, dtype);
            B::nvfp4_gemm(x, dy, MaybeTensor::Absent, wgrad, written)
        });
        let w = match (&self.context.gathered, w) {
            (Some(gathered), Some(grad)) => gathered.reduce::<B>(grad, self.w_dtype),
            (_, grad) => grad,
        };
        LinearGradients { x, w, bias }
    }

    /// Quantizes `dy` for dgrad and for wgrad, as far as required, in the forms of these GEMMs.
    fn quantize_dy(
        &self,
        dy: QuantizeSource<B>,
        plan: &LinearPlan,
    ) -> (Option<Operand<B>>, Option<Operand<B>>) {
        let LinearSpec {
            dgrad_dy, wgrad_dy, ..
        } = &self.spec;
        let (groups, dtype) = (&self.groups, self.x_dtype);
        let row_form = plan.dgrad;
        // The K dimension of both operands of wgrad is padded like that of the saved operand.
        let col_form = match &self.x {
            Some(SavedOperand::Made(Operand::Quantized(x)))
                if x.layout.form == StoredForm::Tiles =>
            {
                StoredForm::WholeTiles
            }
            Some(SavedOperand::Forward(_)) => plan.wgrad,
            _ => match plan.wgrad {
                StoredForm::Bf16Unscaled => StoredForm::Bf16Unscaled,
                StoredForm::Rows | StoredForm::Tiles | StoredForm::WholeTiles => StoredForm::Rows,
            },
        };
        if let Some(sharding) = &self.context.sharding {
            let row = self.w.is_some().then_some((dgrad_dy, row_form));
            let col = self.x.is_some().then_some((wgrad_dy, col_form));
            return sharding.quantize(dy, Role::OutputGradient, row, col, dtype);
        }
        match (&self.w, &self.x) {
            (Some(_), Some(_)) => {
                let pair = [(dgrad_dy, row_form), (wgrad_dy, col_form)];
                let (row, col) = quantize_pair::<B>(dy, groups, pair, dtype);
                (Some(row), Some(col))
            }
            (Some(_), None) => {
                let usage = Usage::Rowwise;
                let row = quantize::<B>(dy, groups, dgrad_dy, usage, dtype, row_form);
                (Some(row), None)
            }
            (None, Some(_)) => {
                let usage = Usage::Columnwise;
                let col = quantize::<B>(dy, groups, wgrad_dy, usage, dtype, col_form);
                (None, Some(col))
            }
            (None, None) => (None, None),
        }
    }
}

/// Computes the output of a layer whose gradients are not required.
pub(super) fn infer<B: Nvfp4KernelOps>(
    x: QuantizeSource<B>,
    params: LinearParams<B>,
    groups: &RowGroups<B>,
    (spec, context): (&LinearSpec, &LinearContext),
) -> FloatTensor<B> {
    let LinearParams { weight, bias } = params;
    let dtype = x.dtype();
    let d_out = *weight.shape().last().expect("a matrix");
    let (rows, d_in) = x.shape();
    let layer = PlannedLayer {
        spec,
        groups,
        reads: context.assumed_reads(),
        shape: (rows, d_in, d_out),
        dtypes: [dtype; 2],
        bias: bias.is_present(),
    };
    let form = layer.fprop(&x.device());
    let weight = QuantizeSource::Matrix(weight);
    if let Some(sharding) = &context.sharding {
        let (x, _) = sharding.quantize(x, Role::Input, Some((&spec.fprop_x, form)), None, dtype);
        let w = Some((&spec.fprop_w, form.packed()));
        let (_, w) = sharding.quantize(weight, Role::Weight, None, w, dtype);
        let [x, w] = [x, w].map(|operand| operand.expect("asked for"));
        return sharding.fprop(x, w, bias, dtype);
    }
    let (row, col) = (Usage::Rowwise, Usage::Columnwise);
    let x = quantize::<B>(x, groups, &spec.fprop_x, row, dtype, form);
    let of_weights = groups.of_weights();
    let w = match &context.gathered {
        Some(gathered) => {
            let asked = (&spec.fprop_w, form.packed());
            gathered.fprop_operand(weight.into_values(), None, asked, dtype)
        }
        None => {
            let slot = weight_slot::<B>(&weight.device(), dtype, (spec, context));
            let cached: Option<CachedOperands<B>> = slot.as_ref().and_then(Slot::get);
            cached.map(|(w, _)| w).unwrap_or_else(|| {
                let w = quantize::<B>(
                    weight,
                    &of_weights,
                    &spec.fprop_w,
                    col,
                    dtype,
                    form.packed(),
                );
                if let Some(slot) = slot {
                    slot.put::<CachedOperands<B>>((w.clone(), None));
                }
                w
            })
        }
    };
    B::nvfp4_gemm(x, w, bias, groups.of_rows(), dtype)
}

/// Computes `added + x w`. Also returns the saved operands of `x` and `w` for the backward.
pub(super) fn add<B: Nvfp4KernelOps>(
    added: FloatTensor<B>,
    [x, w]: [FloatTensor<B>; 2],
    spec: LinearSpec,
    requires_grad: RequiresGrad,
) -> (FloatTensor<B>, SavedForBackward<B>) {
    let request = LinearRequest {
        x: QuantizeSource::Matrix(x),
        w,
        bias: MaybeTensor::Absent,
        groups: RowGroups::Whole,
        spec,
        context: LinearContext::default(),
        requires_grad,
    };
    let (fprop, saved) = request.quantize(false);
    (fprop.add_to(added), saved)
}

impl<B: Nvfp4KernelOps> LinearRequest<B> {
    /// Returns the output, and the saved operands of `x` and `w` for the backward.
    pub(crate) fn forward(self) -> (FloatTensor<B>, SavedForBackward<B>) {
        let (fprop, saved) = self.quantize(false);
        (fprop.run(), saved)
    }

    /// Returns the forward GEMM, and the saved operands of `x` and `w` for the backward. If `kept`,
    /// the operands of the GEMM are packed.
    pub(super) fn quantize(self, kept: bool) -> (Fprop<B>, SavedForBackward<B>) {
        let x_dtype = self.x.dtype();
        let w_dtype = float_dtype(self.w.dtype());
        let plan = self.plan();
        let branch = self.weight_branch();
        let (w, saved_w) = self.weight(x_dtype, &plan);
        let w = branch::at(branch.as_ref(), BranchPoint::End, w);
        let part = self.part(&w, &plan);
        let Self {
            x,
            w: w_source,
            bias,
            groups,
            spec,
            context,
            requires_grad,
        } = self;
        let context = context.without_weight();
        let (_, d_in) = x.shape();
        let x = match context.probe.is_some() {
            true => x.materialized(),
            false => x,
        };
        let values = || x.clone().into_values();
        let sharding = context.sharding.as_ref();
        let probe = context.probe.as_ref();
        let probed = probe.map(|probe| (probe, probed::<B>(values(), Role::Input, sharding)));
        if let Some((probe, _)) = &probed {
            let source = OperandSource::weight("fprop.w", w_source.clone());
            probe.record(source, &w, &spec.fprop_w);
        }
        let x_form = match kept {
            true => plan.fprop.packed(),
            false => plan.fprop,
        };
        let (row, col) = (&spec.fprop_x, &spec.wgrad_x);
        let (x, saved_x) = match (requires_grad.w, spec.source) {
            (requires_w, source) if context.sharding.is_some() => {
                let sharding = context.sharding.as_ref().expect("there is one");
                let col = requires_w.then_some((col, plan.wgrad.packed()));
                let form = match (requires_w, source) {
                    (true, BackwardSource::Forward) => x_form.packed(),
                    (false, _) | (true, BackwardSource::Original) => x_form,
                };
                let (x, saved) = sharding.input(x, ((row, form), col), source, x_dtype);
                (x, saved.map(SavedOperand::Made))
            }
            (false, _) => {
                let x = quantize::<B>(x, &groups, row, Usage::Rowwise, x_dtype, x_form);
                (x, None)
            }
            (true, BackwardSource::Original) => {
                let pair = [(row, x_form), (col, plan.wgrad.packed())];
                let (x, saved) = quantize_pair::<B>(x, &groups, pair, x_dtype);
                (x, Some(SavedOperand::Made(saved)))
            }
            (true, BackwardSource::Forward) => {
                let (x, packed) = quantize_kept::<B>(x, &groups, row, x_dtype, x_form);
                let saved = SavedOperand::of_forward(&packed);
                let saved = saved.filter(|_| probe.is_none()).unwrap_or_else(|| {
                    let (usage, form) = (Usage::Columnwise, plan.wgrad.packed());
                    let made = requantize::<B>(packed, &groups, col, usage, x_dtype, form);
                    SavedOperand::Made(made)
                });
                (x, Some(saved))
            }
        };
        if let Some((probe, source)) = probed {
            let offsets = groups.offsets();
            let rows = OperandSource::rows("fprop.x", source.clone(), offsets);
            probe.record(rows, &x, row);
            if let Some(SavedOperand::Made(operand)) = &saved_x {
                let columns = OperandSource::columns("wgrad.x", source, offsets);
                probe.record(columns, operand, col);
            }
        }
        let w = branch::at(branch.as_ref(), BranchPoint::Join, w);
        let fprop = Fprop {
            x,
            w: match part {
                Some(part) => FpropWeight::Gathered {
                    made: Some(w),
                    again: Box::new((part, spec.fprop_w)),
                },
                None => FpropWeight::Made(w),
            },
            bias,
            groups: groups.of_rows(),
            dtype: x_dtype,
            sharding: context.sharding.clone(),
        };
        let saved = SavedForBackward {
            x: saved_x,
            w: saved_w,
            d_in,
            plan,
            x_dtype,
            w_dtype,
            bias_dtype: requires_grad.bias,
            spec,
            context,
            groups,
        };
        (fprop, saved)
    }

    /// Returns the plan of the layer's GEMMs.
    fn plan(&self) -> LinearPlan {
        let ((tokens, d_in), x_dtype) = (self.x.shape(), self.x.dtype());
        let d_out = *self.w.shape().last().expect("a matrix");
        let w_dtype = float_dtype(self.w.dtype());
        let layer = PlannedLayer {
            spec: &self.spec,
            groups: &self.groups,
            reads: self.context.assumed_reads(),
            shape: (tokens, d_in, d_out),
            dtypes: [
                x_dtype,
                (self.context.reduce_dtype).of_wgrad(x_dtype, w_dtype),
            ],
            bias: self.bias.is_present(),
        };
        let RequiresGrad { x, w, .. } = self.requires_grad;
        layer.plan(&self.x.device(), [x, w])
    }
}

impl<B: Backend> RowGroups<B> {
    /// Returns the offsets of the groups of tokens, if any.
    pub(super) fn offsets(&self) -> Option<&IntTensor<B>> {
        match self {
            Self::Offsets(offsets) | Self::Window { offsets, .. } => Some(offsets),
            Self::Whole | Self::Batch(_) => None,
        }
    }

    /// Returns the contents of rows of no group.
    pub(super) fn others(&self) -> OtherRows {
        match self {
            Self::Window { .. } => OtherRows::Undefined,
            Self::Whole | Self::Batch(_) | Self::Offsets(_) => OtherRows::Zero,
        }
    }

    /// Returns the groups of the weights for these groups of tokens.
    pub(super) fn of_weights(&self) -> Self {
        match self.offsets() {
            Some(offsets) => Self::Batch(offsets.shape()[0] - 1),
            None => Self::Whole,
        }
    }

    /// Returns the groups of a GEMM of tokens with weights.
    pub(crate) fn of_rows(&self) -> GemmGroups<B> {
        match self.offsets() {
            Some(offsets) => GemmGroups::M {
                offsets: offsets.clone(),
                others: self.others(),
            },
            None => GemmGroups::None,
        }
    }

    /// Returns the groups of a GEMM along `tokens` tokens.
    fn of_tokens(&self, tokens: usize) -> GemmGroups<B> {
        match self.offsets() {
            Some(offsets) => GemmGroups::K {
                offsets: offsets.clone(),
                tokens,
                others: self.others(),
            },
            None => GemmGroups::None,
        }
    }
}

/// Sums `dy` over the rows of each bias, in `f32`.
fn bias_grad<B: Nvfp4KernelOps>(dy: FloatTensor<B>, groups: &RowGroups<B>) -> FloatTensor<B> {
    match groups.offsets() {
        Some(offsets) => B::nvfp4_segment_sum(dy, offsets.clone()),
        None => B::nvfp4_column_sums(dy),
    }
}
