//! Uses of a layer: repeated, frozen, with the other layout, and together with undecorated models.

use burn_core::module::Module;
use burn_core::tensor::{DType, Tensor};
use burn_nn::LinearLayout;
use burn_nvfp4::decorate;
use burn_nvfp4::{Nvfp4Recipe, Nvfp4State};

use crate::support::own_process::own_process;

use super::models::{
    Explicit, Plain, assert_same_step, bits, device, explicit_grads, pair, plain_grads, tensor,
};

/// Each call of a layer in one graph draws separate bits, and the gradients of its weight add up.
#[test]
fn a_layer_called_twice() {
    own_process!("decorate");
    let device = device().autodiff();
    let (decorated, explicit) = pair(Plain::new(true, &device), &Nvfp4Recipe::new());
    let [x1, x2] = [1, 2].map(|seed| tensor::<2>([32, 32], seed, DType::F32, &device));
    let twice = |forward: &dyn Fn(Tensor<2>) -> Tensor<2>| {
        let leaves = [&x1, &x2].map(|x| x.clone().require_grad());
        let [y1, y2] = leaves.clone().map(forward);
        let grads = (y1.clone() * 2.0 + y2.clone()).square().sum().backward();
        let values = [y1.inner(), y2.inner()].map(bits);
        let dx = leaves.map(|x| bits(x.grad(&grads).unwrap()));
        (grads, values, dx)
    };
    let (g1, y1, dx1) = twice(&|x| decorated.forward(x));
    let (g2, y2, dx2) = twice(&|x| explicit.forward(x));
    assert_eq!((y1, dx1), (y2, dx2));
    assert_eq!(plain_grads(&decorated, &g1), explicit_grads(&explicit, &g2));
    let report = decorate::report(&decorated).unwrap();
    report.check().unwrap();
    for layer in report.layers.values() {
        assert_eq!(layer.roles().map(|role| role.nvfp4), [2; 3], "{report}");
    }
    assert_eq!(Nvfp4State::collect(&decorated).layers["first"].offset, 2);
}

/// Frozen weights have no gradient, and pass on that of their input.
#[test]
fn frozen_weights_with_a_tracked_input() {
    own_process!("decorate");
    let device = device().autodiff();
    let (decorated, explicit) = pair(Plain::new(true, &device), &Nvfp4Recipe::new());
    let (decorated, explicit) = (decorated.no_grad(), explicit.no_grad());
    let x = tensor::<2>([32, 32], 1, DType::F32, &device);
    let (grads, _) = assert_same_step("frozen", &decorated, &explicit, x, true);
    assert!(plain_grads(&decorated, &grads).iter().all(Option::is_none));
    let report = decorate::report(&decorated).unwrap();
    report.check().unwrap();
    for layer in report.layers.values() {
        let ran = layer.roles().map(|role| role.routed());
        assert_eq!(ran, [1, 1, 0], "{report}");
    }
}

/// Weights stored transposed.
#[test]
fn column_major_weights() {
    own_process!("decorate");
    let device = device().autodiff();
    let plain = Plain::with_layout(true, LinearLayout::Col, &device);
    let (decorated, explicit) = pair(plain, &Nvfp4Recipe::new());
    for tracked in [true, false] {
        let x = tensor([2, 16, 32], 1, DType::F32, &device);
        assert_same_step("column-major", &decorated, &explicit, x, tracked);
    }
    decorate::report(&decorated).unwrap().check().unwrap();
}

/// Fusion caches plans by the relative shapes of a graph. Neither other shapes nor an undecorated
/// model with the same graph may get a plan of another graph.
#[test]
fn shapes_and_models_that_alternate() {
    own_process!("decorate");
    let device = device().autodiff();
    let plain = Plain::new(true, &device);
    let (decorated, explicit) = pair(plain.clone(), &Nvfp4Recipe::new());
    let (other, other_explicit): (Plain, Explicit) =
        pair(Plain::new(true, &device), &Nvfp4Recipe::quartet2());
    let exact = |x: &Tensor<2>| {
        let x = x.clone().require_grad();
        let y = plain.forward(x.clone());
        let grads = y.clone().sum().backward();
        (bits(y.inner()), plain_grads(&plain, &grads))
    };
    let mut first = Vec::new();
    for round in 0..2 {
        for (index, rows) in [32, 48, 20, 32].into_iter().enumerate() {
            let x = tensor::<2>([rows, 32], index as u64, DType::F32, &device);
            let before = exact(&x);
            let what = format!("round {round}, {rows} rows");
            assert_same_step(&what, &decorated, &explicit, x.clone(), true);
            assert_same_step(&what, &other, &other_explicit, x.clone(), index % 2 == 0);
            assert_eq!(exact(&x), before, "{what}: undecorated");
            if round == 0 {
                first.push(before);
            } else {
                assert_eq!(first[index], before, "{what}: undecorated");
            }
        }
    }
    for model in [&decorated, &other] {
        decorate::report(model).unwrap().check().unwrap();
    }
}
