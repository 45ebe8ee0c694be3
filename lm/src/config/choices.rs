//! Values that are chosen by name.

use std::fmt;
use std::str::FromStr;

use burn_nvfp4::nn::ExpertDispatch;
use burn_nvfp4::parallel::ReduceDtype;
use burn_nvfp4::recipe::Healing;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// The name of the recipe of the blocks' GEMMs, forward and backward: `nvfp4` (TransformerEngine's
/// recipe, with the switches of the run), a preset of
/// [`Nvfp4Recipe::preset`](burn_nvfp4::Nvfp4Recipe::preset), `bf16`, `f32`, or a recipe of the
/// run's own ([`RunConfig::recipes`](super::RunConfig::recipes)).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RecipeName(String);

impl RecipeName {
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

impl Default for RecipeName {
    fn default() -> Self {
        Self::nvfp4()
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

    /// Takes a name that a folder can have. The run checks whether such a recipe exists.
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

/// The feed-forward of the blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ModelKind {
    /// One SwiGLU.
    Dense,
    /// A mixture of experts, by default eight, two for each byte.
    Moe,
}

impl ModelKind {
    /// The default number of experts.
    pub fn experts(self) -> Option<usize> {
        match self {
            Self::Dense => None,
            Self::Moe => Some(8),
        }
    }
}

/// How tokens travel to the ranks of their experts; see [`ExpertDispatch`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExpertDispatchName {
    /// Each choice to the rank of its expert, and the result back: the host counts the tokens of
    /// each expert in each block. The bits of one rank.
    AllToAll,
    /// All tokens to all ranks, and the sums of what their experts make of them back: nothing waits
    /// for the host.
    AllGather,
}

impl From<ExpertDispatchName> for ExpertDispatch {
    fn from(name: ExpertDispatchName) -> Self {
        match name {
            ExpertDispatchName::AllToAll => Self::AllToAll,
            ExpertDispatchName::AllGather => Self::AllGather,
        }
    }
}

/// The type in which ranks exchange gradients of parameters; see [`ReduceDtype`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GradReduce {
    /// 32 bit, as the gradients are.
    #[default]
    F32,
    /// bfloat16, rounded once before they travel.
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

/// How the decorator treats GEMMs that do not run in NVFP4; see [`burn_nvfp4::decorate()`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decoration {
    /// A missed GEMM is an error.
    Strict,
    /// A missed GEMM is counted.
    Lenient,
}

/// How the parameters of a run are updated.
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

/// Type of the activations between the GEMMs. Norms, softmax and loss are always f32 inside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Activation {
    /// 32 bit.
    F32,
    /// bfloat16: fast on GPUs, slow on CPUs, which emulate it.
    Bf16,
}

impl Activation {
    /// Bytes of an element.
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
    /// 10 M parameters, 25 bytes of text for each: the comparison of recipes, on a GPU
    #[serde(rename = "10m")]
    #[value(name = "10m")]
    M10,
    /// 10 M parameters in mixtures of 8 experts, 3.2 M of them active
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
