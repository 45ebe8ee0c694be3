//! Quantization and products in captured CUDA graphs. Alone in its process, one test at a time: while a
//! graph is being captured, reads of other tests would be refused and would spoil it.
#![cfg(feature = "cuda")]

mod common;

use common::{Kind, convert, values};
use cubecl::{prelude::*, server::Handle};
use half::bf16;
use nvfp4_kernels::{
    Amax, CopyPolicy, Hadamard, HadamardSize, PackedAxis, RandomStream, Rounding,
    device::{
        AmaxScope, DeviceCopy, DevicePacked, DeviceRounding, FloatKind, GemmPath, Groups, Matrix,
    },
    gemm::{
        self, Elements, Operand, Scale, Target,
        cublaslt::{self, Format, Problem},
    },
    ops::{self, CopyRequest, EdenRandom},
    reference::{self, EdenTarget},
};
use std::sync::Mutex;

/// Held by the test that runs.
static ALONE: Mutex<()> = Mutex::new(());

/// The device, or `None` (after saying so) where graphs cannot be captured.
fn cuda(test: &str) -> Option<Client> {
    if std::env::var("NVFP4_TEST_DEVICE").as_deref() == Ok("cuda") {
        return Some(cubecl::Device::Cuda(Default::default()).client());
    }
    println!("SKIPPED: {test}: only CUDA captures graphs");
    None
}

const STREAM: RandomStream = RandomStream::new(1, 2, 100);
const SHAPE: (usize, usize) = (64, 96);

fn elements() -> Vec<bf16> {
    convert(&values(Kind::Normal, SHAPE.0 * SHAPE.1, 4))
}

fn upload(client: &Client, x: &[bf16]) -> Matrix {
    let handle = client.create_from_slice(bytemuck::cast_slice(x));
    Matrix::new(handle, SHAPE.0, SHAPE.1, FloatKind::Bf16).unwrap()
}

/// A random offset in device memory.
fn offset(client: &Client, value: u64) -> Handle {
    client.create_from_slice(&value.to_le_bytes())
}

/// What `run` makes at offsets 1, 2 and 3: replays of a graph that advances its offset draw fresh bits,
/// those of ordinary calls at the same offsets. `run` gives the memory that it wrote, and how much of it.
fn replay(client: &Client, run: impl Fn(&Handle) -> Vec<(Handle, usize)>) -> Vec<Vec<Vec<u8>>> {
    let read = |results: &[(Handle, usize)]| -> Vec<Vec<u8>> {
        let bytes = |(handle, len): &(Handle, usize)| {
            client.read_one(handle.clone()).unwrap()[..*len].to_vec()
        };
        results.iter().map(bytes).collect()
    };
    let advancing = offset(client, 0);
    let captured = || {
        let results = run(&advancing);
        ops::advance_offset(client, &advancing, 1).unwrap();
        results
    };
    client.graph_prepare().unwrap();
    drop(captured());
    client.start_capture().unwrap();
    let results = captured();
    let graph = client.stop_capture().unwrap();
    // The warm-up used offset 0; what a capture records does not run.
    let replayed: Vec<_> = (1..4)
        .map(|_| {
            // SAFETY: every buffer of the graph is alive, and nothing else runs on this stream.
            unsafe { graph.replay() }.unwrap();
            read(&results)
        })
        .collect();
    for (i, replayed) in replayed.iter().enumerate() {
        let ordinary = read(&run(&offset(client, 1 + i as u64)));
        assert!(*replayed == ordinary, "replay {i} and an ordinary call");
    }
    assert!(replayed[0] != replayed[1] && replayed[1] != replayed[2]);
    replayed
}

fn written(packed: &DevicePacked) -> Vec<(Handle, usize)> {
    let (codes, scales) = (packed.code_blocks() * 8, packed.scale_bytes());
    vec![
        (packed.codes.clone(), codes),
        (packed.scales.clone(), scales),
    ]
}

/// How copies round, with a part of their offset in device memory.
fn at(offset: &Handle) -> DeviceCopy {
    DeviceCopy::new(DeviceRounding::StochasticAt(STREAM, offset.clone()))
}

/// The policy of copies at offset `value`, for the oracle.
fn policy_at(value: u64) -> CopyPolicy {
    let stream = RandomStream::new(1, 2, STREAM.offset + value);
    CopyPolicy::new(Rounding::Stochastic(stream))
}

/// Both copies with a given amax, which are the oracle's, too.
#[test]
fn graph_replays_draw_fresh_bits() {
    let Some(client) = cuda("graph_replays_draw_fresh_bits") else {
        return;
    };
    let _alone = ALONE.lock().unwrap_or_else(|held| held.into_inner());
    let ((rows, cols), x) = (SHAPE, elements());
    let matrix = upload(&client, &x);
    let amax = reference::amax(&x);
    let handle = client.create_from_slice(&amax.to_ne_bytes());
    let replays = replay(&client, |offset| {
        let request = CopyRequest {
            amax: &handle,
            scope: AmaxScope::Group,
            copy: at(offset),
        };
        let (row, col) =
            ops::quantize_both(&client, &matrix, &Groups::One, &request, &request).unwrap();
        [written(&row), written(&col)].concat()
    });
    let amax = Amax::Tensor(amax);
    for (i, found) in replays.iter().enumerate() {
        let policy = policy_at(1 + i as u64);
        for (axis, found) in [PackedAxis::Cols, PackedAxis::Rows]
            .into_iter()
            .zip(found.chunks(2))
        {
            let expected = reference::quantize(&x, rows, cols, axis, &amax, &policy, 0).unwrap();
            assert!(found[0] == expected.codes(), "replay {i}, {axis:?}: codes");
            assert!(
                found[1] == expected.scales(),
                "replay {i}, {axis:?}: scales"
            );
        }
    }
}

/// Copies with an amax for each row and column, in one read and in two.
#[test]
fn graph_replays_per_token() {
    let Some(client) = cuda("graph_replays_per_token") else {
        return;
    };
    let _alone = ALONE.lock().unwrap_or_else(|held| held.into_inner());
    let ((rows, cols), x) = (SHAPE, elements());
    let matrix = upload(&client, &x);
    let replays = replay(&client, |offset| {
        let row = ops::quantize_per_token(&client, &matrix, &at(offset)).unwrap();
        let col = DeviceCopy {
            hadamard: Some(Hadamard::default()),
            ..at(offset)
        };
        let one = &Groups::One;
        let (both_row, both_col) =
            ops::quantize_per_token_both(&client, &matrix, one, &at(offset), &col).unwrap();
        let maxima = vec![(row.amax.clone(), rows * 4)];
        [
            written(&row),
            maxima,
            written(&both_row),
            written(&both_col),
        ]
        .concat()
    });
    let amax = Amax::PerOuter(reference::amax_rows(&x, rows, cols));
    for (i, found) in replays.iter().enumerate() {
        let axis = PackedAxis::Cols;
        let policy = policy_at(1 + i as u64);
        let expected = reference::quantize(&x, rows, cols, axis, &amax, &policy, 0).unwrap();
        assert!(found[0] == expected.codes(), "replay {i}: codes");
        assert!(found[1] == expected.scales(), "replay {i}: scales");
    }
}

/// MS-EDEN along both axes, with its maximum found in the graph: the scale bytes are fresh.
#[test]
fn graph_replays_ms_eden() {
    let Some(client) = cuda("graph_replays_ms_eden") else {
        return;
    };
    let _alone = ALONE.lock().unwrap_or_else(|held| held.into_inner());
    let ((rows, cols), x) = (SHAPE, elements());
    let matrix = upload(&client, &x);
    let hadamard = Hadamard::seeded_with_size(HadamardSize::H128, 7);
    let target = EdenTarget::Backward;
    for axis in [PackedAxis::Cols, PackedAxis::Rows] {
        let replays = replay(&client, |offset| {
            let random = EdenRandom {
                stream: STREAM,
                offset: Some(offset.clone()),
            };
            let amax = ops::ms_eden_amax(&client, &matrix, axis, &hadamard).unwrap();
            let packed =
                ops::ms_eden(&client, &matrix, axis, &amax, &hadamard, target, random).unwrap();
            written(&packed)
        });
        let amax = reference::ms_eden_amax(&x, rows, cols, axis, &hadamard).unwrap();
        for (i, found) in replays.iter().enumerate() {
            let stream = RandomStream::new(1, 2, STREAM.offset + 1 + i as u64);
            let expected =
                reference::ms_eden(&x, rows, cols, axis, amax, &hadamard, target, &stream);
            let expected = expected.unwrap();
            assert!(found[0] == expected.codes(), "replay {i}, {axis:?}: codes");
            assert!(
                found[1] == expected.scales(),
                "replay {i}, {axis:?}: scales"
            );
        }
    }
}

/// A captured product of cuBLASLt runs at every replay, in its place: each adds the same product to its
/// output.
#[test]
fn graph_replays_products_of_cublaslt() {
    let test = "graph_replays_products_of_cublaslt";
    let Some(client) = cuda(test) else {
        return;
    };
    let _alone = ALONE.lock().unwrap_or_else(|held| held.into_inner());
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
