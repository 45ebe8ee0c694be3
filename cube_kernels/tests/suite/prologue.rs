//! Fused prologues: matrices that are computed while a kernel reads their inputs, compared with the
//! oracle, with the same operations as separate kernels, and with `f64`, on CubeCL's CPU runtime or
//! on a GPU.

use crate::support::device::{
    DeviceElement, assert_bytes, assert_floats, is_brief, read_bytes, read_matrix, read_u32,
    upload, upload_bytes,
};
use crate::support::inputs::{ALL_KINDS, Generator, Kind, convert, values};
use cubecl::{prelude::*, server::Handle};
use half::{bf16, f16};
use nvfp4_kernels::{
    Amax, BlockScaling, ErrorNorm, Hadamard, HadamardSize, Nvfp4Params, RandomStream, Rounding,
    ScaleLayout, Usage,
    capabilities::Capabilities,
    cube::{
        codec::Conversion,
        exact::{fma, rcp_of_ordinary, reciprocal_of_1_to_2, sqrt},
    },
    moe::GroupOffsets,
    quantize::{self, AmaxRequest, Amaxes, GateUp, Prologue, QuantRequest},
    reference,
    tensor::{AmaxGranularity, DeviceQuantized, Groups, Matrix},
};

const EPSILON: f32 = 1e-6;
const STOCHASTIC: Rounding = Rounding::Stochastic(RandomStream::new(99, 5, 0xffff_ffff));
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
    RmsNorm {
        x: Matrix,
        rstd: Handle,
        gain: Handle,
    },
    SideBySide(Matrix),
    Apart(Matrix, Matrix),
    BackwardSideBySide(Matrix, Matrix),
    BackwardApart(Matrix, Matrix, Matrix),
}

impl<T: DeviceElement> Case<T> {
    fn source(&self) -> Prologue<'_> {
        match &self.inputs {
            Inputs::RmsNorm { x, rstd, gain } => Prologue::RmsNorm { x, rstd, gain },
            Inputs::SideBySide(both) => Prologue::SwiGlu(GateUp::Concatenated(both)),
            Inputs::Apart(gate, up) => Prologue::SwiGlu(GateUp::Separate { gate, up }),
            Inputs::BackwardSideBySide(grad, both) => Prologue::SwiGluBackward {
                grad,
                inputs: GateUp::Concatenated(both),
            },
            Inputs::BackwardApart(grad, gate, up) => Prologue::SwiGluBackward {
                grad,
                inputs: GateUp::Separate { gate, up },
            },
        }
    }

    /// Returns the computed matrix in memory, from a separate operation.
    fn unfused(&self, client: &Client) -> Matrix {
        quantize::run_prologue(client, self.source()).unwrap()
    }
}

fn gains(cols: usize, seed: u32) -> Vec<f32> {
    let mut random = Generator::new(seed);
    (0..cols).map(|_| random.normal()).collect()
}

/// Returns every prologue, with inputs of `rows` x `width`.
fn cases<T: DeviceElement>(
    client: &Client,
    kind: Kind,
    (rows, width): (usize, usize),
    seed: u32,
) -> Vec<Case<T>> {
    let draw = |cols: usize, seed| convert::<T>(&values(kind, rows * cols, seed));
    let (x, gate_up, grad) = (
        draw(width, seed),
        draw(2 * width, seed + 1),
        draw(width, seed + 2),
    );
    let gain = gains(width, seed);
    let rstd = reference::rms_norm_rstd(&x, rows, width, EPSILON);
    let half = |second: bool| -> Vec<T> {
        gate_up
            .chunks(2 * width)
            .flat_map(|row| row[if second { width } else { 0 }..][..width].to_vec())
            .collect()
    };
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
            "RMSNorm",
            width,
            &reference::rms_norm(&x, &rstd, &gain),
            Inputs::RmsNorm {
                x: up(&x, width),
                rstd: upload_bytes(client, bytemuck::cast_slice(&rstd)),
                gain: upload_bytes(client, bytemuck::cast_slice(&gain)),
            },
        ),
        case(
            "SwiGLU",
            width,
            &forward,
            Inputs::SideBySide(up(&gate_up, 2 * width)),
        ),
        case(
            "SwiGLU apart",
            width,
            &forward,
            Inputs::Apart(up(&half(false), width), up(&half(true), width)),
        ),
        case(
            "SwiGLU backward",
            2 * width,
            &backward,
            Inputs::BackwardSideBySide(up(&grad, width), up(&gate_up, 2 * width)),
        ),
        case(
            "SwiGLU backward apart",
            2 * width,
            &backward,
            Inputs::BackwardApart(
                up(&grad, width),
                up(&half(false), width),
                up(&half(true), width),
            ),
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

/// Rows shorter and longer than the partial sums that share them, and than a unit keeps.
#[test]
fn row_factors_are_the_oracles() {
    fn check<T: DeviceElement>(client: &Client) {
        for (rows, cols) in [
            (5, 16),
            (2, 240),
            (3, 4096),
            (2, 4112),
            (2, 20_480 + 48),
            (0, 32),
        ] {
            for kind in [
                Kind::Normal,
                Kind::Heavy,
                Kind::Zeros,
                Kind::Nan,
                Kind::Infinity,
            ] {
                let x = convert::<T>(&values(kind, rows * cols, cols as u32));
                let expected = reference::rms_norm_rstd(&x, rows, cols, EPSILON);
                let matrix = upload(client, &x, rows, cols);
                let found = quantize::rms_norm_rstd(client, &matrix, EPSILON).unwrap();
                let what = format!("{rows}x{cols} {kind:?} {:?}", T::KIND);
                assert_floats(&read_floats(client, &found, rows), &expected, &what);
            }
        }
    }
    let client = client!("row_factors_are_the_oracles");
    check::<f32>(&client);
    check::<bf16>(&client);
    check::<f16>(&client);
}

fn read_floats(client: &Client, handle: &Handle, len: usize) -> Vec<f32> {
    read_u32(client, handle, len)
        .into_iter()
        .map(f32::from_bits)
        .collect()
}

/// Asserts that quantized tensors are equal: codes, scales, amax. The buffers of a columnwise
/// tensor of groups have room for groups of any size; only the part in use is compared.
fn assert_copies(
    client: &Client,
    found: &DeviceQuantized,
    expected: &DeviceQuantized,
    sizes: &[usize],
    what: &str,
) {
    let blocks = match (found.usage(), found.layout.scale_layout) {
        (Usage::Columnwise, ScaleLayout::Compact) if sizes.len() > 1 => {
            let unit = found.unit();
            let units: usize = sizes.iter().map(|size| size.div_ceil(unit)).sum();
            units * (unit / 16) * found.cols()
        }
        _ => found.code_blocks(),
    };
    let scales = match found.layout.scale_layout {
        ScaleLayout::Compact => blocks,
        ScaleLayout::Swizzled128x4 => found.scale_bytes(),
    };
    let parts = |packed: &DeviceQuantized| {
        [
            read_bytes(client, &packed.scales, scales),
            read_bytes(client, &packed.codes, blocks * 8),
            read_bytes(client, &packed.amax, packed.amax_len() * 4),
        ]
    };
    for ((found, expected), part) in parts(found)
        .iter()
        .zip(&parts(expected))
        .zip(["scales", "codes", "maxima"])
    {
        assert_bytes(found, expected, &format!("{what}: {part}"));
    }
}

/// Returns a rowwise policy, a columnwise policy, and the amax granularity.
fn policies() -> Vec<(Nvfp4Params, Nvfp4Params, AmaxGranularity)> {
    let nearest = Nvfp4Params::new(Rounding::Nearest);
    let stochastic = Nvfp4Params::new(STOCHASTIC);
    let transformed = |size, copy: Nvfp4Params| Nvfp4Params {
        hadamard: Some(Hadamard::seeded_with_size(size, 3)),
        ..copy
    };
    let default = |copy: Nvfp4Params| Nvfp4Params {
        hadamard: Some(Hadamard::default()),
        ..copy
    };
    let swizzled = |copy: Nvfp4Params| Nvfp4Params {
        layout: ScaleLayout::Swizzled128x4,
        ..copy
    };
    let scaled = |scaling, copy: Nvfp4Params| Nvfp4Params { scaling, ..copy };
    let four_over_six = BlockScaling::FourOverSix(ErrorNorm::Mae);
    vec![
        // Training's quantization of activations, and of gradients.
        (nearest, default(nearest), AmaxGranularity::PerTensor),
        (stochastic, default(stochastic), AmaxGranularity::PerTensor),
        (
            swizzled(nearest),
            swizzled(transformed(HadamardSize::H128, stochastic)),
            AmaxGranularity::PerTensor,
        ),
        (
            scaled(four_over_six, nearest),
            scaled(BlockScaling::Headroom, stochastic),
            AmaxGranularity::PerTensor,
        ),
        (
            stochastic,
            transformed(HadamardSize::H16, nearest),
            AmaxGranularity::PerRow,
        ),
    ]
}

fn maxima<'a>(
    client: &Client,
    source: impl Into<Prologue<'a>>,
    groups: &Groups,
    scope: AmaxGranularity,
    hadamard: Option<Hadamard>,
) -> Amaxes {
    let request = AmaxRequest {
        rows: Some(scope),
        cols: Some((scope, hadamard)),
    };
    quantize::amaxes(client, source, groups, &request).unwrap()
}

/// Checks amax values, quantized tensors together and alone, and quantized tensors with a dense
/// output: each with a fused prologue and from memory.
fn check_fused<T: DeviceElement>(
    client: &Client,
    case: &Case<T>,
    (groups, sizes): (&Groups, &[usize]),
    policies: &[(Nvfp4Params, Nvfp4Params, AmaxGranularity)],
    what: &str,
) {
    let unfused = case.unfused(client);
    for &(row, col, scope) in policies {
        let what = format!("{what} {} {:?} {row:?} {col:?}", case.name, T::KIND);
        let found = maxima(client, case.source(), groups, scope, col.hadamard);
        let expected = maxima(client, &unfused, groups, scope, col.hadamard);
        let request = AmaxRequest {
            rows: Some(scope),
            cols: Some((scope, col.hadamard)),
        };
        let (written, beside) =
            quantize::run_prologue_with_amaxes(client, case.source(), groups, &request).unwrap();
        if matches!(groups, Groups::One) {
            assert_floats(&read_matrix::<T>(client, &written), &case.expected, &what);
        }
        let (rows_len, cols_len) = match scope {
            AmaxGranularity::PerTensor => (groups.count(), groups.count()),
            AmaxGranularity::PerRow => (case.rows, groups.count() * case.cols),
        };
        for found in [&found, &beside] {
            for (found, expected, len) in [
                (&found.rows, &expected.rows, rows_len),
                (&found.cols, &expected.cols, cols_len),
            ] {
                let [found, expected] = [found, expected]
                    .map(|handle| read_bytes(client, handle.as_ref().unwrap(), len * 4));
                assert_bytes(&found, &expected, &format!("{what}: maxima"));
            }
        }
        let (row_amax, col_amax) = (expected.rows.unwrap(), expected.cols.unwrap());
        let request = |amax, copy: Nvfp4Params| QuantRequest {
            amax,
            scope,
            copy: copy.into(),
        };
        let (row, col) = (request(&row_amax, row), request(&col_amax, col));
        let (expected_row, expected_col) =
            quantize::quantize_both(client, &unfused, groups, &row, &col).unwrap();
        let (found_row, found_col) =
            quantize::quantize_both(client, case.source(), groups, &row, &col).unwrap();
        assert_copies(
            client,
            &found_row,
            &expected_row,
            sizes,
            &format!("{what}: row"),
        );
        assert_copies(
            client,
            &found_col,
            &expected_col,
            sizes,
            &format!("{what}: col"),
        );
        for (usage, request, expected) in [
            (Usage::Rowwise, &row, &expected_row),
            (Usage::Columnwise, &col, &expected_col),
        ] {
            let alone = quantize::quantize(client, case.source(), groups, usage, request).unwrap();
            assert_copies(
                client,
                &alone,
                expected,
                sizes,
                &format!("{what}: {usage:?} alone"),
            );
        }
    }
}

/// Every policy in bf16; training's requests for the other types and for special values.
fn check_prologue(client: &Client, name: &str) {
    fn of<T: DeviceElement>(
        client: &Client,
        name: &str,
        kind: Kind,
        shape: (usize, usize),
    ) -> impl Iterator<Item = Case<T>> {
        let cases = cases::<T>(client, kind, shape, 100 + shape.0 as u32);
        let name = name.to_string();
        cases.into_iter().filter(move |case| {
            let base = case.name.trim_end_matches(" apart");
            base == name
        })
    }
    let (all, one) = (policies(), Groups::One);
    // A brief run has every policy, every shape and every kind of values, but not all combinations.
    let some = |i: usize| match is_brief(client) {
        true => &all[i % all.len()..][..1],
        false => &all[..],
    };
    for (i, shape) in SHAPES.into_iter().enumerate() {
        for case in of::<bf16>(client, name, Kind::Heavy, shape) {
            check_fused(client, &case, (&one, &[]), some(i), &format!("{shape:?}"));
        }
    }
    for (i, kind) in ALL_KINDS.into_iter().enumerate() {
        for case in of::<bf16>(client, name, kind, (37, 48)) {
            check_fused(client, &case, (&one, &[]), some(i), &format!("{kind:?}"));
        }
    }
    for case in of::<f32>(client, name, Kind::Heavy, (130, 80)) {
        check_fused(client, &case, (&one, &[]), &all[..2], "f32");
    }
    if is_brief(client) {
        return;
    }
    for case in of::<f16>(client, name, Kind::Normal, (33, 80)) {
        check_fused(client, &case, (&one, &[]), &all[..1], "f16");
    }
}

#[test]
fn rms_norm_fused_is_unfused() {
    let client = client!("rms_norm_fused_is_unfused");
    check_prologue(&client, "RMSNorm");
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
        let offsets = upload_bytes(&client, bytemuck::cast_slice(&ends));
        let groups = Groups::Offsets {
            offsets: offsets.clone(),
            count: sizes.len(),
        };
        for case in cases::<bf16>(&client, Kind::Normal, (rows, 48), 20) {
            let what = format!("groups {sizes:?}");
            check_fused(&client, &case, (&groups, sizes), &policies()[1..2], &what);
            let ends = GroupOffsets::new(offsets.clone(), sizes.len()).unwrap();
            let amax = upload_bytes(&client, bytemuck::cast_slice(&vec![3f32; sizes.len()]));
            let request = QuantRequest {
                amax: &amax,
                scope: AmaxGranularity::PerTensor,
                copy: Nvfp4Params::new(STOCHASTIC).into(),
            };
            let unfused = case.unfused(&client);
            let side = |source| {
                let (_, col) =
                    quantize::quantize_side_by_side(&client, source, &ends, None, Some(&request))
                        .unwrap();
                let col = col.unwrap();
                // Blocks after the last group are not written.
                let used: usize = sizes.iter().map(|size| size.div_ceil(16)).sum();
                let codes = read_bytes(&client, &col.codes, col.code_blocks() * 8);
                codes
                    .chunks((col.blocks() * 8).max(1))
                    .flat_map(|row| row[..used * 8].to_vec())
                    .collect::<Vec<u8>>()
            };
            assert_bytes(&side(case.source()), &side((&unfused).into()), &what);
        }
    }
    for case in cases::<bf16>(&client, Kind::Normal, (66, 32), 21) {
        let batch = (&Groups::Batch(2), &[33, 33][..]);
        check_fused(&client, &case, batch, &policies()[..1], "batch");
    }
}

/// Training's quantized tensors, compared with the oracle without another kernel in between.
#[test]
fn fused_copies_are_the_oracles() {
    fn check<T: DeviceElement>(client: &Client, shape: (usize, usize)) {
        let hadamard = Hadamard::default();
        for case in cases::<T>(client, Kind::Heavy, shape, 30) {
            let (rows, cols) = (case.rows, case.cols);
            let what = format!("{} {shape:?} {:?}", case.name, T::KIND);
            let found = maxima(
                client,
                case.source(),
                &Groups::One,
                AmaxGranularity::PerTensor,
                Some(hadamard),
            );
            let (row_amax, col_amax) = (found.rows.unwrap(), found.cols.unwrap());
            let expected = [
                reference::amax(&case.expected),
                reference::amax_rht(&case.expected, rows, cols, &hadamard),
            ];
            let maxima = [&row_amax, &col_amax].map(|handle| read_floats(client, handle, 1)[0]);
            assert_eq!(maxima, expected, "{what}");
            let row = Nvfp4Params::new(Rounding::Nearest);
            let col = Nvfp4Params {
                hadamard: Some(hadamard),
                ..Nvfp4Params::new(STOCHASTIC)
            };
            let request = |amax, copy: Nvfp4Params| QuantRequest {
                amax,
                scope: AmaxGranularity::PerTensor,
                copy: copy.into(),
            };
            let (found_row, found_col) = quantize::quantize_both(
                client,
                case.source(),
                &Groups::One,
                &request(&row_amax, row),
                &request(&col_amax, col),
            )
            .unwrap();
            for (found, usage, amax, policy) in [
                (found_row, Usage::Rowwise, expected[0], row),
                (found_col, Usage::Columnwise, expected[1], col),
            ] {
                let amax = Amax::Tensor(amax);
                let host =
                    reference::quantize(&case.expected, rows, cols, usage, &amax, &policy, 0)
                        .unwrap();
                let codes = read_bytes(client, &found.codes, host.codes().len());
                let scales = read_bytes(client, &found.scales, host.scales().len());
                assert_bytes(&codes, host.codes(), &format!("{what} {usage:?}: codes"));
                assert_bytes(&scales, host.scales(), &format!("{what} {usage:?}: scales"));
            }
        }
    }
    let client = client!("fused_copies_are_the_oracles");
    check::<bf16>(&client, (145, 176));
    check::<f32>(&client, (33, 80));
}

/// Per token, in one read; also RMSNorm whose factor is computed in that read.
fn check_per_token(client: &Client, part: u32) {
    fn check<T: DeviceElement>(client: &Client, kind: Kind, shape: (usize, usize), count: usize) {
        let copies = &[
            Nvfp4Params::new(Rounding::Nearest),
            Nvfp4Params {
                layout: ScaleLayout::Swizzled128x4,
                ..Nvfp4Params::new(STOCHASTIC)
            },
        ];
        for &copy in &copies[..count] {
            for case in cases::<T>(client, kind, shape, 40) {
                let what = format!("{} {shape:?} {:?} {kind:?} {copy:?}", case.name, T::KIND);
                let unfused = case.unfused(client);
                let expected =
                    quantize::quantize_per_token(client, &unfused, &copy.into()).unwrap();
                let found =
                    quantize::quantize_per_token(client, case.source(), &copy.into()).unwrap();
                assert_copies(client, &found, &expected, &[], &what);
                if let Inputs::RmsNorm { x, rstd, gain } = &case.inputs {
                    let (found, factors) = quantize::quantize_per_token_rms_norm(
                        client,
                        x,
                        gain,
                        EPSILON,
                        &copy.into(),
                    )
                    .unwrap();
                    assert_copies(client, &found, &expected, &[], &format!("{what}, one read"));
                    let [factors, rstd] =
                        [&factors, rstd].map(|handle| read_floats(client, handle, case.rows));
                    assert_floats(&factors, &rstd, &what);
                }
            }
        }
    }
    match part {
        0 => {
            for rows in [3, 0, 130] {
                check::<bf16>(client, Kind::Heavy, (rows, 48), 2);
            }
            for kind in ALL_KINDS {
                check::<bf16>(client, kind, (7, 48), 2);
            }
        }
        // More blocks than all units keep; more than units; a number that is divisible by neither.
        1 => check::<bf16>(client, Kind::Normal, (2, 16 * 1031), 1),
        _ => {
            check::<f32>(client, Kind::Normal, (3, 16 * 261), 1);
            check::<f16>(client, Kind::Normal, (5, 80), 1);
        }
    }
}

#[test]
fn per_token_fused_is_unfused() {
    check_per_token(&client!("per_token_fused_is_unfused"), 0);
}

#[test]
fn long_rows_per_token() {
    check_per_token(&client!("long_rows_per_token"), 1);
}

#[test]
fn per_token_f32_and_f16() {
    check_per_token(&client!("per_token_f32_and_f16"), 2);
}

/// Both per-token tensors, whose amax values are computed in one read of the inputs.
#[test]
fn per_token_both_axes() {
    let client = client!("per_token_both_axes");
    let row = Nvfp4Params::new(Rounding::Nearest).into();
    let col = Nvfp4Params {
        hadamard: Some(Hadamard::default()),
        ..Nvfp4Params::new(STOCHASTIC)
    }
    .into();
    for case in cases::<bf16>(&client, Kind::Heavy, (50, 48), 41) {
        let unfused = case.unfused(&client);
        let (row_found, col_found) =
            quantize::quantize_per_token_both(&client, case.source(), &Groups::One, &row, &col)
                .unwrap();
        let (row_expected, col_expected) =
            quantize::quantize_per_token_both(&client, &unfused, &Groups::One, &row, &col).unwrap();
        assert_copies(&client, &row_found, &row_expected, &[], case.name);
        assert_copies(&client, &col_found, &col_expected, &[], case.name);
        let alone =
            quantize::quantize_per_token_cols(&client, case.source(), &Groups::One, &col).unwrap();
        assert_copies(&client, &alone, &col_expected, &[], case.name);
    }
}

/// Asserts `|found - expected| <= relative · |expected| + absolute`.
fn assert_close(found: f32, expected: f64, relative: f64, absolute: f64, what: &str) {
    let bound = relative * expected.abs() + absolute;
    let error = (found as f64 - expected).abs();
    assert!(error <= bound, "{what}: {found:e}, {expected:e}");
}

/// Compares with real numbers. Forward: a few rounding errors of 2⁻²⁴ relative to the result;
/// RMSNorm has half the error of its mean square, a sum of `n` squares in 256 partial sums.
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
        let x = draw(rows * width, scale);
        let gain = draw(width, 1.0);
        let rstd = reference::rms_norm_rstd(&x, rows, width, EPSILON);
        let found = reference::rms_norm(&x, &rstd, &gain);
        for r in 0..rows {
            let row = &x[r * width..][..width];
            let mean = row.iter().map(|&x| (x as f64).powi(2)).sum::<f64>() / width as f64;
            let factor = 1.0 / (mean + EPSILON as f64).sqrt();
            // Sixteen additions per partial sum (one block), eight to combine them, and the
            // remaining operations.
            assert_close(rstd[r], factor, 16.0 * unit, 0.0, "factor");
            for c in 0..width {
                let expected = row[c] as f64 * factor * gain[c] as f64;
                assert_close(
                    found[r * width + c],
                    expected,
                    18.0 * unit,
                    1e-44,
                    "RMSNorm",
                );
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

/// The summation order of a row does not depend on the launch geometry.
#[test]
fn launch_geometry_does_not_matter() {
    let client = client!("launch_geometry_does_not_matter");
    let conversion = Capabilities::of(&client).conversion;
    let planes = conversion.has_ptx();
    let (rows, cols) = (5, 16 * 70);
    let x = convert::<bf16>(&values(Kind::Heavy, rows * cols, 3));
    let expected = reference::rms_norm_rstd(&x, rows, cols, EPSILON);
    let matrix = upload(&client, &x, rows, cols);
    let units: &[u32] = if planes { &[96, 128, 256] } else { &[1, 2] };
    for &units in units {
        for cubes in [1, 3, 8] {
            let out = client.empty(rows * 4);
            // SAFETY: the kernel stays below the shape.
            unsafe {
                quantize::kernels::rms_norm_rstd_kernel::launch_unchecked(
                    &client,
                    CubeCount::Static(cubes, 1, 1),
                    CubeDim::new_1d(units),
                    cubecl::ir::AddressType::U32,
                    4,
                    BufferArg::from_raw_parts(matrix.handle.clone(), rows * cols / 8),
                    BufferArg::from_raw_parts(out.clone(), rows),
                    rows,
                    cols / 16,
                    EPSILON,
                    planes,
                    conversion,
                    bf16::KIND,
                );
            }
            let what = format!("{cubes} cubes of {units}");
            assert_floats(&read_floats(&client, &out, rows), &expected, &what);
        }
    }
}

#[test]
fn repeated_launches_are_identical() {
    let client = client!("repeated_launches_are_identical");
    for case in cases::<bf16>(&client, Kind::Heavy, (200, 80), 60) {
        let run = || {
            let found = maxima(
                &client,
                case.source(),
                &Groups::One,
                AmaxGranularity::PerTensor,
                Some(Hadamard::default()),
            );
            let copy = Nvfp4Params {
                hadamard: Some(Hadamard::default()),
                ..Nvfp4Params::new(STOCHASTIC)
            };
            let amax = found.cols.unwrap();
            let request = QuantRequest {
                amax: &amax,
                scope: AmaxGranularity::PerTensor,
                copy: copy.into(),
            };
            let usage = Usage::Columnwise;
            let copy =
                quantize::quantize(&client, case.source(), &Groups::One, usage, &request).unwrap();
            (
                read_bytes(&client, &copy.codes, copy.code_blocks() * 8),
                read_bytes(&client, &copy.scales, copy.scale_bytes()),
            )
        };
        let first = run();
        for _ in 0..100 {
            assert!(run() == first, "{}", case.name);
        }
    }
}

#[test]
fn bad_sources_are_named() {
    let client = client!("bad_sources_are_named");
    let matrix = |rows, cols| Matrix::empty(&client, rows, cols, bf16::KIND);
    let handle = |len: usize| client.empty(len * 4);
    let error = |source: Prologue<'_>| {
        quantize::run_prologue(&client, source)
            .unwrap_err()
            .to_string()
    };
    let norm =
        |x: &Matrix, rstd: &Handle, gain: &Handle| error(Prologue::RmsNorm { x, rstd, gain });
    let found = norm(&matrix(4, 24), &handle(4), &handle(24));
    assert!(
        found.contains("`x`") && found.contains("multiple of 16"),
        "{found}"
    );
    let found = norm(&matrix(64, 32), &handle(4), &handle(32));
    assert!(found.contains("`rstd`"), "{found}");
    let found = norm(&matrix(4, 512), &handle(4), &handle(32));
    assert!(found.contains("`gain`"), "{found}");
    let shifted = handle(64).offset_start(8);
    let found = norm(&matrix(4, 32), &handle(4), &shifted);
    assert!(
        found.contains("`gain`") && found.contains("16 bytes"),
        "{found}"
    );
    let found = error(Prologue::SwiGlu(GateUp::Concatenated(&matrix(4, 48))));
    assert!(
        found.contains("`gate_up`") && found.contains("32"),
        "{found}"
    );
    let (gate, up) = (matrix(4, 32), matrix(4, 48));
    let found = error(Prologue::SwiGlu(GateUp::Separate {
        gate: &gate,
        up: &up,
    }));
    assert!(
        found.contains("`up`") && found.contains("4 x 32"),
        "{found}"
    );
    let found = error(Prologue::SwiGluBackward {
        grad: &matrix(4, 32),
        inputs: GateUp::Concatenated(&matrix(4, 32)),
    });
    assert!(
        found.contains("`grad`") && found.contains("4 x 16"),
        "{found}"
    );
}
