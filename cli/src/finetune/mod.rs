//! `nvfp4 finetune`.

mod options;
mod session;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Args;
use nvfp4_lm::finetune::Objective;

pub(crate) use options::{Defaults, TrainingOptions};
pub(crate) use session::{Session, Start};

/// Defaults where they differ between the commands.
const DEFAULTS: Defaults = Defaults {
    lr: 1e-5,
    weight_decay: 0.0,
};

#[derive(Args)]
pub(crate) struct Finetune {
    /// Begin with the model in this folder: config.json, safetensors files and tokenizer.json
    #[arg(value_name = "MODEL", required_unless_present = "resume")]
    model: Option<PathBuf>,
    /// Minimise the KL divergence to a frozen model in high precision, instead of the cross entropy:
    /// to MODEL itself, or to --teacher
    #[arg(long)]
    distill: bool,
    /// Distill from the model in this folder, which has the same tokens
    #[arg(long, value_name = "DIR")]
    teacher: Option<PathBuf>,
    /// Divide the logits of both models [default: 1]
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f64>,
    #[command(flatten)]
    options: TrainingOptions,
}

impl Finetune {
    pub(crate) fn run(self) -> Result<ExitCode> {
        if let Some(folder) = &self.options.resume {
            ensure!(
                self.model.is_none() && !self.distill && self.teacher.is_none(),
                "resume is given, but what to train is, too: the folder of the run says it"
            );
            return Session::resume(folder, &self.options, "finetune")?.run();
        }
        let model = self.model.clone().context("model is not given")?;
        let objective = self.objective(&model)?;
        let start = Start {
            model: std::path::absolute(&model)?,
            objective,
            defaults: DEFAULTS,
        };
        Session::begin(start, &self.options, "finetune")?.run()
    }

    fn objective(&self, model: &PathBuf) -> Result<Objective> {
        if !self.distill && self.teacher.is_none() {
            ensure!(
                self.temperature.is_none(),
                "temperature is given, but it needs --distill or --teacher"
            );
            return Ok(Objective::CrossEntropy);
        }
        Ok(Objective::Distillation {
            teacher: std::path::absolute(self.teacher.as_ref().unwrap_or(model))?,
            temperature: self.temperature.unwrap_or(1.0),
        })
    }
}
