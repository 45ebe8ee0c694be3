//! Quantized tensors that are stored as values instead of codes, or in both forms: the values are
//! those of codes and scales, and GEMMs with them give the bits of GEMMs with the codes, on
//! CubeCL's CPU runtime or on a GPU.

use crate::support::device::{
    DeviceElement, assert_bytes, assert_floats, read_bytes, read_matrix, upload,
};
use crate::support::gemm::multiply;
use crate::support::inputs::{ALL_KINDS, Kind, convert, values};
use crate::support::quantize::{self, AmaxRequest, TargetSpec};
use cubecl::{prelude::*, server::Handle};
use half::{bf16, f16};
use nvfp4_formats::{
    AmaxGranularity, BLOCK, BlockScaling, ErrorNorm, Hadamard, HadamardSize, Nvfp4Error,
    QuantParams, RandomStream, Rounding, StoredForm, Usage, reference,
};
use nvfp4_kernels::{
    capabilities::{Capabilities, GemmBackend},
    gemm::{
        Gemm, Plan, Target,
        proof::{DequantThenBf16, Sm90Tile, decode},
    },
    tensor::{DeviceQuantized, FloatKind, Groups, Matrix},
};

const NEAREST: Rounding = Rounding::Nearest;
const STOCHASTIC: Rounding = Rounding::Stochastic(RandomStream::new(0x0123_4567, 5, 0xffff_ffff));

type Policy = (QuantParams, AmaxGranularity);

fn policy(rounding: Rounding, scaling: BlockScaling) -> QuantParams {
    QuantParams {
        scaling,
        ..QuantParams::nvfp4(rounding)
    }
}

fn transformed(size: HadamardSize, rounding: Rounding) -> QuantParams {
    QuantParams {
        hadamard: Some(Hadamard::seeded_with_size(size, 11)),
        ..QuantParams::nvfp4(rounding)
    }
}

/// Returns policies that a rowwise and a columnwise tensor both support.
fn policies() -> Vec<Policy> {
    use AmaxGranularity::{PerRow, PerTensor};
    let [mae, mse] = [ErrorNorm::Mae, ErrorNorm::Mse].map(BlockScaling::FourOverSix);
    vec![
        (policy(NEAREST, BlockScaling::Standard), PerTensor),
        (policy(STOCHASTIC, BlockScaling::Standard), PerTensor),
        (policy(NEAREST, BlockScaling::Headroom), PerRow),
        (policy(NEAREST, mae), PerTensor),
        (policy(NEAREST, mse), PerRow),
        (transformed(HadamardSize::H16, STOCHASTIC), PerTensor),
    ]
}

/// Returns policies of a columnwise tensor.
fn col_policies() -> Vec<Policy> {
    let mut all = policies();
    all.push((
        QuantParams {
            hadamard: Some(Hadamard::default()),
            ..QuantParams::nvfp4(NEAREST)
        },
        AmaxGranularity::PerTensor,
    ));
    for size in [HadamardSize::H32, HadamardSize::H128] {
        all.push((transformed(size, STOCHASTIC), AmaxGranularity::PerTensor));
    }
    all
}

/// A policy with the amax values that it requires.
struct Copy {
    policy: QuantParams,
    scope: AmaxGranularity,
    amax: Handle,
}

impl Copy {
    fn new(client: &Client, x: &Matrix, usage: Usage, (policy, scope): Policy) -> Self {
        // No kernel computes the amax of a rowwise transform: any bound of the values works.
        let request = AmaxRequest::along(usage, scope, policy.hadamard);
        let found = quantize::amaxes(client, x, &Groups::One, &request).unwrap();
        Self {
            policy,
            scope,
            amax: found.rows.or(found.cols).unwrap(),
        }
    }

    fn request(&self) -> TargetSpec {
        quantize::target(&self.amax, self.scope, self.policy)
    }
}

/// Returns the quantized tensors of `x` in these forms.
fn copies(
    client: &Client,
    x: &Matrix,
    row: Option<(&Copy, StoredForm)>,
    col: Option<(&Copy, StoredForm)>,
) -> [Option<DeviceQuantized>; 2] {
    let requests = [row, col].map(|copy| copy.map(|(copy, form)| (copy.request(), form)));
    let [row, col] = requests
        .each_ref()
        .map(|copy| copy.as_ref().map(|(request, form)| (request, *form)));
    let (row, col) = quantize::quantize_operands(client, x, row, col).unwrap();
    [row, col]
}

/// Asserts that `decoded` contains the values that the oracle decodes from `packed`.
fn assert_values(client: &Client, packed: DeviceQuantized, decoded: DeviceQuantized, what: &str) {
    assert!(packed.is_packed(), "{what}");
    let values = decoded.values().expect("values");
    let blocks = packed.code_blocks();
    let shape = (packed.outer(), packed.blocks() * BLOCK);
    assert_eq!((values.rows, values.cols), shape, "{what}");
    let codes = read_bytes(client, &packed.codes, blocks * 8);
    let scales = read_bytes(client, &packed.scales, blocks);
    let mut expected = vec![0.0; blocks * BLOCK];
    reference::decode_blocks_into(&codes, &scales, &mut expected);
    // Exact, so nothing is rounded here.
    let expected: Vec<bf16> = expected.into_iter().map(bf16::from_f32).collect();
    let found: Vec<bf16> = read_matrix(client, &values);
    assert_floats(&found, &expected, what);
}

/// Returns the bytes of the codes, the scales and the amax values of a packed tensor.
fn packed_bytes(client: &Client, copy: &DeviceQuantized) -> [Vec<u8>; 3] {
    let blocks = copy.code_blocks();
    [
        read_bytes(client, &copy.codes, blocks * 8),
        read_bytes(client, &copy.scales, blocks),
        read_bytes(client, &copy.amax, copy.amax_len() * 4),
    ]
}

/// Checks that one read of `x` gives the rowwise tensor `packed`, and its values.
fn check_both_storages(
    client: &Client,
    x: &Matrix,
    row: &Copy,
    packed: &DeviceQuantized,
    what: &str,
) {
    let (found, values) =
        quantize::quantize_in_both_storages(client, x, &row.request()).expect(what);
    assert_eq!(found.layout, packed.layout, "{what}");
    let [bytes, expected] = [&found, packed].map(|copy| packed_bytes(client, copy));
    assert!(bytes == expected, "{what}");
    let amax = read_bytes(client, &values.amax, values.amax_len() * 4);
    assert_bytes(&amax, &expected[2], what);
    assert_values(client, found, values, what);
}

/// Checks one tensor alone, both from one read in every pair of forms, and the rowwise one in both
/// forms.
fn check<T: DeviceElement>(
    client: &Client,
    x: &[T],
    (rows, cols): (usize, usize),
    row: Policy,
    col: Policy,
) {
    let what = format!("{rows}x{cols} {:?} row {row:?} col {col:?}", T::KIND);
    let x = upload(client, x, rows, cols);
    let row = &Copy::new(client, &x, Usage::Rowwise, row);
    let col = &Copy::new(client, &x, Usage::Columnwise, col);
    const PACKED: StoredForm = StoredForm::Rows;
    use StoredForm::Bf16Unscaled;
    // The rowwise kernel, the other one with both tensors as values, and all forms for the first
    // policy.
    let mut forms = vec![
        (Some(PACKED), Some(PACKED)),
        (Some(Bf16Unscaled), None),
        (Some(Bf16Unscaled), Some(Bf16Unscaled)),
    ];
    if row.policy == policies()[0].0 {
        forms.extend([
            (None, Some(Bf16Unscaled)),
            (Some(Bf16Unscaled), Some(PACKED)),
            (Some(PACKED), Some(Bf16Unscaled)),
        ]);
    }
    let mut made = forms.iter().map(|(for_row, for_col)| {
        let row = for_row.map(|form| (row, form));
        copies(client, &x, row, for_col.map(|form| (col, form)))
    });
    let packed = made.next().expect("the first are codes");
    let of_rows = packed[0].as_ref().expect("asked for");
    check_both_storages(client, &x, row, of_rows, &format!("{what}: both forms"));
    for (found, forms) in made.zip(&forms[1..]) {
        let forms = [forms.0, forms.1];
        for (i, (found, form)) in found.into_iter().zip(forms).enumerate() {
            let expected = packed[i].clone().unwrap();
            let what = format!("{what}: {forms:?}, copy {i}");
            match (found, form) {
                (Some(found), Some(Bf16Unscaled)) => assert_values(client, expected, found, &what),
                (Some(found), Some(PACKED)) => {
                    let [found, expected] =
                        [found, expected].map(|copy| packed_bytes(client, &copy));
                    assert!(found == expected, "{what}");
                }
                (None, None) => {}
                _ => panic!("{what}: a copy that was not asked for, or none that was"),
            }
        }
    }
}

/// Checks matrices of all `shapes` with the first `count` policies.
fn check_policies<T: DeviceElement>(client: &Client, shapes: &[(usize, usize)], count: usize) {
    for (i, &(rows, cols)) in shapes.iter().enumerate() {
        let x = convert::<T>(&values(Kind::Heavy, rows * cols, i as u32));
        let rows_of = policies().into_iter().cycle();
        for (row, col) in rows_of.zip(col_policies()).take(count) {
            check(client, &x, (rows, cols), row, col);
        }
    }
}

const SHAPES: [(usize, usize); 5] = [(1, 16), (3, 48), (33, 80), (257, 144), (128, 128)];

#[test]
fn every_policy_f32() {
    check_policies::<f32>(&client!("every_policy_f32"), &SHAPES[1..4], 2);
}

#[test]
fn every_policy_bf16() {
    check_policies::<bf16>(&client!("every_policy_bf16"), &SHAPES, usize::MAX);
}

#[test]
fn every_policy_f16() {
    check_policies::<f16>(&client!("every_policy_f16"), &SHAPES[2..3], 2);
}

/// NaN, infinities, zeros, subnormals and every threshold.
#[test]
fn special_values() {
    let client = client!("special_values");
    let shape = (48, 80);
    for (i, kind) in ALL_KINDS.into_iter().enumerate() {
        let x = convert::<bf16>(&values(kind, shape.0 * shape.1, 40 + i as u32));
        for (row, col) in policies().into_iter().zip(col_policies()) {
            check(&client, &x, shape, row, col);
        }
    }
}

/// More blocks than a grid of rowwise tensors has units, and columns that end within a tile.
#[test]
fn many_blocks() {
    let client = client!("many_blocks");
    let shape = match client.name() {
        "cuda" => (4099, 1936),
        _ => (515, 272),
    };
    let x = convert::<bf16>(&values(Kind::Normal, shape.0 * shape.1, 3));
    let all = policies();
    check(&client, &x, shape, all[0], all[5]);
}

fn bits(client: &Client, matrix: &Matrix) -> Vec<u8> {
    read_bytes(client, &matrix.handle, matrix.len() * matrix.dtype.size())
}

/// GEMMs of either form give the same bits: with one amax and one per row, padded K, on the
/// device's path, and on Hopper by the plan that decodes.
#[test]
fn products_have_the_same_bits() {
    let client = client!("products_have_the_same_bits");
    let hopper = Capabilities::of(&client).gemm == GemmBackend::Sm90Wgmma;
    let shapes = match hopper {
        true => vec![(1024, 512, 1024), (200, 136, 77), (4096, 4096, 2048)],
        false => vec![(40, 24, 64), (24, 16, 37)],
    };
    let scopes = [AmaxGranularity::PerTensor, AmaxGranularity::PerRow];
    for (i, (m, n, k)) in shapes.into_iter().enumerate() {
        for (scope, usage) in scopes.into_iter().zip([Usage::Columnwise, Usage::Rowwise]) {
            // Only columnwise tensors are padded.
            let k = match usage {
                Usage::Rowwise => usize::next_multiple_of(k, 16),
                Usage::Columnwise => k,
            };
            let operand = |outer: usize, rounding, seed| {
                let (rows, cols) = usage.stored_shape(outer, k);
                let x = convert::<bf16>(&values(Kind::Normal, outer * k, seed));
                let x = upload(&client, &x, rows, cols);
                let copy = Copy::new(&client, &x, usage, (QuantParams::nvfp4(rounding), scope));
                [StoredForm::Rows, StoredForm::Bf16Unscaled].map(|form| {
                    let asked = Some((&copy, form));
                    let [row, col] = match usage {
                        Usage::Rowwise => copies(&client, &x, asked, None),
                        Usage::Columnwise => copies(&client, &x, None, asked),
                    };
                    row.or(col).unwrap()
                })
            };
            let [a, a_values] = operand(m, NEAREST, 7 + i as u32);
            let [b, b_values] = operand(n, STOCHASTIC, 70 + i as u32);
            let plans = match hopper {
                true => vec![
                    Some(Plan::from(DequantThenBf16(Sm90Tile::N256, 16))),
                    Some(Plan::from(DequantThenBf16(Sm90Tile::N64, 16))),
                ],
                false => vec![None],
            };
            for plan in plans {
                let run = |a: &DeviceQuantized, b: &DeviceQuantized| {
                    let path = plan.map(|_| GemmBackend::Sm90Wgmma);
                    let target = Target::New(FloatKind::F32);
                    let out = multiply(
                        &client,
                        Gemm::new(a, b).target(target).backend(path).plan(plan),
                    )
                    .unwrap();
                    bits(&client, &out)
                };
                let expected = run(&a, &b);
                assert!(expected.iter().any(|byte| *byte != 0));
                for (a, b) in [(&a_values, &b), (&a, &b_values), (&a_values, &b_values)] {
                    assert!(run(a, b) == expected, "{m} x {n} x {k} {scope:?} {plan:?}");
                }
            }
        }
    }
}

/// On a GPU that decodes before it multiplies, the values are those that it would have decoded.
#[test]
fn values_are_those_of_the_workspace() {
    let client = hopper!("values_are_those_of_the_workspace");
    let (rows, cols) = (320, 208);
    for (i, kind) in ALL_KINDS.into_iter().enumerate() {
        let x = convert::<bf16>(&values(kind, rows * cols, i as u32));
        let x = upload(&client, &x, rows, cols);
        for (row, col) in policies().into_iter().zip(policies()) {
            let row = &Copy::new(&client, &x, Usage::Rowwise, row);
            let col = &Copy::new(&client, &x, Usage::Columnwise, col);
            let both = quantize::quantize_in_both_storages(&client, &x, &row.request());
            let (packed, values) = both.unwrap();
            let values = values.values().unwrap();
            let expected = read_bytes(&client, &decode(&client, &packed), values.len() * 2);
            let what = format!("{kind:?} both forms {:?}", row.policy);
            assert_bytes(&bits(&client, &values), &expected, &what);
            let made = |form| copies(&client, &x, Some((row, form)), Some((col, form)));
            for (packed, decoded) in made(StoredForm::Rows)
                .into_iter()
                .zip(made(StoredForm::Bf16Unscaled))
            {
                let packed = packed.unwrap();
                let values = decoded.unwrap().values().unwrap();
                let len = values.len() * 2;
                let expected = read_bytes(&client, &decode(&client, &packed), len);
                let what = format!("{kind:?} {:?} {:?}", packed.usage(), row.policy);
                assert_bytes(&bits(&client, &values), &expected, &what);
            }
        }
    }
}

#[test]
fn what_values_cannot_be_is_refused() {
    let client = client!("what_values_cannot_be_is_refused");
    let wide = upload(&client, &vec![1.0f32; 256], 16, 16);
    let narrow = upload(&client, &vec![1.0f32; 128], 16, 8);
    let amax = quantize::amax(&client, &wide, None).unwrap();
    let request = |params: QuantParams| quantize::target(&amax, AmaxGranularity::PerTensor, params);
    let argument = |found: Result<(), Nvfp4Error>| match found {
        Err(Nvfp4Error::Value { argument, .. } | Nvfp4Error::Shape { argument, .. }) => argument,
        other => panic!("{other:?}"),
    };
    let swizzled = request(QuantParams::nvfp4(NEAREST)).form(StoredForm::Tiles);
    let four_over_six = BlockScaling::FourOverSix(ErrorNorm::Mae);
    for (x, request, expected) in [
        (&wide, swizzled, "form"),
        (
            &narrow,
            request(policy(NEAREST, BlockScaling::Standard)),
            "x",
        ),
        (
            &wide,
            request(policy(STOCHASTIC, four_over_six)),
            "rounding",
        ),
    ] {
        let found = quantize::quantize_in_both_storages(&client, x, &request).map(drop);
        assert_eq!(argument(found), expected);
    }
}

/// A matrix without rows has both forms, too.
#[test]
fn an_empty_matrix_has_both_storages() {
    let client = client!("an_empty_matrix_has_both_storages");
    let x = upload::<f32>(&client, &[], 0, 32);
    let amax = client.create_from_slice(&0f32.to_le_bytes());
    let row = Copy {
        policy: QuantParams::nvfp4(NEAREST),
        scope: AmaxGranularity::PerTensor,
        amax,
    };
    let (packed, values) =
        quantize::quantize_in_both_storages(&client, &x, &row.request()).unwrap();
    assert_eq!(packed.code_blocks(), 0);
    let values = values.values().unwrap();
    assert_eq!((values.rows, values.cols), (0, 32));
}
