//! What a step reads, on the device, and steps as a CUDA graph.

use anyhow::Result;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use crate::capture::{GraphSteps, copy_into};
use crate::decoder::PackedRows;
use crate::tokens::{RowBatch, Rows};

/// The rows of one forward.
pub(super) struct DeviceBatch {
    /// `[batch, context]`.
    pub inputs: Tensor<2, Int>,
    /// `[batch * context]`.
    pub targets: Tensor<1, Int>,
    pub rows: PackedRows,
}

/// What a step reads.
pub(super) struct StepInput {
    pub batches: Vec<DeviceBatch>,
    /// Targets of the step that count, `i32[1]`.
    counted: Tensor<1, Int>,
}

impl StepInput {
    /// `batches` on `device`, which is one of autodiff; `counted` are the targets that count in the
    /// step, on all ranks. With `documents`, all tensors have the shapes of any step: there is room
    /// for so many documents in a batch.
    ///
    /// # Errors
    /// When a batch has no row, or more documents.
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

    /// 1 / (targets that count), `f32[1]` without autodiff: by what sums over targets are multiplied.
    /// It is computed on the device, so that a graph has that of its step.
    pub fn scale(&self) -> Tensor<1> {
        self.counted.clone().float().cast(DType::F32).recip()
    }

    /// `from` in the memory of this one.
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

/// Documents that a batch of `batch` of `rows` has at most; the padding of a row is one.
pub(super) fn most_documents(rows: &Rows, batch: usize) -> usize {
    batch * (rows.most_documents() + 1)
}

/// The steps of a run as a CUDA graph.
pub(super) struct Graph {
    pub steps: GraphSteps,
    /// Where the graph reads it.
    pub input: Option<StepInput>,
    /// Of the last step, where the graph writes it.
    pub loss: Option<Tensor<1>>,
    /// Documents of a batch that there is room for.
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

    /// Puts what the next step reads where the graph reads it.
    pub fn load(&mut self, input: StepInput) -> Result<()> {
        self.input = Some(match self.input.take() {
            None => input,
            Some(before) => before.filled(input)?,
        });
        Ok(())
    }
}
