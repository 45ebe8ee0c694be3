//! `nvfp4 finetune`.

mod options;
mod run;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Args;
use nvfp4_lm::decoder::lora::DEFAULT_TARGETS;
use nvfp4_lm::decoder::{FrozenForm, LoraConfig};
use nvfp4_lm::finetune::Objective;

pub(crate) use options::{Defaults, NOT_NEW, TrainingOptions};
pub(crate) use run::{FinetuneRun, STARTING, Start};

use crate::ranks::Ranks;

/// Defaults of `finetune` that differ from those of `pretrain`.
const DEFAULTS: Defaults = Defaults {
    lr: 1e-5,
    weight_decay: 0.0,
};

/// Defaults for LoRA: adapters start at zero and take larger steps.
const LORA_DEFAULTS: Defaults = Defaults {
    lr: 2e-4,
    ..DEFAULTS
};

#[derive(Args)]
pub(crate) struct Finetune {
    /// Start from the model in this folder: config.json, safetensors files and tokenizer.json
    #[arg(value_name = "MODEL", required_unless_present_any = NOT_NEW)]
    model: Option<PathBuf>,
    /// Minimise the KL divergence to a frozen teacher instead of the cross entropy: MODEL itself,
    /// or --teacher
    #[arg(long)]
    distill: bool,
    /// Distill from the model in this folder, which must have the same tokens
    #[arg(long, value_name = "DIR")]
    teacher: Option<PathBuf>,
    /// Keep the teacher's weights in this form [default: w4a16 if its folder is quantized, else
    /// high]
    #[arg(long, value_name = "FORM")]
    teacher_form: Option<FrozenForm>,
    /// Divide the logits by this temperature: those of both models [default: 1]
    #[arg(long, value_name = "T")]
    temperature: Option<f64>,
    /// Freeze the model and train LoRA adapters of this rank on its projections
    #[arg(long, value_name = "RANK")]
    lora: Option<usize>,
    /// Keep the frozen weights in this form [default: w4a16 if MODEL is quantized, else high]
    ///
    /// The weights of a quantized folder are kept as they are, or dequantized. For any other
    /// folder, w4a16 and w4a4 quantize the projections and experts at load time by rounding to
    /// nearest. Weights in the form high have the type of the activations; --recipe or --qat
    /// quantizes them in each step.
    #[arg(long, value_name = "FORM", requires = "lora")]
    frozen: Option<FrozenForm>,
    /// Scale the adapters' output by this value (LoRA alpha) divided by the rank [default: twice
    /// the rank]
    #[arg(long, value_name = "A", requires = "lora")]
    lora_alpha: Option<f64>,
    /// Train adapters on modules whose name matches this regular expression [default: all
    /// projections of attention and dense feed-forwards]
    #[arg(long, value_name = "REGEX", requires = "lora")]
    lora_targets: Option<String>,
    /// Also write the model with the adapters merged
    #[arg(long, requires = "lora")]
    merge: bool,
    #[command(flatten)]
    options: TrainingOptions,
}

impl Finetune {
    pub(crate) fn run(self) -> Result<ExitCode> {
        Ranks::run(|ranks| self.run_rank(ranks))
    }

    fn run_rank(&self, ranks: &Ranks) -> Result<ExitCode> {
        if let Some(folder) = &self.options.resume {
            ensure!(
                self.model.is_none()
                    && !self.distill
                    && self.teacher.is_none()
                    && self.teacher_form.is_none()
                    && self.temperature.is_none()
                    && self.lora.is_none(),
                "resume is given: MODEL, --lora, --distill, --teacher, --teacher-form and --temperature are \
                 those of the run and cannot be changed; leave them out"
            );
            return FinetuneRun::resume(folder, &self.options, "finetune", ranks)?.run(ranks);
        }
        let model = self.model.clone().context("model is not given")?;
        let objective = self.objective(&model)?;
        let start = Start {
            model: std::path::absolute(&model)?,
            objective,
            lora: self.lora.map(|rank| LoraConfig {
                rank,
                alpha: self.lora_alpha.unwrap_or(2.0 * rank as f64),
                targets: self
                    .lora_targets
                    .clone()
                    .unwrap_or_else(|| DEFAULT_TARGETS.into()),
            }),
            frozen: match (self.lora, self.frozen) {
                (None, _) => FrozenForm::High,
                (Some(_), Some(form)) => form,
                (Some(_), None) => FrozenForm::of(&model)?,
            },
            merge: self.merge,
            defaults: match self.lora {
                None => DEFAULTS,
                Some(_) => LORA_DEFAULTS,
            },
        };
        FinetuneRun::begin(start, &self.options, "finetune", ranks)?.run(ranks)
    }

    fn objective(&self, model: &PathBuf) -> Result<Objective> {
        if !self.distill && self.teacher.is_none() {
            for (name, is_given) in [
                ("temperature", self.temperature.is_some()),
                ("teacher-form", self.teacher_form.is_some()),
            ] {
                ensure!(
                    !is_given,
                    "{name} is given, but it needs --distill or --teacher"
                );
            }
            return Ok(Objective::CrossEntropy);
        }
        let teacher = std::path::absolute(self.teacher.as_ref().unwrap_or(model))?;
        Ok(Objective::Distillation {
            form: match self.teacher_form {
                Some(form) => form,
                None => FrozenForm::of(&teacher)?,
            },
            teacher,
            temperature: self.temperature.unwrap_or(1.0),
        })
    }
}
