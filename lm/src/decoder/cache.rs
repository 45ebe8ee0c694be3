//! Keys and values of the tokens that a model has seen.

use anyhow::{Result, ensure};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_nvfp4::attention::Sequences;
use burn_nvfp4::decode::{KvFormat, KvLayer, KvShape, Places};

use crate::hf::DecoderConfig;

/// New tokens of a sequence up to which attention reads the cache where it lies, in kernels made for
/// few of them; a longer chunk is a prompt's, whose attention is that of training.
pub(super) const FEW: usize = 8;

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvPrecision {
    /// In the type of the model's activations.
    Activations,
    /// In FP8 (E4M3), with the factors of the model's folder for all keys and all values of a layer,
    /// or 1.
    Fp8,
}

/// The keys and values of a batch of sequences, for all layers of a model. Sequences have lengths
/// of their own, and room for `capacity` tokens each, in memory that is written in place: on a GPU
/// clones share it.
#[derive(Clone, Debug)]
pub struct KvCache {
    pub(super) layers: Vec<KvLayer>,
    lengths: Vec<usize>,
    capacity: usize,
    device: Device,
}

/// Where the new tokens of one call lie, the same for all layers.
#[derive(Debug)]
pub(super) struct Chunk {
    /// The longest sequence with its new tokens.
    pub longest: usize,
    pub places: Places,
    /// For more new tokens than [`FEW`].
    pub sequences: Option<Sequences>,
}

impl KvCache {
    /// Room for `batch` sequences of `capacity` tokens of the model of `config`, whose layers are
    /// stored as `formats` say.
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
            sequences: (time > FEW).then(|| self.sequences(time, counts, &ends)),
            longest,
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

    /// The new tokens are seen.
    pub(super) fn advance(&mut self, counts: &[usize]) {
        for (length, count) in self.lengths.iter_mut().zip(counts) {
            *length += count;
        }
    }
}
