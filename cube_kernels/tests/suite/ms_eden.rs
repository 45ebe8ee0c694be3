//! MS-EDEN kernels compared with the oracle byte for byte, on CubeCL's CPU runtime or on a GPU
//! (`NVFP4_TEST_DEVICE`).

use crate::support::device;
use crate::support::device::{
    DeviceElement, assert_bytes, assert_floats, assert_packed, read_f32, read_matrix, upload,
};
use crate::support::gemm::multiply;
use crate::support::inputs::{ALL_KINDS, Kind, convert, values};
use crate::support::quantize::{self, EdenSource, Quantize, TargetSpec};
use cubecl::{prelude::*, server::Handle};
use half::{bf16, f16};
use nvfp4_formats::{
    Amax, AmaxGranularity, BLOCK, EdenDraw, Hadamard, HadamardSize, QuantParams, QuantRounding,
    QuantizedTensor, RandomStream, Rounding, StoredForm, Usage,
    reference::{self, EdenParams, Element},
};
use nvfp4_kernels::{
    gemm::Gemm,
    tensor::{DeviceQuantized, FloatKind, Matrix},
};

const USAGES: [Usage; 2] = [Usage::Rowwise, Usage::Columnwise];
const STREAM: RandomStream = RandomStream::new(0x1234_5678_9abc_def0, 3, 0xffff_fffe);

fn hadamard() -> Hadamard {
    Hadamard::seeded_with_size(HadamardSize::H128, 77)
}

fn params(stream: RandomStream) -> EdenParams {
    EdenParams {
        hadamard: hadamard(),
        stream,
    }
}

/// Checks both kernels on one source, against the oracle on the values that it represents.
fn check<T: Element>(
    client: &Client,
    source: &Quantize<'_>,
    x: &[T],
    (rows, cols): (usize, usize),
    what: &str,
) {
    for usage in USAGES {
        let what = format!("{what} {rows}x{cols} along {usage:?}");
        let amax = reference::ms_eden_amax(x, rows, cols, usage, &hadamard()).unwrap();
        let found = quantize::ms_eden_amax(client, source, usage, &hadamard()).unwrap();
        let read = read_f32(client, &found);
        assert!(
            read.to_bits() == amax.to_bits() || (read.is_nan() && amax.is_nan()),
            "{what}: amax {read:e} != {amax:e}"
        );
        let expected = reference::ms_eden(x, rows, cols, usage, amax, &params(STREAM)).unwrap();
        let found = quantize::ms_eden(client, source, usage, &found, &hadamard(), STREAM).unwrap();
        assert_packed(client, &found, &expected, &what);
        let hadamard = &hadamard();
        let amax = &quantize::ms_eden_amax(client, source, usage, hadamard).unwrap();
        let made = |form| {
            quantize::ms_eden_as(client, source, usage, amax, hadamard, STREAM, form).unwrap()
        };
        let unscaled = made(StoredForm::Bf16Unscaled);
        assert_unscaled(client, &unscaled, &expected, &what);
    }
}

/// Asserts that the values of `found` are exactly those of the codes and scales of `expected`.
fn assert_unscaled(
    client: &Client,
    found: &DeviceQuantized,
    expected: &QuantizedTensor,
    what: &str,
) {
    let mut values = vec![0.0; expected.codes().len() * 2];
    reference::decode_blocks_into(expected.codes(), expected.scales(), &mut values);
    let values: Vec<bf16> = values.into_iter().map(bf16::from_f32).collect();
    let matrix = found.values().expect("values");
    let shape = (expected.outer(), expected.blocks() * BLOCK);
    assert_eq!((matrix.rows, matrix.cols), shape, "{what}");
    let read: Vec<bf16> = read_matrix(client, &matrix);
    assert_floats(&read, &values, &format!("{what}, unscaled"));
    let read = read_f32(client, &found.amax);
    assert_floats(&[read], expected.amax().values(), &format!("{what}: amax"));
}

fn check_matrix<T: DeviceElement>(client: &Client, x: &[T], rows: usize, cols: usize, what: &str) {
    let matrix = upload(client, x, rows, cols);
    let what = format!("{what} {:?}", T::KIND);
    check(client, &matrix.request(), x, (rows, cols), &what);
    check_amax_pair(client, &matrix, x, &what);
}

/// Checks the amax values along and across the rows, for transforms with different signs, computed
/// together.
fn check_amax_pair<T: Element>(client: &Client, matrix: &Matrix, x: &[T], what: &str) {
    let transforms = [
        hadamard(),
        Hadamard::seeded_with_size(HadamardSize::H128, 78),
    ];
    let asked = transforms.each_ref();
    let found = quantize::ms_eden_amax_pair(client, matrix, asked).unwrap();
    for ((found, usage), transform) in found.iter().zip(USAGES).zip(&transforms) {
        let (rows, cols) = (matrix.rows, matrix.cols);
        let expected = reference::ms_eden_amax(x, rows, cols, usage, transform).unwrap();
        let read = read_f32(client, found);
        assert!(
            read.to_bits() == expected.to_bits() || (read.is_nan() && expected.is_nan()),
            "{what} {rows}x{cols} along {usage:?}, of a pair: amax {read:e} != {expected:e}"
        );
    }
}

/// Tiles whose largest values differ by little or not at all, at any position of the larger one:
/// the result must not depend on which of them the exact kernel examines.
#[test]
fn amax_pair_of_near_ties() {
    let client = client!("amax_pair_of_near_ties");
    let (rows, cols) = (288, 392);
    let tile = convert::<bf16>(&values(Kind::Normal, 16 * 16, 5));
    let at = |i: usize| tile[i / cols % 16 * 16 + i % cols % 16];
    for spike in [0, 17 * cols + 131, 160 * cols + 383, 287 * cols + 391] {
        let mut x: Vec<bf16> = (0..rows * cols).map(at).collect();
        for step in [0u16, 1, 64] {
            x[spike] = bf16::from_bits(x[spike].to_bits() + step);
            let matrix = upload(&client, &x, rows, cols);
            check_amax_pair(&client, &matrix, &x, &format!("spike {spike} {step}"));
        }
    }
}

/// Checks NVFP4 operands of all kinds that occur in a forward GEMM.
fn check_packed(client: &Client, rows: usize, cols: usize, kind: Kind) {
    let x = values(kind, rows * cols, rows as u32);
    let amax = Amax::Tensor(reference::amax(&x));
    // The padding of a transformed tensor's last block is not zero, and does not belong to the
    // matrix.
    let transform = Hadamard::default();
    let packed_col = |hadamard: Option<&Hadamard>| {
        reference::quantize_col(&x, rows, cols, &amax, &Rounding::Nearest, hadamard).unwrap()
    };
    let mut packed = vec![packed_col(None), packed_col(Some(&transform))];
    if cols.is_multiple_of(16) {
        packed.push(reference::quantize_row(&x, rows, cols, &amax, &Rounding::Nearest).unwrap());
    }
    for packed in &packed {
        let device = DeviceQuantized::from_host(client, packed);
        let x = reference::dequantize(packed);
        let what = format!("{kind:?} packed along {:?}", packed.usage());
        check(client, &device.request(), &x, (rows, cols), &what);
    }
}

const SHAPES: [(usize, usize); 12] = [
    (128, 128),
    (1, 128),
    (1, 1),
    (3, 7),
    (33, 40),
    (127, 33),
    (129, 65),
    (256, 272),
    (304, 304),
    (20, 1000),
    (1000, 20),
    (300, 160),
];

matrix_tests!(check_matrix, SHAPES, (150, 72));

#[test]
fn packed_shapes() {
    let client = client!("packed_shapes");
    for (rows, cols) in SHAPES {
        check_packed(&client, rows, cols, Kind::Heavy);
    }
}

#[test]
fn packed_kinds() {
    let client = client!("packed_kinds");
    for kind in ALL_KINDS {
        check_packed(&client, 150, 80, kind);
    }
}

#[test]
fn empty() {
    let client = client!("empty");
    for (rows, cols) in [(0, 128), (128, 0), (0, 0)] {
        check_matrix::<bf16>(&client, &[], rows, cols, "empty");
        check_packed(&client, rows, cols, Kind::Zeros);
    }
}

/// A kernel draws the same signs from the seed of the step as the host, with the carry of the
/// offset.
#[test]
fn redrawn_signs() {
    let client = client!("redrawn_signs");
    let (rows, cols, seed) = (40, 200, 0x9abc_def0_1234_5678u64);
    let x: Vec<f32> = values(Kind::Normal, rows * cols, 3);
    let matrix = upload(&client, &x, rows, cols);
    for offset in [[0u32, 0], [5, 0], [0xffff_ffff, 2]] {
        let advanced = u64::from(offset[0]) | u64::from(offset[1]) << 32;
        let own = Hadamard::seeded_with_size(HadamardSize::H128, seed);
        let draw = EdenDraw {
            stream: STREAM,
            signs: Some(seed),
        };
        let drawn = QuantParams {
            rounding: QuantRounding::MsEden(draw),
            ..QuantParams::ms_eden(own, STREAM)
        };
        let memory = client.create_from_slice(bytemuck::cast_slice(&offset));
        let target = TargetSpec::new(drawn).offset(&memory);
        let mut stream = STREAM;
        stream.offset += advanced;
        let seed = seed.wrapping_add(advanced.wrapping_mul(Hadamard::SEED_STEP));
        let hadamard = Hadamard::seeded_with_size(HadamardSize::H128, seed);
        for usage in USAGES {
            let amax = reference::ms_eden_amax(&x, rows, cols, usage, &hadamard).unwrap();
            let request = Quantize::new(&matrix).along(usage, target.clone());
            let found = request.launch_amax(&client).unwrap().amax;
            let found = found.rows.or(found.cols).unwrap();
            assert_eq!(read_f32(&client, &found).to_bits(), amax.to_bits());
            let by = EdenParams {
                hadamard,
                ..params(stream)
            };
            let expected = reference::ms_eden(&x, rows, cols, usage, amax, &by).unwrap();
            let made = request.launch(&client).unwrap().into_one();
            let what = format!("{offset:?} along {usage:?}");
            assert_packed(&client, &made, &expected, &what);
        }
    }
}

/// An offset in device memory is added to that of the stream, with its carry.
#[test]
fn device_offset() {
    let client = client!("device_offset");
    let (rows, cols) = (40, 256);
    let x = convert::<bf16>(&values(Kind::Normal, rows * cols, 2));
    let matrix = upload(&client, &x, rows, cols);
    let usage = Usage::Rowwise;
    let amax = quantize::ms_eden_amax(&client, &matrix, usage, &hadamard()).unwrap();
    let offset: Handle = client.create_from_slice(bytemuck::cast_slice(&[5u32, 7]));
    let target = TargetSpec::new(QuantParams::ms_eden(hadamard(), STREAM)).amax(&amax);
    let quantize = |target| {
        let request = Quantize::new(&matrix).along(usage, target);
        request.launch(&client).unwrap().into_one()
    };
    let found = quantize(target.clone().offset(&offset));
    let mut stream = STREAM;
    stream.offset += 5 + (7 << 32);
    let expected = reference::ms_eden(
        &x,
        rows,
        cols,
        usage,
        read_f32(&client, &amax),
        &params(stream),
    )
    .unwrap();
    assert_packed(&client, &found, &expected, "device offset");
    // Other bits round other scale bytes.
    let other = quantize(target)
        .to_host(&client, *expected.origin())
        .unwrap();
    assert_eq!(other.codes(), expected.codes());
    assert_ne!(other.scales(), expected.scales());
}

/// The GEMM of rotated operands equals that of the originals: the GEMM uses the result directly.
#[test]
fn products_survive_the_rotation() {
    let client = client!("products_survive_the_rotation");
    let (m, n, k) = (48, 32, 256);
    let a = values(Kind::Normal, m * k, 1);
    let b = values(Kind::Normal, n * k, 2);
    let quantize = |x: &[f32], rows: usize, stream: u64| {
        let matrix = upload(&client, x, rows, k);
        let usage = Usage::Rowwise;
        let amax = quantize::ms_eden_amax(&client, &matrix, usage, &hadamard()).unwrap();
        let random = RandomStream::new(1, stream, 0);
        quantize::ms_eden(&client, &matrix, usage, &amax, &hadamard(), random).unwrap()
    };
    let product = multiply(
        &client,
        Gemm::new(&quantize(&a, m, 1), &quantize(&b, n, 2)).out(FloatKind::F32),
    )
    .unwrap();
    let product = device::read_matrix::<f32>(&client, &product);
    let (mut error, mut power) = (0.0, 0.0);
    for i in 0..m {
        for j in 0..n {
            let exact: f32 = (0..k).map(|l| a[i * k + l] * b[j * k + l]).sum();
            error += (product[i * n + j] - exact).powi(2);
            power += exact * exact;
        }
    }
    // Two operands with a relative error of about 0.1 each.
    assert!(error / power < 0.04, "{}", error / power);
}

#[test]
fn repeated_launches_agree() {
    let client = client!("repeated_launches_agree");
    let (rows, cols) = (300, 200);
    let x = convert::<bf16>(&values(Kind::Heavy, rows * cols, 5));
    let matrix = upload(&client, &x, rows, cols);
    let usage = Usage::Columnwise;
    let amax = reference::ms_eden_amax(&x, rows, cols, usage, &hadamard()).unwrap();
    let expected = reference::ms_eden(&x, rows, cols, usage, amax, &params(STREAM)).unwrap();
    for _ in 0..100 {
        let amax = quantize::ms_eden_amax(&client, &matrix, usage, &hadamard()).unwrap();
        let found = quantize::ms_eden(&client, &matrix, usage, &amax, &hadamard(), STREAM).unwrap();
        assert_packed(&client, &found, &expected, "repeated");
    }
}

/// Packed operands with so many tiles that two planes of a GPU share one, and that each plane has
/// one; for other shapes four planes share one.
#[test]
fn many_tiles() {
    let client = on_gpu!("many_tiles", "a CPU takes all tiles alike");
    let sms = client.properties().hardware.num_streaming_multiprocessors;
    let sms = sms.unwrap_or(128) as usize;
    // Tiles of 32 columns by 128 rows; along rows there are three quarters as many.
    for tiles in [sms * 27 / 5, sms * 9] {
        let cols = (32 * tiles / 3).next_multiple_of(16);
        check_packed(&client, 260, cols, Kind::Heavy);
    }
}

/// More tiles than the planes of a GPU process at once, nearly all of which contain the largest
/// magnitude: both amax values computed together equal those of the separate kernels.
#[test]
fn amax_pair_of_many_tiles() {
    let client = on_gpu!(
        "amax_pair_of_many_tiles",
        "a CPU does not look at many together"
    );
    let (rows, cols) = (6000, 8192);
    let tile = convert::<bf16>(&values(Kind::Normal, 32 * 32, 6));
    let at = |i: usize| tile[i / cols % 32 * 32 + i % 32];
    let mut x: Vec<bf16> = (0..rows * cols).map(at).collect();
    let transform = hadamard();
    for spike in [None, Some(0), Some(rows * cols - 1)] {
        if let Some(spike) = spike {
            x[spike] = bf16::from_f32(100.0 + spike as f32);
        }
        let matrix = upload(&client, &x, rows, cols);
        let both = [&transform; 2];
        let found = quantize::ms_eden_amax_pair(&client, &matrix, both).unwrap();
        for (found, usage) in found.iter().zip(USAGES) {
            let alone = quantize::ms_eden_amax(&client, &matrix, usage, &transform).unwrap();
            let bits = [found, &alone].map(|amax| read_f32(&client, amax).to_bits());
            assert_eq!(bits[0], bits[1], "{spike:?} along {usage:?}");
        }
    }
}

/// More than 2^31 elements, on a GPU: the codes of the last rows equal those of these rows alone.
/// (The scale bytes do not: their random bits belong to other groups. `shapes` compares them with
/// the oracle.)
#[test]
fn more_elements_than_32_bits_index() {
    let client = on_gpu!(
        "more_elements_than_32_bits_index",
        "a GPU's memory is needed"
    );
    let (rows, cols) = (65_536 + 128, 32_768);
    let tail = convert::<bf16>(&values(Kind::Normal, 128 * cols, 1));
    let mut x = vec![bf16::ZERO; rows * cols];
    x[(rows - 128) * cols..].copy_from_slice(&tail);
    let matrix = upload(&client, &x, rows, cols);
    drop(x);
    let small = upload(&client, &tail, 128, cols);
    for usage in USAGES {
        let codes = |matrix: &Matrix| {
            let amax = quantize::ms_eden_amax(&client, matrix, usage, &hadamard()).unwrap();
            let packed =
                quantize::ms_eden(&client, matrix, usage, &amax, &hadamard(), STREAM).unwrap();
            device::read_bytes(&client, &packed.codes, packed.outer() * packed.blocks() * 8)
        };
        let (large, small) = (codes(&matrix), codes(&small));
        // Stored rows of the large matrix end in those of the small one; everything else is zero.
        let (outer, length) = match usage {
            Usage::Rowwise => (1, small.len()),
            Usage::Columnwise => (cols, 64),
        };
        let rows = large.chunks(large.len() / outer).zip(small.chunks(length));
        for (row, (large, small)) in rows.enumerate() {
            let (zeros, tail) = large.split_at(large.len() - length);
            assert_bytes(tail, small, &format!("{usage:?}, stored row {row}"));
            // Differences of zeros are zeros of either sign.
            assert!(
                zeros.iter().all(|&byte| byte & 0x77 == 0),
                "{usage:?}, stored row {row}"
            );
        }
    }
}

#[test]
fn errors_name_the_argument() {
    let client = client!("errors_name_the_argument");
    let x = upload::<f32>(&client, &[0.0; 128], 1, 128);
    let usage = Usage::Rowwise;
    let error = quantize::ms_eden_amax(&client, &x, usage, &Hadamard::default()).unwrap_err();
    assert!(error.to_string().contains("hadamard") && error.to_string().contains("128"));
    let small = client.create_from_slice(&[0u8; 2]);
    let error = quantize::ms_eden(&client, &x, usage, &small, &hadamard(), STREAM).unwrap_err();
    assert!(error.to_string().contains("amax"), "{error}");
    let amax = quantize::ms_eden_amax(&client, &x, usage, &hadamard()).unwrap();
    let target = TargetSpec::new(QuantParams::ms_eden(hadamard(), STREAM)).amax(&amax);
    let request = |target| Quantize::new(&x).along(usage, target);
    let refused = |target| request(target).launch(&client).unwrap_err().to_string();
    let error = refused(target.clone().offset(&small));
    assert!(error.contains("`offset`"), "{error}");
    let mut per_row = target.clone();
    per_row.params.amax = AmaxGranularity::PerRow;
    let error = refused(per_row);
    assert!(error.contains("`params`"), "{error}");
    let mut without = target;
    without.params.offset_in_memory = true;
    let error = refused(without);
    assert!(error.contains("`offset`"), "{error}");
}
