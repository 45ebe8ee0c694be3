//! The device of a benchmark.

use cubecl::prelude::*;

/// Returns the client of the device that `NVFP4_BENCH_DEVICE` names: `cuda`, the default, or `cpu`,
/// CubeCL's CPU runtime, as a smoke test.
pub fn client() -> Client {
    match std::env::var("NVFP4_BENCH_DEVICE").as_deref() {
        Ok("cuda") | Err(_) => cubecl::Device::Cuda(Default::default()).client(),
        #[cfg(feature = "cpu")]
        Ok("cpu") => {
            let device = || cubecl::Device::Cpu(Default::default()).client();
            nvfp4_test_support::cpu_runtime(device)
        }
        Ok(other) => panic!("NVFP4_BENCH_DEVICE={other}: not a device of this build"),
    }
}

/// True if the device is a GPU. Others run everything once, at tiny sizes.
pub fn is_gpu() -> bool {
    std::env::var("NVFP4_BENCH_DEVICE").map_or(true, |name| name == "cuda")
}

/// True if everything runs once and nothing is timed: in a smoke test, or for a profiler.
pub fn is_run_once() -> bool {
    !is_gpu() || std::env::var_os("NVFP4_BENCH_ONCE").is_some()
}

/// Returns `full` on a GPU, otherwise `tiny`.
pub fn size<T>(full: T, tiny: T) -> T {
    match is_gpu() {
        true => full,
        false => tiny,
    }
}

/// Returns sizes of a matrix: `full` on a GPU, otherwise small multiples of 64.
pub fn sizes<const N: usize>(full: [usize; N]) -> [usize; N] {
    size(
        full,
        full.map(|size| (size / 256).next_multiple_of(64).max(64)),
    )
}
