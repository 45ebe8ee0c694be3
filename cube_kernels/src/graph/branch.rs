//! A branch of a captured graph: kernels that run concurrently with those queued after them.
//!
//! Kernels that a stream launches during a capture are serialized in the graph. Of two independent
//! chains of kernels one can be a branch. Kernels that leave SMs idle, or mostly wait for memory,
//! then overlap with the other chain.

#[cfg(feature = "cuda")]
use std::sync::{Arc, Mutex, PoisonError};

use cubecl::{client::Client, server::Handle};

use super::held::Held;
use crate::zeroed;

/// A section of the work that the calling thread queues on its stream.
///
/// Work queued between [`begin`](Self::begin) and [`end`](Self::end) is the branch. Work queued
/// from there to [`join`](Self::join) must not depend on it: in a graph under capture it runs
/// concurrently with the branch. Later work waits for both. Outside a capture everything runs in
/// launch order.
///
/// A branch may allocate only through this crate, and must [hold](Self::hold) any other memory that
/// it reads, because the allocator must not give that memory to concurrent work.
///
/// Clones refer to the same branch.
#[derive(Clone, Debug, Default)]
pub struct Branch {
    /// Memory that the branch uses, kept until the join.
    held: Held,
    #[cfg(feature = "cuda")]
    nodes: Arc<Mutex<cuda::Nodes>>,
}

impl Branch {
    /// Keeps `memory`, which the branch reads, until the join: the tensor may be dropped earlier.
    pub fn hold(&self, memory: &Handle) {
        self.held.push(memory);
    }

    /// Begins the branch. Branches do not nest.
    pub fn begin(&self, client: &Client) {
        // Words cleared inside the branch could not be used by concurrent work.
        zeroed::make_ready(client);
        self.held.begin();
        self.visit(client, Point::Begin);
    }

    /// Ends the branch: work queued from here on runs concurrently with it.
    pub fn end(&self, client: &Client) {
        self.held.end();
        self.visit(client, Point::End);
    }

    /// Makes work queued from here on wait for the branch and for the work concurrent with it.
    pub fn join(&self, client: &Client) {
        self.visit(client, Point::Join);
    }

    /// Records a point after the work queued so far.
    fn visit(&self, client: &Client, point: Point) {
        #[cfg(feature = "cuda")]
        if crate::foreign::is_cuda(client) {
            let branch = self.clone();
            // Runs on the thread that serves allocations: at the join, all allocations of the
            // concurrent work are done.
            crate::foreign::visit(client, move |place| {
                if point == Point::Join {
                    branch.held.release();
                }
                let nodes = branch.nodes.lock();
                let mut nodes = nodes.unwrap_or_else(PoisonError::into_inner);
                nodes.visit(place, point)
            });
            return;
        }
        let _ = client;
        if point == Point::Join {
            self.held.release();
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Point {
    Begin,
    End,
    Join,
}

#[cfg(feature = "cuda")]
mod cuda {
    use std::ptr;

    use cudarc::driver::sys::{
        CUgraphNode, CUstream, CUstreamCaptureStatus,
        CUstreamUpdateCaptureDependencies_flags as UpdateFlags, cuStreamGetCaptureInfo_v3,
        cuStreamUpdateCaptureDependencies_v2,
    };

    use super::Point;
    use crate::foreign::ForeignPlace;

    /// Nodes of the graph under capture; none outside a capture.
    #[derive(Debug, Default)]
    pub(super) struct Nodes {
        /// Nodes on which both the branch and the work concurrent with it depend.
        before: Vec<CUgraphNode>,
        /// Last nodes of the branch.
        last: Vec<CUgraphNode>,
    }

    // SAFETY: the driver's names of nodes, which any thread may give it.
    unsafe impl Send for Nodes {}

    impl Nodes {
        /// Records or updates the dependencies of the stream at `point`.
        ///
        /// An error here is an error of the capture, which the end of the capture reports.
        pub(super) fn visit(&mut self, place: &ForeignPlace, point: Point) -> Result<(), String> {
            if !place.is_captured {
                return Ok(());
            }
            let stream = place.stream.cast();
            match point {
                Point::Begin => {
                    self.before = dependencies(stream)?;
                    Ok(())
                }
                Point::End => {
                    self.last = dependencies(stream)?;
                    let set = UpdateFlags::CU_STREAM_SET_CAPTURE_DEPENDENCIES;
                    update(stream, &mut self.before, set)
                }
                // The branch is empty.
                Point::Join if self.last == self.before => Ok(()),
                Point::Join => {
                    let add = UpdateFlags::CU_STREAM_ADD_CAPTURE_DEPENDENCIES;
                    update(stream, &mut self.last, add)
                }
            }
        }
    }

    /// Returns the dependencies of the next node captured on `stream`.
    fn dependencies(stream: CUstream) -> Result<Vec<CUgraphNode>, String> {
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let (mut nodes, mut edges, mut count) = (ptr::null(), ptr::null(), 0);
        // SAFETY: the stream is alive, and results that are not wanted may be null.
        let found = unsafe {
            cuStreamGetCaptureInfo_v3(
                stream,
                &mut status,
                ptr::null_mut(),
                ptr::null_mut(),
                &mut nodes,
                &mut edges,
                &mut count,
            )
        };
        let found = found.result();
        found.map_err(|error| format!("cuStreamGetCaptureInfo: {error}"))?;
        if count == 0 {
            return Ok(Vec::new());
        }
        // SAFETY: the driver's list of them, which is valid until its next call of this stream.
        Ok(unsafe { std::slice::from_raw_parts(nodes, count) }.to_vec())
    }

    /// Makes the next node captured on `stream` depend on `nodes`, by ordinary edges.
    fn update(
        stream: CUstream,
        nodes: &mut [CUgraphNode],
        flags: UpdateFlags,
    ) -> Result<(), String> {
        let (list, count) = (nodes.as_mut_ptr(), nodes.len());
        // SAFETY: they are nodes of the graph that is being captured on the stream.
        let updated = unsafe {
            cuStreamUpdateCaptureDependencies_v2(stream, list, ptr::null(), count, flags as u32)
        };
        let updated = updated.result();
        updated.map_err(|error| format!("cuStreamUpdateCaptureDependencies: {error}"))
    }
}
