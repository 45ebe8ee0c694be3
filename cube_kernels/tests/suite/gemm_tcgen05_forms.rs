//! The `tcgen05` kernel in MXFP8, on two CTAs and with exchanged operands, with its tensor core in
//! software, on a Hopper GPU (`NVFP4_TEST_DEVICE=cuda`). Compared bit for bit with the scalar
//! kernel, which multiplies MXFP8 operands dequantized to bf16: products are exact, and the
//! summation order is the same.

use crate::gemm_tcgen05::check_faults;
use crate::support::quantize;
use crate::support::{
    device::{assert_floats, read_f32, read_f32s, read_matrix, upload},
    epilogue::{Epilogue, check_epilogues},
    gemm::{multiply, multiply_amax},
    inputs::Generator,
    mxfp8::Mxfp8,
    packed::{Packed, scaled},
};
use crate::tcgen05_model::ordered_sums;
use cubecl::prelude::*;
use nvfp4_formats::{Format, Layout, StoredForm, Usage, format::swizzle::swizzle};
use nvfp4_kernels::{
    capabilities::GemmBackend,
    gemm::{
        Elements, Gemm, Operand, OutputAmax, Plan, Scale, Target,
        proof::{Fault, Sm100Form, Sm100Tile, Tcgen05, TensorCore},
    },
    moe::GroupOffsets,
    proof::ptx::BlockScaled,
    quantize::dequantize,
    tensor::{DeviceQuantized, FloatKind, Matrix},
};

/// Formats and forms that the module `gemm_tcgen05` does not test.
const FORMS: [(BlockScaled, Sm100Form); 5] = [
    (BlockScaled::Mxfp8, Sm100Form::OneCta),
    (BlockScaled::Nvfp4, Sm100Form::TwoCta),
    (BlockScaled::Mxfp8, Sm100Form::TwoCta),
    (BlockScaled::Nvfp4, Sm100Form::SwapAb),
    (BlockScaled::Mxfp8, Sm100Form::SwapAb),
];

/// Returns the kernel in software, with `fault` and `seed`.
fn software((format, form): (BlockScaled, Sm100Form), fault: Fault, seed: u32) -> Plan {
    Plan::from(Tcgen05(Sm100Tile {
        format,
        form,
        core: TensorCore::Software(fault),
        seed,
    }))
}

/// Returns a random operand.
fn random(
    client: &Client,
    format: BlockScaled,
    (rows, k): (usize, usize),
    seed: u32,
) -> DeviceQuantized {
    match format {
        BlockScaled::Nvfp4 => Packed::random(rows, k, seed).device(client),
        BlockScaled::Mxfp8 => Mxfp8::random(rows, k, seed).device(client),
    }
}

/// Returns the offsets of groups of `sizes` rows or columns.
fn offsets(client: &Client, sizes: &[usize]) -> GroupOffsets {
    let mut offsets = vec![0u32];
    for size in sizes {
        offsets.push(offsets.last().unwrap() + *size as u32);
    }
    GroupOffsets {
        offsets: client.create_from_slice(bytemuck::cast_slice(&offsets)),
        count: sizes.len(),
    }
}

/// Returns the plain sums of the scalar kernel, and those of the kernel with `plan`.
fn both(
    client: &Client,
    [a, b]: [&DeviceQuantized; 2],
    plan: Plan,
) -> (Vec<f32>, Result<Vec<f32>, nvfp4_formats::Nvfp4Error>) {
    let request = Gemm::new(a, b).out(FloatKind::F32);
    let read = |matrix: Matrix| read_matrix(client, &matrix);
    let expected = multiply(client, request.backend(GemmBackend::Scalar)).unwrap();
    (
        read(expected),
        multiply(client, request.plan(plan)).map(read),
    )
}

/// Tails of every kind: rows and columns within a tile of scales and of the output, and K that ends
/// within a pipeline stage and after the stages of either kind have wrapped around several times.
#[test]
fn dense_has_the_bits_of_the_scalar_kernel() {
    let client = hopper!("gemm_tcgen05_forms::dense_has_the_bits_of_the_scalar_kernel");
    for form in FORMS {
        for (i, (m, n, k)) in [
            (1, 8, 32),
            (128, 256, 128),
            (64, 128, 256),
            (127, 128, 288),
            (129, 136, 320),
            (40, 120, 1024),
            (130, 520, 544),
            (5, 1000, 160),
            (65, 248, 2080),
            (17, 264, 96),
            (257, 264, 352),
            (389, 136, 1440),
        ]
        .into_iter()
        .enumerate()
        {
            let seed = 100 + 2 * i as u32;
            let a = random(&client, form.0, (m, k), seed);
            let b = random(&client, form.0, (n, k), seed + 1);
            for seed in [0, 1, 2] {
                let plan = software(form, Fault::None, seed);
                let (expected, found) = both(&client, [&a, &b], plan);
                assert!(expected.iter().any(|sum| *sum != 0.0));
                let what = format!("{form:?}, {m} x {n} x {k}, seed {seed}");
                assert_floats(&found.unwrap(), &expected, &what);
            }
        }
    }
}

/// More tiles than SMs, and more pipeline stages than buffers.
#[test]
fn many_tiles_and_stages() {
    let client = hopper!("gemm_tcgen05_forms::many_tiles_and_stages");
    for form in FORMS {
        for (m, n, k, seed) in [
            (1281, 2040, 352, 0),
            (1281, 2040, 352, 7),
            (70, 256, 4096, 5),
        ] {
            let a = random(&client, form.0, (m, k), 5);
            let b = random(&client, form.0, (n, k), 6);
            let plan = software(form, Fault::None, seed);
            let (expected, found) = both(&client, [&a, &b], plan);
            let what = format!("{form:?}, {m} x {n} x {k}, seed {seed}");
            assert_floats(&found.unwrap(), &expected, &what);
        }
    }
}

/// Groups of rows, including empty ones. Rows after the last group keep their contents.
#[test]
fn groups_have_the_bits_of_the_scalar_kernel() {
    let client = hopper!("gemm_tcgen05_forms::groups_have_the_bits_of_the_scalar_kernel");
    let mut generator = Generator::new(3);
    let many: Vec<usize> = (0..64)
        .map(|_| generator.next_u32() as usize % 40)
        .collect();
    for form in FORMS {
        for sizes in [
            vec![0, 1, 63, 64, 65, 0, 127, 128, 129],
            vec![257, 0, 256, 255],
            vec![0, 0],
            vec![300],
            many.clone(),
        ] {
            for (n, k, seed) in [(136, 224, 0), (264, 96, 1)] {
                let count = sizes.len();
                let m = sizes.iter().sum::<usize>() + 3;
                let left = random(&client, form.0, (m, k), 1);
                let right = random(&client, form.0, (count * n, k), 2);
                let groups = offsets(&client, &sizes);
                let held = vec![0.5f32; m * n];
                let run = |with: &dyn for<'a> Fn(Gemm<'a>) -> Gemm<'a>| -> Vec<f32> {
                    let target = upload(&client, &held, m, n);
                    let gemm = Gemm::new(&left, &right)
                        .target(Target::Accumulate(&target))
                        .m_grouped(&groups);
                    read_matrix(&client, &multiply(&client, with(gemm)).unwrap())
                };
                let expected = run(&|gemm| gemm.backend(GemmBackend::Scalar));
                let found = run(&|gemm| gemm.plan(software(form, Fault::None, seed)));
                let what = format!("{form:?}, {sizes:?}, n {n}, k {k}, seed {seed}");
                assert_floats(&found, &expected, &what);
                assert_eq!(found[(m - 3) * n..], held[(m - 3) * n..], "{what}");
            }
        }
    }
}

/// Groups along K. Those of MXFP8 are at any multiple of 32, also within a pipeline stage, and are
/// read in place; those of NVFP4 are moved.
#[test]
fn groups_along_k_have_the_bits_of_the_scalar_kernel() {
    let client = hopper!("gemm_tcgen05_forms::groups_along_k_have_the_bits_of_the_scalar_kernel");
    let many: Vec<usize> = (0..40).map(|i| 32 * (i % 6)).collect();
    for form in FORMS.into_iter().filter(|(_, form)| !form.swaps_ab()) {
        for sizes in [
            vec![32, 0, 96, 320, 64],
            vec![0, 0],
            vec![128, 256],
            vec![1024, 32],
            many.clone(),
        ] {
            for (m, n, seed) in [(130, 264, 0), (40, 136, 1)] {
                let (count, k) = (sizes.len(), sizes.iter().sum::<usize>().max(32));
                let left = random(&client, form.0, (m, k), 1);
                let right = random(&client, form.0, (n, k), 2);
                let groups = offsets(&client, &sizes);
                let held: Vec<f32> = (0..count * m * n).map(|i| (i % 7) as f32).collect();
                let run = |with: &dyn for<'a> Fn(Gemm<'a>) -> Gemm<'a>| -> Vec<f32> {
                    let target = upload(&client, &held, count * m, n);
                    let gemm = Gemm::new(&left, &right)
                        .target(Target::Accumulate(&target))
                        .k_grouped(&groups);
                    read_matrix(&client, &multiply(&client, with(gemm)).unwrap())
                };
                let expected = run(&|gemm| gemm.backend(GemmBackend::Scalar));
                let found = run(&|gemm| gemm.plan(software(form, Fault::None, seed)));
                let what = format!("{form:?}, columns {sizes:?}, {m} x {n}, seed {seed}");
                assert_floats(&found, &expected, &what);
            }
        }
    }
}

/// Factors per row and column, bias, accumulation and output types, dense and grouped: each derived
/// from the plain sums by the specified roundings.
#[test]
fn epilogues() {
    let client = hopper!("gemm_tcgen05_forms::epilogues");
    let (m, n, k) = (141, 264, 96);
    for form in FORMS {
        let left = random(&client, form.0, (m, k), 5);
        for sizes in [vec![m], vec![3, 0, 130, 8]] {
            let count = sizes.len();
            let right = random(&client, form.0, (count * n, k), 6);
            let groups = offsets(&client, &sizes);
            let group_of: Vec<usize> = sizes
                .iter()
                .enumerate()
                .flat_map(|(group, size)| vec![group; *size])
                .collect();
            let product = |a: Scale, b: Scale, bias: Option<&Matrix>, target: Target| {
                let a = scaled(Elements::Quantized(&left), a);
                let b = scaled(Elements::Quantized(&right), b);
                let request =
                    Gemm::new(a, b)
                        .bias(bias)
                        .target(target)
                        .plan(software(form, Fault::None, 0));
                let request = match count {
                    1 => request,
                    _ => request.m_grouped(&groups),
                };
                multiply(&client, request).unwrap()
            };
            let what = format!("{form:?}, {count} groups");
            check_epilogues(&client, n, &group_of, &Epilogue::all(), &what, &product);
        }
    }
}

/// Computed while the kernel writes, for the whole output and for each group.
#[test]
fn amax_of_the_output() {
    let client = hopper!("gemm_tcgen05_forms::amax_of_the_output");
    let (m, n, k) = (200, 264, 96);
    for form in FORMS {
        let left = random(&client, form.0, (m, k), 5);
        let right = random(&client, form.0, (n, k), 6);
        for out in [FloatKind::F32, FloatKind::Bf16, FloatKind::F16] {
            let request = Gemm::new(&left, &right).out(out).amax(OutputAmax::Whole);
            let request = request.plan(software(form, Fault::None, 0));
            let (found, amax) = multiply_amax(&client, request).unwrap();
            let expected = read_f32(&client, &quantize::amax(&client, &found, None).unwrap());
            let amax = read_f32(&client, &amax);
            assert_eq!(amax.to_bits(), expected.to_bits(), "{form:?}, {out:?}");
            assert_ne!(amax, 0.0);
        }
        let sizes = [70, 0, 130];
        let right = random(&client, form.0, (3 * n, k), 6);
        let groups = offsets(&client, &sizes);
        let request = Gemm::new(&left, &right)
            .out(FloatKind::F32)
            .amax(OutputAmax::PerGroup)
            .m_grouped(&groups)
            .plan(software(form, Fault::None, 0));
        let (found, amax) = multiply_amax(&client, request).unwrap();
        let values: Vec<f32> = read_matrix(&client, &found);
        let mut row = 0;
        for (size, amax) in sizes.into_iter().zip(read_f32s(&client, &amax, 3)) {
            let own = &values[row * n..(row + size) * n];
            let expected = own.iter().fold(0f32, |amax, value| amax.max(value.abs()));
            assert_eq!(amax, expected, "{form:?}, {size} rows");
            row += size;
        }
    }
}

/// Memory after the output is not written.
#[test]
fn memory_behind_the_output_is_untouched() {
    let client = hopper!("gemm_tcgen05_forms::memory_behind_the_output_is_untouched");
    for form in FORMS {
        for (m, n, k) in [(130, 264, 96), (3, 72, 64)] {
            let a = random(&client, form.0, (m, k), 5);
            let b = random(&client, form.0, (n, k), 6);
            let guard = 4096;
            let mut held = vec![0f32; m * n];
            held.extend(vec![12345.0; guard]);
            let memory = client.create_from_slice(bytemuck::cast_slice(&held));
            let matrix = Matrix::new(memory.clone(), m, n, FloatKind::F32).unwrap();
            let request = Gemm::new(&a, &b).target(Target::Replace(&matrix));
            multiply(&client, request.plan(software(form, Fault::None, 0))).unwrap();
            let whole = Matrix::new(memory, 1, m * n + guard, FloatKind::F32).unwrap();
            let found: Vec<f32> = read_matrix(&client, &whole);
            assert!(found[m * n..].iter().all(|value| *value == 12345.0));
            assert!(found[..m * n].iter().any(|value| *value != 0.0));
        }
    }
}

/// One NaN scale per operand makes its row and its column NaN, and nothing else.
#[test]
fn nan_scales_stay_in_their_row_and_column() {
    let client = hopper!("gemm_tcgen05_forms::nan_scales_stay_in_their_row_and_column");
    let (m, n, k) = (140, 264, 352);
    for form in FORMS {
        let (a, b) = match form.0 {
            BlockScaled::Nvfp4 => {
                let (mut a, mut b) = (Packed::random(m, k, 1), Packed::random(n, k, 2));
                a.scales[7 * a.blocks + a.blocks - 1] = 0x7f;
                b.scales[260 * b.blocks + 2] = 0x7f;
                (a.device(&client), b.device(&client))
            }
            BlockScaled::Mxfp8 => {
                let (mut a, mut b) = (Mxfp8::random(m, k, 1), Mxfp8::random(n, k, 2));
                a.scales[7 * a.blocks + a.blocks - 1] = 0xff;
                b.scales[260 * b.blocks + 2] = 0xff;
                (a.device(&client), b.device(&client))
            }
        };
        let (_, found) = both(&client, [&a, &b], software(form, Fault::None, 3));
        for (i, value) in found.unwrap().iter().enumerate() {
            let (row, column) = (i / n, i % n);
            let expected = row == 7 || column == 260;
            assert_eq!(value.is_nan(), expected, "{form:?}: ({row}, {column})");
        }
    }
}

/// The second CTA has separate rows, unlike the tiles of other forms for the same problem: a GEMM
/// of only that CTA, of both, and of both with a tail in either.
#[test]
fn both_ctas_write_their_rows() {
    let client = hopper!("gemm_tcgen05_forms::both_ctas_write_their_rows");
    let form = (BlockScaled::Nvfp4, Sm100Form::TwoCta);
    for (m, n, k) in [
        (100, 256, 256),
        (129, 128, 256),
        (255, 136, 1536),
        (512, 8, 64),
    ] {
        let a = random(&client, form.0, (m, k), 7);
        let b = random(&client, form.0, (n, k), 8);
        for seed in 0..4 {
            let (expected, found) = both(&client, [&a, &b], software(form, Fault::None, seed));
            let what = format!("{m} x {n} x {k}, seed {seed}");
            assert_floats(&found.unwrap(), &expected, &what);
        }
    }
}

/// The faults of one CTA are detected with two CTAs, too, and so are those specific to two: stages
/// that are not waited for, the other half of `b`, the scales of one half of it.
#[test]
fn injected_faults_of_two_ctas_are_caught() {
    let client = hopper!("gemm_tcgen05_forms::injected_faults_of_two_ctas_are_caught");
    check_faults(&client, Sm100Form::TwoCta);
}

/// Faults specific to the forms are detected: the position of a scale in its word in MXFP8, and the
/// scales of rows in the second half of their 128.
#[test]
fn injected_faults_are_caught() {
    let client = hopper!("gemm_tcgen05_forms::injected_faults_are_caught");
    for form in FORMS {
        let a = random(&client, form.0, (128, 2560), 5);
        let b = random(&client, form.0, (256, 2560), 6);
        let (expected, found) = both(&client, [&a, &b], software(form, Fault::WrongScaleId, 0));
        match (form.0, found) {
            (BlockScaled::Nvfp4, Err(error)) => {
                assert!(
                    error.to_string().contains("instruction descriptors"),
                    "{error}"
                );
            }
            (BlockScaled::Mxfp8, Ok(found)) => assert!(found != expected, "{form:?}"),
            (_, found) => panic!("{form:?}: {:?}", found.map(|_| "no error")),
        }
    }
}

/// Any device multiplies MXFP8 operands, dense and grouped, with row-major scales or, if dense,
/// with tiled ones: they are dequantized to bf16 if there are no instructions for them.
#[test]
fn any_device_takes_mxfp8() {
    let client = client!("gemm_tcgen05_forms::any_device_takes_mxfp8");
    let (m, n, k) = (21, 16, 96);
    let (a, b) = (Mxfp8::random(m, k, 1), Mxfp8::random(2 * n, k, 2));
    let (left, right) = (a.device(&client), b.device(&client));
    let (x, y) = (a.decoded(), b.decoded());
    let scalar = |gemm: Gemm| -> Vec<f32> {
        let gemm = gemm.out(FloatKind::F32).backend(GemmBackend::Scalar);
        read_matrix(&client, &multiply(&client, gemm).unwrap())
    };
    let expected = ordered_sums(&x, &y, k, 0..k);
    assert_floats(&scalar(Gemm::new(&left, &right)), &expected, "dense");

    let tiles = swizzle(&a.scales, m, a.blocks);
    let swizzled = DeviceQuantized {
        layout: Layout {
            form: StoredForm::Tiles,
            ..left.layout
        },
        scales: client.create_from_slice(&tiles),
        ..left.clone()
    };
    assert_floats(&scalar(Gemm::new(&swizzled, &right)), &expected, "tiles");

    let sizes = [5, 16];
    let groups = offsets(&client, &sizes);
    let mut of_groups = ordered_sums(&x[..5 * k], &y[..n * k], k, 0..k);
    of_groups.extend(ordered_sums(&x[5 * k..], &y[n * k..], k, 0..k));
    let found = scalar(Gemm::new(&left, &right).m_grouped(&groups));
    assert_floats(&found, &of_groups, "M groups");

    let groups = offsets(&client, &[32, 0, 64]);
    let mut of_groups = ordered_sums(&x, &y, k, 0..32);
    of_groups.extend(vec![0.0; m * 2 * n]);
    of_groups.extend(ordered_sums(&x, &y, k, 32..96));
    let found = scalar(Gemm::new(&left, &right).k_grouped(&groups));
    assert_floats(&found, &of_groups, "K groups");
}

/// MXFP4 operands are multiplied like their dequantized values: dense, in groups of rows, and beside
/// an operand of another format.
#[test]
fn mxfp4_is_multiplied_like_its_values() {
    let client = client!("gemm_tcgen05_forms::mxfp4_is_multiplied_like_its_values");
    let (m, n, k) = (48, 32, 96);
    let mut generator = Generator::new(7);
    let mut operand = |rows: usize, format| {
        let x: Vec<f32> = (0..rows * k).map(|_| generator.normal()).collect();
        let x = upload(&client, &x, rows, k);
        let packed = quantize::mx_quantize(&client, &x, Usage::Rowwise, format).unwrap();
        let values = dequantize(&client, &packed, FloatKind::Bf16).unwrap();
        (packed, values)
    };
    let (a, a_values) = operand(m, Format::Mxfp4);
    let (b, b_values) = operand(n, Format::Mxfp4);
    let (stack, stack_values) = operand(2 * n, Format::Mxfp4);
    let (other, other_values) = operand(n, Format::Mxfp8);
    let offsets = [0u32, 16, m as u32];
    let groups = GroupOffsets {
        offsets: client.create_from_slice(bytemuck::cast_slice(&offsets)),
        count: 2,
    };
    for (what, packed, values) in [
        ("dense", Gemm::new(&a, &b), Gemm::new(&a_values, &b_values)),
        (
            "MXFP8",
            Gemm::new(&a, &other),
            Gemm::new(&a_values, &other_values),
        ),
        (
            "groups",
            Gemm::new(&a, &stack).m_grouped(&groups),
            Gemm::new(&a_values, &stack_values).m_grouped(&groups),
        ),
    ] {
        let [found, expected] = [packed, values]
            .map(|request| multiply(&client, request.out(FloatKind::F32)).unwrap())
            .map(|product| read_matrix::<f32>(&client, &product));
        assert!(expected.iter().any(|value| *value != 0.0), "{what}");
        assert_floats(&found, &expected, what);
    }
}

/// Formats that no kernel reads in columns, and plans of another format, are errors that name the
/// format.
#[test]
fn errors_name_the_format() {
    let client = client!("gemm_tcgen05_forms::errors_name_the_format");
    let zeros = upload::<f32>(&client, &[0.0; 32 * 64], 32, 64);
    let quantized =
        |format| quantize::mx_quantize(&client, &zeros, Usage::Rowwise, format).unwrap();
    let (mxfp8, mxfp4) = (quantized(Format::Mxfp8), quantized(Format::Mxfp4));
    let (a, b) = (Operand::from(&mxfp8), Operand::packed_mn_major(&mxfp4));
    let error = multiply(&client, Gemm::new(a, b)).unwrap_err();
    let error = error.to_string();
    assert!(error.contains("`b`") && error.contains("Mxfp4"), "{error}");
    let nvfp4 = Packed::random(32, 64, 1).device(&client);
    // Operands of two formats are treated like bf16 operands, which is not a block-scaled GEMM.
    let request = Gemm::new(&nvfp4, Operand::from(&mxfp8));
    let error = multiply(&client, request.backend(GemmBackend::Sm100Tcgen05)).unwrap_err();
    assert!(error.to_string().contains("Sm100Tcgen05"), "{error}");
    multiply(&client, request).unwrap();
}
