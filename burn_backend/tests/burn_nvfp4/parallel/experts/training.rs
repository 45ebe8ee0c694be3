//! Training on several ranks, compared with one rank with the whole batch.

use burn_core as burn;

use burn_core::module::{Module, ModuleDisplay, ParamId};
use burn_core::tensor::{DType, Tensor};
use burn_nvfp4::nn::{ExpertParallelMoe, MoeOutput, expert_parameters};
use burn_nvfp4::parallel::{
    ExpertGroups, ProcessGroup, RankLoss, average_expert_gradients, average_replicated_in_backward,
};
use burn_nvfp4::{Nvfp4Moe, Nvfp4Recipe};
use burn_optim::{GradientsParams, SgdConfig};
use nvfp4_parallel::Reduction;

use super::{Case, Fixed, WIDTH};
use crate::parallel::on_ranks;
use crate::support::{Matrix, device, flex_only, skip_where_small_only, values};

const STEPS: usize = 50;

/// A replicated layer, a mixture, and a layer after it.
#[derive(Module, Debug)]
struct Model<M: Module> {
    first: burn_nn::Linear,
    moe: M,
    last: burn_nn::Linear,
}

trait Mixture: Module + ModuleDisplay {
    fn apply(&self, x: Tensor<2>) -> MoeOutput<2>;

    /// Returns the ids of the experts' weights.
    fn experts(&self) -> [ParamId; 2];

    /// Returns the mixture with all experts.
    fn whole(self) -> Nvfp4Moe;
}

impl Mixture for Nvfp4Moe {
    fn apply(&self, x: Tensor<2>) -> MoeOutput<2> {
        self.forward(x)
    }

    fn experts(&self) -> [ParamId; 2] {
        [self.gate_up.weight.id, self.down.weight.id]
    }

    fn whole(self) -> Nvfp4Moe {
        self
    }
}

impl Mixture for ExpertParallelMoe {
    fn apply(&self, x: Tensor<2>) -> MoeOutput<2> {
        self.forward(x)
    }

    fn experts(&self) -> [ParamId; 2] {
        [self.gate_up.weight.id, self.down.weight.id]
    }

    fn whole(self) -> Nvfp4Moe {
        self.into_moe()
    }
}

/// Parameters that a training changes.
#[derive(Clone, Copy, PartialEq)]
enum Trained {
    All,
    Experts,
    /// All, from weights of the first layer that differ in their last bits.
    Nudged,
}

/// Result of a training.
struct Run {
    /// Loss of each step, over the tokens of all ranks.
    losses: Vec<f32>,
    /// Final weights of all experts.
    experts: [Vec<f32>; 2],
}

/// Ranks with a shard of the batch, and those of them with the same experts.
struct Groups<'a> {
    batch: &'a ProcessGroup,
    data: &'a ProcessGroup,
    /// True if gradients are averaged during the backward.
    in_backward: bool,
    loss: RankLoss,
}

/// Trains on the tokens of `case` that this rank of the batch has.
fn train<M: Mixture>(case: &Case, trained: Trained, moe: M, groups: Groups<'_>) -> Run {
    let Groups {
        batch,
        data,
        in_backward,
        loss,
    } = groups;
    let device = device().autodiff();
    let linear = || burn_nn::LinearConfig::new(WIDTH, WIDTH).init(&device);
    let (first, last) = (linear().map(&mut Fixed(500)), linear().map(&mut Fixed(510)));
    let mut model = Model { first, moe, last };
    if trained == Trained::Nudged {
        let nudged = |weight: Tensor<2>| weight.mul_scalar(1.0 + 2f32.powi(-22)).detach();
        let weight = model.first.weight;
        model.first.weight = weight.map(|weight| nudged(weight).require_grad());
    }
    if in_backward {
        let groups = ExpertGroups {
            batch,
            experts: &expert_parameters(&model),
            data,
            loss,
        };
        model = average_replicated_in_backward(model, groups, 1);
    }
    let tokens: usize = case.tokens.iter().sum();
    let share = tokens / batch.size();
    let part = batch.rank() * share..(batch.rank() + 1) * share;
    let teacher = Matrix::gaussian(WIDTH, WIDTH, DType::F32, 101).tensor(&device);
    let mut optimizer = SgdConfig::new().init();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        // Two batches, alternating.
        let x = case.rows(part.clone(), 700 + step as u64 % 2, &device);
        let target = x.clone().matmul(teacher.clone()).mul_scalar(0.2);
        let hidden = model.first.forward(x);
        let out = model.moe.apply(hidden.clone());
        let error = model.last.forward(hidden + out.output) - target;
        let fit = error.square().mean();
        let own = fit.clone() + out.balance_loss * 0.01 + out.z_loss * 0.001;
        losses.push(values(batch.all_reduce(own.clone().inner(), Reduction::Avg))[0]);
        let mut backward = match loss {
            RankLoss::Mean => own.backward(),
            RankLoss::Share => own.div_scalar(batch.size() as f64).backward(),
        };
        let mut gradients = match trained {
            Trained::All | Trained::Nudged => GradientsParams::from_grads(backward, &model),
            Trained::Experts => {
                let experts = model.moe.experts();
                GradientsParams::from_params(&mut backward, &model, &experts)
            }
        };
        let groups = ExpertGroups {
            batch,
            experts: &expert_parameters(&model),
            data,
            loss,
        };
        average_expert_gradients(&model, &mut gradients, groups);
        model = optimizer.step(0.1, model, gradients);
    }
    let moe = model.moe.whole();
    let experts = [&moe.gate_up, &moe.down].map(|layer| values(layer.weight.val()));
    Run { losses, experts }
}

fn on_one(case: &Case, trained: Trained) -> Run {
    let single = ProcessGroup::single();
    let groups = Groups {
        batch: &single,
        data: &single,
        in_backward: false,
        loss: RankLoss::Mean,
    };
    train(case, trained, case.moe(&device().autodiff()), groups)
}

/// Runs on `size` ranks, of which `experts` have different experts, and `size / experts` have the
/// same.
fn on_several(case: &Case, trained: Trained, size: usize, experts: usize) -> Vec<Run> {
    with_loss(case, (trained, RankLoss::Mean), size, experts)
}

/// Version of [`on_several`] for ranks that differentiate this loss.
fn with_loss(
    case: &Case,
    (trained, loss): (Trained, RankLoss),
    size: usize,
    experts: usize,
) -> Vec<Run> {
    on_ranks(size, |batch| {
        let rank = batch.rank();
        let own: Vec<usize> = (rank / experts * experts..).take(experts).collect();
        let same: Vec<usize> = (rank % experts..size).step_by(experts).collect();
        let [own, same] = [own, same].map(|members| batch.subgroup(&members).unwrap());
        let moe = case.moe(&device().autodiff());
        let moe = ExpertParallelMoe::from_moe(moe, &own).with_batch(&batch);
        let moe = moe.with_dispatch(case.dispatch);
        let groups = Groups {
            batch: &batch,
            data: &same,
            in_backward: trained == Trained::All,
            loss,
        };
        train(case, trained, moe, groups)
    })
}

fn largest_difference(found: &[f32], expected: &[f32]) -> f32 {
    let errors = found.iter().zip(expected).map(|(a, b)| (a - b).abs() / b);
    errors.fold(0f32, f32::max)
}

/// The losses of 50 steps equal those of one rank up to the order of sums, also with data
/// parallelism. Only on Flex, where sums in `f32` have the same order on any rank: with another
/// order, a token occasionally chooses another expert.
#[test]
fn in_high_precision_ranks_train_as_one() {
    flex_only!();
    let case = Case::new(&Nvfp4Recipe::preset("bf16").unwrap(), 8, 2, &[64]);
    let one = on_one(&case, Trained::All).losses;
    assert!(one[STEPS - 1] < 0.5 * one[0], "{one:?}");
    for case in case.dispatches() {
        for (size, experts) in [(2, 2), (4, 4), (4, 2)] {
            for found in on_several(&case, Trained::All, size, experts) {
                let error = largest_difference(&found.losses, &one);
                let what = format!("{:?}, {size} ranks, {experts} with others", case.dispatch);
                assert!(error < 1e-6, "{what}: {error:e}");
            }
        }
    }
}

/// Ranks that differentiate their shares of the loss sum the gradients, with the bits of means,
/// because the number of ranks is a power of two; also in NVFP4.
#[test]
fn shares_of_the_loss_train_to_the_same_bits() {
    skip_where_small_only!();
    for recipe in [Nvfp4Recipe::preset("bf16").unwrap(), Nvfp4Recipe::new()] {
        let case = Case::new(&recipe, 8, 2, &[64]);
        for (size, experts) in [(2, 2), (4, 2)] {
            let of = |loss| with_loss(&case, (Trained::All, loss), size, experts);
            for (found, expected) in of(RankLoss::Share).iter().zip(of(RankLoss::Mean)) {
                assert_eq!(found.losses, expected.losses, "{size} ranks");
                assert!(found.experts == expected.experts, "{size} ranks");
            }
        }
    }
}

/// With the default recipe, stochastic rounding included, experts have the bits of one rank after
/// 50 steps.
#[test]
fn in_nvfp4_experts_train_to_the_bits_of_one_rank() {
    skip_where_small_only!();
    let case = Case::new(&Nvfp4Recipe::new(), 8, 2, &[64]);
    let one = on_one(&case, Trained::Experts);
    let (first, last) = (one.losses[0], one.losses[STEPS - 1]);
    assert!(last < 0.9 * first, "{:?}", one.losses);
    for case in case.dispatches() {
        for size in [2, 4] {
            let what = format!("{:?}, {size} ranks", case.dispatch);
            for found in on_several(&case, Trained::Experts, size, size) {
                let error = largest_difference(&found.losses, &one.losses);
                assert!(error < 1e-6, "{what}: {error:e}");
                assert!(found.experts == one.experts, "{what}");
            }
        }
    }
}

/// If replicated parameters train too, their gradients are sums in another order. The first loss
/// equals that of one rank. Later, rounding to 4 bits occasionally takes a difference in the last
/// bit of an activation to another code, and losses differ like those of two runs of one rank whose
/// weights differ in their last bits.
#[test]
fn in_nvfp4_ranks_train_as_one_to_rounding() {
    skip_where_small_only!();
    let case = Case::new(&Nvfp4Recipe::new(), 8, 2, &[64]);
    let one = on_one(&case, Trained::All).losses;
    assert!(one[STEPS - 1] < 0.5 * one[0], "{one:?}");
    let usual = largest_difference(&on_one(&case, Trained::Nudged).losses, &one);
    for case in case.dispatches() {
        for size in [2, 4] {
            let what = format!("{:?}, {size} ranks", case.dispatch);
            for found in on_several(&case, Trained::All, size, size) {
                let error = largest_difference(&found.losses, &one);
                eprintln!("{what}: {error:e}, of two runs of one rank {usual:e}");
                assert!(largest_difference(&found.losses[..1], &one) < 1e-6);
                assert!(error < 4.0 * usual, "{what}: {error:e} of {usual:e}");
            }
        }
    }
}
