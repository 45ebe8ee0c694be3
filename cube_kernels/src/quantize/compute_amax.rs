//! Amax requests.

use cubecl::client::Client;

use super::{
    amax::{AmaxRequest, Amaxes, amax_of_matrix, amaxes, run_prologue_with_amaxes},
    source::Source,
    step::{QuantizeStep, Usages},
};
use crate::{
    Nvfp4Error,
    activation::{activation_of_groups, prologue_of},
    policy::AmaxGranularity,
    tensor::{Groups, Matrix},
};

/// A request for amax values of a matrix or of an activation, before or after the columnwise
/// transform; 0 for empty ranges. Deterministic; NaN and infinity propagate.
///
/// See [`reference::amax`](crate::reference::amax),
/// [`reference::amax_rows`](crate::reference::amax_rows),
/// [`reference::amax_cols`](crate::reference::amax_cols) and
/// [`reference::amax_rht`](crate::reference::amax_rht). The amax of rows after the last group is
/// undefined.
#[derive(Debug, Clone, Copy)]
pub struct ComputeAmax<'a> {
    /// Values.
    pub source: Source<'a>,
    /// Groups of rows.
    pub groups: &'a Groups,
    /// Amax values to compute.
    pub values: AmaxRequest,
    /// True to compute one amax of a whole matrix by the kernels of the other amax values, in
    /// tests and measurements.
    pub(super) by_lines: bool,
}

/// Result of [`ComputeAmax`].
#[derive(Debug, Clone)]
pub struct ComputedAmax {
    /// The activation, if the source is one. Elements of rows after the last group are undefined.
    pub values: Option<Matrix>,
    /// Amax values that were requested.
    pub amax: Amaxes,
}

impl<'a> ComputeAmax<'a> {
    /// Returns a request for `values` of `source`, without groups.
    pub fn new(source: impl Into<Source<'a>>, values: AmaxRequest) -> Self {
        Self {
            source: source.into(),
            groups: &Groups::One,
            values,
            by_lines: false,
        }
    }

    /// Returns a request for the amax of a matrix.
    pub fn of_matrix(matrix: &'a Matrix) -> Self {
        let rows = Some(AmaxGranularity::PerTensor);
        Self::new(matrix, AmaxRequest { rows, cols: None })
    }

    /// Sets the groups of rows.
    pub fn groups(self, groups: &'a Groups) -> Self {
        Self { groups, ..self }
    }

    /// Checks the source and its groups.
    ///
    /// # Errors
    /// Returns an error if the source is a quantized tensor, if the groups do not fit, or if a
    /// buffer is smaller than its shape.
    pub fn check(&self) -> Result<(), Nvfp4Error> {
        match self.source {
            Source::Quantized { .. } => Err(Nvfp4Error::value(
                "source",
                "a quantized tensor",
                "a matrix or an activation",
            )),
            source => source.check(self.groups),
        }
    }

    /// Returns the kernels that the request launches.
    pub fn plan(&self) -> Vec<QuantizeStep> {
        let mut plan = Vec::new();
        let of = match (self.values.rows, self.values.cols) {
            (Some(_), None) => Usages::Rowwise,
            (None, Some(_)) => Usages::Columnwise,
            _ => Usages::Both,
        };
        self.push_steps(of, &mut plan);
        plan
    }

    /// Appends the steps that compute the values, for the tensors `of` the source.
    pub(super) fn push_steps(&self, of: Usages, plan: &mut Vec<QuantizeStep>) {
        if let Source::Activation { kind, x, grad } = self.source {
            if prologue_of(kind, x, grad).is_some() {
                plan.push(QuantizeStep::ActivationWithAmax(self.values, of));
                return;
            }
            plan.push(QuantizeStep::Activation);
            plan.push(QuantizeStep::Amax(self.values, of));
            return;
        }
        plan.push(match self.by_lines {
            true => QuantizeStep::Amax(self.values, of),
            false => step_of_matrix(self.values, self.groups, of),
        });
    }

    /// Computes the values.
    ///
    /// # Errors
    /// See [`Self::check`].
    pub fn launch(&self, client: &Client) -> Result<ComputedAmax, Nvfp4Error> {
        self.check()?;
        let mut values = Values::of(self.source);
        let mut amax = Amaxes::default();
        for step in self.plan() {
            amax = values.compute(client, self.groups, step)?;
        }
        let values = values.written;
        Ok(ComputedAmax { values, amax })
    }
}

/// Returns the step that computes amax values of a matrix in memory.
pub(super) fn step_of_matrix(values: AmaxRequest, groups: &Groups, of: Usages) -> QuantizeStep {
    match groups {
        Groups::One if values.is_one_amax() => QuantizeStep::AmaxOfMatrix(values, of),
        _ => QuantizeStep::Amax(values, of),
    }
}

/// Values of a source, which a step may write.
pub(super) struct Values<'a> {
    source: Source<'a>,
    /// Activation, once it is written.
    written: Option<Matrix>,
}

impl<'a> Values<'a> {
    /// Returns the values of `source`.
    pub fn of(source: Source<'a>) -> Self {
        let written = None;
        Self { source, written }
    }

    /// Returns the matrix of the values.
    ///
    /// # Panics
    /// Panics if they are an activation that is not written yet, or are not in memory.
    pub fn matrix(&self) -> &Matrix {
        match (&self.written, self.source) {
            (Some(written), _) => written,
            (None, Source::Matrix(matrix)) => matrix,
            (None, _) => unreachable!("an activation is written before it is read"),
        }
    }

    /// Returns the activation, if a step wrote it.
    pub fn into_written(self) -> Option<Matrix> {
        self.written
    }

    /// Launches a step that writes the values or computes their amax, and returns the amax.
    ///
    /// # Panics
    /// Panics if `step` is another one.
    pub fn compute(
        &mut self,
        client: &Client,
        groups: &Groups,
        step: QuantizeStep,
    ) -> Result<Amaxes, Nvfp4Error> {
        match (step, self.source) {
            (QuantizeStep::Activation, Source::Activation { kind, x, grad }) => {
                let made = activation_of_groups(client, kind, (x, grad), groups)?;
                self.written = Some(made);
                Ok(Amaxes::default())
            }
            (
                QuantizeStep::ActivationWithAmax(request, _),
                Source::Activation { kind, x, grad },
            ) => {
                let prologue = prologue_of(kind, x, grad).expect("planned for a fused prologue");
                let (made, found) = run_prologue_with_amaxes(client, prologue, groups, &request)?;
                self.written = Some(made);
                Ok(found)
            }
            (QuantizeStep::AmaxOfMatrix(_, of), _) => {
                let found = amax_of_matrix(client, self.matrix())?;
                let (rows, cols) = match of {
                    Usages::Rowwise => (Some(found), None),
                    Usages::Columnwise => (None, Some(found)),
                    Usages::Both => (Some(found.clone()), Some(found)),
                };
                Ok(Amaxes { rows, cols })
            }
            (QuantizeStep::Amax(request, _), _) => amaxes(client, self.matrix(), groups, &request),
            _ => unreachable!("not a step of amax values"),
        }
    }
}
