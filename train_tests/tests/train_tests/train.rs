//! Tests models of `Nvfp4Linear` in burn-train's loop, on Flex.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::data::dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher};
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::tensor::{Device, ExecutionError};
use burn_optim::{AdamWConfig, GradientsAccumulator, GradientsParams};
use burn_train::metric::{Adaptor, LossInput, LossMetric};
use burn_train::{
    ExecutionStrategy, InferenceStep, ItemLazy, Learner, RegressionOutput, SupervisedTraining,
    TrainOutput, TrainStep,
};
use nvfp4::Nvfp4State;
use nvfp4::telemetry::metrics::{Statistic, TelemetryInput, TelemetryMetric};
use nvfp4::telemetry::{Telemetry, TelemetrySampler};

use crate::common::{BATCH, Net, RATE, RowBatcher, Rows};

pub const STEPS: usize = 6;

pub fn loader(device: &Device) -> Arc<dyn DataLoader<Rows>> {
    DataLoaderBuilder::new(RowBatcher)
        .batch_size(BATCH)
        .set_device(device.clone())
        .build(InMemDataset::new(
            (0..BATCH * STEPS).collect::<Vec<usize>>(),
        ))
}

/// Runs burn-train's loop by hand.
fn by_hand(mut net: Net, accumulate: usize, device: &Device) -> Net {
    let mut optimizer = AdamWConfig::new().init();
    let mut accumulator = GradientsAccumulator::new();
    for (step, start) in (0..BATCH * STEPS).step_by(BATCH).enumerate() {
        let rows = RowBatcher.batch((start..start + BATCH).collect(), device);
        let grads = net.regression(rows).loss.backward();
        accumulator.accumulate(&net, GradientsParams::from_grads(grads, &net));
        if (step + 1) % accumulate == 0 {
            net = optimizer.step(RATE, net, accumulator.grads());
        }
    }
    net
}

/// Serializes tests, because burn-train installs one logger per process.
pub fn one_at_a_time() -> MutexGuard<'static, ()> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Trains one epoch with burn-train, with the additions of `configure`. Uses a separate directory,
/// because it writes logs.
fn by_burn_train(
    name: &str,
    net: Net,
    device: &Device,
    configure: impl FnOnce(SupervisedTraining<Net>) -> SupervisedTraining<Net>,
) -> Net {
    let _guard = one_at_a_time();
    let directory = std::env::temp_dir().join(format!("nvfp4-{}-{name}", std::process::id()));
    let training =
        SupervisedTraining::new(&directory, loader(device), loader(&device.clone().inner()))
            .metrics((LossMetric::new(),))
            .with_application_logger(None)
            .with_training_strategy(ExecutionStrategy::single(device.clone()).into())
            .num_epochs(1);
    let learner = Learner::new(net, AdamWConfig::new().init(), RATE);
    let result = configure(training).launch(learner);
    assert!(result.error.is_none());
    let _ = std::fs::remove_dir_all(directory);
    result.model
}

#[test]
fn supervised_training_is_the_loop_by_hand() {
    let device = Device::flex().autodiff();
    let net = Net::new(&device);
    let before = net.bits();
    let hand = by_hand(net.copy(&device), 1, &device);
    let trained = by_burn_train("plain", net.copy(&device), &device, |training| training);
    assert_ne!(trained.bits(), before);
    assert_eq!(trained.bits(), hand.bits());
    let state = Nvfp4State::collect(&trained);
    assert_eq!(state, Nvfp4State::collect(&hand));
    assert_eq!(
        state.layers["up"].offset, STEPS as u64,
        "one draw for each training forward, none for validation"
    );
}

#[test]
fn gradient_accumulation() {
    let device = Device::flex().autodiff();
    let net = Net::new(&device);
    let hand = by_hand(net.copy(&device), 3, &device);
    let trained = by_burn_train("accumulation", net, &device, |training| {
        training.grads_accumulation(3)
    });
    assert_eq!(trained.bits(), hand.bits());
    assert_eq!(
        Nvfp4State::collect(&trained).layers["down"].offset,
        STEPS as u64
    );
}

/// Recomputed activations have the same bits, and no random offset is used twice.
#[test]
fn gradient_checkpointing() {
    let device = Device::flex().autodiff();
    let net = Net::new(&device);
    let hand = by_hand(net.copy(&device), 1, &device);
    let device = device.gradient_checkpointing();
    let trained = by_burn_train("checkpointing", net.copy(&device), &device, |training| {
        training.gradient_checkpointing()
    });
    assert_eq!(trained.bits(), hand.bits());
    assert_eq!(
        Nvfp4State::collect(&trained).layers["up"].offset,
        STEPS as u64
    );
}

/// A checkpoint of burn-train and the separate state continue training bit by bit.
#[test]
fn records_and_state_continue() {
    let device = Device::flex().autodiff();
    let net = by_hand(Net::new(&device), 1, &device);
    let record = net.clone().into_record().into_bytes().unwrap();
    let state = Nvfp4State::collect(&net);
    let other =
        Net::new(&device).load_record(burn::store::ModuleRecord::from_bytes(record).unwrap());
    state.apply(&other).unwrap();
    let one = by_burn_train("one", net.copy(&device), &device, |training| training);
    let two = by_burn_train("two", other, &device, |training| training);
    assert_eq!(one.bits(), two.bits());
}

/// A model that samples every other step.
#[derive(Module, Debug)]
struct Watched {
    net: Net,
    #[module(skip)]
    sampler: TelemetrySampler,
}

struct WatchedOutput {
    regression: RegressionOutput,
    telemetry: TelemetryInput,
}

impl Adaptor<LossInput> for WatchedOutput {
    fn adapt(&self) -> LossInput {
        self.regression.adapt()
    }
}

impl Adaptor<TelemetryInput> for WatchedOutput {
    fn adapt(&self) -> TelemetryInput {
        self.telemetry.clone()
    }
}

impl ItemLazy for WatchedOutput {
    fn sync(self) -> Result<Self, ExecutionError> {
        Ok(Self {
            regression: self.regression.sync()?,
            telemetry: self.telemetry,
        })
    }
}

impl TrainStep for Watched {
    type Input = Rows;
    type Output = WatchedOutput;

    fn step(&self, rows: Rows) -> TrainOutput<WatchedOutput> {
        let ((regression, grads), samples) = self.sampler.sample(self, || {
            let regression = self.net.regression(rows);
            let grads = regression.loss.backward();
            (regression, grads)
        });
        let telemetry = samples.into();
        let output = WatchedOutput {
            regression,
            telemetry,
        };
        TrainOutput::new(self, grads, output)
    }
}

impl InferenceStep for Watched {
    type Input = Rows;
    type Output = WatchedOutput;

    fn step(&self, rows: Rows) -> WatchedOutput {
        WatchedOutput {
            regression: self.net.regression(rows),
            telemetry: TelemetryInput::default(),
        }
    }
}

/// Returns the logged values of a metric, for the steps that have one.
fn logged(directory: &Path, metric: &str) -> Vec<f64> {
    let file = format!("{}.log", metric.replace(' ', "_"));
    let path = directory.join("train/epoch-1").join(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    text.lines()
        .filter(|line| !line.ends_with("final"))
        .map(|line| line.split(',').next().unwrap().parse().unwrap())
        .collect()
}

/// burn-train logs the telemetry of the sampled steps only, with the values of the steps run by
/// hand.
#[test]
fn telemetry_is_logged_by_burn_train() {
    let _guard = one_at_a_time();
    let device = Device::flex().autodiff();
    let net = Net::new(&device);
    let by_hand = net.copy(&device);
    let watched = Watched {
        net,
        sampler: TelemetrySampler::new(2),
    };
    let directory = std::env::temp_dir().join(format!("nvfp4-{}-telemetry", std::process::id()));
    let mut training =
        SupervisedTraining::new(&directory, loader(&device), loader(&device.clone().inner()))
            .with_application_logger(None)
            .with_training_strategy(ExecutionStrategy::single(device.clone()).into())
            .metric_train_numeric(TelemetryMetric::mean(Statistic::Sqnr).of_operand("dgrad.dy"))
            .metric_train_numeric(TelemetryMetric::mean(Statistic::Stochastic))
            .num_epochs(1);
    for metric in TelemetryMetric::for_layers(Statistic::Zeros, &watched) {
        training = training.metric_train_numeric(metric);
    }
    let learner = Learner::new(watched, AdamWConfig::new().init(), RATE);
    assert!(training.launch(learner).error.is_none());

    // Runs the first step by hand, from the same weights and offsets.
    let telemetry = Telemetry::start(&by_hand);
    let rows = RowBatcher.batch((0..BATCH).collect(), &device);
    drop(by_hand.regression(rows).loss.backward());
    let samples = telemetry.finish();
    let mean = |values: Vec<f64>| values.iter().sum::<f64>() / values.len() as f64;
    let gradients = samples.iter().filter(|sample| sample.operand == "dgrad.dy");
    let expected = mean(gradients.map(|sample| sample.sqnr_db).collect());
    let found = logged(&directory, "SQNR dgrad.dy");
    assert_eq!(found.len(), STEPS / 2, "every other step");
    assert!((found[0] - expected).abs() < 1e-9, "{found:?}, {expected}");
    // All operands except the first layer's dgrad.dy, because its input needs no gradient.
    assert_eq!(samples.len(), 9);
    let mix = logged(&directory, "Rounded Stochastically");
    assert!((mix[0] - 100.0 * 3.0 / 9.0).abs() < 1e-9, "{mix:?}");
    let of_up = samples.iter().filter(|sample| sample.layer == "up");
    let expected = mean(of_up.map(|sample| 100.0 * sample.zeros).collect());
    let found = logged(&directory, "Lost to Zero net.up");
    assert!((found[0] - expected).abs() < 1e-9, "{found:?}, {expected}");
    logged(&directory, "Lost to Zero net.down");
    let _ = std::fs::remove_dir_all(directory);
}
