//! Flex: no graphs, and no control over the address of a tensor's memory.

use burn_core::backend::{Flex, tensor::IntTensor};

use super::GraphOps;

/// [`graph`](crate::graph) returns this error before any of these operations is queued.
const NO_GRAPHS: &str = "Flex has no graphs: crate::graph refuses it";

impl GraphOps for Flex {
    fn nvfp4_copy_into(_out: IntTensor<Self>, _from: IntTensor<Self>) -> IntTensor<Self> {
        unreachable!("{NO_GRAPHS}")
    }

    fn nvfp4_advance_offset(_offset: IntTensor<Self>, _step: u32) -> IntTensor<Self> {
        unreachable!("{NO_GRAPHS}")
    }

    fn nvfp4_draw_at(_offset: IntTensor<Self>, _begins: bool) -> IntTensor<Self> {
        unreachable!("{NO_GRAPHS}")
    }

    fn nvfp4_mark_step(_offset: IntTensor<Self>, _begins: bool) -> IntTensor<Self> {
        unreachable!("{NO_GRAPHS}")
    }

    fn nvfp4_overlap_kernels(_offset: IntTensor<Self>) -> IntTensor<Self> {
        unreachable!("{NO_GRAPHS}")
    }

    fn nvfp4_make_room(_offset: IntTensor<Self>) -> IntTensor<Self> {
        unreachable!("{NO_GRAPHS}")
    }

    fn nvfp4_give_back_room(_offset: IntTensor<Self>) -> IntTensor<Self> {
        unreachable!("{NO_GRAPHS}")
    }
}
