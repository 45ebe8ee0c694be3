//! Operands that are quantized concurrently with others in the steps of a graph.
//!
//! The kernels that quantize a weight are too small to fill a GPU, and MS-EDEN waits for its amax.
//! In a captured step they overlap with the kernels that quantize activations or gradients, which
//! are independent of them.

use std::iter;

use burn_core::backend::Backend;
use burn_core::tensor::FloatDType;
use nvfp4_formats::Usage;

use super::request::{LinearRequest, SavedOperand};
use super::weight::SavedWeight;
use crate::ops::{
    Branch, BranchPoint, LinearContext, LinearSpec, Nvfp4KernelOps, Operand, OperandSpec,
    RowGroups, StoredForm,
};

/// Returns true if a layer quantizes operands in a branch: in the steps of a graph, on one rank,
/// for matrices without groups, and without telemetry, which reads values back.
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

/// Begins a branch that reads these operands.
fn begin<B: Nvfp4KernelOps>(reads: &[&Operand<B>]) -> Branch {
    let branch = Branch::default();
    let points = iter::once(BranchPoint::Begin).chain(iter::repeat(BranchPoint::Reads));
    for (&operand, point) in reads.iter().zip(points) {
        let _ = B::nvfp4_branch(operand.clone(), branch.clone(), point);
    }
    branch
}

/// Marks this point of `branch`, if any, and returns `operand`.
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
    /// Returns the branch that quantizes the weight concurrently with the input, if it begins here.
    pub(super) fn weight_branch(&self) -> Option<Branch> {
        let is_quantized = self.spec.fprop_w != OperandSpec::HighPrecision;
        let has_branches = has_branches(&self.groups, &self.spec, &self.context);
        let w = Operand::Float(self.w.clone(), Usage::Columnwise);
        (is_quantized && has_branches).then(|| begin::<B>(&[&w]))
    }
}

/// Operands of dgrad and wgrad that are derived from those of the forward, in a branch that has
/// ended.
pub(super) struct MadeBeside<B: Backend> {
    w: Option<Operand<B>>,
    x: Option<Operand<B>>,
    branch: Branch,
}

impl<B: Nvfp4KernelOps> MadeBeside<B> {
    /// Derives the operands of dgrad and wgrad, if any, in these forms, from the `saved` state of
    /// the weight and of the input, which has dtype `dtype`.
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

    /// Joins the branch, and returns the saved state of `w` and `x` with these operands for later
    /// work.
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
