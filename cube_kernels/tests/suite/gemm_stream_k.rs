//! Stream-K GEMMs on Hopper, whose tiles are split along K: bit for bit equal to whole tiles if
//! sums are exact, otherwise within the bound of f32 sums.

use crate::support::device::upload;
use crate::support::gemm::multiply;
use crate::support::inputs::Generator;
use crate::support::packed::{Packed, assert_bound, unscaled};
use cubecl::prelude::*;
use half::bf16;
use nvfp4_kernels::{
    capabilities::GemmBackend,
    gemm::{
        Elements, Gemm, Operand, Plan, Scale, Target,
        proof::{DequantThenBf16, DequantThenStreamK, Sm90Tile},
    },
    tensor::{FloatKind, Matrix},
};

/// Returns the bytes of a matrix.
fn bytes(client: &Client, matrix: &Matrix) -> Vec<u8> {
    let bytes = client.read_one(matrix.handle.clone()).unwrap();
    bytes[..matrix.len() * matrix.dtype.size()].to_vec()
}

/// Returns `rows` x `k` integers from -3 to 3, K-major and MN-major.
fn whole_numbers(client: &Client, rows: usize, k: usize, seed: u32) -> [Matrix; 2] {
    let mut random = Generator::new(seed);
    let x: Vec<bf16> = (0..rows * k)
        .map(|_| bf16::from_f32((random.next_u32() % 7) as f32 - 3.0))
        .collect();
    let columns: Vec<bf16> = (0..rows * k).map(|i| x[i % rows * k + i / rows]).collect();
    [
        upload(client, &x, rows, k),
        upload(client, &columns, k, rows),
    ]
}

/// Shapes with one split tile and with many, with and without whole waves before them, with one
/// slice and with several, with tails in all dimensions.
const SHAPES: [(usize, usize, usize); 9] = [
    (64, 64, 128),
    (1, 8, 4096),
    (768, 768, 4096),
    (768, 2304, 2048),
    (768, 4096, 1040),
    (2048, 768, 1032),
    (300, 2112, 1000),
    (2056, 4104, 520),
    (1544, 3000, 200),
];

/// Split tiles of one width give the bits of whole ones, for each layout of the operands.
fn shared_equal_whole(client: &Client, tile: Sm90Tile) {
    let mut compared = 0;
    for (m, n, k) in SHAPES {
        let [a, a_columns] = whole_numbers(client, m, k, 3);
        let [b, b_columns] = whole_numbers(client, n, k, 4);
        let (a, b) = (Elements::Bf16(&a), Elements::Bf16(&b));
        let a_columns = Elements::Bf16MnMajor(&a_columns);
        let b_columns = Elements::Bf16MnMajor(&b_columns);
        for [left, right] in [
            [a, b],
            [a_columns, b],
            [a, b_columns],
            [a_columns, b_columns],
        ] {
            let is_narrow = tile == Sm90Tile::N176;
            if is_narrow && matches!(right, Elements::Bf16MnMajor(_)) {
                continue;
            }
            let run = |plan| {
                let new = Target::New(FloatKind::F32);
                let gemm = Gemm::new(unscaled(left), unscaled(right)).target(new);
                let gemm = gemm.backend(Some(GemmBackend::Sm90Wgmma)).plan(Some(plan));
                multiply(client, gemm).map(|out| bytes(client, &out))
            };
            let Ok(found) = run(Plan::from(DequantThenStreamK(tile, 16))) else {
                // Full waves of this tile.
                continue;
            };
            let what = format!("{tile:?}, {m} x {n} x {k}, {left:?} {right:?}");
            let expected = run(Plan::from(DequantThenBf16(Sm90Tile::N128, 16))).unwrap();
            assert!(found == expected, "{what}");
            compared += 1;
        }
    }
    assert!(compared >= 16, "{compared}");
}

/// Defines a test per width, because compiling kernels takes most of the time.
macro_rules! widths {
    ($($test:ident: $tile:ident),*) => {$(
        #[test]
        fn $test() {
            let client = hopper!(stringify!($test));
            shared_equal_whole(&client, Sm90Tile::$tile);
        }
    )*};
}

widths!(
    shared_tiles_of_64_have_the_bits_of_whole_ones: N64,
    shared_tiles_of_128_have_the_bits_of_whole_ones: N128,
    shared_tiles_of_176_have_the_bits_of_whole_ones: N176,
    shared_tiles_of_256_have_the_bits_of_whole_ones: N256
);

/// The whole epilogue, repeatedly: sums are in K order, independent of which slice finishes first.
#[test]
fn shared_tiles_with_epilogues_are_deterministic() {
    let client = hopper!("shared_tiles_with_epilogues_are_deterministic");
    for (m, n, k) in [(768, 768, 8192), (768, 2304, 4096), (2056, 4104, 544)] {
        let (x, y) = (Packed::random(m, k, 5), Packed::random(n, k, 6));
        let (left, right) = (x.device(&client), y.device(&client));
        let mut random = Generator::new(7);
        let mut floats = |len: usize| {
            let x: Vec<f32> = (0..len).map(|_| random.normal()).collect();
            client.create_from_slice(bytemuck::cast_slice(&x))
        };
        let (rows, cols, held) = (floats(m), floats(n), floats(m * n));
        let bias = Matrix::new(floats(n), 1, n, FloatKind::F32).unwrap();
        let run = |scales: [Scale; 2], bias: Option<&Matrix>, target: Target<'_>, tile| {
            let operand = |elements, scale| Operand { elements, scale };
            let a = operand(Elements::Quantized(&left), scales[0]);
            let b = operand(Elements::Quantized(&right), scales[1]);
            let gemm = Gemm::new(a, b).bias(bias).target(target);
            let plan = Some(Plan::from(DequantThenStreamK(tile, 16)));
            let gemm = gemm.backend(Some(GemmBackend::Sm90Wgmma)).plan(plan);
            bytes(&client, &multiply(&client, gemm).unwrap())
        };
        for tile in [Sm90Tile::N256, Sm90Tile::N128] {
            let what = format!("{tile:?}, {m} x {n} x {k}");
            let of_tensors = [
                Scale::Tensor(&left.amax, 2688.0),
                Scale::Tensor(&right.amax, 2688.0),
            ];
            let new = Target::New(FloatKind::F32);
            let plain = run(of_tensors, None, new, tile);
            assert_bound(bytemuck::cast_slice(&plain), &x, &y, &what);
            let of_rows = [Scale::PerRow(&rows, 2688.0), Scale::PerRow(&cols, 1536.0)];
            let accumulated = || {
                let copy = client.read_one(held.clone()).unwrap();
                let copy = client.create_from_slice(&copy);
                let matrix = Matrix::new(copy, m, n, FloatKind::F32).unwrap();
                run(of_rows, Some(&bias), Target::Accumulate(&matrix), tile)
            };
            let first = accumulated();
            for _ in 0..10 {
                assert!(run(of_tensors, None, new, tile) == plain, "{what}");
                assert!(accumulated() == first, "{what}, accumulated");
            }
        }
    }
}
