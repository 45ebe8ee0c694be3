//! Layers with packed weights: against dequantized weights, against the trained layers that they
//! come from, and as modules.

use burn_core::module::{Module, Param};
use burn_core::store::ModuleRecord;
use burn_core::tensor::{DType, FloatDType, Int, Tensor, TensorData};
use burn_nvfp4::nn::{Activations, Nvfp4PackedGroupedLinear, Nvfp4PackedLinear, Nvfp4Weight};
use burn_nvfp4::{
    ExpertOffsets, Nvfp4GroupedLinearConfig, Nvfp4LinearConfig, Nvfp4Recipe, Rounding, Usage,
};
use nvfp4_formats::{Amax, BlockScaling, QuantParams, reference};

use crate::support::counted::{Work, collect, taken};
use crate::support::{Matrix, activation, device, skip_where_small_only, values};

const K: usize = 64;
const N: usize = 48;

/// Returns the bytes of a weight `[n, k]`.
fn bytes(n: usize, k: usize, seed: u64) -> (Vec<u8>, Vec<u8>) {
    let source = crate::support::gaussian(n * k, seed);
    let amax = Amax::Tensor(reference::amax(&source));
    let params = QuantParams::nvfp4(Rounding::Nearest);
    let made = reference::quantize(&source, n, k, Usage::Rowwise, &amax, &params, 0).unwrap();
    (made.codes().to_vec(), made.scales().to_vec())
}

/// Returns a stack of weights with these global scales, of which the first has no amax: it is not a
/// quotient of an `f32` by 2688.
fn weight(n: usize, factors: &[f32]) -> Nvfp4Weight {
    let (codes, scales) = bytes(n * factors.len(), K, 1);
    let shape = [n * factors.len(), K];
    Nvfp4Weight::try_from_bytes(shape, codes, scales, factors.to_vec(), &device()).unwrap()
}

/// Slightly above 1/2688 times a power of two, so that the quotients of neighboring amax values
/// skip it.
fn without_amax() -> f32 {
    let bits = (0.001f32.to_bits()..).find(|bits| {
        let factor = f32::from_bits(*bits);
        let near = (factor * 2688.0).to_bits();
        (near - 2..=near + 2).all(|amax| f32::from_bits(amax) / 2688.0 != factor)
    });
    f32::from_bits(bits.unwrap())
}

fn input(rows: usize, seed: u64) -> Tensor<2> {
    Matrix::gaussian(rows, K, DType::F32, seed).tensor(&device())
}

/// Returns the largest difference relative to the largest expected value.
fn distance(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
    let pairs = found.iter().zip(expected);
    pairs.fold(0f32, |most, (a, b)| most.max((a - b).abs())) / largest
}

/// Computes `x wᵀ + bias` in `f64`.
fn product(x: &[f32], w: &[f32], k: usize, bias: &[f32]) -> Vec<f32> {
    let mut out = Vec::new();
    for x in x.chunks(k) {
        for (w, bias) in w.chunks(k).zip(bias) {
            let sum: f64 = x.iter().zip(w).map(|(a, b)| f64::from(a * b)).sum();
            out.push((sum + f64::from(*bias)) as f32);
        }
    }
    out
}

#[test]
fn high_precision_inputs_see_the_values_of_the_checkpoint() {
    let factor = without_amax();
    let weight = weight(N, &[factor]);
    let w = values(weight.try_dequantize(FloatDType::F32).unwrap());
    // Decodes the first code of a nonzero block by hand.
    let (codes, scales) = bytes(N, K, 1);
    let code = nvfp4_formats::format::e2m1::decode(codes[0] & 0xF);
    let scale = nvfp4_formats::format::e4m3::decode(scales[0]);
    assert_eq!(w[0].to_bits(), ((code * scale) * factor).to_bits());

    let bias: Vec<f32> = (0..N).map(|i| i as f32 / 8.0).collect();
    let tensor = Tensor::<1>::from_data(TensorData::new(bias.clone(), [N]), &device());
    let mode = Activations::HighPrecision;
    let layer = Nvfp4PackedLinear::try_new(weight, mode, None, Some(tensor)).unwrap();
    for rows in [1, 5, 17] {
        let x = input(rows, 2);
        let expected = product(&values(x.clone()), &w, K, &bias);
        let found = values(layer.forward(x));
        let error = distance(&found, &expected);
        let bound = crate::support::burn_matmul_error(1e-6);
        assert!(error < bound, "{rows} rows: {error}");
    }
}

#[test]
fn static_inputs_are_quantized_under_the_scale_of_the_checkpoint() {
    let global = without_amax();
    let weight = weight(N, &[0.01]);
    let w = values(weight.try_dequantize(FloatDType::F32).unwrap());
    let scale = Tensor::<1>::from_data([global], &device());
    let layer = Nvfp4PackedLinear::try_new(weight, Activations::Static, Some(scale), None).unwrap();
    // One value out of the range of the scale.
    let mut x = crate::support::gaussian(3 * K, 5);
    x[7] = 1e4;
    let params = QuantParams {
        scaling: BlockScaling::Static,
        ..QuantParams::nvfp4(Rounding::Nearest)
    };
    let amax = Amax::Tensor(global);
    let quantized = reference::quantize(&x, 3, K, Usage::Rowwise, &amax, &params, 0).unwrap();
    let quantized = reference::dequantize(&quantized);
    assert_eq!(quantized[7], 6.0 * 448.0 * global, "it saturates");
    let expected = product(&quantized, &w, K, &[0.0; N]);
    let x = Tensor::<2>::from_data(TensorData::new(x, [3, K]), &device());
    let error = distance(&values(layer.forward(x)), &expected);
    assert!(error < 1e-6, "{error}");
}

/// The bits equal those under `valid()`, for recipes with both kinds of scales and of activations.
#[test]
fn trained_layers_compute_as_before() {
    for preset in ["nvidia", "nvidia_4over6", "weight_only_qat"] {
        let recipe = Nvfp4Recipe::preset(preset).unwrap();
        let config = Nvfp4LinearConfig::new(K, N).with_recipe(recipe.clone());
        let layer = config.init(&device());
        let x = input(6, 3);
        let found = values(layer.try_to_packed().unwrap().forward(x.clone()));
        let expected = values(layer.forward(x.clone()));
        assert!(
            found == expected,
            "{preset}: {}",
            distance(&found, &expected)
        );

        let config = Nvfp4GroupedLinearConfig::new(3, K, N).with_recipe(recipe);
        let layer = config.init(&device());
        let counts = Tensor::<1, Int>::from_data([1i32, 0, 4], &device());
        let experts = ExpertOffsets::from_counts(counts, 6);
        let found = values(layer.try_to_packed().unwrap().forward(x.clone(), &experts));
        let expected = values(layer.forward(x, &experts));
        assert!(found == expected, "{preset}, experts");
    }
    let layer = Nvfp4LinearConfig::new(K, N).with_recipe(Nvfp4Recipe::bf16());
    let error = layer.init(&device()).try_to_packed().unwrap_err();
    assert!(error.to_string().contains("recipe"), "{error}");
}

#[test]
fn experts_have_scales_of_their_own() {
    let factors = [0.01, 0.5, 0.125];
    let scales = [0.002, 0.004, 0.008];
    let counts = [2usize, 0, 3];
    for activations in [
        Activations::HighPrecision,
        Activations::DYNAMIC,
        Activations::Static,
    ] {
        let scale = |scales: &[f32]| {
            let data = TensorData::new(scales.to_vec(), [scales.len()]);
            let is_static = activations == Activations::Static;
            is_static.then(|| Tensor::<1>::from_data(data, &device()))
        };
        let stack = weight(N, &factors);
        let all =
            Nvfp4PackedGroupedLinear::try_new(stack.clone(), activations, scale(&scales), None);
        let counts_on_device = Tensor::<1, Int>::from_data([2i32, 0, 3], &device());
        let experts = ExpertOffsets::from_counts(counts_on_device, 5);
        let x = input(5, 4);
        let found = values(all.unwrap().forward(x.clone(), &experts));
        let mut first = 0;
        for (expert, count) in counts
            .into_iter()
            .enumerate()
            .filter(|(_, count)| *count > 0)
        {
            let one = Nvfp4Weight::try_from_parts(
                stack.codes.val().narrow(0, expert * N, N),
                stack.scales.val().narrow(0, expert * N, N),
                stack.global.val().narrow(0, expert, 1),
            );
            let scale = scale(&scales[expert..=expert]);
            let layer = Nvfp4PackedLinear::try_new(one.unwrap(), activations, scale, None);
            let expected = values(layer.unwrap().forward(x.clone().narrow(0, first, count)));
            let error = distance(&found[first * N..(first + count) * N], &expected);
            let bound = crate::support::burn_matmul_error(1e-6);
            assert!(error < bound, "{activations:?}, expert {expert}: {error}");
            first += count;
        }
    }
}

/// Input gradients are those of a high-precision layer with the values of the packed weight, except
/// for the rounding to the dtype of the input, for any activation quantization.
#[test]
fn inputs_have_the_gradients_of_the_values() {
    let autodiff = device().autodiff();
    let (codes, scales) = bytes(3 * N, K, 1);
    let packed = |matrices: usize, factors: Vec<f32>| {
        let rows = matrices * N;
        let (codes, scales) = (&codes[..rows * K / 2], &scales[..rows * K / 16]);
        let (codes, scales) = (codes.to_vec(), scales.to_vec());
        Nvfp4Weight::try_from_bytes([rows, K], codes, scales, factors, &autodiff).unwrap()
    };
    let factors = vec![without_amax(), 0.5, 0.125];
    let (one, stack) = (packed(1, vec![without_amax()]), packed(3, factors));
    // The second expert has no token, and the last two tokens no expert.
    let counts = Tensor::<1, Int>::from_data([3i32, 0, 4], &autodiff);
    let experts = ExpertOffsets::from_counts(counts, 9);
    let ones = |count| Tensor::<1>::ones([count], &autodiff).mul_scalar(0.002);
    for dtype in [DType::F32, activation()] {
        let tensor = |cols, seed| Matrix::gaussian(9, cols, dtype, seed).tensor(&autodiff);
        let (x, dy) = (tensor(K, 2).require_grad(), tensor(N, 3));
        let dx = |y: Tensor<2>| {
            let grads = (y * dy.clone()).sum_dim(1).sum().backward();
            let dx = x.grad(&grads).expect("the input is tracked");
            assert_eq!(dx.dtype(), dtype);
            values(dx)
        };
        let recipe = Nvfp4Recipe::bf16();
        let mut high = Nvfp4LinearConfig::new(K, N)
            .with_bias(false)
            .with_recipe(recipe.clone())
            .init(&autodiff);
        let w = one.try_dequantize(dtype.into()).unwrap().transpose();
        high.weight = Param::from_tensor(w);
        let mut grouped = Nvfp4GroupedLinearConfig::new(3, K, N)
            .with_bias(false)
            .with_recipe(recipe)
            .init(&autodiff);
        let w: Tensor<3> = stack
            .try_dequantize(dtype.into())
            .unwrap()
            .reshape([3, N, K]);
        grouped.weight = Param::from_tensor(w.swap_dims(1, 2));
        let expected = dx(high.forward(x.clone()));
        let of_experts = dx(grouped.forward(x.clone(), &experts));
        assert!(of_experts[7 * K..].iter().all(|value| *value == 0.0));
        // One rounding to the dtype: sums may have another order.
        let bound = match dtype {
            DType::F32 => crate::support::burn_matmul_error(1e-6),
            _ => 1.0 / 128.0,
        };
        for (activations, is_static) in [
            (Activations::HighPrecision, false),
            (Activations::DYNAMIC, false),
            (Activations::Static, true),
        ] {
            let bias = Some(Tensor::<1>::ones([N], &autodiff));
            let scale = is_static.then(|| ones(1));
            let layer = Nvfp4PackedLinear::try_new(one.clone(), activations, scale, bias).unwrap();
            let error = distance(&dx(layer.forward(x.clone())), &expected);
            assert!(error <= bound, "{dtype:?}, {activations:?}: {error}");
            let scales = is_static.then(|| ones(3));
            let layer = Nvfp4PackedGroupedLinear::try_new(stack.clone(), activations, scales, None);
            let found = dx(layer.unwrap().forward(x.clone(), &experts));
            let error = distance(&found, &of_experts);
            assert!(
                error <= bound,
                "{dtype:?}, {activations:?}, experts: {error}"
            );
        }
    }
}

/// Input gradients multiply codes and block scales, and scale the sums by the global scale in
/// `f32`: an output gradient with one element in a row gives that element times a row of the
/// weight, rounded once. No weight is dequantized for them.
#[test]
fn gradients_are_scaled_once() {
    skip_where_small_only!();
    // Sizes that no other test uses.
    const D_IN: usize = 96;
    const D_OUT: usize = 40;
    let _alone = collect();
    let autodiff = device().autodiff();
    let (codes, scales) = bytes(2 * D_OUT, D_IN, 21);
    // Exact in `f32`: ten bits, times six of code and scale and eight of the gradient.
    let factors = [33.0 / 1024.0, 519.0 / 65536.0];
    let exact: Vec<f32> = {
        let elements = codes.iter().flat_map(|byte| [byte & 0xF, byte >> 4]);
        let elements = elements.map(nvfp4_formats::format::e2m1::decode);
        let scales = scales
            .iter()
            .map(|&byte| nvfp4_formats::format::e4m3::decode(byte));
        let scales: Vec<f32> = scales.collect();
        elements
            .enumerate()
            .map(|(i, x)| x * scales[i / 16])
            .collect()
    };
    let stack = Nvfp4Weight::try_from_bytes(
        [2 * D_OUT, D_IN],
        codes.clone(),
        scales.clone(),
        factors.to_vec(),
        &autodiff,
    );
    let one = Nvfp4Weight::try_from_bytes(
        [D_OUT, D_IN],
        codes[..D_OUT * D_IN / 2].to_vec(),
        scales[..D_OUT * D_IN / 16].to_vec(),
        factors[..1].to_vec(),
        &autodiff,
    );
    let mode = Activations::HighPrecision;
    let layer = Nvfp4PackedLinear::try_new(one.unwrap(), mode, None, None).unwrap();
    let experts = Nvfp4PackedGroupedLinear::try_new(stack.unwrap(), mode, None, None).unwrap();
    let counts = Tensor::<1, Int>::from_data([D_OUT as i32, D_OUT as i32], &autodiff);
    let groups = ExpertOffsets::from_counts(counts, 2 * D_OUT);
    // 167/128 on the diagonals of the experts' gradients.
    let gradient = 167.0 / 128.0;
    let dx = |rows: usize, forward: &dyn Fn(Tensor<2>) -> Tensor<2>| {
        let dy: Vec<f32> = (0..rows * D_OUT)
            .map(|i| match i / D_OUT % D_OUT == i % D_OUT {
                true => gradient,
                false => 0.0,
            })
            .collect();
        let dy = Matrix::new(dy, rows, D_OUT, DType::BF16).tensor(&autodiff);
        let x = Matrix::gaussian(rows, D_IN, DType::BF16, 2).tensor(&autodiff);
        let x = x.require_grad();
        taken();
        let grads = (forward(x.clone()) * dy).sum().backward();
        let dx = values(x.grad(&grads).expect("the input is tracked"));
        let is_own = |work: &Work| work.op == "dequantize" && work.cols == D_IN as u64;
        assert!(!taken().iter().any(is_own));
        dx
    };
    let rounded = |x: f32| half::bf16::from_f32(x).to_f32();
    let expected: Vec<f32> = (exact.iter().enumerate())
        .map(|(i, x)| rounded(gradient * x * factors[i / (D_OUT * D_IN)]))
        .collect();
    let found = dx(2 * D_OUT, &|x| experts.forward(x, &groups));
    assert_eq!(found, expected, "experts");
    let found = dx(D_OUT, &|x| layer.forward(x));
    assert_eq!(found, expected[..D_OUT * D_IN]);
    // A weight that is rounded with its global scale gives other values.
    let twice = exact
        .iter()
        .map(|x| rounded(gradient * rounded(x * factors[0])));
    assert!(twice.zip(&found).any(|(twice, found)| twice != *found));
}

/// Without autodiff the outputs are the same, and parameters have no gradients.
#[test]
fn packed_parameters_are_frozen() {
    let autodiff = device().autodiff();
    let (codes, scales) = bytes(N, K, 1);
    let weight = Nvfp4Weight::try_from_bytes([N, K], codes, scales, vec![0.25], &autodiff).unwrap();
    let bias = Some(Tensor::<1>::ones([N], &autodiff));
    let layer = Nvfp4PackedLinear::try_new(weight, Activations::HighPrecision, None, bias).unwrap();
    let x = Matrix::gaussian(5, K, DType::F32, 7).tensor(&autodiff);
    let tracked = layer.forward(x.clone().require_grad());
    let untracked = layer.forward(x.clone());
    let inner = layer.valid().forward(x.inner());
    let expected = values(inner);
    assert!(values(tracked.inner()) == expected && values(untracked.inner()) == expected);
    assert!(!layer.bias.unwrap().val().is_require_grad());
}

#[test]
fn records_hold_the_bytes() {
    let of = |seed, factor: f32| {
        let (codes, scales) = bytes(N, K, seed);
        let weight =
            Nvfp4Weight::try_from_bytes([N, K], codes, scales, vec![factor], &device()).unwrap();
        Nvfp4PackedLinear::try_new(weight, Activations::HighPrecision, None, None).unwrap()
    };
    let (source, other) = (of(1, 0.25), of(9, 4.0));
    assert_eq!(source.weight.bytes(), N * K / 2 + N * K / 16 + 4);
    let x = input(2, 6);
    let expected = values(source.forward(x.clone()));
    assert!(values(other.forward(x.clone())) != expected);
    let record = source.clone().into_record().into_bytes().unwrap();
    let record = ModuleRecord::from_bytes(record).unwrap();
    assert_eq!(record.len(), 3, "codes, scales and the global scale");
    let loaded = other.load_record(record);
    assert!(values(loaded.forward(x.clone())) == expected);
    let moved = source.to_device(&device());
    assert_eq!(moved.weight.codes.val().dtype(), DType::U32);
    assert!(values(moved.forward(x)) == expected);
}

#[test]
fn what_does_not_fit_is_named() {
    let refused = |result: Result<Nvfp4PackedLinear, burn_nvfp4::Nvfp4Error>, says: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    };
    let ones = |n: usize| Some(Tensor::<1>::ones([n], &device()));
    let made = |activations, input, bias| {
        Nvfp4PackedLinear::try_new(weight(N, &[1.0]), activations, input, bias)
    };
    refused(made(Activations::Static, None, None), "input");
    refused(made(Activations::Static, ones(2), None), "input");
    refused(made(Activations::HighPrecision, ones(1), None), "input");
    refused(made(Activations::DYNAMIC, None, ones(N + 1)), "bias");
    let stack = weight(N, &[1.0, 2.0]);
    refused(
        Nvfp4PackedLinear::try_new(stack, Activations::DYNAMIC, None, None),
        "weight",
    );
    let layer = made(Activations::DYNAMIC, None, None).unwrap();
    let error = layer.try_forward(Tensor::<2>::ones([1, K + 16], &device()));
    assert!(error.unwrap_err().to_string().contains("`x`"));
    let (codes, scales) = bytes(N, K, 1);
    let device = device();
    let error = Nvfp4Weight::try_from_bytes(
        [N, 2 * K],
        codes.clone(),
        scales.clone(),
        vec![1.0],
        &device,
    );
    assert!(error.unwrap_err().to_string().contains("codes"));
    let error = Nvfp4Weight::try_from_bytes([N, K], codes, scales, vec![1.0; 5], &device);
    assert!(error.unwrap_err().to_string().contains("global"));
}
