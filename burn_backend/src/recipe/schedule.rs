//! Layer modes, which switch the quantization of an existing model between steps.

use nvfp4_formats::Nvfp4Error;
use serde::{Deserialize, Serialize};

use crate::ops::{BackwardSource, LinearSpec, OperandSpec};

/// Extent to which a layer follows its recipe, until the mode changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerMode {
    /// Follow the recipe.
    #[default]
    Recipe,
    /// Forward in high precision; backward by the recipe, from the original tensors.
    HighPrecisionForward,
    /// Forward by the recipe; backward in high precision, from the dequantized operands of the
    /// forward, as in `fwd_nvfp4_bwd_bf16`. For the phase where 4-bit gradients no longer help (see
    /// [`OperandSample::signal_to_noise`](crate::telemetry::OperandSample::signal_to_noise)).
    HighPrecisionBackward,
    /// Forward and backward in high precision.
    HighPrecision,
}

impl LayerMode {
    /// Applies this mode to `spec`.
    pub(crate) fn of(self, spec: LinearSpec) -> LinearSpec {
        match self {
            Self::Recipe => spec,
            Self::HighPrecisionForward => LinearSpec {
                fprop_x: OperandSpec::HighPrecision,
                fprop_w: OperandSpec::HighPrecision,
                source: BackwardSource::Original,
                ..spec
            },
            Self::HighPrecisionBackward => LinearSpec {
                fprop_x: spec.fprop_x,
                fprop_w: spec.fprop_w,
                source: BackwardSource::Forward,
                ..LinearSpec::high_precision()
            },
            Self::HighPrecision => LinearSpec::high_precision(),
        }
    }
}

/// High precision for the end of a run: short for a [`RecipeSchedule`](super::RecipeSchedule) of two
/// phases, which [`Nvfp4Recipe::schedule`](crate::Nvfp4Recipe::schedule) returns. It removes most of the loss gap, which is mainly noise of
/// the forward: in NVIDIA's report (arXiv 2509.25149, appendix D) a gap of 1.5 % fell to 0.5 % with
/// the last 18 % of the tokens in high precision.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Healing {
    /// Fraction of the steps after which high precision begins, from 0 to 1.
    pub at_fraction: f64,
    /// True to change only the forward; the backward keeps its formats. This closes the gap nearly
    /// as far, because the noise of the backward costs little.
    pub forward_only: bool,
}

impl Healing {
    pub(super) fn check(&self) -> Result<(), Nvfp4Error> {
        if (0.0..=1.0).contains(&self.at_fraction) {
            Ok(())
        } else {
            Err(Nvfp4Error::value(
                "healing",
                format!("at_fraction {}", self.at_fraction),
                "0 to 1, a share of the steps",
            ))
        }
    }

    /// Returns the mode of the healed steps.
    pub(super) fn mode(&self) -> LayerMode {
        match self.forward_only {
            true => LayerMode::HighPrecisionForward,
            false => LayerMode::HighPrecision,
        }
    }
}
