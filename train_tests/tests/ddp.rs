//! burn-train's data-parallel training on two GPUs. It skips itself, and says so, where there are fewer.
#![cfg(feature = "cuda")]

#[allow(dead_code, reason = "the other tests' part")]
mod common;

use std::sync::{Arc, Barrier};

use burn_core as burn;

use burn_core::data::dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher};
use burn_core::data::dataset::InMemDataset;
use burn_core::module::Module;
use burn_core::tensor::distributed::{DistributedConfig, ReduceOperation};
use burn_core::tensor::{Device, DeviceType};
use burn_nvfp4::{Nvfp4Recipe, Nvfp4State};
use burn_optim::{AdamWConfig, GradientsParams};
use burn_train::metric::LossMetric;
use burn_train::{
    ExecutionStrategy, InferenceStep, Learner, RegressionOutput, SupervisedTraining, TrainOutput,
    TrainStep,
};

use common::{BATCH, Net, RATE, RowBatcher, Rows};

/// Of each worker.
const STEPS: usize = 40;
/// Rows of each worker: burn-train gives it one half of the data.
const HALF: usize = BATCH * STEPS;

/// Where the workers meet behind each backward. Without it training stands still after some steps, with any
/// layers: see docs/data-parallel.md.
static BACKWARD_ENDED: Barrier = Barrier::new(2);

/// A model whose workers wait for each other.
#[derive(Module, Debug)]
struct Meeting {
    net: Net,
}

impl TrainStep for Meeting {
    type Input = Rows;
    type Output = RegressionOutput;

    fn step(&self, rows: Rows) -> TrainOutput<RegressionOutput> {
        let output = self.net.regression(rows);
        let grads = output.loss.backward();
        BACKWARD_ENDED.wait();
        TrainOutput::new(self, grads, output)
    }
}

impl InferenceStep for Meeting {
    type Input = Rows;
    type Output = RegressionOutput;

    fn step(&self, rows: Rows) -> RegressionOutput {
        self.net.regression(rows)
    }
}

fn devices() -> Option<Vec<Device>> {
    if std::env::var("NVFP4_TEST_DEVICE").as_deref() != Ok("cuda") {
        eprintln!("skipped: NVFP4_TEST_DEVICE is not cuda");
        return None;
    }
    let count = Device::enumerate(DeviceType::Cuda).len();
    if count < 2 {
        eprintln!("skipped: {count} CUDA devices, two are needed");
        return None;
    }
    Some([0, 1].map(|index| Device::cuda(index).autodiff()).into())
}

fn loader(rows: usize, device: &Device) -> Arc<dyn DataLoader<Rows>> {
    DataLoaderBuilder::new(RowBatcher)
        .batch_size(BATCH)
        .set_device(device.clone())
        .build(InMemDataset::new((0..rows).collect::<Vec<usize>>()))
}

/// The same steps on one device: both workers' rows are one batch.
fn on_one(mut net: Net, device: &Device) -> Net {
    let mut optimizer = AdamWConfig::new().init();
    for start in (0..HALF).step_by(BATCH) {
        let halves = [start, HALF + start].map(|first| first..first + BATCH);
        let rows = RowBatcher.batch(halves.into_iter().flatten().collect(), device);
        let grads = net.regression(rows).loss.backward();
        let grads = GradientsParams::from_grads(grads, &net);
        net = optimizer.step(RATE, net, grads);
    }
    net
}

fn by_burn_train(name: &str, net: Net, devices: &[Device]) -> Net {
    let directory = std::env::temp_dir().join(format!("nvfp4-{}-{name}", std::process::id()));
    let config = DistributedConfig {
        all_reduce_op: ReduceOperation::Mean,
    };
    let strategy = ExecutionStrategy::ddp(devices.to_vec(), config);
    let main = &devices[0];
    let training = SupervisedTraining::new(
        &directory,
        loader(2 * HALF, main),
        loader(BATCH, &main.clone().inner()),
    )
    .metrics((LossMetric::new(),))
    .with_application_logger(None)
    .with_training_strategy(strategy.into())
    .num_epochs(1);
    let model = Meeting { net };
    let result = training.launch(Learner::new(model, AdamWConfig::new().init(), RATE));
    assert!(result.error.is_none());
    let _ = std::fs::remove_dir_all(directory);
    result.model.net
}

/// Loss on rows of both workers.
fn loss(net: &Net, device: &Device) -> f32 {
    let rows = RowBatcher.batch((HALF - BATCH..HALF + BATCH).collect(), device);
    net.regression(rows).loss.into_scalar::<f32>()
}

/// In one test: NCCL has one communicator for each device and process.
#[test]
fn two_gpus_train_as_one() {
    let Some(devices) = devices() else {
        return;
    };
    let device = &devices[0];
    for (name, recipe) in [
        ("bf16", Nvfp4Recipe::preset("bf16").unwrap()),
        (
            "to-nearest",
            Nvfp4Recipe::new().with_stochastic_rounding(false),
        ),
        ("nvidia", Nvfp4Recipe::new()),
    ] {
        let net = Net::of(&recipe, device);
        let before = loss(&net, device);
        let one = loss(&on_one(net.copy(device), device), device);
        let trained = by_burn_train(name, net.copy(device), &devices);
        // Before another forward counts.
        let [begin, end] = [&net, &trained].map(|net| Nvfp4State::collect(net).layers["up"].offset);
        assert_eq!(end - begin, STEPS as u64, "{name}");
        let two = loss(&trained, device);
        eprintln!(
            "{name}: loss {before:.5}; after {STEPS} steps on one GPU {one:.5}, on two {two:.5}"
        );
        assert!(one < 0.8 * before, "{name}: one GPU learns");
        assert!((one - two).abs() < 0.05 * one, "{name}: two GPUs are one");
    }
}
