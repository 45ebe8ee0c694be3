//! An unsupported use of a decorated layer is an error that names the layer, never a silent GEMM in
//! high precision.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn_core::tensor::{DType, Tensor};
use burn_nvfp4::{Nvfp4Recipe, decorate};

use crate::support::own_process::own_process;

use super::models::{Plain, device, tensor};

/// Returns the broken guarantees after `use_model`; the next use of the model must report them too.
#[track_caller]
fn failures(use_model: impl FnOnce(&Plain, Tensor<2>)) -> String {
    let device = device().autodiff();
    let model = decorate(Plain::new(true, &device), &Nvfp4Recipe::new()).unwrap();
    let x = tensor([32, 32], 1, DType::F32, &device);
    use_model(&model, x.clone());
    let report = decorate::report(&model).unwrap();
    let error = report.check().unwrap_err().to_string();
    let panic = catch_unwind(AssertUnwindSafe(|| model.forward(x))).unwrap_err();
    let panic = panic.downcast_ref::<String>().unwrap();
    assert!(panic.contains(&report.failures[0]), "{panic}");
    eprintln!("{error}");
    error
}

#[test]
fn other_operations_on_the_weight() {
    own_process!("decorate");
    let text = failures(|model, _| {
        let sum = model.second.weight.val().powi_scalar(2).sum();
        let value: f32 = sum.into_scalar();
        assert!(value.is_nan(), "a marked weight has no numbers");
    });
    assert!(
        text.contains("layer `second`: its weight is read by"),
        "{text}"
    );
}

#[test]
fn one_value_in_two_matmuls() {
    own_process!("decorate");
    let text = failures(|model, x| {
        let weight = model.first.weight.val();
        let y = x.clone().matmul(weight.clone()) + x.mul_scalar(2.0).matmul(weight);
        y.sum().backward();
    });
    assert!(
        text.contains("layer `first`: two matmuls use one value"),
        "{text}"
    );
}

#[test]
fn a_transposed_weight() {
    own_process!("decorate");
    let text = failures(|model, x| {
        let weight = model.first.weight.val().transpose();
        let y = tensor::<2>([32, 48], 2, DType::F32, &x.device()).matmul(weight);
        assert!(y.sum().into_scalar::<f32>().is_nan());
    });
    assert!(
        text.contains("layer `first`: its weight is transposed"),
        "{text}"
    );
}

#[test]
fn an_operation_between_matmul_and_bias() {
    own_process!("decorate");
    let text = failures(|model, x| {
        let weight = model.first.weight.val();
        let bias = model.first.bias.as_ref().unwrap().val();
        let y = x.matmul(weight).mul_scalar(2.0) + bias.unsqueeze();
        y.sum().backward();
    });
    assert!(text.contains("layer `first`"), "{text}");
    assert!(text.contains("reads its bias or its matmul"), "{text}");
}
