//! Choice of the kernels of a quantization request.

use super::{
    amax::AmaxRequest,
    ms_eden::can_screen,
    request::Quantize,
    rowwise::by_rows,
    source::Source,
    step::{QuantizeStep, Usages},
    target::{TargetSpec, amax_of_both},
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
            missing: self.needs_amax(),
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
    /// True if the amax of the rowwise, or of the columnwise tensor is to be computed.
    missing: [bool; 2],
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
        let needs_pass = |target: &TargetSpec| {
            target.amax.is_none()
                && !target.params.is_made_from_codes()
                && (!target.params.is_2d() || self.only_amax)
        };
        let found = match (&request.rowwise, &request.columnwise) {
            (Some(row), Some(col)) if needs_pass(row) && needs_pass(col) => {
                Some((amax_of_both(row, col), Usages::Both))
            }
            // Otherwise the pass that quantizes a row computes its amax.
            (Some(row), None)
                if needs_pass(row)
                    && (row.params.amax == AmaxGranularity::PerTensor || self.only_amax) =>
            {
                Some((row.amax_along(Usage::Rowwise), Usages::Rowwise))
            }
            (None, Some(col)) if needs_pass(col) => {
                Some((col.amax_along(Usage::Columnwise), Usages::Columnwise))
            }
            _ => None,
        };
        let Some((values, of)) = found else {
            return self.steps.push(QuantizeStep::Activation);
        };
        self.missing = [false; 2];
        if is_fused {
            return (self.steps).push(QuantizeStep::ActivationWithAmax(values, of));
        }
        self.steps.push(QuantizeStep::Activation);
        self.steps.push(QuantizeStep::Amax(values, of));
    }

    /// Plans one tensor.
    fn one(&mut self, target: &TargetSpec, usage: Usage) {
        let groups = self.request.groups;
        let is_missing = self.is_missing(usage);
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
            // One amax per matrix of a stack, or of a matrix in tiles, serves both usages.
            let along = match groups {
                Groups::Batch(_) => Usage::Rowwise,
                _ if target.params.is_2d() => Usage::Rowwise,
                _ => usage,
            };
            self.amax(target.amax_along(along), usage.into());
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
            && row.params.is_ms_eden()
            && col.params.is_ms_eden()
            && self.missing == [true; 2]
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
        let missing = match self.missing {
            [true, true] => Some((amax_of_both(row, col), Usages::Both)),
            [true, false] => Some((row.amax_along(Usage::Rowwise), Usages::Rowwise)),
            [false, true] => Some((col.amax_along(Usage::Columnwise), Usages::Columnwise)),
            [false, false] => None,
        };
        if let Some((values, of)) = missing {
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

    fn is_missing(&self, usage: Usage) -> bool {
        let [rowwise, columnwise] = self.missing;
        match usage {
            Usage::Rowwise => rowwise,
            Usage::Columnwise => columnwise,
        }
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
