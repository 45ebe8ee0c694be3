//! Cube: kernels that write to the buffers that a graph reads.

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn_core::backend::tensor::IntTensor;
use burn_cubecl::{CubeBackend, CubeDevice, kernel::into_contiguous, tensor::CubeTensor};
use cubecl::server::Handle;
use nvfp4_kernels::{graph, quantize, zeroed};

use super::super::cube::tensors::{launched, owned, settle};
use super::GraphOps;

/// Bytes per allocation that makes room: few allocations for a large model, and small relative to a
/// small model.
const PIECE: u64 = 4 << 20;

/// A capture gets this fraction of the memory of a step more than ordinary steps left free, but at
/// least the largest allocation. It may find free memory fragmented differently. Captured steps of 85 M
/// and 1 B parameters needed no more (H200).
const SLACK: u64 = 16;

/// Offsets in device memory.
static OFFSETS: Mutex<Vec<(CubeDevice, Handle)>> = Mutex::new(Vec::new());

fn offsets() -> MutexGuard<'static, Vec<(CubeDevice, Handle)>> {
    OFFSETS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the offset that the steps of a graph on the device of `like` add to the offsets of their
/// streams: two words in device memory.
pub(in crate::ops) fn offset_beside(like: &CubeTensor) -> Handle {
    let offsets = offsets();
    let found = offsets.iter().find(|(of, _)| *of == like.device);
    let (_, offset) = found.expect("`GraphSteps::begin` is queued before any of its steps");
    offset.clone()
}

impl GraphOps for CubeBackend {
    fn nvfp4_copy_into(out: IntTensor<Self>, from: IntTensor<Self>) -> IntTensor<Self> {
        let (out, from) = (owned("graph", out), into_contiguous(from));
        let words = out.meta.shape().num_elements() * out.dtype.size() / 4;
        let client = &out.client;
        launched(graph::copy_words(client, &from.handle, &out.handle, words));
        out
    }

    fn nvfp4_advance_offset(offset: IntTensor<Self>, step: u32) -> IntTensor<Self> {
        // In place even if other owners exist: rounding kernels read this buffer.
        let offset = into_contiguous(offset);
        let client = &offset.client;
        launched(quantize::advance_offset(client, &offset.handle, step));
        offset
    }

    fn nvfp4_draw_at(offset: IntTensor<Self>, begins: bool) -> IntTensor<Self> {
        let offset = into_contiguous(offset);
        let mut offsets = offsets();
        offsets.retain(|(of, _)| *of != offset.device);
        if begins {
            offsets.push((offset.device.clone(), offset.handle.clone()));
        }
        drop(offsets);
        offset
    }

    fn nvfp4_mark_step(offset: IntTensor<Self>, begins: bool) -> IntTensor<Self> {
        match begins {
            true => zeroed::begin_step(&offset.client),
            false => zeroed::end_step(&offset.client),
        }
        offset
    }

    fn nvfp4_overlap_kernels(offset: IntTensor<Self>) -> IntTensor<Self> {
        // SAFETY: the caller of the op keeps the contract.
        #[cfg(feature = "cuda")]
        unsafe {
            graph::overlap_kernels(&offset.client);
        }
        offset
    }

    fn nvfp4_make_room(offset: IntTensor<Self>) -> IntTensor<Self> {
        let client = &offset.client;
        let report = settle(client);
        let usage = report.usage();
        let free = usage.bytes_reserved.saturating_sub(usage.bytes_in_use);
        let largest = report
            .streams
            .iter()
            .flat_map(|stream| &stream.pools.dynamic)
            .map(|pool| pool.largest_alloc)
            .max();
        let more = (free / SLACK).max(largest.unwrap_or_default());
        let pieces = (free + more).div_ceil(PIECE);
        // Ignores failed allocations: if the memory is missed, the capture reports it.
        let pieces: Vec<Handle> = (0..pieces).map(|_| client.empty(PIECE as usize)).collect();
        // After this, all pieces have been allocated.
        settle(client);
        drop(pieces);
        offset
    }

    fn nvfp4_give_back_room(offset: IntTensor<Self>) -> IntTensor<Self> {
        // A failure only keeps the memory allocated for longer.
        let _ = offset.client.memory_cleanup();
        offset
    }
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use burn_core::backend::ops::{FloatTensorOps, IntTensorOps};
    use burn_core::tensor::{FloatDType, IntDType, Shape};

    use super::*;

    /// Pools belong to this thread's stream.
    #[test]
    fn room_is_made_and_given_back() {
        const ELEMENTS: usize = 16 << 20;
        let device = CubeDevice::Cpu(Default::default());
        let offset = CubeBackend::int_zeros(Shape::new([2]), &device, IntDType::U32);
        let held = CubeBackend::float_zeros(Shape::new([ELEMENTS]), &device, FloatDType::F32);
        drop(held);
        let client = offset.client.clone();
        let reserved = || settle(&client).usage().bytes_reserved;
        let before = reserved();
        assert!(before >= 4 * ELEMENTS as u64, "{before}");
        let offset = CubeBackend::nvfp4_make_room(offset);
        let with_room = reserved();
        assert!(with_room > before, "{with_room}");
        let offset = CubeBackend::nvfp4_give_back_room(offset);
        let after = reserved();
        assert!(after <= before, "{after}, but {before} before the room");
        let kept = client.read_one(offset.handle).expect("it is held");
        assert_eq!(kept[..], [0; 8]);
    }
}
