//! `nvfp4 dev decode-cost`.

use anyhow::Result;
use clap::{Args, ValueEnum};
use nvfp4_lm::decode_cost::{DecodeCost, Effort, Shape, measure};
use nvfp4_lm::decoder::KvPrecision;
use serde::Serialize;

use super::measure::MeasureOptions;
use crate::device::hardware;
use crate::kernels;
use crate::options::shared::{ComputeOptions, DecodingOptions};
use crate::terminal::note;

#[derive(Args)]
pub(crate) struct CostOfDecoding {
    /// Measure models of these shapes, with random weights
    #[arg(
        value_name = "SHAPE",
        value_delimiter = ',',
        default_value = "llama-3.2-1b,llama-3.1-8b"
    )]
    shapes: Vec<Shape>,
    /// Prefill a prompt of this many tokens
    #[arg(long, value_name = "N", default_value_t = 2048)]
    prompt_length: usize,
    /// Use a batch of this many sequences; all are decoded at a time
    #[arg(long, value_name = "N", default_value_t = 1)]
    batch: usize,
    /// Decode this many tokens in a round
    #[arg(long, value_name = "N", default_value_t = 128)]
    round_tokens: usize,
    #[command(flatten)]
    decoding: DecodingOptions,
    #[command(flatten)]
    measure: MeasureOptions,
    #[command(flatten)]
    compute: ComputeOptions,
}

/// Contents of the file given by `--out`.
#[derive(Serialize)]
struct Figures {
    hardware: Option<String>,
    results: Vec<DecodeCost>,
}

impl CostOfDecoding {
    pub(crate) fn run(self) -> Result<()> {
        let (name, device, dtype) = self.compute.open()?;
        let decoding = self.decoding;
        let effort = Effort {
            prompt: self.prompt_length,
            batch: self.batch,
            tokens: self.round_tokens,
            rounds: self.measure.rounds,
            graph: decoding.graph(name),
            // Random weights are in no folder whose cache is quantized.
            kv: decoding.kv.unwrap_or(KvPrecision::Activations),
            head: decoding.head.unwrap_or_default(),
        };
        let mut results = Vec::new();
        for shape in self.shapes {
            let cost = measure(shape, &device, dtype, effort)?;
            print(&cost);
            self.measure.print_kernels("  ", &cost.kernels);
            results.push(cost);
            nvfp4_lm::cost::release(&device);
        }
        note!("compiled {} kernels", kernels::compiled());
        let hardware = hardware(&device);
        self.measure.write(&Figures { hardware, results })
    }
}

fn print(cost: &DecodeCost) {
    let shape = cost.shape.to_possible_value().expect("no shape is hidden");
    println!(
        "{}: first token after {:.2} s, prefill of {} x {} tokens {:.2} ms ({:.0} tokens/s)",
        shape.get_name(),
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
}
