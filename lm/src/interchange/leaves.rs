//! Names of the tensors of a layer.

/// Names of the tensors of a quantized linear layer.
#[derive(Debug, Clone, Copy)]
pub struct Leaves {
    /// Codes.
    pub codes: &'static str,
    /// Block scales.
    pub scales: &'static str,
    /// Global scale of the weight.
    pub global: &'static str,
    /// Global scale of the input.
    pub input: &'static str,
    /// Input feature scales, if the dialect has them.
    pub pre_quant: Option<&'static str>,
}

impl Leaves {
    /// Returns the four names that every dialect has.
    pub const fn all(self) -> [&'static str; 4] {
        [self.codes, self.scales, self.global, self.input]
    }
}
