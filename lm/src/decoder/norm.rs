//! Norms whose weight is an offset from 1.

use std::borrow::Cow;

use burn::module::Param;
use burn::tensor::FloatDType;
use burn_nvfp4::nn::RmsNorm;

use crate::model::cast;

/// Returns `norm`, or with `plus_one` the norm that multiplies by 1 + its weight.
///
/// The parameter stays the weight, as in files: 1 + weight is rounded, also in `f32`, from which
/// the weight would not come back. The sum is a launch of its own on a GPU.
pub(super) fn effective(norm: &RmsNorm, plus_one: bool) -> Cow<'_, RmsNorm> {
    if !plus_one {
        return Cow::Borrowed(norm);
    }
    let gain = cast(norm.gamma.val(), FloatDType::F32).add_scalar(1.0);
    Cow::Owned(RmsNorm {
        gamma: Param::initialized(norm.gamma.id, gain),
        epsilon: norm.epsilon,
    })
}
