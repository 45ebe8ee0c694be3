//! Report of a quantized model.

use std::fmt;

use crate::nn::Activations;

/// Linear layer whose weight was packed.
#[derive(Debug, Clone, PartialEq)]
pub struct PackedLayer {
    /// Path of the layer in the model.
    pub path: String,
    /// Shape of the weight, `[d_in, d_out]`, or a stack of these.
    pub shape: Vec<usize>,
    /// Quantization of the input.
    pub activations: Activations,
    /// True if each forward dequantizes the weight; false if the GEMM reads the codes.
    pub dequantizes: bool,
    /// Bytes of the high-precision weight.
    pub bytes_before: usize,
    /// Bytes of codes, block scales and global scales.
    pub bytes: usize,
    /// Largest magnitude in the weight.
    pub amax: f32,
    /// Ratio of the squares of the weight and of its quantization error, in dB. Infinite without an
    /// error.
    pub sqnr_db: f64,
}

impl PackedLayer {
    /// Returns the name of the format: `W4A16`, `W4A4` or `W4A4 static`.
    pub fn format(&self) -> &'static str {
        match self.activations {
            Activations::HighPrecision => "W4A16",
            Activations::Dynamic(_) => "W4A4",
            Activations::Static => "W4A4 static",
        }
    }
}

/// Reason why a parameter stays in high precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kept {
    /// Its layer has the name of an output head or a router.
    HeadOrRouter,
    /// It is in `exclude`.
    Excluded,
    /// Its `d_in` is not a multiple of 16.
    Width,
    /// Its layer shards it over ranks.
    Sharded,
    /// It is not the weight of a linear layer.
    NotLinear,
}

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::HeadOrRouter => "output head or router",
            Self::Excluded => "excluded",
            Self::Width => "d_in is not a multiple of 16",
            Self::Sharded => "sharded over ranks",
            Self::NotLinear => "not a linear weight",
        })
    }
}

/// Parameter with two or more axes that stays in high precision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptParameter {
    /// Path of the linear layer, or of the parameter if it is not a linear weight.
    pub path: String,
    /// Shape of the parameter.
    pub shape: Vec<usize>,
    /// Bytes of the parameter.
    pub bytes: usize,
    /// Reason.
    pub reason: Kept,
}

impl fmt::Display for KeptParameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}: {}", self.path, self.shape, self.reason)
    }
}

/// Report of [`quantize`](super::quantize()). Its display is a table of the layers.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct QuantizeReport {
    /// Packed layers, in the order of the model's fields.
    pub layers: Vec<PackedLayer>,
    /// Parameters with two or more axes that stay in high precision.
    pub kept: Vec<KeptParameter>,
}

impl QuantizeReport {
    /// Bytes of the packed weights in high precision.
    pub fn bytes_before(&self) -> usize {
        self.layers.iter().map(|layer| layer.bytes_before).sum()
    }

    /// Bytes of the packed weights.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(|layer| layer.bytes).sum()
    }
}

impl fmt::Display for QuantizeReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let paths = self.layers.iter().map(|layer| &layer.path);
        let paths = paths.chain(self.kept.iter().map(|kept| &kept.path));
        let width = paths.map(|path| path.len()).max().unwrap_or(0).max(5);
        writeln!(
            f,
            "{:width$}  {:>16}  {:>11}  {:>11}  {:>11}  {:>9}  {:>7}",
            "layer", "shape", "format", "before", "bytes", "amax", "SQNR dB"
        )?;
        for layer in &self.layers {
            let note = if layer.dequantizes {
                "  dequantizes"
            } else {
                ""
            };
            writeln!(
                f,
                "{:width$}  {:>16}  {:>11}  {:>11}  {:>11}  {:>9.3e}  {:>7.1}{note}",
                layer.path,
                format!("{:?}", layer.shape),
                layer.format(),
                layer.bytes_before,
                layer.bytes,
                layer.amax,
                layer.sqnr_db
            )?;
        }
        for kept in &self.kept {
            let shape = format!("{:?}", kept.shape);
            let (path, bytes, reason) = (&kept.path, kept.bytes, kept.reason);
            writeln!(
                f,
                "{path:width$}  {shape:>16}  {:>11}  {bytes:>11}  {bytes:>11}  {reason}",
                "kept"
            )?;
        }
        Ok(())
    }
}
