//! What to train: the shape of the model, the schedule, the recipe. Presets, and checks.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Result, bail, ensure};
use burn::module::ParamGroup;
use burn_nvfp4::experts::MAX_EXPERTS;
use serde::{Deserialize, Serialize};

use crate::Nvfp4Recipe;

/// Number of symbols: the model reads and writes bytes.
pub const VOCABULARY: usize = 256;

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

/// Precision of the products of the blocks, forward and backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Recipe {
    /// 4-bit operands, see [`Nvfp4Recipe`].
    Nvfp4,
    /// bf16 operands.
    Bf16,
    /// f32 operands.
    F32,
}

impl Recipe {
    /// The name that the command and the files use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nvfp4 => "nvfp4",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        }
    }
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Recipe {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [Self::Nvfp4, Self::Bf16, Self::F32]
            .into_iter()
            .find(|recipe| recipe.name() == text)
            .ok_or_else(|| "a recipe is nvfp4, bf16 or f32".into())
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
    /// 30 M parameters, for GPUs.
    #[serde(rename = "30m")]
    M30,
    /// 125 M parameters, for GPUs.
    #[serde(rename = "125m")]
    M125,
}

impl Preset {
    /// All presets, smallest first.
    pub const ALL: [Self; 4] = [Self::Tiny, Self::Small, Self::M30, Self::M125];

    /// The name that the command and the files use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tiny => "tiny",
            Self::Small => "small",
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
    /// Precision of the run.
    pub recipe: Recipe,
    /// Whether the same model is trained in high precision too, and the gap reported.
    pub compare: bool,
    /// `flex`, `cpu`, or `cuda:N`.
    pub device: String,
    /// Type of the activations of an NVFP4 run, and precision of its baseline.
    pub activation: Activation,
    /// Files and folders of text; empty for the Rust sources of cargo's registry.
    pub data: Vec<PathBuf>,
    /// Read no more than this many bytes of text; 0 for no limit.
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
    /// See [`Nvfp4Recipe::rht`].
    pub rht: bool,
    /// See [`Nvfp4Recipe::stochastic_rounding`].
    pub stochastic_rounding: bool,
    /// See [`Nvfp4Recipe::weight_2d`].
    pub weight_2d: bool,
    /// See [`Nvfp4Recipe::rht_signs`].
    pub rht_signs: u16,
    /// Regular expressions: projections whose weight's path matches one stay in high precision.
    pub high_precision: Vec<String>,
}

impl RunConfig {
    /// The values of a preset, in NVFP4, on `device`.
    pub fn preset(preset: Preset, device: &str) -> Self {
        let gpu = device.starts_with("cuda");
        let recipe = Nvfp4Recipe::new();
        let tiny = Self {
            preset,
            recipe: Recipe::Nvfp4,
            compare: preset == Preset::Tiny,
            device: device.into(),
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
            rht: recipe.rht,
            stochastic_rounding: recipe.stochastic_rounding,
            weight_2d: recipe.weight_2d,
            rht_signs: recipe.rht_signs,
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
            ..
        } = self;
        ModelConfig {
            width,
            layers,
            heads,
            hidden,
            context,
            experts: None,
            top_k: top_2(),
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
        if self.compare && self.recipe != Recipe::Nvfp4 {
            bail!(
                "compare is on and recipe is {}, but the comparison is of nvfp4 with high \
                 precision: use --recipe nvfp4, or --no-compare",
                self.recipe
            );
        }
        // Its bf16 operations lack a library function, and then do nothing instead of failing.
        if self.device == "cpu" && self.activation_of(self.recipe) == Activation::Bf16 {
            bail!(
                "{} on device cpu is not possible: CubeCL's CPU runtime computes in f32 only; use \
                 --device flex, or f32",
                match self.recipe {
                    Recipe::Nvfp4 => "activation bf16",
                    _ => "recipe bf16",
                }
            );
        }
        self.nvfp4_recipe(self.recipe)?;
        Ok(())
    }

    /// The high-precision recipe that an NVFP4 run is compared with.
    pub fn baseline(&self) -> Recipe {
        match self.activation {
            Activation::F32 => Recipe::F32,
            Activation::Bf16 => Recipe::Bf16,
        }
    }

    /// Type of the activations under `recipe`.
    pub fn activation_of(&self, recipe: Recipe) -> Activation {
        match recipe {
            Recipe::Nvfp4 => self.activation,
            Recipe::Bf16 => Activation::Bf16,
            Recipe::F32 => Activation::F32,
        }
    }

    /// What the projections of the blocks are told under `recipe`: the high-precision recipes are
    /// the same layers with all of them exempt.
    ///
    /// # Errors
    /// When a pattern of `high_precision` is not a regular expression.
    pub fn nvfp4_recipe(&self, recipe: Recipe) -> Result<Nvfp4Recipe> {
        let exempt = match recipe {
            Recipe::Nvfp4 if self.high_precision.is_empty() => None,
            Recipe::Nvfp4 => {
                let patterns: Vec<&String> = self.high_precision.iter().collect();
                Some(ParamGroup::from_any_regexes(patterns).map_err(|error| {
                    anyhow::anyhow!(
                        "high-precision is {:?}, but it must be regular expressions: {error:?}",
                        self.high_precision
                    )
                })?)
            }
            Recipe::Bf16 | Recipe::F32 => Some(ParamGroup::all()),
        };
        Ok(Nvfp4Recipe::new()
            .with_rht(self.rht)
            .with_stochastic_rounding(self.stochastic_rounding)
            .with_weight_2d(self.weight_2d)
            .with_rht_signs(self.rht_signs)
            .with_seed(self.seed)
            .with_high_precision(exempt))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_valid_and_as_large_as_they_say() {
        for (preset, low, high) in [
            (Preset::Tiny, 0.8e6, 1.0e6),
            (Preset::Small, 6e6, 8e6),
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
    fn errors_name_the_value() {
        let good = RunConfig::preset(Preset::Tiny, "flex");
        type Spoil = fn(&mut RunConfig);
        let cases: [(&str, Spoil); 10] = [
            ("width", |c| c.width = 100),
            ("hidden", |c| c.hidden = 0),
            ("heads", |c| c.heads = 3),
            ("batch", |c| c.batch = 0),
            ("warmup", |c| c.warmup = c.steps),
            ("lr", |c| c.lr = f64::NAN),
            ("activation", |c| {
                c.device = "cpu".into();
                c.activation = Activation::Bf16;
            }),
            ("recipe", |c| {
                c.device = "cpu".into();
                c.compare = false;
                c.recipe = Recipe::Bf16;
            }),
            ("compare", |c| c.recipe = Recipe::F32),
            ("high-precision", |c| c.high_precision = vec!["(".into()]),
        ];
        for (name, spoil) in cases {
            let mut config = good.clone();
            spoil(&mut config);
            let error = config.check().unwrap_err().to_string();
            assert!(error.starts_with(name), "{name}: {error}");
        }
    }
}
