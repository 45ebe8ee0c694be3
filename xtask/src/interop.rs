//! `cargo xtask test --interop`: what nvfp4 writes, read by the tools that it is written for.
//!
//! A Python environment in the target folder has transformers, compressed-tensors, ModelOpt and
//! PEFT. Tiny models that transformers makes are quantized, converted and finetuned by the command
//! `nvfp4`; `check.py` compares what the tools read with what nvfp4 reads, and the logits. `awq.py`
//! has ModelOpt export what nvfp4 reads but does not write. All of it runs on the CPU.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::workspace::{self, FEATURES};

const REQUIREMENTS: &str = include_str!("../requirements/interop.txt");

/// The models that `models.py` makes.
const MODELS: [&str; 4] = ["llama3", "mixtral", "qwen3", "qwen3moe"];

/// Those that ModelOpt exports as `NVFP4_AWQ`: not those with experts, as transformers 5 has them.
const AWQ: [&str; 2] = ["llama3", "qwen3"];

/// The test that writes the values which nvfp4 reads.
const VALUES: &str = "interchange::tools::values_for_the_tools";

/// A quantization by `nvfp4 quantize`: its dialect, the other one, and options.
///
/// `check.py` knows by the name: what has `awq-` in it is smoothed, and is compared with the export
/// that has the name without.
struct Export {
    name: &'static str,
    dialect: &'static str,
    /// Converted to this dialect too.
    other: Option<&'static str>,
    /// Calibrated on the text.
    calibrated: bool,
    options: &'static [&'static str],
}

const EXPORTS: [Export; 8] = [
    Export {
        name: "ct-w4a16",
        dialect: "compressed-tensors",
        other: None,
        calibrated: false,
        options: &["--method", "rtn"],
    },
    Export {
        name: "ct-w4a4",
        dialect: "compressed-tensors",
        other: Some("modelopt"),
        calibrated: true,
        options: &["--scheme", "w4a4", "--kv", "fp8"],
    },
    Export {
        name: "modelopt-w4a16",
        dialect: "modelopt",
        other: Some("compressed-tensors"),
        calibrated: false,
        options: &["--method", "rtn"],
    },
    Export {
        name: "modelopt-w4a4",
        dialect: "modelopt",
        other: Some("compressed-tensors"),
        calibrated: true,
        options: &["--scheme", "w4a4", "--kv", "fp8"],
    },
    Export {
        name: "ct-awq-w4a16",
        dialect: "compressed-tensors",
        other: Some("modelopt"),
        calibrated: true,
        options: &["--method", "rtn", "--smooth", "awq"],
    },
    Export {
        name: "ct-awq-w4a4",
        dialect: "compressed-tensors",
        other: None,
        calibrated: true,
        options: &["--scheme", "w4a4", "--smooth", "awq", "--kv", "fp8"],
    },
    Export {
        name: "modelopt-awq-w4a16",
        dialect: "modelopt",
        other: None,
        calibrated: true,
        options: &["--method", "rtn", "--smooth", "awq", "--kv", "fp8"],
    },
    Export {
        name: "modelopt-awq-w4a4",
        dialect: "modelopt",
        other: Some("compressed-tensors"),
        calibrated: true,
        options: &["--scheme", "w4a4", "--smooth", "awq"],
    },
];

/// Makes the environment, the models and what nvfp4 makes of them; compares.
///
/// Fails when a check fails. The checks are in `report.json` of the stage's folder.
pub fn run() -> Result<()> {
    let folder = workspace::target_folder()?.join("interop");
    let python = environment(&folder)?;
    let work = folder.join("work");
    if work.exists() {
        fs::remove_dir_all(&work).with_context(|| work.display().to_string())?;
    }
    let made = work.join("made");
    fs::create_dir_all(&made).with_context(|| made.display().to_string())?;
    let base = work.join("base");
    workspace::spawn(script(&python, "models.py").arg(&base))?;
    workspace::spawn(script(&python, "awq.py").args([&base, &made]).args(AWQ))?;
    let stage = Stage { base, made };
    for model in MODELS {
        stage.quantize(model)?;
        stage.finetune(model)?;
    }
    for model in AWQ {
        stage.rewrite(model)?;
    }
    stage.adapt("llama3")?;
    stage.adapt("qwen3")?;
    let mut values = workspace::cargo();
    values
        .args(["test", "--package", "nvfp4-lm", "--lib"])
        .args(["--features", FEATURES, "--", "--ignored", "--exact", VALUES])
        .env("NVFP4_INTEROP", &work);
    workspace::spawn(&mut values)?;
    let mut check = script(&python, "check.py");
    check.args([&stage.base, &stage.made, &work.join("ours")]);
    workspace::spawn(check.arg(folder.join("report.json")))
}

/// The Python of the environment in `folder`, made anew when other packages are required.
fn environment(folder: &Path) -> Result<PathBuf> {
    let environment = folder.join("venv");
    let python = environment.join("bin/python");
    let installed = folder.join("installed.txt");
    if fs::read_to_string(&installed).is_ok_and(|text| text == REQUIREMENTS) && python.exists() {
        return Ok(python);
    }
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let mut make = Command::new("python3");
    workspace::spawn(make.args(["-m", "venv", "--clear"]).arg(&environment))?;
    let mut install = Command::new(&python);
    install.args(["-m", "pip", "install", "--no-input", "--no-compile"]);
    install.args(["--quiet", "--disable-pip-version-check", "--requirement"]);
    let requirements = workspace::root().join("xtask/requirements/interop.txt");
    workspace::spawn(install.arg(requirements))?;
    // Written last: an environment whose installation failed is made again.
    fs::write(&installed, REQUIREMENTS).with_context(|| installed.display().to_string())?;
    Ok(python)
}

/// A script of `xtask/interop`, which must not reach for a network.
fn script(python: &Path, name: &str) -> Command {
    let mut command = Command::new(python);
    command
        .arg(workspace::root().join("xtask/interop").join(name))
        .env("HF_HUB_OFFLINE", "1");
    command
}

/// The folders of one run.
struct Stage {
    /// The models and texts that transformers made.
    base: PathBuf,
    /// What nvfp4 made, a folder for each.
    made: PathBuf,
}

impl Stage {
    /// Runs the command `nvfp4`.
    fn nvfp4(&self, arguments: &[&str], paths: &[(&str, PathBuf)]) -> Result<()> {
        let mut command = workspace::cargo();
        command.args(["run", "--quiet", "--package", "nvfp4-cli"]);
        command.args(["--features", FEATURES, "--"]).args(arguments);
        for (option, path) in paths {
            ensure!(
                option.is_empty() || option.starts_with("--"),
                "{option} is no option"
            );
            if !option.is_empty() {
                command.arg(option);
            }
            command.arg(path);
        }
        workspace::spawn(&mut command)
    }

    fn made(&self, model: &str, what: &str) -> PathBuf {
        self.made.join(format!("{model}-{what}"))
    }

    /// Both dialects and schemes, and conversions between the dialects.
    fn quantize(&self, model: &str) -> Result<()> {
        for export in EXPORTS {
            let out = self.made(model, export.name);
            let fixed = ["quantize", "--device", "flex", "--dialect", export.dialect];
            let mut paths = vec![("--out", out.clone()), ("", self.base.join(model))];
            let mut arguments = [&fixed[..], export.options].concat();
            if export.calibrated {
                let text = ["--calibration-length", "64", "--calibration-sequences", "4"];
                arguments.extend(text);
                paths.insert(0, ("--calibration", self.base.join("text.txt")));
            }
            self.nvfp4(&arguments, &paths)?;
            if let Some(other) = export.other {
                let name = format!("{}-to-{other}", export.name);
                let paths = [("--out", self.made(model, &name)), ("", out)];
                self.nvfp4(&["convert", "--to", other], &paths)?;
            }
        }
        Ok(())
    }

    /// What ModelOpt exported, in its own dialect.
    fn rewrite(&self, model: &str) -> Result<()> {
        let from = self.made(model, "awq-by-modelopt");
        let out = self.made(model, "awq-by-modelopt-to-modelopt");
        self.nvfp4(
            &["convert", "--to", "modelopt"],
            &[("--out", out), ("", from)],
        )
    }

    /// Two steps on all parameters; saved in bf16, and quantized with activations.
    fn finetune(&self, model: &str) -> Result<()> {
        let run = self.run_of(model, "run");
        let short = ["--steps", "2", "--context", "64", "--batch", "2"];
        let export = ["--export", "modelopt", "--export-scheme", "w4a4"];
        let fixed = ["finetune", "--device", "flex", "--qat", "w4a4"];
        self.nvfp4(
            &[&fixed[..], &short, &export].concat(),
            &self.training(model, &run),
        )?;
        rename(&run.join("model"), &self.made(model, "finetuned"))?;
        rename(&run.join("nvfp4"), &self.made(model, "trained-w4a4"))
    }

    /// Adapters, and the model with them merged, in f32.
    fn adapt(&self, model: &str) -> Result<()> {
        let run = self.run_of(model, "lora");
        let short = ["--steps", "4", "--context", "64", "--batch", "2"];
        // Steps large enough that logits without the adapters would be told from these.
        let lora = ["--lora", "4", "--merge", "--lr", "0.01", "--recipe", "f32"];
        let fixed = ["finetune", "--device", "flex", "--save-dtype", "f32"];
        self.nvfp4(
            &[&fixed[..], &short, &lora].concat(),
            &self.training(model, &run),
        )?;
        rename(&run.join("model"), &self.made(model, "merged"))?;
        rename(&run.join("adapter"), &self.made(model, "adapter"))
    }

    fn run_of(&self, model: &str, kind: &str) -> PathBuf {
        self.base.with_file_name(format!("{model}-{kind}"))
    }

    /// Data, output and model of a training run.
    fn training(&self, model: &str, run: &Path) -> [(&'static str, PathBuf); 3] {
        [
            ("--data", self.base.join("text.jsonl")),
            ("--out", run.to_owned()),
            ("", self.base.join(model)),
        ]
    }
}

fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).with_context(|| format!("{} to {}", from.display(), to.display()))
}
