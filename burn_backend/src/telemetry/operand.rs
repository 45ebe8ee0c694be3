//! The statistics of one operand.

use serde::Serialize;

/// The statistics of one operand of one layer in one step.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct OperandSample {
    /// Path of the layer in the model.
    pub layer: String,
    /// `fprop.w`, `fprop.x`, `wgrad.x`, `dgrad.dy` or `wgrad.dy`.
    pub operand: &'static str,
    /// Signal over quantization noise, in decibel; infinite where nothing was lost.
    pub sqnr_db: f64,
    /// Norm of the values over the norm of the noise. For `dgrad.dy` it is the criterion of "FP4
    /// All the Way" (arXiv 2505.19115): below √3, 4-bit gradients no longer help.
    pub signal_to_noise: f64,
    /// Share of the values that are not zero and became zero.
    pub zeros: f64,
    /// Share of the codes at the end of the grid, ±6.
    pub saturated: f64,
    /// Share of the blocks with a value that is not zero and a scale that is.
    pub underflowed_blocks: f64,
    /// The amax of the whole operand.
    pub amax: f32,
    /// True if it was rounded stochastically.
    pub stochastic: bool,
}

/// The names of the columns of [`OperandSample::csv`].
pub const CSV_HEADER: &str =
    "layer,operand,sqnr_db,signal_to_noise,zeros,saturated,underflowed_blocks,amax,stochastic";

impl OperandSample {
    /// The sample as a line of comma-separated values, in the order of [`CSV_HEADER`].
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
