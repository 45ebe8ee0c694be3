//! Bad arguments are refused before anything is queued, by name.

use burn_core::tensor::{DType, FloatDType, Tensor};
use burn_nn::LinearConfig;
use burn_nvfp4::functions::{
    try_dequantize, try_linear, try_matmul, try_quantize, try_quantize_tiles,
};
use burn_nvfp4::{
    Hadamard, LayerRandomness, Nvfp4Error, Nvfp4Linear, Nvfp4LinearConfig, Nvfp4Recipe,
    Nvfp4Tensor, PackedAxis, Rounding,
};

use crate::common::{device, flex_only, spec};

fn zeros(rows: usize, cols: usize) -> Tensor<2> {
    Tensor::zeros([rows, cols], &device())
}

/// The error is of the expected kind, names the argument, and its message has both sides.
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
    let pack = |axis| try_quantize(zeros(20, 20), axis, Rounding::Nearest, None);
    assert_error!(
        pack(PackedAxis::Cols),
        Shape,
        "x",
        "cols = 20",
        "multiple of 16"
    );
    assert!(pack(PackedAxis::Rows).is_ok(), "a column-wise copy pads");
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
        try_quantize(zeros(rows, cols), PackedAxis::Cols, Rounding::Nearest, None).unwrap()
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
    let result = try_quantize(double(16, 16), PackedAxis::Cols, Rounding::Nearest, None);
    assert_error!(result, DType, "x", "F64", "F32, BF16 or F16");
    let packed = try_quantize(zeros(16, 16), PackedAxis::Cols, Rounding::Nearest, None).unwrap();
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
    let result = try_quantize(zeros(16, 16), PackedAxis::Cols, Rounding::Nearest, signs);
    assert_error!(result, Value, "hadamard", "row-wise", "none");
    let pack = |hadamard| {
        try_quantize(zeros(16, 16), PackedAxis::Rows, Rounding::Nearest, hadamard).unwrap()
    };
    let result = try_matmul(pack(signs), pack(None), None, FloatDType::F32);
    assert_error!(result, Value, "b", "None", "Hadamard");
}

#[test]
fn layer_numbers_have_a_limit() {
    flex_only!();
    let config = Nvfp4LinearConfig::new(16, 16).with_layer(Some(LayerRandomness::LAYER_LIMIT));
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
#[test]
fn operands_on_different_devices() {
    use burn_core::tensor::Device;
    flex_only!();
    let weight = Tensor::<2>::empty([32, 32], &Device::cpu());
    let result = try_linear(zeros(4, 32), weight, None, spec(0, 0));
    assert_error!(result, Device, "weight", "Cpu", "the device of `x`");
}

/// A device that Burn can name in this build, but for which there are no kernels here. Naming it
/// opens nothing.
#[cfg(any(feature = "cpu", feature = "cuda"))]
#[test]
fn a_device_without_an_implementation() {
    use burn_core::{backend::DispatchDevice, tensor::Device};
    let wgpu = burn_cubecl::CubeDevice::Wgpu(Default::default());
    let device = Device::new(DispatchDevice::Cube(wgpu));
    let layer = Nvfp4LinearConfig::new(16, 16).try_init(&device);
    assert_error!(layer, Device, "device", "Wgpu", "device");
}

#[test]
#[should_panic(expected = "nvfp4 linear: shape of `x`: found [4, 48], expected a last axis of 32")]
fn the_plain_functions_panic_with_the_same_message() {
    burn_nvfp4::functions::linear(zeros(4, 48), zeros(32, 32), None, spec(0, 0));
}
