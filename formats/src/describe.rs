//! Describes to the user how operations run on a device.

use std::fmt;

/// Code path of one operation on a device: one row of `nvfp4 doctor`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CodePath {
    /// Operation.
    pub operation: &'static str,
    /// Backend that computes it.
    pub backend: String,
    /// Short name of the kernel.
    pub kernel: String,
    /// Reason for this choice.
    pub reason: String,
}

impl CodePath {
    /// Widths of the table's columns: operation, backend and kernel.
    pub const WIDTHS: [usize; 3] = [26, 16, 53];

    /// Returns a row.
    pub fn new(
        operation: &'static str,
        backend: impl Into<String>,
        kernel: impl Into<String>,
        reason: impl Into<String>,
    ) -> Self {
        Self {
            operation,
            backend: backend.into(),
            kernel: kernel.into(),
            reason: reason.into(),
        }
    }

    /// True if every text fits its column.
    pub fn fits(&self) -> bool {
        let texts = [self.operation, &self.backend, &self.kernel];
        let mut columns = texts.iter().zip(Self::WIDTHS);
        columns.all(|(text, width)| (1..=width).contains(&text.chars().count()))
    }
}

/// Writes the row of the table without its reason.
impl fmt::Display for CodePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [operation, backend, _] = Self::WIDTHS;
        let Self {
            operation: what,
            backend: who,
            kernel,
            ..
        } = self;
        write!(f, "{what:<operation$} {who:<backend$} {kernel}")
    }
}
