//! Launch of the kernels of a quantization request.

use cubecl::{client::Client, server::Handle};

use super::{
    amax::{Amaxes, amax_of_matrix, amaxes, run_prologue_with_amaxes},
    ms_eden::{EdenTransform, ms_eden, ms_eden_amax, ms_eden_amax_pair},
    mx::{mx_quantize, mx_requantize},
    per_token::quantize_per_token,
    request::{Quantize, Quantized},
    rowwise::{quantize_rows, quantize_rows_in_both_storages},
    source::Source,
    step::{QuantizeStep, Usages},
    target::TargetSpec,
    tiles::launch_tiles,
};
use crate::{
    Nvfp4Error, StoredForm, Usage,
    activation::{activation_of_groups, prologue_of},
    capabilities::Capabilities,
    reference::Activation,
    tensor::{DeviceQuantized, Groups, Matrix},
};

impl Quantize<'_> {
    /// Queues the kernels of the request and returns the tensors, without waiting.
    ///
    /// # Errors
    /// See [`Self::check`]; also returns an error if an amax buffer is smaller than its shape.
    pub fn launch(&self, client: &Client) -> Result<Quantized, Nvfp4Error> {
        self.run(client, false)
    }

    /// Computes only the amax values that the tensors need, without quantizing, and writes the
    /// activation, if the source is one. Deterministic; NaN and infinity propagate. Amax values of
    /// empty ranges are 0; those of rows after the last group are undefined.
    ///
    /// # Errors
    /// See [`Self::launch`].
    pub fn launch_amax(&self, client: &Client) -> Result<Quantized, Nvfp4Error> {
        self.run(client, true)
    }

    fn run(&self, client: &Client, only_amax: bool) -> Result<Quantized, Nvfp4Error> {
        self.check()?;
        let steps = self.steps(Capabilities::of(client), only_amax);
        tracing::trace!(?steps, "quantize");
        let mut launch = Launch::new(client, self);
        for step in steps {
            launch.step(step)?;
        }
        Ok(launch.finish())
    }
}

/// Launch of the steps of a request: the request with the amax values that were computed so far, and
/// its results.
struct Launch<'a> {
    client: &'a Client,
    request: Quantize<'a>,
    made: Quantized,
}

impl<'a> Launch<'a> {
    fn new(client: &'a Client, request: &Quantize<'a>) -> Self {
        Self {
            client,
            request: request.clone(),
            made: Quantized::default(),
        }
    }

    /// Returns the results.
    fn finish(self) -> Quantized {
        let amax = |target: Option<TargetSpec>| target.and_then(|target| target.amax);
        Quantized {
            amax: Amaxes {
                rows: amax(self.request.rowwise),
                cols: amax(self.request.columnwise),
            },
            ..self.made
        }
    }

    /// Launches one step.
    ///
    /// # Errors
    /// Returns an error if a buffer is smaller than its shape.
    fn step(&mut self, step: QuantizeStep) -> Result<(), Nvfp4Error> {
        let (client, groups) = (self.client, self.request.groups);
        (self.made.operations).extend(step.operation(&self.request.source));
        match step {
            QuantizeStep::Activation => {
                let (kind, x, grad) = self.activation();
                let written = activation_of_groups(client, kind, (x, grad), groups)?;
                self.made.values = Some(written);
            }
            QuantizeStep::ActivationWithAmax(values, of) => {
                let (kind, x, grad) = self.activation();
                let prologue = prologue_of(kind, x, grad).expect("planned for a fused prologue");
                let (written, found) = run_prologue_with_amaxes(client, prologue, groups, &values)?;
                self.made.values = Some(written);
                self.request.set_amax_of(of, &found);
            }
            QuantizeStep::AmaxOfMatrix(of) => {
                let found = amax_of_matrix(client, self.matrix())?;
                self.set_one_amax(of, found);
            }
            QuantizeStep::Amax(values, of) => {
                let found = amaxes(client, self.matrix(), groups, &values)?;
                self.request.set_amax_of(of, &found);
            }
            QuantizeStep::MsEdenAmax(usage) => {
                let transform = EdenTransform::of(self.request.target(usage));
                let found = ms_eden_amax(client, self.grouped_source(), usage, &transform)?;
                self.set_one_amax(usage.into(), found);
            }
            QuantizeStep::MsEdenAmaxPair => {
                let [row, col] = [Usage::Rowwise, Usage::Columnwise]
                    .map(|usage| EdenTransform::of(self.request.target(usage)));
                let [row, col] = ms_eden_amax_pair(client, self.matrix(), [&row, &col])?;
                self.set_one_amax(Usages::Rowwise, row);
                self.set_one_amax(Usages::Columnwise, col);
            }
            QuantizeStep::PerToken => {
                let target = self.request.target(Usage::Rowwise);
                let made = quantize_per_token(client, self.matrix(), target)?;
                self.made.rowwise = Some(made);
            }
            QuantizeStep::Rows => {
                let target = self.request.target(Usage::Rowwise);
                let made = quantize_rows(client, self.matrix(), groups, target)?;
                self.made.rowwise = Some(self.rows_of_matrix(made));
            }
            QuantizeStep::RowsInBothStorages => {
                let target = self.request.target(Usage::Rowwise);
                let made = quantize_rows_in_both_storages(client, self.matrix(), target)?;
                (self.made.rowwise, self.made.unscaled) = (Some(made.0), Some(made.1));
            }
            QuantizeStep::Blocks(of)
            | QuantizeStep::BlocksSideBySide(of)
            | QuantizeStep::Tiles(of) => self.by_tiles(of, step)?,
            QuantizeStep::MsEden(usage) => {
                let target = self.request.target(usage);
                let made = ms_eden(client, self.grouped_source(), usage, target)?;
                self.made.set(usage, made);
            }
            QuantizeStep::Mx(usage) => {
                let target = self.request.target(usage);
                let made = mx_quantize(client, self.matrix(), groups, usage, target)?;
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
    fn by_tiles(&mut self, of: Usages, step: QuantizeStep) -> Result<(), Nvfp4Error> {
        let target = |usage| of.has(usage).then(|| self.request.target(usage));
        let (row, col) = (target(Usage::Rowwise), target(Usage::Columnwise));
        let (x, groups) = (self.matrix(), self.request.groups);
        let (row, col) = launch_tiles(self.client, x, groups, row, col, step)?;
        if let Some(row) = row {
            self.made.rowwise = Some(match step {
                QuantizeStep::BlocksSideBySide(_) => self.rows_of_matrix(row),
                _ => row,
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
        match (self.request.is_side_by_side(), made.layout.form) {
            (true, StoredForm::Rows | StoredForm::Bf16Unscaled) => DeviceQuantized {
                groups: Groups::One,
                ..made
            },
            _ => made,
        }
    }

    /// Returns the activation to write: its kind, input, and the gradient of its output.
    fn activation(&self) -> (Activation, &'a Matrix, Option<&'a Matrix>) {
        match self.request.source {
            Source::Activation { kind, x, grad } => (kind, x, grad),
            _ => unreachable!("planned for an activation"),
        }
    }

    /// Returns the source; an activation, once it is written, as a matrix.
    fn source(&self) -> Source<'_> {
        match &self.made.values {
            Some(written) => Source::Matrix(written),
            None => self.request.source,
        }
    }

    /// Returns the source, and the groups of its rows.
    fn grouped_source(&self) -> (Source<'_>, &Groups) {
        match self.source() {
            source @ Source::Quantized { tensor, .. } => (source, &tensor.groups),
            source => (source, self.request.groups),
        }
    }

    /// Returns the matrix of the values.
    fn matrix(&self) -> &Matrix {
        match self.source() {
            Source::Matrix(matrix) => matrix,
            _ => unreachable!("an activation is written before it is read"),
        }
    }

    /// Sets the amax that serves the tensors `of` the source.
    fn set_one_amax(&mut self, of: Usages, amax: Handle) {
        let rows = Some(amax);
        self.request.set_amax_of(of, &Amaxes { rows, cols: None });
    }
}
