//! What a layer keeps of its input until the backward, as the memory pools see it.

use burn_core::backend::DispatchDevice;
use burn_core::tensor::{DType, Device, Tensor};
use burn_nvfp4::{Nvfp4LinearConfig, Nvfp4Recipe};
use cubecl::MemoryScope;

use crate::common::{Matrix, device, small_only};

/// Bytes in use on the stream of this test when nothing is under way: other tests run beside it.
fn in_use(device: &Device) -> u64 {
    device.sync().unwrap();
    match device.as_dispatch() {
        DispatchDevice::Cube(device) => {
            let report = device.client().memory_report(MemoryScope::CurrentStream);
            report.usage().bytes_in_use
        }
        _ => panic!("not a CubeCL device"),
    }
}

/// Between forward and backward an NVFP4 layer holds no more than 0.6 bytes for each element of its input:
/// one copy of 4-bit codes and a scale for each 16. One whose backward is in MXFP8 holds a byte and a scale for
/// each 32. `bf16` would hold two, `f32` four.
#[test]
fn saved_activations_take_their_packed_size() {
    let device = device();
    if !matches!(device.as_dispatch(), DispatchDevice::Cube(_)) {
        eprintln!("skipped: Flex has no memory pools to ask");
        return;
    }
    let (nvfp4, mxfp8) = (0.6, 33.0 / 32.0);
    // What is kept of the input and of the weight, in bytes for each element.
    let presets = [
        ("nvidia", nvfp4, nvfp4),
        ("nvidia_4over6", nvfp4, nvfp4),
        ("nvidia_headroom", nvfp4, nvfp4),
        ("per_token", nvfp4, nvfp4),
        ("quartet2", nvfp4, nvfp4),
        ("fwd_nvfp4_bwd_mxfp8", mxfp8, mxfp8),
        ("fwd_nvfp4_bwd_mxfp8_dequantized", mxfp8, mxfp8),
    ];
    let usual = presets.map(|preset| (preset, (1024, 256, 128)));
    // And a weight larger than the input.
    let wide = [(presets[0], (512, 128, 768))];
    for ((preset, most, of_weight), (tokens, d_in, d_out)) in usual.into_iter().chain(wide) {
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
        // The input of the layer is nobody's but the graph's.
        let step = || -> Tensor<2> { layer.forward(source.clone().require_grad() * 1.0) };
        // The first forward fills caches of the process, such as the weight's first value.
        drop(step());
        let before = in_use(&device);
        let y = step();
        let kept = in_use(&device) - before;
        let output = (tokens * d_out * 4) as u64;
        // The packed weight for dgrad, and what a few allocations are rounded up to.
        let other = (d_in * d_out) as f64 * of_weight + 2048.0;
        let each = (kept.saturating_sub(output) as f64 - other) / elements;
        let what = format!("{preset}, {tokens} x {d_in} x {d_out}");
        eprintln!("{what}: {kept} bytes kept, {each:.3} for each element of the input");
        assert!(kept > output, "{what}: the output alone takes {output}");
        assert!(each <= most, "{what}: {each} bytes for each element");
        // Where the backward is not NVFP4 Burn multiplies on CubeCL's CPU runtime, for minutes.
        if small_only() && preset.contains("bwd") {
            continue;
        }
        let grads = y.sum().backward();
        assert!(layer.weight.grad(&grads).is_some());
        drop(grads);
    }
}
