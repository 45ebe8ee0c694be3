//! Fused prologues: matrices that are computed while a kernel reads their inputs, compared with the
//! oracle, with the same operations as separate kernels, and with `f64`, on CubeCL's CPU runtime or
//! on a GPU.

use crate::support::device::{
    DeviceElement, assert_bytes, assert_floats, is_brief, read_bytes, read_matrix, read_u32,
    upload, upload_bytes,
};
use crate::support::inputs::{ALL_KINDS, Generator, Kind, convert, values};
use crate::support::quantize::{self, AmaxRequest, Prologue};
use cubecl::{prelude::*, server::Handle};
use half::{bf16, f16};
use nvfp4_formats::{AmaxGranularity, Hadamard, HadamardSize, reference};
use nvfp4_kernels::{
    capabilities::Capabilities,
    proof::{
        codec::Conversion,
        exact::{fma, rcp_of_ordinary, reciprocal_of_1_to_2, sqrt},
    },
    tensor::{Groups, Matrix},
};

const SHAPES: [(usize, usize); 6] = [(1, 16), (3, 48), (0, 16), (33, 80), (130, 64), (257, 144)];

/// One computed matrix: its expected values, and its inputs on the device.
struct Case<T> {
    name: &'static str,
    rows: usize,
    cols: usize,
    expected: Vec<T>,
    inputs: Inputs,
}

enum Inputs {
    SwiGlu(Matrix),
    SwiGluBackward(Matrix, Matrix),
}

impl<T: DeviceElement> Case<T> {
    fn source(&self) -> Prologue<'_> {
        match &self.inputs {
            Inputs::SwiGlu(gate_up) => Prologue::SwiGlu(gate_up),
            Inputs::SwiGluBackward(grad, gate_up) => Prologue::SwiGluBackward { grad, gate_up },
        }
    }

    /// Returns the computed matrix in memory, from a separate operation.
    fn unfused(&self, client: &Client) -> Matrix {
        quantize::run_prologue(client, self.source()).unwrap()
    }
}

/// Returns every prologue, with inputs of `rows` x `width`.
fn cases<T: DeviceElement>(
    client: &Client,
    kind: Kind,
    (rows, width): (usize, usize),
    seed: u32,
) -> Vec<Case<T>> {
    let draw = |cols: usize, seed| convert::<T>(&values(kind, rows * cols, seed));
    let (gate_up, grad) = (draw(2 * width, seed + 1), draw(width, seed + 2));
    let up = |x: &[T], cols| upload(client, x, rows, cols);
    let forward = reference::swiglu(&gate_up, rows, width);
    let backward = reference::swiglu_backward(&grad, &gate_up, rows, width);
    let case = |name, cols, expected: &[T], inputs| Case {
        name,
        rows,
        cols,
        expected: expected.to_vec(),
        inputs,
    };
    vec![
        case(
            "SwiGLU",
            width,
            &forward,
            Inputs::SwiGlu(up(&gate_up, 2 * width)),
        ),
        case(
            "SwiGLU backward",
            2 * width,
            &backward,
            Inputs::SwiGluBackward(up(&grad, width), up(&gate_up, 2 * width)),
        ),
    ]
}

fn check_computed<T: DeviceElement>(client: &Client, kinds: &[Kind], shapes: &[(usize, usize)]) {
    for (i, &shape) in shapes.iter().enumerate() {
        for &kind in kinds {
            for case in cases::<T>(client, kind, shape, 10 * i as u32) {
                let what = format!("{} {shape:?} {kind:?} {:?}", case.name, T::KIND);
                let found = case.unfused(client);
                assert_eq!((found.rows, found.cols), (case.rows, case.cols), "{what}");
                assert_floats(&read_matrix::<T>(client, &found), &case.expected, &what);
            }
        }
    }
}

#[test]
fn computed_matrices_are_the_oracles() {
    let client = client!("computed_matrices_are_the_oracles");
    check_computed::<f32>(&client, &ALL_KINDS, &SHAPES[..4]);
    check_computed::<bf16>(&client, &ALL_KINDS, &SHAPES);
    check_computed::<f16>(&client, &ALL_KINDS, &SHAPES[2..5]);
}

fn read_floats(client: &Client, handle: &Handle, len: usize) -> Vec<f32> {
    read_u32(client, handle, len)
        .into_iter()
        .map(f32::from_bits)
        .collect()
}

/// Returns amax granularities, with the transform of the columns.
fn requests() -> Vec<(AmaxGranularity, Option<Hadamard>)> {
    let transform = |size| Some(Hadamard::seeded_with_size(size, 3));
    vec![
        (AmaxGranularity::PerTensor, Some(Hadamard::default())),
        (AmaxGranularity::PerTensor, transform(HadamardSize::H128)),
        (AmaxGranularity::PerTensor, None),
        (AmaxGranularity::PerRow, transform(HadamardSize::H16)),
    ]
}

/// Checks the written matrix, and that its amax values are those of the matrix in memory.
fn check_fused<T: DeviceElement>(
    client: &Client,
    case: &Case<T>,
    groups: &Groups,
    requests: &[(AmaxGranularity, Option<Hadamard>)],
    what: &str,
) {
    let unfused = case.unfused(client);
    for &(scope, hadamard) in requests {
        let what = format!("{what} {} {:?} {scope:?} {hadamard:?}", case.name, T::KIND);
        let request = AmaxRequest {
            rows: Some(scope),
            cols: Some((scope, hadamard)),
        };
        let expected = quantize::amaxes(client, &unfused, groups, &request).unwrap();
        let (written, found) =
            quantize::run_prologue_with_amaxes(client, case.source(), groups, &request).unwrap();
        if matches!(groups, Groups::One) {
            assert_floats(&read_matrix::<T>(client, &written), &case.expected, &what);
        }
        let (rows_len, cols_len) = match scope {
            AmaxGranularity::PerTensor => (groups.count(), groups.count()),
            AmaxGranularity::PerRow => (case.rows, groups.count() * case.cols),
        };
        for (found, expected, len) in [
            (&found.rows, &expected.rows, rows_len),
            (&found.cols, &expected.cols, cols_len),
        ] {
            let [found, expected] = [found, expected]
                .map(|handle| read_bytes(client, handle.as_ref().unwrap(), len * 4));
            assert_bytes(&found, &expected, &format!("{what}: maxima"));
        }
    }
}

/// Every request in bf16; training's requests for the other types and for special values.
fn check_prologue(client: &Client, name: &str) {
    fn of<T: DeviceElement>(
        client: &Client,
        name: &str,
        kind: Kind,
        shape: (usize, usize),
    ) -> impl Iterator<Item = Case<T>> {
        let cases = cases::<T>(client, kind, shape, 100 + shape.0 as u32);
        let name = name.to_string();
        cases.into_iter().filter(move |case| case.name == name)
    }
    let (all, one) = (requests(), Groups::One);
    // A brief run has every request, shape and kind of values, but not all combinations.
    let some = |i: usize| match is_brief(client) {
        true => &all[i % all.len()..][..1],
        false => &all[..],
    };
    for (i, shape) in SHAPES.into_iter().enumerate() {
        for case in of::<bf16>(client, name, Kind::Heavy, shape) {
            check_fused(client, &case, &one, some(i), &format!("{shape:?}"));
        }
    }
    for (i, kind) in ALL_KINDS.into_iter().enumerate() {
        for case in of::<bf16>(client, name, kind, (37, 48)) {
            check_fused(client, &case, &one, some(i), &format!("{kind:?}"));
        }
    }
    for case in of::<f32>(client, name, Kind::Heavy, (130, 80)) {
        check_fused(client, &case, &one, &all[..2], "f32");
    }
    if is_brief(client) {
        return;
    }
    for case in of::<f16>(client, name, Kind::Normal, (33, 80)) {
        check_fused(client, &case, &one, &all[..1], "f16");
    }
}

#[test]
fn swiglu_fused_is_unfused() {
    let client = client!("swiglu_fused_is_unfused");
    check_prologue(&client, "SwiGLU");
}

#[test]
fn swiglu_backward_fused_is_unfused() {
    let client = client!("swiglu_backward_fused_is_unfused");
    check_prologue(&client, "SwiGLU backward");
}

/// Groups with offsets in device memory, including empty ones, and batches; tokens of experts.
#[test]
fn groups_fused_are_unfused() {
    let client = client!("groups_fused_are_unfused");
    for sizes in [&[0usize, 5, 128, 0, 129, 0][..], &[0, 0], &[16, 33]] {
        let rows: usize = sizes.iter().sum();
        let mut ends = vec![0u32];
        ends.extend(sizes.iter().scan(0, |sum, &size| {
            *sum += size as u32;
            Some(*sum)
        }));
        let groups = Groups::Offsets {
            offsets: upload_bytes(&client, bytemuck::cast_slice(&ends)),
            count: sizes.len(),
        };
        for case in cases::<bf16>(&client, Kind::Normal, (rows, 48), 20) {
            let what = format!("groups {sizes:?}");
            check_fused(&client, &case, &groups, &requests()[..1], &what);
        }
    }
    for case in cases::<bf16>(&client, Kind::Normal, (66, 32), 21) {
        check_fused(&client, &case, &Groups::Batch(2), &requests()[..1], "batch");
    }
}

/// Compares what training requests with the oracle directly.
#[test]
fn fused_amaxes_are_the_oracles() {
    fn check<T: DeviceElement>(client: &Client, shape: (usize, usize)) {
        let hadamard = Hadamard::default();
        for case in cases::<T>(client, Kind::Heavy, shape, 30) {
            let (rows, cols) = (case.rows, case.cols);
            let request = AmaxRequest {
                rows: Some(AmaxGranularity::PerTensor),
                cols: Some((AmaxGranularity::PerTensor, Some(hadamard))),
            };
            let (source, one) = (case.source(), &Groups::One);
            let (_, found) =
                quantize::run_prologue_with_amaxes(client, source, one, &request).unwrap();
            let expected = [
                reference::amax(&case.expected),
                reference::amax_rht(&case.expected, rows, cols, &hadamard),
            ];
            let maxima =
                [found.rows, found.cols].map(|handle| read_floats(client, &handle.unwrap(), 1)[0]);
            assert_eq!(maxima, expected, "{} {shape:?} {:?}", case.name, T::KIND);
        }
    }
    let client = client!("fused_amaxes_are_the_oracles");
    check::<bf16>(&client, (145, 176));
    check::<f32>(&client, (33, 80));
}

/// Asserts `|found - expected| <= relative · |expected| + absolute`.
fn assert_close(found: f32, expected: f64, relative: f64, absolute: f64, what: &str) {
    let bound = relative * expected.abs() + absolute;
    let error = (found as f64 - expected).abs();
    assert!(error <= bound, "{what}: {found:e}, {expected:e}");
}

/// Compares with real numbers. Forward: a few rounding errors of 2⁻²⁴ relative to the result.
/// Backward: the derivative of SiLU has a zero near -1.28. Near it, errors are relative to 1, which
/// its terms do not exceed by much.
#[test]
fn oracle_is_close_to_real_numbers() {
    let unit = 2f64.powi(-24);
    let (rows, width) = (64, 1024);
    let mut random = Generator::new(5);
    let mut draw = |len: usize, scale: f32| -> Vec<f32> {
        (0..len).map(|_| random.normal() * scale).collect()
    };
    for scale in [1e-3, 1.0, 30.0] {
        let both = draw(rows * 2 * width, scale);
        let grad = draw(rows * width, 1.0);
        let forward = reference::swiglu(&both, rows, width);
        let backward = reference::swiglu_backward(&grad, &both, rows, width);
        for r in 0..rows {
            for c in 0..width {
                let gate = both[r * 2 * width + c] as f64;
                let up = both[r * 2 * width + width + c] as f64;
                let g = grad[r * width + c] as f64;
                // Below -87 the sigmoid is taken as 0.
                let tail = if gate < -87.0 {
                    1e-35 * (up * g).abs().max(up.abs())
                } else {
                    0.0
                };
                let sigma = 1.0 / (1.0 + (-gate).exp());
                let what = format!("gate {gate:e}");
                let found = forward[r * width + c];
                assert_close(found, gate * sigma * up, 8.0 * unit, tail + 1e-44, &what);
                let by_up = backward[r * 2 * width + width + c];
                assert_close(by_up, g * gate * sigma, 8.0 * unit, tail + 1e-35, &what);
                let by_gate = backward[r * 2 * width + c];
                let slope = sigma * (1.0 + gate * (1.0 - sigma));
                let bound = 8.0 * unit * (g * up).abs() * sigma * (1.0 + gate.abs());
                assert_close(by_gate, g * up * slope, 8.0 * unit, bound + tail, &what);
            }
        }
    }
}

#[cube(launch_unchecked)]
fn exact_kernel(
    x: &[f32],
    out: &mut [f32],
    count: usize,
    #[comptime] operation: u32,
    #[comptime] conversion: Conversion,
) {
    let mut i = ABSOLUTE_POS;
    while i < count {
        out[i] = match comptime!(operation) {
            0u32 => fma(
                x[3usize * i],
                x[3usize * i + 1usize],
                x[3usize * i + 2usize],
                conversion,
            ),
            1u32 => sqrt(x[i], conversion),
            2u32 => reciprocal_of_1_to_2(x[i], conversion),
            _ => {
                if comptime!(conversion.has_ptx()) {
                    rcp_of_ordinary(x[i])
                } else {
                    1.0f32 / x[i]
                }
            }
        };
        i += CUBE_COUNT * CUBE_DIM as usize;
    }
}

fn run_exact(client: &Client, x: &[f32], count: usize, operation: u32) -> Vec<f32> {
    let conversion = Capabilities::of(client).conversion;
    let input = upload_bytes(client, bytemuck::cast_slice(x));
    let out = client.empty(count * 4);
    // SAFETY: the kernel stays below `count`, for which both buffers have room.
    unsafe {
        exact_kernel::launch_unchecked(
            client,
            CubeCount::Static(64, 1, 1),
            CubeDim::new_1d(if client.name() == "cuda" { 256 } else { 1 }),
            BufferArg::from_raw_parts(input, x.len()),
            BufferArg::from_raw_parts(out.clone(), count),
            count,
            operation,
            conversion,
        );
    }
    read_floats(client, &out, count)
}

/// Multiply-adds that two roundings would get wrong, and sums near the midpoint of two neighbors.
#[test]
fn multiply_adds_are_rounded_once() {
    let client = client!("multiply_adds_are_rounded_once");
    let mut random = Generator::new(77);
    let mut triples = vec![
        [f32::INFINITY, 0.0, 1.0],
        [f32::MAX, 2.0, f32::NEG_INFINITY],
        [1e-30, 1e-30, 1e-45],
        [1.0 + f32::EPSILON, 1.0 - f32::EPSILON, -1.0],
        [
            1.0 + f32::EPSILON,
            1.0 + f32::EPSILON,
            f32::EPSILON * f32::EPSILON,
        ],
        [-0.0, 1.0, 0.0],
    ];
    for _ in 0..100_000 {
        let mut value = |spread: u32| {
            let exponent = 127 - spread / 2 + random.next_u32() % spread;
            f32::from_bits((random.next_u32() & 0x807F_FFFF) | exponent << 23)
        };
        let (a, b) = (value(40), value(40));
        // Arbitrary; near minus the product; and half an ulp of the product away from a tie.
        triples.push([a, b, value(60)]);
        triples.push([a, b, -(a * b)]);
        triples.push([
            a,
            f32::from_bits(b.to_bits() & 0xFFFF_F000),
            a * 2f32.powi(24),
        ]);
    }
    let found = run_exact(&client, &triples.concat(), triples.len(), 0);
    let expected: Vec<f32> = triples.iter().map(|&[a, b, c]| a.mul_add(b, c)).collect();
    assert_floats(&found, &expected, "fma");
}

#[test]
fn reciprocals_and_roots_are_exact() {
    let client = client!("reciprocals_and_roots_are_exact");
    let x: Vec<f32> = (0x3F80_0000u32..=0x4000_0000).map(f32::from_bits).collect();
    let expected: Vec<f32> = x.iter().map(|x| 1.0 / x).collect();
    assert_floats(&run_exact(&client, &x, x.len(), 2), &expected, "1 / x");
    // From 2⁻¹²⁶ on and below 2¹²⁶.
    let x: Vec<f32> = (0x0080_0000u32..0x7E80_0000)
        .step_by(509)
        .map(f32::from_bits)
        .collect();
    let expected: Vec<f32> = x.iter().map(|x| 1.0 / x).collect();
    assert_floats(&run_exact(&client, &x, x.len(), 3), &expected, "1 / x");
    let x: Vec<f32> = (0..0x7F80_0000u32)
        .step_by(1013)
        .map(f32::from_bits)
        .collect();
    let expected: Vec<f32> = x.iter().map(|x| x.sqrt()).collect();
    assert_floats(&run_exact(&client, &x, x.len(), 1), &expected, "sqrt");
}

#[test]
fn bad_sources_are_named() {
    let client = client!("bad_sources_are_named");
    let matrix = |rows, cols| Matrix::empty(&client, rows, cols, bf16::KIND);
    let error = |source: Prologue<'_>| {
        quantize::run_prologue(&client, source)
            .unwrap_err()
            .to_string()
    };
    let found = error(Prologue::SwiGlu(&matrix(4, 48)));
    assert!(
        found.contains("`gate_up`") && found.contains("32"),
        "{found}"
    );
    let found = error(Prologue::SwiGluBackward {
        grad: &matrix(4, 32),
        gate_up: &matrix(4, 32),
    });
    assert!(
        found.contains("`grad`") && found.contains("4 x 16"),
        "{found}"
    );
}
