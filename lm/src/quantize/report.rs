//! Reports the quantized and the skipped layers.

use serde::{Serialize, Serializer};

use super::budget::Choices;
use super::mxfp4::Cast;
use super::plan::Kept;
use super::weight_format::WeightFormat;

/// A quantized linear layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerReport {
    /// Name of the module.
    pub module: String,
    /// Format of the quantized weight.
    pub format: WeightFormat,
    /// Numbers of output and input features.
    pub shape: [usize; 2],
    /// Bytes of the original weight.
    pub bytes_before: usize,
    /// Bytes of codes and scales.
    pub bytes: usize,
    /// Amax of the original weight.
    pub amax: f32,
    /// Signal-to-quantization-noise ratio of the weight, in dB; infinite without noise, which JSON
    /// writes as `null`.
    #[serde(rename = "sqnr_db")]
    pub sqnr: f64,
    /// Signal-to-quantization-noise ratio in dB with squared values and errors weighted by `E[x²]`
    /// of the input feature, which approximates that of the layer's output. `None` if the input is
    /// unknown.
    #[serde(rename = "weighted_sqnr_db", skip_serializing_if = "Option::is_none")]
    pub weighted_sqnr: Option<f64>,
    /// Exactness of a weight that was cast from MXFP4.
    #[serde(rename = "from_mxfp4", skip_serializing_if = "Option::is_none")]
    pub cast: Option<Cast>,
}

/// A linear layer that was not quantized.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct KeptLayer {
    /// Name of the module.
    pub module: String,
    /// Reason.
    #[serde(serialize_with = "reason")]
    pub reason: Kept,
    /// Bytes of its weight.
    pub bytes: usize,
}

fn reason<S: Serializer>(kept: &Kept, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(kept.reason())
}

/// Result of a quantization.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Quantized {
    /// Quantized layers.
    pub layers: Vec<LayerReport>,
    /// Linear layers that were not quantized.
    pub kept: Vec<KeptLayer>,
    /// Bytes of the tensors outside of linear layers.
    pub other_bytes: usize,
    /// Modules that no calibration token reached: they use the statistics of the group's other
    /// experts, or weight all inputs equally.
    pub unseen: Vec<String>,
    /// Number of calibration tokens, if there was a calibration.
    pub calibration_tokens: Option<u64>,
    /// Formats chosen for a number of bits per weight, if one was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub formats: Option<Choices>,
}

impl Quantized {
    /// Adds the report for one decoder layer.
    pub(super) fn add(&mut self, part: PartReport) {
        self.layers.extend(part.layers);
        self.unseen.extend(part.unseen);
    }
}

/// Report for one decoder layer.
#[derive(Debug, Default, Clone, PartialEq)]
pub(crate) struct PartReport {
    pub layers: Vec<LayerReport>,
    pub unseen: Vec<String>,
}
