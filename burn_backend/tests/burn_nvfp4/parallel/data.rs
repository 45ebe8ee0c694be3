//! Data parallelism: replicated models, sharded optimizers, sharded models.

use burn_core as burn;

use burn_core::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn_core::tensor::{DType, Device, Tensor, TensorData};
use burn_nn::{Linear, LinearConfig};
use burn_nvfp4::nn::{RmsNorm, RmsNormConfig};
use burn_nvfp4::optim::{AdamW, AdamWConfig, ZeroAdamW};
use burn_nvfp4::parallel::{
    ProcessGroup, Shards, average_gradients, average_in_backward, broadcast, fully_shard, gather,
    reduce_gradients,
};
use burn_nvfp4::state::{assign_layer_ids, set_rank};
use burn_nvfp4::{
    Nvfp4Linear, Nvfp4LinearConfig, Nvfp4Moe, Nvfp4MoeConfig, Nvfp4Recipe, Nvfp4SwiGlu,
    Nvfp4SwiGluConfig,
};
use burn_optim::GradientsParams;

use super::on_ranks;
use crate::support::{Matrix, device, gaussian, skip_where_small_only, values};

const WIDTH: usize = 32;
const STEPS: usize = 5;
/// Tokens per rank.
const TOKENS: usize = 24;

/// Layers of this crate and of burn-nn.
#[derive(Module, Debug)]
struct Model {
    norm: RmsNorm,
    feed_forward: Nvfp4SwiGlu,
    moe: Nvfp4Moe,
    linear: Nvfp4Linear,
    /// Three rows, which cannot be sharded equally.
    out: Linear,
    frozen: Linear,
}

/// Gives each model the same values.
pub struct Initialise(pub u64);

impl ModuleMapper for Initialise {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0 += 1;
        let (shape, seed) = (param.shape(), self.0);
        let (_, old, mapper) = param.consume();
        let values = gaussian(shape.num_elements(), seed);
        let values: Vec<f32> = values.into_iter().map(|x| x * 0.2).collect();
        let tensor = Tensor::from_data(TensorData::new(values, shape), &old.device());
        let tensor = tensor.set_require_grad(old.is_require_grad());
        Param::from_mapped_value(ParamId::from(seed), tensor, mapper)
    }
}

fn model(recipe: &str, device: &Device) -> Model {
    let recipe = Nvfp4Recipe::preset(recipe).unwrap().with_seed(3);
    let feed_forward = Nvfp4SwiGluConfig::new(WIDTH, 48).with_recipe(recipe.clone());
    let moe = Nvfp4MoeConfig::new(WIDTH, 32, 4).with_recipe(recipe.clone());
    let linear = Nvfp4LinearConfig::new(WIDTH, 48).with_recipe(recipe.clone());
    let model = Model {
        norm: RmsNormConfig::new(WIDTH).init(device),
        feed_forward: feed_forward.init(device),
        moe: moe.init(device),
        linear: linear.init(device),
        out: LinearConfig::new(48, 3).init(device),
        frozen: LinearConfig::new(3, 3).init(device).no_grad(),
    };
    let model = model.map(&mut Initialise(0));
    assign_layer_ids(&model);
    model
}

impl Model {
    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let x = self.norm.forward(x);
        let x = x.clone() + self.feed_forward.forward(x);
        let moe = self.moe.forward(x.clone());
        let y = self.out.forward(self.linear.forward(x + moe.output));
        let y = self.frozen.forward(y);
        y.powi_scalar(2).mean() + moe.balance_loss.mul_scalar(0.01)
    }
}

fn batch(rank: usize, step: usize, device: &Device) -> Tensor<2> {
    let seed = 1000 + (10 * step + rank) as u64;
    Matrix::gaussian(TOKENS, WIDTH, DType::F32, seed).tensor(device)
}

/// Values of all parameters, in order.
struct Values(Vec<Vec<f32>>);

impl ModuleVisitor for Values {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(values(param.val()));
    }
}

/// Returns the values of all parameters of `model`, in order.
pub fn weights<M: Module>(model: &M) -> Vec<Vec<f32>> {
    let mut values = Values(Vec::new());
    model.visit(&mut values);
    values.0
}

fn config(clip: Option<f64>) -> AdamWConfig {
    AdamWConfig {
        grad_clip: clip,
        ..AdamWConfig::default()
    }
}

/// Losses of a rank, and final weights.
pub type Trained = (Vec<f32>, Vec<Vec<f32>>);

fn train(
    group: &ProcessGroup,
    mut model: Model,
    mut step: impl FnMut(Model, GradientsParams) -> Model,
) -> (Vec<f32>, Model) {
    let device = device().autodiff();
    set_rank(&model, group.rank()).unwrap();
    let mut losses = Vec::new();
    for number in 0..STEPS {
        let loss = model.loss(batch(group.rank(), number, &device));
        losses.extend(values(loss.clone()));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = step(model, gradients);
    }
    (losses, model)
}

const RATE: f64 = 0.01;

fn data_parallel(group: ProcessGroup, recipe: &str, clip: Option<f64>) -> Trained {
    let model = model(recipe, &device().autodiff());
    averaged(group, model, clip)
}

/// Trains with the gradients of matrices averaged concurrently with the backward.
fn overlapped(group: ProcessGroup, recipe: &str, clip: Option<f64>) -> Trained {
    let model = model(recipe, &device().autodiff());
    let model = average_in_backward(model, &group, 4 * WIDTH);
    averaged(group, model, clip)
}

fn averaged(group: ProcessGroup, model: Model, clip: Option<f64>) -> Trained {
    let mut optimizer = config(clip).init();
    let (losses, model) = train(&group, model, |model, mut gradients| {
        average_gradients(&model, &mut gradients, &group);
        optimizer.step(RATE, model, gradients)
    });
    (losses, weights(&model))
}

/// Trains in one thread that computes one rank after the other.
fn one_after_the_other(size: usize, recipe: &str, clip: Option<f64>) -> Vec<Trained> {
    let device = device().autodiff();
    let models = || model(recipe, &device);
    let mut ranks: Vec<(Model, AdamW)> = (0..size)
        .map(|rank| {
            let model = models();
            set_rank(&model, rank).unwrap();
            (model, config(clip).init())
        })
        .collect();
    let mut losses = vec![Vec::new(); size];
    for step in 0..STEPS {
        let mut gradients = Vec::new();
        for (rank, (model, _)) in ranks.iter().enumerate() {
            let loss = model.loss(batch(rank, step, &device));
            losses[rank].extend(values(loss.clone()));
            gradients.push(GradientsParams::from_grads(loss.backward(), model));
        }
        ranks = ranks
            .into_iter()
            .map(|(model, mut optimizer)| {
                let mean = mean(&model, &gradients);
                (optimizer.step(RATE, model, mean), optimizer)
            })
            .collect();
    }
    let ranks = ranks.iter().map(|(model, _)| weights(model));
    losses.into_iter().zip(ranks).collect()
}

/// Returns the means of the gradients of `model` of all ranks, summed in rank order.
pub fn mean<M: Module>(model: &M, of: &[GradientsParams]) -> GradientsParams {
    let to = GradientsParams::new();
    let mut mean = Mean { of, to };
    model.visit(&mut mean);
    mean.to
}

/// Visitor of [`mean`].
struct Mean<'a> {
    of: &'a [GradientsParams],
    to: GradientsParams,
}

impl ModuleVisitor for Mean<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let of = self.of.iter().filter_map(|of| of.get::<D>(param.id));
        if let Some(sum) = of.reduce(|sum, next| sum + next) {
            let mean = sum.div_scalar(self.of.len() as f32);
            self.to.register(param.id, mean);
        }
    }
}

#[test]
fn ranks_train_as_one_thread_does() {
    skip_where_small_only!();
    for (recipe, clip) in [("nvidia", Some(0.05)), ("bf16", None)] {
        for size in [2, 4] {
            let found = on_ranks(size, |group| data_parallel(group, recipe, clip));
            let beside = on_ranks(size, |group| overlapped(group, recipe, clip));
            assert_eq!(found, beside, "{recipe}, {size} ranks");
            let expected = one_after_the_other(size, recipe, clip);
            // All ranks have the same weights, but separate losses.
            assert_eq!(found, expected, "{recipe}, {size} ranks");
            assert!(found.iter().all(|rank| rank.1 == found[0].1));
            assert_ne!(found[0].0, found[1].0);
        }
    }
}

/// A parameter that is used twice, in two backwards: all its gradients count.
#[test]
fn gradients_beside_the_backward_add_up() {
    skip_where_small_only!();
    for shards in [false, true] {
        let found = on_ranks(2, |group| {
            let device = device().autodiff();
            let layer = LinearConfig::new(4, 4).with_bias(false).init(&device);
            let rank = group.rank() as f32;
            let data = TensorData::new((0..16).map(|x| x as f32).collect(), [4, 4]);
            let weight = Tensor::from_data(data, &device).require_grad();
            let layer = Linear {
                weight: Param::initialized(layer.weight.id, weight),
                bias: None,
            };
            let id = layer.weight.id;
            let layer = match shards {
                true => fully_shard(layer, &group),
                false => average_in_backward(layer, &group, 1),
            };
            let mut gradients = GradientsParams::new();
            for step in [1.0, 10.0] {
                let x = Tensor::<2>::ones([1, 4], &device).mul_scalar(step * (1.0 + rank));
                let loss = layer.forward(x.clone()).sum() + layer.forward(x * 2).sum();
                let made = GradientsParams::from_grads(loss.backward(), &layer);
                assert_eq!(made.len(), 0);
            }
            match shards {
                true => {
                    let shards = Shards::of(&layer, &group);
                    reduce_gradients(&layer, &mut gradients, &shards);
                }
                false => average_gradients(&layer, &mut gradients, &group),
            }
            values(gradients.get::<2>(id).unwrap())
        });
        // Three uses of ones, by 1 and 10, the mean of ranks with factors 1 and 2.
        let rows = if shards { 2 } else { 4 };
        let expected = vec![3.0 * 11.0 * 1.5; 4 * rows];
        assert_eq!(found, [expected.clone(), expected]);
    }
}

fn sharded(group: ProcessGroup, recipe: &str, clip: Option<f64>) -> Trained {
    let whole = model(recipe, &device().autodiff());
    let elements = whole.num_params();
    let model = fully_shard(whole, &group);
    let shards = Shards::of(&model, &group);
    // All but three parameters with three rows or elements.
    assert_eq!(shards.ids.len(), 9);
    assert!(model.num_params() < elements / group.size() + 100);
    let mut optimizer = config(clip).init();
    optimizer.set_shards(Some(shards.clone()));
    let (losses, model) = train(&group, model, |model, mut gradients| {
        reduce_gradients(&model, &mut gradients, &shards);
        optimizer.step(RATE, model, gradients)
    });
    (losses, weights(&gather(model)))
}

fn zero(group: ProcessGroup, recipe: &str, clip: Option<f64>) -> Trained {
    let mut optimizer = ZeroAdamW::try_new(config(clip), &group).unwrap();
    let model = model(recipe, &device().autodiff());
    let elements = model.num_params();
    let (losses, model) = train(&group, model, |model, gradients| {
        optimizer.step(RATE, model, gradients)
    });
    let moments = optimizer.adamw().moments().values();
    let kept: usize = moments.map(|moments| moments.first.dims()[0]).sum();
    assert!(kept < elements / group.size() + 200);
    (losses, weights(&model))
}

/// Bit for bit without clipping; with clipping, up to the order of the sum of squares.
#[test]
fn sharded_models_and_optimizers_train_as_whole_ones_do() {
    skip_where_small_only!();
    for recipe in ["nvidia", "bf16"] {
        for size in [2, 4] {
            let expected = on_ranks(size, |group| data_parallel(group, recipe, None));
            let found = on_ranks(size, |group| sharded(group, recipe, None));
            assert_eq!(found, expected, "FSDP, {recipe}, {size} ranks");
            let found = on_ranks(size, |group| zero(group, recipe, None));
            assert_eq!(found, expected, "ZeRO-1, {recipe}, {size} ranks");
        }
    }
    // In the `bf16` recipe nothing amplifies the last bit.
    let clip = Some(0.05);
    let expected = on_ranks(2, |group| data_parallel(group, "bf16", clip));
    for run in [sharded, zero] {
        let found = on_ranks(2, |group| run(group, "bf16", clip));
        for (found, expected) in found.iter().zip(&expected) {
            for (found, expected) in found.0.iter().zip(&expected.0) {
                assert!((found / expected - 1.0).abs() < 1e-5, "{found}, {expected}");
            }
        }
        // Clipping has an effect.
        let free = on_ranks(2, |group| run(group, "bf16", None));
        assert!((found[0].0[STEPS - 1] / free[0].0[STEPS - 1] - 1.0).abs() > 1e-5);
    }
}

#[test]
fn rank_0_gives_its_values() {
    let found = on_ranks(2, |group| {
        let device = device().autodiff();
        let own = LinearConfig::new(16, 16).init(&device);
        let own = own.map(&mut Initialise(7 * group.rank() as u64));
        let before = values(own.weight.val());
        let after = broadcast(own, &group);
        assert!(after.weight.is_require_grad());
        (before, values(after.weight.val()))
    });
    assert_ne!(found[0].0, found[1].0);
    assert!(found.iter().all(|(_, after)| *after == found[0].0));
}

/// A shard is this rank's rows; a forward, and `gather`, see the whole.
#[test]
fn parts_are_rows() {
    let found = on_ranks(2, |group| {
        let device = device().autodiff();
        let whole = LinearConfig::new(6, 4).init(&device);
        let whole = whole.map(&mut Initialise(0));
        let weight = values(whole.weight.val());
        let sharded = fully_shard(whole, &group);
        assert_eq!(sharded.weight.base().dims(), [3, 4]);
        assert!(sharded.weight.is_require_grad());
        let rows = 12 * group.rank()..12 * (group.rank() + 1);
        assert_eq!(values(sharded.weight.base()), weight[rows]);
        assert_eq!(values(sharded.weight.val()), weight);
        let x = Tensor::<2>::ones([2, 6], &device);
        assert_eq!(sharded.forward(x).dims(), [2, 4]);
        values(gather(sharded).weight.base()) == weight
    });
    assert_eq!(found, [true, true]);
}

#[test]
fn ranks_beyond_the_offset_are_refused() {
    let model = Nvfp4LinearConfig::new(16, 16).init(&device());
    let error = set_rank(&model, 1 << 16).unwrap_err().to_string();
    assert!(error.contains("rank") && error.contains("2^16"), "{error}");
}
