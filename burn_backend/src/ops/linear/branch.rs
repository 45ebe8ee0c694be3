//! Operands that are made beside others in the steps of a graph.
//!
//! A weight is quantized by kernels that are too small to fill a GPU, and MS-EDEN waits for its
//! amax. In a step that is captured these run beside the kernels that quantize activations, or
//! gradients, which need nothing of them.

use std::iter;

use burn_core::backend::Backend;
use burn_core::tensor::FloatDType;
use nvfp4_kernels::Usage;

use super::request::LinearRequest;
use super::saved::SavedOperand;
use super::weight::SavedWeight;
use crate::ops::{
    Branch, BranchPoint, LinearContext, LinearSpec, Nvfp4KernelOps, Operand, OperandSpec,
    RowGroups, StoredForm,
};

/// Returns true if a layer makes operands in a branch: in the steps of a graph, on one rank, from
/// matrices without groups. Telemetry, which reads values back, is not in such steps.
fn has_branches<B: Backend>(
    groups: &RowGroups<B>,
    spec: &LinearSpec,
    context: &LinearContext,
) -> bool {
    matches!(groups, RowGroups::Whole)
        && spec.has_offset_in_memory()
        && context.sharding.is_none()
        && context.gathered.is_none()
        && context.probe.is_none()
}

/// A branch that begins here, and reads these operands.
fn begin<B: Nvfp4KernelOps>(reads: &[&Operand<B>]) -> Branch {
    let branch = Branch::default();
    let points = iter::once(BranchPoint::Begin).chain(iter::repeat(BranchPoint::Reads));
    for (&operand, point) in reads.iter().zip(points) {
        let _ = B::nvfp4_branch(operand.clone(), branch.clone(), point);
    }
    branch
}

/// `operand`, at this point of `branch`, if there is one.
pub(super) fn at<B: Nvfp4KernelOps>(
    branch: Option<&Branch>,
    point: BranchPoint,
    operand: Operand<B>,
) -> Operand<B> {
    match branch {
        Some(branch) => B::nvfp4_branch(operand, branch.clone(), point),
        None => operand,
    }
}

impl<B: Nvfp4KernelOps> LinearRequest<B> {
    /// The branch that quantizes the weight, beside what quantizes the input, if it begins here.
    pub(super) fn weight_branch(&self) -> Option<Branch> {
        let is_quantized = self.spec.fprop_w != OperandSpec::HighPrecision;
        let has_branches = has_branches(&self.groups, &self.spec, &self.context);
        let w = Operand::Float(self.w.clone(), Usage::Columnwise);
        (is_quantized && has_branches).then(|| begin::<B>(&[&w]))
    }
}

/// The operands of dgrad and wgrad that are made from those of the forward, in a branch that has
/// ended.
pub(super) struct MadeBeside<B: Backend> {
    w: Option<Operand<B>>,
    x: Option<Operand<B>>,
    branch: Branch,
}

impl<B: Nvfp4KernelOps> MadeBeside<B> {
    /// Makes them, if there are any: for dgrad and for wgrad, in these forms, of what the forward
    /// of a layer has saved of its weight and of its input, which is of type `dtype`.
    pub(super) fn new(
        saved: (Option<&SavedWeight<B>>, Option<&SavedOperand<B>>),
        (spec, context, groups): (&LinearSpec, &LinearContext, &RowGroups<B>),
        [w_form, x_form]: [StoredForm; 2],
        dtype: FloatDType,
    ) -> Option<Self> {
        let w = match saved.0 {
            Some(SavedWeight::Whole(SavedOperand::Forward(w))) => Some(w),
            _ => None,
        };
        let x = match saved.1 {
            Some(SavedOperand::Forward(x)) => Some(x),
            _ => None,
        };
        let reads: Vec<&Operand<B>> = w.into_iter().chain(x).collect();
        if reads.is_empty() || !has_branches(groups, spec, context) {
            return None;
        }
        let branch = begin(&reads);
        let made = |read: Option<&Operand<B>>, asked, usage| {
            let read = SavedOperand::Forward(read?.clone());
            Some(read.operand(groups, asked, usage, dtype))
        };
        let w = made(w, (&spec.dgrad_w, w_form), Usage::Rowwise);
        let x = made(x, (&spec.wgrad_x, x_form), Usage::Columnwise);
        let mut made = Self { w, x, branch };
        made.mark(BranchPoint::End);
        Some(made)
    }

    /// What is saved of `w` and `x`, with these operands, for what is queued from here on.
    pub(super) fn join(
        mut self,
        w: Option<SavedWeight<B>>,
        x: Option<SavedOperand<B>>,
    ) -> (Option<SavedWeight<B>>, Option<SavedOperand<B>>) {
        self.mark(BranchPoint::Join);
        let made_w = self.w.map(|w| SavedWeight::Whole(SavedOperand::Made(w)));
        (made_w.or(w), self.x.map(SavedOperand::Made).or(x))
    }

    /// Queues a point of the branch.
    fn mark(&mut self, point: BranchPoint) {
        let made = self.x.take().map(|x| at(Some(&self.branch), point, x));
        match made {
            Some(x) => self.x = Some(x),
            None => self.w = self.w.take().map(|w| at(Some(&self.branch), point, w)),
        }
    }
}
