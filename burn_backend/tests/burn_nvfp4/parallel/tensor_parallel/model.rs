//! Feed-forward, attention, norm, embedding and head, sharded, compared with one device.

use burn_core::module::Param;
use burn_core::tensor::{DType, FloatDType, Int, Tensor, TensorData};
use burn_nvfp4::nn::tensor_parallel::{
    SequenceParallelRmsNorm, TensorParallel, TensorParallelAttention, TensorParallelBlock,
    TensorParallelSwiGlu, VocabParallelEmbedding, VocabParallelHead,
};
use burn_nvfp4::nn::{
    Embedding, LmHead, Nvfp4TransformerBlock, Nvfp4TransformerBlockConfig, ResidualStream,
    RmsNormConfig, RopeCacheConfig,
};
use burn_nvfp4::optim::AdamWConfig;
use burn_nvfp4::state::RngState;
use burn_nvfp4::{
    Nvfp4Attention, Nvfp4AttentionConfig, Nvfp4Linear, Nvfp4Recipe, Nvfp4SwiGlu, Nvfp4SwiGluConfig,
};
use burn_optim::GradientsParams;
use nvfp4_formats::{CrossEntropy, Reduction};

use super::super::on_ranks;
use super::{bits, distance, own};
use crate::support::{
    Matrix, activation, device, float_sums_depend_on_rows, skip_where_small_only, small_only,
    values,
};

/// Returns numbers of ranks, each with a flag for sequence parallelism.
pub fn runs() -> &'static [(usize, bool)] {
    const RUNS: [(usize, bool); 4] = [(2, true), (2, false), (4, false), (4, true)];
    if small_only() { &RUNS[..1] } else { &RUNS }
}

/// Returns a tensor of ranks without autodiff, the same on each rank.
pub fn matrix(rows: usize, cols: usize, dtype: DType, seed: u64) -> Tensor<2> {
    Matrix::gaussian(rows, cols, dtype, seed).tensor(&device().autodiff())
}

pub fn tokens(x: Tensor<2>, parallel: &TensorParallel) -> Tensor<2> {
    let group = parallel.group();
    match parallel.is_sequence_parallel() {
        true => own(x, 0, group.rank(), group.size()),
        false => x,
    }
}

pub fn parallel(group: burn_nvfp4::parallel::ProcessGroup, by_tokens: bool) -> TensorParallel {
    TensorParallel::new(group)
        .with_sequence_parallel(by_tokens)
        .with_deterministic(true)
}

/// Gives every copy of a layer the same weights and random streams.
pub fn fixed(layer: &mut Nvfp4Linear, id: u64) {
    let [d_in, d_out] = layer.weight.dims();
    let weight = matrix(d_in, d_out, DType::F32, 100 + id).mul_scalar(0.1);
    layer.weight = Param::from_tensor(weight.detach().require_grad());
    let old = layer.state.rng_state();
    let state = RngState { layer: id, ..old };
    layer.state.set_rng_state(state).unwrap();
}

fn swiglu(recompute: bool) -> Nvfp4SwiGlu {
    let recipe = Nvfp4Recipe::preset("nvidia").unwrap();
    let mut layer = Nvfp4SwiGluConfig::new(64, 128)
        .with_recipe(recipe)
        .with_recompute(recompute)
        .init(&device().autodiff());
    fixed(&mut layer.gate_up, 1);
    fixed(&mut layer.down, 2);
    layer
}

/// Output and gradients have the bits of one device, random bits included.
#[test]
fn feed_forward() {
    for &(size, by_tokens) in runs() {
        for recompute in [false, true] {
            on_ranks(size, |group| {
                let (rank, parallel) = (group.rank(), parallel(group, by_tokens));
                let x = matrix(64, 64, activation(), 3);
                let dy = matrix(64, 64, activation(), 4);
                let whole = swiglu(recompute);
                let input = x.clone().detach().require_grad();
                let y = whole.forward(input.clone());
                let gradients = (y.clone() * dy.clone()).sum().backward();
                let layer = TensorParallelSwiGlu::from_swiglu(swiglu(recompute), &parallel);
                let layer = layer.unwrap();
                let own_input = tokens(x, &parallel).detach().require_grad();
                let own_y = layer.forward(own_input.clone());
                let own_gradients = (own_y.clone() * tokens(dy, &parallel)).sum().backward();
                let what = format!("rank {rank} of {size}, by tokens: {by_tokens}");
                assert_eq!(bits(own_y), bits(tokens(y, &parallel)), "y, {what}");
                let dx = tokens(input.grad(&gradients).unwrap(), &parallel);
                assert_eq!(
                    bits(own_input.grad(&own_gradients).unwrap()),
                    bits(dx),
                    "dx, {what}"
                );
                let dw = whole.gate_up.weight.grad(&gradients).unwrap();
                let [gate, up] = [0, 128].map(|first| {
                    let half: Tensor<2> = dw.clone().narrow(1, first, 128);
                    own(half, 1, rank, size)
                });
                let found = layer.gate_up.linear.weight.grad(&own_gradients).unwrap();
                assert_eq!(
                    bits(found),
                    bits(Tensor::cat(vec![gate, up], 1)),
                    "gate, {what}"
                );
                let dw = whole.down.weight.grad(&gradients).unwrap();
                let found = layer.down.linear.weight.grad(&own_gradients).unwrap();
                assert_eq!(bits(found), bits(own(dw, 0, rank, size)), "down, {what}");
                let (gate_up, down) = layer.into_layers();
                let whole = swiglu(recompute);
                assert_eq!(bits(gate_up.weight.val()), bits(whole.gate_up.weight.val()));
                assert_eq!(bits(down.weight.val()), bits(whole.down.weight.val()));
            });
        }
    }
}

/// A rank's shard of a weight is quantized with the amax that the optimizer computed, with the bits
/// of a separate amax pass.
#[test]
fn amax_of_the_optimizer() {
    for &(size, by_tokens) in runs() {
        on_ranks(size, |group| {
            let (rank, parallel) = (group.rank(), parallel(group, by_tokens));
            let run = |amax| {
                let layer = TensorParallelSwiGlu::from_swiglu(swiglu(false), &parallel);
                let mut layer = layer.unwrap();
                let config = AdamWConfig {
                    amax,
                    ..AdamWConfig::default()
                };
                let mut optimizer = config.init();
                let step = |_| {
                    let x = tokens(matrix(64, 64, activation(), 3), &parallel);
                    let x = x.detach().require_grad();
                    let y = layer.forward(x.clone());
                    let gradients = y.clone().square().sum().backward();
                    let dx = x.grad(&gradients).unwrap();
                    let gradients = GradientsParams::from_grads(gradients, &layer);
                    layer = optimizer.step(0.05, layer.clone(), gradients);
                    [bits(y), bits(dx)]
                };
                (0..3).map(step).collect::<Vec<_>>()
            };
            let what = format!("rank {rank} of {size}, by tokens: {by_tokens}");
            assert!(run(true) == run(false), "{what}");
        });
    }
}

const HEADS: usize = 8;
const KV_HEADS: usize = 4;
const D_MODEL: usize = 128;

fn attention() -> Nvfp4Attention {
    let recipe = Nvfp4Recipe::preset("nvidia").unwrap();
    let mut layer = Nvfp4AttentionConfig::new(D_MODEL, HEADS)
        .with_kv_heads(Some(KV_HEADS))
        .with_recipe(recipe)
        .init(&device().autodiff());
    fixed(&mut layer.qkv, 3);
    fixed(&mut layer.out, 4);
    layer
}

/// Heads sharded over ranks, with grouped queries: the bits of one device.
#[test]
fn attention_by_heads() {
    let (batch, time) = (2, 32);
    for &(size, by_tokens) in runs() {
        on_ranks(size, |group| {
            let (rank, parallel) = (group.rank(), parallel(group, by_tokens));
            let cache = RopeCacheConfig::new(time, D_MODEL / HEADS);
            let positions = cache.init(&device().autodiff());
            let x = matrix(batch * time, D_MODEL, activation(), 5);
            let dy = matrix(batch * time, D_MODEL, activation(), 6);
            let whole = attention();
            let input = x.clone().detach().require_grad();
            let y = whole.forward(input.clone().reshape([batch, time, D_MODEL]), &positions);
            let y = y.reshape([batch * time, D_MODEL]);
            let gradients = (y.clone() * dy.clone()).sum().backward();
            let layer = TensorParallelAttention::from_attention(attention(), &parallel).unwrap();
            let own_input = tokens(x, &parallel).detach().require_grad();
            let own_y = layer.forward(own_input.clone(), batch, &positions);
            let own_gradients = (own_y.clone() * tokens(dy, &parallel)).sum().backward();
            let what = format!("rank {rank} of {size}, by tokens: {by_tokens}");
            assert_eq!(bits(own_y), bits(tokens(y, &parallel)), "y, {what}");
            let dx = tokens(input.grad(&gradients).unwrap(), &parallel);
            assert_eq!(
                bits(own_input.grad(&own_gradients).unwrap()),
                bits(dx),
                "dx, {what}"
            );
            let dw = whole.out.weight.grad(&gradients).unwrap();
            let found = layer.out.linear.weight.grad(&own_gradients).unwrap();
            assert_eq!(bits(found), bits(own(dw, 0, rank, size)), "out, {what}");
            let dw: Tensor<2> = whole.qkv.weight.grad(&gradients).unwrap();
            let queries = own(dw.clone().narrow(1, 0, D_MODEL), 1, rank, size);
            let found: Tensor<2> = layer.qkv.linear.weight.grad(&own_gradients).unwrap();
            let found = found.narrow(1, 0, D_MODEL / size);
            assert_eq!(bits(found), bits(queries), "queries, {what}");
        });
    }
}

fn block() -> Nvfp4TransformerBlock {
    let recipe = Nvfp4Recipe::preset("nvidia").unwrap();
    let mut block = Nvfp4TransformerBlockConfig::new(D_MODEL, HEADS, 128)
        .with_kv_heads(Some(KV_HEADS))
        .with_recipe(recipe)
        .init(&device().autodiff());
    fixed(&mut block.attention.qkv, 5);
    fixed(&mut block.attention.out, 6);
    let feed_forward = block.feed_forward.as_mut().unwrap();
    fixed(&mut feed_forward.gate_up, 7);
    fixed(&mut feed_forward.down, 8);
    block
}

/// A block has the bits of one device. The gradient of a gain is a sum over the ranks' tokens if
/// those are sharded.
#[test]
fn whole_block() {
    let (batch, time) = (2, 32);
    for &(size, by_tokens) in runs() {
        on_ranks(size, |group| {
            let (rank, parallel) = (group.rank(), parallel(group, by_tokens));
            let cache = RopeCacheConfig::new(time, D_MODEL / HEADS);
            let positions = cache.init(&device().autodiff());
            let x = matrix(batch * time, D_MODEL, activation(), 16);
            let dy = matrix(batch * time, D_MODEL, activation(), 17);
            let whole = block();
            let input = x.clone().detach().require_grad();
            let stream = ResidualStream::from(input.clone().reshape([batch, time, D_MODEL]));
            let y = whole.forward_stream(stream, &positions).output.into_sum();
            let y = y.reshape([batch * time, D_MODEL]);
            let gradients = (y.clone() * dy.clone()).sum().backward();
            let layer = TensorParallelBlock::from_block(block(), &parallel).unwrap();
            let own_input = tokens(x, &parallel).detach().require_grad();
            let stream = ResidualStream::from(own_input.clone().unsqueeze::<3>());
            let own_y = layer.forward_stream(stream, batch, &positions);
            let own_y = own_y.output.into_sum();
            let own_y = own_y.reshape(own_input.dims());
            let own_gradients = (own_y.clone() * tokens(dy, &parallel)).sum().backward();
            let what = format!("rank {rank} of {size}, by tokens: {by_tokens}");
            assert_eq!(bits(own_y), bits(tokens(y, &parallel)), "y, {what}");
            let dx = tokens(input.grad(&gradients).unwrap(), &parallel);
            let own_dx = own_input.grad(&own_gradients).unwrap();
            assert_eq!(bits(own_dx), bits(dx), "dx, {what}");
            for (found, expected) in [
                (&layer.attention_norm, &whole.attention_norm),
                (&layer.feed_forward_norm, &whole.feed_forward_norm),
            ] {
                let found: Tensor<1> = found.norm.gamma.grad(&own_gradients).unwrap();
                let expected: Tensor<1> = expected.gamma.grad(&gradients).unwrap();
                match by_tokens {
                    true => assert!(distance(found, expected) < 2e-6, "gain, {what}"),
                    false => assert_eq!(bits(found), bits(expected), "gain, {what}"),
                }
            }
            let sharded = layer.sharded_parameters();
            let shapes: Vec<_> = sharded.iter().map(|(_, part)| &part.shape[..]).collect();
            let qkv = D_MODEL * (HEADS + 2 * KV_HEADS) / HEADS;
            let expected = [[D_MODEL, qkv], [D_MODEL; 2], [D_MODEL, 256], [128, D_MODEL]];
            assert_eq!(shapes, expected);
            assert_eq!(sharded[2].1.segments, [128, 128]);
            assert_eq!(layer.check_parts(8).is_err(), by_tokens);
        });
    }
}

#[test]
fn heads_that_ranks_do_not_divide_are_refused() {
    let groups = burn_nvfp4::parallel::ProcessGroup::loopback(8, std::time::Duration::ZERO);
    let parallel = TensorParallel::new(groups[0].clone());
    let error = TensorParallelAttention::from_attention(attention(), &parallel).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("kv_heads"), "{error}");
}

fn ids(rows: &[i32]) -> Tensor<1, Int> {
    let data = TensorData::new(rows.to_vec(), [rows.len()]);
    Tensor::from_data(data, (&device().autodiff(), DType::I32))
}

#[test]
fn embedding() {
    let (vocab, width) = (64, 32);
    let rows: Vec<i32> = (0..32).map(|i| (i * 29 + 3) % vocab as i32).collect();
    for &(size, by_tokens) in runs() {
        on_ranks(size, |group| {
            let (rank, parallel) = (group.rank(), parallel(group, by_tokens));
            let table = || {
                let table = matrix(vocab, width, DType::F32, 8);
                Embedding::new(Param::from_tensor(table.detach().require_grad()))
            };
            let dy = matrix(rows.len(), width, DType::F32, 9);
            let whole = table();
            let ids_2d = ids(&rows).reshape([1, rows.len()]);
            let y = whole.forward(ids_2d).reshape([rows.len(), width]);
            let gradients = (y.clone() * dy.clone()).sum().backward();
            let layer = VocabParallelEmbedding::from_embedding(table(), &parallel).unwrap();
            let own_y = layer.forward(ids(&rows), FloatDType::F32);
            let own_gradients = (own_y.clone() * tokens(dy, &parallel)).sum().backward();
            assert_eq!(values(own_y), values(tokens(y, &parallel)));
            let found = values(layer.weight.grad(&own_gradients).unwrap());
            let expected = whole.weight.grad(&gradients).unwrap();
            assert_eq!(found, values(own(expected, 0, rank, size)));
            // An id out of range is NaN on all ranks; neighboring ids are not affected.
            let mut wrong = rows.clone();
            wrong[0] = vocab as i32;
            wrong[1] = -1;
            let y = values(layer.forward(ids(&wrong), FloatDType::F32));
            let nans = y.iter().filter(|y| y.is_nan()).count();
            let owns_them = !by_tokens || rank == 0;
            assert_eq!(nans, if owns_them { 2 * width } else { 0 });
            let again = layer.into_embedding().weight.val();
            assert_eq!(values(again), values(table().weight.val()));
        });
    }
}

/// Loss and gradients equal those of one device up to the order of sums in `f32`.
///
/// On CubeCL's CPU runtime Burn's fusion failed with "Should have handle for tensor" in this test,
/// whose threads share its one device.
#[test]
fn head_and_loss() {
    skip_where_small_only!();
    let (vocab, width, count) = (96, 32, 64);
    let mut targets: Vec<i32> = (0..count).map(|i| (i * 37 + 11) % vocab as i32).collect();
    targets[3] = -100;
    targets[40] = -100;
    let losses = [
        CrossEntropy::default(),
        CrossEntropy {
            smoothing: 0.1,
            z_loss: 1e-2,
            ignore: 7,
            reduction: Reduction::Sum,
        },
    ];
    for params in losses {
        let mut targets = targets.clone();
        if params.ignore == 7 {
            targets
                .iter_mut()
                .filter(|target| **target < 0)
                .for_each(|target| *target = 7);
        }
        for &(size, by_tokens) in runs() {
            on_ranks(size, |group| {
                let (rank, parallel) = (group.rank(), parallel(group, by_tokens));
                let head = || {
                    let weight = matrix(width, vocab, DType::F32, 12);
                    let weight = Param::from_tensor(weight.detach().require_grad());
                    LmHead::new(weight).with_params(params)
                };
                let x = matrix(count as usize, width, DType::F32, 13);
                let whole = head();
                let input = x.clone().detach().require_grad();
                let loss = whole.loss(input.clone(), ids(&targets));
                let gradients = loss.clone().backward();
                let layer = VocabParallelHead::from_head(head(), &parallel).unwrap();
                let own_input = tokens(x, &parallel).detach().require_grad();
                let own_loss = layer.loss(own_input.clone(), ids(&targets));
                let own_gradients = own_loss.clone().backward();
                let what = format!("rank {rank} of {size}, by tokens: {by_tokens}, {params:?}");
                // On a GPU, sums of at most this many terms in another order.
                let bound = match float_sums_depend_on_rows() {
                    true => vocab as f32 * 2f32.powi(-24),
                    false => 2e-6,
                };
                let near = |found: f32| assert!(found < bound, "{what}: {found}");
                near(distance(own_loss, loss));
                let dx = tokens(input.grad(&gradients).unwrap(), &parallel);
                near(distance(own_input.grad(&own_gradients).unwrap(), dx));
                let dw = own(whole.weight.grad(&gradients).unwrap(), 1, rank, size);
                near(distance(layer.weight.grad(&own_gradients).unwrap(), dw));
                // A target that is no class makes the loss NaN.
                let mut wrong = targets.clone();
                wrong[5] = vocab as i32;
                let loss = layer.loss(own_input, ids(&wrong));
                assert!(values(loss)[0].is_nan());
                let again = layer.into_head().weight.val();
                assert_eq!(values(again), values(head().weight.val()));
            });
        }
    }
}

/// Each rank normalizes its tokens; the gradient of the gain is summed over all ranks.
#[test]
fn norm() {
    let (rows, width) = (64, 48);
    for &(size, by_tokens) in runs() {
        on_ranks(size, |group| {
            let parallel = parallel(group, by_tokens);
            let norm = || RmsNormConfig::new(width).init(&device().autodiff());
            let x = matrix(rows, width, DType::F32, 14);
            let dy = matrix(rows, width, DType::F32, 15);
            let whole = norm();
            let y = whole.forward(x.clone());
            let gradients = (y.clone() * dy.clone()).sum().backward();
            let layer = SequenceParallelRmsNorm::new(norm(), &parallel);
            let own_y = layer.forward(tokens(x, &parallel));
            let own_gradients = (own_y.clone() * tokens(dy, &parallel)).sum().backward();
            assert_eq!(bits(own_y), bits(tokens(y, &parallel)));
            let found: Tensor<1> = layer.norm.gamma.grad(&own_gradients).unwrap();
            let expected = whole.gamma.grad(&gradients).unwrap();
            assert!(distance(found, expected) < 2e-6);
        });
    }
}
