//! Overlapping kernels of a captured graph: programmatic dependent launch.
//!
//! Along an ordinary edge of a graph a kernel starts when the previous one has ended: its launch
//! and first loads take one to two microseconds in which the device is idle. Along a programmatic
//! edge its cubes start as soon as the previous kernel's cubes leave room. They prefetch data that
//! the graph does not write, such as weights, and then wait
//! ([`cube::overlap`](crate::cube::overlap)).

use std::ffi::{CStr, c_char};
use std::ptr;

use cubecl::client::Client;
use cudarc::driver::sys::{
    CUDA_KERNEL_NODE_PARAMS, CUgraph, CUgraphDependencyType, CUgraphEdgeData, CUgraphNode,
    CUgraphNodeType, CUresult, CUstream, CUstreamCaptureStatus, cuFuncGetName,
    cuGraphAddDependencies_v2, cuGraphGetEdges_v2, cuGraphKernelNodeGetParams_v2,
    cuGraphNodeGetType, cuGraphRemoveDependencies_v2, cuKernelGetName, cuStreamGetCaptureInfo_v3,
};

use crate::{
    capabilities::overlaps_kernels,
    foreign::{ForeignPlace, is_cuda, visit},
};

/// Name prefixes of kernels that wait for the previous kernel: all kernels with an `overlaps`
/// choice in their plan.
pub const WAITING: [&str; 8] = [
    "decode_mma_kernel",
    "decode_run_kernel",
    "fp8_linear_mma_kernel",
    "greedy_kernel",
    "norm_kernel",
    "prologue_kernel",
    "small_m_kernel",
    "small_m_norm_kernel",
];

/// Dependency on the point at which a kernel lets the next one start.
const PROGRAMMATIC: CUgraphEdgeData = CUgraphEdgeData {
    // `CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC`.
    from_port: 1,
    to_port: 0,
    type_: CUgraphDependencyType::CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC as u8,
    reserved: [0; 5],
};

/// Dependency on the end of a kernel.
const ORDINARY: CUgraphEdgeData = CUgraphEdgeData {
    from_port: 0,
    to_port: 0,
    type_: CUgraphDependencyType::CU_GRAPH_DEPENDENCY_TYPE_DEFAULT as u8,
    reserved: [0; 5],
};

/// Makes kernels overlap in the graph that is being captured on the stream of the calling thread,
/// as captured so far: each kernel that can start early overlaps with the kernel before it. Does
/// nothing outside a capture, and on devices below compute capability 9.0.
///
/// # Safety
/// The graph must not write, before these kernels, the data that they read before they wait. This
/// data consists of packed weights `b` of [`gemm`](crate::gemm) at small M, weights of
/// [`fp8::linear`](crate::fp8::linear()), gains of [`norm`](crate::norm) and, at small M, of
/// [`fused_linear`](crate::gemm::fused_linear), and the cache, starts and counts of
/// [`attention::decode`](mod@crate::attention::decode).
pub unsafe fn overlap_kernels(client: &Client) {
    if is_cuda(client) && overlaps_kernels(client) {
        visit(client, overlap);
    }
}

/// Runs on the device thread: replaces the edges.
fn overlap(place: &ForeignPlace) -> Result<(), String> {
    if !place.is_captured {
        return Ok(());
    }
    let graph = captured_graph(place.stream.cast())?;
    let edges = edges(graph)?;
    let mut replaced = 0;
    for (from, to, data) in edges {
        let both_kernels = kernel_name(from)?.is_some();
        let waits = kernel_name(to)?.is_some_and(|name| waits(&name));
        if data == ORDINARY && both_kernels && waits {
            replace(graph, (from, to))?;
            replaced += 1;
        }
    }
    tracing::debug!("{replaced} kernels of a graph begin before those in front of them end");
    Ok(())
}

fn waits(name: &str) -> bool {
    WAITING.iter().any(|kernel| name.starts_with(kernel))
}

/// Returns the graph that is being captured on `stream`.
fn captured_graph(stream: CUstream) -> Result<CUgraph, String> {
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let mut graph: CUgraph = ptr::null_mut();
    // SAFETY: the stream is alive, and results that are not wanted may be null.
    let found = unsafe {
        cuStreamGetCaptureInfo_v3(
            stream,
            &mut status,
            ptr::null_mut(),
            &mut graph,
            ptr::null_mut(),
            ptr::null_mut(),
            ptr::null_mut(),
        )
    };
    done("cuStreamGetCaptureInfo", found)?;
    match status {
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE => Ok(graph),
        other => Err(format!("the capture of its stream is {other:?}")),
    }
}

/// A dependency of a graph: source, destination and kind.
type Edge = (CUgraphNode, CUgraphNode, CUgraphEdgeData);

fn edges(graph: CUgraph) -> Result<Vec<Edge>, String> {
    let mut count = 0;
    let none = ptr::null_mut();
    // SAFETY: the graph is being captured, and so alive. Without room the count alone is written.
    let counted = unsafe { cuGraphGetEdges_v2(graph, none, none, ptr::null_mut(), &mut count) };
    done("cuGraphGetEdges", counted)?;
    let mut from: Vec<CUgraphNode> = vec![ptr::null_mut(); count];
    let mut to = from.clone();
    let mut data = vec![ORDINARY; count];
    // SAFETY: as above; there is room for as many.
    let read = unsafe {
        cuGraphGetEdges_v2(
            graph,
            from.as_mut_ptr(),
            to.as_mut_ptr(),
            data.as_mut_ptr(),
            &mut count,
        )
    };
    done("cuGraphGetEdges", read)?;
    let nodes = from.into_iter().zip(to).zip(data);
    Ok(nodes.map(|((from, to), data)| (from, to, data)).collect())
}

/// Returns the name of a kernel node; `None` for other nodes.
fn kernel_name(node: CUgraphNode) -> Result<Option<String>, String> {
    let mut kind = CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
    // SAFETY: the node is of a graph that is alive.
    done("cuGraphNodeGetType", unsafe {
        cuGraphNodeGetType(node, &mut kind)
    })?;
    if kind != CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL {
        return Ok(None);
    }
    // SAFETY: all fields are numbers or pointers, which may be null.
    let mut params: CUDA_KERNEL_NODE_PARAMS = unsafe { std::mem::zeroed() };
    let mut name: *const c_char = ptr::null();
    // SAFETY: the node is of a kernel. Its name lives as long as its module.
    unsafe {
        let found = cuGraphKernelNodeGetParams_v2(node, &mut params);
        done("cuGraphKernelNodeGetParams", found)?;
        let named = match params.func.is_null() {
            false => cuFuncGetName(&mut name, params.func),
            true => cuKernelGetName(&mut name, params.kern),
        };
        done("cuFuncGetName", named)?;
        Ok(Some(CStr::from_ptr(name).to_string_lossy().into_owned()))
    }
}

/// Replaces an ordinary edge by a programmatic one.
fn replace(graph: CUgraph, (from, to): (CUgraphNode, CUgraphNode)) -> Result<(), String> {
    let add = |data: &CUgraphEdgeData| {
        // SAFETY: both nodes are of the graph.
        let added = unsafe { cuGraphAddDependencies_v2(graph, &from, &to, data, 1) };
        done("cuGraphAddDependencies", added)
    };
    // SAFETY: the edge is there.
    let removed = unsafe { cuGraphRemoveDependencies_v2(graph, &from, &to, &ORDINARY, 1) };
    done("cuGraphRemoveDependencies", removed)?;
    add(&PROGRAMMATIC).inspect_err(|_| {
        add(&ORDINARY).expect("an edge that was there can be added again");
    })
}

fn done(what: &str, result: CUresult) -> Result<(), String> {
    result.result().map_err(|error| format!("{what}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_known_by_their_names() {
        assert!(waits("small_m_kernel_7e38897c"));
        assert!(waits("small_m_norm_kernel_67b5e359"));
        assert!(waits("fp8_linear_mma_kernel_f_u16_1b5e359c"));
        assert!(!waits("fp8_linear_kernel_a_f32_f_f32_5e359c1b"));
        assert!(waits("norm_kernel_f_u32_n_4_g_4_7f9d55c9"));
        assert!(!waits("norm_backward_kernel_f_u32_n_4_g_4_8bc37cfb"));
        assert!(!waits("copy_words_kernel_171e6e26"));
    }
}
