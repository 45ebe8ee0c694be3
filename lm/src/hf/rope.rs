//! Frequencies of the rotary embedding, with the arithmetic of transformers' `modeling_rope_utils`.
//! Uses `f32` where transformers does, because large positions amplify every rounding error.

use std::f64::consts::PI;

use anyhow::{Result, bail, ensure};
use serde_json::Value;

use super::fields::Fields;

/// Rotary embedding: pair `i` of a head rotates by the position times frequency `i`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies, `theta^(-2i / head)`.
    pub theta: f64,
    /// Scaling for longer texts.
    pub scaling: RopeScaling,
}

/// Scaling of frequencies for texts longer than those in training.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// No scaling.
    Default,
    /// All frequencies are divided by `factor`.
    Linear {
        /// Scaling factor.
        factor: f64,
    },
    /// Low frequencies are divided by `factor`, high ones are unchanged, and those between are
    /// interpolated.
    Llama3 {
        /// Scaling factor.
        factor: f64,
        /// Wavelengths longer than `original / low` are scaled.
        low: f64,
        /// Wavelengths shorter than `original / high` are not scaled.
        high: f64,
        /// Context length of the training.
        original: f64,
    },
    /// YaRN (Peng et al., 2023): a ramp over the pairs interpolates between scaled and unscaled
    /// frequencies.
    Yarn {
        /// Scaling factor.
        factor: f64,
        /// Context length of the training.
        original: f64,
        /// Pairs with more turns than this are not scaled.
        beta_fast: f64,
        /// Pairs with fewer turns than this are scaled.
        beta_slow: f64,
        /// Factor that multiplies cosines and sines.
        attention_factor: f64,
        /// True if the ramp starts and ends at whole pairs.
        truncate: bool,
    },
    /// The base grows with the length of the text beyond `original` positions.
    Dynamic {
        /// Scaling factor.
        factor: f64,
        /// Context length of the training.
        original: f64,
    },
}

impl RopeScaling {
    /// Returns the name of the kind in `rope_type`.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Linear { .. } => "linear",
            Self::Llama3 { .. } => "llama3",
            Self::Yarn { .. } => "yarn",
            Self::Dynamic { .. } => "dynamic",
        }
    }
}

/// Names of the kinds, for errors.
const KINDS: &str = "default, linear, llama3, yarn or dynamic";

impl Rope {
    /// Reads `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of
    /// transformers 4. Files for both versions have all of them, which must agree.
    pub(crate) fn from_fields(fields: &Fields, theta: f64, max_positions: usize) -> Result<Self> {
        let name = "rope_parameters";
        Self::from_versions(fields, theta, max_positions, (name, fields.take(name)))
    }

    /// Version of [`from_fields`](Self::from_fields) with the name and value of the object of
    /// transformers 5.
    pub(crate) fn from_versions(
        fields: &Fields,
        theta: f64,
        max_positions: usize,
        new: (&str, Option<&Value>),
    ) -> Result<Self> {
        let field = "rope_theta";
        let written = fields.optional_number(field)?.map(|theta| (field, theta));
        let read = |(name, value): (&str, Option<&Value>)| match value {
            Some(value) if !is_empty(value) => {
                Self::from_value(name, value, (written, theta), max_positions).map(Some)
            }
            _ => Ok(None),
        };
        let old = ("rope_scaling", fields.take("rope_scaling"));
        let text = |value: Option<&Value>| value.map_or_else(String::new, Value::to_string);
        match (read(old)?, read(new)?) {
            (None, None) => Self::unscaled(written.map_or(theta, |(_, theta)| theta)),
            (Some(first), Some(second)) if first != second => bail!(
                "`rope_scaling` says {}, but `{}` says {}: transformers 4 reads the first and \
                 transformers 5 the second; delete the one that is wrong",
                text(old.1),
                new.0,
                text(new.1)
            ),
            (Some(found), _) | (None, Some(found)) => Ok(found),
        }
    }

    /// Returns the rotary embedding of base `theta` without scaling.
    pub(crate) fn unscaled(theta: f64) -> Result<Self> {
        let scaling = RopeScaling::Default;
        Self { theta, scaling }.checked()
    }

    /// Reads the object `value`, called `name`. Its theta may also be `written` in another field,
    /// with which it must agree, or be absent, and is then `default`.
    pub(crate) fn from_value(
        name: &str,
        value: &Value,
        (written, default): (Option<(&str, f64)>, f64),
        max_positions: usize,
    ) -> Result<Self> {
        let Value::Object(object) = value else {
            bail!("`{name}` is {value}, but must be an object");
        };
        let inner = Fields::new(object);
        let own = inner.optional_number("rope_theta")?;
        if let (Some((field, written)), Some(own)) = (written, own) {
            ensure!(
                written == own,
                "`{field}` is {written}, but `{name}.rope_theta` is {own}: delete the one that is \
                 wrong"
            );
        }
        let theta = written.map_or(default, |(_, theta)| theta);
        let found = Self::from_object(name, &inner, theta, max_positions as f64)?;
        inner.refuse_all_unknown(name)?;
        found.checked()
    }

    fn from_object(name: &str, fields: &Fields, theta: f64, max: f64) -> Result<Self> {
        let theta = fields.number_or("rope_theta", theta)?;
        let partial = fields.number_or("partial_rotary_factor", 1.0)?;
        ensure!(
            partial == 1.0,
            "`{name}.partial_rotary_factor` is {partial}, but must be 1: whole heads are rotated"
        );
        let kind = match (
            fields.optional_string("rope_type")?,
            fields.optional_string("type")?,
        ) {
            (Some(new), Some(old)) if new != old => {
                bail!("`{name}.rope_type` is `{new}`, but `{name}.type` is `{old}`")
            }
            (Some(kind), _) | (None, Some(kind)) => kind,
            (None, None) => "default",
        };
        let positive = |field: &'static str, default: Option<f64>| -> Result<f64> {
            let Some(value) = fields.optional_number(field)?.or(default) else {
                bail!("`{name}.{field}` is absent, which `{kind}` needs");
            };
            ensure!(
                value.is_finite() && value > 0.0,
                "`{name}.{field}` is {value}, but must be positive"
            );
            Ok(value)
        };
        let factor = || -> Result<f64> {
            let factor = positive("factor", None)?;
            ensure!(
                factor >= 1.0,
                "`{name}.factor` is {factor}, but must be at least 1"
            );
            Ok(factor)
        };
        let original = || positive("original_max_position_embeddings", Some(max));
        let scaling = match kind {
            "default" => RopeScaling::Default,
            "linear" => RopeScaling::Linear { factor: factor()? },
            "llama3" => {
                let (low, high) = (
                    positive("low_freq_factor", None)?,
                    positive("high_freq_factor", None)?,
                );
                ensure!(
                    low < high,
                    "`{name}.low_freq_factor` is {low}, but must be less than `high_freq_factor` \
                     ({high})"
                );
                RopeScaling::Llama3 {
                    factor: factor()?,
                    low,
                    high,
                    original: original()?,
                }
            }
            "yarn" => {
                let factor = factor()?;
                RopeScaling::Yarn {
                    factor,
                    original: original()?,
                    beta_fast: positive("beta_fast", Some(32.0))?,
                    beta_slow: positive("beta_slow", Some(1.0))?,
                    attention_factor: yarn_attention_factor(fields, factor)?,
                    truncate: fields.truth_or("truncate", true)?,
                }
            }
            "dynamic" => {
                let original = original()?;
                ensure!(
                    original == max,
                    "`{name}.original_max_position_embeddings` is {original}, but must be \
                     `max_position_embeddings` ({max}), from which dynamic scaling starts"
                );
                RopeScaling::Dynamic {
                    factor: factor()?,
                    original,
                }
            }
            other => bail!("`{name}.rope_type` is `{other}`, but must be {KINDS}"),
        };
        if kind == "default" {
            // Some tools write these fields with the type, although they have no meaning there.
            for field in ["factor", "original_max_position_embeddings"] {
                fields.take(field);
            }
        }
        Ok(Self { theta, scaling })
    }

    fn checked(self) -> Result<Self> {
        let theta = self.theta;
        ensure!(
            theta.is_finite() && theta > 1.0,
            "`rope_theta` is {theta}, but must be a number above 1"
        );
        Ok(self)
    }

    /// Returns the frequency of each of `head / 2` pairs, in radians per position, for a text of
    /// `positions`.
    ///
    /// # Errors
    /// Returns an error if the head dimension is too small for this scaling.
    pub fn frequencies(&self, head: usize, positions: usize) -> Result<Vec<f32>> {
        let base = match self.scaling {
            RopeScaling::Dynamic { factor, original } => {
                ensure!(
                    head > 2,
                    "the size of a head is {head}, but must be at least 4 for dynamic scaling"
                );
                let growth = factor * (positions as f64).max(original) / original - (factor - 1.0);
                self.theta * growth.powf(head as f64 / (head as f64 - 2.0))
            }
            _ => self.theta,
        };
        let powers = (0..head / 2).map(|i| {
            let exponent = 2.0 * i as f32 / head as f32;
            base.powf(f64::from(exponent)) as f32
        });
        Ok(match self.scaling {
            RopeScaling::Default | RopeScaling::Dynamic { .. } => {
                powers.map(|power| 1.0 / power).collect()
            }
            RopeScaling::Linear { factor } => {
                powers.map(|power| 1.0 / power / factor as f32).collect()
            }
            RopeScaling::Llama3 {
                factor,
                low,
                high,
                original,
            } => powers
                .map(|power| llama3(1.0 / power, factor, [low, high], original))
                .collect(),
            RopeScaling::Yarn {
                factor,
                original,
                beta_fast,
                beta_slow,
                truncate,
                ..
            } => {
                let dim = |turns| correction_dim(turns, head as f64, base, original);
                let (mut low, mut high) = (dim(beta_fast), dim(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let (low, mut high) = (low.max(0.0), high.min(head as f64 - 1.0));
                if low == high {
                    high += 0.001;
                }
                let blend = |(i, power): (usize, f32)| {
                    let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                    let unscaled = 1.0 - ramp;
                    let (scaled_frequency, frequency) =
                        (1.0 / (factor as f32 * power), 1.0 / power);
                    scaled_frequency * (1.0 - unscaled) + frequency * unscaled
                };
                powers.enumerate().map(blend).collect()
            }
        })
    }

    /// Returns the factor that multiplies cosines and sines.
    pub fn attention_factor(&self) -> f64 {
        match self.scaling {
            RopeScaling::Yarn {
                attention_factor, ..
            } => attention_factor,
            _ => 1.0,
        }
    }

    /// Returns the number of positions beyond which frequencies depend on the length of the text,
    /// if they do.
    pub fn dynamic_beyond(&self) -> Option<usize> {
        match self.scaling {
            RopeScaling::Dynamic { original, .. } => Some(original as usize),
            _ => None,
        }
    }

    /// Returns the cosines and sines of the first `positions` positions, `[positions, head / 2]`
    /// each, for a text of that length.
    ///
    /// # Errors
    /// Returns the errors of [`frequencies`](Self::frequencies).
    pub fn tables(&self, head: usize, positions: usize) -> Result<(Vec<f32>, Vec<f32>)> {
        let frequencies = self.frequencies(head, positions)?;
        let scale = self.attention_factor() as f32;
        let angles = (0..positions).flat_map(|position| {
            frequencies
                .iter()
                .map(move |frequency| f64::from(position as f32 * frequency))
        });
        Ok(angles
            .map(|angle| (angle.cos() as f32 * scale, angle.sin() as f32 * scale))
            .unzip())
    }
}

/// Returns true for null and `{}`, which say nothing of a rotary embedding.
pub(crate) fn is_empty(value: &Value) -> bool {
    value.is_null() || value.as_object().is_some_and(serde_json::Map::is_empty)
}

/// Computes one frequency of Llama 3.
fn llama3(frequency: f32, factor: f64, [low, high]: [f64; 2], original: f64) -> f32 {
    let wave = (2.0 * PI) as f32 / frequency;
    let scaled = frequency / factor as f32;
    if wave < (original / high) as f32 {
        frequency
    } else if wave > (original / low) as f32 {
        scaled
    } else {
        let smooth = (original as f32 / wave - low as f32) / (high - low) as f32;
        (1.0 - smooth) * frequency / factor as f32 + smooth * frequency
    }
}

/// Returns the fractional index of the pair that makes `turns` turns in `original` positions.
fn correction_dim(turns: f64, head: f64, base: f64, original: f64) -> f64 {
    head * (original / (turns * 2.0 * PI)).ln() / (2.0 * base.ln())
}

fn yarn_attention_factor(fields: &Fields, factor: f64) -> Result<f64> {
    let scale = |of: f64| match factor <= 1.0 {
        true => 1.0,
        false => 0.1 * of * factor.ln() + 1.0,
    };
    let written = fields.optional_number("attention_factor")?;
    let mscale = fields.number_or("mscale", 0.0)?;
    let all = fields.number_or("mscale_all_dim", 0.0)?;
    let found = match written {
        Some(written) => written,
        None if mscale != 0.0 && all != 0.0 => scale(mscale) / scale(all),
        None => scale(1.0),
    };
    ensure!(
        found.is_finite() && found > 0.0,
        "the attention factor of yarn is {found}, but must be positive"
    );
    Ok(found)
}
