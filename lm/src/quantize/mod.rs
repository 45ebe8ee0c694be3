//! Post-training quantization: weights of a finished model to NVFP4.
//!
//! - [`rules`]: the tools' own arithmetic.
//! - [`block`]: the scale byte of one block: by its maximum, four over six, or search.
//! - [`gptq`]: errors made up for by later columns; [`linalg`] has its factorizations.
//! - [`stats`]: what calibration knows of a layer's input; [`calibrate`] collects it, [`text`] from a
//!   text that the model reads.
//! - [`smooth`]: scales of input features that are folded into what makes the input.
//! - [`plan`]: which layers of a model are quantized, and which share a global scale.
//! - [`folder`]: a model folder to a quantized one, layer by layer; [`journal`] keeps what is done
//!   of it, [`report`] what was quantized.

pub mod block;
pub mod calibrate;
pub mod folder;
pub mod gptq;
mod inputs;
pub mod journal;
pub mod linalg;
pub mod plan;
pub mod report;
pub mod rules;
pub mod smooth;
pub mod stats;
pub mod text;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use rayon::prelude::*;

use crate::interchange::{Dialect, PackedWeight};
use block::{BlockQuantizer, ScaleChoice};
use rules::{Rule, check_matrix};

pub use folder::{Quantization, QuantizeOptions, quantize_folder};
pub use report::{LayerReport, Quantized};
pub use smooth::Smoothing;
pub use stats::{Calibration, InputStats};

/// How weights are quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Method {
    /// Round to nearest, the maximum of each block becoming 6
    Rtn,
    /// Each block's maximum becomes 6 or 4, whichever has the smaller error
    #[value(name = "4over6")]
    FourOverSix,
    /// Each block's scale is the one of twelve with the smallest error, weighted by `E[x²]`
    Search,
    /// The same scales, and rounding errors made up for by later columns
    Gptq,
}

impl Method {
    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rtn => "rtn",
            Self::FourOverSix => "4over6",
            Self::Search => "search",
            Self::Gptq => "gptq",
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

/// Quantize the weight `values` `[n, k]` for readers of `dialect`.
///
/// `amax` is the largest magnitude of the weight, or of all weights with which it shares its global
/// scale. Errors count by `E[x²]` of `stats`, equally where there is none.
///
/// # Errors
/// When the shape or a value is wrong, when `stats` are of another width, and for
/// [`Method::Gptq`] without the Hessian of a calibration.
pub fn quantize_weight(
    values: &[f32],
    [n, k]: [usize; 2],
    amax: f32,
    (dialect, method): (Dialect, Method),
    stats: Option<&InputStats>,
) -> Result<PackedWeight> {
    check_matrix(values, [n, k], amax)?;
    if let Some(stats) = stats {
        ensure!(
            stats.k() == k,
            "calibration saw inputs of {} features, but the weight has {k}",
            stats.k()
        );
    }
    let quantizer = BlockQuantizer::new(Rule::of(dialect), method.choice(), amax);
    quantizer.global.check()?;
    let weights = match stats {
        Some(stats) => stats.mean_squares(),
        None => vec![1.0; k],
    };
    let (codes, scales) = if method == Method::Gptq {
        let hessian = stats.and_then(InputStats::hessian);
        let hessian = hessian.context("GPTQ needs calibration: the second moments of the input")?;
        gptq::gptq(values, k, &quantizer, (&hessian, gptq::DAMPING), &weights)?
    } else {
        round_rows(values, k, &quantizer, &weights)
    };
    PackedWeight::new([n, k], codes, scales, quantizer.global, None)
}

/// The codes and scale bytes of rows of `k`, each block by itself.
fn round_rows(
    values: &[f32],
    k: usize,
    quantizer: &BlockQuantizer,
    weights: &[f32],
) -> (Vec<u8>, Vec<u8>) {
    let rows: Vec<(Vec<u8>, Vec<u8>)> = values
        .par_chunks(k)
        .map(|row| {
            let (mut codes, mut scales) = (Vec::new(), Vec::new());
            let blocks = row.chunks(nvfp4_kernels::BLOCK);
            for (block, weights) in blocks.zip(weights.chunks(nvfp4_kernels::BLOCK)) {
                let byte = quantizer.scale_byte(block, weights);
                scales.push(byte);
                codes.extend(quantizer.rule.codes(block, byte, quantizer.global));
            }
            (codes, scales)
        })
        .collect();
    let (codes, scales): (Vec<_>, Vec<_>) = rows.into_iter().unzip();
    (codes.concat(), scales.concat())
}

/// The [`sqnr`] of rows as wide as `weights`, by which squares of values and errors are multiplied.
pub fn weighted_sqnr(values: &[f32], quantized: &[f32], weights: &[f32]) -> f64 {
    let root: Vec<f32> = weights.iter().map(|weight| weight.sqrt()).collect();
    let scaled = |values: &[f32]| -> Vec<f32> {
        let roots = root.iter().cycle();
        values
            .iter()
            .zip(roots)
            .map(|(value, root)| value * root)
            .collect()
    };
    sqnr(&scaled(values), &scaled(quantized))
}

/// Signal-to-quantization-noise ratio in dB: 10 log₁₀(Σ w² / Σ (w − ŵ)²), infinite without noise.
pub fn sqnr(values: &[f32], quantized: &[f32]) -> f64 {
    let (mut signal, mut noise) = (0.0f64, 0.0f64);
    for (&value, &quantized) in values.iter().zip(quantized) {
        signal += f64::from(value).powi(2);
        noise += (f64::from(value) - f64::from(quantized)).powi(2);
    }
    match noise {
        0.0 => f64::INFINITY,
        noise => 10.0 * (signal / noise).log10(),
    }
}

#[cfg(all(test, feature = "flex"))]
mod refuse_tests;
#[cfg(all(test, feature = "flex"))]
mod smooth_tests;
#[cfg(test)]
mod tests;
