//! Results files of the benchmarks of kernels and layers, some of them joined with PyTorch's times.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::part::{Heading, Part, Row, number, results, rounded, rows};

/// Returns the rows of the benchmark `job` with the values of `units`. `at` returns the setting of a
/// row in the table, given its name and setting; rows without one are left out.
fn benchmark(
    part: &Part,
    job: &str,
    units: &[&str],
    at: impl Fn(&str, &str) -> Option<String>,
) -> Result<Vec<Row>> {
    let figures = part.job(job)?;
    let known = rows(figures, "units")?;
    let columns = units.iter().map(|unit| {
        let column = known.iter().position(|known| known["name"] == *unit);
        column.with_context(|| format!("{job} has no unit {unit}"))
    });
    let columns = columns.collect::<Result<Vec<_>>>()?;
    let mut found = Vec::new();
    for row in rows(figures, "rows")? {
        let name = row["name"].as_str().context("a row has no name")?;
        let values = rows(row, "values")?;
        let values = columns.iter().map(|&column| values[column].as_f64());
        if let Some(at) = at(name, row["at"].as_str().unwrap_or_default()) {
            found.push((name.to_owned(), Some(at), values.collect()));
        }
    }
    Ok(found)
}

/// Returns rows without their setting.
fn without_setting(rows: Vec<Row>) -> impl Iterator<Item = Row> {
    rows.into_iter()
        .map(|(name, _, values)| (name, None, values))
}

/// Spells out the names of the benchmark of kernels.
fn spelled(name: &str) -> String {
    let name = name.replace("amax plain + RHT", "amax and amax after the RHT");
    let name = name.replace(", both copies", "");
    let name = match name.strip_prefix("per token ") {
        Some(rest) if !rest.starts_with("rows") => format!("per-row amax: rowwise {rest}"),
        _ => name,
    };
    let words = name.split(' ').map(|word| match word {
        "row" => "rowwise",
        "col" => "columnwise",
        "row," => "rowwise,",
        "col," => "columnwise,",
        other => other,
    });
    words.collect::<Vec<_>>().join(" ")
}

/// Quantization kernels at two sizes.
pub fn kernels(part: &Part) -> Result<Value> {
    let mut table = Vec::new();
    let mut copies = Vec::new();
    for (job, shape, name) in [
        ("kernels-8192", "8192x8192", "8192²"),
        ("kernels-16384", "16384x16384", "16384²"),
    ] {
        // The GEMM of a step is no quantization.
        let at = |kernel: &str, at: &str| (at == shape && kernel != "gemm").then(|| name.into());
        for (kernel, at, values) in benchmark(part, job, &["µs", "% of copy", "GB/s"], at)? {
            if let ("copy", Some(rate)) = (kernel.as_str(), values[2]) {
                copies.push(format!("{rate:.0} GB/s at {name}"));
            }
            table.push((spelled(&kernel), at, values[..2].to_vec()));
        }
    }
    let notes = vec![format!(
        "A share is compulsory bytes a second (each input read once, each output written once) against a device copy of the same process: {}.",
        copies.join(", ")
    )];
    let heading = Heading {
        title: "Quantization kernels beside a copy",
        method: "device events around batches of launches, medians",
        notes,
        about: &["cube_kernels/src/quantize", "cube_kernels/src/cube"],
        row: "kernel, bf16 input where no type is named",
        units: &[("µs", 1), ("% of copy", 0)],
    };
    results(part, heading, table)
}

/// Both orientations of a matrix with an amax per token, beside one amax.
pub fn per_token(part: &Part) -> Result<Value> {
    let at = |_: &str, at: &str| Some(at.trim_start_matches("per-token ").to_owned());
    let table = benchmark(part, "per-token", &["µs", "of per-tensor"], at)?;
    let heading = Heading {
        title: "Scales per token beside scales per tensor",
        method: "device events around batches of launches, medians",
        notes: vec![
            "Amax values, the rowwise tensor rounded to nearest and the columnwise tensor after the RHT, rounded stochastically: the sweep of TransformerEngine's pull request 3045. Grouped: 8 groups of equal size.".into(),
        ],
        about: &["cube_kernels/src/quantize", "cube_kernels/src/cube"],
        row: "quantization",
        units: &[("µs", 1), ("of per-tensor", 2)],
    };
    results(part, heading, table)
}

/// GEMMs of models, large and small ones, and groups.
pub fn gemm(part: &Part) -> Result<Value> {
    let units = [
        "µs",
        "TFLOP/s",
        "% of cuBLAS bf16",
        "packed bytes, % of copy",
    ];
    let mut table: Vec<Row> = Vec::new();
    for job in [
        "gemm-large",
        "gemm-models",
        "gemm-few",
        "gemm-grouped-8",
        "gemm-grouped-32",
        "gemm-grouped-128",
    ] {
        let found = benchmark(part, job, &units, |name, _| {
            // Each process times the copy, with which its own GEMMs are compared.
            (name != "copy").then(String::new)
        })?;
        table.extend(without_setting(found));
    }
    let heading = Heading {
        title: "GEMMs beside cuBLAS in bf16",
        method: "captured graphs, medians; cuBLAS in the same process",
        notes: vec![
            "Hopper has no FP4 tensor cores: NVFP4 and MXFP8 operands are dequantized and multiplied in bf16. All of that work is counted.".into(),
            "M x N x K; layers of models have N x K weights. cuBLAS runs once for each group; skewed groups have a fifth to nine fifths of the mean.".into(),
        ],
        about: &["cube_kernels/src/gemm", "cube_kernels/src/cube"],
        row: "GEMM",
        units: &[
            ("µs", 1),
            ("TFLOP/s", 0),
            ("% of cuBLAS bf16", 0),
            ("packed bytes, % of copy", 0),
        ],
    };
    results(part, heading, table)
}

/// GEMMs of layers in other forms.
pub fn gemm_forms(part: &Part) -> Result<Value> {
    let units = ["µs", "TFLOP/s", "packed bytes, % of copy"];
    let found = benchmark(part, "forms", &units, |name, _| {
        (name != "copy").then(String::new)
    })?;
    let heading = Heading {
        title: "GEMMs with an amax per row, along groups of K, and with fused norm and SwiGLU",
        method: "captured graphs, medians",
        notes: Vec::new(),
        about: &["cube_kernels/src/gemm", "cube_kernels/src/cube"],
        row: "GEMM",
        units: &[("µs", 1), ("TFLOP/s", 0), ("packed bytes, % of copy", 0)],
    };
    results(part, heading, without_setting(found).collect())
}

/// Attention, forward and backward, beside the two backends of PyTorch.
pub fn attention(part: &Part) -> Result<Value> {
    let own = benchmark(part, "attention", &["µs"], |_, at| Some(at.to_owned()))?;
    let figures = part.job("pytorch-attention")?;
    let mut table = Vec::new();
    for row in rows(figures, "rows")? {
        let integer = |key| row[key].as_u64().with_context(|| format!("no {key}"));
        let (tokens, head, heads) = (integer("attention")?, integer("head")?, integer("heads")?);
        let setting = format!("attention {heads}x{head}, {tokens} tokens");
        let time = |kernel: &str| -> Result<f64> {
            let row = own
                .iter()
                .find(|row| row.0 == kernel && row.1.as_deref() == Some(&setting));
            let (.., values) = row.with_context(|| format!("no {kernel} at {setting}"))?;
            Ok(values[0].context("no time")? / 1e3)
        };
        let (forward, backward) = (time("attention")?, time("attention, backward")?);
        let both = forward + backward;
        let [flash, cudnn] = [number(row, "flash_both_ms")?, number(row, "cudnn_both_ms")?];
        let shares = [flash, cudnn].map(|of| Some(100.0 * both / of));
        let times = [forward, both, flash, cudnn].map(Some);
        table.push((
            format!("{tokens} tokens"),
            Some(format!("head size {head}, {heads} heads")),
            [times.as_slice(), &shares].concat(),
        ));
    }
    let heading = Heading {
        title: "Attention beside PyTorch's",
        method: "device events around batches of launches, medians; PyTorch's by events, the best of three; one call",
        notes: vec![
            format!(
                "bf16, causal, 16384 tokens in all. PyTorch {}, cuDNN {}: `scaled_dot_product_attention` by its flash and by its cuDNN backend, forward and backward.",
                figures["torch"].as_str().unwrap_or("?"),
                figures["cudnn"]
            ),
            "Each call of ours is queued by its own launch: the sum of the forward's and the backward's medians.".into(),
        ],
        about: &["cube_kernels/src/attention"],
        row: "attention",
        units: &[
            ("forward, ms", 3),
            ("forward + backward, ms", 3),
            ("flash, ms", 3),
            ("cuDNN, ms", 3),
            ("% of flash's time", 0),
            ("% of cuDNN's time", 0),
        ],
    };
    results(part, heading, table)
}

/// Bandwidth of an H100 or H200 by their datasheets, in bytes per second.
fn datasheet(gpu: &str) -> Result<f64> {
    match gpu {
        gpu if gpu.contains("H200") => Ok(4.8e12),
        gpu if gpu.contains("H100") => Ok(3.35e12),
        gpu => anyhow::bail!("the datasheet's bandwidth of {gpu} is not known"),
    }
}

/// Prefill and decoding with packed weights, beside PyTorch in bf16.
pub fn decode(part: &Part) -> Result<Value> {
    let origin = part.origin()?;
    let bandwidth = datasheet(origin["gpu"].as_str().context("no GPU")?)?;
    let model = |shape: &Value| match shape.as_str() {
        Some("llama-3.2-1b") => Ok("Llama 3.2 1B"),
        Some("llama-3.1-8b") => Ok("Llama 3.1 8B"),
        _ => anyhow::bail!("{shape} is no shape of the table"),
    };
    let pytorch = rows(part.job("pytorch-decode")?, "results")?;
    let mut table: Vec<Row> = Vec::new();
    let mut copies = Vec::new();
    for row in pytorch {
        let values = vec![
            None,
            Some(1e3 * number(row, "step")?),
            Some(100.0),
            None,
            None,
        ];
        let at = model(&row["shape"])?;
        table.push(("PyTorch, bf16".into(), Some(at.into()), values));
    }
    for (job, name) in [
        ("decode-stored", "NVFP4, head in bf16"),
        ("decode-fp8", "NVFP4, head in FP8"),
        ("decode-nvfp4", "NVFP4, head in NVFP4"),
    ] {
        for row in rows(part.job(job)?, "results")? {
            let other = pytorch.iter().find(|other| other["shape"] == row["shape"]);
            let other = other.with_context(|| format!("PyTorch has no {}", row["shape"]))?;
            let (prefill, step) = (number(row, "prefill")?, number(row, "step")?);
            let bytes = number(row, "step_bytes")?;
            copies.extend(row["copy_bandwidth"].as_f64());
            let values = [
                1e3 * prefill,
                1e3 * step,
                100.0 * step / number(other, "step")?,
                bytes / 1e9,
                100.0 * bytes / step / bandwidth,
            ];
            let at = model(&row["shape"])?;
            table.push((name.into(), Some(at.into()), values.map(Some).to_vec()));
        }
    }
    let fastest = copies.iter().copied().fold(0.0, f64::max);
    let heading = Heading {
        title: "Prefill and decoding with packed weights",
        method: "medians of five rounds, of 128 steps each for decoding; as CUDA graphs; one call",
        notes: vec![
            "Random weights, one sequence, a prompt of 2048 tokens. Weights are in NVFP4, activations and embedding in bf16 (W4A16); `--head` chooses the format of the head.".into(),
            format!(
                "The yardstick is the datasheet's bandwidth, {:.2} TB/s. The fastest copy of these processes moved {:.2} TB/s.",
                bandwidth / 1e12,
                fastest / 1e12
            ),
            "PyTorch: `torch.compile` with CUDA graphs, a static cache, bf16.".into(),
        ],
        about: &[
            "cube_kernels/src/gemm",
            "cube_kernels/src/attention",
            "cube_kernels/src/norm",
            "cube_kernels/src/activation",
            "cube_kernels/src/fp8",
            "cube_kernels/src/cube",
            "lm/src/decoder",
        ],
        row: "model",
        units: &[
            ("prefill, ms", 1),
            ("step, ms", 3),
            ("% of PyTorch's step", 0),
            ("GB read per step", 2),
            ("% of datasheet", 0),
        ],
    };
    results(part, heading, table)
}

/// The parts of a linear layer that TransformerEngine measures, for every preset.
pub fn presets(part: &Part) -> Result<Value> {
    layers(
        part,
        ("presets", "presets "),
        "Parts of a linear layer, for every preset",
        "16384 tokens, 4096 inputs and outputs, bf16: the four benchmarks of TransformerEngine. Quantization writes block scales in the 128x4 layout. Forward and backward include a sum, timed alone in the first row.",
    )
}

/// The feed-forward of Llama 70B.
pub fn mlp(part: &Part) -> Result<Value> {
    let mut file = layers(
        part,
        ("mlp", "mlp 8192-28672, "),
        "SwiGLU feed-forward of Llama 70B",
        "Width 8192, hidden 28672: the benchmark of torchao's pull request 2408. `mxfp4` and `mxfp8` are dequantized before they are multiplied. A step is forward and backward.",
    )?;
    let table = file["rows"].as_array_mut().context("a table has rows")?;
    for row in rows(part.job("pytorch-mlp")?, "rows")? {
        let layer = row["layer"].as_str().context("no layer")?;
        let tokens = layer.trim_start_matches("mlp 8192-28672, ");
        for (step, key) in [("forward", "forward_ms"), ("step", "both_ms")] {
            let values = json!([rounded(number(row, key)?), null]);
            let at = format!("{tokens}, {step}");
            table.push(json!({"name": "PyTorch, bf16, compiled", "at": at, "values": values}));
        }
    }
    Ok(file)
}

/// Makes the table of a job of the benchmark of layers; `prefix` is left out of its settings.
fn layers(
    part: &Part,
    (job, prefix): (&str, &str),
    title: &'static str,
    note: &'static str,
) -> Result<Value> {
    let at = |_: &str, at: &str| Some(at.strip_prefix(prefix).unwrap_or(at).to_owned());
    let table = benchmark(part, job, &["ms", "GB held"], at)?;
    let heading = Heading {
        title,
        method: "the host's clock around ten steps, the fastest of three batches",
        notes: vec![note.into()],
        about: &["burn_backend/src", "formats/src", "cube_kernels/src"],
        row: "layer",
        units: &[("ms", 3), ("GB held", 2)],
    };
    results(part, heading, table)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(name: &str, jobs: Value) -> Part {
        let jobs: Vec<Value> = jobs
            .as_array()
            .unwrap()
            .iter()
            .map(|job| json!({"name": job[0], "status": 0, "figures": job[1]}))
            .collect();
        Part {
            value: json!({
                "part": name, "commit": "0123abc", "gpu": "NVIDIA H200", "driver": "580.1",
                "date": "2026-11-30", "jobs": jobs,
            }),
        }
    }

    #[test]
    fn attention_is_joined_with_both_backends() {
        let row = |name: &str, us: f64| json!({"name": name, "at": "attention 32x64, 512 tokens", "values": [us, null]});
        let own = json!({"units": [{"name": "µs"}, {"name": "GB/s"}], "rows": [
            row("attention", 100.0), row("attention, backward", 300.0),
        ]});
        let pytorch = json!({"torch": "2.11", "cudnn": 91900, "rows": [{
            "attention": 512, "head": 64, "heads": 32, "flash_both_ms": 0.8, "cudnn_both_ms": 0.5,
        }]});
        let jobs = json!([["attention", own], ["pytorch-attention", pytorch]]);
        let found = attention(&part("attention", jobs)).unwrap();
        let row = &found["rows"][0];
        assert_eq!(row["values"], json!([0.1, 0.4, 0.8, 0.5, 50.0, 80.0]));
        assert_eq!(row["at"], "head size 64, 32 heads");
        assert_eq!(found["commit"], "0123abc");
    }

    #[test]
    fn names_of_kernels_are_spelled_out() {
        for (short, long) in [
            (
                "row RN + col RHT SR, one read",
                "rowwise RN + columnwise RHT SR, one read",
            ),
            ("per token RN, f16", "per-row amax: rowwise RN, f16"),
            ("MXFP8 row, f16", "MXFP8 rowwise, f16"),
            ("16x16 tiles, 4/6, both copies", "16x16 tiles, 4/6"),
            (
                "amax plain + RHT, one read",
                "amax and amax after the RHT, one read",
            ),
            (
                "per token rows RN + columns RHT SR",
                "per token rows RN + columns RHT SR",
            ),
        ] {
            assert_eq!(spelled(short), long);
        }
    }

    #[test]
    fn kernels_of_other_shapes_are_left_out() {
        let figures = |at: &str| {
            json!({"units": [{"name": "GB/s"}, {"name": "µs"}, {"name": "% of copy"}], "rows": [
                {"name": "copy", "at": at, "values": [2741.0, 97.9, 100.0]},
                {"name": "norm", "at": format!("norms {at}"), "values": [1.0, 2.0, 3.0]},
            ]})
        };
        let jobs = json!([
            ["kernels-8192", figures("8192x8192")],
            ["kernels-16384", figures("16384x16384")]
        ]);
        let found = kernels(&part("kernels", jobs)).unwrap();
        assert_eq!(found["rows"].as_array().unwrap().len(), 2);
        assert_eq!(found["rows"][1]["at"], "16384²");
        assert_eq!(found["rows"][0]["values"], json!([97.9, 100.0]));
        assert!(found["notes"][0].as_str().unwrap().contains("2741 GB/s"));
    }

    #[test]
    fn decoding_is_of_the_bandwidth_of_the_gpu() {
        let pytorch =
            json!({"results": [{"shape": "llama-3.2-1b", "prefill": null, "step": 0.002}]});
        let own = json!({"results": [{
            "shape": "llama-3.2-1b", "prefill": 0.02, "step": 0.001, "step_bytes": 2.4e9,
            "copy_bandwidth": 3e12,
        }]});
        let jobs = json!([
            ["pytorch-decode", pytorch],
            ["decode-stored", own.clone()],
            ["decode-fp8", own.clone()],
            ["decode-nvfp4", own],
        ]);
        let found = decode(&part("decode", jobs)).unwrap();
        let values = json!([20.0, 1.0, 50.0, 2.4, 50.0]);
        assert_eq!(found["rows"][1]["values"], values);
        assert!(found["notes"][1].as_str().unwrap().contains("4.80 TB/s"));
    }
}
