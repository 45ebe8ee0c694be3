//! Options that name a preset, a recipe or a device. The command looks the names up.

use std::str::FromStr;

use clap::builder::PossibleValue;
use clap::{ArgAction, Args, ValueEnum};
use nvfp4::recipe::NamedSchedule;
use nvfp4_lm::config::{Decoration, ModelKind, Preset};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::listed::listed;
use super::recipes;
use super::shared::DeviceOption;

/// Named choices of a run, before they are looked up.
#[derive(Debug, Clone, Default, PartialEq, Args, Serialize, Deserialize)]
#[group(skip)]
#[serde(default)]
pub(super) struct Request {
    /// Start from the values of this preset [default: tiny]
    #[arg(long, value_name = "PRESET")]
    pub(super) preset: Option<Preset>,
    /// Train with this recipe [default: nvidia]
    #[arg(long, value_name = "RECIPE", value_parser = listed::<String>(recipes::values))]
    pub(super) recipe: Option<String>,
    /// Change the recipe at shares of the steps: `nvidia,0.85=mxfp8` begins with nvidia and ends
    /// with mxfp8; the modes :fwd_bf16, :bwd_bf16 and :bf16 after a recipe compute the forward, the
    /// backward or both in high precision [default: one recipe]
    #[arg(long, value_name = "PHASES")]
    pub(super) schedule: Option<NamedSchedule>,
    /// Also train with these recipes on the same batches and report the loss gaps; without a value,
    /// compare with high precision [default: high precision for tiny, else none]
    #[arg(
        long,
        value_name = "RECIPE,..",
        value_parser = listed::<Compare>(recipes::values),
        num_args = 0..=1,
        default_missing_value = "",
        overrides_with = "no_compare"
    )]
    pub(super) compare: Option<Compare>,
    /// Train with one recipe only
    #[arg(long, action = ArgAction::SetTrue, overrides_with = "compare")]
    #[serde(skip)]
    pub(super) no_compare: bool,
    /// Train a model of Burn's own layers through the decorator, on device cpu or cuda:N [default:
    /// false; strict without a value]
    #[arg(
        long,
        value_name = "HOW|BOOL",
        value_parser = listed::<Decorate>(Decorate::values),
        num_args = 0..=1,
        default_missing_value = "true"
    )]
    pub(super) decorate: Option<Decorate>,
    #[command(flatten)]
    #[serde(flatten)]
    pub(super) device: DeviceOption,
    /// Train a dense model or a mixture-of-experts model [default: dense]
    #[arg(long, value_name = "KIND")]
    pub(super) model: Option<ModelKind>,
    /// Train for this many passes over the training data, instead of --steps; parts of a pass are
    /// allowed, and the steps are rounded up
    #[arg(long, value_name = "N", conflicts_with = "steps")]
    pub(super) epochs: Option<f64>,
}

/// Value of `--compare`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub(super) enum Compare {
    /// Compare with high precision if true, with nothing if false.
    Baseline(bool),
    /// Compare with these recipes, given as names or files.
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

/// Value of `--decorate`.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, Serialize)]
#[serde(try_from = "Value", into = "Value")]
pub(super) struct Decorate(pub(super) Option<Decoration>);

impl Decorate {
    /// Returns the values that `--help` lists.
    fn values() -> Vec<PossibleValue> {
        vec![
            PossibleValue::new("strict").help("A GEMM that does not run in NVFP4 is an error"),
            PossibleValue::new("lenient").help("Such GEMMs are counted"),
            PossibleValue::new("true").help("As strict"),
            PossibleValue::new("false").help("Train the model of this project"),
        ]
    }
}

impl FromStr for Decorate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(true) => Ok(Self(Some(Decoration::Strict))),
            Ok(false) => Ok(Self(None)),
            Err(_) => Decoration::from_str(text, false)
                .map(|how| Self(Some(how)))
                .map_err(|_| "it must be strict, lenient, true (strict) or false".into()),
        }
    }
}

impl TryFrom<Value> for Decorate {
    type Error = String;

    fn try_from(value: Value) -> Result<Self, String> {
        match value {
            Value::String(text) => text.parse(),
            other => other.to_string().parse(),
        }
    }
}

impl From<Decorate> for Value {
    fn from(Decorate(how): Decorate) -> Self {
        match how {
            None => Self::Bool(false),
            Some(Decoration::Strict) => "strict".into(),
            Some(Decoration::Lenient) => "lenient".into(),
        }
    }
}
