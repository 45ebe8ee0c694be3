//! Quantization and GEMMs in captured CUDA graphs. Runs in a separate process, one test at a time:
//! while a graph is being captured, reads by other tests would be refused and would invalidate it.

use crate::attention::decode_launches::Repeated;
use crate::support::device::{assert_floats, read_f32s, read_matrix, upload_bytes};
use crate::support::gemm::{multiply, multiply_amax};
use crate::support::inputs::{Kind, convert, values};
use crate::support::packed::Packed;
use crate::support::policies::quantize_per_token_both;
use crate::support::process::ran_in_own_process;
use crate::support::quantize::{self, Quantize, TargetSpec};
use cubecl::{MemoryScope, prelude::*, server::Handle};
use half::bf16;
use nvfp4_formats::{
    Amax, AmaxGranularity, Hadamard, HadamardSize, QuantParams, RandomStream, Rounding, Usage,
    reference::{self, AdamWParams, AdamWSchedule, EdenParams},
};
use nvfp4_kernels::{
    capabilities::{Capabilities, GemmBackend},
    gemm::{
        Elements, Gemm, Operand, OutputAmax, Plan, Scale, Target,
        proof::{
            DequantThenBf16, Sm90Tile, W4a16, W4a16Tile,
            cublaslt::{self, CublasLtFormat, CublasLtProblem},
        },
    },
    graph,
    moe::GroupOffsets,
    optimizer::{self, AdamWSpec, AdamWUpdate, Gradient},
    tensor::{DeviceQuantized, FloatKind, Groups, Matrix},
};
use nvfp4_test_support::Skip;
use std::sync::{Mutex, MutexGuard};

/// Held by the running test.
static ALONE: Mutex<()> = Mutex::new(());

/// Returns the client of the GPU and the lock of the running test, or `None`, with a message,
/// without a GPU.
fn alone(test: &str) -> Option<(Client, MutexGuard<'static, ()>)> {
    alone_in("graph", test)
}

/// Like [`alone`], for a test of `module`.
pub(crate) fn alone_in(module: &str, test: &str) -> Option<(Client, MutexGuard<'static, ()>)> {
    if std::env::var("NVFP4_TEST_DEVICE").as_deref() != Ok("cuda") {
        Skip::NoGpu.print(test, "only CUDA captures graphs");
        return None;
    }
    if ran_in_own_process(module, test, &[]) {
        return None;
    }
    let guard = ALONE.lock().unwrap_or_else(|held| held.into_inner());
    Some((cubecl::Device::Cuda(Default::default()).client(), guard))
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

/// Returns a random offset in device memory.
fn offset(client: &Client, value: u64) -> Handle {
    client.create_from_slice(&value.to_le_bytes())
}

/// Returns the outputs of `run` at offsets 1, 2 and 3: replays of a graph that advances its offset
/// draw fresh bits, equal to those of ordinary calls at the same offsets. `run` returns the memory
/// that it wrote, and the number of bytes.
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
        quantize::advance_offset(client, &advancing, 1).unwrap();
        results
    };
    client.graph_prepare().unwrap();
    drop(captured());
    client.start_capture().unwrap();
    let results = captured();
    let graph = client.stop_capture().unwrap();
    // The warm-up used offset 0; a captured run does not execute.
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

fn written(packed: &DeviceQuantized) -> Vec<(Handle, usize)> {
    let (codes, scales) = (packed.code_blocks() * 8, packed.scale_bytes());
    vec![
        (packed.codes.clone(), codes),
        (packed.scales.clone(), scales),
    ]
}

/// Returns parameters with part of the random offset in device memory.
fn at(offset: &Handle) -> TargetSpec {
    TargetSpec::new(Rounding::Stochastic(STREAM)).offset(offset)
}

/// Returns the policy at offset `value`, for the oracle.
fn policy_at(value: u64) -> QuantParams {
    let stream = RandomStream::new(1, 2, STREAM.offset + value);
    QuantParams::nvfp4(Rounding::Stochastic(stream))
}

/// Both quantized tensors with a given amax, also compared with the oracle.
#[test]
fn graph_replays_draw_fresh_bits() {
    let Some((client, _guard)) = alone("graph_replays_draw_fresh_bits") else {
        return;
    };
    let ((rows, cols), x) = (SHAPE, elements());
    let matrix = upload(&client, &x);
    let amax = reference::amax(&x);
    let handle = client.create_from_slice(&amax.to_ne_bytes());
    let replays = replay(&client, |offset| {
        let request = quantize::target(&handle, AmaxGranularity::PerTensor, at(offset));
        let (row, col) =
            quantize::quantize_both(&client, &matrix, &Groups::One, &request, &request).unwrap();
        [written(&row), written(&col)].concat()
    });
    let amax = Amax::Tensor(amax);
    for (i, found) in replays.iter().enumerate() {
        let policy = policy_at(1 + i as u64);
        for (usage, found) in [Usage::Rowwise, Usage::Columnwise]
            .into_iter()
            .zip(found.chunks(2))
        {
            let expected = reference::quantize(&x, rows, cols, usage, &amax, &policy, 0).unwrap();
            assert!(found[0] == expected.codes(), "replay {i}, {usage:?}: codes");
            assert!(
                found[1] == expected.scales(),
                "replay {i}, {usage:?}: scales"
            );
        }
    }
}

/// Quantized tensors with an amax per row and column, in one read and in two.
#[test]
fn graph_replays_per_token() {
    let Some((client, _guard)) = alone("graph_replays_per_token") else {
        return;
    };
    let ((rows, cols), x) = (SHAPE, elements());
    let matrix = upload(&client, &x);
    let replays = replay(&client, |offset| {
        let row = quantize::quantize_per_token(&client, &matrix, &at(offset)).unwrap();
        let mut col = at(offset);
        col.params.hadamard = Some(Hadamard::default());
        let one = &Groups::One;
        let (both_row, both_col) = quantize_per_token_both(&client, &matrix, one, at(offset), col);
        let maxima = vec![(row.amax.clone(), rows * 4)];
        [
            written(&row),
            maxima,
            written(&both_row),
            written(&both_col),
        ]
        .concat()
    });
    let amax = Amax::PerRow(reference::amax_rows(&x, rows, cols));
    for (i, found) in replays.iter().enumerate() {
        let usage = Usage::Rowwise;
        let policy = policy_at(1 + i as u64);
        let expected = reference::quantize(&x, rows, cols, usage, &amax, &policy, 0).unwrap();
        assert!(found[0] == expected.codes(), "replay {i}: codes");
        assert!(found[1] == expected.scales(), "replay {i}: scales");
    }
}

/// MS-EDEN along both axes, with its amax computed in the graph: the scale bytes are fresh.
#[test]
fn graph_replays_ms_eden() {
    let Some((client, _guard)) = alone("graph_replays_ms_eden") else {
        return;
    };
    let ((rows, cols), x) = (SHAPE, elements());
    let matrix = upload(&client, &x);
    let hadamard = Hadamard::seeded_with_size(HadamardSize::H128, 7);
    for usage in [Usage::Rowwise, Usage::Columnwise] {
        let replays = replay(&client, |offset| {
            let target = TargetSpec::new(QuantParams::ms_eden(hadamard, STREAM)).offset(offset);
            let request = Quantize::new(&matrix).along(usage, target);
            written(&request.launch(&client).unwrap().into_one())
        });
        let amax = reference::ms_eden_amax(&x, rows, cols, usage, &hadamard).unwrap();
        for (i, found) in replays.iter().enumerate() {
            let stream = RandomStream::new(1, 2, STREAM.offset + 1 + i as u64);
            let expected = reference::ms_eden(
                &x,
                rows,
                cols,
                usage,
                amax,
                &EdenParams { hadamard, stream },
            );
            let expected = expected.unwrap();
            assert!(found[0] == expected.codes(), "replay {i}, {usage:?}: codes");
            assert!(
                found[1] == expected.scales(),
                "replay {i}, {usage:?}: scales"
            );
        }
    }
}

/// A captured cuBLASLt GEMM runs at every replay, in order: each one adds the same product to its
/// output.
#[test]
fn graph_replays_products_of_cublaslt() {
    let test = "graph_replays_products_of_cublaslt";
    let Some((client, _guard)) = alone(test) else {
        return;
    };
    let (m, n, k) = (64, 128, 256);
    let problem = CublasLtProblem {
        format: CublasLtFormat::Bf16,
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
        Skip::NoCublasLt.print(test, refusal);
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
        let (path, target) = (Some(GemmBackend::CublasLt), Target::Accumulate(&sum));
        multiply(&client, Gemm::new(a, &b).target(target).backend(path)).unwrap();
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

#[cube(launch_unchecked)]
fn copy_words(from: &[u32], to: &mut [u32]) {
    to[UNIT_POS as usize] = from[UNIT_POS as usize];
}

/// A captured grouped GEMM reads its offsets at every replay: offsets changed on the device give
/// the result and amax values of an ordinary call with these offsets, for both Hopper kernels for
/// groups of rows.
#[test]
fn graph_replays_products_in_groups() {
    let Some((client, _guard)) = alone("graph_replays_products_in_groups") else {
        return;
    };
    let (m, n, groups) = (400, 136, 5);
    let upload = |offsets: &[u32]| client.create_from_slice(bytemuck::cast_slice(offsets));
    for k in [64, 48] {
        let (a, b) = (Packed::random(m, k, 1), Packed::random(groups * n, k, 2));
        let (left, right) = (a.device(&client), b.device(&client));
        let run = |offsets: &Handle| {
            let offsets = GroupOffsets::new(offsets.clone(), groups).unwrap();
            let (a, b): (Operand, Operand) = (Operand::from(&left), Operand::from(&right));
            let (new, of) = (Target::New(FloatKind::F32), OutputAmax::PerGroup);
            multiply_amax(
                &client,
                Gemm::new(a, b).target(new).m_grouped(&offsets).amax(of),
            )
            .unwrap()
        };
        let offsets = upload(&[0, 80, 160, 240, 320, 400]);
        client.graph_prepare().unwrap();
        drop(run(&offsets));
        client.start_capture().unwrap();
        let (product, amax) = run(&offsets);
        let graph = client.stop_capture().unwrap();
        for changed in [
            [0, 0, 129, 256, 256, 400],
            [0, 400, 400, 400, 400, 400],
            [7, 8, 9, 136, 300, 301],
        ] {
            let from = upload(&changed);
            // SAFETY: both buffers hold six words.
            unsafe {
                copy_words::launch_unchecked(
                    &client,
                    CubeCount::Static(1, 1, 1),
                    CubeDim::new_1d(6),
                    BufferArg::from_raw_parts(from.clone(), 6),
                    BufferArg::from_raw_parts(offsets.clone(), 6),
                );
                // Every buffer of the graph is alive, and nothing else runs on this stream.
                graph.replay().unwrap();
            }
            let found: Vec<f32> = read_matrix(&client, &product);
            let maxima = read_f32s(&client, &amax, groups);
            let (product, amax) = run(&from);
            let expected: Vec<f32> = read_matrix(&client, &product);
            // Rows outside all groups are not written.
            let rows = changed[0] as usize * n..changed[5] as usize * n;
            let what = format!("{changed:?}, k {k}");
            assert!(expected[rows.clone()].iter().any(|value| *value != 0.0));
            assert_floats(&found[rows.clone()], &expected[rows], &what);
            assert_floats(&maxima, &read_f32s(&client, &amax, groups), &what);
        }
    }
}

/// Replays of a captured AdamW step, each with its schedule written to the same buffer, equal
/// ordinary steps.
#[test]
fn graph_replays_adamw() {
    let Some((client, _guard)) = alone("graph_replays_adamw") else {
        return;
    };
    const LEN: usize = 20_000;
    let params = AdamWParams {
        beta_1: 0.9,
        beta_2: 0.95,
        epsilon: 1e-8,
    };
    let upload = |x: &[f32]| client.create_from_slice(bytemuck::cast_slice(x));
    let gradient = Gradient {
        handle: upload(&values(Kind::Normal, LEN, 2)),
        elements: LEN,
        dtype: FloatKind::F32,
    };
    let state = || {
        let zeros = [0.0; LEN];
        [values(Kind::Normal, LEN, 1), zeros.to_vec(), zeros.to_vec()].map(|x| upload(&x))
    };
    // Buffers that a graph reads and writes must stay alive.
    let step = |[weight, first, second]: &[Handle; 3], schedule: &Handle| -> [Handle; 2] {
        let (sums, count) =
            optimizer::square_sums(&client, std::slice::from_ref(&gradient)).unwrap();
        let factor = optimizer::clip_factor(&client, &sums, count, 1.0).unwrap();
        let update = AdamWUpdate {
            gradient: gradient.clone(),
            weight: weight.clone(),
            first: first.clone(),
            second: second.clone(),
            copy: None,
            decay: 0.1,
            key: [1, 2],
        };
        let spec = AdamWSpec {
            params,
            moments: FloatKind::F32,
            schedule,
            factor: Some(&factor),
        };
        optimizer::adamw(&client, &spec, &[update], None).unwrap();
        [sums, factor]
    };
    let set = |schedule: &Handle, time: u64| {
        let words = AdamWSchedule::new(&params, 0.01 / time as f64, time).words();
        graph::set_words(&client, schedule, words).unwrap();
    };
    let replayed = state();
    let schedule = client.empty(16);
    set(&schedule, 1);
    client.graph_prepare().unwrap();
    // The warm-up is the first step; a captured step does not execute.
    drop(step(&replayed, &schedule));
    client.start_capture().unwrap();
    let _alive = step(&replayed, &schedule);
    let graph = client.stop_capture().unwrap();
    for time in 2..=20 {
        set(&schedule, time);
        // SAFETY: every buffer of the graph is alive, and nothing else runs on this stream.
        unsafe { graph.replay() }.unwrap();
    }
    let ordinary = state();
    for time in 1..=20 {
        let schedule = client.empty(16);
        set(&schedule, time);
        step(&ordinary, &schedule);
    }
    for (replayed, ordinary) in replayed.iter().zip(&ordinary) {
        let bits = |handle| -> Vec<u32> {
            let found = read_f32s(&client, handle, LEN);
            found.iter().map(|x| x.to_bits()).collect()
        };
        assert!(bits(replayed) == bits(ordinary));
    }
}

/// A call, and its result.
type Product<'a> = Box<dyn Fn() -> Matrix + 'a>;

/// Memory for decoded or reordered operands is released after a GEMM: only the output remains.
#[test]
fn workspaces_are_released() {
    let Some((client, _guard)) = alone("workspaces_are_released") else {
        return;
    };
    let in_use = || {
        futures_lite::future::block_on(client.sync()).unwrap();
        let report = client.memory_report(MemoryScope::CurrentStream);
        report.usage().bytes_in_use
    };
    let (m, n, k) = (1024, 1024, 2048);
    let (a, b) = (Packed::random(m, k, 1), Packed::random(4 * n, k, 2));
    let b_dense = b.rows(0..n).device(&client);
    let (a, b) = (a.device(&client), b.device(&client));
    let starts: [u32; 5] = [0, 100, 100, 700, 1024];
    let offsets = client.create_from_slice(bytemuck::cast_slice(&starts));
    let offsets = GroupOffsets::new(offsets, 4).unwrap();
    let dense = |plan| {
        let (a, b) = (Operand::from(&a), Operand::from(&b_dense));
        let new = Target::New(FloatKind::Bf16);
        multiply(&client, Gemm::new(a, b).target(new).plan(plan)).unwrap()
    };
    let grouped = || {
        let (a, b): (Operand, Operand) = (Operand::from(&a), Operand::from(&b));
        let new = Target::New(FloatKind::Bf16);
        multiply(&client, Gemm::new(a, b).target(new).m_grouped(&offsets)).unwrap()
    };
    let mut products: Vec<(&str, Product)> = vec![
        ("its own", Box::new(|| dense(None))),
        ("groups", Box::new(grouped)),
    ];
    if Capabilities::of(&client).gemm == GemmBackend::Sm90Wgmma {
        // Two operands of four megabytes in bf16.
        products.push((
            "decoded",
            Box::new(|| dense(Some(Plan::from(DequantThenBf16(Sm90Tile::N256, 8))))),
        ));
        products.push((
            "fused",
            Box::new(|| dense(Some(Plan::from(W4a16(W4a16Tile::ALL[0], 8))))),
        ));
    }
    for (what, product) in products {
        // The first call compiles, and may keep memory permanently.
        drop(product());
        let before = in_use();
        let out = product();
        let kept = in_use() - before;
        let bytes = (m * n * 2) as u64;
        assert!(
            (bytes..bytes + 4096).contains(&kept),
            "{what}: {kept} bytes"
        );
        drop(out);
        assert_eq!(in_use(), before, "{what}");
    }
}

/// Two launches of decoding in a graph, which share counters: replays at other lengths give the
/// bits of the oracle, also with ordinary launches between them.
#[test]
fn graph_replays_decoding() {
    let Some((client, _guard)) = alone("graph_replays_decoding") else {
        return;
    };
    let starts: [&[u32]; 3] = [&[3000, 0, 40], &[9, 700, 2000], &[130, 1, 129]];
    let mut steps = Repeated::new(&client, 3001, &starts, &[1, 1, 1]);
    let places: Vec<_> = (steps.starts.iter())
        .map(|starts| upload_bytes(&client, bytemuck::cast_slice(starts)))
        .collect();
    let place = client.empty(12);
    let go_to = |of: &Handle| graph::copy_words(&client, of, &place, 3).unwrap();
    go_to(&places[0]);
    client.graph_prepare().unwrap();
    let captured = || [0, 1].map(|_| steps.launch(&client, &place));
    // Its keys and values are those of the first replay.
    drop(captured());
    client.start_capture().unwrap();
    let outputs = captured();
    let graph = client.stop_capture().unwrap();
    for at in [0, 1, 2, 1, 0, 0, 2] {
        go_to(&places[at]);
        // SAFETY: every buffer of the graph is alive, and nothing else runs on this stream.
        unsafe { graph.replay() }.unwrap();
        let ordinary = steps.launch(&client, &places[at]);
        for (i, out) in outputs.iter().chain([&ordinary]).enumerate() {
            let what = format!("launch {i} of a replay at place {at}");
            steps.assert_next(&client, out, at, &what);
        }
    }
}
