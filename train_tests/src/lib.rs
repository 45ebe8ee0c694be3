//! Tests NVFP4 layers in burn-train's training loops; see `tests`.

/// Compiles and runs the examples of the book that use burn-train or several ranks.
#[cfg(doctest)]
mod book {
    #[doc = include_str!("../../docs/src/train.md")]
    struct Train;
    #[doc = include_str!("../../docs/src/parallel.md")]
    struct Parallel;
    #[doc = include_str!("../../docs/src/expert-parallel.md")]
    struct ExpertParallel;
    #[doc = include_str!("../../docs/src/tensor-parallel.md")]
    struct TensorParallel;
}
