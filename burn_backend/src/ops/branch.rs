//! Branches of a captured graph, as an operation names them.

/// A part of what is queued, beside which later kernels run in a graph that is captured. Clones are
/// the same branch.
#[derive(Clone, Debug, Default)]
pub struct Branch {
    /// That of the kernels.
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    pub(super) kernels: nvfp4_kernels::graph::Branch,
}

/// A point of a [`Branch`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BranchPoint {
    /// It begins, and reads the operand.
    Begin,
    /// It reads this operand too.
    Reads,
    /// It ends, and has made the operand.
    End,
    /// What is queued from here on is behind it.
    Join,
}
