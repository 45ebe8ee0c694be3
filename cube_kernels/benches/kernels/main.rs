//! Benchmarks every kernel except GEMMs on a GPU: bytes per second, relative to a copy timed in the
//! same process. Run `cargo bench -p nvfp4-kernels --features cuda --bench kernels`; the filter is
//! criterion's, a regular expression for `shape/kernel`.
//!
//! A sample is a batch of launches between two device events, which excludes host time as long as
//! the host keeps up. Inputs, packed ones too, rotate among sets that together exceed the L2 cache.
//! Bytes are compulsory traffic: every input read once, every output written once. The shapes are
//! those that peers report: squares, Llama 3's activations and weights, DeepSeek-V3's tokens in
//! groups and experts. At 1024x1024, where the launch dominates, an empty kernel is timed, too,
//! launched one by one and replayed from a graph.
//!
//! The shapes `per-token` have one amax per row and column and one per tensor side by side, with
//! the ratio of their times: `NVFP4_BENCH_SHAPES=per-token` (about 40 s).
//!
//! `NVFP4_BENCH_SHAPES` selects shapes whose name contains it; `NVFP4_BENCH_KERNELS` selects
//! kernels whose name contains one of its alternatives, separated by `|`. A table is printed to
//! standard output. The same figures are written as a results file, which `cargo xtask results`
//! reads, to `nvfp4-bench-kernels.json` in the target folder (or to the file in
//! `NVFP4_BENCH_JSON`).
//!
//! With `NVFP4_BENCH_ONCE` set everything runs once and nothing is timed, for a profiler. With
//! `NVFP4_BENCH_DEVICE=cpu` (and the feature `cpu`) everything runs once at tiny sizes on CubeCL's
//! CPU runtime, as a smoke test.
//!
//! Not included: GEMMs, with their decoding and transposing (`benches/gemm.rs`), and the diagnostics
//! of `cvt.rs`. A test, `benched`, compares the functions of the crate with those called here.

mod attention;
#[path = "../common/mod.rs"]
mod common;
mod dense;
mod fp8;
mod grouped;
mod harness;
mod inputs;
mod layers;
mod loss;
mod optimizer;
mod packed;
mod per_token;
mod prologue;
mod ptq;
// The requests that tests make, too.
#[allow(dead_code)]
#[path = "../../tests/suite/support/quantize.rs"]
mod quantize;
mod router;
mod scales;
mod small;

use common::device::{size, sizes};
use harness::{
    Bench,
    Effort::{self, Brief, Full},
    Section,
};
use inputs::Inputs;
use nvfp4_kernels::tensor::Groups;

/// Times all kernels of matrices, except one, at these shapes.
fn squares(bench: &mut Bench) {
    for side in [1024, 4096, 8192, 16384] {
        matrix(
            bench,
            format!("{side}x{side}"),
            Full,
            (side, side),
            |section, inputs| {
                if side == 1024 {
                    section.empty();
                }
                dense::activations(section, inputs);
                dense::tiles(section, "", inputs, &Groups::One);
                let section = &mut section.brief();
                if side != 4096 {
                    dense::policies(section, inputs);
                    packed::packed(section, inputs);
                }
                if side == 8192 {
                    dense::types(section, (inputs.rows, inputs.cols));
                }
            },
        );
    }
    bench.at("1024x1024 in a graph".into(), Full, |section| {
        let [rows, cols] = sizes([1024, 1024]);
        let inputs = &Inputs::bf16(&section.client(), rows, cols);
        let section = &mut section.captured();
        section.empty();
        dense::copy(section, inputs);
        dense::activations(section, inputs);
        dense::tiles(section, "", inputs, &Groups::One);
    });
}

fn llama(bench: &mut Bench) {
    for (rows, cols) in [(8192, 4096), (8192, 8192), (16384, 8192)] {
        bench.at(format!("producers {rows}x{cols}"), Full, |section| {
            prologue::prologues(section, sizes([rows, cols]).into());
        });
    }
    for cols in [4096, 8192, 14336, 28672] {
        let name = format!("Llama 2048x{cols}");
        matrix(bench, name, Full, (2048, cols), dense::activations);
    }
    for (rows, cols) in [(14336, 4096), (4096, 14336), (28672, 8192), (8192, 28672)] {
        let name = format!("Llama weight {rows}x{cols}");
        matrix(bench, name, Full, (rows, cols), |section, inputs| {
            dense::tiles(section, "", inputs, &Groups::One);
        });
    }
}

/// Times norms and activations of the models used to measure training.
fn between_layers(bench: &mut Bench) {
    for (rows, cols) in [
        (8192, 4096),
        (16384, 768),
        (8192, 2048),
        (8192, 8192),
        (4096, 16384),
    ] {
        bench.at(format!("norms {rows}x{cols}"), Full, |section| {
            layers::norms(section, sizes([rows, cols]).into());
        });
    }
    for (rows, width) in [(8192, 12288), (16384, 2048), (8192, 8192)] {
        bench.at(format!("activations {rows}x{width}"), Full, |section| {
            layers::activations(section, sizes([rows, width]).into());
        });
    }
}

/// Times the operands of a GPU that dequantizes before it multiplies.
fn unscaled(bench: &mut Bench) {
    for cols in [4096, 8192, 14336] {
        let name = format!("unscaled 8192x{cols}");
        matrix(bench, name, Full, (8192, cols), dense::unscaled);
    }
    for (rows, cols) in [(16384, 768), (16384, 2048), (8192, 8192)] {
        let name = format!("both storages {rows}x{cols}");
        matrix(bench, name, Full, (rows, cols), dense::both_storages);
    }
}

fn deepseek(bench: &mut Bench) {
    let name = "DeepSeek tokens 16384x7168".into();
    matrix(bench, name, Full, (16384, 7168), |section, inputs| {
        dense::activations(section, inputs);
        // Without groups, for comparison with groups.
        dense::tiles(&mut section.brief(), "", inputs, &Groups::One);
        dense::four_over_six(&mut section.brief(), inputs);
        grouped::tokens(section, inputs);
    });
    for cols in [2048, 7168] {
        let name = format!("DeepSeek rows 16384x{cols}");
        matrix(bench, name, Brief, (16384, cols), grouped::rows);
    }
    let experts = [
        (8, 256, 256),
        (8, 1408, 2048),
        (8, 2048, 1408),
        (8, 2048, 7168),
        (8, 7168, 2048),
        (128, 2048, 7168),
        (128, 7168, 2048),
    ];
    for (count, rows, cols) in experts {
        let name = format!("DeepSeek experts {count}x{rows}x{cols}");
        bench.at(name, Full, |section| {
            let [rows, cols] = sizes([rows, cols]);
            let inputs = Inputs::bf16(&section.client(), count * rows, cols);
            dense::copy(section, &inputs);
            grouped::experts(section, &inputs, count);
        });
    }
    for shape in [[16384, 256, 8], [16384, 16, 2]] {
        let [tokens, experts, top_k] = shape;
        let name = format!("router {tokens}x{experts}, top {top_k}");
        bench.at(name, Brief, |section| {
            router::routing(section, size(shape, [80, experts, top_k]));
        });
    }
}

fn swizzled(bench: &mut Bench) {
    for (count, rows, cols) in [(1, 8192, 8192), (1, 16384, 16384), (8, 8192, 5120)] {
        bench.at(format!("scales {count}x{rows}x{cols}"), Brief, |section| {
            let [rows, cols] = sizes([rows, cols]);
            scales::copy(section, count * rows * cols);
            scales::batch(section, count, (rows, cols));
        });
    }
    for (tokens, cols) in [(32768, 2048), (131_072, 7168)] {
        bench.at(
            format!("scales of tokens {tokens}x{cols}"),
            Brief,
            |section| {
                let [tokens, cols] = sizes([tokens, cols]);
                scales::copy(section, tokens * cols);
                for count in [4, 8] {
                    scales::grouped(section, (tokens, cols), count);
                }
            },
        );
    }
}

fn attentions(bench: &mut Bench) {
    for (heads, head) in [(32, 64), (16, 128)] {
        let name = format!("rotary positions {heads}x{head}");
        bench.at(name, Brief, |section| {
            attention::rotary(section, heads, head);
        });
        for length in size(vec![512, 1024, 2048, 4096, 8192, 16384], vec![64]) {
            let name = format!("attention {heads}x{head}, {length} tokens");
            bench.at(name, Full, |section| {
                attention::causal(section, length, heads, head);
            });
        }
        let name = format!("attention {heads}x{head}, documents");
        bench.at(name, Full, |section| {
            attention::packed(section, heads, head);
        });
    }
    for (batch, length) in [(1, 8192), (16, 2048), (64, 2048), (64, 8192)] {
        let name = format!("decode {batch} sequences of {length}");
        bench.at(name, Brief, |section| {
            attention::decoding(section, batch, length);
        });
    }
}

/// Times post-training quantization of a weight.
fn weights(bench: &mut Bench) {
    for shape in [[4096, 4096], [4096, 14336]] {
        let [n, k] = shape;
        bench.at(format!("weight {n}x{k}"), Brief, |section| {
            ptq::quantize(section, sizes(shape));
        });
    }
}

/// Times the final layers of language models.
fn losses(bench: &mut Bench) {
    for vocab in [256, 32768, 50264, 131_072] {
        let name = format!("logits 8192x{vocab}");
        matrix(bench, name, Full, (8192, vocab), loss::cross_entropy);
        let name = format!("logits of two models 8192x{vocab}");
        matrix(bench, name, Brief, (8192, vocab), loss::kl_divergence);
    }
    for shape in [[8192, 4096, 32768], [8192, 4096, 131_072]] {
        let [rows, width, vocab] = shape;
        let name = format!("head {rows}x{width}x{vocab}");
        bench.at(name, Brief, |section| loss::heads(section, sizes(shape)));
    }
    bench.at("logits 64x131072".into(), Brief, loss::greedy);
    for (vocab, cols) in [(256, 768), (32768, 4096), (131_072, 4096)] {
        let name = format!("table {vocab}x{cols}, 16384 tokens");
        matrix(bench, name, Full, (16384, cols), |section, inputs| {
            let [vocab] = sizes([vocab]);
            loss::embeddings(section, inputs, vocab);
        });
    }
}

/// Runs `measure` for bf16 matrices, after the copy of one.
fn matrix(
    bench: &mut Bench,
    name: String,
    effort: Effort,
    (rows, cols): (usize, usize),
    measure: impl FnOnce(&mut Section<'_>, &Inputs),
) {
    bench.at(name, effort, |section| {
        let [rows, cols] = sizes([rows, cols]);
        let inputs = Inputs::bf16(&section.client(), rows, cols);
        dense::copy(section, &inputs);
        measure(section, &inputs);
    });
}

fn main() {
    let client = common::device::client();
    let mut bench = Bench::new(&client);
    per_token::compare(&mut bench);
    squares(&mut bench);
    llama(&mut bench);
    between_layers(&mut bench);
    unscaled(&mut bench);
    deepseek(&mut bench);
    swizzled(&mut bench);
    losses(&mut bench);
    weights(&mut bench);
    attentions(&mut bench);
    for shape in [[28672, 4096], [4096, 14336]] {
        let [n, k] = shape;
        bench.at(format!("FP8 weight {n}x{k}"), Brief, |section| {
            fp8::weight(section, sizes(shape));
        });
    }
    bench.at("kernels of a few words".into(), Brief, small::all);
    bench.at(
        "optimizer, 218 million parameters".into(),
        Brief,
        optimizer::adamw,
    );
    bench.report().expect("the summary could not be written");
}
