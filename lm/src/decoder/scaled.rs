//! Packed layers that first multiply their input by a scale per feature: ModelOpt's `NVFP4_AWQ`.

use anyhow::Result;
use burn::module::{Module, Param};
use burn::tensor::{DType, Int, IntDType, Tensor};
use burn_nvfp4::ExpertOffsets;
use burn_nvfp4::nn::{Nvfp4PackedGroupedLinear, Nvfp4PackedLinear};

use crate::model::cast;

/// `y = (x s) W + b` with an NVFP4 weight.
#[derive(Module, Debug)]
pub struct ScaledPackedLinear {
    /// Scale s, `[d_in]`, f32.
    pub scale: Param<Tensor<1>>,
    /// Packed layer that reads the scaled input.
    pub linear: Nvfp4PackedLinear,
}

impl ScaledPackedLinear {
    /// Combines a scale `[d_in]` and a layer with the same number of input features.
    pub fn new(scale: Tensor<1>, linear: Nvfp4PackedLinear) -> Self {
        let scale = Param::from_tensor(scale).set_require_grad(false);
        Self { scale, linear }
    }

    /// Maps `[rows, d_in]` to `[rows, d_out]`, in the type of `x`.
    ///
    /// # Errors
    /// Returns an error if a shape, type or device does not match.
    pub fn forward(&self, x: Tensor<2>) -> Result<Tensor<2>> {
        let scale = cast(self.scale.val(), x.dtype().into());
        Ok(self.linear.try_forward(x * scale.unsqueeze())?)
    }
}

/// A [`ScaledPackedLinear`] per expert, applied to tokens that are sorted by expert.
#[derive(Module, Debug)]
pub struct ScaledPackedExperts {
    /// Scale s of each expert, `[experts, d_in]`, f32.
    pub scale: Param<Tensor<2>>,
    /// Packed layers that read the scaled input.
    pub linear: Nvfp4PackedGroupedLinear,
}

impl ScaledPackedExperts {
    /// Combines a scale `[experts, d_in]` and layers with the same number of input features.
    pub fn new(scale: Tensor<2>, linear: Nvfp4PackedGroupedLinear) -> Self {
        let scale = Param::from_tensor(scale).set_require_grad(false);
        Self { scale, linear }
    }

    /// Maps `[tokens, d_in]` to `[tokens, d_out]`, in the type of `x`.
    ///
    /// # Errors
    /// Returns an error if a shape, type or device does not match.
    pub fn forward(&self, x: Tensor<2>, experts: &ExpertOffsets) -> Result<Tensor<2>> {
        let scale = cast(self.scale.val(), x.dtype().into());
        let [rows, _] = x.dims();
        let scale = scale.select(0, expert_of_rows(rows, experts));
        Ok(self.linear.try_forward(x * scale, experts)?)
    }
}

/// Returns the expert of each row: the number of experts that begin at or before it, minus 1. Does
/// not synchronize with the device.
fn expert_of_rows(rows: usize, experts: &ExpertOffsets) -> Tensor<1, Int> {
    let offsets = experts.offsets().clone();
    let ([count], device) = (offsets.dims(), offsets.device());
    let rows = Tensor::<1, Int>::arange(0..rows as i64, (&device, DType::I32));
    // The end of the last expert is left out, so rows after it count as its own.
    if count == 2 {
        return rows.zeros_like();
    }
    let ends = offsets.narrow(0, 1, count - 2).cast(IntDType::I32);
    let has_ended = (rows.unsqueeze_dim::<2>(1)).greater_equal(ends.unsqueeze_dim::<2>(0));
    has_ended.int().sum_dim(1).flatten(0, 1)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::tensor::{Device, TensorData};
    use burn_nvfp4::Nvfp4Recipe;
    use burn_nvfp4::nn::{Nvfp4GroupedLinearConfig, Nvfp4LinearConfig};

    use super::*;
    use crate::decoder::projection::{Experts, Projection};

    /// The input gradient is that of the dequantized weight, with each value multiplied by the
    /// scale of its feature.
    #[test]
    fn gradients_pass_scales_and_packed_weights() {
        let device = Device::flex().autodiff();
        let made = |shape: [usize; 2]| {
            let value = |i: usize| (i * 7919 % 1009) as f32 / 504.5 - 1.0;
            let values = (0..shape[0] * shape[1]).map(value).collect::<Vec<f32>>();
            Tensor::<2>::from_data(TensorData::new(values, shape), &device)
        };
        let recipe = Nvfp4Recipe::weight_only_qat();
        let linear = Nvfp4LinearConfig::new(32, 16).with_recipe(recipe.clone());
        let linear = linear.init(&device).try_to_packed().unwrap();
        let scale = made([1, 32]) + 1.5;
        let layer = Projection::Scaled(ScaledPackedLinear::new(scale.flatten(0, 1), linear));
        let grouped = Nvfp4GroupedLinearConfig::new(2, 32, 16).with_recipe(recipe);
        let grouped = grouped.init(&device).try_to_packed().unwrap();
        let experts = Experts::Scaled(ScaledPackedExperts::new(made([2, 32]) + 1.5, grouped));
        let counts = Tensor::<1, Int>::from_ints([2, 3], &device);
        let offsets = ExpertOffsets::from_counts(counts, 5);
        let (x, dy) = (made([5, 32]).require_grad(), made([5, 16]));
        let dx = |y: Tensor<2>| {
            let gradients = (y * dy.clone()).sum().backward();
            let dx = x.grad(&gradients).expect("the input is tracked");
            dx.into_data().iter().collect::<Vec<f32>>()
        };
        let dense = |expert: usize, first: usize, count: usize| {
            let w: Tensor<2> = experts.dense().narrow(0, expert, 1).reshape([32, 16]);
            x.clone().narrow(0, first, count).matmul(w)
        };
        for (found, expected) in [
            (
                layer.forward(x.clone()).unwrap(),
                x.clone().matmul(layer.dense().0),
            ),
            (
                experts.forward(x.clone(), &offsets).unwrap(),
                Tensor::cat(vec![dense(0, 0, 2), dense(1, 2, 3)], 0),
            ),
        ] {
            let (found, expected) = (dx(found), dx(expected));
            let largest = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
            assert!(largest > 0.1);
            for (found, expected) in found.iter().zip(&expected) {
                let error = (found - expected).abs();
                assert!(error < 1e-6 * largest, "{found}, not {expected}");
            }
        }
    }

    /// Covers experts without tokens, and rows after all experts, which no layer reads.
    #[test]
    fn rows_have_the_expert_that_they_are_sorted_to() {
        let device = Device::flex();
        for (counts, rows, expected) in [
            (vec![3], 3, vec![0, 0, 0]),
            (vec![2, 0, 1, 0], 4, vec![0, 0, 2, 3]),
            (vec![0, 0, 2], 2, vec![2, 2]),
        ] {
            let counts = Tensor::<1, Int>::from_ints(counts.as_slice(), &device);
            let experts = ExpertOffsets::from_counts(counts, rows);
            let found = expert_of_rows(rows, &experts).into_data();
            assert_eq!(found.iter::<i64>().collect::<Vec<_>>(), expected);
        }
    }
}
