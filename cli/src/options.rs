//! The options of a run: from flags, a file, and a preset, in this order.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, ensure};
use clap::{ArgAction, Args};
use nvfp4::Nvfp4Recipe;
use nvfp4_lm::config::{
    Activation, Decoration, HealingOption, ModelKind, Preset, Recipe, RunConfig,
};
use serde::Deserialize;

use crate::device::DeviceName;

/// What can be set about a run, by a flag or by a key of the `--config` file. The two have the same
/// names, with `_` for `-` in the file.
#[derive(Args, Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Options {
    /// Sizes to start from: tiny, small, 10m, moe-10m, 30m or 125m [default: tiny]
    #[arg(long, value_name = "NAME")]
    preset: Option<Preset>,
    /// What the products are computed in: nvfp4, bf16, f32, a preset (see docs/recipes.md), or the
    /// JSON file of a recipe [default: nvfp4]
    #[arg(long, value_name = "NAME|FILE")]
    recipe: Option<String>,
    /// Train with these recipes too, on the same batches, and report the gaps; without a value, in
    /// high precision [default: for tiny]
    #[arg(
        long,
        value_name = "A,B,..",
        num_args = 0..=1,
        default_missing_value = "",
        overrides_with = "no_compare"
    )]
    compare: Option<Compare>,
    /// Stop quantizing after this share of the steps: 0.9, or 0.9:forward for the forward alone
    /// [default: what the recipe's file says]
    #[arg(long, value_name = "SHARE[:forward]")]
    healing: Option<HealingOption>,
    /// Train a model of Burn's own layers through the decorator (docs/decorator.md), on device cpu or
    /// cuda:N: strict, where a product that does not run in NVFP4 is an error, or lenient, where it is
    /// counted [default: false; strict without a value]
    #[arg(long, value_name = "HOW|BOOL", num_args = 0..=1, default_missing_value = "true")]
    decorate: Option<Decorate>,
    /// Recipes of a written configuration
    #[arg(skip)]
    recipes: BTreeMap<String, Nvfp4Recipe>,
    /// Train with the recipe only
    #[arg(long, action = ArgAction::SetTrue, overrides_with = "compare")]
    #[serde(skip)]
    no_compare: bool,
    /// flex, cpu or cuda:N [default: cuda:0 if there is one, else flex]
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,
    /// Several GPUs, cuda:0,cuda:1: each takes its part of every batch, and their gradients are averaged
    #[arg(
        long,
        value_name = "A,B,..",
        value_delimiter = ',',
        conflicts_with = "device"
    )]
    devices: Option<Vec<String>>,
    /// Type of the activations: f32 or bf16 [default: bf16 on GPUs, else f32]
    #[arg(long, value_name = "TYPE")]
    activation: Option<Activation>,
    /// Files and folders of text [default: the Rust sources in cargo's registry]
    #[arg(long, value_name = "PATH", num_args = 1..)]
    data: Option<Vec<PathBuf>>,
    /// Stop reading text after the file that reaches this many bytes, but not before the second; 0 for
    /// all [default: the preset's]
    #[arg(long, value_name = "BYTES")]
    data_bytes: Option<u64>,
    /// dense, or moe for a mixture of experts in each block [default: dense]
    #[arg(long, value_name = "KIND")]
    model: Option<ModelKind>,
    /// Experts in each block [default: 8 with --model moe]
    #[arg(long)]
    experts: Option<usize>,
    /// Experts that each byte is sent to [default: 2]
    #[arg(long)]
    top_k: Option<usize>,
    /// Share of each block's load-balancing loss in the training loss [default: 0.01]
    #[arg(long, value_name = "SHARE")]
    balance_loss: Option<f64>,
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
    /// Seed of weights, batches and stochastic rounding [default: that of the recipe's file, else 0]
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
    /// Steps between samples of what quantization does to each layer, in telemetry.csv, 0 for none
    /// [default: 0]
    #[arg(long, value_name = "STEPS")]
    telemetry_every: Option<u64>,
    /// Random Hadamard transform of the operands of weight gradients [default: true]
    #[arg(long, value_name = "BOOL")]
    rht: Option<bool>,
    /// Stochastic rounding of gradients [default: true]
    #[arg(long, value_name = "BOOL")]
    stochastic_rounding: Option<bool>,
    /// Scale weights in 16x16 tiles, not 1x16 blocks [default: true]
    #[arg(long, value_name = "BOOL")]
    weight_2d: Option<bool>,
    /// Signs of the Hadamard transform, 16 bits [default: the recipe's]
    #[arg(long, value_name = "BITS")]
    rht_signs: Option<u16>,
    /// Projections whose path matches this regular expression stay in high precision, for example
    /// 'blocks\.0\.'; may be given several times; in place of the recipe's own
    #[arg(long, value_name = "REGEX")]
    high_precision: Option<Vec<String>>,
}

/// What `--compare` takes.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(untagged)]
enum Compare {
    /// In high precision, or not at all.
    Baseline(bool),
    /// With these recipes: names or files.
    With(Vec<String>),
}

impl FromStr for Compare {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let names: Vec<String> = text.split(',').map(|name| name.trim().into()).collect();
        Ok(match text {
            "" => Self::Baseline(true),
            _ => Self::With(names),
        })
    }
}

/// What `--decorate` takes.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(try_from = "serde_json::Value")]
struct Decorate(Option<Decoration>);

impl From<bool> for Decorate {
    fn from(on: bool) -> Self {
        Self(on.then_some(Decoration::Strict))
    }
}

impl FromStr for Decorate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(on) = text.parse::<bool>() {
            return Ok(on.into());
        }
        let how = text.parse().map(|how| Self(Some(how)));
        how.map_err(|_| {
            format!("decorate is {text:?}, but it must be strict, lenient, true (strict) or false")
        })
    }
}

impl TryFrom<serde_json::Value> for Decorate {
    type Error = String;

    fn try_from(value: serde_json::Value) -> Result<Self, String> {
        match value {
            serde_json::Value::Bool(on) => Ok(on.into()),
            serde_json::Value::String(text) => text.parse(),
            other => other.to_string().parse(),
        }
    }
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

    /// Whether no recipe is named.
    pub(crate) fn recipe_is_unset(&self) -> bool {
        self.recipe.is_none() && self.compare.is_none() && !self.no_compare
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

    /// These options with `recipe` alone, `seed`, and `device` if one is given.
    pub(crate) fn for_run(mut self, recipe: &str, seed: u64, device: Option<&str>) -> Self {
        self.recipe = Some(recipe.into());
        self.seed = Some(seed);
        self.no_compare = true;
        self.compare = Some(Compare::Baseline(false));
        self.healing = None;
        if let Some(device) = device {
            self.device = Some(device.into());
        }
        self
    }

    /// Put these options over those of `below`. What is given here takes away what it leaves no room
    /// for there: `device` the `devices`, and `model` dense the experts; and the other way round.
    pub(crate) fn over(self, mut below: Self) -> Self {
        if self.device.is_some() {
            below.devices = None;
        }
        if self.devices.is_some() {
            below.device = None;
        }
        if self.model == Some(ModelKind::Dense) {
            below.experts = None;
            below.top_k = None;
            below.balance_loss = None;
        }
        if self.experts.is_some() && below.model == Some(ModelKind::Dense) {
            below.model = None;
        }
        let compare = if self.no_compare {
            Some(Compare::Baseline(false))
        } else {
            self.compare.or(below.compare)
        };
        let recipes = match self.recipes.is_empty() {
            true => below.recipes,
            false => self.recipes,
        };
        macro_rules! over {
            ($($field:ident),*) => {
                Self {
                    $($field: self.$field.or(below.$field),)*
                    compare,
                    no_compare: false,
                    recipes,
                }
            };
        }
        over!(
            preset,
            recipe,
            healing,
            decorate,
            device,
            devices,
            activation,
            data,
            data_bytes,
            width,
            layers,
            heads,
            hidden,
            context,
            model,
            experts,
            top_k,
            balance_loss,
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
            telemetry_every,
            rht,
            stochastic_rounding,
            weight_2d,
            rht_signs,
            high_precision
        )
    }

    /// Fill in what is not set, from the preset and the machine, and check the result.
    pub(crate) fn resolve(self) -> Result<(RunConfig, DeviceName)> {
        let devices = self.devices.unwrap_or_default();
        let devices: Vec<DeviceName> = devices
            .iter()
            .map(|name| parse_device(name))
            .collect::<Result<_>>()?;
        let device = match (&self.device, devices.first()) {
            (Some(name), _) => parse_device(name)?,
            (None, Some(first)) => *first,
            (None, None) => DeviceName::best()?,
        };
        let mut config =
            RunConfig::preset(self.preset.unwrap_or(Preset::Tiny), &device.to_string());
        macro_rules! set {
            ($($field:ident),*) => { $(if let Some(value) = self.$field { config.$field = value; })* };
        }
        set!(
            activation,
            data,
            data_bytes,
            width,
            layers,
            heads,
            hidden,
            context,
            top_k,
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
            telemetry_every,
            rht,
            stochastic_rounding,
            weight_2d,
            high_precision
        );
        config.rht_signs = self.rht_signs;
        ensure!(
            self.experts.is_none() || self.model != Some(ModelKind::Dense),
            "experts is {}, but model is dense: leave one of them out",
            self.experts.unwrap_or_default()
        );
        let preset = config.preset;
        ensure!(
            config.experts.is_none() || self.model != Some(ModelKind::Dense),
            "model is dense, but preset {preset} has experts: leave one of them out, or give another \
             preset"
        );
        let by_default = config.experts.or(self.model.and_then(ModelKind::experts));
        config.experts = self.experts.or(by_default);
        config.balance_loss = self.balance_loss;
        config.healing = self.healing;
        config.decorate = self.decorate.and_then(|Decorate(how)| how);
        config.devices = devices.iter().map(DeviceName::to_string).collect();
        config.recipes = self.recipes;
        if let Some(name) = &self.recipe {
            config.recipe = named(name, "recipe", &mut config.recipes)?;
        }
        if let (None, Some(own)) = (self.seed, config.recipes.get(config.recipe.name())) {
            config.seed = own.seed;
        }
        config.compare = match self.compare {
            Some(Compare::Baseline(false)) => Vec::new(),
            Some(Compare::Baseline(true)) => vec![config.baseline()],
            Some(Compare::With(names)) => names
                .iter()
                .map(|name| named(name, "compare", &mut config.recipes))
                .collect::<Result<_>>()?,
            None if config.compare.is_empty() || config.recipe.is_high_precision() => Vec::new(),
            None => vec![config.baseline()],
        };
        // The preset's warm-up would not fit into a shorter run.
        config.warmup = self.warmup.unwrap_or(config.warmup.min(config.steps / 10));
        config.check()?;
        Ok((config, device))
    }
}

/// The recipe called `name`; the file of one is read into `recipes`.
fn named(name: &str, option: &str, recipes: &mut BTreeMap<String, Nvfp4Recipe>) -> Result<Recipe> {
    let path = Path::new(name);
    if path.extension().is_none_or(|extension| extension != "json") {
        return name
            .parse()
            .map_err(|error| anyhow::anyhow!("{option} is {name}, but {error}"));
    }
    let recipe = read_recipe(path).with_context(|| format!("{option} {name} is no recipe"))?;
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let found: Recipe = stem
        .parse()
        .map_err(|error| anyhow::anyhow!("{option} is {name}, but {error}"))?;
    ensure!(
        Nvfp4Recipe::preset_names()
            .chain(["nvfp4", "f32"])
            .all(|preset| preset != stem),
        "{option} is {name}, but {stem} is the name of a preset: rename the file"
    );
    recipes.insert(stem.into(), recipe);
    Ok(found)
}

/// The recipe in the JSON file `path`. What it leaves out is that of [`Nvfp4Recipe::new`].
fn read_recipe(path: &Path) -> Result<Nvfp4Recipe> {
    let mut recipe = serde_json::to_value(Nvfp4Recipe::new())?;
    let known = recipe.as_object_mut().context("a recipe has fields")?;
    let given: serde_json::Map<_, _> = serde_json::from_slice(&std::fs::read(path)?)?;
    for (name, value) in given {
        let fields: Vec<&str> = known.keys().map(String::as_str).collect();
        let fields = fields.join(", ");
        *known
            .get_mut(&name)
            .with_context(|| format!("{name} is no field of a recipe, which has {fields}"))? =
            value;
    }
    Ok(serde_json::from_value(recipe)?)
}

fn parse_device(name: &str) -> Result<DeviceName> {
    name.parse()
        .map_err(|error| anyhow::anyhow!("device is {name:?}, but {error}"))
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::config::Config;
    use burn::module::ParamGroup;
    use nvfp4::recipe::{Healing, LayerPolicy};

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
        assert_eq!((config.width, config.steps), (64, 20));
        assert!(config.compare.is_empty());
        assert_eq!(config.warmup, 2);
        assert_eq!(
            config.layers,
            RunConfig::preset(Preset::Tiny, "flex").layers
        );
    }

    /// The configuration of the flags `flags` (as keys of a file) over the file `file`.
    fn over(flags: &str, file: &str) -> RunConfig {
        let resolved = parse(flags).over(parse(file)).resolve();
        resolved
            .unwrap_or_else(|error| panic!("{flags} over {file}: {error:#}"))
            .0
    }

    #[test]
    fn a_flag_takes_the_other_of_its_pair_out_of_the_file() {
        let two = r#"{"device": "cuda:0", "devices": ["cuda:0", "cuda:1"]}"#;
        let config = over(r#"{"device": "flex"}"#, two);
        assert_eq!((config.device.as_str(), config.devices.len()), ("flex", 0));
        for device in ["flex", "cuda:7"] {
            let file = format!(r#"{{"device": "{device}"}}"#);
            let config = over(r#"{"devices": ["cuda:0", "cuda:1"]}"#, &file);
            assert_eq!(
                (config.device.as_str(), config.devices.len()),
                ("cuda:0", 2)
            );
        }

        let experts = r#"{"device": "flex", "experts": 4, "top_k": 1, "balance_loss": 0.05}"#;
        let of_preset = r#"{"device": "flex", "preset": "moe-10m", "experts": 8, "width": 64}"#;
        for (flags, file) in [
            (r#"{"model": "dense"}"#, experts),
            (r#"{"model": "dense", "preset": "10m"}"#, of_preset),
        ] {
            let config = over(flags, file);
            assert_eq!((config.experts, config.balance_loss), (None, None));
        }
        let config = over(
            r#"{"experts": 4}"#,
            r#"{"device": "flex", "model": "dense"}"#,
        );
        assert_eq!(config.experts, Some(4));
        assert_eq!(
            over(r#"{"balance_loss": 0.0}"#, experts).balance_loss,
            Some(0.0)
        );
    }

    #[test]
    fn decoration_can_be_switched_off_again() {
        let decorated = r#"{"device": "cpu", "decorate": "lenient"}"#;
        assert_eq!(over("{}", decorated).decorate, Some(Decoration::Lenient));
        assert_eq!(over(r#"{"decorate": false}"#, decorated).decorate, None);
        for (text, expected) in [
            ("true", Some(Decoration::Strict)),
            ("strict", Some(Decoration::Strict)),
            ("lenient", Some(Decoration::Lenient)),
            ("false", None),
        ] {
            assert_eq!(text.parse(), Ok(Decorate(expected)));
        }
        assert!(
            "1".parse::<Decorate>()
                .unwrap_err()
                .contains("strict, lenient")
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
    fn recipes_have_names_or_files() {
        let folder = std::env::temp_dir().join(format!("nvfp4-options-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("mine.json");
        let mine = Nvfp4Recipe::quartet2().with_cache_weights(false);
        mine.save(&path).unwrap();
        let flags = Options {
            device: Some("flex".into()),
            recipe: Some(path.display().to_string()),
            compare: Some("f32,per_token".parse().unwrap()),
            healing: Some("0.75:forward".parse().unwrap()),
            ..Options::default()
        };
        let (config, _) = flags.resolve().unwrap();
        let found: Vec<&str> = config.all_recipes().map(Recipe::name).collect();
        assert_eq!(found, ["mine", "f32", "per_token"]);
        let recipe = config.nvfp4_recipe(&config.recipe).unwrap();
        let healing = config.healing_of(&config.recipe);
        assert!(healing.unwrap().forward_only);
        assert_eq!(recipe, mine.with_healing(healing));
        assert!(config.healing_of(&Recipe::f32()).is_none());
        // The file is not needed again.
        std::fs::remove_dir_all(&folder).unwrap();
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(parse(&text).resolve().unwrap().0, config);
        for (option, text) in [
            ("recipe", "no-file.json"),
            ("recipe", "a/b"),
            ("recipe", "fp8"),
        ] {
            let flags = Options {
                device: Some("flex".into()),
                recipe: Some(text.into()),
                ..Options::default()
            };
            let error = format!("{:#}", flags.resolve().unwrap_err());
            assert!(error.contains(option) && error.contains(text), "{error}");
        }
        for text in ["1.5", "x", "0.5:backward"] {
            assert!(text.parse::<HealingOption>().unwrap_err().contains(text));
        }
    }

    /// The configuration of a run with a recipe's file that says `text`, and flags.
    fn with_file(name: &str, text: &str, flags: Options) -> Result<RunConfig> {
        let folder = std::env::temp_dir().join(format!("nvfp4-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("own.json");
        std::fs::write(&path, text).unwrap();
        let flags = Options {
            device: Some("flex".into()),
            recipe: Some(path.display().to_string()),
            ..flags
        };
        let resolved = flags.resolve();
        std::fs::remove_dir_all(&folder).unwrap();
        let config = resolved?.0;
        // A run that is gone on with reads the same from what was written.
        let written = serde_json::to_string(&config).unwrap();
        assert_eq!(parse(&written).resolve().unwrap().0, config);
        Ok(config)
    }

    #[test]
    fn the_file_of_a_recipe_holds_unless_a_flag_is_given() {
        let own = Nvfp4Recipe::quartet2()
            .with_seed(7)
            .with_rht_signs(0x1234)
            .with_rht_seeded(true)
            .with_high_precision(Some(ParamGroup::from_regex("own").unwrap()))
            .with_layers(LayerPolicy::FirstLast { first: 1, last: 0 })
            .with_healing(Some(Healing {
                at_fraction: 0.25,
                forward_only: true,
            }))
            .with_cache_weights(false);
        let text = serde_json::to_string(&own).unwrap();
        let config = with_file("holds", &text, Options::default()).unwrap();
        assert_eq!(config.seed, 7);
        assert_eq!(config.healing_of(&config.recipe), own.healing);
        assert_eq!(config.nvfp4_recipe(&config.recipe).unwrap(), own);

        let flags = Options {
            seed: Some(3),
            rht_signs: Some(0x00FF),
            high_precision: Some(vec!["flag".into()]),
            healing: Some("0.5".parse().unwrap()),
            ..Options::default()
        };
        let config = with_file("flags", &text, flags).unwrap();
        let healing = Healing {
            at_fraction: 0.5,
            forward_only: false,
        };
        assert_eq!(config.healing_of(&config.recipe), Some(healing));
        let expected = own
            .with_seed(3)
            .with_rht_signs(0x00FF)
            .with_rht_seeded(false)
            .with_high_precision(Some(ParamGroup::from_any_regexes(vec!["flag"]).unwrap()))
            .with_healing(Some(healing));
        assert_eq!(config.nvfp4_recipe(&config.recipe).unwrap(), expected);
    }

    #[test]
    fn what_the_file_of_a_recipe_leaves_out_is_the_default() {
        let text = r#"{"rht_signs": 5, "layers": {"keep": "keep_last", "fraction": 0.5}}"#;
        let config = with_file("left-out", text, Options::default()).unwrap();
        let expected = Nvfp4Recipe::new()
            .with_rht_signs(5)
            .with_layers(LayerPolicy::KeepLast { fraction: 0.5 });
        assert_eq!(config.nvfp4_recipe(&config.recipe).unwrap(), expected);
        assert_eq!(config.healing_of(&config.recipe), None);

        for (text, part) in [
            (r#"{"rht_sings": 5}"#, "rht_sings is no field"),
            (r#"{"fprop": {}}"#, "missing field `x`"),
        ] {
            let error = with_file("wrong", text, Options::default()).unwrap_err();
            let error = format!("{error:#}");
            assert!(
                error.contains(part) && error.contains("own.json"),
                "{error}"
            );
        }
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
    fn presets_have_experts_unless_others_are_asked_for() {
        let resolve = |json: &str| parse(json).resolve().map(|(config, _)| config);
        let moe =
            resolve(r#"{"device": "flex", "preset": "moe-10m", "balance_loss": 0.05}"#).unwrap();
        assert_eq!((moe.experts, moe.balance_loss), (Some(8), Some(0.05)));
        let four = resolve(r#"{"device": "flex", "preset": "moe-10m", "experts": 4}"#).unwrap();
        assert_eq!(four.experts, Some(4));
        for config in [moe, four] {
            let written = serde_json::to_string(&config).unwrap();
            assert_eq!(resolve(&written).unwrap(), config);
        }
        let error = resolve(r#"{"device": "flex", "preset": "moe-10m", "model": "dense"}"#);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("preset moe-10m has experts"), "{error}");
        let both = resolve(r#"{"device": "flex", "experts": 4, "model": "dense"}"#);
        let error = both.unwrap_err().to_string();
        assert!(
            error.contains("experts is 4, but model is dense"),
            "{error}"
        );
    }

    #[test]
    fn high_precision_alone_is_not_compared() {
        let (config, _) = parse(r#"{"device": "flex", "recipe": "f32"}"#)
            .resolve()
            .unwrap();
        assert!(config.compare.is_empty());
        let both = parse(r#"{"device": "flex", "recipe": "f32", "compare": true}"#);
        assert!(
            both.resolve()
                .unwrap_err()
                .to_string()
                .contains("compare is f32, but recipe is f32")
        );
    }
}
