//! Norms and activations by the oracle.

use burn_core::backend::{Flex, tensor::FloatTensor};
use burn_core::tensor::{DType, Element, TensorData};
use burn_flex::FlexTensor;
use half::{bf16, f16};
use nvfp4_formats::reference::{self, Activation};

use super::super::MaybeTensor;
use super::super::layers::{ActivationOps, NormGradients, NormOps, NormResult, NormSpec};
use super::tensors::{matrix, with_elements};

fn tensor<T: Element>(values: Vec<T>, (rows, cols): (usize, usize)) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(values, [rows, cols]))
}

fn vector(values: Vec<f32>) -> FlexTensor {
    let len = values.len();
    FlexTensor::from_data(TensorData::new(values, [len]))
}

fn contiguous(x: MaybeTensor<Flex>) -> Option<FlexTensor> {
    x.into_option().map(|x| x.to_contiguous())
}

impl NormOps for Flex {
    fn nvfp4_norm_forward(
        x: FloatTensor<Self>,
        residual: MaybeTensor<Self>,
        gain: FloatTensor<Self>,
        bias: MaybeTensor<Self>,
        spec: NormSpec,
    ) -> NormResult<Self> {
        let shape = matrix(&x);
        let (gain, bias) = (gain.to_contiguous(), contiguous(bias));
        let residual = contiguous(residual);
        let NormSpec { norm, epsilon, .. } = spec;
        with_elements!(x, |values| {
            let residual = residual.as_ref().map(|residual| residual.storage());
            let bias = bias.as_ref().map(|bias| bias.storage());
            let factors = (gain.storage(), bias);
            let made = reference::norm_forward(norm, values, residual, factors, shape.0, epsilon);
            NormResult {
                sum: made.sum.map(|sum| tensor(sum, shape)).into(),
                normed: tensor(made.normed, shape),
                stats: vector(made.stats),
            }
        })
    }

    fn nvfp4_norm_backward(
        grad: FloatTensor<Self>,
        sum_grad: MaybeTensor<Self>,
        x: FloatTensor<Self>,
        stats: FloatTensor<Self>,
        gain: FloatTensor<Self>,
        bias: bool,
        spec: NormSpec,
    ) -> NormGradients<Self> {
        let shape = matrix(&x);
        let (grad, sum_grad) = (grad.to_contiguous(), contiguous(sum_grad));
        let (stats, gain) = (stats.to_contiguous(), gain.to_contiguous());
        with_elements!(x, |values| {
            let made = reference::norm_backward(
                spec.norm,
                grad.storage(),
                sum_grad.as_ref().map(|grad| grad.storage()),
                values,
                stats.storage(),
                gain.storage(),
            );
            NormGradients {
                x: tensor(made.x, shape),
                gain: vector(made.gain),
                bias: bias.then(|| vector(made.bias)).into(),
            }
        })
    }
}

impl ActivationOps for Flex {
    fn nvfp4_activation(x: FloatTensor<Self>, activation: Activation) -> FloatTensor<Self> {
        let (rows, cols) = matrix(&x);
        with_elements!(x, |values| {
            let made = reference::activation(activation, values, rows, cols);
            tensor(made, (rows, cols / activation.inputs()))
        })
    }

    fn nvfp4_activation_backward(
        grad: FloatTensor<Self>,
        x: FloatTensor<Self>,
        activation: Activation,
    ) -> FloatTensor<Self> {
        let (rows, cols) = matrix(&x);
        let grad = grad.to_contiguous();
        with_elements!(x, |values| {
            let grad = grad.storage();
            let made = reference::activation_backward(activation, grad, values, rows, cols);
            tensor(made, (rows, cols))
        })
    }
}
