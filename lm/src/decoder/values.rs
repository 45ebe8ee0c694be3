//! Dequantizes packed weights.

use burn::tensor::{FloatDType, Tensor};
use burn_nvfp4::nn::Nvfp4Weight;

use super::scaled::{ScaledPackedExperts, ScaledPackedLinear};

/// Dequantizes one matrix, `[d_in, d_out]`, f32.
pub(super) fn matrix_of(weight: &Nvfp4Weight) -> Tensor<2> {
    dequantized(weight).transpose()
}

/// Dequantizes one matrix and multiplies it by the scale of each input feature.
pub(super) fn scaled_matrix_of(layer: &ScaledPackedLinear) -> Tensor<2> {
    let weight = dequantized(&layer.linear.weight) * layer.scale.val().unsqueeze();
    weight.transpose()
}

/// Dequantizes the matrix of each expert, `[experts, d_in, d_out]`, f32.
pub(super) fn stack_of(weight: &Nvfp4Weight) -> Tensor<3> {
    let ([n, d_in], experts) = (weight.shape(), weight.stack());
    let stack = dequantized(weight).reshape([experts, n / experts, d_in]);
    stack.swap_dims(1, 2)
}

/// Dequantizes the matrix of each expert and multiplies it by the scale of each input feature.
pub(super) fn scaled_stack_of(layer: &ScaledPackedExperts) -> Tensor<3> {
    stack_of(&layer.linear.weight) * layer.scale.val().unsqueeze_dim(2)
}

fn dequantized(weight: &Nvfp4Weight) -> Tensor<2> {
    let values = weight.try_dequantize(FloatDType::F32);
    values.expect("F32 is one of the types that weights dequantize to")
}
