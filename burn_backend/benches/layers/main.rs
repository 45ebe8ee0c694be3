//! Benchmark of layers on a GPU, forward and backward, compared with Burn's: linear layers of every
//! preset, decorated layers, and the components of a mixture of experts. Times are milliseconds of
//! the host clock around steps between two synchronizations.
//!
//! `cargo bench -p burn-nvfp4 --features cuda --bench layers`. A filter after `--` is a part of
//! `setting/name`, such as `-- linear` or `-- nvidia`. Encoders are measured only with a filter that
//! begins with `encoder`, a block of a diffusion transformer only with `flux`, the parts of a linear
//! layer only with one that begins with `presets` (about 60 s on a GPU), and the MLP of Llama 70B only
//! with one that begins with `mlp` (about 30 s).
//! Decorated layers and encoders are measured only with a filter that begins
//! with `four layers` or `decorated encoder`, and then alone. `NVFP4_BENCH_DEVICE` is `cuda` (the
//! default if it is built), `cpu` or `flex`; the last two run at tiny sizes as a smoke test. With
//! `NVFP4_BENCH_ONCE` set, every step runs once and nothing is timed: for a profiler, or
//! `BURN_FUSION_LOG`.
//!
//! The table is printed to standard output. A results file, which `cargo xtask results` reads, is
//! written to `nvfp4-bench-layers.json` in the target folder (or to the file that
//! `NVFP4_BENCH_JSON` names).

// The estimates of GEMMs; only the model is printed here.
#[allow(dead_code)]
#[path = "../../../cube_kernels/benches/common/b200.rs"]
mod b200;
#[cfg(any(feature = "cpu", feature = "cuda"))]
mod decorated;
mod encoder;
mod flux;
mod harness;
mod linear;
mod mlp;
mod moe;
mod presets;
#[path = "../../../cube_kernels/benches/common/results.rs"]
mod results;
mod step;

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
    } else if bench.asks_for(encoder::DECORATED) {
        return encoder::decorated(bench);
    }
    if bench.asks_for(encoder::SETTING) {
        return encoder::steps(bench);
    }
    if bench.asks_for(flux::SETTING) {
        return flux::steps(bench);
    }
    if bench.asks_for(presets::SETTING) {
        return presets::parts(bench);
    }
    if bench.asks_for(mlp::SETTING) {
        return mlp::mlps(bench);
    }
    linear::layers(bench);
    moe::mixture(bench);
}
