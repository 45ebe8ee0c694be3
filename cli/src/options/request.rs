//! Options that name a preset, a recipe or a device. The command looks the names up.

use std::str::FromStr;

use clap::{ArgAction, Args, ValueEnum};
use nvfp4_lm::config::{Decoration, ModelKind, Preset};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Named choices of a run, before they are looked up.
#[derive(Debug, Clone, Default, PartialEq, Args, Serialize, Deserialize)]
#[group(skip)]
#[serde(default)]
pub(super) struct Request {
    /// Start from the values of this preset [default: tiny]
    #[arg(long, value_name = "NAME")]
    pub(super) preset: Option<Preset>,
    /// Train with this recipe: nvfp4, bf16, f32, a recipe preset, or a JSON file [default: nvfp4]
    #[arg(long, value_name = "NAME|FILE")]
    pub(super) recipe: Option<String>,
    /// Also train with these recipes on the same batches and report the loss gaps; without a value,
    /// compare with high precision [default: high precision for tiny, else none]
    #[arg(
        long,
        value_name = "A,B,..",
        num_args = 0..=1,
        default_missing_value = "",
        overrides_with = "no_compare"
    )]
    pub(super) compare: Option<Compare>,
    /// Train with one recipe only
    #[arg(long, action = ArgAction::SetTrue, overrides_with = "compare")]
    #[serde(skip)]
    pub(super) no_compare: bool,
    /// Train a model of Burn's own layers through the decorator, on device cpu or cuda:N. A GEMM
    /// that does not run in NVFP4 is an error (strict) or counted (lenient) [default: false; strict
    /// without a value]
    #[arg(long, value_name = "HOW|BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub(super) decorate: Option<Decorate>,
    /// Train on this device: flex, cpu or cuda:N [default: cuda:0 if there is one, else flex]
    #[arg(long, value_name = "DEVICE")]
    pub(super) device: Option<String>,
    /// Train a dense model or a mixture-of-experts model [default: dense]
    #[arg(long, value_name = "KIND")]
    pub(super) model: Option<ModelKind>,
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
