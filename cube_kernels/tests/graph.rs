//! Quantization and products in captured CUDA graphs. Alone in its process, one test at a time: while a
//! graph is being captured, reads of other tests would be refused and would spoil it.
#![cfg(feature = "cuda")]

mod common;

use common::{Kind, convert, values};
use cubecl::server::Handle;
use half::bf16;
use nvfp4_kernels::{
    Amax, CopyPolicy, PackedAxis, RandomStream, Rounding,
    device::{AmaxScope, DeviceCopy, DeviceRounding, FloatKind, GemmPath, Groups, Matrix},
    gemm::{
        self, Elements, Operand, Scale, Target,
        cublaslt::{self, Format, Problem},
    },
    ops::{self, CopyRequest},
    reference,
};
use std::sync::Mutex;

/// Held by the test that runs.
static ALONE: Mutex<()> = Mutex::new(());

/// A captured graph that advances its offset draws fresh bits at every replay: those of ordinary calls
/// with the same offsets.
#[test]
fn graph_replays_draw_fresh_bits() {
    if std::env::var("NVFP4_TEST_DEVICE").as_deref() != Ok("cuda") {
        println!("SKIPPED: graph_replays_draw_fresh_bits: only CUDA captures graphs");
        return;
    }
    let _alone = ALONE.lock().unwrap_or_else(|held| held.into_inner());
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

/// A captured product of cuBLASLt runs at every replay, in its place: each adds the same product to its
/// output.
#[test]
fn graph_replays_products_of_cublaslt() {
    let test = "graph_replays_products_of_cublaslt";
    if std::env::var("NVFP4_TEST_DEVICE").as_deref() != Ok("cuda") {
        println!("SKIPPED: {test}: only CUDA captures graphs");
        return;
    }
    let _alone = ALONE.lock().unwrap_or_else(|held| held.into_inner());
    let client = cubecl::Device::Cuda(Default::default()).client();
    let (m, n, k) = (64, 128, 256);
    let problem = Problem {
        format: Format::Bf16,
        m,
        n,
        k,
        out: FloatKind::F32,
        alpha: true,
        bias: false,
        accumulate: true,
        alignment: 16,
    };
    if let Err(refusal) = cublaslt::supports(&client, &problem) {
        assert!(refusal.to_string().contains("not found"), "{refusal}");
        println!("SKIPPED: {test}: {refusal}");
        return;
    }
    let matrix = |rows: usize, value: f32| {
        let values = vec![bf16::from_f32(value); rows * k];
        let handle = client.create_from_slice(bytemuck::cast_slice(&values));
        Matrix::new(handle, rows, k, FloatKind::Bf16).unwrap()
    };
    let (a, b) = (matrix(m, 3.0), matrix(n, 2.0));
    let zeros = client.create_from_slice(&vec![0; m * n * 4]);
    let sum = Matrix::new(zeros, m, n, FloatKind::F32).unwrap();
    let amax = client.create_from_slice(&672.0f32.to_ne_bytes());
    let run = || {
        let a = Operand {
            elements: Elements::Bf16(&a),
            scale: Scale::Tensor(&amax, 2688.0),
        };
        let (path, target) = (Some(GemmPath::CublasLt), Target::Accumulate(&sum));
        gemm::product(&client, path, &a, &(&b).into(), None, target).unwrap();
    };
    client.graph_prepare().unwrap();
    run();
    client.start_capture().unwrap();
    run();
    let graph = client.stop_capture().unwrap();
    for replay in 1..4 {
        // SAFETY: every buffer of the graph is alive, and nothing else runs on this stream.
        unsafe { graph.replay() }.unwrap();
        let expected = (1 + replay) as f32 * (k * 6) as f32 / 4.0;
        let found = client.read_one(sum.handle.clone()).unwrap();
        let found: &[f32] = bytemuck::cast_slice(&found[..m * n * 4]);
        assert!(
            found.iter().all(|&x| x == expected),
            "{expected}, {:?}",
            &found[..4]
        );
    }
}
