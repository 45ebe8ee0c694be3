//! burn-train's data-parallel training on two GPUs. It skips itself, and says so, where there are
//! fewer.

use std::sync::Arc;

use burn_core as burn;

use burn_core::data::dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher};
use burn_core::data::dataset::InMemDataset;
use burn_core::module::Module;
use burn_core::tensor::distributed::{DistributedConfig, ReduceOperation};
use burn_core::tensor::{Device, DeviceType};
use burn_nvfp4::{DataParallel, Nvfp4Recipe, Nvfp4State};
use burn_optim::{AdamWConfig, GradientsAccumulator, GradientsParams};
use burn_train::metric::LossMetric;
use burn_train::{
    ExecutionStrategy, InferenceStep, Learner, RegressionOutput, SupervisedTraining, TrainOutput,
    TrainStep,
};

use crate::common::{BATCH, Net, RATE, RowBatcher, Rows};
use crate::skip::skip;

/// Of each worker.
const STEPS: usize = 40;
/// Of one recipe, after the first.
const TRAININGS: usize = 10;
/// Rows of each worker: burn-train gives it one half of the data.
const HALF: usize = BATCH * STEPS;

/// A model whose gradients are averaged over its ranks.
#[derive(Module, Debug)]
struct Parallel {
    net: Net,
    #[module(skip)]
    ranks: DataParallel,
}

impl TrainStep for Parallel {
    type Input = Rows;
    type Output = RegressionOutput;

    fn step(&self, rows: Rows) -> TrainOutput<RegressionOutput> {
        let (grads, item) = self.ranks.step(self, |model| {
            let output = model.net.regression(rows);
            (output.loss.clone(), output)
        });
        TrainOutput { grads, item }
    }
}

impl InferenceStep for Parallel {
    type Input = Rows;
    type Output = RegressionOutput;

    fn step(&self, rows: Rows) -> RegressionOutput {
        self.net.regression(rows)
    }
}

/// The first two CUDA devices, or why there are none.
fn devices() -> Result<Vec<Device>, String> {
    if std::env::var("NVFP4_TEST_DEVICE").as_deref() != Ok("cuda") {
        return Err("NVFP4_TEST_DEVICE is not cuda".into());
    }
    let count = Device::enumerate(DeviceType::Cuda).len();
    if count < 2 {
        return Err(format!("{count} CUDA devices, two are needed"));
    }
    Ok([0, 1].map(|index| Device::cuda(index).autodiff()).into())
}

fn loader(rows: usize, device: &Device) -> Arc<dyn DataLoader<Rows>> {
    DataLoaderBuilder::new(RowBatcher)
        .batch_size(BATCH)
        .set_device(device.clone())
        .build(InMemDataset::new((0..rows).collect::<Vec<usize>>()))
}

/// The same steps on one device, with both workers' rows in one batch.
fn in_one_batch(mut net: Net, device: &Device) -> Net {
    let mut optimizer = AdamWConfig::new().init();
    for start in (0..HALF).step_by(BATCH) {
        let rows = [start, HALF + start].map(|first| first..first + BATCH);
        let rows = RowBatcher.batch(rows.into_iter().flatten().collect(), device);
        let grads = net.regression(rows).loss.backward();
        let grads = GradientsParams::from_grads(grads, &net);
        net = optimizer.step(RATE, net, grads);
    }
    net
}

/// The same steps on one device, one worker's part after the other's, without burn-train and NCCL:
/// each part has its own maxima, and the random bits of its worker.
fn in_turns(mut net: Net, workers: &[Device]) -> Net {
    let device = &workers[0];
    let mut optimizer = AdamWConfig::new().init();
    for start in (0..HALF).step_by(BATCH) {
        let mut grads = GradientsAccumulator::new();
        for (worker, first) in workers.iter().zip([start, HALF + start]) {
            let mut part = net.clone();
            for layer in [&mut part.up, &mut part.down] {
                layer.state = layer.state.clone().fork(worker);
            }
            let rows = RowBatcher.batch((first..first + BATCH).collect(), device);
            // A power of two, which changes no rounding.
            let loss = part.regression(rows).loss.mul_scalar(0.5);
            grads.accumulate(&part, GradientsParams::from_grads(loss.backward(), &part));
        }
        net = optimizer.step(RATE, net, grads.grads());
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
    let ranks = DataParallel::new(devices).unwrap();
    let model = Parallel { net, ranks };
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
    let devices = match devices() {
        Ok(devices) => devices,
        Err(reason) => skip!("{reason}"),
    };
    let device = &devices[0];
    device.seed(1);
    for (name, recipe) in [
        ("bf16", Nvfp4Recipe::preset("bf16").unwrap()),
        (
            "to-nearest",
            Nvfp4Recipe::new().with_stochastic_rounding(false),
        ),
        ("nvidia", Nvfp4Recipe::new()),
    ] {
        let net = Net::of(&recipe, device);
        let before = loss(&net.copy(device), device);
        let trained = by_burn_train(name, net.copy(device), &devices);
        // Before another forward counts.
        let [begin, end] = [&net, &trained].map(|net| Nvfp4State::collect(net).layers["up"].offset);
        assert_eq!(end - begin, STEPS as u64, "{name}");
        let turns = in_turns(net.copy(device), &devices);
        let [two, turns] = [trained, turns].map(|net| loss(&net, device));
        let one = loss(&in_one_batch(net.copy(device), device), device);
        eprintln!(
            "{name}: loss {before:.5}; after {STEPS} steps on two GPUs {two:.6}, on one in turns {turns:.6}, \
             in one batch {one:.6}"
        );
        assert!(two < 0.8 * before, "{name}: two GPUs learn");
        assert!(one < 0.8 * before, "{name}: one GPU learns");
        assert!(
            (turns - two).abs() < 1e-3 * turns,
            "{name}: two GPUs are one"
        );
        if name == "bf16" {
            // Nothing depends on the batch that a row is in.
            assert!((one - two).abs() < 1e-3 * one, "two GPUs are one batch");
        }
        if name == "to-nearest" {
            // Threads come and go with each training; none of them makes the ranks stand still.
            for _ in 0..TRAININGS {
                let again = by_burn_train(name, net.copy(device), &devices);
                assert_eq!(loss(&again, device), two, "the same training twice");
            }
        }
    }
}
