//! Families of attention kernels, in a file that imports nothing: [`Environment`] names one.
//!
//! [`Environment`]: crate::environment::Environment

/// Families of attention kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AttentionKernel {
    /// `wgmma` and TMA: compute capability 9.0, bf16, head sizes 64 and 128.
    Sm90,
    /// `mma.sync`: compute capability 8.0 and later, bf16 and f16, head sizes in multiples of 16.
    Mma,
    /// No matrix instructions: every device, type and size.
    Scalar,
}
