//! Epilogues of a GEMM, computed by plain arithmetic.

use super::{
    device::{DeviceElement, assert_floats, read_matrix, upload},
    inputs::{Generator, convert},
};
use cubecl::prelude::*;
use half::{bf16, f16};
use nvfp4_kernels::{
    gemm::{Scale, Target},
    tensor::{FloatKind, Matrix},
};

/// A GEMM with these factors of `a` and `b`, bias and target.
pub type Product<'a> = dyn Fn(Scale, Scale, Option<&Matrix>, Target) -> Matrix + 'a;

/// Operations on the accumulators.
#[derive(Debug, Clone, Copy)]
pub struct Epilogue {
    /// True for one factor per row, or per column, instead of one for all.
    pub by_row: bool,
    pub by_column: bool,
    pub bias: bool,
    /// True if the result is added to the contents of the output.
    pub accumulate: bool,
    pub out: FloatKind,
}

impl Epilogue {
    const PLAIN: Self = Self {
        by_row: false,
        by_column: false,
        bias: false,
        accumulate: false,
        out: FloatKind::F32,
    };

    /// Returns each operation alone, and each type with and without accumulation.
    pub fn all() -> Vec<Self> {
        let (by_row, by_column, bias, plain) = (true, true, true, Self::PLAIN);
        let factors = [
            Self {
                by_row,
                by_column,
                bias,
                ..plain
            },
            Self { by_row, ..plain },
            Self { by_column, ..plain },
        ];
        let types = [FloatKind::F32, FloatKind::Bf16, FloatKind::F16].into_iter();
        let types = types.flat_map(|out| {
            [false, true].map(|accumulate| Self {
                bias,
                accumulate,
                out,
                ..plain
            })
        });
        factors.into_iter().chain(types).collect()
    }
}

/// Checks each of `epilogues` of `product` against its plain sums with one more rounding. Rows have
/// `n` elements and belong to the groups `group_of`, in ascending order (all to 0 without groups);
/// every group has separate factors and a separate bias for its columns.
pub fn check_epilogues(
    client: &Client,
    n: usize,
    group_of: &[usize],
    epilogues: &[Epilogue],
    what: &str,
    product: &Product,
) {
    let (m, groups) = (group_of.len(), group_of.last().unwrap() + 1);
    let mut random = Generator::new(7);
    let mut vector = |len: usize| -> Vec<f32> { (0..len).map(|_| random.normal()).collect() };
    let (rows, cols) = (vector(m), vector(groups * n));
    let (bias, held) = (vector(groups * n), vector(m * n));
    let handle = |x: &[f32]| client.create_from_slice(bytemuck::cast_slice(x));
    let (row_amax, col_amax) = (handle(&rows), handle(&cols));
    let (amax, other) = (900.0f32, 1100.0f32);
    let (a_amax, b_amax) = (handle(&[amax]), handle(&[other]));
    let bias_matrix = upload(client, &bias, groups, n);

    let new = Target::New(FloatKind::F32);
    let sums: Vec<f32> = read_matrix(client, &product(Scale::One, Scale::One, None, new));
    assert_eq!(sums.len(), m * n, "{what}");
    assert!(sums.iter().any(|sum| *sum != 0.0), "{what}");
    for epilogue in epilogues {
        let (a, b) = (
            match epilogue.by_row {
                true => Scale::PerRow(&row_amax, 2688.0),
                false => Scale::Tensor(&a_amax, 2688.0),
            },
            match epilogue.by_column {
                true => Scale::PerRow(&col_amax, 1536.0),
                false => Scale::Tensor(&b_amax, 1536.0),
            },
        );
        let value = |(i, sum): (usize, &f32)| {
            // Index among the columns of all groups.
            let (row, own) = (i / n, group_of[i / n] * n + i % n);
            let left = if epilogue.by_row { rows[row] } else { amax };
            let right = if epilogue.by_column { cols[own] } else { other };
            let scaled = sum * ((left / 2688.0) * (right / 1536.0));
            if epilogue.bias {
                scaled + bias[own]
            } else {
                scaled
            }
        };
        let values: Vec<f32> = sums.iter().enumerate().map(value).collect();
        let held = epilogue.accumulate.then_some(&held[..]);
        let bias = epilogue.bias.then_some(&bias_matrix);
        let product: &dyn Fn(Target) -> Matrix = &|target| product(a, b, bias, target);
        let what = format!("{what}, {epilogue:?}");
        match epilogue.out {
            FloatKind::F32 => check::<f32>(client, &values, held, n, &what, product),
            FloatKind::Bf16 => check::<bf16>(client, &values, held, n, &what, product),
            FloatKind::F16 => check::<f16>(client, &values, held, n, &what, product),
        }
    }
}

/// Checks that `product` equals `values` rounded to `T` once, added to `held` in `T` if it
/// accumulates into a matrix.
fn check<T: DeviceElement>(
    client: &Client,
    values: &[f32],
    held: Option<&[f32]>,
    n: usize,
    what: &str,
    product: &dyn Fn(Target) -> Matrix,
) {
    let Some(held) = held else {
        let found: Vec<T> = read_matrix(client, &product(Target::New(T::KIND)));
        return assert_floats(&found, &convert::<T>(values), what);
    };
    let held: Vec<T> = convert(held);
    let matrix = upload(client, &held, held.len() / n, n);
    let found: Vec<T> = read_matrix(client, &product(Target::Accumulate(&matrix)));
    let sums = values.iter().zip(&held).map(|(x, y)| x + y.to_f32());
    let expected: Vec<T> = convert(&sums.collect::<Vec<f32>>());
    assert_floats(&found, &expected, what);
}
