//! Runs a decoder layer by layer on several sequences, with the weights of one layer in memory.

use anyhow::{Result, ensure};
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_nvfp4::nn::ResidualStream;

use super::call::Call;
use super::embed;
use super::load::Loader;
use super::observe::Observer;
use super::positions::Positions;
use crate::hf::{DecoderConfig, TensorFolder};
use crate::progress::{Unit, Work};

/// Sequences on their way through the layers of a decoder, whose weights are in high precision.
pub struct LayerwiseDecoder<'a> {
    loader: Loader<'a>,
    positions: Positions,
    /// Inputs of the next layer, one for each sequence.
    streams: Vec<ResidualStream>,
    /// Index of the next layer.
    next: usize,
}

impl<'a> LayerwiseDecoder<'a> {
    /// Embeds the `sequences`, `[batch, time]` each. Parameters and activations get type `dtype`.
    ///
    /// # Errors
    /// Returns an error if the device does not support `dtype`, the embedding cannot be loaded, or a
    /// sequence has no tokens.
    pub fn new(
        config: &'a DecoderConfig,
        tensors: &'a TensorFolder,
        (device, dtype): (&'a Device, FloatDType),
        sequences: impl IntoIterator<Item = Tensor<2, Int>>,
    ) -> Result<Self> {
        let loader = Loader::plain(config, tensors, (device, dtype))?;
        let embedding = loader.embedding()?;
        let stream = |tokens: Tensor<2, Int>| {
            let [batch, time] = tokens.dims();
            ensure!(batch * time > 0, "a sequence of [{batch}, {time}] tokens");
            embed(&embedding, config, tokens, dtype)
        };
        let streams = sequences.into_iter().map(stream).collect::<Result<_>>()?;
        Ok(Self {
            loader,
            positions: Positions::new(config),
            streams,
            next: 0,
        })
    }

    /// Returns the number of layers that have run.
    pub fn layers(&self) -> usize {
        self.next
    }

    /// Loads the next layer and runs it on all sequences, in order. Shows the inputs of its linear
    /// layers to `observer`.
    ///
    /// # Errors
    /// Returns an error if there is no such layer or it cannot be loaded. Returns the errors of the
    /// observer.
    pub fn run_layer(&mut self, observer: &mut dyn Observer) -> Result<()> {
        let index = self.next;
        let layers = &self.loader.config.layers;
        ensure!(index < layers.len(), "the decoder has {index} layers");
        let layer = self.loader.layer(index, &layers[index])?;
        let mut work = Work::begin("run", Unit::Sequences, 0, self.streams.len());
        for stream in &mut self.streams {
            let [_, time, _] = stream.sum.dims();
            let tables = self.positions.tables(time, self.loader.device)?;
            let mut call = Call {
                tables,
                rows: None,
                cache: None,
                observer: Some(&mut *observer),
            };
            *stream = layer.forward(stream.clone(), index, &mut call)?;
            work.add(1);
        }
        self.next += 1;
        Ok(())
    }
}
