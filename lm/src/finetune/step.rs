//! Inputs of a step on the device.

use anyhow::Result;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use crate::capture::copy_into;
use crate::decoder::PackedRows;
use crate::tokens::RowBatch;
use crate::train::{GraphInput, StepInput};

/// Rows of one forward pass.
pub struct DeviceBatch {
    /// Inputs, `[batch, context]`.
    pub(super) inputs: Tensor<2, Int>,
    /// Targets, `[batch * context]`.
    pub(super) targets: Tensor<1, Int>,
    pub(super) rows: PackedRows,
}

impl GraphInput for DeviceBatch {
    fn filled(self, from: Self) -> Result<Self> {
        Ok(Self {
            inputs: copy_into(self.inputs, from.inputs)?,
            targets: copy_into(self.targets, from.targets)?,
            rows: self.rows.filled(from.rows)?,
        })
    }
}

/// Copies `batches` to `device`, an autodiff device; `counted` is the number of targets that count
/// in the step, on all ranks. With `documents`, the shapes of all tensors are the same for every
/// step, with space for that many documents per batch.
///
/// # Errors
/// Returns an error if a batch has no row, or more documents.
pub(super) fn step_input(
    batches: &[RowBatch],
    counted: usize,
    documents: Option<usize>,
    device: &Device,
) -> Result<StepInput<DeviceBatch>> {
    let on_device = |batch: &RowBatch| {
        let (inputs, targets, rows) = batch.tensors_with_room(documents, device)?;
        Ok(DeviceBatch {
            inputs,
            targets,
            rows,
        })
    };
    let counted = TensorData::new(vec![counted as i32], [1]);
    let plain = device.clone().without_autodiff();
    Ok(StepInput {
        batches: batches.iter().map(on_device).collect::<Result<_>>()?,
        counted: Some(Tensor::from_data(counted, (&plain, DType::I32))),
    })
}
