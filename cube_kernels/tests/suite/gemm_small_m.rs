//! GEMMs of few bf16 rows with a packed `b`, as in decoding.

use crate::gemm::check_epilogues_of;
use crate::support::device::{assert_floats, read_f32, read_matrix, upload};
use crate::support::epilogue::Epilogue;
use crate::support::gemm::{multiply, multiply_amax};
use crate::support::packed::{Packed, assert_bound, unscaled};
use crate::support::quantize;
use cubecl::prelude::*;
use half::bf16;
use nvfp4_kernels::{
    capabilities::GemmBackend,
    gemm::{Elements, Gemm, Operand, OutputAmax, Plan, Scale, Target, proof::SmallM},
    tensor::{FloatKind, Matrix},
};

/// Fewer rows of `b` than cubes would use, whole chunks and a tail, large K, and rows that end in
/// half a vector.
const SHAPES: [(usize, usize, usize); 17] = [
    (1, 16, 256),
    (1, 3072, 2048),
    (1, 2064, 2304),
    (1, 528, 14336),
    (1, 16384, 2048),
    (2, 272, 8192),
    (3, 4112, 4096),
    (5, 1040, 1024),
    (8, 4096, 2048),
    (8, 144, 2176),
    (1, 72, 2064),
    (4, 66, 512),
    // A long row, in cubes of 32 warps and of 16.
    (1, 272, 8192),
    (1, 258, 8208),
    (1, 258, 8320),
    (1, 4096, 8320),
    (1, 4096, 14336),
];

/// Returns `a` in bf16, without the global scale.
fn as_bf16(client: &Client, a: &Packed, m: usize, k: usize) -> Matrix {
    let values: Vec<bf16> = a.decoded().into_iter().map(bf16::from_f32).collect();
    upload(client, &values, m, k)
}

fn sums(client: &Client, a: &Matrix, b: &Packed, plan: Option<Plan>) -> Vec<f32> {
    let b = b.device(client);
    let (a, b) = (
        unscaled(Elements::Bf16(a)),
        unscaled(Elements::Quantized(&b)),
    );
    let backend = plan.is_none().then_some(GemmBackend::Scalar);
    let request = Gemm::new(a, b).target(Target::New(FloatKind::F32));
    let found = multiply(client, request.backend(backend).plan(plan));
    read_matrix(client, &found.unwrap())
}

/// Sums of integers are exact in any order: they equal the bits of the scalar kernel.
#[test]
fn integers_are_exact() {
    let client = gpu!("integers_are_exact");
    for (i, (m, n, k)) in SHAPES.into_iter().enumerate() {
        let seed = 2 * i as u32;
        let (a, b) = (
            Packed::integers(m, k, seed),
            Packed::integers(n, k, seed + 1),
        );
        let left = as_bf16(&client, &a, m, k);
        let expected = sums(&client, &left, &b, None);
        let found = sums(&client, &left, &b, Some(Plan::from(SmallM)));
        assert_floats(&found, &expected, &format!("{m} x {n} x {k}"));
        assert!(expected.iter().any(|sum| *sum != 0.0));
    }
}

/// All codes and scales, compared with sums in f64; a second run gives the same bits.
#[test]
fn random_elements_are_within_the_bound() {
    let client = gpu!("random_elements_are_within_the_bound");
    for (i, (m, n, k)) in SHAPES.into_iter().enumerate() {
        let seed = 100 + 2 * i as u32;
        let (a, b) = (Packed::random(m, k, seed), Packed::random(n, k, seed + 1));
        let left = as_bf16(&client, &a, m, k);
        let [of_a, right] = [&a, &b].map(|packed| packed.device(&client));
        let run = || -> Vec<f32> {
            let elements = Elements::Bf16(&left);
            let scale = Scale::Tensor(&of_a.amax, 2688.0);
            let a = Operand { elements, scale };
            let request = Gemm::new(a, &right).out(FloatKind::F32);
            let found = multiply(&client, request.plan(Some(Plan::from(SmallM))));
            read_matrix(&client, &found.unwrap())
        };
        let (found, again) = (run(), run());
        assert_floats(&found, &again, "the same product again");
        assert_bound(&found, &a, &b, &format!("{m} x {n} x {k}"));
    }
}

#[test]
fn epilogues() {
    let client = gpu!("epilogues");
    for shape in [(1, 272, 2048), (3, 1552, 512), (8, 2064, 1152)] {
        check_epilogues_of(
            &client,
            shape,
            Some(Plan::from(SmallM)),
            true,
            &Epilogue::all(),
        );
    }
}

/// The amax of the output is that of the written values, to which many cubes contribute.
#[test]
fn amax_of_the_output() {
    let client = gpu!("amax_of_the_output");
    for (m, n, k) in [(1, 16384, 256), (8, 8192, 512)] {
        let (a, b) = (Packed::random(m, k, 1), Packed::random(n, k, 2));
        let left = as_bf16(&client, &a, m, k);
        let right = b.device(&client);
        let (a, b) = (unscaled(Elements::Bf16(&left)), Operand::from(&right));
        let request = Gemm::new(a, b)
            .out(FloatKind::Bf16)
            .plan(Some(Plan::from(SmallM)));
        let (out, found) = multiply_amax(&client, request.amax(OutputAmax::Whole)).unwrap();
        let expected = quantize::amax(&client, &out, None).unwrap();
        let [found, expected] = [found, expected].map(|amax| read_f32(&client, &amax));
        assert_eq!(found.to_bits(), expected.to_bits(), "{m} x {n} x {k}");
        assert!(found > 0.0);
    }
}
