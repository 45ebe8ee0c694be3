//! Runs `finetune` or `pretrain`, from the options to the folders written.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use burn::tensor::{Bytes, Device};
use nvfp4_lm::checkpoint::{read_json, write_json};
use nvfp4_lm::decoder::{FrozenForm, LoraConfig};
use nvfp4_lm::finetune::config::CONFIG;
use nvfp4_lm::finetune::data::TextReader;
use nvfp4_lm::finetune::memory::{check_model, trained};
use nvfp4_lm::finetune::saved::saved_loss;
use nvfp4_lm::finetune::{Finetune, FinetuneConfig, FinetuneTask, Objective, TrainingData};
use nvfp4_lm::interchange::{Dialect, Scheme};
use nvfp4_lm::metrics::{METRICS, read_metrics};
use nvfp4_lm::quantize::journal::JOURNAL;
use nvfp4_lm::ranks::{agree, on_first, on_first_at_length, text_of_first};
use nvfp4_lm::tokens::Cut;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::options::{Defaults, STEPS, TrainingOptions};
use crate::device::DeviceName;
use crate::options::shared::{SavedType, SessionOptions};
use crate::plot;
use crate::ranks::Ranks;
use crate::session::{Session, absolute, check_new, read_config};
use crate::shell::{program, quoted};
use crate::terminal::{note, warn_of};

/// Subfolder of the trained model.
const MODEL: &str = "model";
/// Subfolder of the adapters.
const ADAPTER: &str = "adapter";
/// Subfolder of the quantized model.
const QUANTIZED: &str = "nvfp4";
/// Default number of tokens per row, unless the model's maximum context is shorter.
const CONTEXT: usize = 1024;
/// File of a start that writes more than tokens. The run that begins removes it.
pub(crate) const STARTING: &str = ".starting";
/// Number of epochs from which on a run is told of them: more often a forgotten option than a wish.
const MANY_EPOCHS: f64 = 100.0;
/// File that records what the run writes at its end.
const RESULT: &str = "result.json";

/// Model that a run starts from.
pub(crate) struct Start {
    pub(crate) model: PathBuf,
    pub(crate) objective: Objective,
    pub(crate) lora: Option<LoraConfig>,
    /// Form of the frozen weights.
    pub(crate) frozen: FrozenForm,
    /// True if the model is also written with its adapters merged.
    pub(crate) merge: bool,
    pub(crate) defaults: Defaults,
}

/// Output written at the end of the run; the contents of `result.json`.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Written {
    dtype: SavedType,
    /// True if the model is written, and not only adapters.
    model: bool,
    /// True if the model is trained on conversations.
    #[serde(default)]
    chat: bool,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    export: Option<Export>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Export {
    #[serde(with = "by_name")]
    dialect: Dialect,
    #[serde(with = "by_name")]
    scheme: Scheme,
}

/// Serializes values of the command line by their names there.
mod by_name {
    use clap::ValueEnum;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<T: ValueEnum, S: Serializer>(
        value: &T,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        let name = value.to_possible_value().expect("no value is hidden");
        serializer.serialize_str(name.get_name())
    }

    pub(super) fn deserialize<'de, T: ValueEnum, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<T, D::Error> {
        let name = String::deserialize(deserializer)?;
        T::from_str(&name, false).map_err(D::Error::custom)
    }
}

/// A run that is ready to start.
pub(crate) struct FinetuneRun {
    config: FinetuneConfig,
    written: Written,
    /// True if the folder does not yet hold the run's configuration.
    is_new: bool,
    /// Former number of steps of an extended run, and a description of the extension.
    extended: Option<(u64, String)>,
    folder: PathBuf,
    session: SessionOptions,
    device: DeviceName,
    /// The command that resumes this run.
    command: &'static str,
}

/// Opens the tokens of the run `config` as rows.
fn rows_of(config: &FinetuneConfig) -> Result<TrainingData> {
    let vocabulary = TextReader::read(&config.model)?.vocabulary();
    TrainingData::open(config, vocabulary)
}

/// Returns the number of steps of the run `config` in `epochs` passes over its rows.
fn steps_of(config: &FinetuneConfig, epochs: f64) -> Result<u64> {
    config.steps_of(epochs, rows_of(config)?.train.len())
}

impl FinetuneRun {
    /// Starts a new run and writes its tokens to its folder. All `ranks` call this function; rank 0
    /// writes.
    pub(crate) fn begin(
        start: Start,
        options: &TrainingOptions,
        command: &'static str,
        ranks: &Ranks,
    ) -> Result<Self> {
        let group = ranks.group();
        // Tokenizing may take long.
        let made = on_first_at_length(group, || Self::prepare(start, options, group.size()))?;
        let made = match made {
            Some(made) => serde_json::to_string(&made)?,
            None => String::new(),
        };
        let made: (FinetuneConfig, Written, PathBuf) =
            serde_json::from_str(&text_of_first(group, &made)?)?;
        let (mut config, written, folder) = made;
        let device = ranks.device(DeviceName::of_config(&folder.join(CONFIG), &config.device)?);
        config.device = device.to_string();
        Ok(Self {
            config,
            written,
            is_new: true,
            extended: None,
            folder,
            session: options.session.clone(),
            device,
            command,
        })
    }

    /// Prepares a new run: returns its configuration, its output and its folder, which holds the
    /// tokens.
    fn prepare(
        start: Start,
        options: &TrainingOptions,
        ranks: usize,
    ) -> Result<(FinetuneConfig, Written, PathBuf)> {
        let folder = options.out.clone().context("out is not given")?;
        check_new(&folder, CONFIG)?;
        let device = options.device.name()?;
        let activation = options.activation(device);
        let frozen = start.lora.as_ref().map(|_| start.frozen);
        let (recipe_name, recipe, schedule) = options.recipe(activation, device, frozen)?;
        std::fs::create_dir_all(&folder)
            .with_context(|| format!("out {} cannot be made", folder.display()))?;
        warn_of(&start.model)?;
        let reader = TextReader::read(&start.model)?;
        // A default that fits the model's maximum context.
        let context = options.context.unwrap_or(CONTEXT.min(reader.longest()));
        let mut has_conversations = false;
        let mut shards = |paths: &[PathBuf], name: &str| -> Result<Vec<PathBuf>> {
            let (mut shards, found) = reader.shards(paths, &folder.join(name))?;
            has_conversations |= found.conversations > 0;
            if found.documents > 0 {
                note!(
                    "{name}: {} documents, {} files left out because they are empty or not UTF-8",
                    found.documents,
                    found.skipped
                );
            }
            absolute(&mut shards)?;
            Ok(shards)
        };
        let mut config = FinetuneConfig {
            data: options.data.clone(),
            valid: options.valid.clone(),
            valid_share: options.valid_share,
            model: start.model,
            recipe_name,
            recipe,
            schedule,
            objective: start.objective,
            lora: start.lora,
            frozen: start.frozen,
            activation,
            steps: options.steps.unwrap_or(STEPS),
            batch: options.batch,
            accumulate: options.accumulate,
            context,
            lr: options.lr.unwrap_or(start.defaults.lr),
            warmup: 0,
            weight_decay: options.weight_decay.unwrap_or(start.defaults.weight_decay),
            grad_clip: options.grad_clip,
            seed: options.seed,
            eval_every: options.eval_every,
            eval_rows: options.eval_rows,
            log_every: options.log_every,
            checkpoint_every: options.checkpoint_every,
            recompute: options.recompute,
            no_graph: options.no_graph,
            fsdp: options.fsdp,
            ep: options.ep.unwrap_or(1),
            ep_dispatch: options.ep_dispatch,
            grad_reduce: options.grad_reduce,
            device: device.to_string(),
        };
        // What is wrong is said before the text is tokenized, which may take long.
        config.check()?;
        config.check_ranks(ranks)?;
        check_model(&config)?;
        config.data = shards(&options.data, "train.tokens")?;
        config.valid = shards(&options.valid, "valid.tokens")?;
        // The rows are known now, and with them the steps of an epoch.
        if let Some(epochs) = options.epochs {
            config.steps = steps_of(&config, epochs)?;
        }
        let default = (config.steps / 10).min(100);
        config.warmup = options.warmup.unwrap_or(default);
        config.check()?;
        let scheme = options.export_scheme.or(options.qat);
        let written = Written {
            dtype: options.saved.save_dtype,
            model: config.lora.is_none() || start.merge,
            chat: has_conversations,
            export: options.export.map(|dialect| Export {
                dialect,
                scheme: scheme.unwrap_or(Scheme::W4a16),
            }),
        };
        Ok((config, written, folder))
    }

    /// Loads the run in `folder` on `ranks`, all of which call this function.
    pub(crate) fn resume(
        folder: &Path,
        options: &TrainingOptions,
        command: &'static str,
        ranks: &Ranks,
    ) -> Result<Self> {
        agree(ranks.group(), Self::read(folder, options, command, ranks))
    }

    fn read(
        folder: &Path,
        options: &TrainingOptions,
        command: &'static str,
        ranks: &Ranks,
    ) -> Result<Self> {
        let (path, mut config): (_, FinetuneConfig) = read_config(folder, CONFIG)?;
        let device = match options.device.device {
            Some(device) => device,
            None => DeviceName::of_config(&path, &config.device)?,
        };
        let device = ranks.device(device);
        config.device = device.to_string();
        config.ep = options.ep.unwrap_or(config.ep);
        config.ep_dispatch = options.ep_dispatch.or(config.ep_dispatch);
        let old = config.steps;
        let steps = match (options.steps, options.epochs) {
            (None, Some(epochs)) => Some(steps_of(&config, epochs)?),
            (steps, _) => steps,
        };
        let extended = match (steps, options.epochs) {
            (None, _) => None,
            (Some(steps), None) => config.extend(steps)?,
            (Some(steps), Some(epochs)) => config
                .extend(steps)
                .with_context(|| format!("epochs is {epochs}"))?,
        };
        Ok(Self {
            config,
            written: read_json(&folder.join(RESULT))?,
            is_new: false,
            extended: extended.map(|said| (old, said)),
            folder: folder.into(),
            session: options.session.clone(),
            device,
            command,
        })
    }

    /// Trains, then writes the model.
    pub(crate) fn run(self, ranks: &Ranks) -> Result<ExitCode> {
        let Self { config, folder, .. } = &self;
        let groups = |world: &_| config.groups(world);
        let session = Session::open(
            ranks,
            self.device,
            groups,
            self.command,
            folder,
            &self.session,
        )?;
        let data = session.read("reading the tokens", || rows_of(config))?;
        if ranks.is_first() {
            self.describe_rows(&data);
            self.describe(&data, ranks.group().size())?;
        }
        let mut trainer = session.start(FinetuneTask::new(config, &data), folder)?;
        on_first(ranks.group(), || self.begun())?;
        session.train(&mut trainer)?;
        on_first(ranks.group(), || {
            let curves = [(config.recipe_name.name(), trainer.rows())];
            plot::loss(&folder.join("loss.svg"), &curves, "token", None)
        })?;
        if trainer.step() < config.steps {
            return Ok(session.stopped());
        }
        self.report(trainer, &session, &data)?;
        Ok(ExitCode::SUCCESS)
    }

    /// Writes the configuration of a new or extended run, which has begun: from here on it can be
    /// resumed. What the run wrote at its former end gets the number of its steps as a suffix.
    fn begun(&self) -> Result<()> {
        let path = self.folder.join(CONFIG);
        if self.is_new {
            write_json(&self.folder.join(RESULT), &self.written)?;
            write_json(&path, &self.config)?;
            // A file that cannot be removed is harmless: the run's configuration counts.
            let _ = std::fs::remove_file(self.folder.join(STARTING));
            return Ok(());
        }
        let Some((old, _)) = &self.extended else {
            return Ok(());
        };
        for name in [MODEL, ADAPTER, QUANTIZED] {
            let former = self.folder.join(name);
            if former.exists() {
                let kept = self.folder.join(format!("{name}-{old}"));
                std::fs::rename(&former, &kept)
                    .with_context(|| format!("{} cannot be renamed", former.display()))?;
                note!("{name}/ of {old} steps is now {}", kept.display());
            }
        }
        let mut written: FinetuneConfig = read_json(&path)?;
        written.steps = self.config.steps;
        write_json(&path, &written)
    }

    /// Prints which documents were cut or left out by packing them into rows.
    fn describe_rows(&self, data: &TrainingData) {
        if data.is_one {
            note!(
                "one document: its last {} of {} tokens are for validation (--valid-share)",
                data.valid.tokens(),
                data.train.tokens() + data.valid.tokens() + 1
            );
        }
        for (part, rows) in [("training", &data.train), ("validation", &data.valid)] {
            let Cut {
                longer,
                parted,
                left_out,
                tokens_left_out,
                targets,
            } = rows.cut();
            let mut said = Vec::new();
            if longer > 0 {
                let context = self.config.context;
                said.push(format!(
                    "{longer} documents are longer than a row of {context} tokens and were cut"
                ));
            }
            if parted > 0 {
                said.push(format!(
                    "{parted} have tokens that count in the loss after a cut, away from their prompt"
                ));
            }
            if tokens_left_out > 0 {
                said.push(format!(
                    "{tokens_left_out} tokens are left out, in pieces of which none counts"
                ));
            }
            if left_out > 0 {
                said.push(format!(
                    "{left_out} documents are left out, of which no token counts"
                ));
            }
            if !said.is_empty() {
                note!(
                    "{part}: {}; {targets} tokens count in the loss",
                    said.join("; ")
                );
            }
        }
    }

    /// Prints the model and the data that it is trained on.
    fn describe(&self, data: &TrainingData, ranks: usize) -> Result<()> {
        let config = &self.config;
        let [trained, all] = trained(config)?;
        note!(
            "parameters: {trained} trained of {all} ({:.2} %)",
            1e2 * trained as f64 / all as f64
        );
        let epochs = config.steps as f64 / config.steps_per_epoch(data.train.len());
        note!(
            "steps: {} of {} rows, which are {epochs:.2} epochs of {} rows",
            config.steps,
            config.rows_per_step(),
            data.train.len()
        );
        if epochs >= MANY_EPOCHS {
            note!("each row is trained on {epochs:.0} times: --epochs N trains for N epochs");
        }
        if let Some((_, extended)) = &self.extended {
            note!("{extended}");
        }
        let rows = [&data.train, &data.valid];
        let [train, valid] = rows.map(|rows| {
            let places = rows.len() * config.context;
            format!(
                "{} rows, {:.1} % full",
                rows.len(),
                1e2 * rows.tokens() as f64 / places as f64
            )
        });
        note!(
            "recipe {}{}, {} activations, device {}{}; training {train}, validation {valid}{}; {}",
            config.recipe_name,
            match config.frozen {
                FrozenForm::High => String::new(),
                packed => format!(" beside {} weights", packed.name()),
            },
            match config.activation.bytes() {
                2 => "bf16",
                _ => "f32",
            },
            config.device,
            match ranks {
                1 => String::new(),
                ranks => format!(" ({ranks} ranks)"),
            },
            match config.eval_rows < data.valid.len() {
                true => format!(", of which {} are evaluated", config.eval_rows),
                false => String::new(),
            },
            self.folder.display()
        );
        Ok(())
    }

    /// Computes the validation losses of the original and of the saved models, adds them to
    /// `result.json`, and returns them and those of the training as text.
    fn perplexities(
        &self,
        data: &TrainingData,
        adapters: Option<Bytes>,
        device: &Device,
    ) -> Result<Vec<String>> {
        let config = &self.config;
        let loss = |folder: &Path, adapters| saved_loss(config, data, folder, adapters, device);
        let line = |what: &str, before: f64, after: f64| {
            format!(
                "{what} {:.4} before, {:.4} after; {before:.5} and {after:.5} nats a token",
                before.exp(),
                after.exp()
            )
        };
        let before = loss(&config.model, None)?;
        let mut losses = Map::from_iter([("before".to_owned(), json!(before))]);
        let mut lines = Vec::new();
        let mut add = |part: &str, name: &str, after: f64| {
            let line = line("validation perplexity", before, after);
            lines.push(format!("{line} ({name})"));
            losses.insert(part.to_owned(), json!(after));
        };
        if let Some(adapters) = adapters {
            let name = format!("{ADAPTER} on {}", config.model.display());
            add(ADAPTER, &name, loss(&config.model, Some(adapters))?);
        }
        for (name, is_written) in [
            (MODEL, self.written.model),
            (QUANTIZED, self.written.export.is_some()),
        ] {
            if is_written {
                add(name, name, loss(&self.folder.join(name), None)?);
            }
        }
        let path = self.folder.join(RESULT);
        let mut result: Map<String, Value> = read_json(&path)?;
        result.insert("validation_loss".to_owned(), Value::Object(losses));
        write_json(&path, &result)?;
        // Use the digits in the file: a resumed run knows only those about its beginning.
        let rows = read_metrics(&self.folder.join(METRICS))?;
        let mut losses = rows.iter().filter_map(|row| row.valid_loss);
        let before = losses.next().context("the run has no validation loss")?;
        let after = losses.next_back().unwrap_or(before);
        let recipe = format!("in training, with recipe {}:", config.recipe_name);
        lines.push(line(&recipe, before, after));
        Ok(lines)
    }

    /// Writes the trained model, and prints the measurements of the run and the perplexities of
    /// what it wrote.
    fn report(&self, run: Finetune<'_>, session: &Session<'_>, data: &TrainingData) -> Result<()> {
        let ranks = session.ranks;
        let say = |text: String| {
            if ranks.is_first() {
                println!("{text}");
            }
        };
        let folders = [ADAPTER, MODEL, QUANTIZED].map(|name| self.folder.join(name));
        // A run resumed after its end has written these folders already. All ranks check before one
        // writes.
        let mut is_missing = [0, 1, 2].map(|at| !folders[at].exists());
        is_missing[2] |= folders[2].join(JOURNAL).exists();
        agree(ranks.group(), Ok(()))?;
        session.measured(&run).into_iter().flatten().for_each(say);
        let [adapter, model, out] = folders;
        let is_lora = self.config.lora.is_some();
        if is_lora {
            if is_missing[0] {
                run.save_adapter(&adapter)?;
            }
            say(format!("adapter written to {}", adapter.display()));
        }
        if self.written.model && is_missing[1] {
            run.save_model(&model, self.written.dtype.into())?;
        }
        if self.written.model {
            say(format!("model written to {}", model.display()));
        }
        if let Some(Export { dialect, scheme }) = self.written.export {
            if is_missing[2] {
                run.export(&out, dialect, scheme)?;
            }
            let (dialect, scheme) = (dialect.name(), scheme.name());
            say(format!("{dialect} {scheme} written to {}", out.display()));
        }
        self.next_commands(&model, &adapter)
            .into_iter()
            .for_each(say);
        let adapters = is_lora.then(|| run.adapters()).transpose()?;
        // Makes room on the device for the saved models.
        drop(run);
        ranks.label("evaluating what was written");
        let lines = on_first_at_length(ranks.group(), || {
            let lines = self.perplexities(data, adapters, &session.device);
            lines.context("everything is written, but its perplexity could not be computed")
        })?;
        lines.into_iter().flatten().for_each(say);
        Ok(())
    }

    /// Returns the commands that use what was written: the model in the folder `model`, or the
    /// adapters in the folder `adapter`.
    fn next_commands(&self, model: &Path, adapter: &Path) -> Vec<String> {
        let base = self.config.model.as_path();
        let [model, adapter, base] = [model, adapter, base].map(|it| quoted(&it.to_string_lossy()));
        let nvfp4 = program();
        let (generate, prompt) = match self.written.chat {
            true => ("talk to the model with", "--chat"),
            false => ("generate text with", "--prompt TEXT"),
        };
        if self.written.model {
            return vec![format!("{generate}: {nvfp4} generate {model} {prompt}")];
        }
        vec![
            format!("{generate}: {nvfp4} generate {base} --adapter {adapter} {prompt}"),
            format!("merge the adapter with: {nvfp4} merge {base} {adapter} --out {model}"),
        ]
    }
}
