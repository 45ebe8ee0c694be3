//! Quantized tensors to make of a source.

use cubecl::server::Handle;

use super::amax::AmaxRequest;
use crate::{Format, QuantParams, StoredForm, Usage, moe::EarlierGroups, policy::AmaxGranularity};

/// One quantized tensor to make of a source, along either axis.
#[derive(Debug, Clone)]
pub struct TargetSpec {
    /// Parameters.
    pub params: QuantParams,
    /// Form in which the tensor is stored. [`StoredForm::WholeTiles`] pads the contraction of a
    /// columnwise tensor with zeros to whole 128x4 tiles of scales, 64 elements, so that FP4 tensor
    /// cores accept any number of tokens. The result equals that of a matrix with as many extra
    /// rows of zeros, except that random bits are numbered as in the unpadded matrix.
    pub form: StoredForm,
    /// Amax values, `f32` in device memory, if they are known. Otherwise the request computes them.
    pub amax: Option<Handle>,
    /// Offset that is added to the one of the random stream, if it is in device memory: two `u32`,
    /// low word first. A captured graph that advances it draws fresh bits at each replay.
    pub offset: Option<Handle>,
    /// Groups of rows that precede those of the source in the logical tensor, for groups with
    /// offsets: stochastic rounding numbers the tensor's blocks after those of these groups.
    pub earlier: Option<EarlierGroups>,
}

impl TargetSpec {
    /// Returns a tensor by `params`, of codes and row-major block scales.
    pub fn new(params: impl Into<QuantParams>) -> Self {
        Self {
            params: params.into(),
            form: StoredForm::Rows,
            amax: None,
            offset: None,
            earlier: None,
        }
    }

    /// Sets the form in which the tensor is stored.
    pub fn form(self, form: StoredForm) -> Self {
        Self { form, ..self }
    }

    /// Sets the amax values.
    pub fn amax(self, amax: &Handle) -> Self {
        Self {
            amax: Some(amax.clone()),
            ..self
        }
    }

    /// Sets the granularity of the amax.
    pub fn granularity(mut self, granularity: AmaxGranularity) -> Self {
        self.params.amax = granularity;
        self
    }

    /// Sets the offset in device memory.
    pub fn offset(mut self, offset: &Handle) -> Self {
        self.params.offset_in_memory = true;
        self.offset = Some(offset.clone());
        self
    }

    /// Returns the amax values.
    ///
    /// # Panics
    /// Panics if they are not known.
    pub(super) fn known_amax(&self) -> &Handle {
        let amax = self.amax.as_ref();
        amax.expect("an earlier step computed the amax values")
    }

    /// Returns true if the tensor needs an amax that is not known.
    pub(super) fn needs_amax(&self) -> bool {
        self.params.format.has_global_scale() && self.amax.is_none()
    }

    /// Returns the amax values of a tensor along `usage`. One amax of untransformed values serves
    /// both usages.
    pub(super) fn amax_along(&self, usage: Usage) -> AmaxRequest {
        let usage = match self.params.shares_amax() {
            true => Usage::Rowwise,
            false => usage,
        };
        AmaxRequest::along(usage, self.params.amax, self.params.hadamard)
    }
}

impl From<Format> for TargetSpec {
    fn from(format: Format) -> Self {
        Self::new(format)
    }
}

impl From<QuantParams> for TargetSpec {
    fn from(params: QuantParams) -> Self {
        Self::new(params)
    }
}

impl From<(QuantParams, StoredForm)> for TargetSpec {
    fn from((params, form): (QuantParams, StoredForm)) -> Self {
        Self::new(params).form(form)
    }
}

/// Returns the amax values of both tensors of a matrix: one amax, if it serves both.
pub(super) fn amax_of_both(row: &TargetSpec, col: &TargetSpec) -> AmaxRequest {
    let is_shared = row.params.shares_amax() && col.params.shares_amax();
    AmaxRequest {
        rows: Some(row.params.amax),
        cols: (!is_shared).then_some((col.params.amax, col.params.hadamard)),
    }
}
