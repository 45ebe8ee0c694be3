//! Statistics of one operand.

use serde::Serialize;

/// Statistics of one operand of one layer in one step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OperandSample {
    /// Path of the layer in the model.
    pub layer: String,
    /// Name of the operand: `fprop.w`, `fprop.x`, `wgrad.x`, `dgrad.dy` or `wgrad.dy`.
    pub operand: &'static str,
    /// Signal to quantization noise ratio in decibels; infinite without quantization error.
    pub sqnr_db: f64,
    /// Norm of the values over the norm of the noise. For `dgrad.dy` it is the criterion of "FP4
    /// All the Way" (arXiv 2505.19115): below √3, 4-bit gradients no longer help.
    pub signal_to_noise: f64,
    /// Fraction of the values that are nonzero and became zero.
    pub zeros: f64,
    /// Fraction of the codes at the end of the grid, ±6.
    pub saturated: f64,
    /// Fraction of the blocks with a nonzero value and a zero scale.
    pub underflowed_blocks: f64,
    /// Amax of the whole operand.
    pub amax: f32,
    /// True if the operand was rounded stochastically.
    pub stochastic: bool,
}

/// Column names of [`OperandSample::csv`].
pub const CSV_HEADER: &str =
    "layer,operand,sqnr_db,signal_to_noise,zeros,saturated,underflowed_blocks,amax,stochastic";

impl OperandSample {
    /// Returns the sample as a line of comma-separated values, in the order of [`CSV_HEADER`].
    pub fn csv(&self) -> String {
        let Self {
            layer,
            operand,
            sqnr_db,
            signal_to_noise,
            zeros,
            saturated,
            underflowed_blocks,
            amax,
            stochastic,
        } = self;
        format!(
            "{layer},{operand},{sqnr_db:.3},{signal_to_noise:.4},{zeros:.6},{saturated:.6},\
             {underflowed_blocks:.6},{amax:e},{stochastic}"
        )
    }
}
