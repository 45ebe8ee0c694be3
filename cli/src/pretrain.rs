//! `nvfp4 pretrain`.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Args;
use nvfp4_lm::checkpoint::read_json;
use nvfp4_lm::decoder::FrozenForm;
use nvfp4_lm::finetune::config::CONFIG;
use nvfp4_lm::finetune::{Objective, init::write_random};
use nvfp4_lm::hf::DecoderConfig;
use nvfp4_lm::ranks::on_first_at_length;
use nvfp4_lm::tokens::bpe;

use crate::finetune::{Defaults, FinetuneRun, NOT_NEW, STARTING, Start, TrainingOptions};
use crate::ranks::Ranks;
use crate::session::check_new;

/// Defaults of `pretrain` that differ from those of `finetune`.
const DEFAULTS: Defaults = Defaults {
    lr: 3e-4,
    weight_decay: 0.1,
};

/// Subfolder of a trained tokenizer.
const TOKENIZER: &str = "tokenizer";
/// Subfolder of the untrained model.
const INIT: &str = "init";

#[derive(Args)]
pub(crate) struct Pretrain {
    /// Build the decoder described by this config.json; its family must be one that `generate`
    /// supports
    #[arg(long, value_name = "FILE", required_unless_present_any = NOT_NEW)]
    model_config: Option<PathBuf>,
    /// Use the tokenizer in this folder
    #[arg(long, value_name = "DIR", required_unless_present_any = ["resume", "print_config", "train_tokenizer"])]
    tokenizer: Option<PathBuf>,
    /// Train a byte-level BPE tokenizer on the texts of --data, with at most the vocabulary size of
    /// config.json
    #[arg(long, conflicts_with = "tokenizer")]
    train_tokenizer: bool,
    #[command(flatten)]
    options: TrainingOptions,
}

impl Pretrain {
    pub(crate) fn run(self) -> Result<ExitCode> {
        Ranks::run(|ranks| self.run_rank(ranks))
    }

    fn run_rank(&self, ranks: &Ranks) -> Result<ExitCode> {
        let options = &self.options;
        if let Some(folder) = &options.resume {
            ensure!(
                self.model_config.is_none() && self.tokenizer.is_none() && !self.train_tokenizer,
                "resume is given: --model-config, --tokenizer and --train-tokenizer are those of the run \
                 and cannot be changed; leave them out"
            );
            return FinetuneRun::resume(folder, options, "pretrain", ranks)?.run(ranks);
        }
        let made = on_first_at_length(ranks.group(), || self.model())?;
        let start = Start {
            // Only rank 0 prints the model.
            model: made.unwrap_or_default(),
            objective: Objective::CrossEntropy,
            lora: None,
            frozen: FrozenForm::High,
            merge: false,
            defaults: DEFAULTS,
        };
        FinetuneRun::begin(start, options, "pretrain", ranks)?.run(ranks)
    }

    /// Creates the model with random weights and returns its folder.
    fn model(&self) -> Result<PathBuf> {
        let options = &self.options;
        let config = self
            .model_config
            .as_deref()
            .context("model-config is not given")?;
        let out = options.out.as_deref().context("out is not given")?;
        let model = std::path::absolute(out.join(INIT))?;
        check_new(out, CONFIG)?;
        let mark = out.join(STARTING);
        if mark.exists() {
            // The start was interrupted, or failed.
            for folder in [INIT, TOKENIZER].map(|name| out.join(name)) {
                if folder.exists() {
                    std::fs::remove_dir_all(&folder)
                        .with_context(|| format!("{} cannot be removed", folder.display()))?;
                }
            }
        }
        std::fs::create_dir_all(out)
            .and_then(|()| std::fs::write(&mark, ""))
            .with_context(|| format!("out {} cannot be made", out.display()))?;
        let (tokenizer, eos) = match &self.tokenizer {
            Some(folder) => (folder.clone(), None),
            None => {
                let folder = out.join(TOKENIZER);
                let json = read_json(config)?;
                let parsed = DecoderConfig::from_json(&json);
                let parsed = parsed.with_context(|| config.display().to_string())?;
                bpe::train(&options.data, parsed.vocab, &folder)?;
                (folder, Some(bpe::END_OF_TEXT_ID))
            }
        };
        write_random(config, &tokenizer, eos, &model, options.seed)?;
        Ok(model)
    }
}
