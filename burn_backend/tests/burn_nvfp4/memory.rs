//! Memory that a layer keeps of its input until the backward, measured in the memory pools.

use std::time::Duration;

use burn_core::backend::DispatchDevice;
use burn_core::tensor::{DType, Device, Tensor};
use burn_nvfp4::{Nvfp4LinearConfig, Nvfp4Recipe, Nvfp4SwiGluConfig};
use cubecl::{MemoryScope, MemoryUsage};

use crate::support::{Matrix, cube_only, device, gpu_only, small_only};

/// Returns the usage of the pools of this test's stream when it is idle: other tests run
/// concurrently.
pub fn memory_usage(device: &Device) -> MemoryUsage {
    device.sync().unwrap();
    match device.as_dispatch() {
        DispatchDevice::Cube(device) => {
            let report = device.client().memory_report(MemoryScope::CurrentStream);
            report.usage()
        }
        _ => panic!("not a CubeCL device"),
    }
}

/// Returns the bytes in use. A worker of CubeCL's CPU runtime drops the buffers of a kernel shortly
/// after it has signalled the kernel's end.
pub fn in_use(device: &Device) -> u64 {
    let readings = (0..5).map(|_| {
        std::thread::sleep(Duration::from_millis(10));
        memory_usage(device).bytes_in_use
    });
    readings.min().expect("five readings")
}

/// Asserts that between forward and backward a layer of `preset` (`tokens`, `d_in`, `d_out`) holds
/// at most `most` bytes per element of its input and of its weight.
fn keeps_at_most(preset: &str, most: f64, (tokens, d_in, d_out): (usize, usize, usize)) {
    let device = device();
    let elements = (tokens * d_in) as f64;
    let recipe = Nvfp4Recipe::preset(preset)
        .unwrap()
        .with_cache_weights(false);
    let training = device.clone().autodiff();
    let layer = Nvfp4LinearConfig::new(d_in, d_out)
        .with_bias(false)
        .with_recipe(recipe)
        .init(&training);
    let source = Matrix::gaussian(tokens, d_in, DType::F32, 3).tensor(&training);
    // Only the graph holds the input of the layer.
    let forward = || -> Tensor<2> { layer.forward(source.clone().require_grad() * 1.0) };
    let backward = |y: Tensor<2>| {
        let grads = y.sum().backward();
        assert!(layer.weight.grad(&grads).is_some());
    };
    // The first step fills caches of the process, such as the weight's first value. Its backward
    // removes it from autodiff's graph, whose unused entries are freed whenever another test runs a
    // backward.
    backward(forward());
    let before = in_use(&device);
    let y = forward();
    let kept = in_use(&device).saturating_sub(before);
    let output = (tokens * d_out * 4) as u64;
    // The packed weight for dgrad, and rounding of a few allocations.
    let other = (d_in * d_out) as f64 * most + 2048.0;
    let each = (kept.saturating_sub(output) as f64 - other) / elements;
    let what = format!("{preset}, {tokens} x {d_in} x {d_out}");
    eprintln!("{what}: {kept} bytes kept, {each:.3} for each element of the input");
    assert!(kept > output, "{what}: the output alone takes {output}");
    assert!(each <= most, "{what}: {each} bytes for each element");
    // Less than half of that cannot be what the backward reads.
    let least = (elements + (d_in * d_out) as f64) * most / 2.0;
    assert!(
        (kept - output) as f64 >= least,
        "{what}: {kept} bytes with the output"
    );
    backward(y);
}

/// One set of 4-bit codes and one scale per 16. `bf16` would hold two bytes, `f32` four.
#[test]
fn saved_activations_take_their_packed_size() {
    cube_only!();
    // Also a weight larger than the input.
    let (usual, wide) = match small_only() {
        true => ((256, 128, 128), (128, 128, 384)),
        false => ((1024, 256, 128), (512, 128, 768)),
    };
    let presets = [
        "nvidia",
        "per_token",
        "quartet2",
        "nvidia_4over6",
        "nvidia_headroom",
    ];
    let some = if small_only() { 3 } else { presets.len() };
    for preset in &presets[..some] {
        keeps_at_most(preset, 0.6, usual);
    }
    keeps_at_most("nvidia", 0.6, wide);
}

/// With an MXFP8 backward, one byte per element and one scale per 32.
#[test]
fn saved_activations_of_an_mxfp8_backward_take_theirs() {
    // For a backward that is not NVFP4, Burn multiplies on CubeCL's CPU runtime, which takes
    // minutes, and Flex has no memory pools.
    gpu_only!();
    for preset in ["fwd_nvfp4_bwd_mxfp8", "fwd_nvfp4_bwd_mxfp8_dequantized"] {
        keeps_at_most(preset, 33.0 / 32.0, (1024, 256, 128));
    }
}

/// A feed-forward that recomputes gate and up holds the packed input of its first layer instead of
/// them.
#[test]
fn what_is_computed_again_is_not_kept() {
    cube_only!();
    let (tokens, width, hidden) = match small_only() {
        true => (256, 64, 128),
        false => (1024, 128, 384),
    };
    let training = device().autodiff();
    let recipe = Nvfp4Recipe::preset("nvidia").unwrap();
    let layer = Nvfp4SwiGluConfig::new(width, hidden)
        .with_recipe(recipe)
        .init(&training);
    let source = Matrix::gaussian(tokens, width, DType::F32, 3).tensor(&training);
    let kept = [false, true].map(|recompute| {
        let layer = layer.clone().with_recompute(recompute);
        let forward = || -> Tensor<2> { layer.forward(source.clone().require_grad() * 1.0) };
        let backward = |y: Tensor<2>| {
            let grads = y.sum().backward();
            assert!(layer.gate_up.weight.grad(&grads).is_some());
        };
        backward(forward());
        let before = in_use(&device());
        let y = forward();
        let kept = in_use(&device()).saturating_sub(before);
        backward(y);
        kept
    });
    eprintln!("{kept:?} bytes kept");
    let gate_up = (tokens * 2 * hidden * 4) as u64;
    let packed = (tokens * width) as u64 * 9 / 16;
    let saved = kept[0] - kept[1];
    let expected = gate_up - packed;
    assert!(
        saved.abs_diff(expected) <= expected / 50,
        "{saved} bytes, not {expected}"
    );
}
