//! A diffusion transformer like FLUX: two words (a colour and a shape) become an image.
//!
//! Words and patches are two streams with joint attention, and one stream in the last blocks. The time
//! modulates every block. The model predicts the velocity from an image to noise (rectified flow).

use std::array;
use std::error::Error;
use std::f32::consts::PI;
use std::path::Path;

use burn::module::{Module, Param};
use burn::tensor::activation::{sigmoid, silu, softmax};
use burn::tensor::{Device, Distribution, Int, Tensor};

use super::nn::transformer::{PositionWiseFeedForward, PositionWiseFeedForwardConfig};
use super::nn::{Embedding, EmbeddingConfig, Initializer, LayerNorm, LayerNormConfig};
use super::nn::{Linear, LinearConfig, RmsNorm, RmsNormConfig};
use crate::shapes::{COLOURS, Images, PATCH_VALUES, PATCHES, SHAPES, WORDS};
use crate::shapes::{every_prompt, from_patches, to_patches, write};
use crate::training::{Example, Settings, normal};

const HEADS: usize = 4;
/// Numbers of sines and of cosines that represent a time.
const FREQUENCIES: usize = 16;
/// Steps from noise to an image.
const SAMPLING_STEPS: usize = 20;
const NORMAL: Distribution = Distribution::Normal(0.0, 1.0);

/// Layers of one stream in a block.
#[derive(Module, Debug)]
struct Stream {
    modulation: Linear,
    norms: [LayerNorm; 2],
    qkv: Linear,
    qk_norms: [RmsNorm; 2],
    output: Linear,
    feed_forward: PositionWiseFeedForward,
}

/// Returns a layer of `parts` modulations, `[batch, 1, width]`, all 0 at the start of training.
fn modulation(width: usize, parts: usize, device: &Device) -> Linear {
    let zeros = LinearConfig::new(width, parts * width).with_initializer(Initializer::Zeros);
    zeros.init(device)
}

fn modulations(layer: &Linear, condition: &Tensor<2>, parts: usize) -> Vec<Tensor<3>> {
    let modulations = layer.forward(condition.clone());
    modulations.unsqueeze_dim::<3>(1).chunk(parts, 2)
}

fn modulate(x: Tensor<3>, shift: &Tensor<3>, scale: &Tensor<3>) -> Tensor<3> {
    x * (scale.clone() + 1.0) + shift.clone()
}

impl Stream {
    fn new(width: usize, device: &Device) -> Self {
        let linear = |d_input, d_output| LinearConfig::new(d_input, d_output).init(device);
        let feed_forward = PositionWiseFeedForwardConfig::new(width, 4 * width).with_dropout(0.0);
        Self {
            modulation: modulation(width, 6, device),
            norms: [0, 1].map(|_| LayerNormConfig::new(width).init(device)),
            qkv: linear(width, 3 * width),
            qk_norms: [0, 1].map(|_| RmsNormConfig::new(width / HEADS).init(device)),
            output: linear(width, width),
            feed_forward: feed_forward.init(device),
        }
    }

    /// Returns queries, keys and values, `[batch, heads, tokens, width / heads]`.
    fn qkv(&self, x: Tensor<3>, parts: &[Tensor<3>]) -> [Tensor<4>; 3] {
        let [batch, tokens, width] = x.dims();
        let x = modulate(self.norms[0].forward(x), &parts[0], &parts[1]);
        let qkv = self.qkv.forward(x);
        let qkv = qkv.reshape([batch, tokens, 3 * HEADS, width / HEADS]);
        let qkv = qkv.swap_dims(1, 2);
        let [q, k, v] = [0, 1, 2].map(|part| qkv.clone().narrow(1, part * HEADS, HEADS));
        let [q_norm, k_norm] = &self.qk_norms;
        [q_norm.forward(q), k_norm.forward(k), v]
    }
}

/// Applies a block: its streams have joint attention.
fn block(block: &[Stream], tokens: Vec<Tensor<3>>, condition: &Tensor<2>) -> Vec<Tensor<3>> {
    let parts = |stream: &Stream| modulations(&stream.modulation, condition, 6);
    let streams = block
        .iter()
        .zip(tokens)
        .map(|(stream, x)| (stream, x, parts(stream)));
    let streams: Vec<_> = streams.collect();
    let qkv = streams
        .iter()
        .map(|(stream, x, parts)| stream.qkv(x.clone(), parts));
    let qkv: Vec<_> = qkv.collect();
    let joint = |part: usize| Tensor::cat(qkv.iter().map(|qkv| qkv[part].clone()).collect(), 2);
    let (q, k, v) = (joint(0), joint(1), joint(2));
    let [batch, _, all, head] = q.dims();
    let scores = q.matmul(k.swap_dims(2, 3)) / (head as f32).sqrt();
    let attended = softmax(scores, 3).matmul(v);
    let attended = attended.swap_dims(1, 2).reshape([batch, all, HEADS * head]);
    let mut start = 0;
    let streams = streams.into_iter().map(|(stream, x, parts)| {
        let [_, tokens, _] = x.dims();
        let attended = attended.clone().narrow(1, start, tokens);
        start += tokens;
        let x = x + stream.output.forward(attended) * parts[2].clone();
        let y = modulate(stream.norms[1].forward(x.clone()), &parts[3], &parts[4]);
        x + stream.feed_forward.forward(y) * parts[5].clone()
    });
    streams.collect()
}

#[derive(Module, Debug)]
pub struct Flux {
    words: Embedding,
    patches: Linear,
    positions: Param<Tensor<3>>,
    time: [Linear; 2],
    blocks: Vec<Vec<Stream>>,
    norm: LayerNorm,
    modulation: Linear,
    // Burn's layer: a head stays in high precision.
    head: burn::nn::Linear,
}

impl Flux {
    /// Returns the velocity of `patches` at `times`, `[batch, 1]` from 0 (image) to 1 (noise).
    fn velocity(&self, patches: Tensor<3>, times: Tensor<2>, words: Tensor<2, Int>) -> Tensor<3> {
        let frequencies: [f32; FREQUENCIES] = array::from_fn(|i| PI * (i + 1) as f32);
        let angles = times.clone() * Tensor::from_floats([frequencies], &times.device());
        let time = Tensor::cat(vec![angles.clone().sin(), angles.cos()], 1);
        let time = self.time[1].forward(silu(self.time[0].forward(time)));
        let words = self.words.forward(words);
        let condition = silu(time + words.clone().mean_dim(1).squeeze_dim(1));
        let mut tokens = vec![words, self.patches.forward(patches) + self.positions.val()];
        for streams in &self.blocks {
            if streams.len() < tokens.len() {
                tokens = vec![Tensor::cat(tokens, 1)];
            }
            tokens = block(streams, tokens, &condition);
        }
        let patches = tokens.remove(0).narrow(1, WORDS, PATCHES);
        let parts = modulations(&self.modulation, &condition, 2);
        self.head
            .forward(modulate(self.norm.forward(patches), &parts[0], &parts[1]))
    }
}

impl Example for Flux {
    const SETTINGS: Settings = Settings {
        width: 64,
        layers: 3,
        batch: 32,
        steps: 400,
        learning_rate: 3e-3,
    };

    fn new(settings: &Settings, device: &Device) -> Self {
        let width = settings.width;
        let block = |layer| {
            let streams = if layer < settings.layers / 2 { 2 } else { 1 };
            (0..streams).map(|_| Stream::new(width, device)).collect()
        };
        let linear = |d_input, d_output| LinearConfig::new(d_input, d_output).init(device);
        Self {
            words: EmbeddingConfig::new(COLOURS.len() + SHAPES.len(), width).init(device),
            patches: linear(PATCH_VALUES, width),
            positions: normal([1, PATCHES, width], 0.02, device),
            time: [linear(2 * FREQUENCIES, width), linear(width, width)],
            blocks: (0..settings.layers).map(block).collect(),
            norm: LayerNormConfig::new(width).init(device),
            modulation: modulation(width, 2, device),
            head: burn::nn::LinearConfig::new(width, PATCH_VALUES).init(device),
        }
    }

    fn loss(&self, batch: usize, seed: u64) -> Tensor<1> {
        let data = Images::new(batch, seed, &self.device());
        let image = to_patches(data.images);
        let noise = image.random_like(NORMAL);
        let times = sigmoid(Tensor::<2>::random([batch, 1], NORMAL, &image.device()));
        let x = image.clone() + (noise.clone() - image.clone()) * times.clone().unsqueeze_dim(2);
        let velocity = self.velocity(x, times, data.prompts);
        (velocity - (noise - image)).square().mean()
    }

    /// Writes one image with a row for each colour and a column for each shape.
    fn show(&self, name: &Path) -> Result<String, Box<dyn Error>> {
        let device = self.device();
        let words = every_prompt(&device);
        let [count, _] = words.dims();
        let mut x = Tensor::random([count, PATCHES, PATCH_VALUES], NORMAL, &device);
        for step in (1..=SAMPLING_STEPS).rev() {
            let times = Tensor::full([count, 1], step as f32 / SAMPLING_STEPS as f32, &device);
            x = x.clone() - self.velocity(x, times, words.clone()) / SAMPLING_STEPS as f32;
        }
        let path = name.with_extension("ppm");
        write(from_patches(x), SHAPES.len(), &path)?;
        Ok(format!("samples in {}", path.display()))
    }
}
