//! Decoding steps: each computes a new token per text, launched kernel by kernel, or replayed from
//! a CUDA graph captured once.
//!
//! All state that changes between steps is in device memory ([`NextTokens`]): the next token, the
//! length of each text, and the chosen tokens. A step therefore has the same launches with the same
//! arguments at every length, and nothing is recompiled.

use anyhow::{Result, ensure};
use burn::tensor::{FloatDType, Int, Tensor};
use burn_nvfp4::decode::NextTokens;

use super::cache::Chunk;
use super::call::Call;
use super::feed_forward::FeedForward;
use super::{Decoder, KvCache};
use crate::capture::GraphSteps;
use crate::model::cast;

/// Maximum number of steps whose tokens are on the device before the host reads them.
pub const RING: usize = 16;

/// Decoding of a batch of texts.
pub struct DecodeSteps<'a> {
    // Declared first, so that it is dropped before the memory that it reads and writes.
    graph: Option<GraphSteps>,
    model: &'a Decoder,
    cache: KvCache,
    /// `None` only after a failed step.
    next: Option<NextTokens>,
    /// Logits of the last step; a replay overwrites this buffer.
    logits: Option<Tensor<2>>,
    counts: Vec<usize>,
    taken: usize,
}

impl<'a> DecodeSteps<'a> {
    /// Continues the texts in `cache` with one of `tokens` each; texts whose `goes_on` is false
    /// pause. With `graph`, steps are replayed as soon as possible.
    ///
    /// # Errors
    /// Returns an error if the counts differ. With `graph`, also returns an error if the device has
    /// no graphs or holds another graph, or if the model has experts or frequencies that depend on
    /// the length.
    pub fn new(
        model: &'a Decoder,
        cache: KvCache,
        tokens: &[u32],
        goes_on: &[bool],
        graph: bool,
    ) -> Result<Self> {
        let lengths = cache.lengths();
        ensure!(
            tokens.len() == lengths.len() && goes_on.len() == lengths.len(),
            "{} tokens and {} texts that go on or not, but must be {}, the sequences of the cache",
            tokens.len(),
            goes_on.len(),
            lengths.len()
        );
        ensure!(
            !graph || model.steps_are_alike(cache.capacity()),
            "this model's steps are no graph: it has experts, or frequencies that depend on the \
             length"
        );
        let device = model.device();
        let starts: Vec<u32> = lengths.iter().map(|length| *length as u32).collect();
        let counts: Vec<usize> = goes_on.iter().map(|on| usize::from(*on)).collect();
        let next = NextTokens::try_new(tokens, &starts, &words(&counts), RING, &device)?;
        let graph = match graph {
            true => {
                let mut graph = GraphSteps::begin(model, &device)?;
                // SAFETY: a step writes activations, new keys and values of a layer by its own
                // attention, and at its end where texts begin.
                unsafe { graph.overlap_kernels() };
                Some(graph)
            }
            false => None,
        };
        Ok(Self {
            graph,
            model,
            cache,
            next: Some(next),
            logits: None,
            counts,
            taken: 0,
        })
    }

    /// Returns true if steps are replayed.
    pub fn is_captured(&self) -> bool {
        self.graph.as_ref().is_some_and(|graph| graph.is_captured())
    }

    /// Returns the number of tokens of each text, without the pending ones.
    pub fn lengths(&self) -> &[usize] {
        self.cache.lengths()
    }

    /// Runs a step: appends the pending tokens to the texts, and makes the most probable successors
    /// pending. The host does not wait.
    ///
    /// # Errors
    /// Returns an error if a text has no space left, an earlier step failed, or the device fails.
    pub fn step(&mut self) -> Result<()> {
        let capacity = self.cache.capacity();
        let fits = self.cache.lengths().iter().zip(&self.counts);
        let longest = fits
            .map(|(length, count)| length + count)
            .max()
            .unwrap_or(0);
        ensure!(
            longest <= capacity,
            "a sequence would have {longest} tokens, but the cache has room for {capacity}"
        );
        let mut graph = self.graph.take();
        let mut launched = Ok(());
        match &mut graph {
            Some(graph) => {
                graph.step(|| launched = self.launch(longest))?;
            }
            None => launched = self.launch(longest),
        }
        self.graph = graph;
        launched?;
        self.cache.advance(&self.counts);
        self.taken += 1;
        Ok(())
    }

    fn launch(&mut self, longest: usize) -> Result<()> {
        let (model, device) = (self.model, self.model.device());
        let next = self.next.take();
        let next = next.ok_or_else(|| anyhow::anyhow!("a step of decoding failed before"))?;
        let [batch] = next.tokens.dims();
        // Tables for the whole capacity if they are the same for every length.
        let positions = match model.positions.is_fixed(self.cache.capacity()) {
            true => self.cache.capacity(),
            false => longest.max(1),
        };
        let chunk = Chunk {
            longest,
            places: next.places.clone(),
            sequences: self.cache.sequences_of_step(&self.counts),
        };
        let call = Call {
            tables: model.positions.tables(positions, &device)?,
            rows: None,
            cache: Some((&mut self.cache, chunk)),
            observer: None,
        };
        let features = model.run(next.tokens.clone().reshape([batch, 1]), call)?;
        let [_, _, d_model] = features.dims();
        let logits = model.next_logits(features.reshape([batch, d_model]))?;
        self.logits = Some(logits.clone());
        self.next = Some(next.choose_greedy(logits)?);
        Ok(())
    }

    /// Returns the tokens that the last `steps` steps chose, oldest first, one per text; those of
    /// paused texts are meaningless. Waits for the device.
    ///
    /// # Errors
    /// Returns an error if there were fewer steps or they exceed the ring, a logit is not a number,
    /// or the device fails.
    pub fn chosen(&self, steps: usize) -> Result<Vec<Vec<u32>>> {
        ensure!(
            steps <= self.taken && steps <= RING,
            "{steps} steps were asked for, but must be at most {} that there were and {RING}",
            self.taken
        );
        let next = self.next.as_ref();
        let next = next.ok_or_else(|| anyhow::anyhow!("a step of decoding failed before"))?;
        let [_, batch] = next.ring.dims();
        let ring = next.ring.clone().into_data().try_to_vec::<i32>();
        let ring = ring.map_err(|error| anyhow::anyhow!("tokens cannot be read: {error:?}"))?;
        let row = |step: usize| {
            let row = &ring[step % RING * batch..][..batch];
            let tokens = row.iter().zip(&self.counts).map(|(token, count)| {
                ensure!(
                    *token >= 0 || *count == 0,
                    "the model's logits are not numbers: a weight or an activation overflowed"
                );
                Ok((*token).max(0) as u32)
            });
            tokens.collect()
        };
        (self.taken - steps..self.taken).map(row).collect()
    }

    /// Returns the logits of the last step, `[batch, vocab]`. Waits for the device.
    ///
    /// # Errors
    /// Returns an error if there was no step, or the device fails.
    pub fn logits(&self) -> Result<Vec<f32>> {
        let logits = self.logits.clone();
        let logits = logits.ok_or_else(|| anyhow::anyhow!("there was no step yet"))?;
        read(logits)
    }

    /// Replaces the pending tokens by `tokens`, and sets which texts continue or pause.
    ///
    /// # Errors
    /// Returns an error if the counts differ, or an earlier step failed.
    pub fn set(&mut self, tokens: &[u32], goes_on: &[bool]) -> Result<()> {
        let next = self.next.take();
        let next = next.ok_or_else(|| anyhow::anyhow!("a step of decoding failed before"))?;
        self.counts = goes_on.iter().map(|on| usize::from(*on)).collect();
        self.next = Some(next.set(tokens, &words(&self.counts))?);
        Ok(())
    }
}

fn words(numbers: &[usize]) -> Vec<u32> {
    numbers.iter().map(|number| *number as u32).collect()
}

impl Decoder {
    /// Returns true if a step has the same launches at every length up to `capacity` and does not
    /// synchronize.
    pub fn steps_are_alike(&self, capacity: usize) -> bool {
        let dense =
            |layer: &super::DecoderLayer| matches!(layer.feed_forward, FeedForward::Dense(_));
        self.positions.is_fixed(capacity) && self.layers.iter().all(dense)
    }

    /// Returns the logits after the last of the `counts` new tokens of each row, `[batch, vocab]`;
    /// see [`features_cached`](Self::features_cached). Waits for the device.
    ///
    /// # Errors
    /// Returns the errors of [`features_cached`](Self::features_cached). Also returns an error if a
    /// row has no new token.
    pub fn last_logits(
        &self,
        tokens: Tensor<2, Int>,
        counts: &[usize],
        cache: &mut KvCache,
    ) -> Result<Vec<f32>> {
        ensure!(
            counts.iter().all(|count| *count > 0),
            "new tokens of the sequences are {counts:?}, but must be at least 1 each"
        );
        let features = self.features_cached(tokens, counts, cache)?;
        let [_, _, d_model] = features.dims();
        let last = counts.iter().enumerate().map(|(row, count)| {
            let last = features.clone().narrow(0, row, 1).narrow(1, count - 1, 1);
            last.reshape([1, d_model])
        });
        read(self.next_logits(Tensor::cat(last.collect(), 0))?)
    }

    /// Returns the logits of `features` (`[rows, d_model]`), `[rows, vocab]`, as a constant to
    /// autodiff. A quantized head gives them in the type of the activations, any other in f32.
    pub(super) fn next_logits(&self, features: Tensor<2>) -> Result<Tensor<2>> {
        if self.quantized_head.is_some() {
            return Ok(self.rounded_logits(features));
        }
        let weight = self.head_weight();
        let both = [features.dtype(), weight.dtype()].map(FloatDType::from);
        if both == [FloatDType::BF16; 2] {
            let logits = burn_nvfp4::functions::try_logits(features, weight)?;
            return Ok(self.capped(logits));
        }
        Ok(self.logits(features))
    }
}

/// Reads logits from the device.
pub(super) fn read<const D: usize>(logits: Tensor<D>) -> Result<Vec<f32>> {
    let logits = cast(logits, FloatDType::F32)
        .into_data()
        .try_to_vec::<f32>();
    logits.map_err(|error| anyhow::anyhow!("the logits cannot be read: {error:?}"))
}
