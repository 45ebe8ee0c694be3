//! The model: a decoder-only transformer over bytes.
//!
//! RMSNorm before each half of a block, rotary positions, causal attention, SwiGLU. The projections
//! of a block (queries, keys and values; output; gate and up; down) are [`Nvfp4Linear`] layers; the
//! embedding and the head stay in high precision. Parameters are f32 master weights; what flows
//! between the layers has the type [`Activation`], except that norms, rotations, softmax and loss
//! are computed in f32.
//!
//! The residual stream is kept as a matrix `[batch * time, width]`, so that every projection is one
//! 2-D product, forward and backward.

use anyhow::Result;
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::activation::{log_softmax, silu, softmax};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use burn_nvfp4::state::number_layers;

use super::config::{Activation, ModelConfig, VOCABULARY};
use super::random::{Stream, hash};
use crate::{Nvfp4Linear, Nvfp4LinearConfig, Nvfp4Recipe};

/// Base of the rotary frequencies.
const ROPE_BASE: f64 = 10_000.0;
/// Added to the mean square of a norm.
const NORM_EPSILON: f64 = 1e-6;
/// Score of a later position. `exp` of it is zero next to any real score.
const MASKED: f32 = -1e30;
/// Standard deviation of the initial embedding.
const EMBEDDING_DEVIATION: f64 = 0.1;
/// Scale of the initial head: the untrained model's prediction is close to uniform.
const HEAD_SCALE: f64 = 0.25;

/// `x` in type `dtype`; no operation when it is already.
fn cast<const D: usize>(x: Tensor<D>, dtype: FloatDType) -> Tensor<D> {
    if x.dtype() == DType::from(dtype) {
        x
    } else {
        x.cast(dtype)
    }
}

/// `x / sqrt(mean(x^2)) * gain` over the last axis.
#[derive(Module, Debug)]
pub struct RmsNorm {
    /// One factor per feature.
    pub gain: Param<Tensor<1>>,
}

impl RmsNorm {
    fn new(width: usize, device: &Device) -> Self {
        Self {
            gain: Param::from_tensor(Tensor::ones([width], device)),
        }
    }

    /// `[rows, width]` to the same shape and type; computed in f32.
    pub fn forward(&self, x: Tensor<2>, activation: FloatDType) -> Tensor<2> {
        let x = cast(x, FloatDType::F32);
        let mean_square = x.clone().square().mean_dim(1);
        let scaled = x / mean_square.add_scalar(NORM_EPSILON).sqrt();
        // The gain's gradient is a sum over the rows, and one sum for each feature leaves a GPU idle. The
        // gain is spread over the longest power of two up to 256 first: the sum is made in two steps,
        // the first of them with that many more sums.
        let [rows, width] = scaled.dims();
        let inner = 1 << rows.trailing_zeros().min(8);
        let scaled: Tensor<3> = scaled.reshape([rows / inner, inner, width]);
        let gain: Tensor<2> = self.gain.val().reshape([1, width]).expand([inner, width]);
        let gained: Tensor<2> = (scaled * gain.unsqueeze()).reshape([rows, width]);
        cast(gained, activation)
    }
}

/// What attention needs beside its input: the rotations and the mask of every position.
#[derive(Module, Debug)]
pub struct Positions {
    /// Cosine of position times frequency, f32 `[1, 1, context, head / 2]`.
    cos: Tensor<4>,
    /// Sine of the same.
    sin: Tensor<4>,
    /// What is added to a score: 0 where the key is not later than the query, f32
    /// `[1, 1, context, context]`.
    mask: Tensor<4>,
}

impl Positions {
    fn new(context: usize, head: usize, device: &Device) -> Self {
        let half = head / 2;
        let angles = (0..context).flat_map(|position| {
            (0..half)
                .map(move |i| position as f64 * ROPE_BASE.powf(-(2.0 * i as f64) / head as f64))
        });
        let (sin, cos): (Vec<f32>, Vec<f32>) = angles
            .map(|angle| (angle.sin() as f32, angle.cos() as f32))
            .unzip();
        let mask: Vec<f32> = (0..context * context)
            .map(|i| {
                if i % context > i / context {
                    MASKED
                } else {
                    0.0
                }
            })
            .collect();
        Self {
            cos: Tensor::from_data(TensorData::new(cos, [1, 1, context, half]), device),
            sin: Tensor::from_data(TensorData::new(sin, [1, 1, context, half]), device),
            mask: Tensor::from_data(TensorData::new(mask, [1, 1, context, context]), device),
        }
    }

    /// Rotate each head of `x`, `[batch, heads, time, head]`, by its position: element `i` and
    /// element `i + head / 2` form a pair. The result is f32.
    pub fn rotate(&self, x: Tensor<4>) -> Tensor<4> {
        let [_, _, time, head] = x.dims();
        let half = head / 2;
        let x = cast(x, FloatDType::F32);
        let (cos, sin) = (
            self.cos.clone().narrow(2, 0, time),
            self.sin.clone().narrow(2, 0, time),
        );
        let (first, second) = (x.clone().narrow(3, 0, half), x.narrow(3, half, half));
        let real = first.clone() * cos.clone() - second.clone() * sin.clone();
        let imaginary = second * cos + first * sin;
        Tensor::cat(vec![real, imaginary], 3)
    }

    fn mask(&self, time: usize) -> Tensor<4> {
        self.mask.clone().narrow(2, 0, time).narrow(3, 0, time)
    }
}

/// Causal attention of several heads.
#[derive(Module, Debug)]
pub struct Attention {
    /// Queries, keys and values, `[width, 3 * width]`: one product, so that its input is quantized
    /// once and not three times.
    pub qkv: Nvfp4Linear,
    /// Output, `[width, width]`.
    pub out: Nvfp4Linear,
    #[module(skip)]
    heads: usize,
}

impl Attention {
    /// `x` is `[batch * time, width]`; the result has its shape and type.
    pub fn forward(&self, x: Tensor<2>, batch: usize, positions: &Positions) -> Tensor<2> {
        let [rows, width] = x.dims();
        let (time, head) = (rows / batch, width / self.heads);
        let activation = x.dtype().into();
        let qkv = self.qkv.forward(x);
        let part = |index: usize| {
            let part = qkv.clone().narrow(1, index * width, width);
            part.reshape([batch, time, self.heads, head])
                .swap_dims(1, 2)
        };
        let (q, k, v) = (
            positions.rotate(part(0)),
            positions.rotate(part(1)),
            part(2),
        );
        // The scale goes into q, which is smaller than the scores.
        let q = cast(q.mul_scalar((head as f64).powf(-0.5)), activation);
        let k = cast(k, activation);
        let scores = cast(q.matmul(k.swap_dims(2, 3)), FloatDType::F32) + positions.mask(time);
        let weights = cast(softmax(scores, 3), activation);
        let mixed = weights.matmul(v).swap_dims(1, 2).reshape([rows, width]);
        self.out.forward(mixed)
    }
}

/// `(silu(x G) * (x U)) D`.
#[derive(Module, Debug)]
pub struct SwiGlu {
    /// `G` and `U` side by side, `[width, 2 * hidden]`.
    pub gate_up: Nvfp4Linear,
    /// `D`, `[hidden, width]`.
    pub down: Nvfp4Linear,
}

impl SwiGlu {
    /// `[rows, width]` to the same shape and type.
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let both = self.gate_up.forward(x);
        let hidden = both.dims()[1] / 2;
        let gate = silu(both.clone().narrow(1, 0, hidden));
        self.down.forward(gate * both.narrow(1, hidden, hidden))
    }
}

/// One layer of the transformer.
#[derive(Module, Debug)]
pub struct Block {
    /// Before the attention.
    pub attention_norm: RmsNorm,
    /// Mixes positions.
    pub attention: Attention,
    /// Before the feed-forward.
    pub feed_forward_norm: RmsNorm,
    /// Mixes features.
    pub feed_forward: SwiGlu,
}

/// The language model.
#[derive(Module, Debug)]
pub struct Transformer {
    /// One row per byte, f32 `[256, width]`.
    pub embedding: Param<Tensor<2>>,
    /// The layers, in order.
    pub blocks: Vec<Block>,
    /// Before the head.
    pub norm: RmsNorm,
    /// From features to the logits of the next byte, f32 `[width, 256]`.
    pub head: Param<Tensor<2>>,
    positions: Positions,
    #[module(skip)]
    activation: Activation,
}

impl Transformer {
    /// A new model on `device`, with weights that depend on `seed` and the sizes alone: not on the
    /// device, nor on the recipe.
    ///
    /// # Errors
    /// When the sizes do not pass [`ModelConfig::check`], the device has no NVFP4 implementation,
    /// or the recipe's group of high-precision layers matches none of the model's.
    pub fn new(
        config: &ModelConfig,
        activation: Activation,
        recipe: &Nvfp4Recipe,
        seed: u64,
        device: &Device,
    ) -> Result<Self> {
        config.check()?;
        let ModelConfig {
            width,
            layers,
            heads,
            hidden,
            context,
        } = *config;
        let linear = |d_in, d_out| {
            Nvfp4LinearConfig::new(d_in, d_out)
                .with_bias(false)
                .with_recipe(recipe.clone())
                .try_init(device)
        };
        let blocks = (0..layers)
            .map(|_| {
                Ok(Block {
                    attention_norm: RmsNorm::new(width, device),
                    attention: Attention {
                        qkv: linear(width, 3 * width)?,
                        out: linear(width, width)?,
                        heads,
                    },
                    feed_forward_norm: RmsNorm::new(width, device),
                    feed_forward: SwiGlu {
                        gate_up: linear(width, 2 * hidden)?,
                        down: linear(hidden, width)?,
                    },
                })
            })
            .collect::<Result<Vec<Block>>>()?;
        let zeros = |shape: [usize; 2]| Param::from_tensor(Tensor::<2>::zeros(shape, device));
        let model = Self {
            embedding: zeros([VOCABULARY, width]),
            blocks,
            norm: RmsNorm::new(width, device),
            head: zeros([width, VOCABULARY]),
            positions: Positions::new(context, width / heads, device),
            activation,
        };
        let model = model.map(&mut Initialise {
            seed,
            layers,
            path: Vec::new(),
        });
        number_layers(&model);
        recipe.apply(&model)?;
        Ok(model)
    }

    /// Logits of the byte after each byte of `tokens`, `[batch, time]`: f32
    /// `[batch * time, 256]`.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<2> {
        let [batch, time] = tokens.dims();
        let activation = self.activation.into();
        // A product with a one-hot matrix: its gradient is a product too. The gradient of a look-up
        // is a scatter, which GPUs add up in an order that is not the same from run to run.
        // As a batch of products, so that their gradients, whose contraction is the tokens, are too.
        let symbols: Tensor<3> =
            one_hot(tokens.reshape([batch * time])).reshape([batch, time, VOCABULARY]);
        let x =
            cast(symbols, activation).matmul(cast(self.embedding.val(), activation).unsqueeze());
        let width = x.dims()[2];
        let x: Tensor<2> = x.reshape([batch * time, width]);
        let x = self.blocks.iter().fold(x, |x, block| {
            let normed = block.attention_norm.forward(x.clone(), activation);
            let x = x + block.attention.forward(normed, batch, &self.positions);
            let normed = block.feed_forward_norm.forward(x.clone(), activation);
            x + block.feed_forward.forward(normed)
        });
        let x: Tensor<3> = self
            .norm
            .forward(x, activation)
            .reshape([batch, time, width]);
        let logits = x.matmul(cast(self.head.val(), activation).unsqueeze());
        cast(logits.reshape([batch * time, VOCABULARY]), FloatDType::F32)
    }

    /// Mean cross entropy, in nats per byte, of `targets` under the prediction from `tokens`; both
    /// are `[batch, time]`.
    pub fn loss(&self, tokens: Tensor<2, Int>, targets: Tensor<2, Int>) -> Tensor<1> {
        let [batch, time] = targets.dims();
        let rows = batch * time;
        let log_probabilities = log_softmax(self.forward(tokens), 1);
        (log_probabilities * one_hot(targets.reshape([rows])))
            .sum()
            .div_scalar(-(rows as f64))
    }

    /// Longest sequence that [`forward`](Self::forward) takes.
    pub fn context(&self) -> usize {
        self.positions.mask.dims()[2]
    }
}

/// f32 `[rows, 256]`: 1 in the column of each byte, else 0.
fn one_hot(bytes: Tensor<1, Int>) -> Tensor<2> {
    let device = bytes.device();
    let dtype = bytes.dtype();
    let columns = Tensor::<1, Int>::arange(0..VOCABULARY as i64, (&device, dtype));
    let [rows] = bytes.dims();
    let bytes = bytes.reshape([rows, 1]).expand([rows, VOCABULARY]);
    cast(
        bytes
            .equal(columns.unsqueeze::<2>().expand([rows, VOCABULARY]))
            .float(),
        FloatDType::F32,
    )
}

/// Gives every parameter its initial value and a stable id, both from its path.
///
/// Burn's own initialisers draw from the device's generator, and its ids from the process: a run
/// could not be repeated.
struct Initialise {
    seed: u64,
    layers: usize,
    path: Vec<String>,
}

impl ModuleMapper for Initialise {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let path = self.path.join(".");
        let shape = param.lazy_shape();
        let count = shape.num_elements();
        let id = hash(path.as_bytes());
        let mut stream = Stream::new(self.seed, id);
        let values = match self.path.last().map(String::as_str) {
            Some("gain") => vec![1.0; count],
            Some("embedding") => stream.normal(count, EMBEDDING_DEVIATION),
            _ => {
                let mut deviation = (shape.dims::<D>()[0] as f64).powf(-0.5);
                // What is added to the residual stream starts smaller in a deeper model.
                if matches!(
                    self.path.iter().rev().nth(1).map(String::as_str),
                    Some("out" | "down")
                ) {
                    deviation *= (2.0 * self.layers as f64).powf(-0.5);
                }
                if self.path.last().is_some_and(|name| name == "head") {
                    deviation *= HEAD_SCALE;
                }
                stream.normal(count, deviation)
            }
        };
        let device = param.lazy_device();
        let tensor = Tensor::from_data(TensorData::new(values, shape), &device);
        let tensor = if device.is_autodiff() {
            tensor.require_grad()
        } else {
            tensor
        };
        Param::initialized(ParamId::from(id), tensor)
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::lm::config::{Preset, Recipe, RunConfig};

    const SIZES: ModelConfig = ModelConfig {
        width: 32,
        layers: 2,
        heads: 2,
        hidden: 48,
        context: 24,
    };

    fn model(recipe: Recipe, device: &Device) -> Transformer {
        let config = RunConfig::preset(Preset::Tiny, "flex");
        let nvfp4 = config.nvfp4_recipe(&recipe).unwrap();
        Transformer::new(&SIZES, Activation::F32, &nvfp4, 7, device).unwrap()
    }

    fn tokens(bytes: &[i64], device: &Device) -> Tensor<2, Int> {
        Tensor::from_data(TensorData::new(bytes.to_vec(), [1, bytes.len()]), device)
    }

    fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
        tensor.into_data().iter::<f32>().collect()
    }

    #[test]
    fn later_bytes_do_not_change_earlier_logits() {
        let device = Device::flex();
        let model = model(Recipe::f32(), &device);
        let text: Vec<i64> = (0..24).map(|i| (i * 37 + 5) % 256).collect();
        let whole = values(model.forward(tokens(&text, &device)));
        for changed in [1, 11, 23] {
            let mut other = text.clone();
            other[changed] = (other[changed] + 1) % 256;
            let logits = values(model.forward(tokens(&other, &device)));
            let same = changed * VOCABULARY;
            assert_eq!(whole[..same], logits[..same], "byte {changed} reached back");
            assert_ne!(
                whole[same..same + VOCABULARY],
                logits[same..same + VOCABULARY]
            );
        }
        // A prefix on its own: the same values up to the order in which products are summed.
        let prefix = values(model.forward(tokens(&text[..9], &device)));
        let difference = prefix
            .iter()
            .zip(&whole)
            .map(|(a, b)| (a - b).abs())
            .fold(0f32, f32::max);
        assert!(difference < 1e-4, "prefix differs by {difference}");
    }

    /// The score of a query and a key depends on how far apart they are, and on nothing else about
    /// where they are; lengths are kept.
    #[test]
    fn rotations_are_relative() {
        let device = Device::flex();
        let positions = Positions::new(16, 8, &device);
        let repeat = |seed| {
            let row = Stream::new(seed, 0).normal(8, 1.0);
            let all: Vec<f32> = row.iter().copied().cycle().take(16 * 8).collect();
            let x = Tensor::<4>::from_data(TensorData::new(all, [1, 1, 16, 8]), &device);
            (row, positions.rotate(x))
        };
        let ((q_row, q), (k_row, k)) = (repeat(1), repeat(2));
        let lengths = values(q.clone().square().sum_dim(3));
        let length: f32 = q_row.iter().map(|v| v * v).sum();
        assert!(
            lengths.iter().all(|l| (l - length).abs() < 1e-4),
            "{lengths:?} is not {length}"
        );
        let scores = values(q.matmul(k.swap_dims(2, 3)));
        let score = |query: usize, key: usize| scores[query * 16 + key];
        let plain: f32 = q_row.iter().zip(&k_row).map(|(a, b)| a * b).sum();
        for i in 0..16 {
            assert!((score(i, i) - plain).abs() < 1e-4);
        }
        for i in 0..12 {
            assert!((score(i + 3, i) - score(3, 0)).abs() < 1e-4, "position {i}");
        }
        assert!(
            (score(3, 0) - score(0, 0)).abs() > 1e-3,
            "distance has no effect"
        );
    }

    #[test]
    fn weights_depend_on_the_seed_alone() {
        let device = Device::flex();
        let weight =
            |model: &Transformer| values(model.blocks[1].feed_forward.gate_up.weight.val());
        let (nvfp4, f32) = (
            model(Recipe::nvfp4(), &device),
            model(Recipe::f32(), &device),
        );
        assert_eq!(weight(&nvfp4), weight(&f32));
        assert_eq!(nvfp4.head.id, f32.head.id);
        assert_ne!(
            weight(&nvfp4),
            values(nvfp4.blocks[0].feed_forward.gate_up.weight.val())
        );
        assert_eq!(nvfp4.num_params(), SIZES.parameters());
    }

    #[test]
    fn every_parameter_gets_a_gradient() {
        struct Check<'a>(&'a burn::optim::GradientsParams, usize);
        impl burn::module::ModuleVisitor for Check<'_> {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                let gradient = self.0.get::<D>(param.id).expect("a gradient");
                assert_eq!(gradient.dtype(), DType::F32);
                assert!(values(gradient).iter().any(|v| *v != 0.0));
                self.1 += 1;
            }
        }
        let device = Device::flex().autodiff();
        for recipe in [Recipe::nvfp4(), Recipe::f32()] {
            let model = model(recipe.clone(), &device);
            let text: Vec<i64> = (0..20).map(|i| (i * 31) % 256).collect();
            let loss = model.loss(tokens(&text, &device), tokens(&text, &device));
            let uniform = (VOCABULARY as f32).ln();
            let value = loss.clone().into_scalar::<f32>();
            assert!(
                (value - uniform).abs() < 0.3,
                "{recipe} starts at {value}, not {uniform}"
            );
            let gradients = burn::optim::GradientsParams::from_grads(loss.backward(), &model);
            let mut check = Check(&gradients, 0);
            model.visit(&mut check);
            assert_eq!(check.1, 2 * 6 + 3);
        }
    }
}
