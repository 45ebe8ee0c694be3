//! When to quantize: modes that switch between steps, without a new model.

use nvfp4_kernels::Nvfp4Error;
use serde::{Deserialize, Serialize};

use crate::ops::{BackwardSource, LinearSpec, OperandSpec};

/// How a layer follows its recipe, until the mode changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerMode {
    /// Follow it.
    #[default]
    Recipe,
    /// Forward in high precision, backward by the recipe, from the original tensors.
    HighPrecisionForward,
    /// Forward by the recipe, backward in high precision, of the values that the forward
    /// multiplied, as `fwd_nvfp4_bwd_bf16` does it: where 4-bit gradients no longer help (see
    /// [`OperandSample::signal_to_noise`](crate::telemetry::OperandSample::signal_to_noise)).
    HighPrecisionBackward,
    /// Everything in high precision.
    HighPrecision,
}

impl LayerMode {
    /// `spec` in this mode.
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

/// The end of a run in high precision, which removes most of the loss gap: most of the gap is noise
/// of the forward. In NVIDIA's report (arXiv 2509.25149, appendix D) a gap of 1.5 % became 0.5 %
/// with the last 18 % of the tokens.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Healing {
    /// The share of the steps after which it begins, from 0 to 1.
    pub at_fraction: f64,
    /// Only the forward changes; the backward keeps its formats. The gap closes nearly as far,
    /// because the backward's noise costs little.
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

    /// The mode of step `step` (from 0) of `steps`.
    pub fn mode(&self, step: u64, steps: u64) -> LayerMode {
        if (step as f64) < self.at_fraction * steps as f64 {
            LayerMode::Recipe
        } else if self.forward_only {
            LayerMode::HighPrecisionForward
        } else {
            LayerMode::HighPrecision
        }
    }
}
