//! How operations run on a device, as the crates tell it to a user.

use std::fmt;

/// How one operation runs on a device: a row of `nvfp4 doctor`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CodePath {
    /// What is computed.
    pub operation: &'static str,
    /// What computes it.
    pub backend: String,
    /// The kernel, in a few words.
    pub kernel: String,
    /// Why this one.
    pub reason: String,
}

impl CodePath {
    /// Columns of the table for the operation, for the backend and for the kernel.
    pub const WIDTHS: [usize; 3] = [26, 16, 53];

    /// A row.
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

    /// Whether the row fits its columns.
    pub fn fits(&self) -> bool {
        let texts = [self.operation, &self.backend, &self.kernel];
        let mut columns = texts.iter().zip(Self::WIDTHS);
        columns.all(|(text, width)| (1..=width).contains(&text.chars().count()))
    }
}

/// The row of the table, without its reason.
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
