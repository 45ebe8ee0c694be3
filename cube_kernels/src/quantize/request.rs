//! Quantization requests: checks, the choice of kernels, and their launch.

use cubecl::{client::Client, server::Handle};

use super::{
    amax::{AmaxRequest, Amaxes},
    check::{check_target, check_unscaled},
    compute_amax::{ComputeAmax, Values, step_of_matrix},
    ms_eden::{EdenSource, EdenTransform, can_screen, ms_eden, ms_eden_amax, ms_eden_amax_pair},
    mx::{mx_quantize, mx_requantize},
    per_token::quantize_per_token,
    rowwise::{by_rows, quantize_rows, quantize_rows_in_both_storages},
    source::Source,
    step::{Operation, QuantizeStep, Usages},
    target::TargetSpec,
    tiles::{Kind, launch_tiles},
};
use crate::{
    Nvfp4Error, ScaleLayout, StoredForm, Usage,
    capabilities::Capabilities,
    memory::is_aligned,
    policy::AmaxGranularity,
    tensor::{DeviceQuantized, Groups, Matrix},
};

/// A quantization request: the rowwise and the columnwise tensor of a source, from one read of it
/// if one kernel writes both.
///
/// A rowwise tensor has blocks along the rows of the source, a columnwise one down its columns,
/// stored transposed, the last block padded with zeros. See
/// [`reference::quantize`](crate::reference::quantize),
/// [`reference::quantize_tile`](crate::reference::quantize_tile),
/// [`reference::ms_eden`](crate::reference::ms_eden) and
/// [`reference::mx_quantize`](crate::reference::mx_quantize).
///
/// With groups, each group is quantized as a separate matrix; only the block indices of random bits
/// continue from group to group. Columnwise tensors of [`Groups::Offsets`] are concatenated along
/// the columns, as the grouped GEMMs read them: there are `cols` stored rows, in each of which
/// group `g` takes the columns from entry `g` of
/// [`GroupOffsets::aligned`](crate::moe::GroupOffsets::aligned)`(client, rows, unit)` on. `unit` is
/// the block or the size of the transform, and at least 64 with
/// [whole tiles](StoredForm::WholeTiles). There is space for
/// [`padded_bound`](crate::reference::padding::padded_bound)`(rows, groups, unit)` columns; those
/// after the last group are not written. Rows of the source after the last group are not written in
/// the rowwise tensor, whose scales in 128x4 tiles start anew at each group; with whole tiles, the
/// scales of the columnwise one are those of one matrix.
#[derive(Debug, Clone)]
pub struct Quantize<'a> {
    /// Values to quantize.
    pub source: Source<'a>,
    /// Groups of rows. Those of a quantized source are its own.
    pub groups: &'a Groups,
    /// Rowwise tensor.
    pub rowwise: Option<TargetSpec>,
    /// Columnwise tensor.
    pub columnwise: Option<TargetSpec>,
    /// True to also write the packed rowwise tensor as code times block scale in bf16: for a GEMM
    /// that multiplies values while the packed tensor is kept for another use.
    pub unscaled: bool,
    /// True to store the columnwise tensors of [`Groups::Offsets`] one after another instead of
    /// concatenated along the columns, for NVFP4 in 1x16 blocks. Only tests do.
    pub(super) stacked: bool,
}

/// Quantized tensors of a source.
#[derive(Debug, Clone, Default)]
pub struct Quantized {
    /// Rowwise tensor.
    pub rowwise: Option<DeviceQuantized>,
    /// Columnwise tensor.
    pub columnwise: Option<DeviceQuantized>,
    /// Rowwise tensor in bf16, if both storages were requested.
    pub unscaled: Option<DeviceQuantized>,
    /// Operations that were launched, in order.
    pub operations: Vec<Operation>,
}

/// Amax values of the tensors of a source, `f32` in device memory.
#[derive(Debug, Clone)]
pub struct QuantizedAmax {
    /// The activation, if the source is one.
    pub values: Option<Matrix>,
    /// Amax values of the rowwise tensor.
    pub rowwise: Option<Handle>,
    /// Amax values of the columnwise tensor; the same memory if one amax serves both.
    pub columnwise: Option<Handle>,
    /// Operations that were launched, in order.
    pub operations: Vec<Operation>,
}

impl<'a> Quantize<'a> {
    /// Returns a request for no tensor of `source` yet, without groups.
    pub fn new(source: impl Into<Source<'a>>) -> Self {
        let source = source.into();
        let groups = match source {
            Source::Quantized { tensor, .. } => &tensor.groups,
            Source::Matrix(_) | Source::Activation { .. } => &Groups::One,
        };
        Self {
            source,
            groups,
            rowwise: None,
            columnwise: None,
            unscaled: false,
            stacked: false,
        }
    }

    /// Sets the groups of rows.
    pub fn groups(self, groups: &'a Groups) -> Self {
        Self { groups, ..self }
    }

    /// Sets or removes the rowwise tensor.
    pub fn rowwise(self, target: impl Into<Option<TargetSpec>>) -> Self {
        let rowwise = target.into();
        Self { rowwise, ..self }
    }

    /// Sets or removes the columnwise tensor.
    pub fn columnwise(self, target: impl Into<Option<TargetSpec>>) -> Self {
        let columnwise = target.into();
        Self { columnwise, ..self }
    }

    /// Sets the tensor along `usage`.
    pub fn along(self, usage: Usage, target: TargetSpec) -> Self {
        match usage {
            Usage::Rowwise => self.rowwise(target),
            Usage::Columnwise => self.columnwise(target),
        }
    }

    /// Sets whether the rowwise tensor is written in both storages.
    pub fn unscaled(self, unscaled: bool) -> Self {
        Self { unscaled, ..self }
    }

    /// Returns the tensors with their usages.
    fn targets(&self) -> impl Iterator<Item = (Usage, &TargetSpec)> {
        let rowwise = self.rowwise.iter().map(|one| (Usage::Rowwise, one));
        let columnwise = self.columnwise.iter().map(|one| (Usage::Columnwise, one));
        rowwise.chain(columnwise)
    }

    /// Returns the tensor along `usage`, which is one of the request.
    fn target(&self, usage: Usage) -> &TargetSpec {
        let target = match usage {
            Usage::Rowwise => &self.rowwise,
            Usage::Columnwise => &self.columnwise,
        };
        target.as_ref().expect("planned for this tensor")
    }

    /// Returns true if the columnwise tensors of groups share stored rows.
    fn is_side_by_side(&self) -> bool {
        matches!(self.groups, Groups::Offsets { .. }) && !self.stacked
    }

    /// Checks the source, its groups and the tensors. Buffers that depend on the groups are checked
    /// when their kernel is launched.
    ///
    /// # Errors
    /// Returns an error if no tensor is requested, if K of a rowwise NVFP4 tensor is no multiple of
    /// 16, if kernels do not support a combination of options, if the groups do not fit, or if a
    /// buffer is smaller than its shape.
    pub fn check(&self) -> Result<(), Nvfp4Error> {
        self.source.check(self.groups)?;
        if self.targets().next().is_none() {
            return Err(Nvfp4Error::value("request", "no tensor", "at least one"));
        }
        let groups = (self.groups, self.is_side_by_side());
        for (usage, target) in self.targets() {
            check_target(target, usage, self.source.shape(), groups)?;
            if matches!(self.source, Source::Quantized { .. })
                && !target.params.is_made_from_codes()
            {
                return Err(Nvfp4Error::value(
                    "source",
                    "a quantized tensor",
                    "a matrix or an activation; MS-EDEN and MX formats also read codes",
                ));
            }
        }
        self.check_unscaled()
    }

    /// Returns an error unless the rowwise tensor can be written in both storages, if requested.
    fn check_unscaled(&self) -> Result<(), Nvfp4Error> {
        if !self.unscaled {
            return Ok(());
        }
        let target = match (&self.rowwise, &self.columnwise) {
            (Some(target), None)
                if !target.params.is_made_from_codes() && !target.params.is_2d() =>
            {
                target
            }
            _ => {
                return Err(Nvfp4Error::value(
                    "unscaled",
                    "true",
                    "false, or one rowwise NVFP4 tensor in 1x16 blocks, without MS-EDEN",
                ));
            }
        };
        match target.form {
            StoredForm::ROWS => check_unscaled(self.groups),
            other => Err(Nvfp4Error::value(
                "form",
                format!("{other:?} of a tensor in both storages"),
                format!(
                    "{:?}: no GEMM that reads values reads tiles",
                    StoredForm::ROWS
                ),
            )),
        }
    }

    /// Returns the kernels that the request launches on a device with these capabilities, in order;
    /// those that compute only the amax values if `only_amax`.
    pub(super) fn steps(&self, capabilities: &Capabilities, only_amax: bool) -> Vec<QuantizeStep> {
        let mut planner = Planner {
            request: self,
            capabilities,
            only_amax,
            missing: self.is_missing_amax(),
            steps: Vec::new(),
        };
        planner.run();
        planner.steps
    }

    /// Returns whether the amax of the rowwise and of the columnwise tensor is to be computed.
    fn is_missing_amax(&self) -> [bool; 2] {
        let is_missing =
            |target: &TargetSpec| target.params.format.has_global_scale() && target.amax.is_none();
        [&self.rowwise, &self.columnwise].map(|target| target.as_ref().is_some_and(is_missing))
    }

    /// Returns the tensors that need amax values of the source which are not given. MS-EDEN is
    /// excluded: its amax is that of rotated values.
    fn without_amax(&self) -> [Option<&TargetSpec>; 2] {
        let [row, col] = self.is_missing_amax();
        [(row, &self.rowwise), (col, &self.columnwise)].map(|(is_missing, target)| {
            let target = target.as_ref().filter(|_| is_missing);
            target.filter(|target| !target.params.is_made_from_codes())
        })
    }

    /// Returns the amax values of the source that the tensors need and that are not given. A kernel
    /// that writes the source may have computed them: see [`Self::set_amax`].
    pub fn missing_amax(&self) -> AmaxRequest {
        match self.without_amax() {
            [Some(row), Some(col)] => amax_of_both(row, col),
            [Some(row), None] => row.amax_along(Usage::Rowwise),
            [None, Some(col)] => col.amax_along(Usage::Columnwise),
            [None, None] => AmaxRequest::default(),
        }
    }

    /// Sets the [missing](Self::missing_amax) amax values.
    pub fn set_amax(&mut self, found: &Amaxes) {
        match self.without_amax().map(|target| target.is_some()) {
            [true, true] => self.set_amax_of(Usages::Both, found),
            [true, false] => self.set_amax_of(Usages::Rowwise, found),
            [false, true] => self.set_amax_of(Usages::Columnwise, found),
            [false, false] => {}
        }
    }

    /// Sets amax values that were computed of the source, for the tensors `of` it. A tensor whose
    /// own amax is absent takes the other one: one amax of untransformed values serves both.
    fn set_amax_of(&mut self, of: Usages, found: &Amaxes) {
        let Amaxes { rows, cols } = found;
        if let (Some(target), true) = (&mut self.rowwise, of.has(Usage::Rowwise)) {
            target.amax = rows.clone().or_else(|| cols.clone());
        }
        if let (Some(target), true) = (&mut self.columnwise, of.has(Usage::Columnwise)) {
            target.amax = cols.clone().or_else(|| rows.clone());
        }
    }

    /// Queues the kernels of the request and returns the tensors, without waiting.
    ///
    /// # Errors
    /// See [`Self::check`]; also returns an error if an amax buffer is smaller than its shape.
    pub fn launch(&self, client: &Client) -> Result<Quantized, Nvfp4Error> {
        Ok(self.launch_steps(client, false)?.made)
    }

    /// Computes only the amax values that the tensors need, without quantizing, and writes the
    /// activation, if the source is one.
    ///
    /// # Errors
    /// See [`Self::launch`].
    pub fn launch_amax(&self, client: &Client) -> Result<QuantizedAmax, Nvfp4Error> {
        let launch = self.launch_steps(client, true)?;
        let amax = |target: Option<TargetSpec>| target.and_then(|target| target.amax);
        Ok(QuantizedAmax {
            values: launch.values.into_written(),
            rowwise: amax(launch.request.rowwise),
            columnwise: amax(launch.request.columnwise),
            operations: launch.made.operations,
        })
    }

    fn launch_steps<'b>(
        &'b self,
        client: &'b Client,
        only_amax: bool,
    ) -> Result<Launch<'b>, Nvfp4Error> {
        self.check()?;
        let steps = self.steps(Capabilities::of(client), only_amax);
        tracing::trace!(?steps, "quantize");
        let mut launch = Launch::new(client, self);
        for step in steps {
            launch.step(step)?;
        }
        Ok(launch)
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
    fn run(&mut self) {
        let request = self.request;
        if let Source::Activation { .. } = request.source {
            self.activation();
        }
        match (&request.rowwise, &request.columnwise) {
            (Some(row), Some(col)) => self.both(row, col),
            (Some(row), None) => self.one(row, Usage::Rowwise),
            (None, Some(col)) => self.one(col, Usage::Columnwise),
            (None, None) => {}
        }
    }

    /// Plans the activation, with the amax values that are not computed more cheaply later.
    fn activation(&mut self) {
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
        match found {
            Some((values, of)) => {
                let amax = ComputeAmax::new(request.source, values).groups(request.groups);
                amax.push_steps(of, &mut self.steps);
                self.missing = [false; 2];
            }
            None => self.steps.push(QuantizeStep::Activation),
        }
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
        let step = step_of_matrix(values, self.request.groups, of);
        self.steps.push(step);
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

/// Returns the amax values of both tensors of a matrix: one amax, if it serves both.
fn amax_of_both(row: &TargetSpec, col: &TargetSpec) -> AmaxRequest {
    let is_shared = row.params.shares_amax() && col.params.shares_amax();
    AmaxRequest {
        rows: Some(row.params.amax),
        cols: (!is_shared).then_some((col.params.amax, col.params.hadamard)),
    }
}

/// Launch of a plan: the request with the amax values that were computed so far, and its results.
struct Launch<'a> {
    client: &'a Client,
    request: Quantize<'a>,
    values: Values<'a>,
    made: Quantized,
}

impl<'a> Launch<'a> {
    fn new(client: &'a Client, request: &Quantize<'a>) -> Self {
        Self {
            client,
            request: request.clone(),
            values: Values::of(request.source),
            made: Quantized::default(),
        }
    }

    fn step(&mut self, step: QuantizeStep) -> Result<(), Nvfp4Error> {
        let (client, groups) = (self.client, self.request.groups);
        (self.made.operations).extend(step.operation(&self.request.source));
        match step {
            QuantizeStep::Activation => {
                self.values.compute(client, groups, step)?;
            }
            QuantizeStep::ActivationWithAmax(_, of)
            | QuantizeStep::AmaxOfMatrix(_, of)
            | QuantizeStep::Amax(_, of) => {
                let found = self.values.compute(client, groups, step)?;
                self.request.set_amax_of(of, &found);
            }
            QuantizeStep::MsEdenAmax(usage) => {
                let transform = EdenTransform::of(self.request.target(usage));
                let source = self.eden_source();
                let found = ms_eden_amax(client, source, usage, &transform)?;
                self.set_eden_amax(usage, found);
            }
            QuantizeStep::MsEdenAmaxPair => {
                let [row, col] = [Usage::Rowwise, Usage::Columnwise]
                    .map(|usage| EdenTransform::of(self.request.target(usage)));
                let [row, col] = ms_eden_amax_pair(client, self.values.matrix(), [&row, &col])?;
                self.set_eden_amax(Usage::Rowwise, row);
                self.set_eden_amax(Usage::Columnwise, col);
            }
            QuantizeStep::PerToken => {
                let target = self.request.target(Usage::Rowwise);
                let made = quantize_per_token(client, self.values.matrix(), target)?;
                self.made.rowwise = Some(made);
            }
            QuantizeStep::Rows => {
                let target = self.request.target(Usage::Rowwise);
                let made = quantize_rows(client, self.values.matrix(), groups, target)?;
                self.made.rowwise = Some(self.rows_of_matrix(made));
            }
            QuantizeStep::RowsInBothStorages => {
                let target = self.request.target(Usage::Rowwise);
                let made = quantize_rows_in_both_storages(client, self.values.matrix(), target)?;
                (self.made.rowwise, self.made.unscaled) = (Some(made.0), Some(made.1));
            }
            QuantizeStep::Blocks(of) => self.by_tiles(of, Kind::Blocks)?,
            QuantizeStep::BlocksSideBySide(of) => self.by_tiles(of, Kind::SideBySide)?,
            QuantizeStep::Tiles(of) => self.by_tiles(of, Kind::Tiles)?,
            QuantizeStep::MsEden(usage) => {
                let target = self.request.target(usage);
                let made = ms_eden(client, self.eden_source(), usage, target)?;
                self.made.set(usage, made);
            }
            QuantizeStep::Mx(usage) => {
                let target = self.request.target(usage);
                let made = mx_quantize(client, self.values.matrix(), groups, usage, target)?;
                self.made.set(usage, made);
            }
            QuantizeStep::MxRequantize(usage) => {
                let Source::Quantized { tensor, via } = self.request.source else {
                    unreachable!("planned for a quantized source");
                };
                let target = self.request.target(usage);
                let made = mx_requantize(client, tensor, usage, target, via)?;
                self.made.set(usage, made);
            }
        }
        Ok(())
    }

    /// Launches the kernel of tiles in shared memory.
    fn by_tiles(&mut self, of: Usages, kind: Kind) -> Result<(), Nvfp4Error> {
        let target = |usage| of.has(usage).then(|| self.request.target(usage));
        let (row, col) = (target(Usage::Rowwise), target(Usage::Columnwise));
        let (x, groups) = (self.values.matrix(), self.request.groups);
        let (row, col) = launch_tiles(self.client, x, groups, row, col, kind)?;
        if let Some(row) = row {
            self.made.rowwise = Some(match kind {
                Kind::SideBySide => self.rows_of_matrix(row),
                Kind::Blocks | Kind::Tiles => row,
            });
        }
        if let Some(col) = col {
            self.made.columnwise = Some(col);
        }
        Ok(())
    }

    /// Returns a rowwise tensor of groups as that of one matrix, if its scales do not start anew at
    /// each group.
    fn rows_of_matrix(&self, made: DeviceQuantized) -> DeviceQuantized {
        match (self.request.is_side_by_side(), made.layout.scale_layout) {
            (true, ScaleLayout::Compact) => DeviceQuantized {
                groups: Groups::One,
                ..made
            },
            _ => made,
        }
    }

    /// Returns the source of MS-EDEN.
    fn eden_source(&self) -> EdenSource<'_> {
        match self.request.source {
            Source::Quantized { tensor, .. } => EdenSource::Packed(tensor),
            Source::Matrix(_) | Source::Activation { .. } => {
                EdenSource::Matrix(self.values.matrix(), self.request.groups)
            }
        }
    }

    fn set_eden_amax(&mut self, usage: Usage, amax: Handle) {
        let rows = Some(amax);
        self.request
            .set_amax_of(usage.into(), &Amaxes { rows, cols: None });
    }
}

impl Quantized {
    fn set(&mut self, usage: Usage, made: DeviceQuantized) {
        match usage {
            Usage::Rowwise => self.rowwise = Some(made),
            Usage::Columnwise => self.columnwise = Some(made),
        }
    }

    /// Returns the only tensor along either axis.
    ///
    /// # Panics
    /// Panics if there are two tensors.
    pub fn into_one(self) -> DeviceQuantized {
        match (self.rowwise, self.columnwise) {
            (Some(one), None) | (None, Some(one)) => one,
            _ => panic!("one tensor was requested"),
        }
    }

    /// Returns the rowwise and the columnwise tensor.
    ///
    /// # Panics
    /// Panics if one of them was not requested.
    pub fn into_both(self) -> (DeviceQuantized, DeviceQuantized) {
        match (self.rowwise, self.columnwise) {
            (Some(row), Some(col)) => (row, col),
            _ => panic!("both tensors were requested"),
        }
    }
}
