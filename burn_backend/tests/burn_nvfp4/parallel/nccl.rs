//! Collectives from GPU to GPU, compared with those through host memory.
//!
//! Skips itself, with a message, unless `NVFP4_TEST_DEVICE=cuda` and there are two CUDA devices.
//! NCCL is then required. The sum of two ranks has only one order, so the bits are equal.

use std::fmt::Debug;

use burn_core::module::{Module, ModuleVisitor, Param};
use burn_core::tensor::{DType, Device, DeviceType, Int, Tensor, TensorData};
use burn_nvfp4::nn::{ExpertDispatch, ExpertParallelMoe, expert_parameters};
use burn_nvfp4::parallel::{
    ExpertGroups, Overlap, ProcessGroup, RankLoss, average_expert_gradients,
    average_replicated_in_backward, functions,
};
use burn_nvfp4::state::assign_layer_ids;
use burn_nvfp4::{Nvfp4MoeConfig, Nvfp4Recipe};
use burn_optim::GradientsParams;
use nvfp4_parallel::Reduction;
use nvfp4_test_support::skip;

use super::data::Initialise;
use super::on_ranks;
use crate::support::{Matrix, gpu_only, values};

const RANKS: usize = 2;

macro_rules! skip_without_two_gpus {
    () => {
        gpu_only!();
        if Device::enumerate(DeviceType::Cuda).len() < RANKS {
            skip!(NoSecondGpu);
        }
    };
}

/// Compares the results of `body` on each rank, by NCCL and through host memory.
fn both<T: Send + PartialEq + Debug>(
    what: &str,
    body: impl Fn(&ProcessGroup, &Device) -> T + Sync,
) -> Vec<T> {
    let [device, host] = [true, false].map(|connect| {
        on_ranks(RANKS, |group| {
            let device = Device::cuda(group.rank());
            let group = match connect {
                true => group.connect(&device, Overlap::None).unwrap(),
                false => group,
            };
            body(&group, &device)
        })
    });
    assert!(device == host, "{what}: {device:?}, but {host:?}");
    device
}

/// Returns the tensor of a rank, written by a fused kernel.
fn own(rank: usize, dims: [usize; 2], dtype: DType, device: &Device) -> Tensor<2> {
    let made = Matrix::gaussian(dims[0], dims[1], dtype, 7 + rank as u64).tensor(device);
    made.mul_scalar(3.0).add_scalar(0.25)
}

#[test]
fn reductions_have_the_hosts_bits() {
    skip_without_two_gpus!();
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for dims in [[2, 1], [6, 34], [1024, 4096]] {
            let what = format!("{dtype:?} {dims:?}");
            both(&what, |group, device| {
                let x = || own(group.rank(), dims, dtype, device);
                let reduced = [
                    group.all_reduce(x(), Reduction::Sum),
                    group.all_reduce(x(), Reduction::Avg),
                    group.all_reduce(x(), Reduction::Max),
                    group.reduce_scatter(x(), Reduction::Sum),
                    group.reduce_scatter(x(), Reduction::Avg),
                    group.all_gather(x(), 0),
                    group.all_gather(x(), 1),
                    group.broadcast(x(), 1),
                ];
                reduced.map(|tensor| values(tensor * 2))
            });
        }
    }
}

#[test]
fn integers_and_unequal_counts_travel() {
    skip_without_two_gpus!();
    let found = both("integers", |group, device| {
        let rank = group.rank();
        let rows: Vec<i32> = (0..10).map(|row| 100 * rank as i32 + row).collect();
        let x = Tensor::<2, Int>::from_data(TensorData::new(rows, [5, 2]), device);
        // Rank 0 sends nothing to itself, rank 1 nothing to rank 0.
        let (send, receive) = match rank {
            0 => ([0, 5], [0, 0]),
            _ => ([0, 5], [5, 5]),
        };
        let moved = group.all_to_all_int(x.clone(), &send, &receive);
        let all = group.all_gather_int(x);
        [moved, all].map(|tensor| tensor.into_data().iter::<i64>().collect::<Vec<_>>())
    });
    assert_eq!(found[0][0].len(), 0);
    assert_eq!(found[1][0].len(), 20);
    assert_eq!(found[1][0][..2], [0, 1]);
}

#[test]
fn gradients_travel_back() {
    skip_without_two_gpus!();
    both("gradients", |group, device| {
        let device = device.clone().autodiff();
        let dims = [64, 96];
        let x = || own(group.rank(), dims, DType::F32, &device).require_grad();
        let loss = |y: Tensor<2>| (y.clone() * y).sum();
        let back = |x: Tensor<2>, y: Tensor<2>| {
            let gradients = loss(y).backward();
            values(x.grad(&gradients).unwrap())
        };
        type Function = fn(Tensor<2>, &ProcessGroup) -> Tensor<2>;
        let all: [Function; 5] = [
            functions::copy,
            functions::reduce,
            functions::gather_mean,
            |x, group| functions::reduce_scatter(x, 1, group),
            |x, group| {
                let rank = group.rank();
                let counts = [[10, 54], [20, 44]];
                let receive = [counts[0][rank], counts[1][rank]];
                functions::all_to_all(x, &counts[rank], &receive, group)
            },
        ];
        all.map(|function| {
            let x = x();
            let y = function(x.clone(), group);
            back(x, y)
        })
    });
}

/// Kernels before and after a collective are ordered with it, and memory is not reused too early.
#[test]
fn collectives_stand_in_line_with_kernels() {
    skip_without_two_gpus!();
    let found = both("many", |group, device| {
        let mut x = own(group.rank(), [2048, 2048], DType::F32, device);
        for _ in 0..40 {
            let summed = group.all_reduce(x.clone() * 0.25, Reduction::Sum);
            let parts = group.reduce_scatter(x + summed, Reduction::Avg);
            x = group.all_gather(parts.tanh(), 0) + group.rank() as f32;
        }
        values(x)
    });
    assert!(found[0].iter().all(|value| value.is_finite()));
    assert_ne!(found[0], found[1]);
}

/// Gradients of a module's parameters, in order.
struct OfParameters<'a>(&'a GradientsParams, Vec<Vec<f32>>);

impl ModuleVisitor for OfParameters<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = self.0.get::<D>(param.id);
        self.1.push(values(gradient.expect("a gradient")));
    }
}

/// Returns outputs and gradients of a few steps of a mixture on a rank. Gradients of replicated
/// parameters are averaged in the backward, so that their collectives overlap with exchanges of
/// tokens.
fn steps_of_experts(
    group: &ProcessGroup,
    device: &Device,
    recipe: &Nvfp4Recipe,
    dispatch: ExpertDispatch,
) -> Vec<Vec<f32>> {
    const WIDTH: usize = 512;
    let device = device.clone().autodiff();
    let config = Nvfp4MoeConfig::new(WIDTH, 256, 8).with_shared_hidden(Some(2048));
    let moe = config.with_recipe(recipe.clone()).init(&device);
    // The random draws of a layer do not depend on other layers of the process.
    assign_layer_ids(&moe);
    let moe = ExpertParallelMoe::from_moe(moe.map(&mut Initialise(0)), group);
    let experts = expert_parameters(&moe);
    let groups = ExpertGroups {
        batch: group,
        experts: &experts,
        data: &ProcessGroup::single(),
        loss: RankLoss::Mean,
    };
    let moe = average_replicated_in_backward(moe.with_dispatch(dispatch), groups, 1);
    let mut found = Vec::new();
    for step in 0..4 {
        let seed = 20 + 2 * step + group.rank() as u64;
        let x = Matrix::gaussian(1024, WIDTH, DType::BF16, seed).tensor(&device);
        let x = x.require_grad();
        // Kernels before and after the mixture, and one mixture after another.
        let inner = moe.forward(x.clone() * 2).output;
        let out = moe.forward(inner + x.clone());
        let losses = out.balance_loss + out.z_loss;
        let loss = out.output.clone().cast(DType::F32).square().mean() + losses;
        let mut gradients = loss.backward();
        found.push(values(out.output));
        found.push(values(x.grad_remove(&mut gradients).unwrap()));
        let mut gradients = GradientsParams::from_grads(gradients, &moe);
        average_expert_gradients(&moe, &mut gradients, groups);
        let mut of_parameters = OfParameters(&gradients, Vec::new());
        moe.visit(&mut of_parameters);
        found.extend(of_parameters.1);
    }
    found
}

/// Overlapped exchanges are complete before their results are read, and their memory is not reused
/// too early, forward and backward.
#[test]
fn tokens_beside_kernels_have_the_bits_of_those_in_line() {
    skip_without_two_gpus!();
    for preset in ["bf16", "nvidia"] {
        let recipe = Nvfp4Recipe::preset(preset).unwrap().with_seed(3);
        for dispatch in [ExpertDispatch::AllToAll, ExpertDispatch::AllGather] {
            let of = |overlap: Overlap| {
                on_ranks(RANKS, |group| {
                    let device = Device::cuda(group.rank());
                    let group = group.connect(&device, overlap).unwrap();
                    steps_of_experts(&group, &device, &recipe, dispatch)
                })
            };
            let in_line = of(Overlap::None);
            for overlap in [Overlap::Tokens, Overlap::All] {
                let what = format!("{preset}, {dispatch:?}, {overlap:?}");
                for (rank, (found, expected)) in of(overlap).iter().zip(&in_line).enumerate() {
                    for (place, (found, expected)) in found.iter().zip(expected).enumerate() {
                        assert!(found == expected, "{what}: tensor {place} of rank {rank}");
                        assert!(found.iter().all(|value| value.is_finite()), "{what}");
                    }
                }
            }
        }
    }
}
