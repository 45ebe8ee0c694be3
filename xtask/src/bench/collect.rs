//! Makes results files from the figures of a machine.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::part::{Heading, Part, Row, number, results, rows};
use super::tables;

/// Makes the results file of a table.
type Make = fn(&Part) -> Result<Value>;

/// Part, results file and function of each table.
const TABLES: [(&str, &str, Make); 11] = [
    ("encoder", "encoder", encoder),
    ("flux", "flux", flux),
    ("step", "step-fastest", step),
    ("kernels", "kernels", tables::kernels),
    ("kernels", "per-token-sweep", tables::per_token),
    ("gemm", "gemm", tables::gemm),
    ("attention", "attention", tables::attention),
    ("decode", "decode", tables::decode),
    ("layers", "presets", tables::presets),
    ("layers", "mlp", tables::mlp),
    ("layers", "gemm-forms", tables::gemm_forms),
];

/// Name of PyTorch's rows.
const PYTORCH: &str = "PyTorch, bf16";

/// Time and memory of a step.
#[derive(Clone, Copy)]
struct Step {
    milliseconds: f64,
    /// Gigabytes that the process holds.
    held: Option<f64>,
}

/// A table of steps: name, setting and measurement of each row.
type Rows = Vec<(String, String, Step)>;

/// Writes `results/NAME.json` in `root` for each part in `folder`.
///
/// # Errors
/// Returns an error if there is no part, a job of a part failed, or a figure is missing.
pub fn record(folder: &Path, root: &Path) -> Result<()> {
    let mut found = 0;
    for (part, name, make) in TABLES {
        let path = folder.join(part).with_extension("json");
        if !path.exists() {
            continue;
        }
        let read = || -> Result<Value> {
            let text = fs::read_to_string(&path)?;
            make(&Part {
                value: serde_json::from_str(&text)?,
            })
        };
        let results = read().with_context(|| path.display().to_string())?;
        let target = root.join("results").join(name).with_extension("json");
        fs::write(&target, serde_json::to_string_pretty(&results)? + "\n")
            .with_context(|| target.display().to_string())?;
        println!("{}", target.display());
        found += 1;
    }
    ensure!(found > 0, "{} has no file of a part", folder.display());
    println!("`cargo xtask results` makes the tables of README and book");
    Ok(())
}

/// Makes a results file of `rows`, relative to PyTorch's row of the same setting.
fn beside_pytorch(part: &Part, about: About, rows: &Rows) -> Result<Value> {
    let table = rows.iter().map(|(name, at, step)| -> Result<Row> {
        let is_baseline = |row: &&(String, String, Step)| row.0 == PYTORCH && row.1 == *at;
        let (_, _, base) = rows.iter().find(is_baseline).context("no row of PyTorch")?;
        let percent = |value: f64, of: f64| 100.0 * value / of;
        let time = percent(step.milliseconds, base.milliseconds);
        let memory = step.held.zip(base.held);
        let memory = memory.map(|(held, of)| percent(held, of));
        let values = vec![Some(step.milliseconds), Some(time), step.held, memory];
        Ok((name.clone(), Some(at.clone()), values))
    });
    let heading = Heading {
        title: about.title,
        method: "one call; PyTorch's rows are the fastest of its variants",
        notes: about.notes.iter().map(|&note| note.into()).collect(),
        about: &[
            "formats/src",
            "cube_kernels/src",
            "burn_backend/src",
            "lm/src",
        ],
        row: "step",
        units: &[
            ("ms", 1),
            ("% of PyTorch's time", 0),
            ("GB held", 1),
            ("% of PyTorch's memory", 0),
        ],
    };
    results(part, heading, table.collect::<Result<_>>()?)
}

/// Heading and notes of a table.
struct About {
    title: &'static str,
    notes: &'static [&'static str],
}

/// Note on memory.
const MEMORY: &str = "Memory is what the process holds: the pools, and what PyTorch reserves.";

/// Steps of the benchmark `layers` by `jobs`, names and prefixes of their settings, beside PyTorch's
/// steps of `what`.
fn layers(part: &Part, what: &str, jobs: &[(&str, &str)]) -> Result<Rows> {
    let mut table = Rows::new();
    for row in rows(part.job(&format!("pytorch-{what}"))?, "rows")? {
        let at = row[what].as_str();
        let at = at.with_context(|| format!("no {what}"))?;
        let variants = ["default", "reduce-overhead"].map(|mode| -> Result<Step> {
            Ok(Step {
                milliseconds: number(row, &format!("{mode}_ms"))?,
                held: Some(number(row, &format!("{mode}_reserved_gb"))?),
            })
        });
        let [default, graphs] = variants;
        let (default, graphs) = (default?, graphs?);
        let fastest = match default.milliseconds <= graphs.milliseconds {
            true => default,
            false => graphs,
        };
        table.push((PYTORCH.into(), at.into(), fastest));
    }
    for (job, prefix) in jobs {
        for row in rows(part.job(job)?, "rows")? {
            let name = row["name"].as_str().context("a row has no name")?;
            let at = row["at"].as_str().context("a row has no setting")?;
            let values = rows(row, "values")?;
            let step = Step {
                milliseconds: values[0].as_f64().context("no time")?,
                held: values.get(1).and_then(Value::as_f64),
            };
            let at = at.strip_prefix(prefix).unwrap_or(at);
            table.push((name.into(), at.into(), step));
        }
    }
    Ok(table)
}

/// Note on PyTorch's steps.
const PYTORCH_STEPS: &str =
    "PyTorch: `torch.compile`, with and without CUDA graphs, bf16 autocast, fused AdamW.";

/// Steps of an encoder.
fn encoder(part: &Part) -> Result<Value> {
    let jobs = [
        ("encoder", "encoder "),
        ("encoder-decorated", "decorated encoder "),
    ];
    beside_pytorch(
        part,
        About {
            title: "Training step of a transformer encoder beside `torch.nn.TransformerEncoder`",
            notes: &[
                "Forward with a causal mask, backward, AdamW. 768 x 12: 12 heads, batch 16, length 1024. 4096 x 1: 32 heads, batch 16, length 512. The feed-forward is four times as wide.",
                "`burn-nn` is `burn_nn::transformer::TransformerEncoder`; `nvfp4::nn` has the same configuration, with another `use` line. Decorated rows are of burn-nn's encoder.",
                PYTORCH_STEPS,
                MEMORY,
            ],
        },
        &layers(part, "encoder", &jobs)?,
    )
}

/// Steps of a block of a diffusion transformer.
fn flux(part: &Part) -> Result<Value> {
    beside_pytorch(
        part,
        About {
            title: "Training step of a block of a diffusion transformer beside PyTorch's",
            notes: &[
                "Forward, backward, AdamW of one block like FLUX's: streams of text and of patches with joint attention of 24 heads, norms of queries and keys, modulation, a GELU feed-forward that is four times as wide; no rotary positions. Batch 1.",
                PYTORCH_STEPS,
                MEMORY,
            ],
        },
        &layers(part, "flux", &[("flux", "flux ")])?,
    )
}

/// Steps of the language model.
fn step(part: &Part) -> Result<Value> {
    let settings = [
        ("step-4096", "layer", "width 4096, 1 block"),
        ("step-768", "gpt2-size", "width 768, 12 blocks"),
        ("step-1b", "1b", "1 B"),
    ];
    let pytorch = rows(part.job("pytorch-step")?, "rows")?;
    let mut table = Rows::new();
    for (_, model, at) in settings {
        let row = pytorch.iter().find(|row| row["step"] == model);
        let row = row.with_context(|| format!("PyTorch has no row {model}"))?;
        let step = Step {
            milliseconds: number(row, "ms")?,
            held: Some(number(row, "reserved_gb")?),
        };
        table.push((PYTORCH.into(), at.into(), step));
    }
    for (job, _, at) in settings {
        for result in rows(part.job(job)?, "results")? {
            let recipe = result["recipe"].as_str().context("no recipe")?;
            let mut seconds: Vec<f64> = rows(result, "seconds")?
                .iter()
                .filter_map(Value::as_f64)
                .collect();
            seconds.sort_by(f64::total_cmp);
            let median = seconds.get(seconds.len() / 2).context("no rounds")?;
            let step = Step {
                milliseconds: 1e3 * median,
                held: result["memory"]["reserved"]
                    .as_f64()
                    .map(|bytes| bytes / 1e9),
            };
            table.push((format!("`{recipe}`"), at.into(), step));
        }
    }
    beside_pytorch(
        part,
        About {
            title: "Training step as a CUDA graph beside PyTorch's",
            notes: &[
                "PyTorch: `torch.compile`, the faster of SDPA's flash and cuDNN, heads by one permute, fused AdamW, bf16 autocast over f32 weights, gradients clipped.",
                MEMORY,
                "Width 4096: 32 heads, hidden 12288, context 512, batch 16. Width 768: 12 heads, hidden 2048, context 1024, batch 16. 1 B: width 2048, 16 blocks, 32 heads, hidden 8192, context 2048, batch 4.",
            ],
        },
        &table,
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn part(jobs: Value) -> Part {
        Part {
            value: json!({
                "part": "encoder", "commit": "0123abc", "gpu": "NVIDIA H200", "driver": "580.1",
                "date": "2026-11-30", "jobs": jobs,
            }),
        }
    }

    #[test]
    fn percentages_are_of_the_faster_variant_of_the_same_setting() {
        let pytorch = json!({"rows": [{
            "encoder": "768 x 12", "default_ms": 30.0, "default_reserved_gb": 8.0,
            "reduce-overhead_ms": 25.0, "reduce-overhead_reserved_gb": 10.0,
        }]});
        let row = |name: &str, at: &str, ms: f64, held: Option<f64>| json!({"name": name, "at": at, "values": [ms, held]});
        let encoder_rows =
            json!({"rows": [row("nvfp4::nn, bf16", "encoder 768 x 12", 20.0, Some(5.0))]});
        let decorated =
            json!({"rows": [row("decorated", "decorated encoder 768 x 12", 50.0, None)]});
        let job =
            |name: &str, figures: Value| json!({"name": name, "status": 0, "figures": figures});
        let jobs = json!([
            job("pytorch-encoder", pytorch),
            job("encoder", encoder_rows),
            job("encoder-decorated", decorated),
        ]);
        let results = encoder(&part(jobs)).unwrap();
        let values: Vec<&Value> = rows(&results, "rows")
            .unwrap()
            .iter()
            .map(|row| &row["values"])
            .collect();
        assert_eq!(*values[0], json!([25.0, 100.0, 10.0, 100.0]));
        assert_eq!(*values[1], json!([20.0, 80.0, 5.0, 50.0]));
        assert_eq!(*values[2], json!([50.0, 200.0, null, null]));
        assert!(results["rows"][2]["at"] == "768 x 12");
    }

    #[test]
    fn steps_of_a_block_are_relative_to_pytorch() {
        let pytorch = json!({"rows": [{
            "flux": "3072, 512 + 3584 tokens", "default_ms": 20.0, "default_reserved_gb": 8.0,
            "reduce-overhead_ms": 25.0, "reduce-overhead_reserved_gb": 10.0,
        }]});
        let ours = json!({"rows": [{
            "name": "nvfp4::nn, bf16", "at": "flux 3072, 512 + 3584 tokens", "values": [21.0, 4.0],
        }]});
        let job = |name: &str, figures| json!({"name": name, "status": 0, "figures": figures});
        let jobs = json!([job("pytorch-flux", pytorch), job("flux", ours)]);
        let results = flux(&part(jobs)).unwrap();
        assert_eq!(
            results["rows"][1]["values"],
            json!([21.0, 105.0, 4.0, 50.0])
        );
    }

    #[test]
    fn a_failed_job_is_no_result() {
        let jobs =
            json!([{"name": "pytorch-encoder", "status": "no time was left", "figures": null}]);
        let error = encoder(&part(jobs)).unwrap_err().to_string();
        assert!(
            error.contains("pytorch-encoder failed: \"no time was left\""),
            "{error}"
        );
    }
}
