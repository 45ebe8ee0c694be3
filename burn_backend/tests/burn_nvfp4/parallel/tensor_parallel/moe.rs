//! Blocks with experts in tensor groups, compared with one device.

use std::time::Duration;

use burn_core::module::Param;
use burn_core::tensor::{DType, Tensor};
use burn_nvfp4::Nvfp4Recipe;
use burn_nvfp4::nn::tensor_parallel::{TensorParallel, TensorParallelBlock};
use burn_nvfp4::nn::{
    BlockOutput, ExpertDispatch, MlpActivation, Nvfp4GroupedLinear, Nvfp4MoeConfig,
    Nvfp4TransformerBlock, Nvfp4TransformerBlockConfig, ResidualStream, RopeCacheConfig,
    expert_parameters,
};
use burn_nvfp4::parallel::ProcessGroup;
use burn_nvfp4::state::RngState;
use nvfp4_parallel::Reduction;

use super::super::on_ranks;
use super::model::{fixed, matrix, parallel, tokens};
use super::{bits, distance, own};
use crate::support::{device, float_sums_depend_on_rows, skip_where_small_only, small_only};

const D_MODEL: usize = 64;
const HEADS: usize = 4;
const EXPERTS: usize = 4;
/// Hidden width of the shared expert.
const SHARED: usize = 128;
/// Tokens per sequence.
const TIME: usize = 32;

/// Gives every copy of a layer of experts the same weights and random streams.
fn fixed_experts(layer: &mut Nvfp4GroupedLinear, id: u64) {
    let [experts, d_in, d_out] = layer.weight.dims();
    let weight = matrix(experts * d_in, d_out, DType::F32, 100 + id).mul_scalar(0.1);
    let weight = weight.reshape([experts, d_in, d_out]);
    layer.weight = Param::from_tensor(weight.detach().require_grad());
    let old = layer.state.rng_state();
    let state = RngState { layer: id, ..old };
    layer.state.set_rng_state(state).unwrap();
}

fn block(case: Case) -> Nvfp4TransformerBlock {
    let (recipe, device) = (
        Nvfp4Recipe::preset(case.preset).unwrap(),
        device().autodiff(),
    );
    let mut block = Nvfp4TransformerBlockConfig::new(D_MODEL, HEADS, 48)
        .with_experts(Some(EXPERTS))
        .with_recipe(recipe.clone())
        .init(&device);
    let experts = Nvfp4MoeConfig::new(D_MODEL, 48, EXPERTS)
        .with_shared_hidden(case.shared.then_some(SHARED))
        .with_activation(case.activation)
        .with_recipe(recipe);
    block.moe = Some(experts.init(&device));
    fixed(&mut block.attention.qkv, 5);
    fixed(&mut block.attention.out, 6);
    let moe = block.moe.as_mut().unwrap();
    fixed_experts(&mut moe.gate_up, 7);
    fixed_experts(&mut moe.down, 8);
    if let Some(shared) = &mut moe.shared {
        fixed(&mut shared.gate_up, 9);
        fixed(&mut shared.down, 10);
    }
    let router = matrix(D_MODEL, EXPERTS, DType::F32, 111).mul_scalar(0.3);
    moe.router.weight = Param::from_tensor(router.detach().require_grad());
    block
}

/// Returns output, loss and router losses of a block, with a share of the router losses in the
/// loss.
fn loss_of(
    block: BlockOutput<ResidualStream>,
    dy: Tensor<2>,
    share: f64,
) -> (Tensor<2>, Tensor<1>, [Tensor<1>; 2]) {
    let (balance, z) = (block.balance_loss.unwrap(), block.z_loss.unwrap());
    let y = block.output.into_sum().reshape(dy.dims());
    let routers = balance.clone().mul_scalar(3.0 * share) + z.clone().mul_scalar(2.0 * share);
    let loss = (y.clone() * dy).sum() + routers;
    (y, loss, [balance, z])
}

/// A block on several ranks.
#[derive(Clone, Copy, Debug)]
struct Case {
    /// Number of ranks, all of which have experts.
    world: usize,
    /// Number of ranks per tensor group.
    tp: usize,
    preset: &'static str,
    dispatch: ExpertDispatch,
    /// True if there is a shared expert.
    shared: bool,
    /// Activation of all experts.
    activation: MlpActivation,
    /// True if the router losses are part of the loss.
    losses: bool,
}

impl Case {
    /// Returns true if the forward has the bits of one device, whose tensor group sees all tokens.
    fn has_bits_of_one(&self) -> bool {
        self.world == self.tp
    }

    /// Returns true if the gradients of experts do too. Those of the losses are rounded
    /// differently.
    fn has_gradients_of_one(&self) -> bool {
        let in_floats = self.preset == "bf16" && float_sums_depend_on_rows();
        !in_floats && self.has_bits_of_one() && !self.losses
    }

    /// Returns true if the gradients of tokens do too. They are a sum of two terms without a shared
    /// expert; autodiff adds three terms in another order. The router runs as a batch of GEMMs of
    /// at most 32 parts: those of two ranks have as many rows as those of one device if their
    /// tokens are 32 times an odd number.
    fn has_inputs_of_one(&self) -> bool {
        self.has_gradients_of_one() && !self.shared && self.world == 2
    }

    fn sequences(&self) -> usize {
        if self.world == 2 { 3 } else { 4 }
    }
}

/// Checks the block of `case` against that of one device.
fn check(case: Case) {
    let Case { world, tp, .. } = case;
    on_ranks(world, |all| {
        let (rank, groups) = (all.rank(), world / tp);
        let neighbours: Vec<usize> = (rank / tp * tp..).take(tp).collect();
        let same: Vec<usize> = (rank % tp..world).step_by(tp).collect();
        let [tensor, batch] = [neighbours, same].map(|members| all.subgroup(&members).unwrap());
        let parallel = parallel(tensor, true).with_experts(&all, &batch);
        let sequences = case.sequences();
        let positions = RopeCacheConfig::new(TIME, D_MODEL / HEADS).init(&device().autodiff());
        let rows = sequences * TIME;
        let x = matrix(rows, D_MODEL, DType::F32, 16);
        let dy = matrix(rows, D_MODEL, DType::F32, 17);

        let whole = block(case);
        let input = x.clone().detach().require_grad();
        let stream = input.clone().reshape([sequences, TIME, D_MODEL]);
        let out = whole.forward_stream(stream.into(), &positions);
        let share = if case.losses { 1.0 } else { 0.0 };
        let (y, loss, losses) = loss_of(out, dy.clone(), share);
        let gradients = loss.backward();

        let part = TensorParallelBlock::from_block(block(case), &parallel).unwrap();
        let part = TensorParallelBlock {
            moe: part.moe.map(|moe| moe.with_dispatch(case.dispatch)),
            ..part
        };
        let of_batch = |x: Tensor<2>| own(x, 0, batch.rank(), groups);
        let own_tokens = |x| tokens(of_batch(x), &parallel);
        let own_input = own_tokens(x).detach().require_grad();
        let stream = ResidualStream::from(own_input.clone().unsqueeze::<3>());
        let out = part.forward_stream(stream, sequences / groups, &positions);
        let (own_y, loss, own_losses) = loss_of(out, own_tokens(dy), share / groups as f64);
        let own_gradients = loss.backward();

        let what = format!("rank {rank}, {case:?}");
        let same = |found: Tensor<2>, expected: Tensor<2>, has_bits: bool, name: &str| {
            let error = distance(found.clone(), expected.clone());
            let is_same = !has_bits || bits(found) == bits(expected);
            assert!(error < 5e-6 && is_same, "{name}, {what}: {error:e}");
        };
        same(own_y, own_tokens(y), case.has_bits_of_one(), "y");
        let dx = own_tokens(input.grad(&gradients).unwrap());
        let own_dx = own_input.grad(&own_gradients).unwrap();
        same(own_dx, dx, case.has_inputs_of_one(), "dx");
        for (found, expected) in own_losses.into_iter().zip(losses) {
            assert!(distance(found, expected) < 1e-6, "losses, {what}");
        }
        let (moe, of_one) = (part.moe.as_ref().unwrap(), whole.moe.as_ref().unwrap());
        for (found, expected) in [
            (&moe.experts.gate_up, &of_one.gate_up),
            (&moe.experts.down, &of_one.down),
        ] {
            let found: Tensor<3> = found.weight.grad(&own_gradients).unwrap();
            let expected = own(expected.weight.grad(&gradients).unwrap(), 0, rank, world);
            let [found, expected] = [found, expected].map(|x| x.flatten(0, 1));
            same(found, expected, case.has_gradients_of_one(), "experts");
        }
        // These are sums over the ranks; those of the tensor group are summed in the backward.
        let summed = |found: Tensor<2>| batch.all_reduce(found, Reduction::Sum);
        let found = moe.experts.router.weight.grad(&own_gradients).unwrap();
        let expected = of_one.router.weight.grad(&gradients).unwrap();
        let error = distance(summed(found), expected);
        assert!(error < 5e-6, "router, {what}: {error:e}");
        let mut shapes = vec![[D_MODEL, 3 * D_MODEL], [D_MODEL; 2]];
        if let (Some(shared), Some(expected)) = (&moe.shared, &of_one.shared) {
            let found = shared.down.linear.weight.grad(&own_gradients).unwrap();
            let expected = expected.down.weight.grad(&gradients).unwrap();
            let error = distance(summed(found), own(expected, 0, rank % tp, tp));
            assert!(error < 5e-6, "shared, {what}: {error:e}");
            shapes.extend([
                [D_MODEL, case.activation.inputs() * SHARED],
                [SHARED, D_MODEL],
            ]);
        }
        let sharded = part.sharded_parameters();
        let found: Vec<_> = sharded.iter().map(|(_, part)| &part.shape[..]).collect();
        assert_eq!(found, shapes);
        let experts = [moe.experts.gate_up.weight.id, moe.experts.down.weight.id];
        assert_eq!(expert_parameters(&part), experts);
        assert!(part.check_parts(8).is_err());
    });
}

const DISPATCHES: [ExpertDispatch; 2] = [ExpertDispatch::AllToAll, ExpertDispatch::AllGather];

/// In the deterministic mode everything has the bits of one device, except gradients that are sums
/// over ranks.
#[test]
fn tensor_groups_have_the_bits_of_one_device() {
    let case = |world, preset, dispatch| Case {
        world,
        tp: world,
        preset,
        dispatch,
        shared: false,
        activation: MlpActivation::SwiGlu,
        losses: false,
    };
    if small_only() {
        return check(case(2, "nvidia", ExpertDispatch::AllGather));
    }
    for preset in ["nvidia", "nvidia_4over6", "bf16"] {
        for dispatch in DISPATCHES {
            for world in [2, 4] {
                check(case(world, preset, dispatch));
            }
        }
    }
}

/// With router losses and shared experts, on the ranks of two tensor groups, which have shards of
/// the batch, and in one tensor group.
#[test]
fn tensor_groups_train_all_parts() {
    skip_where_small_only!();
    let (swiglu, srelu) = (MlpActivation::SwiGlu, MlpActivation::SRelu);
    for (tp, activation) in [(2, swiglu), (2, srelu), (4, swiglu)] {
        for dispatch in DISPATCHES {
            check(Case {
                world: 4,
                tp,
                preset: "bf16",
                dispatch,
                shared: true,
                activation,
                losses: true,
            });
        }
    }
}

/// An invalid block.
const REFUSED: Case = Case {
    world: 2,
    tp: 2,
    preset: "nvidia",
    dispatch: ExpertDispatch::AllToAll,
    shared: false,
    activation: MlpActivation::SwiGlu,
    losses: false,
};

#[test]
fn what_experts_cannot_be_on_is_refused() {
    let groups = ProcessGroup::loopback(2, Duration::ZERO);
    let others = ProcessGroup::loopback(3, Duration::ZERO);
    let refused = |parallel: TensorParallel, name: &str| {
        let error = TensorParallelBlock::from_block(block(REFUSED), &parallel).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
    };
    let of_group = || TensorParallel::new(groups[1].clone());
    let single = ProcessGroup::single();
    // Every rank would send the same tokens.
    refused(of_group(), "sequence_parallel");
    let by_tokens = of_group().with_sequence_parallel(true);
    refused(
        by_tokens.clone().with_experts(&others[1], &single),
        "rank 1 of 3 ranks",
    );
    refused(
        by_tokens.with_experts(&groups[0], &single),
        "rank 0 of 2 ranks",
    );
}
