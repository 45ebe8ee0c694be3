//! Operands of a layer's weight: from the cache, from the amax that the optimizer computed, or from
//! a rank's shard.

use burn_core::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn_core::tensor::FloatDType;
use nvfp4_formats::{StoredForm, Usage};

use super::plan::LinearPlan;
use super::request::{LinearRequest, SavedOperand};
use crate::ops::context::Slot;
use crate::ops::known_amax::{self, KnownAmax};
use crate::ops::operands::{is_one_kernel, quantize, quantize_pair, requantize};
use crate::ops::segments::narrow;
use crate::ops::sharding::{FoundAmax, GatheredWeight, Role};
use crate::ops::tensors::QuantizeSource;
use crate::ops::{
    BackwardSource, GivenAmax, LinearContext, LinearSpec, Nvfp4KernelOps, Operand, OperandSpec,
    QuantParams, QuantizeRequest, RowGroups,
};
use crate::parallel::ProcessGroup;

/// Source of dgrad's operand of `w`.
#[derive(Clone, Debug)]
pub(crate) enum SavedWeight<B: Backend> {
    /// Operand of the whole weight.
    Whole(SavedOperand<B>),
    /// This rank's shard of the weight.
    Part(SavedPart<B>),
}

/// Rank's shard of a weight whose operands are gathered again: a rank does not hold the whole model
/// between forward and backward.
#[derive(Clone, Debug)]
pub(crate) struct SavedPart<B: Backend> {
    gathered: GatheredWeight,
    part: FloatTensor<B>,
    /// Amax of the whole matrix, if fprop's operand is quantized with it.
    amax: Option<FoundAmax<B>>,
    plan: LinearPlan,
}

impl<B: Nvfp4KernelOps> SavedPart<B> {
    /// Returns the operand of fprop.
    pub(super) fn fprop_operand(self, spec: &OperandSpec, dtype: FloatDType) -> Operand<B> {
        let asked = (spec, self.plan.fprop.packed());
        self.gathered
            .fprop_operand(self.part, self.amax, asked, dtype)
    }

    /// Returns the operand of dgrad.
    fn dgrad_operand(self, spec: &LinearSpec, dtype: FloatDType) -> Operand<B> {
        let is_known = !spec.has_weight_pair() || shares_amax(&spec.dgrad_w);
        let amax = self.amax.filter(|_| is_known);
        self.gathered
            .dgrad_operand(self.part, amax, spec, self.plan, dtype)
    }
}

/// Returns true if one amax of the matrix serves the operand.
fn shares_amax(spec: &OperandSpec) -> bool {
    spec.params().is_some_and(QuantParams::shares_amax)
}

impl<B: Nvfp4KernelOps> SavedWeight<B> {
    /// Returns the operand by the spec of dgrad, for these groups of tokens; in this form, if it is
    /// derived now from that of fprop.
    pub(super) fn operand(
        self,
        groups: &RowGroups<B>,
        (spec, form): (&LinearSpec, StoredForm),
        dtype: FloatDType,
    ) -> Operand<B> {
        match self {
            Self::Whole(w) => {
                let asked = (&spec.dgrad_w, form);
                w.operand(&groups.of_weights(), asked, Usage::Rowwise, dtype)
            }
            Self::Part(part) => part.dgrad_operand(spec, dtype),
        }
    }
}

/// Cached operands of a weight: for the forward, and for dgrad.
pub(super) type CachedOperands<B> = (Operand<B>, Option<Operand<B>>);

/// Returns the slot of a weight's operands on `device`, if they are cached.
pub(super) fn weight_slot<'a, B: Backend>(
    device: &B::Device,
    dtype: FloatDType,
    (spec, context): (&LinearSpec, &'a LinearContext),
) -> Option<Slot<'a>> {
    // An unquantized weight is not worth caching, and random bits are drawn for each forward.
    let fprop = &spec.fprop_w;
    let is_cached = fprop.is_deterministic() && *fprop != OperandSpec::HighPrecision;
    let weight = context.weight.as_ref().filter(|_| is_cached)?;
    Some(weight.slot(format!("{device:?}"), dtype, spec))
}

impl<B: Nvfp4KernelOps> LinearRequest<B> {
    /// Returns `w` for the forward, and the state that dgrad needs of it, if required.
    pub(super) fn weight(
        &self,
        dtype: FloatDType,
        plan: &LinearPlan,
    ) -> (Operand<B>, Option<SavedWeight<B>>) {
        let Some(gathered) = &self.context.gathered else {
            let (forward, backward) = self.whole_weight(dtype, plan);
            return (forward, backward.map(SavedWeight::Whole));
        };
        let known = self.known_part_amax([&self.spec.fprop_w].into_iter(), gathered.group());
        let asked = (&self.spec.fprop_w, plan.fprop.packed());
        let forward = gathered.fprop_operand(self.w.clone(), known, asked, dtype);
        let part = self.requires_grad.x.then(|| self.part(&forward, plan));
        (forward, part.flatten().map(SavedWeight::Part))
    }

    /// Returns `w`, if it is this rank's shard, for gathering its operands again. `forward` is the
    /// operand of fprop.
    pub(super) fn part(&self, forward: &Operand<B>, plan: &LinearPlan) -> Option<SavedPart<B>> {
        let gathered = self.context.gathered.clone()?;
        Some(SavedPart {
            gathered,
            part: self.w.clone(),
            amax: self.amax_of(forward),
            plan: *plan,
        })
    }

    /// Version of [`known_amax`](Self::known_amax) for a `w` that is sharded over the ranks of
    /// `group`.
    fn known_part_amax<'a>(
        &self,
        specs: impl Iterator<Item = &'a OperandSpec>,
        group: &ProcessGroup,
    ) -> Option<FoundAmax<B>> {
        let KnownAmax {
            maxima,
            entry,
            of_group,
        } = self.known_amax(specs)?;
        let of_group = of_group.filter(|amax| amax.group.is_of(&group.link()));
        let own = narrow::<B>(maxima, 0, entry, 1);
        Some(FoundAmax {
            of_part: [own.clone(), own],
            // A copy: the saved state may outlive the optimizer's next step.
            of_group: of_group.map(|amax| {
                let own = narrow::<B>(amax.maxima, 0, amax.entry, 1);
                B::float_mul_scalar(own, 1.0.into())
            }),
        })
    }

    /// Returns the amax that `forward`, the gathered operand of fprop, was quantized with, if it is
    /// the amax of one matrix.
    fn amax_of(&self, forward: &Operand<B>) -> Option<FoundAmax<B>> {
        let (RowGroups::Whole, Operand::Quantized(forward)) = (&self.groups, forward) else {
            return None;
        };
        let amax = forward.amax.clone().into_option()?;
        shares_amax(&self.spec.fprop_w).then(|| FoundAmax {
            of_part: [amax.clone(), amax.clone()],
            of_group: Some(amax),
        })
    }

    /// Quantizes `w` for the forward, and for dgrad if required, where this rank has the whole
    /// weight, or a shard that is not only along its rows.
    fn whole_weight(
        &self,
        dtype: FloatDType,
        plan: &LinearPlan,
    ) -> (Operand<B>, Option<SavedOperand<B>>) {
        let dgrad_w = self.spec.dgrad_w;
        let slot = weight_slot::<B>(&self.w.device(), dtype, (&self.spec, &self.context));
        let cached: Option<CachedOperands<B>> = slot.as_ref().and_then(Slot::get);
        let (forward, backward) = match cached {
            Some((forward, Some(backward))) => (forward, Some(SavedOperand::Made(backward))),
            Some((forward, None)) if !self.requires_grad.x => (forward, None),
            Some((forward, None)) if !dgrad_w.is_deterministic() => {
                let backward = self.derived_weight(&forward, dtype, plan.dgrad.packed());
                return (forward, Some(backward));
            }
            _ => {
                let (forward, backward) = self.quantize_weight(dtype, plan);
                if let Some(slot) = slot {
                    let kept = match &backward {
                        Some(SavedOperand::Made(w)) if dgrad_w.is_deterministic() => {
                            Some(w.clone())
                        }
                        _ => None,
                    };
                    slot.put::<CachedOperands<B>>((forward.clone(), kept));
                }
                (forward, backward)
            }
        };
        (forward, backward.filter(|_| self.requires_grad.x))
    }

    /// Quantizes `w` for the forward, and for dgrad if required, without the cache.
    fn quantize_weight(
        &self,
        dtype: FloatDType,
        plan: &LinearPlan,
    ) -> (Operand<B>, Option<SavedOperand<B>>) {
        let [row_form, col_form] = [plan.dgrad.packed(), plan.fprop.packed()];
        let LinearSpec {
            fprop_w, dgrad_w, ..
        } = &self.spec;
        let is_pair = self.spec.has_weight_pair();
        let (w, groups) = (
            QuantizeSource::Matrix(self.w.clone()),
            self.groups.of_weights(),
        );
        let pair = (self.requires_grad.x && is_pair).then_some(dgrad_w);
        let (forward, backward) = if let Some(sharding) = &self.context.sharding {
            let specs = pair.into_iter().chain([fprop_w]);
            let known = self.known_part_amax(specs, &sharding.group);
            let specs = (pair.map(|spec| (spec, row_form)), Some((fprop_w, col_form)));
            let (row, col) = sharding.quantize_weight(self.w.clone(), known, specs, dtype);
            (col.expect("asked for"), row)
        } else if let Some(known) =
            self.quantize_known_weight((fprop_w, col_form), pair.map(|spec| (spec, row_form)))
        {
            known
        } else if let Some(rowwise) = pair {
            let pair = [(rowwise, row_form), (fprop_w, col_form)];
            let (row, col) = quantize_pair::<B>(w, &groups, pair, dtype);
            (col, Some(row))
        } else {
            let usage = Usage::Columnwise;
            let forward = quantize::<B>(w, &groups, fprop_w, usage, dtype, col_form);
            (forward, None)
        };
        let derived = || self.derived_weight(&forward, dtype, row_form);
        let backward = backward.map(SavedOperand::Made);
        let backward = backward.or_else(|| self.requires_grad.x.then(derived));
        (forward, backward)
    }

    /// Returns the amax that the optimizer computed for `w`, if all `specs` quantize with it.
    fn known_amax<'a>(
        &self,
        mut specs: impl Iterator<Item = &'a OperandSpec>,
    ) -> Option<KnownAmax<B>> {
        let RowGroups::Whole = self.groups else {
            return None;
        };
        if !specs.all(shares_amax) {
            return None;
        }
        let weight = self.context.weight.as_ref()?;
        known_amax::find::<B>(&weight.identity)
    }

    /// Quantizes `w` by `fprop` for the forward, and by `dgrad`, if one kernel writes both, with
    /// the amax that the optimizer computed. Returns `None` if that is not known, or not the one
    /// they need.
    fn quantize_known_weight(
        &self,
        (fprop, form): (&OperandSpec, StoredForm),
        dgrad: Option<(&OperandSpec, StoredForm)>,
    ) -> Option<(Operand<B>, Option<Operand<B>>)> {
        let specs = dgrad.map(|(spec, _)| spec).into_iter().chain([fprop]);
        let KnownAmax { maxima, entry, .. } = self.known_amax(specs)?;
        let col = *fprop.params()?;
        let mut request = QuantizeRequest::of_matrix(self.w.clone())
            .amax(GivenAmax::Entry(maxima, entry))
            .along(Usage::Columnwise, col, col.stored_form(form));
        if let Some((dgrad, form)) = dgrad {
            let row = *dgrad.params()?;
            if !is_one_kernel(&self.groups, &row, &col) {
                return None;
            }
            request = request.along(Usage::Rowwise, row, row.stored_form(form));
        }
        let made = B::nvfp4_quantize(request);
        let (row, col) = made.into_options();
        Some((
            Operand::Quantized(col.expect("asked for")),
            row.map(Operand::Quantized),
        ))
    }

    /// Returns the state that dgrad needs of `w`, given the forward's operand. An operand that must
    /// be derived again in each backward is derived there; others may be cached.
    fn derived_weight(
        &self,
        forward: &Operand<B>,
        dtype: FloatDType,
        form: StoredForm,
    ) -> SavedOperand<B> {
        let is_later = self.spec.source == BackwardSource::Forward
            && self.context.sharding.is_none()
            && !self.spec.dgrad_w.is_deterministic();
        let saved = is_later
            .then(|| SavedOperand::of_forward(forward))
            .flatten();
        saved.unwrap_or_else(|| SavedOperand::Made(self.dgrad_weight(forward, dtype, form)))
    }

    /// Returns `w` for dgrad, given the forward's operand.
    fn dgrad_weight(
        &self,
        forward: &Operand<B>,
        dtype: FloatDType,
        form: StoredForm,
    ) -> Operand<B> {
        let (spec, groups) = (&self.spec.dgrad_w, self.groups.of_weights());
        let usage = Usage::Rowwise;
        if let Some(sharding) = &self.context.sharding {
            return match self.spec.source {
                BackwardSource::Original => {
                    let w = QuantizeSource::Matrix(self.w.clone());
                    let row = Some((spec, form));
                    let (w, _) = sharding.quantize(w, Role::Weight, row, None, dtype);
                    w.expect("asked for")
                }
                BackwardSource::Forward => {
                    sharding.requantize(forward.clone(), Role::Weight, (spec, form), usage, dtype)
                }
            };
        }
        match self.spec.source {
            BackwardSource::Original => {
                let w = QuantizeSource::Matrix(self.w.clone());
                quantize::<B>(w, &groups, spec, usage, dtype, form)
            }
            BackwardSource::Forward => {
                requantize::<B>(forward.clone(), &groups, spec, usage, dtype, form)
            }
        }
    }
}
