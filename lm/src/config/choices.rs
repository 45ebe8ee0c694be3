//! Enumerated and named values of the configuration.

use std::fmt;
use std::str::FromStr;

use burn_nvfp4::nn::ExpertDispatch;
use burn_nvfp4::parallel::ReduceDtype;
use burn_nvfp4::recipe::Healing;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Name of the recipe of the blocks' GEMMs, forward and backward: `nvidia` or its alias `nvfp4`
/// (TransformerEngine's recipe, with the switches of the run), another preset of
/// [`Nvfp4Recipe::preset`](burn_nvfp4::Nvfp4Recipe::preset), `bf16`, `f32`, or a recipe that the
/// run defines ([`RunConfig::recipes`](super::RunConfig::recipes)).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RecipeName(String);

impl RecipeName {
    /// Another name of `nvidia`. The command replaces it.
    pub const ALIAS: &str = "nvfp4";

    /// Returns TransformerEngine's recipe, with the switches of the run.
    pub fn nvidia() -> Self {
        Self("nvidia".into())
    }

    /// Returns the recipe without quantization and with bf16 activations.
    pub fn bf16() -> Self {
        Self("bf16".into())
    }

    /// Returns the recipe without quantization and with f32 activations.
    pub fn f32() -> Self {
        Self("f32".into())
    }

    /// Returns the name used by the command and the files.
    pub fn name(&self) -> &str {
        &self.0
    }

    /// Returns true for TransformerEngine's recipe, under either name.
    pub fn is_nvidia(&self) -> bool {
        ["nvidia", Self::ALIAS].contains(&self.name())
    }

    /// Returns true if nothing is quantized, so that the recipe can serve as baseline.
    pub fn is_high_precision(&self) -> bool {
        *self == Self::bf16() || *self == Self::f32()
    }
}

impl Default for RecipeName {
    fn default() -> Self {
        Self::nvidia()
    }
}

impl fmt::Display for RecipeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl From<RecipeName> for String {
    fn from(recipe: RecipeName) -> Self {
        recipe.0
    }
}

impl TryFrom<String> for RecipeName {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        name.parse()
    }
}

impl FromStr for RecipeName {
    type Err = String;

    /// Accepts any name that is valid for a folder. The run checks whether the recipe exists.
    fn from_str(name: &str) -> Result<Self, String> {
        let fits = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        if name.is_empty() || name.starts_with('.') || !name.chars().all(fits) {
            return Err(format!(
                "{name:?} is not a recipe's name, which has letters, digits, `_`, `-` and `.`, but \
                 does not start with `.`"
            ));
        }
        Ok(Self(name.into()))
    }
}

/// Point at which a run stops quantizing, as a share of its steps: `0.9` or `0.9:forward`.
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
            format!("{text:?} is not a share of the steps, 0 to 1, as in `0.9`, or `0.9:forward`")
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

/// Feed-forward of the blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelKind {
    /// A single SwiGLU.
    Dense,
    /// A mixture of experts, by default 8 with 2 active per byte.
    Moe,
}

impl ModelKind {
    /// Returns the default number of experts.
    pub fn experts(self) -> Option<usize> {
        match self {
            Self::Dense => None,
            Self::Moe => Some(8),
        }
    }
}

/// Exchange of tokens with the ranks of their experts; see [`ExpertDispatch`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExpertDispatchName {
    /// All-to-all: sends each token to the ranks of its experts and the results back. The host
    /// counts the tokens per expert in each block. Bitwise identical to a single rank.
    AllToAll,
    /// All-gather of the tokens, reduce-scatter of the experts' outputs. Needs no synchronization
    /// with the host.
    AllGather,
}

impl ExpertDispatchName {
    /// Returns the default exchange of a run whose tokens have `top_k` experts on `ep` ranks: an
    /// all-gather if steps run as a CUDA graph, or if it sends no more than an all-to-all, which
    /// sends each token to at most as many ranks as it has experts; else an all-to-all.
    pub fn default_of(is_captured: bool, ep: usize, top_k: usize) -> Self {
        match is_captured || ep <= top_k {
            true => Self::AllGather,
            false => Self::AllToAll,
        }
    }
}

impl From<ExpertDispatchName> for ExpertDispatch {
    fn from(name: ExpertDispatchName) -> Self {
        match name {
            ExpertDispatchName::AllToAll => Self::AllToAll,
            ExpertDispatchName::AllGather => Self::AllGather,
        }
    }
}

/// Type in which ranks exchange parameter gradients; see [`ReduceDtype`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GradReduce {
    /// 32-bit float, the type of the gradients.
    #[default]
    F32,
    /// bfloat16; gradients are rounded once before the exchange.
    Bf16,
}

impl From<GradReduce> for ReduceDtype {
    fn from(name: GradReduce) -> Self {
        match name {
            GradReduce::F32 => Self::Own,
            GradReduce::Bf16 => Self::Bf16,
        }
    }
}

/// Treatment of GEMMs that a decorated model does not run in NVFP4; see [`burn_nvfp4::decorate()`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decoration {
    /// A GEMM outside NVFP4 is an error.
    Strict,
    /// A GEMM outside NVFP4 is counted.
    Lenient,
}

/// Optimizer of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[value(rename_all = "lower")]
pub enum OptimizerName {
    /// AdamW for all parameters.
    #[default]
    AdamW,
    /// Muon for the matrices of the blocks, AdamW for embedding, head and vectors.
    Muon,
}

/// Type of the activations between the GEMMs. Norms, softmax and loss always compute in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activation {
    /// 32-bit float.
    F32,
    /// bfloat16: fast on GPUs, slow on CPUs, which emulate it.
    Bf16,
}

impl Activation {
    /// Returns the bytes per element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
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
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
pub enum Preset {
    /// 0.9 M parameters: minutes on two CPU cores
    #[default]
    #[serde(rename = "tiny")]
    Tiny,
    /// 7 M parameters: a fast CPU, or seconds on a GPU
    #[serde(rename = "small")]
    Small,
    /// 10 M parameters, 25 bytes of text per parameter: compares recipes on a GPU
    #[serde(rename = "10m")]
    #[value(name = "10m")]
    M10,
    /// 10 M parameters in mixtures of 8 experts, 3.2 M active
    #[serde(rename = "moe-10m")]
    #[value(name = "moe-10m")]
    Moe10M,
    /// 30 M parameters, for GPUs
    #[serde(rename = "30m")]
    #[value(name = "30m")]
    M30,
    /// 125 M parameters, for GPUs
    #[serde(rename = "125m")]
    #[value(name = "125m")]
    M125,
}

impl fmt::Display for Preset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.to_possible_value().expect("no preset is hidden");
        f.write_str(name.get_name())
    }
}
