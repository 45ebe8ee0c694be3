//! Column- and row-parallel layers, compared like in TransformerEngine's `run_numerics_exact.py`:
//! with and without sequence parallelism, outputs and gradients, bit for bit.

use std::time::Duration;

use burn_core::module::Module;
use burn_core::tensor::{DType, Tensor};
use burn_nvfp4::nn::tensor_parallel::{ColumnParallelLinear, RowParallelLinear, TensorParallel};
use burn_nvfp4::parallel::ProcessGroup;
use burn_nvfp4::{Nvfp4Error, Nvfp4Linear, Nvfp4LinearConfig, Nvfp4Recipe};

use super::super::on_ranks;
use super::{bits, distance, own};
use crate::support::{Matrix, activation, device, small_only};

/// Tokens, input and output features.
type Shape = [usize; 3];

/// Shapes of `run_numerics_exact.py`, scaled to a CPU. Shards of four ranks have blocks of 16, or
/// one transform of 128 in the last shape.
const SHAPES: [Shape; 6] = [
    [64, 128, 128],
    [64, 128, 192],
    [128, 192, 64],
    [128, 64, 256],
    [256, 128, 128],
    [256, 256, 256],
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Column,
    Row,
}

const KINDS: [Kind; 2] = [Kind::Column, Kind::Row];

/// An unsharded layer, with its input and output gradient.
struct Case {
    recipe: Nvfp4Recipe,
    shape: Shape,
    bias: bool,
}

/// Output, and gradients of input, weight and bias.
struct Pass {
    y: Tensor<2>,
    dx: Tensor<2>,
    dw: Tensor<2>,
    db: Option<Tensor<1>>,
}

impl Case {
    fn new(recipe: &Nvfp4Recipe, shape: Shape) -> Self {
        Self {
            recipe: recipe.clone(),
            shape,
            bias: true,
        }
    }

    fn layer(&self) -> Nvfp4Linear {
        let [_, d_in, d_out] = self.shape;
        let device = device().autodiff();
        let mut layer = Nvfp4LinearConfig::new(d_in, d_out)
            .with_bias(self.bias)
            .with_recipe(self.recipe.clone())
            .with_layer(Some(11))
            .init(&device);
        // The largest element is in the last row and column: on the last rank.
        let mut weight = Matrix::gaussian(d_in, d_out, DType::F32, 5);
        *weight.values.last_mut().unwrap() = 9.0;
        let weight: Tensor<2> = weight.tensor(&device);
        layer.weight = layer.weight.map(|_| weight.require_grad());
        let bias: Tensor<2> = Matrix::gaussian(1, d_out, DType::F32, 6).tensor(&device);
        layer.bias = (layer.bias).map(|old| old.map(|_| bias.reshape([d_out]).require_grad()));
        layer
    }

    /// Returns the input, whose largest element is in the first row and column, and the output
    /// gradient, whose largest element is in the last.
    fn tensors(&self) -> [Tensor<2>; 2] {
        let [tokens, d_in, d_out] = self.shape;
        let device = device().autodiff();
        let mut x = Matrix::gaussian(tokens, d_in, activation(), 7);
        x.values[0] = 11.0;
        let mut dy = Matrix::gaussian(tokens, d_out, activation(), 8);
        *dy.values.last_mut().unwrap() = 13.0;
        [x.tensor(&device), dy.tensor(&device)]
    }

    fn one_device(&self) -> Pass {
        let [x, dy] = self.tensors();
        let layer = self.layer();
        pass(x, dy, &layer, |x| layer.forward(x))
    }

    /// Runs the pass of a rank on its shards of the tensors.
    fn of_rank(&self, kind: Kind, parallel: &TensorParallel) -> Pass {
        let group = parallel.group();
        let (rank, size) = (group.rank(), group.size());
        let by_tokens = parallel.is_sequence_parallel();
        let tokens = |x: Tensor<2>| match by_tokens {
            true => own(x, 0, rank, size),
            false => x,
        };
        let features = |x: Tensor<2>| own(x, 1, rank, size);
        let [x, dy] = self.tensors();
        match kind {
            Kind::Column => {
                let layer = ColumnParallelLinear::from_linear(self.layer(), parallel).unwrap();
                pass(tokens(x), features(dy), &layer.linear, |x| layer.forward(x))
            }
            Kind::Row => {
                let layer = RowParallelLinear::from_linear(self.layer(), parallel).unwrap();
                pass(features(x), tokens(dy), &layer.linear, |x| layer.forward(x))
            }
        }
    }
}

fn pass(
    x: Tensor<2>,
    dy: Tensor<2>,
    layer: &Nvfp4Linear,
    forward: impl Fn(Tensor<2>) -> Tensor<2>,
) -> Pass {
    let x = x.detach().require_grad();
    let y = forward(x.clone());
    let gradients = (y.clone() * dy).sum().backward();
    Pass {
        y: y.inner(),
        dx: x.grad(&gradients).unwrap(),
        dw: layer.weight.grad(&gradients).unwrap(),
        db: layer
            .bias
            .as_ref()
            .map(|bias| bias.grad(&gradients).unwrap()),
    }
}

/// Returns the part of the unsharded pass that a rank's pass should equal.
fn expected(kind: Kind, whole: &Pass, rank: usize, size: usize, by_tokens: bool) -> Pass {
    let tokens = |x: &Tensor<2>| match by_tokens {
        true => own(x.clone(), 0, rank, size),
        false => x.clone(),
    };
    let features = |x: &Tensor<2>| own(x.clone(), 1, rank, size);
    match kind {
        Kind::Column => Pass {
            y: features(&whole.y),
            dx: tokens(&whole.dx),
            dw: features(&whole.dw),
            db: whole.db.clone().map(|db| own(db, 0, rank, size)),
        },
        Kind::Row => Pass {
            y: tokens(&whole.y),
            dx: features(&whole.dx),
            dw: own(whole.dw.clone(), 0, rank, size),
            db: whole.db.clone(),
        },
    }
}

/// Returns the names of the tensors of a pass whose bits differ from the expected ones.
fn different(found: &Pass, expected: &Pass) -> Vec<&'static str> {
    let matrix = |name, found: &Tensor<2>, expected: &Tensor<2>| {
        assert_eq!(found.dims(), expected.dims(), "{name}");
        (bits(found.clone()) != bits(expected.clone())).then_some(name)
    };
    let bias = match (&found.db, &expected.db) {
        (Some(found), Some(expected)) => bits(found.clone()) != bits(expected.clone()),
        _ => false,
    };
    let found = [
        matrix("y", &found.y, &expected.y),
        matrix("dx", &found.dx, &expected.dx),
        matrix("dw", &found.dw, &expected.dw),
        bias.then_some("db"),
    ];
    found.into_iter().flatten().collect()
}

/// Returns the differences on each rank.
fn compare(
    case: &Case,
    kind: Kind,
    size: usize,
    by_tokens: bool,
    set: impl Fn(TensorParallel) -> TensorParallel + Sync,
) -> Vec<Vec<&'static str>> {
    on_ranks(size, |group: ProcessGroup| {
        let rank = group.rank();
        let parallel = TensorParallel::new(group).with_sequence_parallel(by_tokens);
        let parallel = set(parallel);
        let whole = case.one_device();
        let expected = expected(kind, &whole, rank, size, by_tokens);
        different(&case.of_rank(kind, &parallel), &expected)
    })
}

/// Rounding to nearest, 16x16 blocks of weights, and the transform.
fn nearest() -> Nvfp4Recipe {
    let recipe = Nvfp4Recipe::preset("nvidia").unwrap();
    recipe.with_stochastic_rounding(false)
}

fn shapes() -> &'static [Shape] {
    if small_only() { &SHAPES[..1] } else { &SHAPES }
}

/// Checks that nothing differs in deterministic mode, and otherwise only sums over ranks.
fn check(recipe: &Nvfp4Recipe, shapes: &[Shape], sizes: &[usize]) {
    for shape in shapes {
        for &size in &sizes[..if small_only() { 1 } else { sizes.len() }] {
            for kind in KINDS {
                for by_tokens in [false, true] {
                    let case = Case::new(recipe, *shape);
                    let what = format!("{kind:?} {shape:?}, {size} ranks, by tokens: {by_tokens}");
                    let exact = |parallel: TensorParallel| parallel.with_deterministic(true);
                    for different in compare(&case, kind, size, by_tokens, exact) {
                        assert_eq!(different, [""; 0], "deterministic {what}");
                    }
                    let reordered: &[&str] = match (kind, by_tokens) {
                        (Kind::Column, _) => &["dx"],
                        (Kind::Row, false) => &["y"],
                        (Kind::Row, true) => &["y", "db"],
                    };
                    for different in compare(&case, kind, size, by_tokens, |parallel| parallel) {
                        let sums_alone = different.iter().all(|name| reordered.contains(name));
                        assert!(sums_alone, "{what}: {different:?} differ");
                    }
                }
            }
        }
    }
}

#[test]
fn shards_have_the_bits_of_one_device() {
    check(&nearest(), shapes(), &[2, 4]);
}

#[test]
fn shards_draw_the_random_bits_of_one_device() {
    let recipe = Nvfp4Recipe::preset("nvidia").unwrap();
    let draws = recipe.clone().with_stochastic_rounding(true);
    assert_eq!(recipe, draws);
    check(&recipe, &shapes()[..1], &[2, 4]);
}

/// Weights in 1x16 blocks, without the transform.
#[test]
fn shards_of_other_blocks() {
    let recipe = nearest().with_weight_2d(false).with_rht(false);
    check(&recipe, &shapes()[..1], &[2, 4]);
}

/// Tests a preset: the shards of two ranks have the blocks of MX formats and the transforms of
/// MS-EDEN.
fn preset(name: &str) {
    if !small_only() {
        check(&Nvfp4Recipe::preset(name).unwrap(), &SHAPES[5..], &[2]);
    }
}

macro_rules! presets {
    ($($preset:ident),*) => {
        mod shards_by_preset {
            $(#[test]
            fn $preset() {
                super::preset(stringify!($preset));
            })*

            #[test]
            fn every_preset_is_here() {
                let here = [$(stringify!($preset)),*];
                assert!(super::Nvfp4Recipe::preset_names().eq(here));
            }
        }
    };
}

presets!(
    nvidia,
    nvidia_4over6,
    nvidia_headroom,
    quartet2,
    per_token,
    fwd_nvfp4_bwd_mxfp8,
    fwd_nvfp4_bwd_mxfp8_dequantized,
    fwd_nvfp4_bwd_bf16,
    weight_only_qat,
    mxfp8,
    mxfp4,
    bf16
);

/// Sums over ranks equal those of one device up to the rounding of their terms.
#[test]
fn sums_over_ranks_are_near() {
    let case = Case::new(&nearest(), SHAPES[0]);
    for kind in KINDS {
        for by_tokens in [false, true] {
            let found = on_ranks(2, |group| {
                let rank = group.rank();
                let parallel = TensorParallel::new(group).with_sequence_parallel(by_tokens);
                let whole = case.one_device();
                let expected = expected(kind, &whole, rank, 2, by_tokens);
                let found = case.of_rank(kind, &parallel);
                let bias = |pass: &Pass| pass.db.clone().unwrap();
                [
                    distance(found.y.clone(), expected.y.clone()),
                    distance(found.dx.clone(), expected.dx.clone()),
                    distance(bias(&found), bias(&expected)),
                ]
            });
            for distance in found.into_iter().flatten() {
                // Two terms and their sum, each rounded to 8 bits.
                assert!(distance < 0.01, "{kind:?}: {distance}");
            }
        }
    }
}

/// Every rank has all features if requested, and gives its share of the gradient.
#[test]
fn outputs_are_gathered_and_inputs_are_split() {
    let case = Case::new(&nearest(), SHAPES[0]);
    let found = on_ranks(2, |group| {
        let (rank, parallel) = (group.rank(), TensorParallel::new(group));
        let parallel = parallel.with_deterministic(true);
        let whole = case.one_device();
        let [x, dy] = case.tensors();
        let column = ColumnParallelLinear::from_linear(case.layer(), &parallel).unwrap();
        let column = column.with_gather_output(true);
        let found = pass(x.clone(), dy.clone(), &column.linear, |x| column.forward(x));
        let expected_column = Pass {
            y: whole.y.clone(),
            dx: whole.dx.clone(),
            ..expected(Kind::Column, &whole, rank, 2, false)
        };
        let first = different(&found, &expected_column);
        let row = RowParallelLinear::from_linear(case.layer(), &parallel).unwrap();
        let row = row.with_input_is_parallel(false);
        let found = pass(x, dy, &row.linear, |x| row.forward(x));
        let expected_row = Pass {
            dx: whole.dx.clone(),
            ..expected(Kind::Row, &whole, rank, 2, false)
        };
        (first, different(&found, &expected_row))
    });
    for different in found {
        assert_eq!(different, (vec![], vec![]));
    }
}

/// Under `valid()`, where nothing requires a gradient.
#[test]
fn inference_has_the_bits_of_one_device() {
    let case = Case::new(&nearest(), SHAPES[0]);
    for by_tokens in [false, true] {
        let found = on_ranks(2, |group| {
            let rank = group.rank();
            let parallel = TensorParallel::new(group)
                .with_sequence_parallel(by_tokens)
                .with_deterministic(true);
            let [x, _] = case.tensors();
            let x = x.inner();
            let whole = case.layer().valid().forward(x.clone());
            let column = ColumnParallelLinear::from_linear(case.layer(), &parallel).unwrap();
            let row = RowParallelLinear::from_linear(case.layer(), &parallel).unwrap();
            let tokens = |x: Tensor<2>| match by_tokens {
                true => own(x, 0, rank, 2),
                false => x,
            };
            let y = column.valid().forward(tokens(x.clone()));
            assert_eq!(bits(y), bits(own(whole.clone(), 1, rank, 2)));
            let y = row.valid().forward(own(x, 1, rank, 2));
            bits(y) == bits(tokens(whole))
        });
        assert_eq!(found, [true; 2]);
    }
}

/// The shards of all ranks form the layer again, with its ids; also for several concatenated
/// layers.
#[test]
fn parts_make_the_layer_again() {
    let case = Case::new(&nearest(), [16, 128, 192]);
    let found = on_ranks(2, |group| {
        let (rank, parallel) = (group.rank(), TensorParallel::new(group));
        let layer = case.layer();
        let (id, weight) = (layer.weight.id, bits(layer.weight.val()));
        let bias = bits(layer.bias.as_ref().unwrap().val());
        let widths = [128, 32, 32];
        let column = ColumnParallelLinear::from_segments(layer, &widths, &parallel).unwrap();
        let part = column.linear.weight.val();
        let whole = case.layer().weight.val();
        let first = own(whole.clone().narrow(1, 0, 128), 1, rank, 2);
        let last = own(whole.narrow(1, 160, 32), 1, rank, 2);
        assert_eq!(bits(part.clone().narrow(1, 0, 64)), bits(first));
        assert_eq!(bits(part.narrow(1, 80, 16)), bits(last));
        let again = column.into_linear();
        assert_eq!(again.weight.id, id);
        assert_eq!(bits(again.bias.as_ref().unwrap().val()), bias);
        let row = RowParallelLinear::from_linear(again, &parallel).unwrap();
        assert_eq!(row.linear.weight.dims(), [64, 192]);
        bits(row.into_linear().weight.val()) == weight
    });
    assert_eq!(found, [true; 2]);
}

/// Segments have the bits of one device too: the positions of their random bits are not
/// consecutive.
#[test]
fn segments_have_the_bits_of_one_device() {
    let recipe = Nvfp4Recipe::preset("nvidia").unwrap();
    let case = Case::new(&recipe, [64, 64, 192]);
    let widths = [128, 32, 32];
    for by_tokens in [false, true] {
        let found = on_ranks(2, |group| {
            let rank = group.rank();
            let parallel = TensorParallel::new(group)
                .with_sequence_parallel(by_tokens)
                .with_deterministic(true);
            let whole = case.one_device();
            let segments = |x: Tensor<2>| {
                let mut first = 0;
                let parts = widths.map(|width| {
                    first += width;
                    own(x.clone().narrow(1, first - width, width), 1, rank, 2)
                });
                Tensor::cat(parts.to_vec(), 1)
            };
            let tokens = |x: Tensor<2>| match by_tokens {
                true => own(x, 0, rank, 2),
                false => x,
            };
            let [x, dy] = case.tensors();
            let layer = ColumnParallelLinear::from_segments(case.layer(), &widths, &parallel);
            let layer = layer.unwrap();
            let forward = |x| layer.forward(x);
            let found = pass(tokens(x), segments(dy), &layer.linear, forward);
            let expected = Pass {
                y: segments(whole.y),
                dx: tokens(whole.dx),
                dw: segments(whole.dw),
                db: None,
            };
            different(&found, &expected)
        });
        for different in found {
            assert_eq!(different, [""; 0]);
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let groups = ProcessGroup::loopback(2, Duration::ZERO);
    let parallel = TensorParallel::new(groups[0].clone());
    let layer = |d_in, d_out| Case::new(&nearest(), [16, d_in, d_out]).layer();
    let refused = |error: Nvfp4Error, expected: &str| {
        let error = error.to_string();
        assert!(error.contains(expected), "{error}");
    };
    let error = ColumnParallelLinear::from_linear(layer(32, 48), &parallel).unwrap_err();
    refused(error, "found a d_output of 48, expected a multiple of 32");
    let error = RowParallelLinear::from_linear(layer(48, 32), &parallel).unwrap_err();
    refused(error, "found a d_input of 48, expected a multiple of 32");
    let error = ColumnParallelLinear::from_segments(layer(32, 64), &[32], &parallel).unwrap_err();
    refused(error, "found [32], 32 in all, expected d_output, 64");

    let by_tokens = parallel.clone().with_sequence_parallel(true);
    let x = |shape| Tensor::<2>::zeros(shape, (&device().autodiff(), activation()));
    let column = ColumnParallelLinear::from_linear(layer(32, 64), &by_tokens).unwrap();
    let error = column.try_forward(x([24, 32])).unwrap_err();
    refused(
        error,
        "found 24 tokens on each of 2 ranks, expected a multiple of 16",
    );
    let error = column.try_forward(x([24, 32]).reshape([768])).unwrap_err();
    refused(error, "a last axis of 32");
    let row = RowParallelLinear::from_linear(layer(64, 32), &by_tokens).unwrap();
    let error = row.try_forward(x([33, 32])).unwrap_err();
    refused(
        error,
        "found an axis of 33, expected a multiple of the 2 ranks",
    );
    let row = RowParallelLinear::from_linear(layer(64, 32), &parallel).unwrap();
    let row = row.with_input_is_parallel(false);
    let error = row.try_forward(x([16, 32])).unwrap_err();
    refused(error, "found a last axis of 32, expected 64");

    let recipe = Nvfp4Recipe::preset("quartet2").unwrap();
    let layer = Case::new(&recipe, [16, 128, 128]).layer();
    let column = ColumnParallelLinear::from_linear(layer, &parallel).unwrap();
    let error = column.try_forward(x([16, 128])).unwrap_err();
    refused(
        error,
        "a part of 64 features on each of 2 ranks, expected a multiple of 128",
    );
}
