//! Model and data of the tests.

use burn::data::dataloader::batcher::Batcher;
use burn::module::Module;
use burn::tensor::{Device, Tensor, TensorData, activation::gelu};
use burn_train::{InferenceStep, RegressionOutput, TrainOutput, TrainStep};
use nvfp4::state::assign_layer_ids;
use nvfp4::{Nvfp4Linear, Nvfp4LinearConfig, Nvfp4Recipe, Nvfp4State};

pub const WIDTH: usize = 32;
pub const BATCH: usize = 16;
pub const RATE: f64 = 0.01;

#[derive(Module, Debug)]
pub struct Net {
    pub up: Nvfp4Linear,
    pub down: Nvfp4Linear,
}

impl Net {
    pub fn new(device: &Device) -> Self {
        Self::of(&Nvfp4Recipe::new().with_seed(5), device)
    }

    pub fn of(recipe: &Nvfp4Recipe, device: &Device) -> Self {
        let layer = || {
            Nvfp4LinearConfig::new(WIDTH, WIDTH)
                .with_recipe(recipe.clone())
                .init(device)
        };
        let net = Self {
            up: layer(),
            down: layer(),
        };
        assign_layer_ids(&net);
        net
    }

    /// Copies parameters and recipe to a model with separate forward counters.
    pub fn copy(&self, device: &Device) -> Self {
        let copy = Self::of(self.up.recipe(), device).load_record(self.clone().into_record());
        Nvfp4State::collect(self).apply(&copy).unwrap();
        copy
    }

    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.down.forward(gelu(self.up.forward(x)))
    }

    pub fn regression(&self, Rows { x, target }: Rows) -> RegressionOutput {
        let output = self.forward(x);
        let loss = (output.clone() - target.clone()).powi_scalar(2).mean();
        RegressionOutput::new(loss, output, target)
    }

    pub fn bits(&self) -> Vec<Vec<u32>> {
        [&self.up, &self.down]
            .into_iter()
            .flat_map(|layer| {
                [
                    layer.weight.val().into_data(),
                    layer.bias.as_ref().unwrap().val().into_data(),
                ]
            })
            .map(|data| data.iter::<f32>().map(f32::to_bits).collect())
            .collect()
    }
}

impl TrainStep for Net {
    type Input = Rows;
    type Output = RegressionOutput;

    fn step(&self, rows: Rows) -> TrainOutput<RegressionOutput> {
        let output = self.regression(rows);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Net {
    type Input = Rows;
    type Output = RegressionOutput;

    fn step(&self, rows: Rows) -> RegressionOutput {
        self.regression(rows)
    }
}

#[derive(Clone, Debug)]
pub struct Rows {
    pub x: Tensor<2>,
    pub target: Tensor<2>,
}

/// Returns row number `index`, a wave. The target is the reversed row.
pub fn row(index: usize) -> Vec<f32> {
    (0..WIDTH)
        .map(|column| ((index * 7 + column * (1 + index % 5)) as f32 * 0.37).sin())
        .collect()
}

#[derive(Clone)]
pub struct RowBatcher;

impl Batcher<usize, Rows> for RowBatcher {
    fn batch(&self, items: Vec<usize>, device: &Device) -> Rows {
        let values: Vec<f32> = items.iter().flat_map(|&index| row(index)).collect();
        let x = Tensor::from_data(TensorData::new(values, [items.len(), WIDTH]), device);
        let target = x.clone().flip([1]);
        Rows { x, target }
    }
}
