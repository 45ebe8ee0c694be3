//! Rows of several documents, which do not see each other.

use anyhow::{Result, ensure};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_nvfp4::attention::Sequences;

use super::positions::Places;

/// Where the documents of a batch of rows lie. Attention stays within a document, and positions
/// begin anew in each.
#[derive(Clone, Debug)]
pub struct PackedRows {
    pub(super) sequences: Sequences,
    pub(super) places: Places,
    shape: [usize; 2],
    /// Tokens of the longest document.
    pub(super) longest: usize,
}

impl PackedRows {
    /// `lengths[i]` are those of the documents in row `i`, one behind another; the rest of the `time`
    /// tokens of a row is padding, a document of its own.
    ///
    /// # Errors
    /// When there is no row, or documents are longer than their row.
    pub fn new(lengths: &[Vec<usize>], time: usize, device: &Device) -> Result<Self> {
        ensure!(
            !lengths.is_empty() && time > 0,
            "`lengths` are of {} rows of {time} tokens, but there must be at least one of each",
            lengths.len()
        );
        let mut offsets = vec![0u32];
        let mut positions = Vec::with_capacity(lengths.len() * time);
        let mut longest = 0;
        for (row, documents) in lengths.iter().enumerate() {
            let used: usize = documents.iter().sum();
            ensure!(
                used <= time,
                "row {row} has documents of {used} tokens, but room for {time}"
            );
            let padding = (used < time).then_some(time - used);
            for &length in documents.iter().chain(&padding) {
                longest = longest.max(length);
                positions.extend((0..length).map(|position| position as i32));
                offsets.push(positions.len() as u32);
            }
        }
        let count = offsets.len();
        let offsets = TensorData::new(offsets, [count]);
        let offsets = Tensor::<1, Int>::from_data(offsets, (device, DType::U32));
        let shape = [lengths.len(), time];
        let data = TensorData::new(positions, [shape[0] * time]);
        Ok(Self {
            sequences: Sequences::packed(offsets),
            places: Places::Of {
                positions: Tensor::from_data(data, (device, DType::I32)),
                shape,
            },
            shape,
            longest,
        })
    }

    /// Rows, and tokens of each.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }
}
