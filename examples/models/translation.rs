//! An encoder and a decoder with cross attention, which write a sequence of letters backwards.

use std::error::Error;
use std::path::Path;

use burn::module::{Module, Param};
use burn::tensor::{Device, Int, Tensor};

use super::nn::attention::generate_autoregressive_mask;
use super::nn::loss::CrossEntropyLossConfig;
use super::nn::transformer::{
    TransformerDecoder, TransformerDecoderConfig, TransformerDecoderInput,
};
use super::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use super::nn::{Embedding, EmbeddingConfig};
use crate::training::{Example, Random, Settings, ids, normal, percent_equal};

const LENGTH: usize = 8;
const LETTERS: usize = 16;
/// First input of the decoder.
const START: usize = LETTERS;

#[derive(Module, Debug)]
pub struct Seq {
    embedding: Embedding,
    positions: Param<Tensor<3>>,
    encoder: TransformerEncoder,
    decoder: TransformerDecoder,
    // Burn's layer: a head stays in high precision.
    head: burn::nn::Linear,
}

impl Seq {
    fn embed(&self, ids: Tensor<2, Int>) -> Tensor<3> {
        let [_, time] = ids.dims();
        self.embedding.forward(ids) + self.positions.val().narrow(1, 0, time)
    }

    fn encode(&self, source: Tensor<2, Int>) -> Tensor<3> {
        let x = self.embed(source);
        self.encoder.forward(TransformerEncoderInput::new(x))
    }

    /// Returns the logits of the letter after each of `written`.
    fn logits(&self, memory: Tensor<3>, written: Tensor<2, Int>) -> Tensor<3> {
        let [rows, time] = written.dims();
        let mask = generate_autoregressive_mask(rows, time, &written.device());
        let input = TransformerDecoderInput::new(self.embed(written), memory);
        let x = self.decoder.forward(input.target_mask_attn(mask));
        self.head.forward(x)
    }

    /// Writes the most probable letter after letter.
    fn write(&self, source: Tensor<2, Int>) -> Tensor<2, Int> {
        let [rows, time] = source.dims();
        let mut written = start(rows, &source.device());
        let memory = self.encode(source);
        for length in 1..=time {
            let logits = self.logits(memory.clone(), written.clone());
            let last = logits.narrow(1, length - 1, 1).argmax(2);
            written = Tensor::cat(vec![written, last.squeeze_dim(2)], 1);
        }
        written.narrow(1, 1, time)
    }
}

fn start(rows: usize, device: &Device) -> Tensor<2, Int> {
    Tensor::full([rows, 1], START as i32, device)
}

fn letters(rows: usize, seed: u64, device: &Device) -> Tensor<2, Int> {
    let mut random = Random(seed);
    let letters = (0..rows).flat_map(|_| random.below::<LENGTH>(LETTERS));
    let letters = letters.map(|letter| letter as i32).collect();
    ids(letters, [rows, LENGTH], device)
}

impl Example for Seq {
    const SETTINGS: Settings = Settings {
        width: 64,
        layers: 2,
        batch: 64,
        steps: 250,
        learning_rate: 2e-3,
    };

    fn new(settings: &Settings, device: &Device) -> Self {
        let (width, layers) = (settings.width, settings.layers);
        let encoder = TransformerEncoderConfig::new(width, 4 * width, 4, layers)
            .with_norm_first(true)
            .with_dropout(0.0);
        let decoder = TransformerDecoderConfig::new(width, 4 * width, 4, layers)
            .with_norm_first(true)
            .with_dropout(0.0);
        Self {
            embedding: EmbeddingConfig::new(LETTERS + 1, width).init(device),
            positions: normal([1, LENGTH, width], 1.0, device),
            encoder: encoder.init(device),
            decoder: decoder.init(device),
            head: burn::nn::LinearConfig::new(width, LETTERS).init(device),
        }
    }

    fn loss(&self, batch: usize, seed: u64) -> Tensor<1> {
        let device = self.device();
        let source = letters(batch, seed, &device);
        let target = source.clone().flip([1]);
        let before = target.clone().narrow(1, 0, LENGTH - 1);
        let written = Tensor::cat(vec![start(batch, &device), before], 1);
        let logits = self.logits(self.encode(source), written);
        let loss = CrossEntropyLossConfig::new().init(&device);
        loss.forward(logits.flatten(0, 1), target.flatten(0, 1))
    }

    fn show(&self, _name: &Path) -> Result<String, Box<dyn Error>> {
        let source = letters(64, u64::MAX, &self.device());
        let percent = percent_equal(self.write(source.clone()), source.flip([1]));
        Ok(format!("{percent:.0} % of letters right"))
    }
}
