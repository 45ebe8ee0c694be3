//! Work and saved tensors: nothing beyond the requested gradients.

use burn_core as burn;

use burn_core::module::Module;
use burn_core::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_nvfp4::functions::linear;
use burn_nvfp4::ops::LinearSpec;
use burn_nvfp4::{
    ExpertOffsets, Nvfp4GroupedLinearConfig, Nvfp4Linear, Nvfp4LinearConfig, Nvfp4Recipe,
};

use crate::support::counted::{
    Step, collect, is_quantized_once_until_it_changes, quantized, taken, validation_quantizes_once,
};
use crate::support::{Matrix, device, flex_only, one_by_16, skip_where_small_only, spec, values};

/// Sizes that no other test uses, which identify the work of this test.
const ROWS: usize = 21;
const D_IN: usize = 112;
const D_OUT: usize = 208;

/// Returns the work of one forward and backward with the given tracking, as `op copy` of its
/// operands.
fn work(x_grad: bool, w_grad: bool, bias_grad: bool, spec: LinearSpec) -> Vec<String> {
    let device = device().autodiff();
    let x = Matrix::gaussian(ROWS, D_IN, DType::F32, 1)
        .tensor(&device)
        .set_require_grad(x_grad);
    let w = Matrix::gaussian(D_IN, D_OUT, DType::F32, 2)
        .tensor(&device)
        .set_require_grad(w_grad);
    let bias = Tensor::<1>::zeros([D_OUT], &device).set_require_grad(bias_grad);
    taken();
    let y = linear(x.clone(), w.clone(), Some(bias.clone()), spec);
    if y.is_tracked() {
        let output = y.clone().inner();
        let grads = y.sum().backward();
        assert_eq!(x.grad(&grads).is_some(), x_grad);
        assert_eq!(w.grad(&grads).is_some(), w_grad);
        assert_eq!(bias.grad(&grads).is_some(), bias_grad);
        // Deferred work runs when it is read.
        output.into_data();
        x.grad(&grads).map(|grad| grad.into_data());
        w.grad(&grads).map(|grad| grad.into_data());
    } else {
        y.into_data();
    }
    let name = |rows: u64, cols: u64| match (rows as usize, cols as usize) {
        (ROWS, D_IN) => Some("x"),
        (D_IN, D_OUT) => Some("w"),
        (ROWS, D_OUT) => Some("y"),
        _ => None,
    };
    let mut found: Vec<String> = taken()
        .iter()
        .filter_map(|work| {
            name(work.rows, work.cols).map(|name| format!("{} {name} {}", work.op, work.usage))
        })
        .map(|text| text.trim().to_string())
        .collect();
    found.sort();
    found
}

#[test]
fn a_gradient_that_nobody_asks_for_costs_nothing() {
    skip_where_small_only!();
    let _alone = collect();
    let tiles = spec(0, 0);
    let blocks = one_by_16(tiles);

    let all = [
        "gemm w",
        "gemm x",
        "gemm y",
        "quantize w pair",
        "quantize x pair",
        "quantize y pair",
    ];
    assert_eq!(work(true, true, true, tiles), all, "everything is wanted");
    assert_eq!(
        work(true, true, false, blocks),
        all,
        "everything is wanted, without tiles"
    );

    // Frozen weight: no column-wise tensor of x or dy, no wgrad.
    let frozen = [
        "gemm x",
        "gemm y",
        "quantize w pair",
        "quantize x rowwise",
        "quantize y rowwise",
    ];
    assert_eq!(work(true, false, false, tiles), frozen);
    assert_eq!(work(true, false, true, blocks), frozen);

    // Constant input: no row-wise tensor of dy, no dgrad, and so no row-wise tensor of w.
    let constant = [
        "gemm w",
        "gemm y",
        "quantize w columnwise",
        "quantize x pair",
        "quantize y columnwise",
    ];
    assert_eq!(work(false, true, true, tiles), constant);
    assert_eq!(work(false, true, false, blocks), constant);

    // Only the bias: its gradient is a sum.
    let forward = ["gemm y", "quantize w columnwise", "quantize x rowwise"];
    assert_eq!(work(false, false, true, tiles), forward);
    assert_eq!(work(false, false, true, blocks), forward);
    assert_eq!(work(false, false, false, blocks), forward);
}

#[test]
fn a_weight_is_quantized_once_until_it_changes() {
    skip_where_small_only!();
    let _alone = collect();
    const WIDTHS: [usize; 2] = [80, 176];
    let device = device().autodiff();
    is_quantized_once_until_it_changes(
        WIDTHS,
        |recipe| {
            let config = Nvfp4LinearConfig::new(WIDTHS[0], WIDTHS[1]).with_recipe(recipe);
            config.with_layer(Some(5)).init(&device)
        },
        |layer, batch| {
            let x = Matrix::gaussian(24, WIDTHS[0], DType::F32, batch).tensor(&device);
            let y = layer.forward(x.require_grad());
            let output = values(y.clone().inner());
            let grads = y.square().sum().backward();
            Step {
                output,
                gradient: values(layer.weight.grad(&grads).unwrap()),
                grads,
            }
        },
    );
}

#[test]
fn validation_quantizes_a_weight_once() {
    skip_where_small_only!();
    let _alone = collect();
    const WIDTHS: [usize; 2] = [96, 144];
    let (plain, autodiff) = (device(), device().autodiff());
    let input = |device, batch| Matrix::gaussian(24, WIDTHS[0], DType::F32, batch).tensor(device);
    validation_quantizes_once(
        WIDTHS,
        |recipe| {
            let config = Nvfp4LinearConfig::new(WIDTHS[0], WIDTHS[1]).with_recipe(recipe);
            config.with_layer(Some(5)).init(&autodiff)
        },
        |layer, batch| values(layer.forward(input(&plain, batch))),
        |layer, batch| {
            let y = layer.forward(input(&autodiff, batch).require_grad());
            let output = values(y.clone().inner());
            let grads = y.square().sum().backward();
            Step {
                output,
                gradient: values(layer.weight.grad(&grads).unwrap()),
                grads,
            }
        },
    );
}

#[test]
fn validation_quantizes_experts_once() {
    skip_where_small_only!();
    let _alone = collect();
    const SIZES: [usize; 3] = [3, 64, 112];
    let [experts, d_in, d_out] = SIZES;
    let (plain, autodiff) = (device(), device().autodiff());
    let groups = |device: &Device| {
        let counts = Tensor::<1, Int>::from_data(TensorData::from([9i64, 0, 14]), device);
        ExpertOffsets::from_counts(counts, 24)
    };
    let input = |device, batch| Matrix::gaussian(24, d_in, DType::F32, batch).tensor(device);
    validation_quantizes_once(
        [experts * d_in, d_out],
        |recipe| {
            let config = Nvfp4GroupedLinearConfig::new(experts, d_in, d_out).with_recipe(recipe);
            config.with_layer(Some(5)).init(&autodiff)
        },
        |layer, batch| values(layer.forward(input(&plain, batch), &groups(&plain))),
        |layer, batch| {
            let x = input(&autodiff, batch).require_grad();
            let y = layer.forward(x, &groups(&autodiff));
            let output = values(y.clone().inner());
            let grads = y.square().sum().backward();
            Step {
                output,
                gradient: values(layer.weight.grad(&grads).unwrap()),
                grads,
            }
        },
    );
}

#[test]
fn validation_quantizes_weights_side_by_side_once() {
    skip_where_small_only!();
    let _alone = collect();
    validation_quantizes_once(
        Together::SIZE,
        Together::new,
        |together, batch| {
            let x = Matrix::gaussian(24, Together::D_IN, DType::F32, batch).tensor(&device());
            let layers: Vec<&Nvfp4Linear> = together.layers.iter().collect();
            values(Tensor::cat(Nvfp4Linear::forward_together(&layers, x), 1))
        },
        Together::step,
    );
}

/// All experts' weights together; one of the experts has no tokens.
#[test]
fn experts_are_quantized_once_until_they_change() {
    skip_where_small_only!();
    let _alone = collect();
    const SIZES: [usize; 3] = [3, 48, 112];
    let [experts, d_in, d_out] = SIZES;
    let device = device().autodiff();
    let counts = Tensor::<1, Int>::from_data(TensorData::from([9i64, 0, 14]), &device);
    let groups = ExpertOffsets::from_counts(counts, 24);
    is_quantized_once_until_it_changes(
        [experts * d_in, d_out],
        |recipe| {
            let config = Nvfp4GroupedLinearConfig::new(experts, d_in, d_out).with_recipe(recipe);
            config.with_layer(Some(5)).init(&device)
        },
        |layer, batch| {
            let x = Matrix::gaussian(24, d_in, DType::F32, batch).tensor(&device);
            let y = layer.forward(x.require_grad(), &groups);
            let output = values(y.clone().inner());
            let grads = y.square().sum().backward();
            Step {
                output,
                gradient: values(layer.weight.grad(&grads).unwrap()),
                grads,
            }
        },
    );
}

/// Layers that are computed together.
#[derive(Module, Debug)]
struct Together {
    layers: Vec<Nvfp4Linear>,
}

impl Together {
    const D_IN: usize = 80;
    const WIDTHS: [usize; 3] = [48, 16, 80];
    /// Size of the concatenated weights.
    const SIZE: [usize; 2] = [Self::D_IN, 48 + 16 + 80];

    /// Creates layers with numbers 5, 6, ... for `recipe`.
    fn new(recipe: Nvfp4Recipe) -> Self {
        let device = device().autodiff();
        let layer = |(number, width)| {
            let config = Nvfp4LinearConfig::new(Self::D_IN, width).with_recipe(recipe.clone());
            config.with_layer(Some(number)).init(&device)
        };
        Self {
            layers: (5..).zip(Self::WIDTHS).map(layer).collect(),
        }
    }

    fn step(&self, batch: u64) -> Step {
        let x = Matrix::gaussian(24, Self::D_IN, DType::F32, batch).tensor(&device().autodiff());
        let layers: Vec<&Nvfp4Linear> = self.layers.iter().collect();
        let y = Tensor::cat(Nvfp4Linear::forward_together(&layers, x.require_grad()), 1);
        let output = values(y.clone().inner());
        let grads = y.square().sum().backward();
        let own = layers
            .iter()
            .map(|layer| layer.weight.grad(&grads).unwrap());
        Step {
            output,
            gradient: values(Tensor::cat(own.collect(), 1)),
            grads,
        }
    }
}

#[test]
fn weights_side_by_side_are_quantized_once_until_they_change() {
    skip_where_small_only!();
    let _alone = collect();
    is_quantized_once_until_it_changes(Together::SIZE, Together::new, Together::step);
}

/// A change of any layer: the others keep their values, and the whole is another weight.
#[test]
fn weights_side_by_side_are_quantized_anew_when_one_of_them_changes() {
    skip_where_small_only!();
    let _alone = collect();
    let mut kept = Together::new(Nvfp4Recipe::new());
    let fresh = Together::new(Nvfp4Recipe::new().with_cache_weights(false));
    kept.step(0);
    for index in 0..kept.layers.len() {
        let before = kept.step(1).output;
        quantized(Together::SIZE);
        let layer = &mut kept.layers[index];
        let changed = layer.weight.clone();
        layer.weight = changed.map(|weight| (weight * 1.5).detach().require_grad());
        let found = kept.step(1);
        assert_eq!(quantized(Together::SIZE), 1, "layer {index}");
        let fresh = fresh.clone().load_record(kept.clone().into_record());
        assert_eq!(found.output, fresh.step(1).output, "layer {index}");
        assert_ne!(found.output, before, "layer {index}");
    }
    // A subset of the layers, or another order, is another weight.
    let [one, two] = [[0, 1], [1, 0]].map(|order| Together {
        layers: order.map(|index| kept.layers[index].clone()).into(),
    });
    kept.step(2);
    for part in [one, two] {
        let fresh = Together {
            layers: (part.layers.iter())
                .map(|layer| {
                    let linear = layer.clone().into_linear();
                    let recipe = layer.recipe().clone().with_cache_weights(false);
                    Nvfp4Linear::from_linear(linear, &recipe).unwrap()
                })
                .collect(),
        };
        for batch in 0..2 {
            assert_eq!(part.step(batch).output, fresh.step(batch).output);
        }
    }
}

/// The dtype of the activations is part of the cache key: operands in high precision have it.
#[test]
fn a_kept_weight_has_the_type_of_the_activations() {
    flex_only!();
    let device = device().autodiff();
    let recipe = Nvfp4Recipe::preset("fwd_nvfp4_bwd_bf16").unwrap();
    let layer = Nvfp4LinearConfig::new(32, 48)
        .with_recipe(recipe)
        .init(&device);
    let gradient_of = |layer: &Nvfp4Linear, dtype| {
        let x = Matrix::gaussian(24, 32, DType::F32, 9);
        let x = Matrix::new(x.values, 24, 32, dtype)
            .tensor(&device)
            .require_grad();
        let grads = layer.forward(x.clone()).square().sum().backward();
        crate::support::values(x.grad(&grads).unwrap())
    };
    let gradient = |dtype| gradient_of(&layer, dtype);
    let first = gradient(DType::BF16);
    let other = gradient(DType::F32);
    assert_eq!(gradient(DType::BF16), first);
    // Without a cache nothing can be mixed up.
    let uncached = Nvfp4Recipe::preset("fwd_nvfp4_bwd_bf16").unwrap();
    let uncached = uncached.with_cache_weights(false);
    let fresh = Nvfp4LinearConfig::new(32, 48).with_recipe(uncached);
    let fresh = fresh.init(&device).load_record(layer.clone().into_record());
    assert_eq!(gradient_of(&fresh, DType::F32), other);
    assert_eq!(gradient_of(&fresh, DType::BF16), first);
}

/// After the forward only this test holds the buffers of `x` and `w`: the state saved for the
/// backward is packed.
#[cfg(feature = "flex")]
#[test]
fn only_packed_operands_wait_for_the_backward() {
    use std::sync::Arc;

    use burn_flex::{Flex, FlexTensor};

    flex_only!();
    let device = burn_core::tensor::Device::flex();
    let leaf = |rows, cols| {
        let tensor = Matrix::gaussian(rows, cols, DType::F32, 3).tensor(&device);
        let primitive: FlexTensor = tensor.try_into_primitive::<Flex>().unwrap();
        let buffer = primitive.data_arc();
        (
            Tensor::<2>::from_primitive::<Flex>(primitive)
                .autodiff()
                .require_grad(),
            buffer,
        )
    };
    type Product = fn(Tensor<2>, Tensor<2>) -> Tensor<2>;
    let held = |product: Product| {
        let ((x, x_buffer), (w, w_buffer)) = (leaf(32, 64), leaf(64, 48));
        let y = product(x, w);
        assert!(y.is_tracked());
        let counts = [Arc::strong_count(&x_buffer), Arc::strong_count(&w_buffer)];
        drop(y);
        counts.map(|count| count - 1)
    };
    assert_eq!(held(|x, w| linear(x, w, None, spec(0, 0))), [0, 0]);
    assert_eq!(
        held(|x, w| x.matmul(w)),
        [1, 1],
        "what a plain product keeps"
    );
}
