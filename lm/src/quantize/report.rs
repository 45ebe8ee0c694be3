//! What was quantized, and what was not.

use super::plan::Kept;

/// A linear layer that was quantized.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerReport {
    /// Its name.
    pub module: String,
    /// Output and input features.
    pub shape: [usize; 2],
    /// Bytes of the weight before.
    pub bytes_before: usize,
    /// Bytes of codes, block scales and global scales.
    pub bytes: usize,
    /// Signal-to-quantization-noise ratio of the weight, in dB.
    pub sqnr: f64,
    /// The same with every squared value and error weighted by `E[x²]` of the input feature: about
    /// that of the layer's output. `None` where nothing is known of the input.
    pub weighted_sqnr: Option<f64>,
}

/// What was and what was not quantized.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Quantized {
    /// The layers that were.
    pub layers: Vec<LayerReport>,
    /// The linear layers that were not: name, why, and bytes.
    pub kept: Vec<(String, Kept, usize)>,
    /// Bytes of the tensors that are in no linear layer.
    pub other_bytes: usize,
    /// Modules to whose input no token of the calibration came: they have the statistics of the
    /// group's other experts, or count all inputs equally.
    pub unseen: Vec<String>,
    /// Tokens that calibration read, if there was one.
    pub calibration_tokens: Option<u64>,
}

/// The part of it that one decoder layer is.
#[derive(Debug, Default, Clone, PartialEq)]
pub(crate) struct PartReport {
    pub layers: Vec<LayerReport>,
    pub unseen: Vec<String>,
}
