//! A branch of a captured graph: kernels that run beside those queued after them.
//!
//! What a stream launches while it is captured stands in one row, each kernel behind the one before
//! it. Of two chains of kernels that need nothing of each other, one can be a branch: kernels that
//! leave a part of the device idle, or wait for memory most of their time, then cost less of it.

#[cfg(feature = "cuda")]
use std::sync::{Arc, Mutex, PoisonError};

use cubecl::{client::Client, server::Handle};

use super::held::Held;
use crate::zeroed;

/// A part of what the calling thread queues on its stream.
///
/// What is queued between [`begin`](Self::begin) and [`end`](Self::end) is the branch. What is
/// queued from there to [`join`](Self::join) must need nothing of it: in a graph that is being
/// captured it runs beside it. What is queued later is behind both. Outside a capture all of it runs
/// in its order.
///
/// A branch allocates through this crate alone, and reads memory of others only as it
/// [holds](Self::hold) it: what runs beside it must not be given that.
///
/// Clones are the same branch.
#[derive(Clone, Debug, Default)]
pub struct Branch {
    /// The memory that it uses, until the join.
    held: Held,
    #[cfg(feature = "cuda")]
    nodes: Arc<Mutex<cuda::Nodes>>,
}

impl Branch {
    /// Keeps `memory`, which the branch reads, until the join: the tensor may be dropped before.
    pub fn hold(&self, memory: &Handle) {
        self.held.push(memory);
    }

    /// The branch begins. It has no other in it.
    pub fn begin(&self, client: &Client) {
        // Words that are cleared in the branch would not be for what runs beside it.
        zeroed::make_ready(client);
        self.held.begin();
        self.visit(client, Point::Begin);
    }

    /// It ends: what is queued from here on runs beside it.
    pub fn end(&self, client: &Client) {
        self.held.end();
        self.visit(client, Point::End);
    }

    /// What is queued from here on is behind the branch, and behind what ran beside it.
    pub fn join(&self, client: &Client) {
        self.visit(client, Point::Join);
    }

    /// Notes a point, behind what was queued before.
    fn visit(&self, client: &Client, point: Point) {
        #[cfg(feature = "cuda")]
        if crate::foreign::is_cuda(client) {
            let branch = self.clone();
            // On the thread that serves allocations: those beside the branch were, at the join.
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

    /// Nodes of the graph that is being captured; none outside a capture.
    #[derive(Debug, Default)]
    pub(super) struct Nodes {
        /// What both the branch and what runs beside it are behind.
        before: Vec<CUgraphNode>,
        /// The last of the branch.
        last: Vec<CUgraphNode>,
    }

    // SAFETY: the driver's names of nodes, which any thread may give it.
    unsafe impl Send for Nodes {}

    impl Nodes {
        /// What is captured behind `point`.
        ///
        /// An error here is one of the capture, whose end reports it.
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
                // Nothing was queued in it.
                Point::Join if self.last == self.before => Ok(()),
                Point::Join => {
                    let add = UpdateFlags::CU_STREAM_ADD_CAPTURE_DEPENDENCIES;
                    update(stream, &mut self.last, add)
                }
            }
        }
    }

    /// What the next node that is captured on `stream` will depend on.
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

    /// Has the next node that is captured on `stream` depend on `nodes`, by ordinary edges.
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
