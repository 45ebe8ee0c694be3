//! Gradients that ranks exchange in `bf16`, compared with the documented arithmetic: each is
//! rounded to nearest even once, the sum in rank order is in `f32`, divided by the number of ranks
//! for a mean, and rounded to `bf16` once.

use burn_core as burn;

use burn_core::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn_core::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_nn::{Linear, LinearConfig};
use burn_nvfp4::nn::tensor_parallel::{SequenceParallelRmsNorm, TensorParallel};
use burn_nvfp4::nn::{RmsNorm, RmsNormConfig};
use burn_nvfp4::optim::{AdamWConfig, ZeroAdamW};
use burn_nvfp4::parallel::{
    ExpertGroups, ProcessGroup, RankLoss, ReduceDtype, Shards, average_expert_gradients,
    average_gradients, average_in_backward, fully_shard, reduce_gradients,
};
use burn_nvfp4::state::{assign_layer_ids, set_rank};
use burn_nvfp4::{Nvfp4Linear, Nvfp4LinearConfig, Nvfp4Recipe};
use burn_optim::GradientsParams;
use half::bf16;
use nvfp4_parallel::Reduction;

use super::data::Initialise;
use super::on_ranks;
use crate::support::{Matrix, activation, device, skip_where_small_only, values};

const WIDTH: usize = 64;
const TOKENS: usize = 32;
const SIZES: [usize; 2] = [2, 4];

/// A layer of this crate, whose weight FSDP gathers as codes, and a burn-nn layer with rows that
/// cannot be sharded equally.
#[derive(Module, Debug)]
struct Model {
    norm: RmsNorm,
    linear: Nvfp4Linear,
    out: Linear,
}

fn model(recipe: &str, device: &Device) -> Model {
    let recipe = Nvfp4Recipe::preset(recipe).unwrap().with_seed(3);
    let linear = Nvfp4LinearConfig::new(WIDTH, 48).with_recipe(recipe);
    let model = Model {
        norm: RmsNormConfig::new(WIDTH).init(device),
        linear: linear.init(device),
        out: LinearConfig::new(48, 3).init(device),
    };
    let model = model.map(&mut Initialise(0));
    assign_layer_ids(&model);
    model
}

/// Recipes, and dtypes of the activations: if these are `bf16`, wgrad writes in the dtype of the
/// exchange.
fn cases() -> Vec<(&'static str, FloatDType)> {
    let narrow = match activation() {
        DType::BF16 => FloatDType::BF16,
        _ => FloatDType::F32,
    };
    let all = [FloatDType::F32, narrow].map(|dtype| ["nvidia", "bf16"].map(|of| (of, dtype)));
    all.concat()
}

/// Returns autodiff's gradients of the loss of a rank.
fn backward(model: &Model, rank: usize, dtype: FloatDType) -> GradientsParams {
    set_rank(model, rank).unwrap();
    let device = device().autodiff();
    let x = Matrix::gaussian(TOKENS, WIDTH, DType::F32, 70 + rank as u64).tensor(&device);
    let y = model.norm.forward(x).cast(dtype);
    let y = model.linear.forward(y).cast(FloatDType::F32);
    let y = model.out.forward(y);
    GradientsParams::from_grads(y.powi_scalar(2).mean().backward(), model)
}

/// Bits of the gradients of all parameters, in order.
struct Bits<'a>(&'a GradientsParams, Vec<Vec<u32>>);

impl ModuleVisitor for Bits<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = self.0.get::<D>(param.id).expect("a gradient");
        // Clipping and the optimizer compute in f32.
        assert_eq!(gradient.dtype(), DType::F32);
        let bits = values(gradient).into_iter().map(f32::to_bits);
        self.1.push(bits.collect());
    }
}

fn bits<M: Module>(model: &M, gradients: &GradientsParams) -> Vec<Vec<u32>> {
    let mut bits = Bits(gradients, Vec::new());
    model.visit(&mut bits);
    bits.1
}

fn rounded(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}

/// Returns the bits of the reduction of the ranks' values.
fn oracle(of: &[Vec<u32>], reduction: Reduction) -> Vec<u32> {
    let reduced = (0..of[0].len()).map(|index| {
        let parts = of.iter().map(|rank| rounded(f32::from_bits(rank[index])));
        let sum = parts.reduce(|sum, next| sum + next).unwrap();
        let made = match reduction {
            Reduction::Avg => sum / of.len() as f32,
            _ => sum,
        };
        rounded(made).to_bits()
    });
    reduced.collect()
}

/// Returns [`oracle`] of each parameter, given the values of each rank.
fn oracles(of: &[Vec<Vec<u32>>], reduction: Reduction) -> Vec<Vec<u32>> {
    let reduced = (0..of[0].len()).map(|param| {
        let ranks: Vec<_> = of.iter().map(|rank| rank[param].clone()).collect();
        oracle(&ranks, reduction)
    });
    reduced.collect()
}

fn in_bf16(group: ProcessGroup) -> ProcessGroup {
    group.with_reduce_dtype(ReduceDtype::Bf16)
}

/// Returns the gradients of the ranks `0..size`, each run alone.
fn alone((recipe, dtype): (&str, FloatDType), size: usize) -> Vec<Vec<Vec<u32>>> {
    let model = model(recipe, &device().autodiff());
    let ranks = (0..size).map(|rank| {
        // Each forward draws the random bits of a new step.
        let model = match rank {
            0 => model.clone(),
            _ => self::model(recipe, &device().autodiff()),
        };
        bits(&model, &backward(&model, rank, dtype))
    });
    ranks.collect()
}

/// Averages after the backward, in buckets, and during the backward, in any combination.
#[test]
fn means_of_whole_gradients_are_rounded_so() {
    skip_where_small_only!();
    for (recipe, dtype) in cases() {
        for size in SIZES {
            let expected = oracles(&alone((recipe, dtype), size), Reduction::Avg);
            for smallest in [usize::MAX, 100, 1] {
                let found = on_ranks(size, |group| {
                    let group = in_bf16(group);
                    let model = model(recipe, &device().autodiff());
                    let model = average_in_backward(model, &group, smallest);
                    let mut gradients = backward(&model, group.rank(), dtype);
                    average_gradients(&model, &mut gradients, &group);
                    bits(&model, &gradients)
                });
                let what = format!("{recipe}, {dtype:?}, {size} ranks, {smallest}");
                assert!(found.iter().all(|rank| *rank == expected), "{what}");
            }
            // The option has an effect, and none if it is off.
            let found = on_ranks(size, |group| {
                let model = model(recipe, &device().autodiff());
                let mut gradients = backward(&model, group.rank(), dtype);
                average_gradients(&model, &mut gradients, &group);
                bits(&model, &gradients)
            });
            assert!(found.iter().all(|rank| *rank != expected));
        }
    }
}

/// A rank of FSDP has its rows of the means, whether the weight is gathered as codes or in high
/// precision.
#[test]
fn means_of_parts_are_rounded_so() {
    skip_where_small_only!();
    for (recipe, dtype) in cases() {
        for size in SIZES {
            let whole = oracles(&alone((recipe, dtype), size), Reduction::Avg);
            let found = on_ranks(size, |group| {
                let group = in_bf16(group);
                let model = fully_shard(model(recipe, &device().autodiff()), &group);
                let shards = Shards::of(&model, &group);
                let mut gradients = backward(&model, group.rank(), dtype);
                reduce_gradients(&model, &mut gradients, &shards);
                bits(&model, &gradients)
            });
            for (rank, found) in found.iter().enumerate() {
                for (found, whole) in found.iter().zip(&whole) {
                    let part = found.len();
                    let first = match part == whole.len() {
                        true => 0,
                        false => rank * part,
                    };
                    assert!(part == whole.len() || part * size == whole.len());
                    let expected = &whole[first..first + part];
                    assert_eq!(
                        found, expected,
                        "{recipe}, {dtype:?}, rank {rank} of {size}"
                    );
                }
            }
        }
    }
}

/// ZeRO-1 takes the step of an optimizer with these means.
#[test]
fn sharded_optimizers_take_the_step_of_these_means() {
    skip_where_small_only!();
    struct Values(Vec<Vec<f32>>);
    impl ModuleVisitor for Values {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push(values(param.val()));
        }
    }
    let weights = |model: &Model| {
        let mut values = Values(Vec::new());
        model.visit(&mut values);
        values.0
    };
    let config = || AdamWConfig {
        grad_clip: None,
        ..AdamWConfig::default()
    };
    let dtype = FloatDType::F32;
    for size in SIZES {
        let expected = on_ranks(size, |group| {
            let group = in_bf16(group);
            let model = model("nvidia", &device().autodiff());
            let mut gradients = backward(&model, group.rank(), dtype);
            average_gradients(&model, &mut gradients, &group);
            weights(&config().init().step(0.01, model, gradients))
        });
        let found = on_ranks(size, |group| {
            let group = in_bf16(group);
            let model = model("nvidia", &device().autodiff());
            let gradients = backward(&model, group.rank(), dtype);
            let mut optimizer = ZeroAdamW::try_new(config(), &group).unwrap();
            weights(&optimizer.step(0.01, model, gradients))
        });
        assert_eq!(found, expected, "{size} ranks");
    }
}

/// Experts on pairs of four ranks: their gradients are summed over the ranks with the same experts,
/// all others over all ranks, and both are divided as for `f32`.
#[test]
fn gradients_of_experts_are_rounded_so() {
    let gradient = |rank: usize, of: usize| {
        let device = device();
        let seed = (10 * of + rank) as u64;
        Matrix::gaussian(4, 6, DType::F32, seed).tensor(&device)
    };
    for loss in [RankLoss::Mean, RankLoss::Share] {
        let found = on_ranks(4, |group| {
            let group = in_bf16(group);
            let rank = group.rank();
            let device = device().autodiff();
            let layer = || LinearConfig::new(4, 6).with_bias(false).init(&device);
            let layers: Vec<Linear> = [layer(), layer()].into();
            let ids = [0, 1].map(|of| layers[of].weight.id);
            let mut gradients = GradientsParams::new();
            for (of, id) in ids.into_iter().enumerate() {
                gradients.register(id, gradient(rank, of));
            }
            // Ranks 0 and 2 have one expert, ranks 1 and 3 another.
            let data = group.subgroup(&[rank % 2, rank % 2 + 2]).unwrap();
            let groups = ExpertGroups {
                batch: &group,
                experts: &ids[1..],
                data: &data,
                loss,
            };
            average_expert_gradients(&layers, &mut gradients, groups);
            bits(&layers, &gradients)
        });
        for (rank, found) in found.iter().enumerate() {
            let of = |of: usize, ranks: &[usize]| -> Vec<Vec<u32>> {
                let bits = |rank: &usize| values(gradient(*rank, of)).into_iter().map(f32::to_bits);
                ranks.iter().map(|rank| bits(rank).collect()).collect()
            };
            let (reduction, divisor) = match loss {
                RankLoss::Mean => (Reduction::Avg, 4.0),
                RankLoss::Share => (Reduction::Sum, 1.0),
            };
            assert_eq!(found[0], oracle(&of(0, &[0, 1, 2, 3]), reduction));
            let sum = oracle(&of(1, &[rank % 2, rank % 2 + 2]), Reduction::Sum);
            let divided = sum.iter().map(|bits| f32::from_bits(*bits) / divisor);
            assert_eq!(found[1], divided.map(f32::to_bits).collect::<Vec<_>>());
        }
    }
}

/// The replicated gain between layers of a tensor group.
#[test]
fn gradients_of_gains_between_split_layers_are_rounded_so() {
    for size in SIZES {
        let run = |group: ProcessGroup, rank: usize| {
            let device = device().autodiff();
            let norm = RmsNormConfig::new(WIDTH).init(&device);
            let parallel = TensorParallel::new(group).with_sequence_parallel(true);
            let norm = SequenceParallelRmsNorm::new(norm, &parallel);
            let x = Matrix::gaussian(TOKENS, WIDTH, DType::F32, 30 + rank as u64);
            let dy = Matrix::gaussian(TOKENS, WIDTH, DType::F32, 60 + rank as u64);
            let y = norm.forward(x.tensor(&device));
            let loss = (y * dy.tensor(&device)).sum();
            let gradients = GradientsParams::from_grads(loss.backward(), &norm);
            bits(&norm, &gradients).remove(0)
        };
        // Each rank in a separate group.
        let own = on_ranks(size, |group| {
            let rank = group.rank();
            run(group.subgroup(&[rank]).unwrap(), rank)
        });
        let expected = oracle(&own, Reduction::Sum);
        let found = on_ranks(size, |group| {
            let rank = group.rank();
            run(in_bf16(group), rank)
        });
        assert!(found.iter().all(|rank| *rank == expected), "{size} ranks");
    }
}

/// A parameter whose uses are submitted separately: each is rounded, and their sum is in `f32`.
#[test]
fn each_use_of_a_parameter_is_rounded() {
    const X: f32 = 1.01;
    struct Fill;
    impl ModuleMapper for Fill {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|old| {
                let data = TensorData::new(vec![0.5f32; old.shape().num_elements()], old.shape());
                Tensor::from_data(data, &old.device()).require_grad()
            })
        }
    }
    let found = on_ranks(2, |group| {
        let group = in_bf16(group);
        let device = device().autodiff();
        let layer = LinearConfig::new(4, 4).with_bias(false).init(&device);
        let layer = average_in_backward(layer.map(&mut Fill), &group, 1);
        let x = Tensor::<2>::ones([1, 4], &device).mul_scalar(X);
        let loss = layer.forward(x.clone()).sum() + layer.forward(x * 4.02).sum();
        let mut gradients = GradientsParams::from_grads(loss.backward(), &layer);
        average_gradients(&layer, &mut gradients, &group);
        values(gradients.get::<2>(layer.weight.id).unwrap())
    });
    let expected = rounded(X) + rounded(X * 4.02);
    assert_ne!(expected, rounded(expected));
    assert!(
        found.iter().flatten().all(|found| *found == expected),
        "{found:?}"
    );
}

/// Subgroups have the dtype of their group, and only gradients of parameters are exchanged in it.
#[test]
fn other_tensors_travel_as_they_are() {
    let found = on_ranks(2, |group| {
        assert_eq!(group.reduce_dtype(), ReduceDtype::Own);
        let group = in_bf16(group);
        let half = group.subgroup(&[0, 1]).unwrap();
        assert_eq!(half.reduce_dtype(), ReduceDtype::Bf16);
        let x = Tensor::<1>::from_floats([1.001f32], &device());
        values(half.all_reduce(x, Reduction::Sum))
    });
    assert_eq!(found, [[2.002f32], [2.002]]);
}
