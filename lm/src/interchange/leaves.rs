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
    /// By what the input is multiplied, feature by feature, where the dialect has it.
    pub pre_quant: Option<&'static str>,
}

impl Leaves {
    /// The four that every dialect has.
    pub const fn all(self) -> [&'static str; 4] {
        [self.codes, self.scales, self.global, self.input]
    }
}
