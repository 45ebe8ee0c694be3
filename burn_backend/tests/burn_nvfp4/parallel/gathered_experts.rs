//! Stacks of experts that are sharded over ranks, and whose quantized operands are gathered.

use burn_core as burn;

use burn_core::module::{Module, ModuleVisitor, Param};
use burn_core::tensor::{DType, Device, Int, Tensor};
use burn_nvfp4::nn::{ExpertDispatch, ExpertParallelMoe, expert_parameters};
use burn_nvfp4::parallel::{
    ExpertGroups, ProcessGroup, RankLoss, Shards, fully_shard, fully_shard_experts,
    reduce_expert_gradients, reduce_gradients,
};
use burn_nvfp4::recipe::{BackwardSource, QuantSpec};
use burn_nvfp4::state::{assign_layer_ids, set_rank};
use burn_nvfp4::telemetry::Telemetry;
use burn_nvfp4::{
    ExpertOffsets, Nvfp4GroupedLinear, Nvfp4GroupedLinearConfig, Nvfp4Moe, Nvfp4MoeConfig,
    Nvfp4Recipe,
};
use burn_optim::GradientsParams;

use super::data::Initialise;
use super::on_ranks;
use crate::support::{Matrix, activation, device, skip_where_small_only, small_only, values};

/// Not a multiple of the RHT size, nor of the rows of a tile of block scales.
const WIDTH: usize = 32;
const HIDDEN: usize = 48;
const EXPERTS: usize = 8;

/// A mixture, and experts that get their tokens directly.
#[derive(Module, Debug)]
struct Layers {
    moe: Nvfp4Moe,
    alone: Nvfp4GroupedLinear,
}

/// Configuration of the layers, and their input.
#[derive(Clone)]
struct Case {
    recipe: Nvfp4Recipe,
    dtype: DType,
    recompute: bool,
    /// True if each rank draws separate random bits.
    own_draws: bool,
}

impl Case {
    fn new(recipe: Nvfp4Recipe) -> Self {
        Self {
            recipe: recipe.with_seed(3),
            dtype: DType::F32,
            recompute: false,
            own_draws: true,
        }
    }

    fn preset(name: &str) -> Self {
        Self::new(Nvfp4Recipe::preset(name).unwrap())
    }

    fn moe(&self, device: &Device) -> Nvfp4Moe {
        let config = Nvfp4MoeConfig::new(WIDTH, HIDDEN, EXPERTS);
        let config = config.with_recipe(self.recipe.clone());
        let moe = config.with_recompute(self.recompute).init(device);
        moe.map(&mut Initialise(0))
    }

    fn layers(&self, device: &Device) -> Layers {
        let alone = Nvfp4GroupedLinearConfig::new(EXPERTS, WIDTH, HIDDEN);
        let alone = alone.with_bias(true).with_recipe(self.recipe.clone());
        Layers {
            moe: self.moe(device),
            alone: alone.init(device).map(&mut Initialise(10)),
        }
    }

    fn tokens(&self, rows: usize, rank: usize, device: &Device) -> Tensor<2> {
        Matrix::gaussian(rows, WIDTH, self.dtype, 100 + rank as u64).tensor(device)
    }
}

impl Layers {
    /// Returns the outputs, one of them for an expert without tokens.
    fn forward(&self, x: Tensor<2>) -> Vec<Tensor<2>> {
        let [tokens, _] = x.dims();
        let counts = [5, 0, 9, 2, 1, 3, 1, 2];
        let counts = Tensor::<1, Int>::from_ints(counts, &x.device());
        let experts = ExpertOffsets::from_counts(counts, tokens);
        let alone = self.alone.forward(x.clone(), &experts);
        vec![self.moe.forward(x).output, alone]
    }
}

/// Gradients of a module's parameters, in order.
struct Gradients<'a>(&'a GradientsParams, Vec<Vec<f32>>);

impl ModuleVisitor for Gradients<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = self.0.get::<D>(param.id);
        self.1.push(gradient.map_or(Vec::new(), values));
    }
}

/// Results of a forward and a backward of a rank: outputs and the gradient of the input; the
/// gradients of parameters, or of the rank's shards of them.
type Found = (Vec<Vec<f32>>, Vec<Vec<f32>>);

/// Returns the results of `model`, with its parameters sharded over the ranks with the same ones,
/// or unsharded.
fn measure<M: Module>(
    (mut model, case): (M, &Case),
    (batch, data): (&ProcessGroup, &ProcessGroup),
    is_sharded: bool,
    forward: impl Fn(&M, Tensor<2>) -> Vec<Tensor<2>>,
) -> Found {
    let device = device().autodiff();
    assign_layer_ids(&model);
    if case.own_draws {
        set_rank(&model, batch.rank()).unwrap();
    }
    let experts = expert_parameters(&model);
    let groups = ExpertGroups {
        batch,
        experts: &experts,
        data,
        loss: RankLoss::Mean,
    };
    if is_sharded {
        model = fully_shard_experts(model, groups);
    }
    let sharded = Shards::of(&model, batch).ids;
    assert_eq!(sharded.is_empty(), !is_sharded);
    let x = case.tokens(24, batch.rank(), &device).require_grad();
    let outputs = forward(&model, x.clone());
    let terms = outputs.iter().map(|y| y.clone().cast(DType::F32).square());
    let loss = terms.map(Tensor::mean).reduce(|a, b| a + b).unwrap();
    let mut gradients = loss.backward();
    let dx = x.grad_remove(&mut gradients).unwrap();
    let mut found: Vec<_> = outputs.into_iter().map(values).collect();
    found.push(values(dx));
    let mut gradients = GradientsParams::from_grads(gradients, &model);
    reduce_expert_gradients(&model, &mut gradients, groups, &sharded);
    let mut of_parameters = Gradients(&gradients, Vec::new());
    model.visit(&mut of_parameters);
    (found, of_parameters.1)
}

/// Returns the results of the layers of `case` on a rank of a group that shares the batch.
fn of_layers(case: &Case, group: &ProcessGroup, is_sharded: bool) -> Found {
    let layers = case.layers(&device().autodiff());
    measure((layers, case), (group, group), is_sharded, Layers::forward)
}

/// Asserts that both have the same bits. `owners` returns the ranks that share the parameter with
/// an index: they have consecutive shards of its gradient.
fn assert_same(
    what: &str,
    sharded: &[Found],
    whole: &[Found],
    owners: impl Fn(usize) -> Vec<Vec<usize>>,
) {
    for (rank, (found, expected)) in sharded.iter().zip(whole).enumerate() {
        for (index, (found, expected)) in found.0.iter().zip(&expected.0).enumerate() {
            assert!(found == expected, "{what}: tensor {index} of rank {rank}");
        }
        assert!(expected.0.iter().all(|x| x.iter().any(|&x| x != 0.0)));
    }
    for index in 0..whole[0].1.len() {
        for ranks in owners(index) {
            let parts = ranks.iter().map(|&rank| &sharded[rank].1[index][..]);
            let found = parts.collect::<Vec<_>>().concat();
            let is_same = found == whole[ranks[0]].1[index];
            assert!(is_same, "{what}: gradient {index} of {ranks:?}");
            assert!(found.iter().any(|&x| x != 0.0), "{what}: gradient {index}");
        }
    }
}

fn check(what: &str, case: &Case, ranks: usize) {
    let [sharded, whole] = [true, false].map(|is_sharded| {
        let layers = |group| of_layers(case, &group, is_sharded);
        on_ranks(ranks, layers)
    });
    let what = format!("{what}, {ranks} ranks");
    assert_same(&what, &sharded, &whole, |_| vec![(0..ranks).collect()]);
}

/// Weights in 1x16 blocks with random bits for each, and all other operands too.
fn stochastic() -> Case {
    let drawn = QuantSpec::NVFP4.stochastic();
    let mut recipe = Nvfp4Recipe::new();
    (recipe.fprop.x, recipe.fprop.w) = (drawn, drawn);
    recipe.dgrad.w = drawn;
    Case {
        // The operands of a weight that ranks quantize with separate draws differ from those of one
        // rank.
        own_draws: false,
        ..Case::new(recipe)
    }
}

/// Weights with an amax per stored row.
fn per_row() -> Case {
    let mut recipe = Nvfp4Recipe::preset("per_token").unwrap();
    recipe.fprop.w = QuantSpec::NVFP4.per_row();
    recipe.dgrad.w = QuantSpec::NVFP4.per_row();
    Case::new(recipe)
}

/// MS-EDEN of the original weights, transformed with signs that each rank draws separately.
fn eden_of_weights() -> Case {
    let mut recipe = Nvfp4Recipe::preset("quartet2").unwrap();
    recipe.source = BackwardSource::Original;
    Case::new(recipe)
}

#[test]
fn they_give_the_bits_of_whole_stacks() {
    let presets: Vec<_> = match small_only() {
        true => vec!["nvidia"],
        false => Nvfp4Recipe::preset_names().collect(),
    };
    for preset in presets {
        let case = Case::preset(preset);
        check(preset, &case, 2);
        if !small_only() {
            check(preset, &case, 4);
        }
    }
}

/// The random bits of each block of a weight are those of its position in the whole stack.
#[test]
fn with_other_operands_of_weights() {
    skip_where_small_only!();
    let cases = [
        ("stochastic", stochastic()),
        ("per row", per_row()),
        ("MS-EDEN", eden_of_weights()),
    ];
    for (what, case) in cases {
        case.recipe.check().unwrap();
        check(what, &case, 2);
        check(what, &case, 4);
    }
}

#[test]
fn with_gate_and_up_computed_again() {
    for preset in ["nvidia", "quartet2", "bf16", "fwd_nvfp4_bwd_bf16"] {
        if small_only() && preset != "nvidia" {
            continue;
        }
        let mut case = Case::preset(preset);
        case.recompute = true;
        check(preset, &case, 2);
    }
}

#[test]
fn in_the_type_of_activations() {
    skip_where_small_only!();
    for preset in Nvfp4Recipe::preset_names() {
        let mut case = Case::preset(preset);
        case.dtype = activation();
        check(preset, &case, 2);
    }
}

/// Four ranks in pairs with different experts; the two ranks with the same experts shard these.
#[test]
fn with_experts_of_other_ranks() {
    skip_where_small_only!();
    let of_ranks = |case: &Case, dispatch, is_sharded| {
        on_ranks(4, |batch| {
            let rank = batch.rank();
            let [own, same] = [[rank / 2 * 2, rank / 2 * 2 + 1], [rank % 2, rank % 2 + 2]]
                .map(|members| batch.subgroup(&members).unwrap());
            let moe = case.moe(&device().autodiff());
            let moe = ExpertParallelMoe::from_moe(moe, &own).with_batch(&batch);
            let moe = moe.with_dispatch(dispatch);
            let forward = |moe: &ExpertParallelMoe, x| vec![moe.forward(x).output];
            measure((moe, case), (&batch, &same), is_sharded, forward)
        })
    };
    let stochastic = stochastic();
    let mut cases: Vec<_> = ["nvidia", "quartet2", "mxfp8", "bf16"]
        .map(|preset| {
            let mut case = Case::preset(preset);
            // Layers of experts draw as one rank.
            case.own_draws = false;
            (preset, case)
        })
        .into();
    cases.push(("stochastic", stochastic));
    for (what, case) in cases {
        for dispatch in [ExpertDispatch::AllToAll, ExpertDispatch::AllGather] {
            let [sharded, whole] = [true, false].map(|on| of_ranks(&case, dispatch, on));
            let what = format!("{what}, {dispatch:?}");
            // The router is sharded over all ranks.
            assert_same(&what, &sharded, &whole, |index| match index {
                0 => vec![vec![0, 1, 2, 3]],
                _ => vec![vec![0, 2], vec![1, 3]],
            });
        }
    }
}

/// Telemetry compares operands with the values that they are made from: while it is on, values are
/// gathered, which changes no bit.
#[test]
fn with_telemetry() {
    skip_where_small_only!();
    let case = Case::preset("nvidia");
    let of_ranks = |is_sharded, looks: bool| {
        on_ranks(2, |group| {
            let layers = case.layers(&device().autodiff());
            let before = group.collective().calls();
            let forward = |layers: &Layers, x| {
                let telemetry = looks.then(|| Telemetry::start(layers));
                let outputs = layers.forward(x);
                if let Some(telemetry) = telemetry {
                    let samples = telemetry.finish();
                    assert!(samples.iter().any(|sample| sample.operand == "fprop.w"));
                }
                outputs
            };
            let found = measure((layers, &case), (&group, &group), is_sharded, forward);
            (found, group.collective().calls() - before)
        })
    };
    let split = |ranks: Vec<(Found, u64)>| -> (Vec<Found>, Vec<u64>) { ranks.into_iter().unzip() };
    let (whole, _) = split(of_ranks(false, false));
    let (codes, of_codes) = split(of_ranks(true, false));
    let (values, of_values) = split(of_ranks(true, true));
    assert_same("values", &values, &whole, |_| vec![vec![0, 1]]);
    assert_same("codes", &codes, &whole, |_| vec![vec![0, 1]]);
    // Three operands in the forward and three in the backward, as codes, scales and amax values
    // each, instead of three gathers of values.
    let more = of_codes.iter().zip(&of_values).map(|(a, b)| a - b);
    assert_eq!(more.collect::<Vec<_>>(), [2 * 3 * 3 - 3; 2]);
}

/// Returns the number of collectives of a forward, and of a backward with its means, of a mixture.
fn collectives(preset: &str, recompute: bool) -> [u64; 2] {
    let mut case = Case::preset(preset);
    case.recompute = recompute;
    let found = on_ranks(2, |group| {
        let device = device().autodiff();
        let moe = fully_shard(case.moe(&device), &group);
        let x = case.tokens(24, group.rank(), &device).require_grad();
        let before = group.collective().calls();
        let loss = moe.forward(x).output.square().mean();
        let forward = group.collective().calls() - before;
        let mut gradients = GradientsParams::from_grads(loss.backward(), &moe);
        reduce_gradients(&moe, &mut gradients, &Shards::of(&moe, &group));
        [forward, group.collective().calls() - before - forward]
    });
    assert_eq!(found[0], found[1]);
    found[0]
}

/// No rank keeps the experts of others between forward and backward: operands are gathered for each
/// GEMM, as codes, block scales and amax values (if the format has a global scale), or as values in
/// high precision. If gate and up are recomputed, two GEMMs share one gathered operand.
#[test]
fn operands_are_gathered_for_each_gemm() {
    let [router, means] = [1, 3];
    for (preset, tensors, again) in [
        ("nvidia", 3, 1),
        ("mxfp8", 2, 1),
        ("bf16", 1, 1),
        ("quartet2", 3, 0),
    ] {
        if small_only() && preset != "nvidia" {
            continue;
        }
        let layers = 2 * tensors;
        let expected = [router + layers, means + layers];
        assert_eq!(collectives(preset, false), expected, "{preset}");
        let expected = [router + layers, means + layers + again * tensors];
        let found = collectives(preset, true);
        assert_eq!(found, expected, "{preset}, computed again");
    }
}
