//! Post-training quantization of weights to NVFP4 and FP8.
//!
//! - [`rules`]: quantizes a weight by the arithmetic of the tools, which is in
//!   [`ptq`](nvfp4_formats::ptq), with the search of block scales and GPTQ.
//! - [`stats`]: statistics of a layer's input; [`calibrate`] collects them, [`text`] from a forward
//!   pass over a text, of the whole model or layer by layer.
//! - [`fp8`]: quantizes weights to FP8.
//! - [`mxfp4`]: casts weights that are stored in MXFP4.
//! - [`smooth`]: scales of input features that are folded into the producer of the input.
//! - [`sensitivity`]: measures what quantizing each group of layers costs; [`budget`] chooses
//!   formats within a number of bits.
//! - [`plan`]: selects the layers to quantize and those that share a global scale.
//! - [`Engine`]: the host or a GPU, which quantizes.
//! - [`folder`]: quantizes a model folder layer by layer; [`journal`] stores its progress,
//!   [`report`] describes the result.

pub mod budget;
pub mod calibrate;
mod decoded;
mod engine;
pub mod folder;
pub mod fp8;
mod inputs;
pub mod journal;
pub mod mxfp4;
mod options;
pub mod plan;
pub mod report;
pub mod rules;
pub mod sensitivity;
pub mod smooth;
mod source;
pub mod stats;
pub mod text;
mod weight;
mod weight_format;

use clap::ValueEnum;
use nvfp4_formats::ptq::ScaleChoice;
use nvfp4_formats::ptq::values::squares;

pub use budget::Choices;
pub use engine::Engine;
pub use folder::{Quantization, quantize_folder};
pub use options::QuantizeOptions;
pub use report::{KeptLayer, LayerReport, Quantized};
pub use sensitivity::{check_bits, choose_formats};
pub use smooth::Smoothing;
pub use stats::{Calibration, InputStats};
pub use weight::quantize_weight;
pub use weight_format::WeightFormat;

/// Quantization method of weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Method {
    /// Round to nearest, with the amax of each block mapped to 6
    Rtn,
    /// Map each block's amax to 6 or 4, whichever gives the smaller error
    #[value(name = "4over6")]
    FourOverSix,
    /// Choose each block's scale among twelve by the smallest error, weighted by `E[x²]`
    Search,
    /// Same scales as `search`; compensate rounding errors in later columns
    Gptq,
}

impl Method {
    /// Returns the name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rtn => "rtn",
            Self::FourOverSix => "4over6",
            Self::Search => "search",
            Self::Gptq => "gptq",
        }
    }

    /// Returns the method for a layer with these input statistics. A layer that no token reached
    /// has no second moments, so GPTQ becomes the search.
    const fn with(self, stats: Option<&InputStats>) -> Self {
        match (self, stats) {
            (Self::Gptq, None) => Self::Search,
            (method, _) => method,
        }
    }

    const fn choice(self) -> ScaleChoice {
        match self {
            Self::Rtn => ScaleChoice::Max,
            Self::FourOverSix => ScaleChoice::FourOverSix,
            Self::Search | Self::Gptq => ScaleChoice::Search,
        }
    }
}

/// Returns the [`sqnr`] of rows as wide as `weights`, which multiply the squares of values and
/// errors.
pub fn weighted_sqnr(values: &[f32], quantized: &[f32], weights: &[f32]) -> f64 {
    match squares(values, quantized, weights) {
        [_, 0.0] => f64::INFINITY,
        [signal, noise] => 10.0 * (signal / noise).log10(),
    }
}

/// Returns the signal-to-quantization-noise ratio in dB: 10 log₁₀(Σ w² / Σ (w − ŵ)²), infinite
/// without noise.
pub fn sqnr(values: &[f32], quantized: &[f32]) -> f64 {
    weighted_sqnr(values, quantized, &[1.0; 1024])
}

#[cfg(all(test, feature = "flex"))]
mod kill_tests;
#[cfg(all(test, feature = "flex"))]
mod layerwise_tests;
#[cfg(all(test, feature = "flex"))]
mod mixed_tests;
#[cfg(all(test, feature = "flex"))]
mod mxfp4_tests;
#[cfg(all(test, feature = "flex"))]
mod refuse_tests;
#[cfg(all(test, feature = "flex"))]
mod smooth_tests;
#[cfg(test)]
mod tests;
