//! RMSNorm, LayerNorm and activations compared with the oracle bit for bit, and the oracle with
//! `f64`; on CubeCL's CPU runtime or on a GPU.

use crate::support::device::{
    DeviceElement, assert_floats, is_brief, read_f32s, read_matrix, upload, upload_bytes,
};
use crate::support::inputs::{Generator, Kind, convert, values};
use crate::support::quantize::{AmaxRequest, Amaxes, amaxes};
use cubecl::{prelude::*, server::Handle};
use half::{bf16, f16};
use nvfp4_formats::{
    AmaxGranularity, Hadamard, HadamardSize,
    reference::{self, Activation, Gelu, Norm},
};
use nvfp4_kernels::{
    activation::{activation, activation_backward},
    norm::{NormBackwardRequest, NormRequest, norm, norm_backward},
    tensor::{FloatKind, Groups},
};

const EPSILON: f32 = 1e-6;
const NORMS: [Norm; 2] = [Norm::Rms, Norm::Layer];

/// Rows with a tail, of one plane, of several, of whole vectors and not, of several blocks per
/// unit, and too long to be kept; one row, none, and several parts, including parts that begin with
/// strips.
const SHAPES: [(usize, usize); 13] = [
    (1, 1),
    (3, 7),
    (0, 16),
    (5, 16),
    (37, 48),
    (19, 500),
    (20, 768),
    (9, 1040),
    (2, 4096),
    (3, 4112),
    (1, 8191),
    (2, 16_400),
    (4220, 16),
];

fn factors(cols: usize, seed: u32) -> Vec<f32> {
    let mut random = Generator::new(seed);
    (0..cols).map(|_| random.normal()).collect()
}

/// A norm with its inputs on the host.
struct Case<T> {
    norm: Norm,
    rows: usize,
    cols: usize,
    x: Vec<T>,
    residual: Option<Vec<T>>,
    gain: Vec<f32>,
    bias: Option<Vec<f32>>,
    grad: Vec<T>,
    sum_grad: Option<Vec<T>>,
}

impl<T: DeviceElement> Case<T> {
    fn new(norm: Norm, kind: Kind, (rows, cols): (usize, usize), seed: u32) -> Self {
        let draw = |seed| convert::<T>(&values(kind, rows * cols, seed));
        let with_residual = seed.is_multiple_of(2);
        Self {
            norm,
            rows,
            cols,
            x: draw(seed),
            residual: with_residual.then(|| draw(seed + 1)),
            gain: factors(cols, seed + 2),
            bias: (norm == Norm::Layer && !seed.is_multiple_of(3)).then(|| factors(cols, seed + 3)),
            grad: convert::<T>(&values(Kind::Normal, rows * cols, seed + 4)),
            sum_grad: with_residual.then(|| draw(seed + 5)),
        }
    }

    /// Asserts that the kernels give the bits of the oracle.
    fn check(&self, client: &Client, what: &str) {
        let (rows, cols) = (self.rows, self.cols);
        let what = format!("{:?} {rows}x{cols} {:?} {what}", self.norm, T::KIND);
        let bias = self.bias.as_deref();
        let expected = reference::norm_forward(
            self.norm,
            &self.x,
            self.residual.as_deref(),
            (&self.gain, bias),
            rows,
            EPSILON,
        );
        let matrix = |x: &[T]| upload(client, x, rows, cols);
        let floats = |x: &[f32]| upload_bytes(client, bytemuck::cast_slice(x));
        let x = matrix(&self.x);
        let residual = self.residual.as_deref().map(matrix);
        let (gain, bias) = (floats(&self.gain), bias.map(floats));
        let request = NormRequest {
            norm: self.norm,
            x: &x,
            residual: residual.as_ref(),
            gain: &gain,
            bias: bias.as_ref(),
            epsilon: EPSILON,
            amax: AmaxRequest::default(),
        };
        let found = norm(client, &request).unwrap();
        assert_eq!(found.sum.is_some(), expected.sum.is_some(), "{what}");
        if let (Some(found), Some(expected)) = (&found.sum, &expected.sum) {
            assert_floats(
                &read_matrix::<T>(client, found),
                expected,
                &format!("{what}: sum"),
            );
        }
        let stats = read_f32s(client, &found.stats, expected.stats.len());
        assert_floats(&stats, &expected.stats, &format!("{what}: stats"));
        let normed = read_matrix::<T>(client, &found.normed);
        assert_floats(&normed, &expected.normed, &format!("{what}: normed"));

        let source = expected.sum.as_deref().unwrap_or(&self.x);
        let expected = reference::norm_backward(
            self.norm,
            &self.grad,
            self.sum_grad.as_deref(),
            source,
            &expected.stats,
            &self.gain,
        );
        let sum_grad = self.sum_grad.as_deref().map(matrix);
        let request = NormBackwardRequest {
            norm: self.norm,
            grad: &matrix(&self.grad),
            sum_grad: sum_grad.as_ref(),
            x: found.sum.as_ref().unwrap_or(&x),
            stats: &found.stats,
            gain: &gain,
            bias: self.norm == Norm::Layer,
            amax: AmaxRequest::default(),
        };
        let found = norm_backward(client, &request).unwrap();
        let by_x = read_matrix::<T>(client, &found.x);
        assert_floats(&by_x, &expected.x, &format!("{what}: by x"));
        let by_gain = read_f32s(client, &found.gain, cols);
        assert_floats(&by_gain, &expected.gain, &format!("{what}: by gain"));
        if let Some(bias) = &found.bias {
            let by_bias = read_f32s(client, bias, cols);
            assert_floats(&by_bias, &expected.bias, &format!("{what}: by bias"));
        }
    }
}

fn check_shapes<T: DeviceElement>(client: &Client) {
    // Types differ only in how elements are loaded and stored.
    let all = T::KIND == FloatKind::Bf16;
    for (i, shape) in SHAPES.into_iter().enumerate() {
        if !all && shape.1 > 500 {
            continue;
        }
        for norm in NORMS {
            Case::<T>::new(norm, Kind::Heavy, shape, i as u32).check(client, "shapes");
        }
    }
}

fn check_kinds<T: DeviceElement>(client: &Client) {
    let kinds = [
        Kind::Tiny,
        Kind::Huge,
        Kind::Zeros,
        Kind::Nan,
        Kind::Infinity,
    ];
    for (i, kind) in kinds.into_iter().enumerate() {
        for norm in NORMS {
            let case = Case::<T>::new(norm, kind, (3, 80), 100 + i as u32);
            case.check(client, &format!("{kind:?}"));
        }
    }
}

element_tests! {
    check_shapes: shapes_f32, shapes_bf16, shapes_f16;
    check_kinds: kinds_f32, kinds_bf16, kinds_f16;
}

/// The largest number of parts, and row counts that they do not divide.
#[test]
fn many_rows() {
    let client = client!("many_rows");
    for (rows, cols) in [(2117, 16), (2400, 24), (600, 520)] {
        for norm in NORMS {
            Case::<bf16>::new(norm, Kind::Normal, (rows, cols), 4).check(&client, "many rows");
        }
    }
}

/// On a GPU, the sizes of models: all paths of the kernels with several rows per cube.
#[test]
fn large_matrices() {
    let client = on_gpu!("norm::large_matrices", "it needs a GPU");
    for (rows, cols) in [
        (16_384, 768),
        (8200, 4096),
        (4099, 8192),
        (2000, 16_384),
        (999, 20_480),
    ] {
        for seed in [2, 3] {
            for norm in NORMS {
                let case = Case::<bf16>::new(norm, Kind::Normal, (rows, cols), seed);
                case.check(&client, "large");
            }
        }
    }
}

/// A NaN does not leave its row, except in the gradients of the columns.
#[test]
fn a_nan_stays_in_its_row() {
    for norm in NORMS {
        let mut x = values(Kind::Normal, 3 * 40, 1);
        x[45] = f32::NAN;
        let gain = factors(40, 2);
        let made = reference::norm_forward(norm, &x, None, (&gain, None), 3, EPSILON);
        let grad = values(Kind::Normal, 3 * 40, 3);
        let back = reference::norm_backward(norm, &grad, None, &x, &made.stats, &gain);
        for values in [&made.normed, &back.x] {
            for (i, value) in values.iter().enumerate() {
                assert_eq!(value.is_nan(), i / 40 == 1, "{norm:?} {i}");
            }
        }
        assert!(back.gain.iter().all(|value| value.is_nan()));
    }
}

/// Returns the norm of one row in `f64`.
fn exact_norm(norm: Norm, x: &[f64], gain: &[f32], bias: &[f32]) -> Vec<f64> {
    let mean_of = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let mean = match norm {
        Norm::Rms => 0.0,
        Norm::Layer => mean_of(x),
    };
    let squares: Vec<f64> = x.iter().map(|x| (x - mean) * (x - mean)).collect();
    let rstd = 1.0 / (mean_of(&squares) + f64::from(EPSILON)).sqrt();
    let columns = x.iter().zip(gain).zip(bias);
    columns
        .map(|((x, gain), bias)| (x - mean) * rstd * f64::from(*gain) + f64::from(*bias))
        .collect()
}

/// The oracle's values are close to exact ones, and its gradients to finite differences of exact
/// ones.
#[test]
fn gradients_are_slopes() {
    const STEP: f64 = 1e-5;
    let (rows, cols) = (19, 21);
    let draw = |seed| values(Kind::Normal, rows * cols, seed);
    let (x, residual, grad, sum_grad) = (draw(1), draw(2), draw(3), draw(4));
    let (gain, bias) = (factors(cols, 5), factors(cols, 6));
    for norm in NORMS {
        let bias = match norm {
            Norm::Rms => vec![0.0; cols],
            Norm::Layer => bias.clone(),
        };
        let given = (norm == Norm::Layer).then_some(&bias[..]);
        let made =
            reference::norm_forward(norm, &x, Some(&residual), (&gain, given), rows, EPSILON);
        let sum = made.sum.unwrap();
        let back = reference::norm_backward(norm, &grad, Some(&sum_grad), &sum, &made.stats, &gain);
        let row_of = |row: usize| -> Vec<f64> {
            sum[row * cols..][..cols]
                .iter()
                .map(|x| f64::from(*x))
                .collect()
        };
        // Function whose gradients are computed: the sum of the outputs times the given gradients.
        let loss = |row: usize, x: &[f64], gain: &[f32], bias: &[f32]| -> f64 {
            let normed = exact_norm(norm, x, gain, bias);
            let columns = normed.iter().zip(x).enumerate();
            let terms = columns.map(|(i, (normed, x))| {
                let at = row * cols + i;
                normed * f64::from(grad[at]) + x * f64::from(sum_grad[at])
            });
            terms.sum()
        };
        let mut by_gain = vec![0.0; cols];
        let mut by_bias = vec![0.0; cols];
        for row in 0..rows {
            let x = row_of(row);
            let normed = exact_norm(norm, &x, &gain, &bias);
            let plain = exact_norm(norm, &x, &vec![1.0; cols], &vec![0.0; cols]);
            for i in 0..cols {
                let at = row * cols + i;
                let found = f64::from(made.normed[at]);
                assert!(
                    (found - normed[i]).abs() < 2e-6 * (1.0 + normed[i].abs()),
                    "{norm:?} {at}"
                );
                let shifted = |step: f64| {
                    let mut x = x.clone();
                    x[i] += step;
                    loss(row, &x, &gain, &bias)
                };
                let slope = (shifted(STEP) - shifted(-STEP)) / (2.0 * STEP);
                let found = f64::from(back.x[at]);
                assert!(
                    (found - slope).abs() < 2e-5,
                    "{norm:?} {at}: {found}, not {slope}"
                );
                by_gain[i] += plain[i] * f64::from(grad[at]);
                by_bias[i] += f64::from(grad[at]);
            }
        }
        for i in 0..cols {
            let found = f64::from(back.gain[i]);
            assert!((found - by_gain[i]).abs() < 2e-5, "{norm:?} gain {i}");
            if norm == Norm::Layer {
                let found = f64::from(back.bias[i]);
                assert!((found - by_bias[i]).abs() < 2e-5, "{norm:?} bias {i}");
            }
        }
    }
}

fn check_activations<T: DeviceElement>(client: &Client) {
    let kinds = [
        Kind::Heavy,
        Kind::Huge,
        Kind::Tiny,
        Kind::Nan,
        Kind::Infinity,
    ];
    let shapes = [(3, 32), (2, 6), (1, 2), (0, 32), (5, 160), (3, 34)];
    let all = [
        Activation::SwiGlu,
        Activation::Gelu(Gelu::Erf),
        Activation::Gelu(Gelu::Tanh),
    ];
    for (i, (rows, cols)) in shapes.into_iter().enumerate() {
        for kind in &kinds[..if i == 0 { 5 } else { 1 }] {
            for which in all {
                let what = format!("{which:?} {rows}x{cols} {kind:?} {:?}", T::KIND);
                let x = convert::<T>(&values(*kind, rows * cols, i as u32));
                let half = cols / which.inputs();
                let grad = convert::<T>(&values(Kind::Normal, rows * half, 50 + i as u32));
                let on_device = upload(client, &x, rows, cols);
                let found = activation(client, which, &on_device).unwrap();
                assert_eq!((found.rows, found.cols), (rows, half), "{what}");
                let expected = reference::activation(which, &x, rows, cols);
                assert_floats(&read_matrix::<T>(client, &found), &expected, &what);
                let by = upload(client, &grad, rows, half);
                let found = activation_backward(client, which, &by, &on_device).unwrap();
                let expected = reference::activation_backward(which, &grad, &x, rows, cols);
                assert_floats(
                    &read_matrix::<T>(client, &found),
                    &expected,
                    &format!("d {what}"),
                );
            }
        }
    }
}

element_tests! {
    check_activations: activations_f32, activations_bf16, activations_f16;
}

/// Returns requests for amax values of a norm's output; without --full, the CPU runtime omits those
/// that combine others.
fn amax_requests(client: &Client) -> Vec<AmaxRequest> {
    let (whole, rows) = (AmaxGranularity::PerTensor, AmaxGranularity::PerRow);
    let seeded = |size| Some(Hadamard::seeded_with_size(size, 9));
    let (default, h16) = (Some(Hadamard::default()), seeded(HadamardSize::H16));
    let with_cols = |of_rows, cols| AmaxRequest {
        rows: Some(of_rows),
        cols,
    };
    let mut requests = vec![
        with_cols(whole, None),
        with_cols(whole, Some((whole, default))),
        with_cols(whole, Some((whole, h16))),
        with_cols(rows, None),
        with_cols(rows, Some((rows, default))),
        // Takes a separate pass.
        with_cols(whole, Some((whole, seeded(HadamardSize::H32)))),
    ];
    if !is_brief(client) {
        requests.extend([
            with_cols(whole, Some((whole, None))),
            with_cols(rows, Some((rows, None))),
            with_cols(rows, Some((rows, h16))),
            with_cols(rows, Some((whole, default))),
            with_cols(whole, Some((rows, default))),
            with_cols(rows, Some((rows, seeded(HadamardSize::H32)))),
        ]);
    }
    requests
}

/// Returns the bits of the oracle's amax values of a matrix.
fn amax_bits<T: DeviceElement>(
    x: &[T],
    [rows, cols]: [usize; 2],
    request: &AmaxRequest,
) -> [Option<Vec<u32>>; 2] {
    let of_rows = request.rows.map(|scope| match scope {
        AmaxGranularity::PerTensor => vec![reference::amax(x)],
        AmaxGranularity::PerRow => reference::amax_rows(x, rows, cols),
    });
    let of_cols = request
        .cols
        .map(|(scope, hadamard)| match (scope, hadamard) {
            (AmaxGranularity::PerTensor, None) => vec![reference::amax(x)],
            (AmaxGranularity::PerTensor, Some(hadamard)) => {
                vec![reference::amax_rht(x, rows, cols, &hadamard)]
            }
            (AmaxGranularity::PerRow, None) => reference::amax_cols(x, rows, cols),
            (AmaxGranularity::PerRow, Some(hadamard)) => {
                reference::amax_rht_cols(x, rows, cols, &hadamard)
            }
        });
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    [of_rows, of_cols].map(|values| values.map(bits))
}

/// Returns the bits of amax values in device memory, as many as are expected.
fn read_amax(
    client: &Client,
    Amaxes { rows, cols }: Amaxes,
    expected: &[Option<Vec<u32>>; 2],
) -> [Option<Vec<u32>>; 2] {
    let [rows_len, cols_len] = expected
        .each_ref()
        .map(|values| values.as_ref().map_or(0, Vec::len));
    let bits = |handle: Option<Handle>, len: usize| {
        let values = handle.map(|handle| read_f32s(client, &handle, len));
        values.map(|values| values.into_iter().map(f32::to_bits).collect())
    };
    [bits(rows, rows_len), bits(cols, cols_len)]
}

/// The amax values of the output equal those of a separate pass, and the oracle's, and the output
/// is unchanged. Covers strips that end within one, one row, no rows, rows in one block per unit,
/// in several, and too long to be kept, and rows without whole vectors.
fn check_amax<T: DeviceElement>(client: &Client) {
    let shapes = [
        (1, 16),
        (0, 16),
        (16, 768),
        (37, 48),
        (50, 768),
        (21, 500),
        (3, 4112),
        (2, 16_400),
    ];
    // Without --full, the CPU runtime omits shapes on the paths of others.
    let shapes = shapes
        .into_iter()
        .filter(|shape| !is_brief(client) || ![(16, 768), (2, 16_400)].contains(shape));
    let kinds = [Kind::Normal, Kind::Nan, Kind::Infinity, Kind::Tiny];
    for (i, (rows, cols)) in shapes.enumerate() {
        for (norm_kind, kind) in NORMS
            .into_iter()
            .flat_map(|norm| kinds.map(|kind| (norm, kind)))
        {
            let case = Case::<T>::new(norm_kind, kind, (rows, cols), i as u32);
            let matrix = |x: &[T]| upload(client, x, rows, cols);
            let floats = |x: &[f32]| upload_bytes(client, bytemuck::cast_slice(x));
            let (x, residual) = (matrix(&case.x), case.residual.as_deref().map(matrix));
            let (gain, bias) = (floats(&case.gain), case.bias.as_deref().map(floats));
            let request = NormRequest {
                norm: norm_kind,
                x: &x,
                residual: residual.as_ref(),
                gain: &gain,
                bias: bias.as_ref(),
                epsilon: EPSILON,
                amax: AmaxRequest::default(),
            };
            let plain = norm(client, &request).unwrap();
            assert!(plain.amax.rows.is_none() && plain.amax.cols.is_none());
            let plain = read_matrix::<T>(client, &plain.normed);
            for amax in amax_requests(client) {
                let what = format!("{norm_kind:?} {rows}x{cols} {kind:?} {amax:?}");
                let found = norm(client, &NormRequest { amax, ..request }).unwrap();
                let normed = read_matrix::<T>(client, &found.normed);
                assert_floats(&normed, &plain, &what);
                let passed = amaxes(client, &found.normed, &Groups::One, &amax).unwrap();
                let expected = amax_bits(&normed, [rows, cols], &amax);
                let [found, passed] =
                    [found.amax, passed].map(|amax| read_amax(client, amax, &expected));
                assert_eq!(found, expected, "{what}");
                assert_eq!(passed, expected, "{what}: by a pass");
            }
        }
    }
}

/// The amax values of the gradient equal those of a separate pass, and the oracle's, and the
/// gradients are unchanged. Covers parts with and without strips, rows in one block per unit, in
/// several, and too long to be kept, and rows without whole vectors.
fn check_backward_amax<T: DeviceElement>(client: &Client) {
    let mut shapes = vec![(0, 16), (37, 48), (21, 500), (4220, 16)];
    if client.name() == "cuda" {
        shapes.extend([(16_384, 768), (4224, 4096), (4215, 9008), (4224, 16_400)]);
    }
    for (i, (rows, cols)) in shapes.into_iter().enumerate() {
        for (norm_kind, kind) in NORMS
            .into_iter()
            .flat_map(|norm| [Kind::Normal, Kind::Nan].map(|kind| (norm, kind)))
        {
            let case = Case::<T>::new(norm_kind, kind, (rows, cols), i as u32);
            let matrix = |x: &[T]| upload(client, x, rows, cols);
            let gain = upload_bytes(client, bytemuck::cast_slice(&case.gain));
            let (x, grad) = (matrix(&case.x), matrix(&case.grad));
            let sum_grad = case.sum_grad.as_deref().map(matrix);
            let made = norm(
                client,
                &NormRequest {
                    norm: norm_kind,
                    x: &x,
                    residual: None,
                    gain: &gain,
                    bias: None,
                    epsilon: EPSILON,
                    amax: AmaxRequest::default(),
                },
            );
            let request = NormBackwardRequest {
                norm: norm_kind,
                grad: &grad,
                sum_grad: sum_grad.as_ref(),
                x: &x,
                stats: &made.unwrap().stats,
                gain: &gain,
                bias: false,
                amax: AmaxRequest::default(),
            };
            let plain = norm_backward(client, &request).unwrap();
            assert!(plain.amax.rows.is_none() && plain.amax.cols.is_none());
            let plain_x = read_matrix::<T>(client, &plain.x);
            let plain_gain = read_f32s(client, &plain.gain, cols);
            for amax in amax_requests(client) {
                let what = format!("{norm_kind:?} {rows}x{cols} {kind:?} {amax:?}");
                let found =
                    norm_backward(client, &NormBackwardRequest { amax, ..request }).unwrap();
                let by_x = read_matrix::<T>(client, &found.x);
                assert_floats(&by_x, &plain_x, &what);
                assert_floats(&read_f32s(client, &found.gain, cols), &plain_gain, &what);
                let expected = amax_bits(&by_x, [rows, cols], &amax);
                assert!(
                    read_amax(client, found.amax, &expected) == expected,
                    "{what}"
                );
            }
        }
    }
}

/// Parts of strips cover all rows; none of them is empty, or more than an eighth longer than
/// others.
#[test]
fn parts_of_strips_are_alike() {
    let mut strips = 0;
    for rows in (0..9000).chain([16_384, 32_768, 65_536, 1 << 20]) {
        if !reference::norm_parts_are_strips(rows) {
            continue;
        }
        strips += 1;
        let parts = reference::norm_parts(rows);
        let start = |part: usize| (part * rows.div_ceil(16) / parts * 16).min(rows);
        let lengths = (0..parts).map(|part| start(part + 1) - start(part));
        assert_eq!(lengths.clone().sum::<usize>(), rows);
        assert!(lengths.clone().all(|length| length > 0), "{rows}");
        let longest = lengths.max().unwrap_or(0);
        assert!(8 * longest <= 9 * rows.div_ceil(parts.max(1)), "{rows}");
    }
    assert!(strips > 100, "{strips}");
    for rows in [4224, 8192, 16_384, 32_768] {
        assert!(reference::norm_parts_are_strips(rows), "{rows}");
    }
    assert!(!reference::norm_parts_are_strips(5000));
}

element_tests! {
    check_amax: amax_f32, amax_bf16, amax_f16;
    check_backward_amax: backward_amax_f32, backward_amax_bf16, backward_amax_f16;
}

#[test]
fn bad_arguments_are_named() {
    let client = client!("norm::bad_arguments_are_named");
    let x = upload(&client, &[1.0f32; 32], 2, 16);
    let other = upload(&client, &[1.0f32; 32], 4, 8);
    let gain = upload_bytes(&client, bytemuck::cast_slice(&[1.0f32; 16]));
    let short = upload_bytes(&client, bytemuck::cast_slice(&[1.0f32; 8]));
    let request = NormRequest {
        norm: Norm::Rms,
        x: &x,
        residual: None,
        gain: &gain,
        bias: None,
        epsilon: EPSILON,
        amax: AmaxRequest::default(),
    };
    let stats = norm(&client, &request).unwrap().stats;
    let cases = [
        (
            "`residual`",
            NormRequest {
                residual: Some(&other),
                ..request
            },
        ),
        (
            "`gain`",
            NormRequest {
                gain: &short,
                ..request
            },
        ),
        (
            "`bias`",
            NormRequest {
                bias: Some(&gain),
                ..request
            },
        ),
    ];
    for (argument, request) in cases {
        let error = norm(&client, &request).unwrap_err().to_string();
        assert!(error.contains(argument), "{error}");
    }
    let request = NormBackwardRequest {
        norm: Norm::Rms,
        grad: &other,
        sum_grad: None,
        x: &x,
        stats: &stats,
        gain: &gain,
        bias: false,
        amax: AmaxRequest::default(),
    };
    let error = norm_backward(&client, &request).unwrap_err().to_string();
    assert!(error.contains("`grad`"), "{error}");
    let odd = upload(&client, &[1.0f32; 3], 1, 3);
    let error = activation(&client, Activation::SwiGlu, &odd)
        .unwrap_err()
        .to_string();
    assert!(error.contains("`x`"), "{error}");
    let which = Activation::Gelu(Gelu::Erf);
    let error = activation_backward(&client, which, &other, &x)
        .unwrap_err()
        .to_string();
    assert!(error.contains("`grad`"), "{error}");
}
