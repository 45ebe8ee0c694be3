//! How operations run on a device, as the crates tell it to a user.

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
