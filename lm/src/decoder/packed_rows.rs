//! Rows packed with several documents that do not attend to each other.

use anyhow::{Result, bail, ensure};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_nvfp4::attention::Sequences;

use super::positions::Places;
use crate::capture::copy_into;

/// Positions of the documents in a batch of rows. Attention stays within a document, and positions
/// restart in each.
#[derive(Clone, Debug)]
pub struct PackedRows {
    pub(super) sequences: Sequences,
    pub(super) places: Places,
    shape: [usize; 2],
    /// Tokens of the longest document.
    pub(super) longest: usize,
}

impl PackedRows {
    /// Creates rows of `time` tokens, where `lengths[i]` are the lengths of the consecutive
    /// documents in row `i`. The rest of a row is padding, which counts as a document.
    ///
    /// # Errors
    /// Returns an error if there is no row, or if documents exceed their row.
    pub fn new(lengths: &[Vec<usize>], time: usize, device: &Device) -> Result<Self> {
        Self::of(lengths, time, None, device)
    }

    /// Creates rows with tensors whose shapes do not depend on the lengths. There is space for
    /// `most` documents including paddings, of which the last ones are empty, and a document may
    /// fill a row. Attention computes the same bits.
    ///
    /// # Errors
    /// Returns the errors of [`new`](Self::new). Also returns an error if there are more documents.
    pub fn with_room(
        lengths: &[Vec<usize>],
        [time, most]: [usize; 2],
        device: &Device,
    ) -> Result<Self> {
        Self::of(lengths, time, Some(most), device)
    }

    fn of(
        lengths: &[Vec<usize>],
        time: usize,
        room: Option<usize>,
        device: &Device,
    ) -> Result<Self> {
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
        if let Some(most) = room {
            let found = offsets.len() - 1;
            ensure!(
                found <= most,
                "there are {found} documents, paddings among them, but room for {most}"
            );
            offsets.resize(most + 1, positions.len() as u32);
            longest = time;
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

    /// Detaches the rows to the inner (non-autodiff) device.
    pub(crate) fn without_autodiff(&self) -> Self {
        let sequences = match &self.sequences {
            Sequences::Offsets { q, .. } => Sequences::packed(q.clone().without_autodiff()),
            equal => equal.clone(),
        };
        let places = match &self.places {
            Places::Of { positions, shape } => Places::Of {
                positions: positions.clone().without_autodiff(),
                shape: *shape,
            },
            places => places.clone(),
        };
        Self {
            sequences,
            places,
            ..self.clone()
        }
    }

    /// Copies `from`, which has the same shapes, into the memory of these rows, which must have no
    /// other owner.
    ///
    /// # Errors
    /// Returns an error if shapes or devices differ, or if the device has no graphs.
    pub(crate) fn filled(self, from: Self) -> Result<Self> {
        let (Sequences::Offsets { q: out, k }, Sequences::Offsets { q: offsets, .. }) =
            (self.sequences, from.sequences)
        else {
            bail!("rows of documents have offsets");
        };
        // `k` shares the memory of `q`, whose only owner the copy must be.
        drop(k);
        let sequences = Sequences::packed(copy_into(out, offsets)?);
        let places = match (self.places, from.places) {
            (
                Places::Of {
                    positions: out,
                    shape,
                },
                Places::Of { positions, .. },
            ) => Places::Of {
                positions: copy_into(out, positions)?,
                shape,
            },
            (places, _) => places,
        };
        Ok(Self {
            sequences,
            places,
            ..self
        })
    }

    /// Returns the number of rows, and the tokens per row.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }
}
