//! Inputs of a step on the device, and steps as a CUDA graph.

use anyhow::Result;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use crate::capture::{GraphSteps, copy_into};
use crate::decoder::PackedRows;
use crate::tokens::{RowBatch, Rows};

/// Rows of one forward pass.
pub(super) struct DeviceBatch {
    /// Inputs, `[batch, context]`.
    pub inputs: Tensor<2, Int>,
    /// Targets, `[batch * context]`.
    pub targets: Tensor<1, Int>,
    pub rows: PackedRows,
}

/// Input of a step.
pub(super) struct StepInput {
    pub batches: Vec<DeviceBatch>,
    /// Number of targets of the step that count, `i32[1]`.
    counted: Tensor<1, Int>,
}

impl StepInput {
    /// Copies `batches` to `device`, an autodiff device; `counted` is the number of targets that
    /// count in the step, on all ranks. With `documents`, the shapes of all tensors are the same
    /// for every step, with space for that many documents per batch.
    ///
    /// # Errors
    /// Returns an error if a batch has no row, or more documents.
    pub fn new(
        batches: &[RowBatch],
        counted: usize,
        documents: Option<usize>,
        device: &Device,
    ) -> Result<Self> {
        let counted = TensorData::new(vec![counted as i32], [1]);
        let on_device = |batch: &RowBatch| {
            let (inputs, targets, rows) = batch.tensors_with_room(documents, device)?;
            Ok(DeviceBatch {
                inputs,
                targets,
                rows,
            })
        };
        let plain = device.clone().without_autodiff();
        Ok(Self {
            batches: batches.iter().map(on_device).collect::<Result<_>>()?,
            counted: Tensor::from_data(counted, (&plain, DType::I32)),
        })
    }

    /// Returns the factor for sums over targets: 1 / (number of targets that count), `f32[1]`
    /// without autodiff. It is computed on the device, so that a graph uses the value of its step.
    pub fn scale(&self) -> Tensor<1> {
        self.counted.clone().float().cast(DType::F32).recip()
    }

    /// Copies `from` into the memory of this input.
    fn filled(self, from: Self) -> Result<Self> {
        let pairs = self.batches.into_iter().zip(from.batches);
        let batches = pairs.map(|(out, from)| {
            Ok(DeviceBatch {
                inputs: copy_into(out.inputs, from.inputs)?,
                targets: copy_into(out.targets, from.targets)?,
                rows: out.rows.filled(from.rows)?,
            })
        });
        Ok(Self {
            batches: batches.collect::<Result<_>>()?,
            counted: copy_into(self.counted, from.counted)?,
        })
    }
}

/// Returns the maximum number of documents in a batch of `batch` of `rows`; the padding of a row
/// counts as one.
pub(super) fn most_documents(rows: &Rows, batch: usize) -> usize {
    batch * (rows.most_documents() + 1)
}

/// The steps of a run as a CUDA graph.
pub(super) struct Graph {
    pub steps: GraphSteps,
    /// Input buffers that the graph reads.
    pub input: Option<StepInput>,
    /// Loss of the last step, in the buffer that the graph writes.
    pub loss: Option<Tensor<1>>,
    /// Maximum number of documents per batch.
    pub documents: usize,
}

impl Graph {
    pub fn new(steps: GraphSteps, documents: usize) -> Self {
        Self {
            steps,
            input: None,
            loss: None,
            documents,
        }
    }

    /// Copies the input of the next step into the graph's buffers.
    pub fn load(&mut self, input: StepInput) -> Result<()> {
        self.input = Some(match self.input.take() {
            None => input,
            Some(before) => before.filled(input)?,
        });
        Ok(())
    }
}
