//! Burn's own layers with packed weights: their GEMMs are those of this crate's layers with the
//! same codes, bit for bit.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn_core::module::Module;
use burn_core::tensor::{DType, Device, Tensor};
use burn_nn::{Linear, LinearConfig};
use burn_nvfp4::nn::Activations;
use burn_nvfp4::quantize::dequantize;
use burn_nvfp4::{Nvfp4Linear, Nvfp4Recipe, QuantizeConfig, quantize, quantize_calibrated};

use crate::support::own_process::own_process;

use super::models::{bits, device, tensor};

const ALL: [Activations; 3] = [
    Activations::HighPrecision,
    Activations::DYNAMIC,
    Activations::Static,
];

/// Quantizes one layer, after a calibration with `batch` if the activations are static.
fn packed<L: Module>(layer: L, activations: Activations, forward: impl Fn(&L) -> Tensor<2>) -> L {
    let config = QuantizeConfig::new().with_activations(activations);
    let model = vec![layer];
    let made = match activations {
        // Nothing reads the output.
        Activations::Static => {
            quantize_calibrated(model, &config, |model| drop(forward(&model[0])))
        }
        _ => quantize(model, &config),
    };
    let (mut model, report) = made.unwrap();
    assert!(!report.layers[0].dequantizes, "{report}");
    model.remove(0)
}

/// Returns a layer of Burn and of this crate with the same codes.
fn pair(bias: bool, activations: Activations, device: &Device) -> (Linear, Nvfp4Linear) {
    let linear = LinearConfig::new(32, 48).with_bias(bias).init(device);
    let own = Nvfp4Linear::from_linear(linear.clone(), &Nvfp4Recipe::new()).unwrap();
    let batch = tensor::<2>([5, 32], 2, DType::F32, device) * 0.5;
    let burns = packed(linear, activations, |layer| layer.forward(batch.clone()));
    let own = packed(own, activations, |layer| layer.forward(batch.clone()));
    (burns, own)
}

#[test]
fn gemms_read_the_codes() {
    own_process!("decorate");
    let device = device();
    for activations in ALL {
        let (burns, own) = pair(false, activations, &device);
        let x = tensor::<3>([2, 5, 32], 3, DType::F32, &device);
        let expected = bits(own.forward(x.clone()));
        assert_eq!(bits(burns.forward(x.clone())), expected, "{activations:?}");
        let (burns, own) = pair(true, activations, &device);
        let error = burns.forward(x.clone()) - own.forward(x);
        assert!(
            error.abs().max().into_scalar::<f32>() < 1e-5,
            "{activations:?}"
        );
        let values = dequantize(burns);
        assert_eq!(bits(values.weight.val()), bits(own.weight.val()));
    }
}

#[test]
fn inputs_have_gradients() {
    own_process!("decorate");
    let device = device().autodiff();
    for activations in [Activations::HighPrecision, Activations::DYNAMIC] {
        let (burns, own) = pair(false, activations, &device);
        let x = tensor::<2>([7, 32], 3, DType::F32, &device).require_grad();
        let dy = tensor::<2>([7, 48], 4, DType::F32, &device);
        let dx = |y: Tensor<2>| {
            let grads = (y * dy.clone()).sum().backward();
            bits(x.grad(&grads).expect("tracked"))
        };
        let expected = dx(own.forward(x.clone()));
        assert_eq!(dx(burns.forward(x.clone())), expected, "{activations:?}");
        let y = bits(burns.valid().forward(x.clone().inner()));
        assert_eq!(y, bits(own.valid().forward(x.inner())));
    }
}

#[test]
fn another_use_of_the_weight_is_an_error() {
    own_process!("decorate");
    let device = device();
    let (layer, _) = pair(false, Activations::HighPrecision, &device);
    let x = tensor::<2>([4, 32], 3, DType::F32, &device);
    let weight = layer.weight.val().transpose();
    let y = tensor::<2>([4, 48], 5, DType::F32, &device).matmul(weight);
    assert!(y.sum().into_scalar::<f32>().is_nan());
    let panic = catch_unwind(AssertUnwindSafe(|| layer.forward(x))).unwrap_err();
    let panic = panic.downcast_ref::<String>().unwrap();
    assert!(
        panic.contains("layer `0`: its weight is transposed"),
        "{panic}"
    );
}
