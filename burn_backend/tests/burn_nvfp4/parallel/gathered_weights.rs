//! Weights whose rows are sharded over ranks, and whose quantized operands are gathered.

use burn_core as burn;

use burn_core::module::{Module, ModuleVisitor, Param};
use burn_core::tensor::{DType, Device, Tensor};
use burn_nvfp4::optim::AdamWConfig;
use burn_nvfp4::parallel::{
    ProcessGroup, Shards, average_gradients, fully_shard, gather, reduce_gradients,
};
use burn_nvfp4::state::{assign_layer_ids, set_rank};
use burn_nvfp4::{Nvfp4Linear, Nvfp4LinearConfig, Nvfp4Recipe, Nvfp4SwiGlu, Nvfp4SwiGluConfig};
use burn_optim::GradientsParams;

use super::data::Initialise;
use super::on_ranks;
use crate::support::{Matrix, device, skip_where_small_only, values};

/// Each of two ranks has a multiple of 128 rows, the largest RHT size.
const WIDTH: usize = 256;
const TOKENS: usize = 32;
const STEPS: usize = 3;

/// Every use of a weight.
#[derive(Module, Debug)]
struct Layers {
    alone: Nvfp4Linear,
    queries: Nvfp4Linear,
    keys: Nvfp4Linear,
    feed_forward: Nvfp4SwiGlu,
}

impl Layers {
    fn new(recipe: &str, device: &Device) -> Self {
        let recipe = Nvfp4Recipe::preset(recipe).unwrap().with_seed(3);
        let linear = |d_out| {
            let config = Nvfp4LinearConfig::new(WIDTH, d_out);
            config.with_recipe(recipe.clone()).init(device)
        };
        let feed_forward = Nvfp4SwiGluConfig::new(WIDTH, WIDTH).with_recipe(recipe.clone());
        let layers = Self {
            alone: linear(WIDTH),
            queries: linear(WIDTH),
            keys: linear(64),
            feed_forward: feed_forward.init(device),
        };
        let layers = layers.map(&mut Initialise(0));
        assign_layer_ids(&layers);
        layers
    }

    /// Uses a recipe that rounds weights to nearest.
    fn without_biases(device: &Device) -> Self {
        let mut layers = Self::new("nvidia", device);
        for layer in [&mut layers.alone, &mut layers.queries, &mut layers.keys] {
            layer.bias = None;
        }
        layers
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let x = x.clone() + self.alone.forward(x);
        let both = Nvfp4Linear::forward_together(&[&self.queries, &self.keys], x.clone());
        let [queries, keys] = <[_; 2]>::try_from(both).unwrap();
        let y = self.feed_forward.forward(x) + queries;
        y.powi_scalar(2).mean() + keys.powi_scalar(2).mean()
    }
}

struct Values(Vec<Vec<f32>>);

impl ModuleVisitor for Values {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(values(param.val()));
    }
}

/// Losses of a rank in training and in validation, and final weights.
type Trained = (Vec<f32>, Vec<Vec<f32>>);

/// Distribution of the weights over ranks.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Weights {
    Whole,
    /// Each rank computes the amax of its rows, and exchanges it, each time that it quantizes them.
    Sharded,
    /// The optimizer computes and exchanges the amax.
    ShardedWithAmax,
}

fn train(group: ProcessGroup, recipe: &str, weights: Weights) -> Trained {
    let device = device().autodiff();
    let mut model = Layers::new(recipe, &device);
    set_rank(&model, group.rank()).unwrap();
    // The norm of all gradients would be summed in another order.
    let config = AdamWConfig {
        grad_clip: None,
        amax: weights == Weights::ShardedWithAmax,
        ..AdamWConfig::default()
    };
    let mut optimizer = config.init();
    let mut shards = None;
    if weights != Weights::Whole {
        model = fully_shard(model, &group);
        shards = Some(Shards::of(&model, &group));
        optimizer.set_shards(shards.clone());
    }
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let seed = 100 + (10 * step + group.rank()) as u64;
        let x = Matrix::gaussian(TOKENS, WIDTH, DType::F32, seed);
        let valid = model.valid();
        losses.extend(values(valid.loss(x.tensor(&device.clone().inner()))));
        let loss = model.loss(x.tensor(&device));
        losses.extend(values(loss.clone()));
        let mut gradients = GradientsParams::from_grads(loss.backward(), &model);
        match &shards {
            Some(shards) => reduce_gradients(&model, &mut gradients, shards),
            None => average_gradients(&model, &mut gradients, &group),
        }
        model = optimizer.step(0.01, model, gradients);
    }
    let mut found = Values(Vec::new());
    gather(model).visit(&mut found);
    (losses, found.0)
}

/// With every recipe: the global amax, the random bits of each position, RHT over rows, and values
/// in high precision.
#[test]
fn they_train_as_whole_weights_do() {
    skip_where_small_only!();
    for recipe in Nvfp4Recipe::preset_names() {
        let whole = on_ranks(2, |group| train(group, recipe, Weights::Whole));
        for weights in [Weights::Sharded, Weights::ShardedWithAmax] {
            let sharded = on_ranks(2, |group| train(group, recipe, weights));
            for (rank, (found, expected)) in sharded.iter().zip(&whole).enumerate() {
                assert_eq!(found.0, expected.0, "{recipe}: losses of rank {rank}");
                assert!(found.1 == expected.1, "{recipe}: weights of rank {rank}");
            }
        }
        assert!(whole[0].0[1] > whole[0].0[2 * STEPS - 1], "{recipe} learns");
    }
}

/// Returns the number of collectives of a step: of the forward, of the backward with its means, and
/// of the optimizer.
fn collectives(group: ProcessGroup, amax: bool) -> [u64; 3] {
    let device = device().autodiff();
    let mut model = fully_shard(Layers::without_biases(&device), &group);
    let shards = Shards::of(&model, &group);
    let config = AdamWConfig {
        grad_clip: None,
        amax,
        ..AdamWConfig::default()
    };
    let mut optimizer = config.init();
    optimizer.set_shards(Some(shards.clone()));
    let mut last = group.collective().calls();
    let mut found = [0; 3];
    for _ in 0..2 {
        let mut since = || {
            let calls = group.collective().calls();
            calls - std::mem::replace(&mut last, calls)
        };
        let x = Matrix::gaussian(TOKENS, WIDTH, DType::F32, 1).tensor(&device);
        let loss = model.loss(x);
        found[0] = since();
        let mut gradients = GradientsParams::from_grads(loss.backward(), &model);
        reduce_gradients(&model, &mut gradients, &shards);
        found[1] = since();
        model = optimizer.step(0.01, model, gradients);
        found[2] = since();
    }
    found
}

/// Each operand is gathered as codes and as scales, and each gradient is reduced. An amax is
/// exchanged once per operand of the forward, or, with the amax of the optimizer, once for all
/// weights that are used alone.
#[test]
fn an_amax_is_exchanged_once() {
    // The input of the first layer needs no gradient.
    let (operands, of_dgrad, gradients, together) = (4, 3, 4, 1);
    let backward = 2 * of_dgrad + gradients;
    let without = [3 * operands, backward, 0];
    let with = [2 * operands + together, backward, 1];
    for (amax, expected) in [(false, without), (true, with)] {
        let found = on_ranks(2, |group| collectives(group, amax));
        assert_eq!(found, [expected; 2], "amax of the optimizer: {amax}");
    }
}

/// A step in between does not overwrite what a backward reads.
#[test]
fn a_step_between_forward_and_backward_changes_no_gradient() {
    let gradients = |group: ProcessGroup, steps: bool| {
        let device = device().autodiff();
        let mut model = fully_shard(Layers::without_biases(&device), &group);
        let shards = Shards::of(&model, &group);
        let config = AdamWConfig {
            amax: true,
            ..AdamWConfig::default()
        };
        let mut optimizer = config.init();
        optimizer.set_shards(Some(shards.clone()));
        let x = Matrix::gaussian(TOKENS, WIDTH, DType::F32, 1).tensor(&device);
        let x = x.require_grad();
        let mut step = |model: Layers| {
            let loss = model.loss(x.clone());
            let mut gradients = GradientsParams::from_grads(loss.backward(), &model);
            reduce_gradients(&model, &mut gradients, &shards);
            optimizer.step(1.0, model, gradients)
        };
        model = step(model);
        // The forward is the same in both cases.
        let loss = model.loss(x.clone());
        if steps {
            step(model.clone());
        } else {
            model.loss(x.clone());
        }
        values(x.grad(&loss.backward()).unwrap())
    };
    let [with, without] = [true, false].map(|steps| on_ranks(2, |group| gradients(group, steps)));
    assert!(with == without);
}

/// Adds the gradients of a weight that is used alone, whose mean waits while the backward runs, and
/// together with another weight, whose mean autodiff returns.
#[test]
fn gradients_of_both_uses_add_up() {
    skip_where_small_only!();
    let gradients = |group: ProcessGroup, is_sharded: bool| {
        let device = device().autodiff();
        let mut model = Layers::new("bf16", &device);
        if is_sharded {
            model = fully_shard(model, &group);
        }
        let seed = 100 + group.rank() as u64;
        let x = Matrix::gaussian(TOKENS, WIDTH, DType::F32, seed).tensor(&device);
        let both = Nvfp4Linear::forward_together(&[&model.queries, &model.keys], x.clone());
        let loss = (both[0].clone() * model.queries.forward(x)).mean();
        let mut gradients = GradientsParams::from_grads(loss.backward(), &model);
        let id = model.queries.weight.id;
        match is_sharded {
            true => reduce_gradients(&model, &mut gradients, &Shards::of(&model, &group)),
            false => average_gradients(&model, &mut gradients, &group),
        }
        values(gradients.get::<2>(id).unwrap())
    };
    let whole = on_ranks(2, |group| gradients(group, false));
    let found = on_ranks(2, |group| gradients(group, true)).concat();
    assert_eq!(found.len(), whole[0].len());
    let largest = whole[0].iter().fold(0f32, |max, x| max.max(x.abs()));
    assert!(largest > 0.0);
    for (found, expected) in found.iter().zip(&whole[0]) {
        assert!(
            (found - expected).abs() < 1e-5 * largest,
            "{found}, {expected}"
        );
    }
}

/// A block of 16 must be within a rank's rows: a weight that is split inside blocks is gathered in
/// high precision, which gives the same bits.
#[test]
fn ranks_that_cut_blocks_gather_values() {
    let device = device().autodiff();
    let layers = [32, 48].map(|d_in| {
        let layer = Nvfp4LinearConfig::new(d_in, 32).init(&device);
        let x = Matrix::gaussian(16, d_in, DType::F32, 9).tensor(&device);
        (values(layer.forward(x.clone())), layer, x)
    });
    let found = on_ranks(2, |group| {
        layers.clone().map(|(whole, layer, x)| {
            let layer = fully_shard(layer, &group);
            whole == values(layer.forward(x))
        })
    });
    assert_eq!(found, [[true; 2]; 2]);
}
