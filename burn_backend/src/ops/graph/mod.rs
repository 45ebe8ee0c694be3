//! Buffers that a captured graph reads, as an extension trait of its own: [`graph`](crate::graph)
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

/// In-place writes, in the order of the queue.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(any(feature = "cpu", feature = "cuda")),
    Fusion: cfg(feature = "cubecl-backend"),
    Autodiff
)]
pub trait GraphOps: Backend {
    /// The elements of `from` in the buffer of `out`, unless others hold that too: then in a new
    /// one. Both are of one shape and type.
    #[fusion(meta = meta::copy_into)]
    fn nvfp4_copy_into(out: IntTensor<Self>, from: IntTensor<Self>) -> IntTensor<Self>;

    /// `offset`, `u32[2]` with the low word first, advanced by `step` in its buffer.
    #[fusion(meta = meta::advance_offset)]
    fn nvfp4_advance_offset(offset: IntTensor<Self>, step: u32) -> IntTensor<Self>;

    /// Where it `begins`, stochastic rounding whose parameters say
    /// [`offset_in_memory`](super::QuantParams::offset_in_memory), on the device of `offset` and
    /// queued later, adds it to the offset of its stream. Else it is forgotten.
    #[fusion(meta = meta::draw_at)]
    fn nvfp4_draw_at(offset: IntTensor<Self>, begins: bool) -> IntTensor<Self>;

    /// A step begins where `begins`, else one ends: kernels queued between share what clears the
    /// words they count in, or raise to an amax.
    #[fusion(meta = meta::mark_step)]
    fn nvfp4_mark_step(offset: IntTensor<Self>, begins: bool) -> IntTensor<Self>;

    /// `offset`, after the kernels of the graph that is being captured on its device overlap, as far
    /// as it goes: see `nvfp4_kernels::graph::overlap_kernels`, whose contract the caller keeps.
    #[fusion(meta = meta::same)]
    fn nvfp4_overlap_kernels(offset: IntTensor<Self>) -> IntTensor<Self>;

    /// `offset`, after the pools of its device got more free memory than they have: the same step
    /// in a capture, in which no page can be added, may find that its free memory is in other
    /// pieces.
    #[fusion(meta = meta::same)]
    fn nvfp4_make_room(offset: IntTensor<Self>) -> IntTensor<Self>;

    /// `offset`, after the pools of its device have given back the pages that nothing holds, a graph
    /// neither: what a capture did not need of the room that was made for it.
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
