//! Keys and values of the tokens that a model has seen.

use anyhow::{Result, ensure};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use burn_nvfp4::attention::Sequences;

use super::positions::Places;
use crate::hf::DecoderConfig;

/// The keys and values of a batch of sequences, for all layers of a model. Sequences have lengths
/// of their own, and room for `capacity` tokens each.
#[derive(Clone, Debug)]
pub struct KvCache {
    /// For each layer; `None` only while a layer writes.
    layers: Vec<Option<LayerCache>>,
    lengths: Vec<usize>,
    capacity: usize,
    device: Device,
}

/// Keys and values of one layer, `[batch, capacity, kv_heads, head]`. What lies behind a sequence's
/// length has no meaning, and is finite.
#[derive(Clone, Debug)]
pub(super) struct LayerCache {
    pub k: Tensor<4>,
    pub v: Tensor<4>,
}

/// Where the new tokens of one call lie, the same for all layers.
#[derive(Debug)]
pub(super) struct Chunk {
    /// Tokens before the new ones, of each sequence.
    pub starts: Vec<usize>,
    /// New tokens of each sequence; the rest of its row is padding.
    pub counts: Vec<usize>,
    /// The longest sequence with its new tokens.
    pub longest: usize,
    pub places: Places,
    pub sequences: Sequences,
}

impl KvCache {
    /// Room for `batch` sequences of `capacity` tokens of the model of `config`, in `dtype`.
    pub(super) fn new(
        config: &DecoderConfig,
        [batch, capacity]: [usize; 2],
        (device, dtype): (&Device, FloatDType),
    ) -> Result<Self> {
        ensure!(
            batch > 0,
            "the batch of the cache is 0, but must be positive"
        );
        ensure!(
            capacity > 0,
            "the capacity of the cache is 0, but must be positive"
        );
        let shape = [batch, capacity, config.kv_heads, config.head];
        let options = (device, DType::from(dtype));
        let layer = || LayerCache {
            k: Tensor::zeros(shape, options),
            v: Tensor::zeros(shape, options),
        };
        Ok(Self {
            layers: config.layers.iter().map(|_| Some(layer())).collect(),
            lengths: vec![0; batch],
            capacity,
            device: device.clone(),
        })
    }

    /// Tokens of each sequence.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Tokens that a sequence has room for.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Forgets all but the first `length` tokens of sequence `index`.
    ///
    /// # Panics
    /// When there is no such sequence.
    pub fn truncate(&mut self, index: usize, length: usize) {
        let current = &mut self.lengths[index];
        *current = length.min(*current);
    }

    /// The plan for `counts` new tokens of each sequence, in rows of `time`.
    pub(super) fn chunk(&self, time: usize, counts: &[usize]) -> Result<Chunk> {
        let batch = self.lengths.len();
        ensure!(
            counts.len() == batch && counts.iter().all(|count| *count <= time),
            "new tokens of the sequences are {counts:?}, but must be {batch} numbers up to {time}"
        );
        let starts = self.lengths.clone();
        let ends: Vec<usize> = starts.iter().zip(counts).map(|(s, c)| s + c).collect();
        let longest = ends.iter().copied().max().unwrap_or(0);
        ensure!(
            longest <= self.capacity,
            "a sequence would have {longest} tokens, but the cache has room for {}",
            self.capacity
        );
        // A row of padding has the position of the last token: it must only be one of the table.
        let positions = starts.iter().zip(&ends).flat_map(|(start, end)| {
            let last = end.saturating_sub(1);
            (0..time).map(move |i| (start + i).min(last) as i32)
        });
        let positions: Vec<i32> = positions.collect();
        let options = (&self.device, DType::I32);
        let data = TensorData::new(positions, [batch * time]);
        let places = Places::Of {
            positions: Tensor::from_data(data, options),
            shape: [batch, time],
        };
        Ok(Chunk {
            places,
            sequences: self.sequences(time, counts, &ends),
            counts: counts.to_vec(),
            longest,
            starts,
        })
    }

    /// Each sequence, and behind it one of what has no meaning: padding among the queries, room
    /// among the keys. So the cache is read where it lies.
    fn sequences(&self, time: usize, counts: &[usize], ends: &[usize]) -> Sequences {
        let offsets = |used: &[usize], stride: usize| {
            let mut offsets: Vec<u32> = vec![0];
            for (row, used) in used.iter().enumerate() {
                offsets.push((row * stride + used) as u32);
                offsets.push(((row + 1) * stride) as u32);
            }
            let count = offsets.len();
            let options = (&self.device, DType::U32);
            Tensor::<1, Int>::from_data(TensorData::new(offsets, [count]), options)
        };
        Sequences::Offsets {
            q: offsets(counts, time),
            k: offsets(ends, self.capacity),
        }
    }

    /// Writes the keys and values of the new tokens (`[batch, time, kv_heads, head]`) of a layer,
    /// and gives those of all tokens.
    pub(super) fn write(
        &mut self,
        layer: usize,
        chunk: &Chunk,
        k: &Tensor<4>,
        v: &Tensor<4>,
    ) -> LayerCache {
        // Taken, so that nobody else holds the buffers and they can be written in place.
        let LayerCache { k: old_k, v: old_v } =
            self.layers[layer].take().expect("a layer puts it back");
        let layer_cache = LayerCache {
            k: assign(old_k, chunk, k),
            v: assign(old_v, chunk, v),
        };
        self.layers[layer] = Some(layer_cache.clone());
        layer_cache
    }

    /// The new tokens are seen.
    pub(super) fn advance(&mut self, counts: &[usize]) {
        for (length, count) in self.lengths.iter_mut().zip(counts) {
            *length += count;
        }
    }
}

/// `all` with the new rows of each sequence behind its old ones.
fn assign(mut all: Tensor<4>, chunk: &Chunk, new: &Tensor<4>) -> Tensor<4> {
    let [batch, _, heads, head] = all.dims();
    let same = |numbers: &[usize]| numbers.iter().all(|n| *n == numbers[0]);
    let (start, count) = (chunk.starts[0], chunk.counts[0]);
    if same(&chunk.starts) && same(&chunk.counts) {
        if count == 0 {
            return all;
        }
        let new = new.clone().narrow(1, 0, count);
        return all.slice_assign([0..batch, start..start + count, 0..heads, 0..head], new);
    }
    for (row, (&start, &count)) in chunk.starts.iter().zip(&chunk.counts).enumerate() {
        if count > 0 {
            let new = new.clone().narrow(0, row, 1).narrow(1, 0, count);
            let place = [row..row + 1, start..start + count, 0..heads, 0..head];
            all = all.slice_assign(place, new);
        }
    }
    all
}
