//! The linear layer that is added to a matrix.

use burn_core::tensor::{DType, Device, Tensor};
use burn_nvfp4::Nvfp4Error;
use burn_nvfp4::functions::{add_linear, linear, try_add_linear};
use burn_nvfp4::ops::LinearSpec;

use crate::support::{Matrix, activation, device, spec, values};

/// Returns a matrix of integers from -7 to 7, whose products sum up exactly in any order.
fn integers(rows: usize, cols: usize, dtype: DType, seed: usize) -> Matrix {
    let value = |i: usize| ((i * i * 5 + i * (seed + 3) + seed) % 15) as f32 - 7.0;
    Matrix::new((0..rows * cols).map(value).collect(), rows, cols, dtype)
}

/// Output, and the gradients by `added`, `x` and `w`.
type Results = [Vec<f32>; 4];

/// Returns the results of `sum` for the gradient `dy`. If `is_shared`, another tensor shares the
/// memory of `added`, and keeps its values.
fn step(
    [added, x, w, dy]: [&Matrix; 4],
    is_shared: bool,
    device: &Device,
    sum: impl Fn(Tensor<2>, Tensor<2>, Tensor<2>) -> Tensor<2>,
) -> Results {
    let leaf = |matrix: &Matrix| matrix.tensor(device).require_grad();
    let leaves = [added, x, w].map(leaf);
    let [sum_added, x, w] = leaves.clone();
    // The memory of the leaf itself is always shared.
    let own = sum_added * 1.0;
    let kept = is_shared.then(|| own.clone());
    let y = sum(own, x, w);
    assert_eq!(y.dtype(), added.dtype);
    let grads = (y.clone() * dy.tensor(device)).sum().backward();
    if let Some(kept) = kept {
        assert_eq!(values(kept.inner()), added.values, "the shared memory");
    }
    let grads = leaves.map(|leaf| values(leaf.grad(&grads).expect("a gradient")));
    let [d_added, dx, dw] = grads;
    [values(y.inner()), d_added, dx, dw]
}

/// In high precision the sum is exact and rounded once, whatever the widths are. The gradient of
/// the addend is that of the output, and the other gradients are those of the layer alone.
#[test]
fn the_sum_is_rounded_once() {
    let device = device().autodiff();
    let spec = LinearSpec::high_precision();
    for (m, k, n) in [(33, 48, 64), (20, 24, 40), (5, 7, 9)] {
        for dtype in [DType::F32, activation()] {
            let matrices = |dtype| {
                [
                    integers(m, n, dtype, 1),
                    integers(m, k, dtype, 2),
                    integers(k, n, DType::F32, 3),
                    integers(m, n, dtype, 4),
                ]
            };
            let [added, x, w, dy] = &matrices(dtype);
            let wide = matrices(DType::F32);
            let expected = step(wide.each_ref(), true, &device, |added, x, w| {
                added + linear(x, w, None, spec)
            });
            let [y, _, dx, dw] = &expected;
            let narrow =
                |values: &[f32], rows, cols| Matrix::new(values.to_vec(), rows, cols, dtype).values;
            let expected = [
                narrow(y, m, n),
                dy.values.clone(),
                narrow(dx, m, k),
                dw.clone(),
            ];
            for is_shared in [false, true] {
                let found = step([added, x, w, dy], is_shared, &device, |added, x, w| {
                    add_linear(added, x, w, spec)
                });
                assert!(found == expected, "{m} x {k} x {n}, {dtype:?}, {is_shared}");
            }
        }
    }
}

/// Operands in NVFP4 are those of the layer alone.
#[test]
fn operands_are_those_of_the_layer() {
    let device = device().autodiff();
    let (m, k, n) = (24, 32, 48);
    let [added, x, w, dy] = [(m, n, 31), (m, k, 32), (k, n, 33), (m, n, 34)]
        .map(|(rows, cols, seed)| Matrix::gaussian(rows, cols, DType::F32, seed));
    let matrices = [&added, &x, &w, &dy];
    let expected = step(matrices, true, &device, |added, x, w| {
        added + linear(x, w, None, spec(5, 3))
    });
    for is_shared in [false, true] {
        let found = step(matrices, is_shared, &device, |added, x, w| {
            add_linear(added, x, w, spec(5, 3))
        });
        assert!(found == expected, "{is_shared}");
    }
}

/// Without gradients, and with gradients of some tensors only.
#[test]
fn gradients_that_are_not_required() {
    let device = device().autodiff();
    let spec = LinearSpec::high_precision();
    let [added, x, w] = [(6, 16, 1), (6, 32, 2), (32, 16, 3)]
        .map(|(rows, cols, seed)| integers(rows, cols, DType::F32, seed));
    let sum = |tracked: [bool; 3]| {
        let leaves = [(&added, tracked[0]), (&x, tracked[1]), (&w, tracked[2])];
        let leaves =
            leaves.map(|(matrix, is_tracked)| matrix.tensor(&device).set_require_grad(is_tracked));
        let [added, x, w] = leaves.clone();
        (add_linear(added, x, w, spec), leaves)
    };
    let (y, _) = sum([false; 3]);
    assert!(!y.is_tracked());
    let expected = values(y.inner());
    for tracked in [
        [true, false, false],
        [false, true, false],
        [false, false, true],
    ] {
        let (y, leaves) = sum(tracked);
        assert_eq!(values(y.clone().inner()), expected, "{tracked:?}");
        let grads = y.sum().backward();
        let found = leaves.map(|leaf| leaf.is_tracked() && leaf.grad(&grads).is_some());
        assert_eq!(found, tracked);
    }
}

#[test]
fn an_addend_that_does_not_match_is_refused() {
    let device = device();
    let zeros = |rows, cols| Tensor::<2>::zeros([rows, cols], (&device, DType::F32));
    let spec = LinearSpec::high_precision();
    let run = |added| try_add_linear(added, zeros(4, 16), zeros(16, 32), spec);
    assert!(run(zeros(4, 32)).is_ok());
    match run(zeros(4, 16)) {
        Err(Nvfp4Error::Shape {
            argument,
            found,
            expected,
        }) => {
            assert_eq!((argument, &*found), ("added", "[4, 16]"));
            assert!(expected.starts_with("[4, 32]"), "{expected}");
        }
        other => panic!("{other:?}"),
    }
    match run(zeros(4, 32).cast(DType::F16)) {
        Err(Nvfp4Error::DType { argument, .. }) => assert_eq!(argument, "added"),
        other => panic!("{other:?}"),
    }
}
