//! MXFP8, MS-EDEN and decoding of groups of rows, and of tensors with one amax per stored row or
//! with swizzled scales, compared byte for byte with the oracle on each separate group; on CubeCL's
//! CPU runtime or on a GPU (`NVFP4_TEST_DEVICE`).

use crate::support::device::{
    DeviceElement, assert_bytes, assert_floats, is_brief, offsets, read_bytes, read_matrix,
    read_u32, upload, upload_bytes,
};
use crate::support::inputs::{Kind, convert, values};
use crate::support::policies::{COMPACT, NEAREST, PLAIN, Policy, SWIZZLED, policy, transformed};
use crate::support::quantize::{self, EdenSource};
use cubecl::{prelude::*, server::Handle};
use half::{bf16, f16};
use nvfp4_formats::{
    Amax, AmaxGranularity, BLOCK, BlockScaling, ErrorNorm, Format, Hadamard, HadamardSize,
    Nvfp4Error, RandomStream, StoredForm, Usage,
    reference::{self, EdenParams, Element},
};
use nvfp4_kernels::tensor::{DeviceQuantized, FloatKind, Groups};

const USAGES: [Usage; 2] = [Usage::Rowwise, Usage::Columnwise];
const STREAM: RandomStream = RandomStream::new(0x1234_5678_9abc_def0, 3, 0xffff_fffe);

fn hadamard() -> Hadamard {
    Hadamard::seeded_with_size(HadamardSize::H128, 77)
}

/// Rows in groups, and rows after the last group.
struct Case {
    sizes: Vec<usize>,
    rest: usize,
    cols: usize,
    groups: Groups,
}

impl Case {
    fn new(client: &Client, sizes: &[usize], rest: usize, cols: usize) -> Self {
        Self {
            sizes: sizes.to_vec(),
            rest,
            cols,
            groups: offsets(client, sizes),
        }
    }

    fn batch(count: usize, each: usize, cols: usize) -> Self {
        Self {
            sizes: vec![each; count],
            rest: 0,
            cols,
            groups: Groups::Batch(count),
        }
    }

    fn one(rows: usize, cols: usize) -> Self {
        Self {
            sizes: vec![rows],
            rest: 0,
            cols,
            groups: Groups::One,
        }
    }

    fn rows(&self) -> usize {
        self.sizes.iter().sum::<usize>() + self.rest
    }

    fn values(&self, kind: Kind) -> Vec<f32> {
        values(kind, self.rows() * self.cols, self.rows() as u32)
    }

    /// Returns the rows of each group, and their number.
    fn split<'a, T>(&self, x: &'a [T]) -> Vec<(&'a [T], usize)> {
        let mut rest = x;
        let parts = self.sizes.iter().map(|&rows| {
            let (part, behind) = rest.split_at(rows * self.cols);
            rest = behind;
            (part, rows)
        });
        parts.collect()
    }

    /// Asserts the location in `found` of the groups' quantized tensors, in bytes: columnwise
    /// tensors with offsets are joined along the stored rows, all others follow one another.
    fn assert_lie(&self, found: &[u8], copies: &[Vec<u8>], usage: Usage, what: &str) {
        if matches!(self.groups, Groups::Offsets { .. }) && usage == Usage::Columnwise {
            let pitch = found.len() / self.cols;
            for (col, row) in found.chunks(pitch.max(1)).enumerate() {
                let parts = copies.iter().map(|copy| {
                    let width = copy.len() / self.cols;
                    &copy[col * width..][..width]
                });
                let expected = parts.collect::<Vec<_>>().concat();
                let what = format!("{what}, stored row {col}");
                assert_bytes(&row[..expected.len()], &expected, &what);
            }
        } else {
            let expected = copies.concat();
            assert_bytes(&found[..expected.len()], &expected, what);
        }
    }
}

/// Returns the bytes of bf16 values, with the same bits for every NaN: devices produce different
/// ones.
fn one_nan(bytes: &[u8]) -> Vec<u8> {
    let values = bytes.chunks_exact(2).map(bytemuck::pod_read_unaligned);
    let values = values.map(|value: bf16| if value.is_nan() { bf16::NAN } else { value });
    values.flat_map(|value| value.to_le_bytes()).collect()
}

/// Groups of any size, empty ones at the start, in the middle and at the end, odd sizes, no groups
/// with rows; rows of no group; 3-D batches; K with and without a tail.
fn cases(client: &Client) -> Vec<Case> {
    vec![
        Case::new(client, &[0, 5, 128, 0, 129, 0], 0, 80),
        Case::new(client, &[16, 33, 64, 7], 9, 16),
        Case::new(client, &[1, 1, 1], 0, 144),
        Case::new(client, &[0, 0, 0], 3, 32),
        Case::new(client, &[300], 0, 128),
        Case::one(150, 144),
        Case::batch(3, 16, 32),
        Case::batch(2, 33, 80),
        Case::batch(4, 130, 48),
    ]
}

fn assert_mx<T: Element>(
    client: &Client,
    found: &DeviceQuantized,
    case: &Case,
    parts: &[(&[T], usize)],
    usage: Usage,
    what: &str,
) {
    let expected: Vec<_> = parts
        .iter()
        .map(|(part, rows)| {
            reference::mx_quantize(part, *rows, case.cols, usage, Format::Mxfp8).unwrap()
        })
        .collect();
    let blocks = found.outer() * found.blocks();
    for (name, handle, len, copies) in [
        (
            "codes",
            &found.codes,
            blocks * 32,
            expected.iter().map(|mx| mx.codes().to_vec()).collect(),
        ),
        (
            "scales",
            &found.scales,
            blocks,
            expected
                .iter()
                .map(|mx| mx.scales().to_vec())
                .collect::<Vec<_>>(),
        ),
    ] {
        let what = format!("{what} {:?} along {usage:?}: {name}", case.sizes);
        case.assert_lie(&read_bytes(client, handle, len), &copies, usage, &what);
    }
}

fn read_floats(client: &Client, handle: &Handle, len: usize) -> Vec<f32> {
    let bits = read_u32(client, handle, len);
    bits.into_iter().map(f32::from_bits).collect()
}

fn assert_eden<'a, T: Element>(
    client: &Client,
    source: impl EdenSource<'a>,
    case: &Case,
    parts: &[(&[T], usize)],
    usage: Usage,
    what: &str,
) {
    let (source, hadamard) = (&source.request(), hadamard());
    let what = format!("{what} {:?} along {usage:?}", case.sizes);
    let count = case.sizes.len();
    let maxima: Vec<f32> = parts
        .iter()
        .map(|(x, rows)| reference::ms_eden_amax(x, *rows, case.cols, usage, &hadamard).unwrap())
        .collect();
    let amax = quantize::ms_eden_amax(client, source, usage, &hadamard).unwrap();
    assert_floats(&read_floats(client, &amax, count), &maxima, &what);
    let mut first = 0;
    let expected: Vec<_> = parts
        .iter()
        .zip(&maxima)
        .map(|((x, rows), amax)| {
            let packed = reference::ms_eden_at(
                x,
                *rows,
                case.cols,
                usage,
                *amax,
                &EdenParams {
                    hadamard,
                    stream: STREAM,
                },
                first,
            )
            .unwrap();
            first += (packed.scales().len() / 8) as u64;
            packed
        })
        .collect();
    let found = quantize::ms_eden(client, source, usage, &amax, &hadamard, STREAM).unwrap();
    let blocks = found.code_blocks();
    let codes = expected.iter().map(|packed| packed.codes().to_vec());
    let codes: Vec<_> = codes.collect();
    let scales = expected.iter().map(|packed| packed.scales().to_vec());
    let scales: Vec<_> = scales.collect();
    let read = read_bytes(client, &found.codes, blocks * 8);
    case.assert_lie(&read, &codes, usage, &format!("{what}: codes"));
    let read = read_bytes(client, &found.scales, blocks);
    case.assert_lie(&read, &scales, usage, &format!("{what}: scales"));
    let decoding: Vec<f32> = maxima
        .iter()
        .map(|amax| reference::eden_amax(*amax))
        .collect();
    assert_floats(&read_floats(client, &found.amax, count), &decoding, &what);

    let made = |form| {
        let (signs, random) = (&hadamard, STREAM);
        quantize::ms_eden_as(client, source, usage, &amax, signs, random, form)
    };
    let found = made(StoredForm::Bf16Unscaled).unwrap();
    let values = expected.iter().map(|packed| {
        let mut values = vec![0.0; packed.codes().len() * 2];
        reference::decode_blocks_into(packed.codes(), packed.scales(), &mut values);
        let values: Vec<bf16> = values.into_iter().map(bf16::from_f32).collect();
        one_nan(bytemuck::cast_slice(&values))
    });
    let values: Vec<_> = values.collect();
    let read = one_nan(&read_bytes(
        client,
        &found.codes,
        found.code_blocks() * BLOCK * 2,
    ));
    case.assert_lie(&read, &values, usage, &format!("{what}: unscaled"));

    // Groups joined along the stored rows are tested in `scale_tiles`.
    if matches!(case.groups, Groups::Offsets { .. }) && usage == Usage::Columnwise {
        return;
    }
    let found = made(StoredForm::Tiles).unwrap();
    let scales = expected.iter().map(|packed| {
        reference::swizzle::swizzle(packed.scales(), packed.outer(), packed.blocks())
    });
    let scales = scales.collect::<Vec<_>>().concat();
    let read = read_bytes(client, &found.scales, found.scale_bytes());
    let what = format!("{what} swizzled");
    assert_bytes(&read[..scales.len()], &scales, &format!("{what}: scales"));
    let read = read_bytes(client, &found.codes, found.code_blocks() * 8);
    case.assert_lie(&read, &codes, usage, &format!("{what}: codes"));
    assert_floats(&read_floats(client, &found.amax, count), &decoding, &what);
}

fn check_matrices<T: DeviceElement>(client: &Client) {
    for case in cases(client) {
        let x = convert::<T>(&case.values(Kind::Heavy));
        let matrix = upload(client, &x, case.rows(), case.cols);
        let parts = case.split(&x);
        for usage in USAGES {
            let what = format!("{:?}", T::KIND);
            let found =
                quantize::mx_quantize_groups(client, &matrix, &case.groups, usage, Format::Mxfp8)
                    .unwrap();
            assert_mx(client, &found, &case, &parts, usage, &what);
            let source = (&matrix, &case.groups);
            assert_eden(client, source, &case, &parts, usage, &what);
        }
    }
}

element_tests! {
    check_matrices: matrices_f32, matrices_bf16, matrices_f16;
}

fn host_amax(x: &[f32], rows: usize, cols: usize, usage: Usage, scope: AmaxGranularity) -> Amax {
    match (scope, usage) {
        (AmaxGranularity::PerTensor, _) => Amax::Tensor(reference::amax(x)),
        (AmaxGranularity::PerRow, Usage::Rowwise) => {
            Amax::PerRow(reference::amax_rows(x, rows, cols))
        }
        (AmaxGranularity::PerRow, Usage::Columnwise) => {
            Amax::PerRow(reference::amax_cols(x, rows, cols))
        }
    }
}

/// Returns a copy of `memory`, all bytes of which are written.
fn written(client: &Client, memory: &Handle) -> Handle {
    upload_bytes(client, &client.read_one(memory.clone()).unwrap())
}

/// Returns the packed groups on the device, and the values that each of them represents.
fn packed(
    client: &Client,
    case: &Case,
    x: &[f32],
    usage: Usage,
    (policy, scope): (Policy, AmaxGranularity),
) -> (DeviceQuantized, Vec<Vec<f32>>) {
    let matrix = upload(client, x, case.rows(), case.cols);
    let mut all = Vec::new();
    let mut decoded = Vec::new();
    for (part, rows) in case.split(x) {
        let amax = host_amax(part, rows, case.cols, usage, scope);
        all.extend(amax.values());
        let packed =
            reference::quantize(part, rows, case.cols, usage, &amax, &policy.0, 0).unwrap();
        decoded.push(reference::dequantize(&packed));
    }
    if (scope, usage) == (AmaxGranularity::PerRow, Usage::Rowwise) {
        all.resize(case.rows(), 1.0);
    }
    let amax = upload_bytes(client, bytemuck::cast_slice(&all));
    let request = quantize::target(&amax, scope, policy);
    let mut packed = quantize::quantize(client, &matrix, &case.groups, usage, &request).unwrap();
    // Rows of no group are not written, but dequantizing whole matrices reads them: initcheck must
    // not report these reads, only others.
    packed.codes = written(client, &packed.codes);
    packed.scales = written(client, &packed.scales);
    (packed, decoded)
}

/// Dequantizes a packed source, and quantizes it again along both axes.
fn check_packed(
    client: &Client,
    case: &Case,
    kind: Kind,
    usage: Usage,
    copy: (Policy, AmaxGranularity),
) {
    let x = case.values(kind);
    let (packed, decoded) = packed(client, case, &x, usage, copy);
    let what = format!("{kind:?} {copy:?} packed along {usage:?},");
    let ragged = matches!(case.groups, Groups::Offsets { .. }) && usage == Usage::Columnwise;

    let expected = decoded.concat();
    let sizes = format!("{what} {:?}", case.sizes);
    let found = quantize::dequantize(client, &packed, FloatKind::F32).unwrap();
    let found = read_matrix::<f32>(client, &found);
    assert_floats(&found[..expected.len()], &expected, &sizes);
    let found = quantize::dequantize(client, &packed, FloatKind::Bf16).unwrap();
    let found = read_matrix::<bf16>(client, &found);
    assert_floats(
        &found[..expected.len()],
        &convert::<bf16>(&expected),
        &sizes,
    );

    let rounded: Vec<_> = decoded.iter().map(|x| convert::<bf16>(x)).collect();
    let sized = |(x, rows): (_, &usize)| (x, *rows);
    let exact: Vec<(&[f32], usize)> = decoded
        .iter()
        .map(Vec::as_slice)
        .zip(&case.sizes)
        .map(sized)
        .collect();
    let rounded: Vec<(&[bf16], usize)> = rounded
        .iter()
        .map(|x| x.as_slice())
        .zip(&case.sizes)
        .map(|(x, rows)| (x, *rows))
        .collect();
    for to in USAGES {
        let found = quantize::mx_requantize(client, &packed, to, Format::Mxfp8, FloatKind::Bf16);
        if ragged {
            assert_refused(found, "packed");
        } else {
            assert_mx(client, &found.unwrap(), case, &rounded, to, &what);
        }
        if ragged {
            assert_refused(
                quantize::ms_eden_amax(client, &packed, to, &hadamard()),
                "source",
            );
        } else {
            assert_eden(client, &packed, case, &exact, to, &what);
        }
    }
}

fn assert_refused<T>(found: Result<T, Nvfp4Error>, argument: &str) {
    let error = found.err().expect("an error");
    assert!(matches!(error, Nvfp4Error::Value { .. }), "{error:?}");
    assert!(error.to_string().contains(argument), "{error}");
}

#[test]
fn packed_along_rows() {
    let client = client!("packed_along_rows");
    for case in cases(&client) {
        check_packed(
            &client,
            &case,
            Kind::Heavy,
            Usage::Rowwise,
            (PLAIN, AmaxGranularity::PerTensor),
        );
        check_packed(
            &client,
            &case,
            Kind::Heavy,
            Usage::Rowwise,
            (PLAIN, AmaxGranularity::PerRow),
        );
    }
}

#[test]
fn packed_along_columns() {
    let client = client!("packed_along_columns");
    for case in cases(&client) {
        check_packed(
            &client,
            &case,
            Kind::Heavy,
            Usage::Columnwise,
            (PLAIN, AmaxGranularity::PerTensor),
        );
        check_packed(
            &client,
            &case,
            Kind::Heavy,
            Usage::Columnwise,
            (PLAIN, AmaxGranularity::PerRow),
        );
    }
}

/// Padding of a transform extends past the last block of 16, and is not zero.
#[test]
fn padding_of_transforms() {
    let client = client!("padding_of_transforms");
    for case in [
        Case::one(33, 48),
        Case::batch(2, 70, 32),
        Case::new(&client, &[0, 33, 129, 0, 1], 2, 32),
    ] {
        for size in [HadamardSize::H16, HadamardSize::H64] {
            let copy = (transformed(size, NEAREST), AmaxGranularity::PerTensor);
            check_packed(&client, &case, Kind::Normal, Usage::Columnwise, copy);
        }
    }
}

/// One amax per stored row, or scales in 128x4 tiles, with and without groups.
#[test]
fn other_scales() {
    let client = client!("other_scales");
    let four_over_six = BlockScaling::FourOverSix(ErrorNorm::Mae);
    let swizzled = policy(NEAREST, BlockScaling::Standard, SWIZZLED);
    let mut cases = vec![
        Case::new(&client, &[0, 40, 129, 0], 0, 80),
        Case::batch(2, 33, 48),
    ];
    // Tests of `quantize` cover one matrix.
    if !is_brief(&client) {
        cases.push(Case::one(150, 80));
    }
    for case in cases {
        for usage in USAGES {
            for copy in [
                (
                    policy(NEAREST, four_over_six, COMPACT),
                    AmaxGranularity::PerRow,
                ),
                (
                    policy(NEAREST, four_over_six, COMPACT),
                    AmaxGranularity::PerTensor,
                ),
                (swizzled, AmaxGranularity::PerTensor),
                (swizzled, AmaxGranularity::PerRow),
            ] {
                check_packed(&client, &case, Kind::Normal, usage, copy);
            }
        }
    }
}

/// Non-finite values in one group do not affect other groups.
#[test]
fn special_values_stay_in_their_group() {
    let client = client!("special_values_stay_in_their_group");
    for kind in [
        Kind::Nan,
        Kind::Infinity,
        Kind::Zeros,
        Kind::Tiny,
        Kind::Huge,
    ] {
        let case = Case::new(&client, &[20, 0, 31, 40], 0, 48);
        for usage in USAGES {
            for scope in [AmaxGranularity::PerTensor, AmaxGranularity::PerRow] {
                check_packed(&client, &case, kind, usage, (PLAIN, scope));
            }
        }
        let case = Case::batch(3, 31, 48);
        check_packed(
            &client,
            &case,
            kind,
            Usage::Columnwise,
            (PLAIN, AmaxGranularity::PerTensor),
        );
    }
}

#[test]
fn repeated_launches_agree() {
    let client = client!("repeated_launches_agree");
    let case = Case::new(&client, &[0, 37, 128, 5, 0], 0, 80);
    let copy = (PLAIN, AmaxGranularity::PerTensor);
    let (packed, decoded) = packed(
        &client,
        &case,
        &case.values(Kind::Heavy),
        Usage::Rowwise,
        copy,
    );
    let parts: Vec<(&[f32], usize)> = decoded
        .iter()
        .zip(&case.sizes)
        .map(|(x, rows)| (x.as_slice(), *rows))
        .collect();
    for _ in 0..100 {
        assert_eden(
            &client,
            &packed,
            &case,
            &parts,
            Usage::Columnwise,
            "repeated",
        );
    }
}

#[test]
fn errors_name_the_argument() {
    let client = client!("errors_name_the_argument");
    let x = upload::<f32>(&client, &[0.0; 160], 5, 32);
    let groups = Groups::Batch(2);
    let error =
        quantize::mx_quantize_groups(&client, &x, &groups, Usage::Columnwise, Format::Mxfp8)
            .unwrap_err();
    assert!(error.to_string().contains("groups"), "{error}");
    let source = (&x, &groups);
    let error =
        quantize::ms_eden_amax(&client, source, Usage::Columnwise, &hadamard()).unwrap_err();
    assert!(error.to_string().contains("groups"), "{error}");
    let groups = offsets(&client, &[2, 3]);
    let source = (&x, &groups);
    let one = upload_bytes(&client, &[0; 4]);
    let usage = Usage::Columnwise;
    let error = quantize::ms_eden(&client, source, usage, &one, &hadamard(), STREAM).unwrap_err();
    assert!(error.to_string().contains("amax"), "{error}");
}
