//! Layers on a GPU, forward and backward, beside Burn's: linear ones by every preset, decorated
//! ones, and the parts of a mixture of experts. Milliseconds of the host's clock, around steps
//! between two synchronisations.
//!
//! `cargo bench -p burn-nvfp4 --features cuda --bench layers`; a filter behind `--` is a part of
//! `setting/name`, such as `-- linear` or `-- nvidia`. Decorated layers are measured only with a
//! filter that begins with `four layers`, and then alone. `NVFP4_BENCH_DEVICE` takes `cuda` (the
//! default where it is built), `cpu` or `flex`; the last two run at tiny sizes, to see that it
//! runs. With `NVFP4_BENCH_ONCE` set every step runs once and nothing is timed: for a profiler, or
//! `BURN_FUSION_LOG`.
//!
//! A table goes to standard output, and the same as a results file, which `cargo xtask results`
//! reads, to `nvfp4-bench-layers.json` in the target folder (or the file that `NVFP4_BENCH_JSON`
//! names).

#[cfg(any(feature = "cpu", feature = "cuda"))]
mod decorated;
mod harness;
mod linear;
mod moe;
#[path = "../../../cube_kernels/benches/common/results.rs"]
mod results;

use harness::Bench;

fn main() {
    let mut bench = Bench::new();
    measure(&mut bench);
    bench.report().expect("the summary could not be written");
}

fn measure(bench: &mut Bench) {
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    if bench.asks_for(decorated::SETTING) {
        return decorated::layers(bench);
    }
    linear::layers(bench);
    moe::mixture(bench);
}
