//! Invalid arguments are refused before anything is queued, by name.

use burn_core::tensor::{DType, FloatDType, Tensor};
use burn_nn::LinearConfig;
use burn_nvfp4::functions::{
    try_dequantize, try_linear, try_matmul, try_quantize, try_quantize_tiles,
};
use burn_nvfp4::{
    Hadamard, Nvfp4Error, Nvfp4Linear, Nvfp4LinearConfig, Nvfp4Recipe, Nvfp4Tensor, RngState,
    Rounding, Usage,
};

use crate::support::{device, flex_only, spec};

fn zeros(rows: usize, cols: usize) -> Tensor<2> {
    Tensor::zeros([rows, cols], &device())
}

/// Asserts that the error is of the expected kind, names the argument, and shows both sides.
macro_rules! assert_error {
    ($result:expr, $variant:ident, $name:literal, $found:literal, $expected:literal) => {
        match $result {
            Err(Nvfp4Error::$variant {
                argument,
                found,
                expected,
            }) => {
                assert_eq!(argument, $name);
                assert!(found.contains($found), "found: {found}");
                assert!(expected.contains($expected), "expected: {expected}");
            }
            other => panic!("expected an error about `{}`, got {other:?}", $name),
        }
    };
}

#[test]
fn dimensions_that_are_no_multiples_of_16() {
    flex_only!();
    let run = |k, n| try_linear(zeros(4, k), zeros(k, n), None, spec(0, 0));
    assert_error!(run(24, 32), Shape, "weight", "d_in = 24", "multiple of 16");
    assert_error!(run(32, 40), Shape, "weight", "d_out = 40", "multiple of 16");
    assert_error!(
        run(0, 32),
        Shape,
        "weight",
        "d_in = 0",
        "positive multiple of 16"
    );
    let pack = |usage| try_quantize(zeros(20, 20), usage, Rounding::Nearest, None);
    assert_error!(
        pack(Usage::Rowwise),
        Shape,
        "x",
        "cols = 20",
        "multiple of 16"
    );
    assert!(pack(Usage::Columnwise).is_ok(), "a column-wise copy pads");
    assert_error!(
        try_quantize_tiles(zeros(20, 32)),
        Shape,
        "x",
        "rows = 20",
        "multiple of 16"
    );
    let recipe = Nvfp4Recipe::new();
    let layer = LinearConfig::new(32, 20).init(&device());
    let layer = Nvfp4Linear::from_linear(layer, &recipe);
    assert_error!(layer, Shape, "weight", "d_output = 20", "multiple of 16");
    let layer = Nvfp4LinearConfig::new(20, 32).try_init(&device());
    assert_error!(layer, Shape, "d_input", "20", "multiple of 16");
}

#[test]
fn shapes_that_do_not_fit_each_other() {
    flex_only!();
    let result = try_linear(zeros(4, 48), zeros(32, 32), None, spec(0, 0));
    assert_error!(result, Shape, "x", "[4, 48]", "last axis of 32");
    let bias = Tensor::<1>::zeros([16], &device());
    let result = try_linear(zeros(4, 32), zeros(32, 32), Some(bias.clone()), spec(0, 0));
    assert_error!(result, Shape, "bias", "[16]", "[32]");
    let pack = |rows, cols| {
        try_quantize(zeros(rows, cols), Usage::Rowwise, Rounding::Nearest, None).unwrap()
    };
    let result = try_matmul(pack(4, 32), pack(4, 48), None, FloatDType::F32);
    assert_error!(result, Shape, "b", "48", "32");
    let result = try_matmul(pack(4, 32), pack(32, 32), Some(bias), FloatDType::F32);
    assert_error!(result, Shape, "bias", "[16]", "[32]");
    let packed = pack(32, 32);
    let layout = packed.layout();
    let codes = packed.codes().clone().slice(0..16);
    let parts = Nvfp4Tensor::try_from_parts(
        codes,
        packed.scales().clone(),
        packed.amax().clone(),
        layout,
    );
    assert_error!(parts, Shape, "codes", "[16, 4]", "[32, 4]");
}

#[test]
fn types_that_are_not_supported() {
    flex_only!();
    let double = |rows, cols| zeros(rows, cols).cast(FloatDType::F64);
    let result = try_linear(double(4, 32), zeros(32, 32), None, spec(0, 0));
    assert_error!(result, DType, "x", "F64", "F32, BF16 or F16");
    let result = try_linear(zeros(4, 32), double(32, 32), None, spec(0, 0));
    assert_error!(result, DType, "weight", "F64", "F32, BF16 or F16");
    let result = try_quantize(double(16, 16), Usage::Rowwise, Rounding::Nearest, None);
    assert_error!(result, DType, "x", "F64", "F32, BF16 or F16");
    let packed = try_quantize(zeros(16, 16), Usage::Rowwise, Rounding::Nearest, None).unwrap();
    let result = try_dequantize(packed.clone(), FloatDType::F64);
    assert_error!(result, DType, "dtype", "F64", "F32, BF16 or F16");
    let scales = packed.scales().clone().cast(DType::I32);
    let parts = Nvfp4Tensor::try_from_parts(
        packed.codes().clone(),
        scales,
        packed.amax().clone(),
        packed.layout(),
    );
    assert_error!(parts, DType, "scales", "I32", "U8");
}

#[test]
fn transforms_that_do_not_fit() {
    flex_only!();
    let signs = Some(Hadamard::default());
    let result = try_quantize(zeros(16, 16), Usage::Rowwise, Rounding::Nearest, signs);
    assert_error!(result, Value, "hadamard", "rowwise", "none");
    let pack = |hadamard| {
        try_quantize(
            zeros(16, 16),
            Usage::Columnwise,
            Rounding::Nearest,
            hadamard,
        )
        .unwrap()
    };
    let result = try_matmul(pack(signs), pack(None), None, FloatDType::F32);
    assert_error!(result, Value, "b", "None", "Hadamard");
}

#[test]
fn layer_numbers_have_a_limit() {
    flex_only!();
    let config = Nvfp4LinearConfig::new(16, 16).with_layer(Some(RngState::LAYER_LIMIT));
    assert_error!(
        config.try_init(&device()),
        Value,
        "layer",
        "72057594037927936",
        "2^56"
    );
}

/// Two devices in one process: only a build with a CubeCL runtime has a second one. Nothing runs.
#[cfg(all(feature = "flex", feature = "cpu"))]
mod on_different_devices {
    use burn_core::module::Param;
    use burn_core::tensor::{Device, Int};
    use burn_nvfp4::experts::{try_moe_permute, try_moe_unpermute};
    use burn_nvfp4::nn::RopeCacheConfig;
    use burn_nvfp4::{
        ExpertOffsets, Nvfp4AttentionConfig, Nvfp4GroupedLinearConfig, Nvfp4MoeConfig,
        Nvfp4SwiGluConfig, Nvfp4TransformerBlockConfig,
    };

    use super::*;

    fn elsewhere<const D: usize>(shape: [usize; D]) -> Tensor<D> {
        Tensor::empty(shape, &Device::cpu())
    }

    fn param<const D: usize>(shape: [usize; D]) -> Param<Tensor<D>> {
        Param::from_tensor(elsewhere(shape))
    }

    #[test]
    fn operands() {
        flex_only!();
        let weight = elsewhere([32, 32]);
        let result = try_linear(zeros(4, 32), weight, None, spec(0, 0));
        assert_error!(result, Device, "weight", "cpu", "the device of `x`");
        let bias = elsewhere([32]);
        let result = try_linear(zeros(4, 32), zeros(32, 32), Some(bias), spec(0, 0));
        assert_error!(result, Device, "bias", "cpu", "the device of `x`");
    }

    #[test]
    fn layers_that_are_computed_together() {
        flex_only!();
        let layer = || Nvfp4LinearConfig::new(32, 16).init(&device());
        let (first, mut second) = (layer(), layer());
        second.weight = param([32, 16]);
        let run = |x| Nvfp4Linear::try_forward_together(&[&first, &second], x);
        assert_error!(run(zeros(4, 32)), Device, "layers", "number 1 on", "flex");
        let mut second = layer();
        second.bias = Some(param([16]));
        let result = Nvfp4Linear::try_forward_together(&[&first, &second], zeros(4, 32));
        assert_error!(result, Device, "bias", "cpu", "the device of `x`");
        let result = Nvfp4Linear::try_forward_together(&[&first, &layer()], elsewhere([4, 32]));
        assert_error!(result, Device, "weight", "flex", "the device of `x`");
    }

    #[test]
    fn parts_of_a_feed_forward() {
        flex_only!();
        let mut swiglu = Nvfp4SwiGluConfig::new(32, 48).init(&device());
        swiglu.down.weight = param([48, 32]);
        let result = swiglu.try_forward(zeros(4, 32));
        assert_error!(result, Device, "down.weight", "cpu", "the device of `x`");
    }

    #[test]
    fn parts_of_an_attention_and_a_block() {
        flex_only!();
        let x = || Tensor::<3>::zeros([1, 4, 32], &device());
        let positions = RopeCacheConfig::new(4, 16).init(&device());
        let mut attention = Nvfp4AttentionConfig::new(32, 2).init(&device());
        let other = RopeCacheConfig::new(4, 16).init(&Device::cpu());
        let result = attention.try_forward(x(), &other, None);
        assert_error!(result, Device, "positions", "cpu", "the device of `x`");
        attention.out.weight = param([32, 32]);
        let result = attention.try_forward(x(), &positions, None);
        assert_error!(result, Device, "out.weight", "cpu", "the device of `x`");
        let mut block = Nvfp4TransformerBlockConfig::new(32, 2, 48).init(&device());
        let result = block.try_forward(elsewhere([1, 4, 32]), &other, None);
        assert_error!(result, Device, "qkv.weight", "flex", "the device of `x`");
        block.feed_forward_norm.gamma = param([32]);
        let result = block.try_forward(x(), &positions, None);
        let name = "feed_forward_norm.gamma";
        match result {
            Err(Nvfp4Error::Device { argument, .. }) => assert_eq!(argument, name),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn experts() {
        flex_only!();
        let moe = || {
            let config = Nvfp4MoeConfig::new(32, 48, 4).with_shared_hidden(Some(16));
            config.init(&device())
        };
        let result = moe().try_forward(elsewhere([4, 32]));
        assert_error!(result, Device, "router.weight", "flex", "the device of `x`");
        let mut other = moe();
        other.down.weight = param([4, 48, 32]);
        let result = other.try_forward(zeros(4, 32));
        assert_error!(result, Device, "down.weight", "cpu", "the device of `x`");
        let mut other = moe();
        other.shared.as_mut().unwrap().gate_up.weight = param([32, 32]);
        let result = other.try_forward(zeros(4, 32));
        assert_error!(result, Device, "weight", "cpu", "the device of `x`");

        let layer = Nvfp4GroupedLinearConfig::new(2, 32, 16).init(&device());
        let counts = |device| Tensor::<1, Int>::zeros([2], device);
        let offsets = ExpertOffsets::from_counts(counts(&Device::cpu()), 4);
        let result = layer.try_forward(zeros(4, 32), &offsets);
        assert_error!(result, Device, "experts", "cpu", "the device of `x`");
        let index = |shape: [usize; 2]| Tensor::<2, Int>::zeros(shape, &device());
        let far = |len: usize| Tensor::<1, Int>::zeros([len], &Device::cpu());
        let result = try_moe_permute(zeros(4, 32), far(4), index([4, 1]));
        assert_error!(result, Device, "index", "cpu", "the device of `x`");
        let result = try_moe_unpermute(zeros(4, 32), zeros(4, 1), index([4, 1]), far(4));
        assert_error!(result, Device, "choices", "cpu", "the device of `y`");
    }
}

/// Layers of modules are checked with their input before the first of them runs.
#[test]
fn parts_that_do_not_fit_each_other() {
    use burn_core::module::Param;
    use burn_nvfp4::nn::RopeCacheConfig;
    use burn_nvfp4::{Nvfp4MoeConfig, Nvfp4SwiGluConfig, Nvfp4TransformerBlockConfig};
    flex_only!();
    let double = zeros(4, 32).cast(FloatDType::F64);
    let layer = || Nvfp4LinearConfig::new(32, 16).init(&device());
    let (first, mut second) = (layer(), layer());
    let result = Nvfp4Linear::try_forward_together(&[&first, &second], double.clone());
    assert_error!(result, DType, "x", "F64", "F32, BF16 or F16");
    let result = Nvfp4Linear::try_forward_together(&[&first, &second], zeros(4, 48));
    assert_error!(result, Shape, "x", "[4, 48]", "last axis of 32");
    second.weight = second.weight.map(|weight| weight.cast(FloatDType::BF16));
    let result = Nvfp4Linear::try_forward_together(&[&first, &second], zeros(4, 32));
    assert_error!(result, DType, "layers", "number 1", "F32");

    let weight = |shape: [usize; 2]| Param::from_tensor(zeros(shape[0], shape[1]));
    let mut swiglu = Nvfp4SwiGluConfig::new(32, 48).init(&device());
    swiglu.down.weight = weight([64, 32]);
    let result = swiglu.try_forward(zeros(4, 32));
    assert_error!(result, Shape, "down.weight", "[64, 32]", "[48, 32]");

    let config = Nvfp4MoeConfig::new(32, 48, 4);
    let mut moe = config.init(&device());
    let result = moe.try_forward(double);
    assert_error!(result, DType, "x", "F64", "F32, BF16 or F16");
    let result = moe.try_forward(zeros(0, 32));
    assert_error!(result, Shape, "x", "[0, 32]", "at least one token");
    moe.router.weight = weight([32, 5]);
    let result = moe.try_forward(zeros(4, 32));
    assert_error!(
        result,
        Shape,
        "gate_up.weight",
        "[4, 32, 96]",
        "[5, 32, 96]"
    );
    let mut moe = config.init(&device());
    moe.down.weight = Param::from_tensor(Tensor::zeros([4, 64, 32], &device()));
    let result = moe.try_forward(zeros(4, 32));
    assert_error!(result, Shape, "down.weight", "[4, 64, 32]", "[4, 48, 32]");

    let positions = RopeCacheConfig::new(4, 16).init(&device());
    let mut block = Nvfp4TransformerBlockConfig::new(32, 2, 48).init(&device());
    let result = block.try_forward(Tensor::zeros([1, 4, 48], &device()), &positions, None);
    assert_error!(result, Shape, "x", "[1, 4, 48]", "[1, 4, 32]");
    let x = || Tensor::<3>::zeros([1, 4, 32], &device());
    let result = block.try_forward(x().cast(FloatDType::F64), &positions, None);
    assert_error!(result, DType, "x", "F64", "F32, BF16 or F16");
    block.attention.out.weight = weight([32, 16]);
    let result = block.try_forward(x(), &positions, None);
    assert_error!(result, Shape, "out.weight", "[32, 16]", "[32, 32]");
    block.feed_forward = None;
    block.attention.out.weight = weight([32, 32]);
    let result = block.try_forward(x(), &positions, None);
    assert_error!(result, Value, "feed_forward", "dense: false", "exactly one");
}

/// A device that Burn can name in this build, but without kernels in this crate. Naming it opens
/// nothing: no tensor is on it, only layers whose parameters have no values yet. The values must
/// not be read, because that would open the device.
#[cfg(any(feature = "cpu", feature = "cuda"))]
#[test]
fn a_device_without_an_implementation() {
    use burn_core::{backend::DispatchDevice, tensor::Device};
    use burn_nvfp4::{
        Nvfp4AttentionConfig, Nvfp4GroupedLinearConfig, Nvfp4MoeConfig, Nvfp4SwiGluConfig,
        Nvfp4TransformerBlockConfig,
    };
    let wgpu = burn_cubecl::CubeDevice::Wgpu(Default::default());
    let wgpu = Device::new(DispatchDevice::Cube(wgpu));
    let layer = Nvfp4LinearConfig::new(16, 16).try_init(&wgpu);
    assert_error!(layer, Device, "device", "Wgpu", "device");
    let layer = Nvfp4GroupedLinearConfig::new(2, 16, 16).try_init(&wgpu);
    assert_error!(layer, Device, "device", "Wgpu", "device");
    let layer = Nvfp4SwiGluConfig::new(16, 16).try_init(&wgpu);
    assert_error!(layer, Device, "device", "Wgpu", "device");
    let layer = Nvfp4AttentionConfig::new(16, 1).try_init(&wgpu);
    assert_error!(layer, Device, "device", "Wgpu", "device");
    let layer = Nvfp4MoeConfig::new(16, 16, 2).try_init(&wgpu);
    assert_error!(layer, Device, "device", "Wgpu", "device");
    let block = Nvfp4TransformerBlockConfig::new(16, 1, 16).try_init(&wgpu);
    assert_error!(block, Device, "device", "Wgpu", "device");

    let recipe = Nvfp4Recipe::new();
    let there = || {
        let linear = LinearConfig::new(32, 32).init(&wgpu);
        Nvfp4Linear::from_linear(linear, &recipe).unwrap()
    };
    let here = Nvfp4LinearConfig::new(32, 32).init(&device());
    let result = there().try_forward(zeros(4, 32));
    assert_error!(result, Device, "weight", "Wgpu", "the device of `x`");
    let layers = [&here, &there()];
    let result = Nvfp4Linear::try_forward_together(&layers, zeros(4, 32));
    assert_error!(result, Device, "layers", "Wgpu", "number 0");
    let mut swiglu = Nvfp4SwiGluConfig::new(32, 32).init(&device());
    swiglu.down = there();
    let result = swiglu.try_forward(zeros(4, 32));
    assert_error!(result, Device, "down.weight", "Wgpu", "the device of `x`");
    let mut moe = Nvfp4MoeConfig::new(32, 48, 4).init(&device());
    moe.router = LinearConfig::new(32, 4).with_bias(false).init(&wgpu);
    let result = moe.try_forward(zeros(4, 32));
    assert_error!(result, Device, "router.weight", "Wgpu", "the device of `x`");
}

#[test]
#[should_panic(expected = "nvfp4 linear: shape of `x`: found [4, 48], expected a last axis of 32")]
fn the_plain_functions_panic_with_the_same_message() {
    burn_nvfp4::functions::linear(zeros(4, 48), zeros(32, 32), None, spec(0, 0));
}
