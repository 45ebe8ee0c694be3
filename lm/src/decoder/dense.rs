//! Linear layers in high precision.

use anyhow::Result;
use burn::nn::Linear;
use burn::tensor::{FloatDType, Tensor};
use burn_nvfp4::functions::{LinearSpec, try_linear};

use crate::model::cast;

/// Applies `linear`: bf16 uses the kernels of the training step, other types Burn's matmul.
pub(super) fn forward(linear: &Linear, x: Tensor<2>) -> Result<Tensor<2>> {
    let dtype: FloatDType = x.dtype().into();
    let weight = cast(linear.weight.val(), dtype);
    let bias = linear.bias.as_ref().map(|bias| cast(bias.val(), dtype));
    let [d_in, d_out] = weight.dims();
    if dtype == FloatDType::BF16 && [d_in, d_out].iter().all(|it| it.is_multiple_of(16)) {
        return Ok(try_linear(x, weight, bias, LinearSpec::high_precision())?);
    }
    let y = x.matmul(weight);
    Ok(match bias {
        Some(bias) => y + bias.unsqueeze(),
        None => y,
    })
}
