//! Key-value cache.

use anyhow::{Result, ensure};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_nvfp4::attention::Sequences;
use burn_nvfp4::decode::{KvFormat, KvLayer, KvShape, Places};
use clap::ValueEnum;

use crate::hf::DecoderConfig;

/// Maximum number of new tokens per sequence for which attention reads the cache in place, with
/// kernels for few tokens. A longer chunk is part of a prompt and uses the attention of training.
pub(super) const FEW: usize = 8;

/// Storage format of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KvPrecision {
    /// The type of the activations
    #[value(name = "bf16")]
    Activations,
    /// FP8 (E4M3), with one scale for the keys and one for the values per layer
    ///
    /// The scales are those of the model's folder, or 1.
    Fp8,
}

/// Keys and values of a batch of sequences, for all layers of a model. Sequences have separate
/// lengths and space for `capacity` tokens each. The memory is written in place; on a GPU, clones
/// share it.
#[derive(Clone, Debug)]
pub struct KvCache {
    pub(super) layers: Vec<KvLayer>,
    lengths: Vec<usize>,
    capacity: usize,
    /// Maximum number of new tokens per sequence for the kernels that read the cache in place.
    few: usize,
    device: Device,
}

/// Positions of the new tokens of one call, the same for all layers.
#[derive(Debug)]
pub(super) struct Chunk {
    /// Length of the longest sequence, including its new tokens.
    pub longest: usize,
    pub places: Places,
    /// Sequences for more than [`FEW`] new tokens, or for a model with attention sinks.
    pub sequences: Option<Sequences>,
}

impl KvCache {
    /// Allocates space for `batch` sequences of `capacity` tokens of the model of `config`, with
    /// the layers stored in `formats`.
    pub(super) fn new(
        config: &DecoderConfig,
        [batch, capacity]: [usize; 2],
        device: &Device,
        formats: impl IntoIterator<Item = KvFormat>,
    ) -> Result<Self> {
        ensure!(
            batch > 0,
            "the batch of the cache is 0, but must be positive"
        );
        ensure!(
            capacity > 0,
            "the capacity of the cache is 0, but must be positive"
        );
        let shape = KvShape {
            batch,
            capacity,
            kv_heads: config.kv_heads,
            head: config.head,
        };
        let layers = formats.into_iter();
        let layers = layers.map(|format| Ok(KvLayer::try_new(shape, format, device)?));
        Ok(Self {
            layers: layers.collect::<Result<_>>()?,
            lengths: vec![0; batch],
            capacity,
            // Those kernels know no sinks.
            few: if config.block.sinks { 0 } else { FEW },
            device: device.clone(),
        })
    }

    /// Returns the number of tokens of each sequence.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Returns the maximum number of tokens per sequence.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Drops all but the first `length` tokens of sequence `index`.
    ///
    /// # Panics
    /// If there is no such sequence.
    pub fn truncate(&mut self, index: usize, length: usize) {
        let current = &mut self.lengths[index];
        *current = length.min(*current);
    }

    /// Plans `counts` new tokens per sequence, in rows of `time`.
    pub(super) fn chunk(&self, time: usize, counts: &[usize]) -> Result<Chunk> {
        let batch = self.lengths.len();
        ensure!(
            counts.len() == batch && counts.iter().all(|count| *count <= time),
            "new tokens of the sequences are {counts:?}, but must be {batch} numbers up to {time}"
        );
        let ends = self.lengths.iter().zip(counts).map(|(s, c)| s + c);
        let ends: Vec<usize> = ends.collect();
        let longest = ends.iter().copied().max().unwrap_or(0);
        ensure!(
            longest <= self.capacity,
            "a sequence would have {longest} tokens, but the cache has room for {}",
            self.capacity
        );
        let words = |numbers: &[usize]| numbers.iter().map(|n| *n as u32).collect::<Vec<u32>>();
        Ok(Chunk {
            places: Places::new(&words(&self.lengths), &words(counts), &self.device),
            sequences: (time > self.few).then(|| self.sequences(time, counts, &ends)),
            longest,
        })
    }

    /// Returns the sequences of a step of `counts` new tokens, at most one each, if the kernels for
    /// few tokens cannot compute it.
    pub(super) fn sequences_of_step(&self, counts: &[usize]) -> Option<Sequences> {
        let ends = self.lengths.iter().zip(counts).map(|(s, c)| s + c);
        let ends: Vec<usize> = ends.collect();
        (self.few == 0).then(|| self.sequences(1, counts, &ends))
    }

    /// Returns each sequence followed by a dummy one, which covers padding among the queries and
    /// unused space among the keys. This lets attention read the cache in place.
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

    /// Adds the new tokens to the lengths.
    pub(super) fn advance(&mut self, counts: &[usize]) {
        for (length, count) in self.lengths.iter_mut().zip(counts) {
            *length += count;
        }
    }
}
