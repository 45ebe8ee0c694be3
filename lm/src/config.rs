//! What to train: the shape of the model, the schedule, the recipe. Presets, and checks.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context, Result, bail, ensure};
use burn::module::ParamGroup;
use burn_nvfp4::experts::MAX_EXPERTS;
use burn_nvfp4::recipe::Healing;
use serde::{Deserialize, Serialize};

use crate::encoder::EncoderModel;
use burn_nvfp4::Nvfp4Recipe;

/// Number of symbols: the model reads and writes bytes.
pub const VOCABULARY: usize = 256;

/// Share of a block's load-balancing loss in the training loss.
pub const BALANCE_SHARE: f64 = 0.01;

/// Sizes of the model, all in elements.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// Width of the residual stream, a multiple of 16.
    pub width: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Attention heads; `width / heads` is their size, which must be even.
    pub heads: usize,
    /// Width inside the SwiGLU of a block, a multiple of 16.
    pub hidden: usize,
    /// Longest sequence of bytes that the model sees at once.
    pub context: usize,
    /// Number of experts in the feed-forward of each block, each of width `hidden`; none for a dense
    /// one.
    #[serde(default)]
    pub experts: Option<usize>,
    /// Experts that each byte is sent to, where there are any.
    #[serde(default = "top_2")]
    pub top_k: usize,
}

/// The usual number of experts for a byte.
fn top_2() -> usize {
    2
}

impl ModelConfig {
    /// Check that the model can be built.
    ///
    /// # Errors
    /// Names the value that is wrong, what it is, and what it may be.
    pub fn check(&self) -> Result<()> {
        let Self {
            width,
            layers,
            heads,
            hidden,
            context,
            experts,
            top_k,
        } = *self;
        for (name, value) in [("width", width), ("hidden", hidden)] {
            ensure!(
                value > 0 && value % 16 == 0,
                "{name} is {value}, but it must be a positive multiple of 16: NVFP4 packs blocks \
                 of 16 elements"
            );
        }
        ensure!(
            layers > 0,
            "layers is 0, but a model has at least one block"
        );
        ensure!(
            heads > 0 && width % heads == 0 && (width / heads) % 2 == 0,
            "heads is {heads}, but it must divide width ({width}) into heads of an even size"
        );
        ensure!(
            context > 1,
            "context is {context}, but it must be at least 2 bytes"
        );
        if let Some(experts) = experts {
            ensure!(
                (1..=MAX_EXPERTS).contains(&experts),
                "experts is {experts}, but it must be 1 to {MAX_EXPERTS}"
            );
            ensure!(
                (1..=experts).contains(&top_k),
                "top-k is {top_k}, but it must be 1 to the number of experts ({experts})"
            );
        }
        Ok(())
    }

    /// Weights of the blocks' projections that each byte is multiplied with: of experts, those that it is
    /// sent to.
    pub fn weights_of_a_byte(&self) -> usize {
        let Self {
            width,
            layers,
            hidden,
            experts,
            top_k,
            ..
        } = *self;
        let copies = experts.map_or(1, |_| top_k);
        layers * (4 * width * width + copies * 3 * width * hidden)
    }

    /// Number of trained parameters.
    pub fn parameters(&self) -> usize {
        let Self {
            width,
            layers,
            hidden,
            experts,
            ..
        } = *self;
        let feed_forward = 3 * width * hidden;
        let feed_forward = match experts {
            // Each expert, and its column of the router.
            Some(experts) => experts * (feed_forward + width),
            None => feed_forward,
        };
        let block = 4 * width * width + feed_forward + 2 * width;
        layers * block + 2 * VOCABULARY * width + width
    }
}

/// What the products of the blocks are computed in, forward and backward, by name: `nvfp4` (TransformerEngine's
/// recipe, with the switches of the run), a preset of [`Nvfp4Recipe::preset`], `bf16`, `f32`, or a
/// recipe of the run's own ([`RunConfig::recipes`]).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Recipe(String);

impl Recipe {
    /// TransformerEngine's recipe, with the switches of the run.
    pub fn nvfp4() -> Self {
        Self("nvfp4".into())
    }

    /// No quantization, bf16 activations.
    pub fn bf16() -> Self {
        Self("bf16".into())
    }

    /// No quantization, f32 activations.
    pub fn f32() -> Self {
        Self("f32".into())
    }

    /// The name that the command and the files use.
    pub fn name(&self) -> &str {
        &self.0
    }

    /// Whether nothing is quantized: what others are compared with.
    pub fn is_high_precision(&self) -> bool {
        *self == Self::bf16() || *self == Self::f32()
    }
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl From<Recipe> for String {
    fn from(recipe: Recipe) -> Self {
        recipe.0
    }
}

impl TryFrom<String> for Recipe {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        name.parse()
    }
}

impl FromStr for Recipe {
    type Err = String;

    /// Any name that a folder can have; whether there is such a recipe, the run knows.
    fn from_str(name: &str) -> Result<Self, String> {
        let fits = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        if name.is_empty() || name.starts_with('.') || !name.chars().all(fits) {
            return Err(format!(
                "{name:?} is no name of a recipe: letters, digits, `_`, `-` and `.`, not first"
            ));
        }
        Ok(Self(name.into()))
    }
}

/// When a run stops quantizing: `0.9` or `0.9:forward`, a share of its steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct HealingOption(pub Healing);

impl fmt::Display for HealingOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let forward = if self.0.forward_only { ":forward" } else { "" };
        write!(f, "{}{forward}", self.0.at_fraction)
    }
}

impl From<HealingOption> for String {
    fn from(healing: HealingOption) -> Self {
        healing.to_string()
    }
}

impl TryFrom<String> for HealingOption {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl FromStr for HealingOption {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let error = || {
            format!(
                "healing is {text:?}, but it must be a share of the steps, 0 to 1, as in `0.9`, or \
                 `0.9:forward`"
            )
        };
        let (share, forward_only) = match text.split_once(':') {
            None => (text, false),
            Some((share, "forward")) => (share, true),
            Some(_) => return Err(error()),
        };
        let at_fraction: f64 = share.parse().map_err(|_| error())?;
        if !(0.0..=1.0).contains(&at_fraction) {
            return Err(error());
        }
        Ok(Self(Healing {
            at_fraction,
            forward_only,
        }))
    }
}

/// The feed-forward of the blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelKind {
    /// One SwiGLU.
    Dense,
    /// A mixture of eight experts, two for each byte, unless other numbers are given.
    Moe,
}

impl ModelKind {
    /// Experts unless another number is given.
    pub fn experts(self) -> Option<usize> {
        match self {
            Self::Dense => None,
            Self::Moe => Some(8),
        }
    }
}

impl FromStr for ModelKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "dense" => Ok(Self::Dense),
            "moe" => Ok(Self::Moe),
            _ => Err("a model is dense or moe".into()),
        }
    }
}

/// How a model of Burn's own layers is brought to NVFP4; see `burn_nvfp4::decorate`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decoration {
    /// A product that did not run in NVFP4 is an error.
    Strict,
    /// It is counted.
    Lenient,
}

impl FromStr for Decoration {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "strict" => Ok(Self::Strict),
            "lenient" => Ok(Self::Lenient),
            _ => Err("decorate is strict or lenient".into()),
        }
    }
}

/// Type of the activations between the products. Norms, softmax and loss are always f32 inside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activation {
    /// 32 bit.
    F32,
    /// bfloat16; fast on GPUs, slow on CPUs, which have to emulate it.
    Bf16,
}

impl FromStr for Activation {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "f32" => Ok(Self::F32),
            "bf16" => Ok(Self::Bf16),
            _ => Err("an activation type is f32 or bf16".into()),
        }
    }
}

impl From<Activation> for burn::tensor::FloatDType {
    fn from(activation: Activation) -> Self {
        match activation {
            Activation::F32 => Self::F32,
            Activation::Bf16 => Self::BF16,
        }
    }
}

/// A named set of sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Preset {
    /// 0.9 M parameters: minutes on two CPU cores, the default.
    #[serde(rename = "tiny")]
    Tiny,
    /// 7 M parameters: a fast CPU, or seconds on a GPU.
    #[serde(rename = "small")]
    Small,
    /// 10 M parameters, 25 bytes of text for each: what the recipes are compared on, on a GPU.
    #[serde(rename = "10m")]
    M10,
    /// 10 M parameters in mixtures of 8 experts, 2 for each byte, which so is multiplied with 3.2 M.
    #[serde(rename = "moe-10m")]
    Moe10M,
    /// 30 M parameters, for GPUs.
    #[serde(rename = "30m")]
    M30,
    /// 125 M parameters, for GPUs.
    #[serde(rename = "125m")]
    M125,
}

impl Preset {
    /// All presets, smallest first.
    pub const ALL: [Self; 6] = [
        Self::Tiny,
        Self::Small,
        Self::M10,
        Self::Moe10M,
        Self::M30,
        Self::M125,
    ];

    /// The name that the command and the files use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tiny => "tiny",
            Self::Small => "small",
            Self::M10 => "10m",
            Self::Moe10M => "moe-10m",
            Self::M30 => "30m",
            Self::M125 => "125m",
        }
    }
}

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Preset {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL
            .into_iter()
            .find(|preset| preset.name() == text)
            .ok_or_else(|| {
                let names: Vec<&str> = Self::ALL.iter().map(|preset| preset.name()).collect();
                format!("a preset is one of {}", names.join(", "))
            })
    }
}

/// Everything that decides a run: what `config.json` holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunConfig {
    /// Where the values that were not given came from.
    pub preset: Preset,
    /// What the run computes in.
    pub recipe: Recipe,
    /// What the same model is trained in too, on the same batches, to compare.
    pub compare: Vec<Recipe>,
    /// Recipes of the run's own, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub recipes: BTreeMap<String, Nvfp4Recipe>,
    /// When the quantized recipes stop quantizing, whatever a recipe of the run's own says of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub healing: Option<HealingOption>,
    /// Train a model of Burn's own layers, decorated where the recipe quantizes, in place of one of
    /// this crate's layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decorate: Option<Decoration>,
    /// `flex`, `cpu`, or `cuda:N`.
    pub device: String,
    /// `cuda:N`, several times, for data-parallel training: each takes its part of every batch. The
    /// first is `device`. Empty for training on `device` alone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<String>,
    /// Type of the activations of an NVFP4 run, and precision of its baseline.
    pub activation: Activation,
    /// Files and folders of text; empty for the Rust sources of cargo's registry.
    pub data: Vec<PathBuf>,
    /// Read no further file of text once so many bytes are read; 0 for no limit.
    pub data_bytes: u64,
    /// See [`ModelConfig::width`].
    pub width: usize,
    /// See [`ModelConfig::layers`].
    pub layers: usize,
    /// See [`ModelConfig::heads`].
    pub heads: usize,
    /// See [`ModelConfig::hidden`].
    pub hidden: usize,
    /// See [`ModelConfig::context`].
    pub context: usize,
    /// See [`ModelConfig::experts`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<usize>,
    /// See [`ModelConfig::top_k`].
    #[serde(default = "top_2")]
    pub top_k: usize,
    /// Share of each block's load-balancing loss in the training loss, where there are experts; without
    /// one it is [`BALANCE_SHARE`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balance_loss: Option<f64>,
    /// Optimizer steps.
    pub steps: u64,
    /// Sequences of `context` bytes in a step.
    pub batch: usize,
    /// Highest learning rate.
    pub lr: f64,
    /// Steps over which the learning rate rises to `lr`; it then falls to a tenth of it along a
    /// cosine.
    pub warmup: u64,
    /// Decoupled weight decay of the matrices.
    pub weight_decay: f64,
    /// Gradients are scaled down to this global norm if theirs is larger.
    pub grad_clip: f64,
    /// Seed of the initial weights, the batches and the stochastic rounding.
    pub seed: u64,
    /// Steps between evaluations on the validation files.
    pub eval_every: u64,
    /// Batches of an evaluation.
    pub eval_batches: usize,
    /// Steps between rows of `metrics.csv`, and between log lines.
    pub log_every: u64,
    /// Steps between checkpoints.
    pub checkpoint_every: u64,
    /// Steps between samples of what quantization does to each layer, in `telemetry.csv`; 0 for none.
    #[serde(default)]
    pub telemetry_every: u64,
    /// See [`Nvfp4Recipe::with_rht`]; of the recipe `nvfp4`.
    pub rht: bool,
    /// See [`Nvfp4Recipe::with_stochastic_rounding`]; of the recipe `nvfp4`.
    pub stochastic_rounding: bool,
    /// See [`Nvfp4Recipe::with_weight_2d`]; of the recipe `nvfp4`.
    pub weight_2d: bool,
    /// In place of the recipe's [`Nvfp4Recipe::rht_signs`], and of signs that it draws.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rht_signs: Option<u16>,
    /// Regular expressions: projections whose weight's path matches one stay in high precision. If there
    /// are any, they stand in place of the recipe's [`Nvfp4Recipe::high_precision`].
    pub high_precision: Vec<String>,
}

impl RunConfig {
    /// The values of a preset, in NVFP4, on `device`.
    pub fn preset(preset: Preset, device: &str) -> Self {
        let gpu = device.starts_with("cuda");
        let tiny = Self {
            preset,
            recipe: Recipe::nvfp4(),
            compare: match preset {
                Preset::Tiny if gpu => vec![Recipe::bf16()],
                Preset::Tiny => vec![Recipe::f32()],
                _ => Vec::new(),
            },
            recipes: BTreeMap::new(),
            healing: None,
            decorate: None,
            device: device.into(),
            devices: Vec::new(),
            activation: if gpu {
                Activation::Bf16
            } else {
                Activation::F32
            },
            data: Vec::new(),
            data_bytes: 32 << 20,
            width: 128,
            layers: 4,
            heads: 4,
            hidden: 352,
            context: 128,
            experts: None,
            top_k: top_2(),
            balance_loss: None,
            steps: 300,
            batch: 8,
            lr: 4e-3,
            warmup: 40,
            weight_decay: 0.1,
            grad_clip: 1.0,
            seed: 0,
            eval_every: 50,
            eval_batches: 8,
            log_every: 10,
            checkpoint_every: 100,
            telemetry_every: 0,
            rht: true,
            stochastic_rounding: true,
            weight_2d: true,
            rht_signs: None,
            high_precision: Vec::new(),
        };
        let large = Self {
            data_bytes: 512 << 20,
            context: 512,
            batch: 64,
            warmup: 200,
            eval_every: 250,
            checkpoint_every: 500,
            ..tiny.clone()
        };
        let ten = Self {
            width: 448,
            layers: 4,
            heads: 4,
            hidden: 1216,
            context: 256,
            batch: 328,
            steps: 3_000,
            lr: 2e-3,
            warmup: 300,
            eval_batches: 16,
            ..large.clone()
        };
        match preset {
            Preset::Tiny => tiny,
            Preset::Small => Self {
                data_bytes: 128 << 20,
                width: 256,
                layers: 8,
                heads: 4,
                hidden: 704,
                context: 256,
                steps: 2000,
                batch: 32,
                lr: 2e-3,
                warmup: 100,
                eval_every: 100,
                ..tiny
            },
            Preset::M10 => ten,
            Preset::Moe10M => Self {
                width: 256,
                hidden: 352,
                experts: ModelKind::Moe.experts(),
                ..ten
            },
            Preset::M30 => Self {
                width: 512,
                layers: 9,
                heads: 8,
                hidden: 1408,
                steps: 4000,
                lr: 1e-3,
                ..large
            },
            Preset::M125 => Self {
                width: 768,
                layers: 17,
                heads: 12,
                hidden: 2048,
                steps: 10_000,
                lr: 6e-4,
                ..large
            },
        }
    }

    /// The sizes of the model.
    pub fn model(&self) -> ModelConfig {
        let &Self {
            width,
            layers,
            heads,
            hidden,
            context,
            experts,
            top_k,
            ..
        } = self;
        ModelConfig {
            width,
            layers,
            heads,
            hidden,
            context,
            experts,
            top_k,
        }
    }

    /// Number of trained parameters.
    pub fn parameters(&self) -> usize {
        match self.decorate {
            Some(_) => EncoderModel::parameters(&self.model()),
            None => self.model().parameters(),
        }
    }

    /// Check every value that does not need the data or the device.
    ///
    /// # Errors
    /// Names the value that is wrong, what it is, and what it may be.
    pub fn check(&self) -> Result<()> {
        self.model().check()?;
        for (name, value) in [
            ("steps", self.steps),
            ("eval-every", self.eval_every),
            ("eval-batches", self.eval_batches as u64),
            ("log-every", self.log_every),
            ("checkpoint-every", self.checkpoint_every),
            ("batch", self.batch as u64),
        ] {
            ensure!(value > 0, "{name} is 0, but it must be at least 1");
        }
        ensure!(
            self.warmup < self.steps,
            "warmup is {}, but it must be less than steps ({})",
            self.warmup,
            self.steps
        );
        for (name, value) in [("lr", self.lr), ("grad-clip", self.grad_clip)] {
            ensure!(
                value.is_finite() && value > 0.0,
                "{name} is {value}, but it must be a positive number"
            );
        }
        ensure!(
            self.weight_decay.is_finite() && self.weight_decay >= 0.0,
            "weight-decay is {}, but it must be zero or a positive number",
            self.weight_decay
        );
        if let Some(share) = self.balance_loss {
            ensure!(
                share.is_finite() && share >= 0.0,
                "balance-loss is {share}, but it must be zero or a positive number"
            );
            ensure!(
                self.experts.is_some(),
                "balance-loss is {share}, but the model has no experts to balance: leave it out, or give \
                 --model moe"
            );
        }
        if self.decorate.is_some() {
            ensure!(
                self.experts.is_none(),
                "decorate is given and experts is {}, but Burn has no layer of experts: leave out one of them",
                self.experts.unwrap_or_default()
            );
            ensure!(
                self.device == "cpu" || self.device.starts_with("cuda"),
                "decorate on device {} is not possible: decorated models rest on Burn's fusion, which cpu and cuda:N have",
                self.device
            );
        }
        self.check_devices()?;
        self.check_switches()?;
        let all: Vec<&Recipe> = self.all_recipes().collect();
        for (index, recipe) in all.iter().enumerate() {
            ensure!(
                !all[..index].contains(recipe),
                "compare is {}, but recipe is {} and each may be there once",
                names(&self.compare),
                self.recipe
            );
            // Its bf16 operations lack a library function, and then do nothing instead of failing.
            if self.device == "cpu" && self.activation_of(recipe) == Activation::Bf16 {
                bail!(
                    "{} on device cpu is not possible: CubeCL's CPU runtime computes in f32 only; \
                     use --device flex, or f32",
                    if recipe.is_high_precision() {
                        "recipe bf16"
                    } else {
                        "activation bf16"
                    }
                );
            }
            self.nvfp4_recipe(recipe)?;
        }
        Ok(())
    }

    /// A switch that no recipe of the run has would do nothing.
    fn check_switches(&self) -> Result<()> {
        let has_them = |recipe: &Recipe| {
            recipe.is_high_precision()
                || *recipe == Recipe::nvfp4() && !self.recipes.contains_key(recipe.name())
        };
        let switches = [
            ("rht", self.rht),
            ("stochastic-rounding", self.stochastic_rounding),
            ("weight-2d", self.weight_2d),
        ];
        for (name, _) in switches.into_iter().filter(|(_, on)| !on) {
            ensure!(
                self.all_recipes().any(has_them),
                "{name} is false, but it is a switch of recipe nvfp4 and recipe is {}: leave it out, or \
                 say so in the file of a recipe",
                self.recipe
            );
        }
        Ok(())
    }

    fn check_devices(&self) -> Result<()> {
        let Some(first) = self.devices.first() else {
            return Ok(());
        };
        let count = self.devices.len();
        let mut distinct: Vec<&String> = self.devices.iter().collect();
        distinct.sort_unstable();
        distinct.dedup();
        ensure!(
            count > 1
                && distinct.len() == count
                && distinct.iter().all(|device| device.starts_with("cuda:")),
            "devices is {}, but it must be at least two different GPUs, cuda:N: Burn averages \
             gradients over GPUs alone",
            self.devices.join(",")
        );
        ensure!(
            *first == self.device,
            "device is {}, but it must be the first of devices ({}), or be left out",
            self.device,
            self.devices.join(",")
        );
        ensure!(
            self.batch.is_multiple_of(count),
            "batch is {}, but it must be a multiple of the number of devices ({count}), which take \
             equal parts of it",
            self.batch
        );
        Ok(())
    }

    /// The names of all devices of the run, as `--devices` has them.
    pub fn all_devices(&self) -> String {
        match self.devices.is_empty() {
            true => self.device.clone(),
            false => self.devices.join(","),
        }
    }

    /// The recipes that the run trains with, in their order.
    pub fn all_recipes(&self) -> impl Iterator<Item = &Recipe> {
        std::iter::once(&self.recipe).chain(&self.compare)
    }

    /// The high-precision recipe that a quantized one is compared with.
    pub fn baseline(&self) -> Recipe {
        match self.activation {
            Activation::F32 => Recipe::f32(),
            Activation::Bf16 => Recipe::bf16(),
        }
    }

    /// Type of the activations under `recipe`.
    pub fn activation_of(&self, recipe: &Recipe) -> Activation {
        match recipe.name() {
            "bf16" => Activation::Bf16,
            "f32" => Activation::F32,
            _ => self.activation,
        }
    }

    /// When a run with `recipe` stops quantizing: as the run says, or else as the recipe does.
    pub fn healing_of(&self, recipe: &Recipe) -> Option<Healing> {
        let own = || self.recipes.get(recipe.name())?.healing;
        self.healing
            .map(|HealingOption(healing)| healing)
            .or_else(own)
            .filter(|_| !recipe.is_high_precision())
    }

    /// What the projections of the blocks are told under `recipe`: the recipe's own values, but for those
    /// that the run gives.
    ///
    /// # Errors
    /// When there is no such recipe, it does not pass [`Nvfp4Recipe::check`], or a pattern of
    /// `high_precision` is not a regular expression.
    pub fn nvfp4_recipe(&self, recipe: &Recipe) -> Result<Nvfp4Recipe> {
        let own = self.recipes.get(recipe.name());
        let found = match (recipe.name(), own) {
            (_, Some(own)) => own.clone(),
            ("f32", None) => Nvfp4Recipe::bf16(),
            ("nvfp4", None) => Nvfp4Recipe::nvidia()
                .with_rht(self.rht)
                .with_stochastic_rounding(self.stochastic_rounding)
                .with_weight_2d(self.weight_2d),
            (name, None) => Nvfp4Recipe::preset(name).with_context(|| {
                format!("recipe is {name}, but it must be nvfp4, f32, a file, or a preset")
            })?,
        };
        let found = match self.rht_signs {
            Some(signs) => found.with_rht_signs(signs).with_rht_seeded(false),
            None => found,
        };
        let found = found
            .with_seed(self.seed)
            .with_healing(self.healing_of(recipe));
        let found = if recipe.is_high_precision() || self.high_precision.is_empty() {
            found
        } else {
            let patterns: Vec<&String> = self.high_precision.iter().collect();
            let group = ParamGroup::from_any_regexes(patterns).map_err(|error| {
                anyhow::anyhow!(
                    "high-precision is {:?}, but it must be regular expressions: {error:?}",
                    self.high_precision
                )
            })?;
            found.with_high_precision(Some(group))
        };
        found.check()?;
        Ok(found)
    }
}

/// Recipes as `--compare` has them.
fn names(recipes: &[Recipe]) -> String {
    let names: Vec<&str> = recipes.iter().map(Recipe::name).collect();
    names.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_valid_and_as_large_as_they_say() {
        for (preset, low, high) in [
            (Preset::Tiny, 0.8e6, 1.0e6),
            (Preset::Small, 6e6, 8e6),
            (Preset::M10, 9.5e6, 10.5e6),
            (Preset::Moe10M, 9.5e6, 10.5e6),
            (Preset::M30, 28e6, 32e6),
            (Preset::M125, 115e6, 130e6),
        ] {
            for device in ["flex", "cuda:0"] {
                let config = RunConfig::preset(preset, device);
                config.check().unwrap();
                let parameters = config.model().parameters() as f64;
                assert!((low..high).contains(&parameters), "{preset}: {parameters}");
            }
            assert_eq!(preset.name().parse(), Ok(preset));
        }
    }

    #[test]
    fn experts_are_checked_and_counted() {
        let moe = RunConfig::preset(Preset::Moe10M, "flex").model();
        assert_eq!((moe.experts, moe.top_k), (Some(8), 2));
        assert_eq!(
            moe.weights_of_a_byte(),
            3_211_264,
            "what its description says"
        );
        let dense = RunConfig::preset(Preset::Tiny, "flex").model();
        let experts = |experts, top_k| ModelConfig {
            experts: Some(experts),
            top_k,
            ..dense.clone()
        };
        let ModelConfig {
            width,
            hidden,
            layers,
            ..
        } = dense;
        let more = 7 * 3 * width * hidden + 8 * width;
        let found = experts(8, 2);
        found.check().unwrap();
        assert_eq!(found.parameters(), dense.parameters() + layers * more);
        for (name, config) in [
            ("experts", experts(0, 1)),
            ("experts", experts(1000, 1)),
            ("top-k", experts(4, 5)),
            ("top-k", experts(4, 0)),
        ] {
            let error = config.check().unwrap_err().to_string();
            assert!(error.starts_with(name), "{name}: {error}");
        }
    }

    #[test]
    fn a_run_names_all_its_devices() {
        let mut config = RunConfig::preset(Preset::Tiny, "cuda:2");
        assert_eq!(config.all_devices(), "cuda:2");
        config.devices = ["cuda:2", "cuda:5"].map(String::from).into();
        config.check().unwrap();
        assert_eq!(config.all_devices(), "cuda:2,cuda:5");
    }

    #[test]
    fn errors_name_the_value() {
        let good = RunConfig::preset(Preset::Tiny, "flex");
        type Spoil = fn(&mut RunConfig);
        let cases: [(&str, Spoil); 20] = [
            ("width", |c| c.width = 100),
            ("hidden", |c| c.hidden = 0),
            ("heads", |c| c.heads = 3),
            ("batch", |c| c.batch = 0),
            ("warmup", |c| c.warmup = c.steps),
            ("lr", |c| c.lr = f64::NAN),
            ("balance-loss", |c| c.balance_loss = Some(0.1)),
            ("balance-loss", |c| {
                c.experts = Some(4);
                c.balance_loss = Some(-0.1);
            }),
            ("activation", |c| {
                c.device = "cpu".into();
                c.activation = Activation::Bf16;
            }),
            ("recipe", |c| {
                c.device = "cpu".into();
                c.compare = Vec::new();
                c.recipe = Recipe::bf16();
            }),
            ("recipe", |c| c.recipe = "fp8".parse().unwrap()),
            ("compare", |c| c.recipe = Recipe::f32()),
            ("rht", |c| {
                c.recipe = "nvidia".parse().unwrap();
                c.compare = Vec::new();
                c.rht = false;
            }),
            ("decorate", |c| c.decorate = Some(Decoration::Strict)),
            ("decorate", |c| {
                c.device = "cpu".into();
                c.decorate = Some(Decoration::Lenient);
                c.experts = Some(8);
            }),
            ("high-precision", |c| c.high_precision = vec!["(".into()]),
            ("devices", |c| c.devices = vec!["flex".into(), "cpu".into()]),
            ("devices", |c| {
                c.device = "cuda:0".into();
                c.devices = vec!["cuda:0".into(), "cuda:0".into()];
            }),
            ("device is flex", |c| {
                c.devices = vec!["cuda:0".into(), "cuda:1".into()];
            }),
            ("batch", |c| {
                c.device = "cuda:0".into();
                c.devices = vec!["cuda:0".into(), "cuda:1".into()];
                c.batch = 7;
            }),
        ];
        for (name, spoil) in cases {
            let mut config = good.clone();
            spoil(&mut config);
            let error = config.check().unwrap_err().to_string();
            assert!(error.starts_with(name), "{name}: {error}");
        }
    }
}
