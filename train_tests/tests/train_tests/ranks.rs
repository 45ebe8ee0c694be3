//! Tests burn-train on several ranks: each rank has a learner whose model averages its gradients.
//!
//! Here the ranks are threads over loopback. Processes with one GPU each run the same code.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use burn::data::dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher};
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::tensor::Device;
use burn_optim::{AdamWConfig, GradientsAccumulator, GradientsParams};
use burn_train::metric::LossMetric;
use burn_train::{
    InferenceStep, Learner, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
};
use nvfp4::parallel::{ProcessGroup, average_gradients, broadcast};
use nvfp4::state::set_rank;
use nvfp4::{Nvfp4Recipe, Nvfp4State};

use crate::common::{BATCH, Net, RATE, RowBatcher, Rows};

const RANKS: usize = 2;
/// Steps per rank.
const STEPS: usize = 40;
/// Rows per rank.
const PART: usize = BATCH * STEPS;

/// A model whose gradients are averaged over its ranks.
#[derive(Module, Debug)]
struct Parallel {
    net: Net,
    #[module(skip)]
    group: ProcessGroup,
}

impl TrainStep for Parallel {
    type Input = Rows;
    type Output = RegressionOutput;

    fn step(&self, rows: Rows) -> TrainOutput<RegressionOutput> {
        let item = self.net.regression(rows);
        let mut grads = GradientsParams::from_grads(item.loss.backward(), self);
        average_gradients(self, &mut grads, &self.group);
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

/// Returns a loader for the rows of `rank`, in order.
fn loader(rank: usize, rows: usize, device: &Device) -> Arc<dyn DataLoader<Rows>> {
    let rows: Vec<usize> = (PART * rank..).take(rows).collect();
    DataLoaderBuilder::new(RowBatcher)
        .batch_size(BATCH)
        .set_device(device.clone())
        .build(InMemDataset::new(rows))
}

/// Trains on `group`'s rank with burn-train and returns the model.
fn by_burn_train(name: &str, net: Net, device: &Device, group: ProcessGroup) -> Net {
    let rank = group.rank();
    let directory =
        std::env::temp_dir().join(format!("nvfp4-{}-{name}-{rank}", std::process::id()));
    set_rank(&net, rank).unwrap();
    let model = Parallel {
        net: broadcast(net, &group),
        group,
    };
    let training = SupervisedTraining::new(
        &directory,
        loader(rank, PART, device),
        loader(rank, BATCH, &device.clone().inner()),
    )
    .metrics((LossMetric::new(),))
    .with_application_logger(None)
    .num_epochs(1);
    let result = training.launch(Learner::new(model, AdamWConfig::new().init(), RATE));
    assert!(result.error.is_none());
    let _ = std::fs::remove_dir_all(directory);
    result.model.net
}

/// Trains on all ranks and returns their models.
fn on_ranks(name: &str, net: &Net, device: &Device) -> Vec<Net> {
    thread::scope(|scope| {
        let groups = ProcessGroup::loopback(RANKS, Duration::from_secs(120));
        let ranks = groups.into_iter().map(|group| {
            // A separate model with its own forward counters, as in another process.
            let net = net.copy(device);
            scope.spawn(move || by_burn_train(name, net, device, group))
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Runs the same steps on one thread without burn-train, one rank's share after the other's. Each
/// share has its own amax values and the random bits of its rank.
fn in_turns(net: &Net, device: &Device) -> Net {
    let mut ranks: Vec<Net> = (0..RANKS)
        .map(|rank| {
            let net = net.copy(device);
            set_rank(&net, rank).unwrap();
            net
        })
        .collect();
    let mut optimizer = AdamWConfig::new().init();
    let mut net = net.copy(device);
    for step in 0..STEPS {
        let mut grads = GradientsAccumulator::new();
        for (rank, own) in ranks.iter_mut().enumerate() {
            *own = own.clone().load_record(net.clone().into_record());
            let first = PART * rank + BATCH * step;
            let rows = RowBatcher.batch((first..first + BATCH).collect(), device);
            // Scaling by a power of two changes no rounding.
            let loss = own.regression(rows).loss.mul_scalar(0.5);
            grads.accumulate(&net, GradientsParams::from_grads(loss.backward(), own));
        }
        net = optimizer.step(RATE, net, grads.grads());
    }
    net
}

/// Returns the loss on rows of all ranks.
fn loss(net: &Net, device: &Device) -> f32 {
    let rows = RowBatcher.batch((PART - BATCH..PART + BATCH).collect(), device);
    net.regression(rows).loss.into_scalar::<f32>()
}

#[test]
fn two_ranks_train_as_one() {
    let device = Device::flex().autodiff();
    device.seed(1);
    for recipe in ["bf16", "nvidia"] {
        let net = Net::of(&Nvfp4Recipe::preset(recipe).unwrap().with_seed(5), &device);
        let before = loss(&net.copy(&device), &device);
        let begin = Nvfp4State::collect(&net).layers["up"].offset;
        let trained = on_ranks(recipe, &net, &device);
        for rank in &trained {
            // Collected before another forward advances the counters.
            let end = Nvfp4State::collect(rank).layers["up"].offset;
            assert_eq!(end - begin, STEPS as u64, "{recipe}");
            assert_eq!(rank.bits(), trained[0].bits(), "{recipe}: ranks are equal");
        }
        let turns = in_turns(&net, &device);
        assert_eq!(trained[0].bits(), turns.bits(), "{recipe}: ranks are one");
        let after = loss(&turns, &device);
        assert!(after < 0.8 * before, "{recipe}: {before} to {after}");
    }
}
