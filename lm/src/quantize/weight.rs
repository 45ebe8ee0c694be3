//! Quantizes whole weights by the methods.

use anyhow::{Context, Result, ensure};
use nvfp4_formats::ptq::BlockQuantizer;
use nvfp4_formats::ptq::gptq::DAMPING;

use super::Method;
use super::engine::{Engine, Factor, NO_MOMENTS};
use super::rules::{check_matrix, rule_of};
use super::stats::InputStats;
use crate::interchange::{Dialect, PackedWeight};

/// Quantizes the weight `values` `[n, k]` for readers of `dialect`.
///
/// `amax` is the largest magnitude of the weight, or of all weights that share its global scale.
/// Errors are weighted by `E[x²]` of `stats`, or equally without `stats`.
///
/// # Errors
/// Returns an error if the shape or a value is invalid, if `stats` have another width, or if
/// [`Method::Gptq`] lacks the second moments of a calibration.
pub fn quantize_weight(
    values: &[f32],
    [n, k]: [usize; 2],
    amax: f32,
    (dialect, method): (Dialect, Method),
    stats: Option<&InputStats>,
) -> Result<PackedWeight> {
    let mut quantizer = WeightQuantizer::new(Engine::Host, dialect);
    quantizer.quantize(
        values,
        [n, k],
        amax,
        method,
        stats.map(|stats| (stats, None)),
    )
}

/// Quantizes weights one after another.
pub(super) struct WeightQuantizer {
    engine: Engine,
    dialect: Dialect,
    factors: Factors,
}

impl WeightQuantizer {
    /// Creates a quantizer for readers of `dialect`.
    pub fn new(engine: Engine, dialect: Dialect) -> Self {
        Self {
            engine,
            dialect,
            factors: Factors::default(),
        }
    }

    /// Quantizes a weight like [`quantize_weight`]. `input` are the statistics of its input, and the
    /// divisors of the input's features, if any.
    pub fn quantize(
        &mut self,
        values: &[f32],
        [n, k]: [usize; 2],
        amax: f32,
        method: Method,
        input: Option<(&InputStats, Option<&[f32]>)>,
    ) -> Result<PackedWeight> {
        check_matrix(values, [n, k], amax)?;
        if let Some((stats, _)) = input {
            ensure!(
                stats.k() == k,
                "calibration saw inputs of {} features, but the weight has {k}",
                stats.k()
            );
        }
        let quantizer = BlockQuantizer::new(rule_of(self.dialect), method.choice(), amax);
        quantizer.global.check()?;
        let weights = match input {
            Some((stats, columns)) => stats.mean_squares_of(columns),
            None => vec![1.0; k],
        };
        let (codes, scales) = if method == Method::Gptq {
            let (stats, columns) = input.context(NO_MOMENTS)?;
            let factor = self.factors.of(stats, columns)?;
            factor.gptq(values, &quantizer, &weights)?
        } else {
            self.engine.round_rows(values, &quantizer, &weights)?
        };
        PackedWeight::new([n, k], codes, scales, quantizer.global, None)
    }
}

/// The factor of the last input, which several weights may read.
#[derive(Default)]
struct Factors(Option<(*const InputStats, Option<Vec<f32>>, Factor)>);

impl Factors {
    /// Returns the factor of the input with statistics `stats`, whose features are divided by
    /// `columns`.
    ///
    /// # Errors
    /// Returns an error if the products were not collected, or are not finite.
    fn of(&mut self, stats: &InputStats, columns: Option<&[f32]>) -> Result<&Factor> {
        let is_same = |(of, by, _): &(*const InputStats, Option<Vec<f32>>, Factor)| {
            std::ptr::eq(*of, stats) && by.as_deref() == columns
        };
        if !self.0.as_ref().is_some_and(is_same) {
            // The memory of the last one is free for the next.
            self.0 = None;
            let factor = stats.factor(columns, DAMPING)?;
            self.0 = Some((stats, columns.map(<[f32]>::to_vec), factor));
        }
        let (.., factor) = self.0.as_ref().expect("it was just made");
        Ok(factor)
    }
}
