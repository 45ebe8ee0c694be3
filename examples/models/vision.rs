//! A vision transformer that names the shape in an image.

use std::error::Error;
use std::path::Path;

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};

use super::nn::loss::CrossEntropyLossConfig;
use super::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use super::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use crate::shapes::{Images, PATCH_VALUES, PATCHES, SHAPES, to_patches};
use crate::training::{Example, Settings, normal};

#[derive(Module, Debug)]
pub struct Vit {
    patches: Linear,
    positions: Param<Tensor<3>>,
    encoder: TransformerEncoder,
    norm: LayerNorm,
    // Burn's layer: a head stays in high precision.
    head: burn::nn::Linear,
}

impl Vit {
    fn logits(&self, images: Tensor<4>) -> Tensor<2> {
        let x = self.patches.forward(to_patches(images)) + self.positions.val();
        let x = self.encoder.forward(TransformerEncoderInput::new(x));
        let x = self.norm.forward(x).mean_dim(1).squeeze_dim(1);
        self.head.forward(x)
    }
}

impl Example for Vit {
    const SETTINGS: Settings = Settings {
        width: 64,
        layers: 3,
        batch: 32,
        steps: 300,
        learning_rate: 2e-3,
    };

    fn new(settings: &Settings, device: &Device) -> Self {
        let width = settings.width;
        let encoder = TransformerEncoderConfig::new(width, 4 * width, 4, settings.layers)
            .with_norm_first(true)
            .with_dropout(0.0);
        Self {
            patches: LinearConfig::new(PATCH_VALUES, width).init(device),
            positions: normal([1, PATCHES, width], 0.02, device),
            encoder: encoder.init(device),
            norm: LayerNormConfig::new(width).init(device),
            head: burn::nn::LinearConfig::new(width, SHAPES.len()).init(device),
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
