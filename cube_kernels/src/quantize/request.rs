//! Quantization requests and their results.

use super::{
    amax::{AmaxRequest, Amaxes},
    check::{check_target, check_unscaled},
    source::Source,
    step::{Operation, Usages},
    target::{TargetSpec, amax_of_both},
};
use crate::{
    Nvfp4Error, StoredForm, Usage,
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

/// Result of a request.
#[derive(Debug, Clone, Default)]
pub struct Quantized {
    /// Rowwise tensor.
    pub rowwise: Option<DeviceQuantized>,
    /// Columnwise tensor.
    pub columnwise: Option<DeviceQuantized>,
    /// Rowwise tensor in bf16, if both storages were requested.
    pub unscaled: Option<DeviceQuantized>,
    /// Activation, if the source is one.
    pub values: Option<Matrix>,
    /// Amax values of the tensors that were given or computed. Absent for rows that were quantized
    /// in the pass that computes their amax.
    pub amax: Amaxes,
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
    pub(super) fn targets(&self) -> impl Iterator<Item = (Usage, &TargetSpec)> {
        let rowwise = self.rowwise.iter().map(|one| (Usage::Rowwise, one));
        let columnwise = self.columnwise.iter().map(|one| (Usage::Columnwise, one));
        rowwise.chain(columnwise)
    }

    /// Returns the tensor along `usage`, which is one of the request.
    pub(super) fn target(&self, usage: Usage) -> &TargetSpec {
        let target = match usage {
            Usage::Rowwise => &self.rowwise,
            Usage::Columnwise => &self.columnwise,
        };
        target.as_ref().expect("planned for this tensor")
    }

    /// Returns true if the columnwise tensors of groups share stored rows.
    pub(super) fn is_side_by_side(&self) -> bool {
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
            StoredForm::Rows => check_unscaled(self.groups),
            other => Err(Nvfp4Error::value(
                "form",
                format!("{other:?} of a tensor in both storages"),
                format!(
                    "{:?}: no GEMM that reads values reads tiles",
                    StoredForm::Rows
                ),
            )),
        }
    }

    /// Returns the amax values of the source that are not given, and the tensors that need them.
    /// MS-EDEN needs the amax of rotated values instead.
    pub(super) fn missing(&self) -> Option<(AmaxRequest, Usages)> {
        let needs = |target: &&TargetSpec| target.needs_amax() && !target.params.is_ms_eden();
        let targets = [&self.rowwise, &self.columnwise];
        match targets.map(|target| target.as_ref().filter(needs)) {
            [Some(row), Some(col)] => Some((amax_of_both(row, col), Usages::Both)),
            [Some(row), None] => Some((row.amax_along(Usage::Rowwise), Usages::Rowwise)),
            [None, Some(col)] => Some((col.amax_along(Usage::Columnwise), Usages::Columnwise)),
            [None, None] => None,
        }
    }

    /// Returns the amax values of the source that the tensors need and that are not given. A kernel
    /// that writes the source may have computed them: see [`Self::set_amax`].
    pub fn missing_amax(&self) -> AmaxRequest {
        self.missing()
            .map_or_else(AmaxRequest::default, |(values, _)| values)
    }

    /// Sets the [missing](Self::missing_amax) amax values.
    pub fn set_amax(&mut self, found: &Amaxes) {
        if let Some((_, of)) = self.missing() {
            self.set_amax_of(of, found);
        }
    }

    /// Sets amax values that were computed of the source, for the tensors `of` it. A tensor whose
    /// own amax is absent takes the other one: one amax of untransformed values serves both.
    pub(super) fn set_amax_of(&mut self, of: Usages, found: &Amaxes) {
        let Amaxes { rows, cols } = found;
        if let (Some(target), true) = (&mut self.rowwise, of.has(Usage::Rowwise)) {
            target.amax = rows.clone().or_else(|| cols.clone());
        }
        if let (Some(target), true) = (&mut self.columnwise, of.has(Usage::Columnwise)) {
            target.amax = cols.clone().or_else(|| rows.clone());
        }
    }
}

impl Quantized {
    pub(super) fn set(&mut self, usage: Usage, made: DeviceQuantized) {
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
