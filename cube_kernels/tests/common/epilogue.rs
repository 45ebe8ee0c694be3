//! What a product does to its sums, by plain arithmetic.

use super::{
    common::{Generator, convert},
    device::{DeviceElement, assert_floats, read_matrix, upload},
};
use cubecl::prelude::*;
use nvfp4_kernels::{
    device::{FloatKind, Matrix},
    gemm::{Scale, Target},
};

/// A product with these factors of `a` and `b`, bias and target.
pub type Product<'a> = dyn Fn(Scale, Scale, Option<&Matrix>, Target) -> Matrix + 'a;

/// Bias, accumulation, factors for each row and column and the output types of `product`, each from its plain sums
/// by one more rounding. Its rows have `n` elements and are in the groups `group_of`, in ascending order (all in 0
/// where there are none): every group has factors and a bias of its own for its columns. Products along groups
/// of the contraction take no bias.
pub fn check_epilogues(
    client: &Client,
    n: usize,
    group_of: &[usize],
    with_bias: bool,
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
    let bias_matrix = with_bias.then_some(&bias_matrix);

    let new = Target::New(FloatKind::F32);
    let sums: Vec<f32> = read_matrix(client, &product(Scale::One, Scale::One, None, new));
    assert_eq!(sums.len(), m * n, "{what}");
    assert!(sums.iter().any(|sum| *sum != 0.0), "{what}");
    // From the row of an element, its place among the columns of all groups, and its sum.
    let at = |value: &dyn Fn(usize, usize, f32) -> f32| -> Vec<f32> {
        let elements = sums.iter().enumerate();
        elements
            .map(|(i, &sum)| value(i / n, group_of[i / n] * n + i % n, sum))
            .collect()
    };
    let biased = |own: usize, value: f32| match with_bias {
        true => value + bias[own],
        false => value,
    };

    let per_row = Scale::PerRow(&row_amax, 2688.0);
    let per_column = Scale::PerRow(&col_amax, 1536.0);
    let found = product(per_row, per_column, bias_matrix, new);
    let expected =
        at(&|row, own, sum| biased(own, sum * ((rows[row] / 2688.0) * (cols[own] / 1536.0))));
    let named = |part: &str| format!("{what}: {part}");
    assert_floats(
        &read_matrix(client, &found),
        &expected,
        &named("rows, columns"),
    );
    let found = product(per_row, Scale::Tensor(&b_amax, 1536.0), None, new);
    let expected = at(&|row, _, sum| sum * ((rows[row] / 2688.0) * (other / 1536.0)));
    assert_floats(&read_matrix(client, &found), &expected, &named("rows"));
    let found = product(Scale::Tensor(&a_amax, 2688.0), per_column, None, new);
    let expected = at(&|_, own, sum| sum * ((amax / 2688.0) * (cols[own] / 1536.0)));
    assert_floats(&read_matrix(client, &found), &expected, &named("columns"));

    let alpha = (amax / 2688.0) * (other / 2688.0);
    let scaled = at(&|_, own, sum| biased(own, sum * alpha));
    let product: &dyn Fn(Target) -> Matrix = &|target| {
        let (a, b) = (
            Scale::Tensor(&a_amax, 2688.0),
            Scale::Tensor(&b_amax, 2688.0),
        );
        product(a, b, bias_matrix, target)
    };
    check_type::<f32>(client, &scaled, &held, n, &named("f32"), product);
    check_type::<half::bf16>(client, &scaled, &held, n, &named("bf16"), product);
    check_type::<half::f16>(client, &scaled, &held, n, &named("f16"), product);
}

/// `product` has the values `scaled`, rounded to `T` once, in a new matrix, and added to what `held` has in `T`.
fn check_type<T: DeviceElement>(
    client: &Client,
    scaled: &[f32],
    held: &[f32],
    n: usize,
    what: &str,
    product: &dyn Fn(Target) -> Matrix,
) {
    let found: Vec<T> = read_matrix(client, &product(Target::New(T::KIND)));
    assert_floats(&found, &convert::<T>(scaled), what);
    let held: Vec<T> = convert(held);
    let matrix = upload(client, &held, held.len() / n, n);
    let found: Vec<T> = read_matrix(client, &product(Target::Accumulate(&matrix)));
    let sums = scaled.iter().zip(&held).map(|(x, y)| x + y.to_f32());
    let expected: Vec<T> = convert(&sums.collect::<Vec<f32>>());
    assert_floats(&found, &expected, &format!("{what}, added"));
}
