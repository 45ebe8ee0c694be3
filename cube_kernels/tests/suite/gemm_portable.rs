//! GEMMs by matrix instructions on any CUDA GPU, and those of consumer Blackwell with plain
//! arithmetic instead of its instruction. Both require a GPU (`NVFP4_TEST_DEVICE=cuda`).
//!
//! The plain arithmetic uses the summation order of the scalar path and the fragments that the
//! instruction would get. The two give the same bits, unless codes or scales are loaded from the
//! wrong address, or into the wrong lanes.

use crate::support::device;
use crate::support::device::{DeviceElement, assert_floats, read_f32, read_matrix, upload};
use crate::support::gemm::{multiply, multiply_amax};
use crate::support::inputs::{Generator, convert};
use crate::support::mxfp8::Mxfp8;
use crate::support::packed::{Packed, TE_PRODUCTS, assert_bound};
use crate::support::quantize;
use cubecl::{prelude::*, server::Handle};
use half::{bf16, f16};
use nvfp4_kernels::{
    capabilities::{Capabilities, GemmBackend},
    gemm::{
        self, Elements, Gemm, Operand, OperandLayout, OutputAmax, Plan, Problem, Scale, Target,
        proof::{BlockScaledMma, Multiply, Sm120Tile, SmallM},
    },
    moe::GroupOffsets,
    proof::ptx::BlockScaled,
    tensor::{DeviceQuantized, FloatKind, Matrix},
};
use proptest::prelude::*;

/// Returns the block-scaled kernel in software, with tiles of `64 * strips` rows.
fn software(strips: usize) -> Plan {
    software_of(BlockScaled::Nvfp4, strips)
}

/// Returns the block-scaled kernel in software for operands in a format.
fn software_of(format: BlockScaled, strips: usize) -> Plan {
    Plan::from(BlockScaledMma(Sm120Tile {
        format,
        strips,
        multiply: Multiply::Software,
    }))
}

/// Kernel of a GEMM: matrix instructions, or the block-scaled kernel in software.
#[derive(Debug, Clone, Copy)]
enum Kernel {
    Matrix,
    BlockScaled(usize),
    Scalar,
}

const KERNELS: [Kernel; 3] = [
    Kernel::Matrix,
    Kernel::BlockScaled(1),
    Kernel::BlockScaled(2),
];

impl Kernel {
    fn product(
        self,
        client: &Client,
        a: &Operand,
        b: &Operand,
        bias: Option<&Matrix>,
        target: Target,
    ) -> Matrix {
        let (path, plan) = match self {
            Self::Matrix => (GemmBackend::Cmma, None),
            Self::BlockScaled(strips) => (GemmBackend::Sm120BlockScaled, Some(software(strips))),
            Self::Scalar => (GemmBackend::Scalar, None),
        };
        multiply(
            client,
            Gemm::new(a, b)
                .bias(bias)
                .target(target)
                .backend(path)
                .plan(plan),
        )
        .unwrap()
    }

    fn sums(self, client: &Client, a: &Packed, b: &Packed) -> Vec<f32> {
        let (a, b) = (a.device(client), b.device(client));
        let new = Target::New(FloatKind::F32);
        read_matrix(
            client,
            &self.product(client, &Operand::from(&a), &Operand::from(&b), None, new),
        )
    }
}

/// Tails of every kind: rows, columns, and K that ends inside a pipeline stage (128), inside an
/// instruction (64), inside 16 bytes of codes (32) and at each number of blocks.
const SHAPES: [(usize, usize, usize); 18] = [
    (1, 8, 16),
    (5, 24, 48),
    (16, 8, 64),
    (64, 128, 128),
    (128, 128, 112),
    (112, 128, 96),
    (65, 136, 144),
    (129, 136, 80),
    (33, 520, 160),
    (128, 128, 128),
    (130, 264, 208),
    (257, 120, 256),
    (40, 72, 320),
    (304, 640, 304),
    (7, 264, 640),
    (200, 8, 1040),
    (96, 48, 2880),
    (513, 1000, 512),
];

#[test]
fn within_the_bound() {
    let client = gpu!("within_the_bound");
    for (i, (m, n, k)) in SHAPES.into_iter().enumerate() {
        let seed = 2 * i as u32;
        let (a, b) = (Packed::random(m, k, seed), Packed::random(n, k, seed + 1));
        for kernel in KERNELS {
            let what = format!("{kernel:?}, {m} x {n} x {k}");
            assert_bound(&kernel.sums(&client, &a, &b), &a, &b, &what);
        }
    }
}

/// Large K, and TransformerEngine's larger shapes.
#[test]
fn large_products_are_within_the_bound() {
    let client = gpu!("large_products_are_within_the_bound");
    for (m, n, k) in [
        (40, 136, 65536),
        (130, 8, 65536),
        (1008, 3072, 992),
        (4096, 512, 3072),
    ]
    .into_iter()
    .chain(TE_PRODUCTS)
    {
        let (a, b) = (Packed::random(m, k, 1), Packed::random(n, k, 2));
        let mut kernels = vec![Kernel::Matrix];
        if m < 1000 {
            kernels.push(Kernel::BlockScaled(1));
        }
        for kernel in kernels {
            let what = format!("{kernel:?}, {m} x {n} x {k}");
            assert_bound(&kernel.sums(&client, &a, &b), &a, &b, &what);
        }
    }
}

/// The scalar path's summation order gives its bits: any misplaced code or scale would show.
#[test]
fn block_scaled_fragments_are_where_they_belong() {
    let client = gpu!("block_scaled_fragments_are_where_they_belong");
    for (i, (m, n, k)) in SHAPES.into_iter().enumerate() {
        let seed = 100 + 2 * i as u32;
        let (a, b) = (Packed::random(m, k, seed), Packed::random(n, k, seed + 1));
        let expected = Kernel::Scalar.sums(&client, &a, &b);
        for strips in [1, 2] {
            let found = Kernel::BlockScaled(strips).sums(&client, &a, &b);
            assert_floats(&found, &expected, &format!("{strips}: {m} x {n} x {k}"));
        }
    }
}

/// More tiles than SMs, and more pipeline stages than the kernel has buffers: these are refilled
/// for each tile of a cube.
#[test]
fn many_tiles_and_stages() {
    let client = gpu!("many_tiles_and_stages");
    for (strips, m, k) in [(1, 769, 1040), (2, 1537, 1152)] {
        let n = 1528;
        let (a, b) = (Packed::random(m, k, 5), Packed::random(n, k, 6));
        let expected = Kernel::Scalar.sums(&client, &a, &b);
        let found = Kernel::BlockScaled(strips).sums(&client, &a, &b);
        assert_floats(&found, &expected, &format!("{strips}: {m} x {n} x {k}"));
        let found = Kernel::Matrix.sums(&client, &a, &b);
        assert_bound(&found, &a, &b, &format!("{m} x {n} x {k}"));
    }
}

/// Row `i` of the left operand selects one element of every row of the right one, exactly, with a
/// block scale that no other block has.
#[test]
fn one_hot_rows_pick_elements() {
    let client = gpu!("one_hot_rows_pick_elements");
    for (m, n, k) in [(208, 72, 208), (256, 40, 256), (96, 16, 96)] {
        let mut a = Packed::random(m, k, 1);
        a.codes.fill(0);
        let picked = |row: usize| (row * 7 + 3) % k;
        for row in 0..m {
            // Code 2 is 1.
            a.codes[row * k / 2 + picked(row) / 2] = 2 << (4 * (picked(row) % 2));
        }
        let mut b = Packed::random(n, k, 2);
        (a.amax, b.amax) = (2688.0, 2688.0);
        let (x, y) = (a.decoded(), b.decoded());
        for kernel in KERNELS {
            let found = kernel.sums(&client, &a, &b);
            for row in 0..m {
                for col in 0..n {
                    let at = picked(row);
                    let expected = x[row * k + at] * y[col * k + at];
                    assert_eq!(found[row * n + col], expected, "{kernel:?}: ({row}, {col})");
                }
            }
        }
    }
}

#[test]
fn extreme_scales_zeros_and_nan() {
    let client = gpu!("extreme_scales_zeros_and_nan");
    let (m, n, k) = (72, 136, 176);
    let mut b = Packed::random(n, k, 2);
    let mut random = Generator::new(3);
    for (i, scale) in b.scales.iter_mut().enumerate() {
        // 0 to 2^-6 in the even rows, 224 to 448 in the odd ones.
        let any = random.next_u32() as u8;
        *scale = match (i / b.blocks).is_multiple_of(2) {
            true => any % 9,
            false => 0x76 + any % 9,
        };
    }
    let mut a = Packed::random(m, k, 1);
    a.scales[..a.blocks].fill(1);
    a.scales[a.blocks..2 * a.blocks].fill(0x7e);
    a.codes[8 * 2 * a.blocks..][..8 * a.blocks].fill(0);
    for kernel in KERNELS {
        let found = kernel.sums(&client, &a, &b);
        assert_bound(&found, &a, &b, &format!("{kernel:?}"));
        assert!(found[2 * n..3 * n].iter().all(|value| *value == 0.0));
        assert!(found.iter().any(|value| *value != 0.0));
        // One NaN scale each: it affects its row and its column, and nothing else.
        let (mut x, mut y) = (Packed::random(m, k, 1), Packed::random(n, k, 2));
        x.scales[7 * x.blocks + x.blocks - 1] = 0x7f;
        y.scales[11 * y.blocks + 2] = 0x7f;
        for (i, value) in kernel.sums(&client, &x, &y).iter().enumerate() {
            let (row, col) = (i / n, i % n);
            let expected = row == 7 || col == 11;
            assert_eq!(value.is_nan(), expected, "{kernel:?}: ({row}, {col})");
        }
        for amax in [f32::NAN, f32::INFINITY] {
            let mut x = Packed::random(m, k, 1);
            x.amax = amax;
            let found = kernel.sums(&client, &x, &y);
            assert!(found.iter().all(|value| !value.is_finite()), "{amax}");
        }
    }
}

/// Factors of every kind, bias, accumulation and output types: each derived from the plain sums by
/// the specified roundings.
#[test]
fn epilogues() {
    let client = gpu!("epilogues");
    // An instance of the block-scaled kernel takes seconds to compile.
    for (m, n, k) in [(200, 72, 64), (3, 520, 256)] {
        epilogues_of::<f32>(&client, Kernel::Matrix, (m, n, k));
        epilogues_of::<bf16>(&client, Kernel::Matrix, (m, n, k));
        epilogues_of::<f16>(&client, Kernel::Matrix, (m, n, k));
    }
    epilogues_of::<f32>(&client, Kernel::BlockScaled(1), (70, 264, 80));
    epilogues_of::<bf16>(&client, Kernel::BlockScaled(2), (200, 72, 256));
}

fn epilogues_of<T: DeviceElement>(
    client: &Client,
    kernel: Kernel,
    (m, n, k): (usize, usize, usize),
) {
    let (a, b) = (Packed::random(m, k, 5), Packed::random(n, k, 6));
    let (left, right) = (a.device(client), b.device(client));
    let what = format!("{kernel:?}, {m} x {n} x {k}, {:?}", T::KIND);
    let mut random = Generator::new(7);
    let mut vector = |len: usize| -> Vec<f32> { (0..len).map(|_| random.normal()).collect() };
    let (bias, rows, cols, held) = (vector(n), vector(m), vector(n), vector(m * n));
    let floats = |x: &[f32]| -> Handle { client.create_from_slice(bytemuck::cast_slice(x)) };
    let (row_amax, col_amax) = (floats(&rows), floats(&cols));
    let bias_matrix = upload(client, &bias, 1, n);
    let held: Vec<T> = convert(&held);
    let run = |a_scale, b_scale, bias: Option<&Matrix>, target: Target| {
        let operand = |packed, scale| Operand {
            elements: Elements::Quantized(packed),
            scale,
        };
        let (a, b) = (operand(&left, a_scale), operand(&right, b_scale));
        kernel.product(client, &a, &b, bias, target)
    };
    // Factors of one.
    let one = floats(&[2688.0]);
    let one = Scale::Tensor(&one, 2688.0);
    let sums = run(one, one, None, Target::New(FloatKind::F32));
    let sums: Vec<f32> = read_matrix(client, &sums);
    let check = |found: &Matrix, value: &dyn Fn(usize, usize, f32) -> f32, what: &str| {
        let expected: Vec<f32> = (0..m * n).map(|i| value(i / n, i % n, sums[i])).collect();
        assert_floats(
            &read_matrix::<T>(client, found),
            &convert::<T>(&expected),
            what,
        );
    };
    let found = run(
        Scale::PerRow(&row_amax, 2688.0),
        Scale::PerRow(&col_amax, 1536.0),
        Some(&bias_matrix),
        Target::New(T::KIND),
    );
    let value = |row: usize, col: usize, sum: f32| {
        sum * ((rows[row] / 2688.0) * (cols[col] / 1536.0)) + bias[col]
    };
    check(&found, &value, &format!("{what}: rows, bias"));

    let (by_tensor, other) = (
        Scale::Tensor(&left.amax, 2688.0),
        Scale::Tensor(&right.amax, 1536.0),
    );
    let alpha = (a.amax / 2688.0) * (b.amax / 1536.0);
    let found = run(by_tensor, other, None, Target::New(T::KIND));
    check(&found, &|_, _, sum| sum * alpha, &format!("{what}: tensor"));
    let targets = [(); 2].map(|()| upload(client, &held, m, n));
    for with_bias in [false, true] {
        let matrix = with_bias.then_some(&bias_matrix);
        let target = &targets[with_bias as usize];
        let found = run(by_tensor, other, matrix, Target::Accumulate(target));
        let value = |row: usize, col: usize, sum: f32| {
            let scaled = sum * alpha;
            let biased = if with_bias {
                scaled + bias[col]
            } else {
                scaled
            };
            biased + held[row * n + col].to_f32()
        };
        check(&found, &value, &format!("{what}: +=, bias {with_bias}"));
    }
}

/// Computed while the block-scaled kernel writes, or by a pass over the output.
#[test]
fn maximum_of_the_output() {
    let client = gpu!("maximum_of_the_output");
    let (m, n, k) = (100, 264, 96);
    for out in [FloatKind::F32, FloatKind::Bf16] {
        for poison in [false, true] {
            let mut a = Packed::random(m, k, 5);
            if poison {
                a.scales[(m - 1) * a.blocks] = 0x7f;
            }
            let (left, right) = (a.device(&client), Packed::random(n, k, 6).device(&client));
            let (x, y) = (Operand::from(&left), Operand::from(&right));
            let (path, new) = (Some(GemmBackend::Sm120BlockScaled), Target::New(out));
            let plan = Some(software(2));
            let (found, amax) = multiply_amax(
                &client,
                Gemm::new(x, y)
                    .target(new)
                    .amax(OutputAmax::Whole)
                    .backend(path)
                    .plan(plan),
            )
            .unwrap();
            let expected = read_f32(&client, &quantize::amax(&client, &found, None).unwrap());
            let amax = read_f32(&client, &amax);
            assert_eq!(amax.to_bits(), expected.to_bits(), "{out:?}, NaN {poison}");
            assert_eq!(amax.is_nan(), poison);
            assert_ne!(amax, 0.0);
        }
    }
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

/// Asserts that a GEMM has the bits of the scalar kernel, which multiplies MXFP8 operands
/// dequantized to bf16, with tiles of either height.
fn assert_scalar_bits(client: &Client, request: Gemm, format: BlockScaled, what: &str) {
    let sums = |request: Gemm| -> Vec<f32> {
        let request = request.target(Target::New(FloatKind::F32));
        read_matrix(client, &multiply(client, request).unwrap())
    };
    let expected = sums(request.backend(GemmBackend::Scalar));
    assert!(expected.iter().any(|sum| *sum != 0.0), "{what}");
    for strips in [1, 2] {
        let request = request.backend(GemmBackend::Sm120BlockScaled);
        let found = sums(request.plan(software_of(format, strips)));
        assert_floats(&found, &expected, &format!("{what}, {strips} strips"));
    }
}

/// MXFP8 in any shape: tails of rows, of columns and of a pipeline stage (64 columns).
#[test]
fn mxfp8_has_the_bits_of_the_scalar_kernel() {
    let client = gpu!("mxfp8_has_the_bits_of_the_scalar_kernel");
    for (i, (m, n, k)) in [
        (1, 8, 32),
        (64, 128, 64),
        (65, 136, 96),
        (129, 120, 160),
        (33, 520, 288),
        (257, 264, 544),
        (7, 72, 2080),
        (300, 1528, 1056),
    ]
    .into_iter()
    .enumerate()
    {
        let (format, seed) = (BlockScaled::Mxfp8, 2 * i as u32);
        let a = random(&client, format, (m, k), seed);
        let b = random(&client, format, (n, k), seed + 1);
        let what = format!("{m} x {n} x {k}");
        assert_scalar_bits(&client, Gemm::new(&a, &b), format, &what);
    }
}

/// Groups of rows, and groups along K with an amax per row of each group: empty groups, groups that
/// begin within a pipeline stage, within 16 bytes of codes and within four scales, and groups at
/// multiples of 64 columns, which are copied in larger pieces.
#[test]
fn groups_have_the_bits_of_the_scalar_kernel() {
    let client = gpu!("groups_have_the_bits_of_the_scalar_kernel");
    for (format, unit, sizes) in [
        (BlockScaled::Nvfp4, 16, &[16, 0, 208, 48, 0, 160][..]),
        (BlockScaled::Nvfp4, 64, &[64, 320, 0, 128]),
        (BlockScaled::Mxfp8, 32, &[32, 0, 288, 64, 96]),
    ] {
        let total: usize = sizes.iter().sum();
        let groups = offsets(&client, sizes);
        let count = sizes.len();
        for (m, n) in [(40, 136), (130, 264)] {
            let what = format!("{format:?}, {sizes:?}, {m} x {n}");
            let a = random(&client, format, (m, total), 3);
            let b = random(&client, format, (n, total), 4);
            let along_k = Gemm::new(&a, &b).k_grouped(&groups).k_alignment(unit);
            assert_scalar_bits(&client, along_k, format, &format!("{what}, along K"));
            if format == BlockScaled::Nvfp4 {
                let mut generator = Generator::new(9);
                let mut amax = |len: usize| -> Handle {
                    let values: Vec<f32> = (0..len).map(|_| 1.0 + generator.uniform()).collect();
                    client.create_from_slice(bytemuck::cast_slice(&values))
                };
                let (a_amax, b_amax) = (amax(count * m), amax(count * n));
                let operand = |packed, amax| Operand {
                    elements: Elements::Quantized(packed),
                    scale: Scale::PerRow(amax, 2688.0),
                };
                let request = Gemm::new(operand(&a, &a_amax), operand(&b, &b_amax));
                let request = request.k_grouped(&groups).k_alignment(unit);
                assert_scalar_bits(&client, request, format, &format!("{what}, per row"));
            }
            let k = 96;
            let a = random(&client, format, (total, k), 5);
            let b = random(&client, format, (count * n, k), 6);
            let along_m = Gemm::new(&a, &b).m_grouped(&groups);
            assert_scalar_bits(&client, along_m, format, &format!("{what}, along M"));
        }
    }
}

/// Returns the offsets of groups of these sizes.
fn offsets(client: &Client, sizes: &[usize]) -> GroupOffsets {
    let mut offsets = vec![0u32];
    for size in sizes {
        offsets.push(offsets[offsets.len() - 1] + *size as u32);
    }
    let words = client.create_from_slice(bytemuck::cast_slice(&offsets));
    GroupOffsets::new(words, sizes.len()).unwrap()
}

#[test]
fn repeated_products_are_identical() {
    let client = gpu!("repeated_products_are_identical");
    let (m, n, k) = (555, 648, 1040);
    let (a, b) = (Packed::random(m, k, 5), Packed::random(n, k, 6));
    for kernel in KERNELS {
        let first = kernel.sums(&client, &a, &b);
        for _ in 0..4 {
            assert_floats(
                &kernel.sums(&client, &a, &b),
                &first,
                &format!("{kernel:?}"),
            );
        }
    }
}

/// Memory after the output keeps its contents.
#[test]
fn memory_behind_the_output_is_untouched() {
    let client = gpu!("memory_behind_the_output_is_untouched");
    for kernel in [Kernel::Matrix, Kernel::BlockScaled(1)] {
        for (m, n, k) in [(130, 264, 80), (3, 72, 48)] {
            let (a, b) = (Packed::random(m, k, 5), Packed::random(n, k, 6));
            let (a, b) = (a.device(&client), b.device(&client));
            let guard = 4096;
            let mut held = vec![0f32; m * n];
            held.extend(vec![12345.0; guard]);
            let memory = client.create_from_slice(bytemuck::cast_slice(&held));
            let matrix = Matrix::new(memory.clone(), m, n, FloatKind::F32).unwrap();
            let target = Target::Accumulate(&matrix);
            kernel.product(
                &client,
                &Operand::from(&a),
                &Operand::from(&b),
                None,
                target,
            );
            let whole = Matrix::new(memory, 1, m * n + guard, FloatKind::F32).unwrap();
            let found: Vec<f32> = read_matrix(&client, &whole);
            assert!(found[m * n..].iter().all(|value| *value == 12345.0));
            assert!(found[..m * n].iter().any(|value| *value != 0.0));
        }
    }
}

#[test]
fn empty_contractions() {
    let client = gpu!("empty_contractions");
    for kernel in KERNELS {
        let (a, b) = (Packed::random(40, 0, 1), Packed::random(48, 0, 2));
        assert_eq!(
            kernel.sums(&client, &a, &b),
            vec![0.0; 40 * 48],
            "{kernel:?}"
        );
    }
}

/// bf16 operands on matrix instructions, in rows of any length and at any address, with either
/// operand packed or not: the bits of the packed GEMM if both exist.
#[test]
fn bf16_operands() {
    let client = gpu!("bf16_operands");
    for (m, n, k) in [(20, 40, 48), (130, 150, 272), (33, 17, 1)] {
        let (a, b) = (Packed::random(m, k, 5), Packed::random(n, k, 6));
        let half = |packed: &Packed| -> Vec<bf16> { convert(&packed.decoded()) };
        let (x, y) = match k.is_multiple_of(16) {
            true => (half(&a), half(&b)),
            false => (
                vec![bf16::from_f32(3.0); m * k],
                vec![bf16::from_f32(0.5); n * k],
            ),
        };
        let new = Target::New(FloatKind::F32);
        let run = |a: &Operand, b: &Operand| -> Vec<f32> {
            read_matrix(&client, &Kernel::Matrix.product(&client, a, b, None, new))
        };
        let dense = (upload(&client, &x, m, k), upload(&client, &y, n, k));
        let found = run(&Operand::from(&dense.0), &Operand::from(&dense.1));
        if !k.is_multiple_of(16) {
            assert_eq!(found, vec![1.5; m * n]);
            continue;
        }
        let packed = (a.device(&client), b.device(&client));
        let one = |elements| Operand {
            elements,
            scale: Scale::One,
        };
        let (left, right) = (
            one(Elements::Quantized(&packed.0)),
            one(Elements::Quantized(&packed.1)),
        );
        let what = format!("{m} x {n} x {k}");
        let expected = run(&left, &right);
        assert!(expected.iter().any(|value| *value != 0.0));
        assert_floats(&found, &expected, &what);
        assert_floats(&run(&left, &Operand::from(&dense.1)), &expected, &what);
        assert_floats(&run(&Operand::from(&dense.0), &right), &expected, &what);
        // A view that begins inside a vector.
        let mut padded = vec![bf16::from_f32(100.0)];
        padded.extend(&x);
        let handle = client.create_from_slice(bytemuck::cast_slice(&padded));
        let view = Matrix::new(handle.offset_start(2), m, k, FloatKind::Bf16).unwrap();
        assert_floats(
            &run(&Operand::from(&view), &right),
            &expected,
            &format!("{what}: view"),
        );
    }
    // Rows whose length is not a multiple of any vector, with integers, whose sums are exact.
    for (m, n, k) in [(9, 16, 33), (40, 24, 50), (131, 140, 84)] {
        let values = |len: usize, step: usize| -> Vec<bf16> {
            (0..len)
                .map(|i| bf16::from_f32((i * step % 9) as f32 - 4.0))
                .collect()
        };
        let (x, y) = (values(m * k, 7), values(n * k, 5));
        let (a, b) = (upload(&client, &x, m, k), upload(&client, &y, n, k));
        let new = Target::New(FloatKind::F32);
        let found =
            Kernel::Matrix.product(&client, &Operand::from(&a), &Operand::from(&b), None, new);
        for (i, found) in read_matrix::<f32>(&client, &found).iter().enumerate() {
            let terms = x[i / n * k..][..k].iter().zip(&y[i % n * k..][..k]);
            let expected: f32 = terms.map(|(x, y)| x.to_f32() * y.to_f32()).sum();
            assert_eq!(*found, expected, "{m} x {n} x {k}: element {i}");
        }
    }
}

/// Small M on the path of other devices, which Hopper uses if the rows of `b` are not a multiple of
/// 8; with scales of all bytes, and as on a device that cannot convert them, bit for bit.
#[test]
fn few_rows_without_a_path_of_their_own() {
    let client = gpu!("few_rows_without_a_path_of_their_own");
    let here = Capabilities::of(&client);
    let old = Capabilities {
        compute_capability: Some(80),
        gemm: GemmBackend::Cmma,
        ..here.clone()
    };
    for (m, n, k) in [
        (1, 2, 32),
        (5, 10, 96),
        (16, 1002, 1024),
        (13, 76, 160),
        (9, 20, 2048),
        (11, 12, 48),
        (2, 130, 1040),
    ] {
        let (a, mut b) = (Packed::random(m, k, 5), Packed::random(n, k, 6));
        let what = format!("{m} x {n} x {k}");
        let problem = Problem::new([OperandLayout::Packed; 2], (m, n, k));
        let choice = gemm::choose(&client, &problem).unwrap();
        let found = (choice.backend, choice.plan);
        assert_eq!(found, (GemmBackend::Cmma, Plan::from(SmallM)), "{what}");
        let (left, right) = (a.device(&client), b.device(&client));
        let found = multiply(&client, Gemm::new(&left, &right).out(FloatKind::F32)).unwrap();
        assert_bound(&read_matrix::<f32>(&client, &found), &a, &b, &what);
        // Includes NaN, zero and subnormal scales.
        for (i, scale) in b.scales.iter_mut().enumerate() {
            *scale = (i % 128) as u8;
        }
        let right = b.device(&client);
        let new = Target::New(FloatKind::F32);
        let expected = multiply(&client, Gemm::new(&left, &right).out(FloatKind::F32)).unwrap();
        let (left, right) = (Operand::from(&left), Operand::from(&right));
        let found = multiply(
            &client,
            Gemm::new(left, right).target(new).capabilities(&old),
        )
        .unwrap();
        let (found, expected): (Vec<f32>, Vec<f32>) = (
            read_matrix(&client, &found),
            read_matrix(&client, &expected),
        );
        assert_floats(&found, &expected, &format!("{what}, sm_80"));
    }
}

/// Groups of rows by the block-scaled kernel, compared with the scalar path bit for bit.
#[test]
fn block_scaled_rows_in_groups() {
    let client = gpu!("block_scaled_rows_in_groups");
    let mut random = Generator::new(3);
    let many = (0..256).map(|_| random.next_u32() as usize % 12).collect();
    for sizes in [
        vec![0, 1, 127, 128, 129, 0, 65],
        vec![0, 0],
        vec![200],
        many,
    ] {
        for (strips, n, k) in [(1, 136, 208), (2, 128, 128)] {
            let count = sizes.len();
            let mut offsets = vec![0u32];
            for size in &sizes {
                offsets.push(offsets.last().unwrap() + *size as u32);
            }
            // Rows after the last group are not written.
            let m = *offsets.last().unwrap() as usize + 3;
            let (a, b) = (Packed::random(m, k, 1), Packed::random(count * n, k, 2));
            let (left, right) = (a.device(&client), b.device(&client));
            let groups = GroupOffsets {
                offsets: client.create_from_slice(bytemuck::cast_slice(&offsets)),
                count,
            };
            let held = vec![0.5f32; m * n];
            let (x, y) = (Operand::from(&left), Operand::from(&right));
            let target = upload(&client, &held, m, n);
            let target = Target::Accumulate(&target);
            let path = Some(GemmBackend::Scalar);
            let expected = multiply(
                &client,
                Gemm::new(x, y)
                    .target(target)
                    .m_grouped(&groups)
                    .backend(path),
            );
            let expected: Vec<f32> = read_matrix(&client, &expected.unwrap());
            let target = upload(&client, &held, m, n);
            let target = Target::Accumulate(&target);
            let found = multiply(
                &client,
                Gemm::new(x, y)
                    .target(target)
                    .m_grouped(&groups)
                    .plan(software(strips)),
            );
            let found: Vec<f32> = read_matrix(&client, &found.unwrap());
            let what = format!("{strips}, {count} groups, n {n}, k {k}");
            assert_floats(&found, &expected, &what);
            assert_eq!(found[(m - 3) * n..], held[(m - 3) * n..], "{what}");
        }
    }
}

#[test]
fn errors_name_what_is_missing() {
    let client = gpu!("errors_name_what_is_missing");
    let a = Packed::random(32, 32, 1).device(&client);
    let wide = Packed::random(9, 32, 1).device(&client);
    let run = |b: Operand, path: Option<GemmBackend>, plan: Option<Plan>| {
        let new = Target::New(FloatKind::F32);
        multiply(
            &client,
            Gemm::new(&a, b).target(new).backend(path).plan(plan),
        )
        .unwrap_err()
        .to_string()
    };
    let path = Some(GemmBackend::Sm120BlockScaled);
    if Capabilities::of(&client).gemm != GemmBackend::Sm120BlockScaled {
        let error = run(Operand::from(&a), path, None);
        assert!(error.contains("compute capability 12.0"), "{error}");
    }
    let error = run(Operand::from(&wide), path, Some(software(1)));
    assert!(error.contains("multiple of 8"), "{error}");
    let half = Matrix::empty(&client, 32, 32, FloatKind::Bf16);
    let error = run(Operand::from(&half), path, Some(software(1)));
    assert!(error.contains("packed operands"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, failure_persistence: None, ..Default::default() })]

    /// Any shape, on every kernel.
    #[test]
    fn random_shapes(m in 1usize..400, n in 1usize..90, blocks in 1usize..40, seed: u32) {
        let Some(client) = device::client_of_gpu("random_shapes", "cmma") else { return Ok(()) };
        let n = 8 * n;
        let (a, b) = (Packed::random(m, blocks * 16, seed), Packed::random(n, blocks * 16, !seed));
        let what = format!("{m} x {n}, {blocks} blocks");
        assert_bound(&Kernel::Matrix.sums(&client, &a, &b), &a, &b, &what);
        let expected = Kernel::Scalar.sums(&client, &a, &b);
        for strips in [1, 2] {
            assert_floats(&Kernel::BlockScaled(strips).sums(&client, &a, &b), &expected, &what);
        }
    }

    /// Any K up to 65536, with few rows and columns.
    #[test]
    fn random_contractions(m in 1usize..40, n in 1usize..6, blocks in 1usize..4097, seed: u32) {
        let Some(client) = device::client_of_gpu("random_contractions", "cmma") else { return Ok(()) };
        let n = 8 * n;
        let (a, b) = (Packed::random(m, blocks * 16, seed), Packed::random(n, blocks * 16, !seed));
        let what = format!("{m} x {n}, {blocks} blocks");
        for kernel in [Kernel::Matrix, Kernel::BlockScaled(1)] {
            assert_bound(&kernel.sums(&client, &a, &b), &a, &b, &what);
        }
        let found = multiply(&client, Gemm::new(&a.device(&client), &b.device(&client)).out(FloatKind::F32));
        assert_bound(&read_matrix::<f32>(&client, &found.unwrap()), &a, &b, &what);
    }
}
