//! Quantization in captured CUDA graphs. Alone in its process: while a graph is being captured, reads
//! of other tests would be refused and would spoil it.
#![cfg(feature = "cuda")]

mod common;

use common::{Kind, convert, values};
use cubecl::server::Handle;
use half::bf16;
use nvfp4_kernels::{
    Amax, CopyPolicy, PackedAxis, RandomStream, Rounding,
    device::{AmaxScope, DeviceCopy, DeviceRounding, FloatKind, Groups, Matrix},
    ops::{self, CopyRequest},
    reference,
};

/// A captured graph that advances its offset draws fresh bits at every replay: those of ordinary calls
/// with the same offsets.
#[test]
fn graph_replays_draw_fresh_bits() {
    if std::env::var("NVFP4_TEST_DEVICE").as_deref() != Ok("cuda") {
        println!("SKIPPED: graph_replays_draw_fresh_bits: only CUDA captures graphs");
        return;
    }
    let client = cubecl::Device::Cuda(Default::default()).client();
    let read = |handle: &Handle| client.read_one(handle.clone()).unwrap().to_vec();
    let (rows, cols) = (64, 96);
    let x = convert::<bf16>(&values(Kind::Normal, rows * cols, 4));
    let handle = client.create_from_slice(bytemuck::cast_slice(&x));
    let matrix = Matrix::new(handle, rows, cols, FloatKind::Bf16).unwrap();
    let amax = reference::amax(&x);
    let host_amax = Amax::Tensor(amax);
    let amax = client.create_from_slice(&amax.to_ne_bytes());
    let offset = client.create_from_slice(&[0u8; 8]);
    let stream = RandomStream::new(1, 2, 100);
    let run = || {
        let request = CopyRequest {
            amax: &amax,
            scope: AmaxScope::Group,
            copy: DeviceCopy::new(DeviceRounding::StochasticAt(stream, offset.clone())),
        };
        let (row, col) =
            ops::quantize_both(&client, &matrix, &Groups::One, &request, &request).unwrap();
        ops::advance_offset(&client, &offset, 1).unwrap();
        (row, col)
    };
    client.graph_prepare().unwrap();
    drop(run());
    client.start_capture().unwrap();
    let (row, col) = run();
    let graph = client.stop_capture().unwrap();
    let mut codes = Vec::new();
    // The warm-up used offset 0; what a capture records does not run.
    for replay in 1..4 {
        // SAFETY: every buffer of the graph is alive, and nothing else runs on this stream.
        unsafe { graph.replay() }.unwrap();
        let stream = RandomStream::new(1, 2, 100 + replay);
        let policy = CopyPolicy::new(Rounding::Stochastic(stream));
        for (found, axis) in [(&row, PackedAxis::Cols), (&col, PackedAxis::Rows)] {
            let expected =
                reference::quantize(&x, rows, cols, axis, &host_amax, &policy, 0).unwrap();
            let what = format!("replay {replay}, {axis:?}");
            assert!(
                read(&found.scales).starts_with(expected.scales()),
                "{what}: scales"
            );
            assert!(
                read(&found.codes).starts_with(expected.codes()),
                "{what}: codes"
            );
        }
        codes.push(read(&row.codes));
    }
    assert!(codes[0] != codes[1] && codes[1] != codes[2]);
}
