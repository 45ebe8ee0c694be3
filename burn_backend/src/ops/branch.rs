//! Branches of a captured graph, as arguments of an operation.

/// Section of the queued work that overlaps with later kernels in a captured graph. Clones are the
/// same branch.
#[derive(Clone, Debug, Default)]
pub struct Branch {
    /// Branch of the kernels.
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    pub(super) kernels: nvfp4_kernels::graph::Branch,
}

/// Point of a [`Branch`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BranchPoint {
    /// The branch begins, and reads the operand.
    Begin,
    /// The branch also reads this operand.
    Reads,
    /// The branch ends; its result is the operand.
    End,
    /// Later work waits for the branch.
    Join,
}
