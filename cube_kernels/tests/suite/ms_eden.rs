//! MS-EDEN kernels compared with the oracle byte for byte, on CubeCL's CPU runtime or on a GPU
//! (`NVFP4_TEST_DEVICE`).

use crate::support::device;
use crate::support::device::{
    DeviceElement, assert_bytes, assert_floats, assert_packed, read_bytes, read_f32, read_matrix,
    upload,
};
use crate::support::gemm::multiply;
use crate::support::inputs::{ALL_KINDS, Kind, convert, values};
use cubecl::{prelude::*, server::Handle};
use half::{bf16, f16};
use nvfp4_kernels::{
    Amax, BLOCK, Hadamard, HadamardSize, QuantizedTensor, RandomStream, Rounding, ScaleLayout,
    Storage, Usage,
    capabilities::{Capabilities, GemmBackend},
    gemm::{
        Gemm, Plan,
        kernels::{Sm90Tile, W4a16Tile},
    },
    quantize::{self, EdenForm, EdenRandom, EdenSource, EdenTransform, RedrawnSigns},
    reference::{self, EdenParams, EdenTarget, Element},
    tensor::{DeviceQuantized, FloatKind, Matrix},
};

const USAGES: [Usage; 2] = [Usage::Rowwise, Usage::Columnwise];
const STREAM: RandomStream = RandomStream::new(0x1234_5678_9abc_def0, 3, 0xffff_fffe);

fn hadamard() -> Hadamard {
    Hadamard::seeded_with_size(HadamardSize::H128, 77)
}

fn params(target: EdenTarget, stream: RandomStream) -> EdenParams {
    EdenParams {
        hadamard: hadamard(),
        target,
        stream,
    }
}

/// Checks both kernels on one source, against the oracle on the values that it represents.
fn check<T: Element>(
    client: &Client,
    source: EdenSource,
    x: &[T],
    (rows, cols): (usize, usize),
    target: EdenTarget,
    what: &str,
) {
    for usage in USAGES {
        let what = format!("{what} {rows}x{cols} along {usage:?} {target:?}");
        let amax = reference::ms_eden_amax(x, rows, cols, usage, &hadamard()).unwrap();
        let found = quantize::ms_eden_amax(client, source, usage, &hadamard()).unwrap();
        let read = read_f32(client, &found);
        assert!(
            read.to_bits() == amax.to_bits() || (read.is_nan() && amax.is_nan()),
            "{what}: amax {read:e} != {amax:e}"
        );
        let expected =
            reference::ms_eden(x, rows, cols, usage, amax, &params(target, STREAM)).unwrap();
        let found =
            quantize::ms_eden(client, source, usage, &found, &hadamard(), target, STREAM).unwrap();
        assert_packed(client, &found, &expected, &what);
        let hadamard = &hadamard();
        let amax = &quantize::ms_eden_amax(client, source, usage, hadamard).unwrap();
        let made = |form| {
            quantize::ms_eden_as(client, source, usage, amax, hadamard, target, STREAM, form)
                .unwrap()
        };
        let unscaled = made(EdenForm::Bf16Unscaled);
        assert_unscaled(client, &unscaled, &expected, &what);
        if rows * cols > 0 {
            let found = made(EdenForm::Bf16Arranged);
            assert_arranged(client, &found, &unscaled, &what);
        }
    }
}

/// Asserts that the bytes of `found` are those of `unscaled`, with columns in the W4A16 kernel's
/// order.
fn assert_arranged(
    client: &Client,
    found: &DeviceQuantized,
    unscaled: &DeviceQuantized,
    what: &str,
) {
    assert_eq!(found.layout.storage, Storage::Bf16Arranged, "{what}");
    assert!(
        found.values().is_none(),
        "{what}: values are not in their order"
    );
    let bytes = found.code_bytes();
    assert_eq!(bytes, unscaled.code_bytes(), "{what}");
    let read = |tensor: &DeviceQuantized| {
        let bytes = read_bytes(client, &tensor.codes, bytes);
        let values = bytes.chunks_exact(2);
        values
            .map(|value| u16::from_le_bytes([value[0], value[1]]))
            .collect::<Vec<_>>()
    };
    let expected = arranged(&read(unscaled));
    assert_eq!(read(found), expected, "{what}, arranged");
    let [read, expected] = [found, unscaled].map(|tensor| read_f32(client, &tensor.amax).to_bits());
    assert_eq!(read, expected, "{what}, arranged: amax");
}

/// Returns rows of whole 128 columns in the W4A16 kernel's order: the eight elements
/// `8 h + 4 w + j` of each span of 16 are columns `c + j` and `c + j + 4` with
/// `c = 32 q + 16 h + 8 w`, for four `q`.
fn arranged(values: &[u16]) -> Vec<u16> {
    let vector = |span: &[u16], vector: usize| {
        let (h, w, j) = (vector / 8, vector / 4 % 2, vector % 4);
        let column = |q: usize| 32 * q + 16 * h + 8 * w + j;
        let pair = |q| [span[column(q)], span[column(q) + 4]];
        (0..4).flat_map(pair).collect::<Vec<_>>()
    };
    let spans = values.chunks_exact(128);
    let vectors = spans.flat_map(|span| (0..16).flat_map(move |at| vector(span, at)));
    vectors.collect()
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
    check(
        client,
        (&matrix).into(),
        x,
        (rows, cols),
        EdenTarget::Backward,
        &what,
    );
    check_amax_pair(client, &matrix, x, &what);
}

/// Checks the amax values along and across the rows, for transforms with different signs, computed
/// together.
fn check_amax_pair<T: Element>(client: &Client, matrix: &Matrix, x: &[T], what: &str) {
    let transforms = [
        hadamard(),
        Hadamard::seeded_with_size(HadamardSize::H128, 78),
    ];
    let asked = transforms.each_ref().map(EdenTransform::from);
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
        check(
            client,
            (&device).into(),
            &x,
            (rows, cols),
            EdenTarget::Backward,
            &what,
        );
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
fn forward_target() {
    let client = client!("forward_target");
    let (rows, cols) = (200, 300);
    let x = convert::<bf16>(&values(Kind::Normal, rows * cols, 1));
    let matrix = upload(&client, &x, rows, cols);
    check(
        &client,
        (&matrix).into(),
        &x,
        (rows, cols),
        EdenTarget::Forward,
        "forward",
    );
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
        let transform = EdenTransform {
            hadamard: Hadamard::seeded_with_size(HadamardSize::H128, seed),
            redrawn: Some(RedrawnSigns {
                seed,
                offset: client.create_from_slice(bytemuck::cast_slice(&offset)),
            }),
        };
        let seed = seed.wrapping_add(advanced.wrapping_mul(Hadamard::SEED_STEP));
        let hadamard = Hadamard::seeded_with_size(HadamardSize::H128, seed);
        for usage in USAGES {
            let amax = reference::ms_eden_amax(&x, rows, cols, usage, &hadamard).unwrap();
            let found = quantize::ms_eden_amax(&client, &matrix, usage, transform.clone()).unwrap();
            assert_eq!(read_f32(&client, &found).to_bits(), amax.to_bits());
            let by = EdenParams {
                hadamard,
                ..params(EdenTarget::Backward, STREAM)
            };
            let expected = reference::ms_eden(&x, rows, cols, usage, amax, &by).unwrap();
            let transform = transform.clone();
            let (target, stream) = (EdenTarget::Backward, STREAM);
            let made =
                quantize::ms_eden(&client, &matrix, usage, &found, transform, target, stream);
            let what = format!("{offset:?} along {usage:?}");
            assert_packed(&client, &made.unwrap(), &expected, &what);
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
    let quantize = |random: EdenRandom| {
        let target = EdenTarget::Backward;
        quantize::ms_eden(&client, &matrix, usage, &amax, &hadamard(), target, random).unwrap()
    };
    let found = quantize(EdenRandom {
        stream: STREAM,
        offset: Some(offset),
        earlier: None,
    });
    let mut stream = STREAM;
    stream.offset += 5 + (7 << 32);
    let expected = reference::ms_eden(
        &x,
        rows,
        cols,
        usage,
        read_f32(&client, &amax),
        &params(EdenTarget::Backward, stream),
    )
    .unwrap();
    assert_packed(&client, &found, &expected, "device offset");
    // Other bits round other scale bytes.
    let other = quantize(STREAM.into())
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
        let target = EdenTarget::Backward;
        quantize::ms_eden(&client, &matrix, usage, &amax, &hadamard(), target, random).unwrap()
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

/// A left operand in the W4A16 kernel's order gives the bits of its codes there; code that does not
/// support that order returns an error that names it.
#[test]
fn arranged_left_operand() {
    let client = client!("arranged_left_operand");
    let made = |rows: usize, cols: usize, form, stream| {
        let x = convert::<bf16>(&values(Kind::Normal, rows * cols, stream as u32));
        let matrix = upload(&client, &x, rows, cols);
        let (usage, hadamard) = (Usage::Columnwise, hadamard());
        let amax = quantize::ms_eden_amax(&client, &matrix, usage, &hadamard).unwrap();
        let (random, target) = (RandomStream::new(1, stream, 0), EdenTarget::Backward);
        let source = &matrix;
        let made = quantize::ms_eden_as(
            &client, source, usage, &amax, &hadamard, target, random, form,
        );
        made.unwrap()
    };
    let rows = EdenForm::Packed(ScaleLayout::Compact);
    let hopper = Capabilities::of(&client).gemm == GemmBackend::Sm90Wgmma;
    for (m, n, k) in [(128, 256, 256), (200, 72, 130), (33, 136, 1000)] {
        let [codes, arranged] = [rows, EdenForm::Bf16Arranged].map(|form| made(k, m, form, 1));
        let right = made(k, n, rows, 2);
        let run = |a: &DeviceQuantized, b: &DeviceQuantized, plan| {
            let request = Gemm::new(a, b).out(FloatKind::F32).plan(plan);
            multiply(&client, request)
        };
        if hopper {
            for tile in W4a16Tile::ALL {
                let plan = Some(Plan::W4a16(tile, 4));
                let [found, expected] = [&arranged, &codes].map(|a| {
                    let found = run(a, &right, plan).unwrap();
                    device::read_matrix::<f32>(&client, &found)
                });
                assert_floats(&found, &expected, &format!("{m} x {n} x {k}, {tile:?}"));
            }
            run(&arranged, &right, None).unwrap();
        }
        let refused = |a, b, plan, word: &str| {
            let error = run(a, b, plan).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        };
        let wrong = made(k, n, EdenForm::Bf16Arranged, 2);
        refused(&codes, &wrong, None, "the right operand");
        let decoded = Plan::DequantThenBf16(Sm90Tile::N128, 4);
        match hopper {
            true => refused(
                &arranged,
                &right,
                Some(decoded),
                "order of the W4A16 kernel",
            ),
            false => refused(&arranged, &right, None, "order of the W4A16 kernel"),
        }
        let error = quantize::dequantize(&client, &arranged, FloatKind::F32).unwrap_err();
        assert!(error.to_string().contains("Bf16Arranged"), "{error}");
    }
}

#[test]
fn repeated_launches_agree() {
    let client = client!("repeated_launches_agree");
    let (rows, cols) = (300, 200);
    let x = convert::<bf16>(&values(Kind::Heavy, rows * cols, 5));
    let matrix = upload(&client, &x, rows, cols);
    let usage = Usage::Columnwise;
    let target = EdenTarget::Backward;
    let amax = reference::ms_eden_amax(&x, rows, cols, usage, &hadamard()).unwrap();
    let expected =
        reference::ms_eden(&x, rows, cols, usage, amax, &params(target, STREAM)).unwrap();
    for _ in 0..100 {
        let amax = quantize::ms_eden_amax(&client, &matrix, usage, &hadamard()).unwrap();
        let found =
            quantize::ms_eden(&client, &matrix, usage, &amax, &hadamard(), target, STREAM).unwrap();
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
        let both = [&transform; 2].map(EdenTransform::from);
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
            let target = EdenTarget::Backward;
            let packed =
                quantize::ms_eden(&client, matrix, usage, &amax, &hadamard(), target, STREAM)
                    .unwrap();
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
    let target = EdenTarget::Backward;
    let error =
        quantize::ms_eden(&client, &x, usage, &small, &hadamard(), target, STREAM).unwrap_err();
    assert!(error.to_string().contains("amax"), "{error}");
    let amax = quantize::ms_eden_amax(&client, &x, usage, &hadamard()).unwrap();
    let random = EdenRandom {
        stream: STREAM,
        offset: Some(small),
        earlier: None,
    };
    let error =
        quantize::ms_eden(&client, &x, usage, &amax, &hadamard(), target, random).unwrap_err();
    assert!(error.to_string().contains("random"), "{error}");
}
