//! Names of tensors.

/// Names of the tensors of a quantized linear layer.
#[derive(Debug, Clone, Copy)]
pub struct Leaves {
    /// The codes.
    pub codes: &'static str,
    /// The block scales.
    pub scales: &'static str,
    /// The global scale of the weight.
    pub global: &'static str,
    /// The global scale of the input.
    pub input: &'static str,
}

impl Leaves {
    /// All four.
    pub const fn all(self) -> [&'static str; 4] {
        [self.codes, self.scales, self.global, self.input]
    }
}
