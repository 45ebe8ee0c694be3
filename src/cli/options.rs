//! The options of a run: from flags, a file, and a preset, in this order.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{ArgAction, Args};
use nvfp4::lm::config::{Activation, Preset, Recipe, RunConfig};
use serde::Deserialize;

use super::device::DeviceName;

/// What can be set about a run, by a flag or by a key of the `--config` file. The two have the same
/// names, with `_` for `-` in the file.
#[derive(Args, Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Options {
    /// Sizes to start from: tiny, small, 30m or 125m [default: tiny]
    #[arg(long, value_name = "NAME")]
    preset: Option<Preset>,
    /// Precision of the products: nvfp4, bf16 or f32 [default: nvfp4]
    #[arg(long, value_name = "NAME")]
    recipe: Option<Recipe>,
    /// Train in high precision too, and report the gap [default: for tiny]
    #[arg(
        long,
        num_args = 0,
        default_missing_value = "true",
        overrides_with = "no_compare"
    )]
    compare: Option<bool>,
    /// Train with the recipe only
    #[arg(long, action = ArgAction::SetTrue, overrides_with = "compare")]
    #[serde(skip)]
    no_compare: bool,
    /// flex, cpu or cuda:N [default: cuda:0 if there is one, else flex]
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,
    /// Type of the activations: f32 or bf16 [default: bf16 on GPUs, else f32]
    #[arg(long, value_name = "TYPE")]
    activation: Option<Activation>,
    /// Files and folders of text [default: the Rust sources in cargo's registry]
    #[arg(long, value_name = "PATH", num_args = 1..)]
    data: Option<Vec<PathBuf>>,
    /// Read no more than this many bytes of text, 0 for all
    #[arg(long, value_name = "BYTES")]
    data_bytes: Option<u64>,
    /// Width of the model, a multiple of 16
    #[arg(long)]
    width: Option<usize>,
    /// Blocks of the model
    #[arg(long)]
    layers: Option<usize>,
    /// Attention heads; they divide the width
    #[arg(long)]
    heads: Option<usize>,
    /// Width of the feed-forward, a multiple of 16
    #[arg(long)]
    hidden: Option<usize>,
    /// Bytes in a sequence
    #[arg(long)]
    context: Option<usize>,
    /// Optimizer steps
    #[arg(long)]
    steps: Option<u64>,
    /// Sequences in a step
    #[arg(long)]
    batch: Option<usize>,
    /// Highest learning rate
    #[arg(long, allow_negative_numbers = true)]
    lr: Option<f64>,
    /// Steps over which the learning rate rises
    #[arg(long)]
    warmup: Option<u64>,
    /// Decoupled weight decay of the matrices
    #[arg(long, allow_negative_numbers = true)]
    weight_decay: Option<f64>,
    /// Largest global norm of the gradients
    #[arg(long, allow_negative_numbers = true)]
    grad_clip: Option<f64>,
    /// Seed of weights, batches and stochastic rounding
    #[arg(long)]
    seed: Option<u64>,
    /// Steps between evaluations
    #[arg(long, value_name = "STEPS")]
    eval_every: Option<u64>,
    /// Batches of an evaluation
    #[arg(long, value_name = "BATCHES")]
    eval_batches: Option<usize>,
    /// Steps between rows of metrics.csv and log lines
    #[arg(long, value_name = "STEPS")]
    log_every: Option<u64>,
    /// Steps between checkpoints
    #[arg(long, value_name = "STEPS")]
    checkpoint_every: Option<u64>,
    /// Random Hadamard transform of the operands of weight gradients [default: true]
    #[arg(long, value_name = "BOOL")]
    rht: Option<bool>,
    /// Stochastic rounding of gradients [default: true]
    #[arg(long, value_name = "BOOL")]
    stochastic_rounding: Option<bool>,
    /// Scale weights in 16x16 tiles, not 1x16 blocks [default: true]
    #[arg(long, value_name = "BOOL")]
    weight_2d: Option<bool>,
    /// Signs of the Hadamard transform, 16 bits
    #[arg(long, value_name = "BITS")]
    rht_signs: Option<u16>,
    /// Projections whose path matches this regular expression stay in high precision, for example
    /// 'blocks\.0\.'; may be given several times
    #[arg(long, value_name = "REGEX")]
    high_precision: Option<Vec<String>>,
}

impl Options {
    /// Read a `--config` file.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read(path)
            .with_context(|| format!("config {} cannot be read", path.display()))?;
        serde_json::from_slice(&text)
            .with_context(|| format!("config {} is not valid", path.display()))
    }

    /// Whether nothing is set.
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Only `device` is set, if anything.
    pub(crate) fn only_device(mut self) -> Result<Option<DeviceName>> {
        let device = self.device.take();
        anyhow::ensure!(
            self.is_empty(),
            "--resume goes on with the run as it was configured: leave out all other options except \
             --device and --stop-at"
        );
        device.map(|name| parse_device(&name)).transpose()
    }

    /// Put these options over those of `below`.
    pub(crate) fn over(self, below: Self) -> Self {
        let compare = if self.no_compare {
            Some(false)
        } else {
            self.compare.or(below.compare)
        };
        macro_rules! over {
            ($($field:ident),*) => {
                Self {
                    $($field: self.$field.or(below.$field),)*
                    compare,
                    no_compare: false,
                }
            };
        }
        over!(
            preset,
            recipe,
            device,
            activation,
            data,
            data_bytes,
            width,
            layers,
            heads,
            hidden,
            context,
            steps,
            batch,
            lr,
            warmup,
            weight_decay,
            grad_clip,
            seed,
            eval_every,
            eval_batches,
            log_every,
            checkpoint_every,
            rht,
            stochastic_rounding,
            weight_2d,
            rht_signs,
            high_precision
        )
    }

    /// Fill in what is not set, from the preset and the machine, and check the result.
    pub(crate) fn resolve(self) -> Result<(RunConfig, DeviceName)> {
        let device = match &self.device {
            Some(name) => parse_device(name)?,
            None => DeviceName::best()?,
        };
        let mut config =
            RunConfig::preset(self.preset.unwrap_or(Preset::Tiny), &device.to_string());
        macro_rules! set {
            ($($field:ident),*) => { $(if let Some(value) = self.$field { config.$field = value; })* };
        }
        set!(
            recipe,
            activation,
            data,
            data_bytes,
            width,
            layers,
            heads,
            hidden,
            context,
            steps,
            batch,
            lr,
            weight_decay,
            grad_clip,
            seed,
            eval_every,
            eval_batches,
            log_every,
            checkpoint_every,
            rht,
            stochastic_rounding,
            weight_2d,
            rht_signs,
            high_precision
        );
        config.compare = self
            .compare
            .unwrap_or(config.compare && config.recipe == Recipe::Nvfp4);
        // The preset's warm-up would not fit into a shorter run.
        config.warmup = self.warmup.unwrap_or(config.warmup.min(config.steps / 10));
        config.check()?;
        Ok((config, device))
    }
}

fn parse_device(name: &str) -> Result<DeviceName> {
    name.parse()
        .map_err(|error| anyhow::anyhow!("device is {name:?}, but {error}"))
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    fn parse(json: &str) -> Options {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn flags_win_over_the_file_and_the_file_over_the_preset() {
        let file = parse(r#"{"device": "flex", "width": 64, "steps": 50, "compare": true}"#);
        let flags = Options {
            steps: Some(20),
            no_compare: true,
            ..Options::default()
        };
        let (config, device) = flags.over(file).resolve().unwrap();
        assert_eq!(device, DeviceName::Flex);
        assert_eq!(
            (config.width, config.steps, config.compare),
            (64, 20, false)
        );
        assert_eq!(config.warmup, 2);
        assert_eq!(
            config.layers,
            RunConfig::preset(Preset::Tiny, "flex").layers
        );
    }

    #[test]
    fn a_written_configuration_is_a_config_file() {
        let (config, _) = parse(r#"{"device": "flex", "seed": 5, "lr": 0.001}"#)
            .resolve()
            .unwrap();
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(parse(&text).resolve().unwrap().0, config);
    }

    #[test]
    fn unknown_keys_are_errors() {
        let error = serde_json::from_str::<Options>(r#"{"widht": 64}"#)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("widht") && error.contains("width"),
            "{error}"
        );
    }

    #[test]
    fn high_precision_alone_is_not_compared() {
        let (config, _) = parse(r#"{"device": "flex", "recipe": "f32"}"#)
            .resolve()
            .unwrap();
        assert!(!config.compare);
        let both = parse(r#"{"device": "flex", "recipe": "f32", "compare": true}"#);
        assert!(
            both.resolve()
                .unwrap_err()
                .to_string()
                .contains("--no-compare")
        );
    }
}
