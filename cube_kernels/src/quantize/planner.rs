//! Choice of the kernels of a quantization request.

use super::{
    amax::AmaxRequest,
    ms_eden::can_screen,
    request::Quantize,
    rowwise::by_rows,
    source::Source,
    step::{QuantizeStep, Usages},
    target::TargetSpec,
};
use crate::{
    StoredForm, Usage, activation::prologue_of, capabilities::Capabilities, memory::is_aligned,
    policy::AmaxGranularity, tensor::Groups,
};

impl Quantize<'_> {
    /// Returns the kernels that the request launches on a device with these capabilities, in order;
    /// those that compute only the amax values if `only_amax`.
    pub(super) fn steps(&self, capabilities: &Capabilities, only_amax: bool) -> Vec<QuantizeStep> {
        let planner = Planner {
            request: self,
            capabilities,
            only_amax,
            is_amax_found: false,
            steps: Vec::new(),
        };
        planner.steps()
    }
}

/// Choice of the kernels of a request.
struct Planner<'a> {
    request: &'a Quantize<'a>,
    capabilities: &'a Capabilities,
    /// True to leave out the kernels that quantize.
    only_amax: bool,
    /// True if a planned step computes the amax values of all tensors.
    is_amax_found: bool,
    steps: Vec<QuantizeStep>,
}

impl Planner<'_> {
    /// Returns the kernels in the order of their launch.
    fn steps(mut self) -> Vec<QuantizeStep> {
        let request = self.request;
        if let Source::Activation { kind, x, grad } = request.source {
            self.activation(prologue_of(kind, x, grad).is_some());
        }
        match (&request.rowwise, &request.columnwise) {
            (Some(row), Some(col)) => self.both(row, col),
            (Some(row), None) => self.one(row, Usage::Rowwise),
            (None, Some(col)) => self.one(col, Usage::Columnwise),
            (None, None) => {}
        }
        self.steps
    }

    /// Plans the activation, with the amax values that are not computed more cheaply later: in the
    /// same pass if it `is_fused`.
    fn activation(&mut self, is_fused: bool) {
        let request = self.request;
        // The pass that quantizes a row computes its amax.
        let is_per_token = |target: &TargetSpec| {
            request.columnwise.is_none() && target.params.amax == AmaxGranularity::PerRow
        };
        let found = request.missing().filter(|(_, of)| {
            request.targets().all(|(usage, target)| {
                let is_later = target.params.is_2d() || is_per_token(target);
                of.has(usage) && (self.only_amax || !is_later)
            })
        });
        let Some((values, of)) = found else {
            return self.steps.push(QuantizeStep::Activation);
        };
        self.is_amax_found = true;
        if is_fused {
            return (self.steps).push(QuantizeStep::ActivationWithAmax(values, of));
        }
        self.steps.push(QuantizeStep::Activation);
        self.steps.push(QuantizeStep::Amax(values, of));
    }

    /// Plans one tensor.
    fn one(&mut self, target: &TargetSpec, usage: Usage) {
        let groups = self.request.groups;
        let is_missing = target.needs_amax() && !self.is_amax_found;
        if target.params.format.is_mx() {
            return self.quantize(match self.request.source {
                Source::Quantized { .. } => QuantizeStep::MxRequantize(usage),
                Source::Matrix(_) | Source::Activation { .. } => QuantizeStep::Mx(usage),
            });
        }
        if target.params.is_ms_eden() {
            if is_missing {
                self.steps.push(QuantizeStep::MsEdenAmax(usage));
            }
            return self.quantize(QuantizeStep::MsEden(usage));
        }
        let is_one_read = is_missing
            && !self.only_amax
            && !self.request.unscaled
            && matches!(groups, Groups::One)
            && usage == Usage::Rowwise
            && target.params.amax == AmaxGranularity::PerRow
            && target.params.hadamard.is_none()
            && target.form != StoredForm::Bf16Unscaled;
        if is_one_read {
            return self.quantize(QuantizeStep::PerToken);
        }
        if is_missing {
            self.amax(target.amax_along(usage), usage.into());
        }
        self.quantize(match target.params.is_2d() {
            true => QuantizeStep::Tiles(usage.into()),
            false => self.blocks(usage.into()),
        });
    }

    /// Plans both tensors, with one read if one kernel writes both.
    fn both(&mut self, row: &TargetSpec, col: &TargetSpec) {
        let is_matrix = !matches!(self.request.source, Source::Quantized { .. })
            && matches!(self.request.groups, Groups::One);
        if is_matrix
            && [row, col]
                .iter()
                .all(|target| target.params.is_ms_eden() && target.needs_amax())
        {
            match self.can_screen() {
                true => self.steps.push(QuantizeStep::MsEdenAmaxPair),
                false => {
                    self.steps.push(QuantizeStep::MsEdenAmax(Usage::Rowwise));
                    self.steps.push(QuantizeStep::MsEdenAmax(Usage::Columnwise));
                }
            }
            self.quantize(QuantizeStep::MsEden(Usage::Rowwise));
            return self.quantize(QuantizeStep::MsEden(Usage::Columnwise));
        }
        let params = [&row.params, &col.params];
        if params.iter().any(|params| params.is_made_from_codes())
            || row.params.is_2d() != col.params.is_2d()
        {
            self.one(row, Usage::Rowwise);
            return self.one(col, Usage::Columnwise);
        }
        if let Some((values, of)) = self.request.missing()
            && !self.is_amax_found
        {
            self.amax(values, of);
        }
        self.quantize(match row.params.is_2d() {
            true => QuantizeStep::Tiles(Usages::Both),
            false => self.blocks(Usages::Both),
        });
    }

    /// Returns the step that quantizes NVFP4 tensors in 1x16 blocks.
    fn blocks(&self, of: Usages) -> QuantizeStep {
        let request = self.request;
        match &request.rowwise {
            Some(_) if request.unscaled => QuantizeStep::RowsInBothStorages,
            Some(row) if of == Usages::Rowwise && by_rows(request.groups, row) => {
                QuantizeStep::Rows
            }
            _ if request.is_side_by_side() => QuantizeStep::BlocksSideBySide(of),
            _ => QuantizeStep::Blocks(of),
        }
    }

    /// Appends a step that quantizes.
    fn quantize(&mut self, step: QuantizeStep) {
        if !self.only_amax {
            self.steps.push(step);
        }
    }

    /// Appends the step that computes amax values of a matrix in memory.
    fn amax(&mut self, values: AmaxRequest, of: Usages) {
        self.steps.push(match self.request.groups {
            Groups::One if values.is_one_amax() => QuantizeStep::AmaxOfMatrix(of),
            _ => QuantizeStep::Amax(values, of),
        });
    }

    /// Returns true if the device computes both amax values of MS-EDEN in one read.
    fn can_screen(&self) -> bool {
        let memory = match self.request.source {
            Source::Matrix(x) => (x.dtype, is_aligned(&x.handle)),
            // New memory is aligned.
            Source::Activation { x, .. } => (x.dtype, true),
            Source::Quantized { .. } => return false,
        };
        can_screen(self.capabilities, self.request.source.shape(), memory)
    }
}
