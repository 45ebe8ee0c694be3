//! Buffers that a captured graph reads, as a separate extension trait. [`graph`](crate::graph)
//! checks the arguments before anything is queued.

#[cfg(any(feature = "cpu", feature = "cuda"))]
pub(in crate::ops) mod cube;
#[cfg(feature = "flex")]
mod flex;

use burn_core as burn;

use burn_core::backend::{
    Autodiff, Backend, autodiff::checkpoint::strategy::CheckpointStrategy, backend_extension,
    tensor::IntTensor,
};

/// In-place writes, in queue order.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(any(feature = "cpu", feature = "cuda")),
    Fusion: cfg(feature = "cubecl-backend"),
    Autodiff
)]
pub trait GraphOps: Backend {
    /// Copies the elements of `from` to the buffer of `out`, or to a new buffer if others hold that
    /// one too. Both have one shape and dtype.
    #[fusion(meta = meta::copy_into)]
    fn nvfp4_copy_into(out: IntTensor<Self>, from: IntTensor<Self>) -> IntTensor<Self>;

    /// Advances `offset`, `u32[2]` with the low word first, by `step` in its buffer.
    #[fusion(meta = meta::advance_offset)]
    fn nvfp4_advance_offset(offset: IntTensor<Self>, step: u32) -> IntTensor<Self>;

    /// If `begins`, stochastic rounding that is queued later on the device of `offset`, with
    /// parameters that set [`offset_in_memory`](super::QuantParams::offset_in_memory), adds
    /// `offset` to the offset of its stream. Otherwise removes that setting.
    #[fusion(meta = meta::draw_at)]
    fn nvfp4_draw_at(offset: IntTensor<Self>, begins: bool) -> IntTensor<Self>;

    /// Marks the begin of a step if `begins`, otherwise its end. Kernels queued in between share
    /// one clearing of the words that they count in or atomically raise to an amax.
    #[fusion(meta = meta::mark_step)]
    fn nvfp4_mark_step(offset: IntTensor<Self>, begins: bool) -> IntTensor<Self>;

    /// Lets the kernels of the graph that is being captured on the device of `offset` overlap,
    /// where possible, and returns `offset`. See `nvfp4_kernels::graph::overlap_kernels`, whose
    /// contract the caller must keep.
    #[fusion(meta = meta::same)]
    fn nvfp4_overlap_kernels(offset: IntTensor<Self>) -> IntTensor<Self>;

    /// Allocates free memory in the pools of the device of `offset`, and returns `offset`. During a
    /// capture no page can be added, and the same step may find its free memory fragmented
    /// differently.
    #[fusion(meta = meta::same)]
    fn nvfp4_make_room(offset: IntTensor<Self>) -> IntTensor<Self>;

    /// Frees the pages in the pools of the device of `offset` that neither a tensor nor a graph
    /// holds, and returns `offset`: the reserved memory that a capture did not need.
    #[fusion(meta = meta::same)]
    fn nvfp4_give_back_room(offset: IntTensor<Self>) -> IntTensor<Self>;
}

#[cfg(feature = "cubecl-backend")]
mod meta {
    use burn_core::backend::fusion::custom::TensorSpec;

    pub(super) fn copy_into(out: &TensorSpec, _from: &TensorSpec) -> TensorSpec {
        out.clone()
    }

    pub(super) fn advance_offset(offset: &TensorSpec, _step: &u32) -> TensorSpec {
        offset.clone()
    }

    pub(super) fn same(offset: &TensorSpec) -> TensorSpec {
        offset.clone()
    }

    pub(super) fn mark_step(offset: &TensorSpec, _begins: &bool) -> TensorSpec {
        offset.clone()
    }

    pub(super) fn draw_at(offset: &TensorSpec, _begins: &bool) -> TensorSpec {
        offset.clone()
    }
}

impl<B: GraphOps, C: CheckpointStrategy> GraphOps for Autodiff<B, C> {
    fn nvfp4_copy_into(out: IntTensor<Self>, from: IntTensor<Self>) -> IntTensor<Self> {
        B::nvfp4_copy_into(out, from)
    }

    fn nvfp4_advance_offset(offset: IntTensor<Self>, step: u32) -> IntTensor<Self> {
        B::nvfp4_advance_offset(offset, step)
    }

    fn nvfp4_draw_at(offset: IntTensor<Self>, begins: bool) -> IntTensor<Self> {
        B::nvfp4_draw_at(offset, begins)
    }

    fn nvfp4_mark_step(offset: IntTensor<Self>, begins: bool) -> IntTensor<Self> {
        B::nvfp4_mark_step(offset, begins)
    }

    fn nvfp4_overlap_kernels(offset: IntTensor<Self>) -> IntTensor<Self> {
        B::nvfp4_overlap_kernels(offset)
    }

    fn nvfp4_make_room(offset: IntTensor<Self>) -> IntTensor<Self> {
        B::nvfp4_make_room(offset)
    }

    fn nvfp4_give_back_room(offset: IntTensor<Self>) -> IntTensor<Self> {
        B::nvfp4_give_back_room(offset)
    }
}
