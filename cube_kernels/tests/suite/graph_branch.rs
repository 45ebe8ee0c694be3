//! Branches of captured CUDA graphs.

use crate::graph::alone_in;
use crate::support::inputs::{Kind, convert, values};
use crate::support::quantize::{self, TargetSpec};
use cubecl::{MemoryScope, prelude::*, server::Handle};
use cubecl_environment::stream::StreamId;
use half::bf16;
use nvfp4_formats::{AmaxGranularity, Rounding, Usage};
use nvfp4_kernels::{
    foreign::{self, ForeignMemory},
    graph::{self, Branch},
    tensor::{DeviceQuantized, FloatKind, Groups, Matrix},
};
use std::sync::mpsc::channel;

const SIZE: usize = 2048;

fn matrix(client: &Client, seed: u32) -> Matrix {
    let x: Vec<bf16> = convert(&values(Kind::Normal, SIZE * SIZE, seed));
    let handle = client.create_from_slice(bytemuck::cast_slice(&x));
    Matrix::new(handle, SIZE, SIZE, FloatKind::Bf16).unwrap()
}

fn quantized(client: &Client, matrix: &Matrix) -> DeviceQuantized {
    let amax = quantize::amax(client, matrix, None).unwrap();
    let request = quantize::target(
        &amax,
        AmaxGranularity::PerTensor,
        TargetSpec::new(Rounding::Nearest),
    );
    quantize::quantize(client, matrix, &Groups::One, Usage::Columnwise, &request).unwrap()
}

/// Returns the number of words of the codes of `packed`.
fn words(packed: &DeviceQuantized) -> usize {
    packed.code_blocks() * 2
}

/// A branch runs concurrently with the work queued after it, and before the work queued after the
/// join.
#[test]
fn graph_branch_is_joined() {
    let Some((client, _guard)) = alone_in("graph_branch", "graph_branch_is_joined") else {
        return;
    };
    let (x, y) = (matrix(&client, 1), matrix(&client, 2));
    let read = |handle: &Handle| client.read_one(handle.clone()).unwrap().to_vec();
    let expected = [&x, &y].map(|matrix| read(&quantized(&client, matrix).codes));
    let len = expected[0].len();
    let out = client.create_from_slice(&vec![0; len]);
    let zeros = client.create_from_slice(&vec![0; len]);
    let captured = || {
        let branch = Branch::default();
        branch.begin(&client);
        // Takes long compared with the work queued after the join.
        for _ in 0..8 {
            drop(quantized(&client, &y));
        }
        let made = quantized(&client, &x);
        branch.end(&client);
        let beside = quantized(&client, &y);
        branch.join(&client);
        graph::copy_words(&client, &made.codes, &out, words(&made)).unwrap();
        (made, beside)
    };
    client.graph_prepare().unwrap();
    drop(captured());
    client.start_capture().unwrap();
    let (made, beside) = captured();
    let graph = client.stop_capture().unwrap();
    for replay in 0..3 {
        for packed in [&made, &beside] {
            graph::copy_words(&client, &zeros, &packed.codes, words(packed)).unwrap();
        }
        graph::copy_words(&client, &zeros, &out, words(&made)).unwrap();
        // SAFETY: every buffer of the graph is alive, and nothing else runs on this stream.
        unsafe { graph.replay() }.unwrap();
        assert!(
            read(&out) == expected[0],
            "replay {replay}: behind the join"
        );
        assert!(
            read(&beside.codes) == expected[1],
            "replay {replay}: beside"
        );
    }
}

/// Returns the address of `memory`.
fn address(client: &Client, memory: &Handle) -> u64 {
    let (send, found) = channel();
    let memory = ForeignMemory {
        reads: vec![memory.clone().binding()],
        ..ForeignMemory::default()
    };
    let stream = StreamId::current();
    foreign::submit::<Branch>(client, stream, memory, "address".into(), move |place| {
        send.send(place.addresses[0])
            .map_err(|error| error.to_string())
    });
    // Submitted work has run by then.
    client.memory_report(MemoryScope::CurrentStream);
    found.try_recv().unwrap()
}

/// Work concurrent with a branch receives none of its memory, which is free again after the join.
#[test]
fn graph_branch_holds_memory() {
    let Some((client, _guard)) = alone_in("graph_branch", "graph_branch_holds_memory") else {
        return;
    };
    let x = matrix(&client, 1);
    let codes = |made: &DeviceQuantized| address(&client, &made.codes);
    let one_and_next = |end: &dyn Fn()| {
        let made = quantized(&client, &x);
        let one = codes(&made);
        drop(made);
        end();
        [one, codes(&quantized(&client, &x))]
    };
    let [one, next] = one_and_next(&|| {});
    assert_eq!(one, next, "the same memory, without a branch");
    let branch = Branch::default();
    branch.begin(&client);
    let [one, next] = one_and_next(&|| branch.end(&client));
    assert_ne!(one, next, "beside a branch");
    branch.join(&client);
    let [one, next] = one_and_next(&|| {});
    assert_eq!(one, next, "behind the join");
}
