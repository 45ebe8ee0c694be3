//! A convolutional network that names the shape in an image. Its convolutions stay in high
//! precision: NVFP4 is for the linear layers.

use std::error::Error;
use std::path::Path;

use burn::module::Module;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor};

use super::nn::conv::{Conv2d, Conv2dConfig};
use super::nn::loss::CrossEntropyLossConfig;
use super::nn::{Linear, LinearConfig, PaddingConfig2d};
use crate::shapes::{Images, SHAPES, SIDE};
use crate::training::{Example, Settings};

#[derive(Module, Debug)]
pub struct Cnn {
    convolutions: Vec<Conv2d>,
    hidden: Linear,
    // Burn's layer: a head stays in high precision.
    head: burn::nn::Linear,
}

impl Cnn {
    fn logits(&self, images: Tensor<4>) -> Tensor<2> {
        let convolve = |x, convolution: &Conv2d| relu(convolution.forward(x));
        let x = self.convolutions.iter().fold(images, convolve);
        let x = relu(self.hidden.forward(x.flatten(1, 3)));
        self.head.forward(x)
    }
}

impl Example for Cnn {
    const SETTINGS: Settings = Settings {
        width: 128,
        layers: 2,
        batch: 32,
        steps: 200,
        learning_rate: 2e-3,
    };

    fn new(settings: &Settings, device: &Device) -> Self {
        let channels = |layer| match layer {
            0 => 3,
            _ => 8 << layer,
        };
        // Each halves height and width.
        let convolution = |layer| {
            Conv2dConfig::new([channels(layer), channels(layer + 1)], [3, 3])
                .with_stride([2, 2])
                .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
                .init(device)
        };
        let side = SIDE >> settings.layers;
        let features = channels(settings.layers) * side * side;
        Self {
            convolutions: (0..settings.layers).map(convolution).collect(),
            hidden: LinearConfig::new(features, settings.width).init(device),
            head: burn::nn::LinearConfig::new(settings.width, SHAPES.len()).init(device),
        }
    }

    fn loss(&self, batch: usize, seed: u64) -> Tensor<1> {
        let device = self.device();
        let batch = Images::new(batch, seed, &device);
        let loss = CrossEntropyLossConfig::new().init(&device);
        loss.forward(self.logits(batch.images), batch.shapes)
    }

    fn show(&self, _name: &Path) -> Result<String, Box<dyn Error>> {
        let new = Images::new(256, u64::MAX, &self.device());
        Ok(new.percent_named(self.logits(new.images.clone())))
    }
}
