//! Decorated models on several ranks, as threads with loopback groups.

use burn_core as burn;

use burn_core::module::{Module, Param, ParamGroup};
use burn_core::tensor::{DType, Device, Tensor};
use burn_nn::{Linear, LinearConfig};
use burn_nvfp4::decorate::{Decorator, GemmFormat};
use burn_nvfp4::optim::{AdamW, AdamWConfig, ZeroAdamW};
use burn_nvfp4::parallel::{
    ProcessGroup, Shards, average_gradients, average_in_backward, fully_shard, gather,
    reduce_gradients,
};
use burn_nvfp4::state::{assign_layer_ids, set_rank};
use burn_nvfp4::{Nvfp4Recipe, decorate};
use burn_optim::GradientsParams;

use super::models::{Plain, bits, device, small_only, tensor};
use crate::memory::in_use;
use crate::parallel::data::{Initialise, Trained, mean, weights};
use crate::parallel::on_ranks;
use crate::support::own_process::own_process;
use crate::support::values;

/// Tokens per rank.
const TOKENS: usize = 32;
const EXPERTS: usize = 2;

/// Weights of all experts.
#[derive(Module, Debug)]
struct Stack {
    weight: Param<Tensor<3>>,
}

/// Decorated layers, and a head that is not decorated.
#[derive(Module, Debug)]
struct Network {
    body: Plain,
    stack: Stack,
    head: Linear,
}

impl Network {
    fn new(decorator: &Decorator, device: &Device) -> Self {
        let stack = Tensor::zeros([EXPERTS, 16, 16], device).require_grad();
        let model = Self {
            body: Plain::new(true, device),
            stack: Stack {
                weight: Param::from_tensor(stack),
            },
            head: LinearConfig::new(16, 3).init(device),
        };
        let model = decorator.decorate(model.map(&mut Initialise(0))).unwrap();
        assign_layer_ids(&model);
        model
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let x = self.body.forward(x);
        let x = x.reshape([EXPERTS, TOKENS / EXPERTS, 16]);
        let x = x.matmul(self.stack.weight.val()).reshape([TOKENS, 16]);
        self.head.forward(x).square().mean()
    }

    /// Returns the loss of a batch without autodiff.
    fn valid_loss(&self, rank: usize, step: usize) -> Vec<f32> {
        values(self.valid().loss(batch(rank, step, &device())))
    }
}

fn decorator() -> Decorator {
    let stack = ParamGroup::from_regex("^stack").unwrap();
    Decorator::new(&Nvfp4Recipe::new().with_seed(3)).include(stack)
}

fn batch(rank: usize, step: usize, device: &Device) -> Tensor<2> {
    tensor(
        [TOKENS, 32],
        (100 + 10 * step + rank) as u64,
        DType::F32,
        device,
    )
}

fn steps() -> usize {
    if small_only() { 2 } else { 5 }
}

/// The norm of all gradients would be summed in another order.
fn config() -> AdamWConfig {
    AdamWConfig {
        grad_clip: None,
        ..AdamWConfig::default()
    }
}

const RATE: f64 = 0.01;

/// State that ranks share, and the exchange of gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    Averaged,
    AveragedInBackward,
    ShardedOptimizer,
    Sharded,
}

/// Trains the rank of `group`, and asserts that the GEMMs of all decorated layers were in NVFP4 if
/// none may be missed.
fn train(group: &ProcessGroup, decorator: &Decorator, layout: Layout) -> Trained {
    let device = device().autodiff();
    let whole = Network::new(decorator, &device);
    set_rank(&whole, group.rank()).unwrap();
    let mut model = match layout {
        Layout::AveragedInBackward => average_in_backward(whole, group, 1),
        Layout::Sharded => fully_shard(whole, group),
        Layout::Averaged | Layout::ShardedOptimizer => whole,
    };
    let shards = Shards::of(&model, group);
    let mut optimizer = config().init();
    optimizer.set_shards(Some(shards.clone()));
    let mut zero = ZeroAdamW::try_new(config(), group).unwrap();
    let mut losses = Vec::new();
    for step in 0..steps() {
        losses.extend(model.valid_loss(group.rank(), step));
        let loss = model.loss(batch(group.rank(), step, &device));
        losses.extend(values(loss.clone()));
        let mut gradients = GradientsParams::from_grads(loss.backward(), &model);
        if layout == Layout::ShardedOptimizer {
            model = zero.step(RATE, model, gradients);
            continue;
        }
        match layout {
            Layout::Sharded => reduce_gradients(&model, &mut gradients, &shards),
            _ => average_gradients(&model, &mut gradients, group),
        }
        model = optimizer.step(RATE, model, gradients);
    }
    // Still decorated.
    let model = gather(model);
    losses.extend(model.valid_loss(group.rank(), 0));
    let report = decorate::report(&model).unwrap();
    report.check().unwrap();
    assert!(report.is_all(GemmFormat::Nvfp4), "{layout:?}: {report}");
    let steps = steps() as u64;
    for layer in ["body.first", "body.second", "stack"] {
        let ran = &report.layers[layer];
        assert_eq!(ran.forward.nvfp4, 2 * steps + 1, "{layout:?}: {report}");
        assert_eq!(ran.wgrad.nvfp4, steps, "{layout:?}: {report}");
        assert_eq!(ran.wgrad_wasted, 0, "{layout:?}: {report}");
    }
    (losses, weights(&model))
}

/// Trains in one thread that computes one rank after the other.
fn one_after_the_other(ranks: usize) -> Vec<Trained> {
    let device = device().autodiff();
    let start = |rank| {
        let model = Network::new(&decorator(), &device);
        set_rank(&model, rank).unwrap();
        (model, config().init())
    };
    let mut models: Vec<(Network, AdamW)> = (0..ranks).map(start).collect();
    let mut losses = vec![Vec::new(); ranks];
    for step in 0..steps() {
        let mut gradients = Vec::new();
        for (rank, (model, _)) in models.iter().enumerate() {
            losses[rank].extend(model.valid_loss(rank, step));
            let loss = model.loss(batch(rank, step, &device));
            losses[rank].extend(values(loss.clone()));
            gradients.push(GradientsParams::from_grads(loss.backward(), model));
        }
        let stepped = models.into_iter().map(|(model, mut optimizer)| {
            let mean = mean(&model, &gradients);
            (optimizer.step(RATE, model, mean), optimizer)
        });
        models = stepped.collect();
    }
    let models = models.into_iter().enumerate().map(|(rank, (model, _))| {
        let mut losses = std::mem::take(&mut losses[rank]);
        losses.extend(model.valid_loss(rank, 0));
        (losses, weights(&model))
    });
    models.collect()
}

/// Bit for bit, also on one rank, and on three, which cannot share all parameters equally.
#[test]
fn ranks_train_as_one_thread_does() {
    own_process!("decorate");
    for ranks in [1, 2, 3] {
        let expected = one_after_the_other(ranks);
        assert!(expected.iter().all(|rank| rank.1 == expected[0].1));
        for layout in [
            Layout::Averaged,
            Layout::AveragedInBackward,
            Layout::ShardedOptimizer,
            Layout::Sharded,
        ] {
            let found = on_ranks(ranks, |group| train(&group, &decorator(), layout));
            for (rank, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let what = format!("{layout:?}, rank {rank} of {ranks}");
                assert_eq!(found.0, expected.0, "{what}: losses");
                for (index, (found, expected)) in found.1.iter().zip(&expected.1).enumerate() {
                    assert!(found == expected, "{what}: parameter {index}");
                }
            }
        }
    }
}

/// A lenient model keeps the gathered weights, with the same results.
#[test]
fn lenient_models_are_sharded_too() {
    own_process!("decorate");
    let train = |layout| on_ranks(2, |group| train(&group, &decorator().lenient(), layout));
    assert_eq!(train(Layout::Sharded), train(Layout::Averaged));
}

/// A rank holds its rows. `gather` keeps the decoration, and `undecorate` removes it.
#[test]
fn parts_are_rows() {
    own_process!("decorate");
    on_ranks(2, |group| {
        let device = device().autodiff();
        let whole = Network::new(&decorator(), &device);
        let elements = whole.num_params();
        let bias = |model: &Network| bits(model.body.first.bias.as_ref().unwrap().base());
        let (expected, expected_bias) = (bits(whole.body.first.weight.base()), bias(&whole));
        let sharded = fully_shard(whole, &group);
        let shards = Shards::of(&sharded, &group);
        // All but the head's bias of three elements.
        assert_eq!(shards.ids.len(), 6);
        assert_eq!(sharded.num_params(), (elements - 3) / 2 + 3);
        let part = sharded.body.first.weight.base();
        assert_eq!(part.dims(), [16, 48]);
        assert!(part.is_require_grad());
        let own = 16 * 48 * group.rank();
        assert_eq!(bits(part), expected[own..own + 16 * 48]);
        let gathered = gather(sharded.clone());
        assert!(gathered.body.first.weight.is_require_grad());
        assert_eq!(bits(gathered.body.first.weight.base()), expected);
        assert_eq!(bias(&gathered), expected_bias);
        assert_eq!(Shards::of(&gathered, &group).ids.len(), 0);
        decorate::report(&gathered).unwrap();
        let plain = decorate::undecorate(sharded);
        assert!(decorate::report(&plain).is_err());
        assert_eq!(bits(plain.body.first.weight.val()), expected);
    });
}

/// Between forward and backward, a rank holds the quantized weight instead of the gathered one.
#[test]
fn a_gathered_weight_is_freed_after_its_gemm() {
    own_process!("decorate");
    let [d_in, d_out] = [128, 384];
    on_ranks(2, |group| {
        let plain = device();
        let device = plain.clone().autodiff();
        let linear = LinearConfig::new(d_in, d_out)
            .with_bias(false)
            .init(&device);
        let linear = decorate(linear.map(&mut Initialise(0)), &Nvfp4Recipe::new()).unwrap();
        let linear = fully_shard(linear, &group);
        let x: Tensor<2> = tensor([16, d_in], 1, DType::F32, &device);
        let forward = || linear.forward(x.clone().require_grad() * 1.0);
        let backward = |y: Tensor<2>| {
            let mut gradients = GradientsParams::from_grads(y.sum().backward(), &linear);
            reduce_gradients(&linear, &mut gradients, &Shards::of(&linear, &group));
            assert_eq!(
                gradients.get::<2>(linear.weight.id).unwrap().dims(),
                [64, d_out]
            );
        };
        // The first step allocates the NaN that the graph sees.
        backward(forward());
        let before = in_use(&plain);
        let y = forward();
        let kept = in_use(&plain).saturating_sub(before) as usize;
        // Input and output in `f32`, and two operands of 4-bit codes and a scale per 16.
        let activations = 4 * 16 * (d_in + d_out);
        let most = activations + d_in * d_out * 9 / 8 + 8192;
        eprintln!("{kept} bytes are kept, at most {most}");
        assert!(
            kept > 4 * 16 * d_out && kept < most,
            "{kept} bytes, at most {most}"
        );
        backward(y);
    });
}
