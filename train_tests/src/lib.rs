//! burn-train's training loops with NVFP4 layers: see `tests`.

/// The examples of the book that use burn-train, or several ranks, compile and run.
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
