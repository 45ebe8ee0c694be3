//! `nvfp4 decode-cost`.

use std::path::PathBuf;

use anyhow::Result;
use burn::tensor::Device;
use clap::{Args, ValueEnum};
use nvfp4_lm::checkpoint::write_json;
use nvfp4_lm::decode_cost::{DecodeCost, Effort, Shape, measure};
use nvfp4_lm::decoder::{HeadPrecision, KvPrecision};
use serde::Serialize;

use crate::device::{ComputeType, DeviceName, hardware};
use crate::kernels;

/// Named shape.
#[derive(Clone, Copy, ValueEnum)]
enum ShapeName {
    /// Llama 3.2 1B
    #[value(name = "llama-3.2-1b")]
    Llama1b,
    /// Llama 3.1 8B
    #[value(name = "llama-3.1-8b")]
    Llama8b,
    /// Two layers of width 64, for tests
    Tiny,
}

impl ShapeName {
    fn shape(self) -> Shape {
        match self {
            Self::Llama1b => Shape::Llama1b,
            Self::Llama8b => Shape::Llama8b,
            Self::Tiny => Shape::Tiny,
        }
    }
}

/// Named storage format of keys and values.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum KvName {
    /// The type of the activations
    Bf16,
    /// E4M3, with the scale factors of the model's folder, or 1
    Fp8,
}

impl KvName {
    pub(crate) fn precision(self) -> KvPrecision {
        match self {
            Self::Bf16 => KvPrecision::Activations,
            Self::Fp8 => KvPrecision::Fp8,
        }
    }
}

#[derive(Args)]
pub(crate) struct CostOfDecoding {
    /// Measure models of these shapes, with random weights
    #[arg(
        value_name = "SHAPE",
        value_delimiter = ',',
        default_value = "llama-3.2-1b,llama-3.1-8b"
    )]
    shapes: Vec<ShapeName>,
    /// Prefill a prompt of this many tokens
    #[arg(long, value_name = "N", default_value_t = 2048)]
    prompt: usize,
    /// Decode this many sequences at a time
    #[arg(long, value_name = "N", default_value_t = 1)]
    batch: usize,
    /// Decode this many tokens in a round
    #[arg(long, value_name = "N", default_value_t = 128)]
    tokens: usize,
    /// Measure this many rounds and report the median
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Store keys and values in this format
    #[arg(long, value_name = "TYPE", default_value = "bf16")]
    kv: KvName,
    /// Store the output head in this precision
    #[arg(long, value_name = "TYPE", default_value = "stored")]
    head: HeadPrecision,
    /// Launch the kernels of a step one by one instead of as a CUDA graph
    #[arg(long)]
    no_graph: bool,
    /// Print this many of the costliest kernels of a step
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    kernels: usize,
    /// Write all measurements to this JSON file [default: none]
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Compute in this type [default: bf16 on a GPU, else f32]
    #[arg(long, value_name = "TYPE")]
    dtype: Option<ComputeType>,
    /// Run on this device: flex, cpu or cuda:N [default: cuda:0 if there is one, else flex]
    #[arg(long, value_name = "DEVICE")]
    device: Option<DeviceName>,
}

/// Contents of the file given by `--json`.
#[derive(Serialize)]
struct Figures {
    hardware: Option<String>,
    results: Vec<DecodeCost>,
}

impl CostOfDecoding {
    pub(crate) fn run(self) -> Result<()> {
        let name = DeviceName::or_best(self.device)?;
        let dtype = ComputeType::or_of(self.dtype, name);
        let device: Device = name.open()?.without_autodiff();
        let effort = Effort {
            prompt: self.prompt,
            batch: self.batch,
            tokens: self.tokens,
            rounds: self.rounds,
            graph: matches!(name, DeviceName::Cuda(_)) && !self.no_graph,
            kv: self.kv.precision(),
            head: self.head,
        };
        let mut results = Vec::new();
        for shape in &self.shapes {
            let cost = measure(shape.shape(), &device, dtype, effort)?;
            print(&cost, self.kernels);
            results.push(cost);
            nvfp4_lm::cost::release(&device);
        }
        eprintln!("compiled {} kernels", kernels::compiled());
        if let Some(path) = &self.json {
            let hardware = hardware(&device);
            write_json(path, &Figures { hardware, results })?;
        }
        Ok(())
    }
}

fn print(cost: &DecodeCost, kernels: usize) {
    println!(
        "{}: first token after {:.2} s, prefill of {} x {} tokens {:.2} ms ({:.0} tokens/s)",
        shape_name(cost.shape),
        cost.first_token,
        cost.batch,
        cost.prompt,
        1e3 * cost.prefill,
        (cost.batch * cost.prompt) as f64 / cost.prefill
    );
    println!(
        "  a step {:.3} ms ({:.0} tokens/s), {} kernels{}",
        1e3 * cost.step,
        cost.batch as f64 / cost.step,
        cost.launches,
        if cost.is_graph { ", as a graph" } else { "" }
    );
    println!(
        "  it reads {:.3} GB of weights, {:.3} GB of them packed",
        cost.step_bytes as f64 / 1e9,
        cost.packed_bytes as f64 / 1e9
    );
    if let (Some(bandwidth), Some(share)) = (cost.copy_bandwidth, cost.share_of_reading) {
        println!(
            "  a copy moves {:.0} GB/s: to read them takes {:.0} % of a step",
            bandwidth / 1e9,
            100.0 * share
        );
    }
    for kernel in cost.kernels.iter().take(kernels) {
        println!(
            "  {:>9.3} ms {:>5} x {:<14} {}",
            1e3 * kernel.seconds,
            kernel.launches,
            kernel.class.name(),
            kernel.name
        );
    }
}

fn shape_name(shape: Shape) -> &'static str {
    match shape {
        Shape::Llama1b => "llama-3.2-1b",
        Shape::Llama8b => "llama-3.1-8b",
        Shape::Tiny => "tiny",
    }
}
