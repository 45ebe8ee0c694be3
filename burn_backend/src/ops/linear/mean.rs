//! Mean of the tokens, kept in high precision beside their quantized differences to it.

use burn_core::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn_core::tensor::{FloatDType, Shape};

use crate::ops::dtype::cast;
use crate::ops::operands::QuantSource;
use crate::ops::{LinearSpec, MaybeTensor, Nvfp4KernelOps};

/// Mean over the rows of a matrix, `f32[1, cols]`.
#[derive(Clone, Debug)]
pub(super) struct Mean<B: Backend>(FloatTensor<B>);

impl<B: Nvfp4KernelOps> Mean<B> {
    /// Returns the mean of `x` and the differences to it, in the dtype of `x`, if the layer splits
    /// its input.
    pub(super) fn split(x: QuantSource<B>, spec: &LinearSpec) -> (QuantSource<B>, Option<Self>) {
        if !spec.split_mean || spec.fprop_x.params().is_none() || x.shape().0 == 0 {
            return (x, None);
        }
        let dtype = x.dtype();
        let (rows, cols) = x.shape();
        let x = x.into_values();
        let sums = B::nvfp4_column_sums(x.clone());
        let mean = B::float_mul_scalar(sums, (1.0 / rows as f64).into());
        let mean = B::float_reshape(mean, Shape::new([1, cols]));
        let difference = B::float_sub(cast::<B>(x, FloatDType::F32), mean.clone());
        let difference = QuantSource::Matrix(cast::<B>(difference, dtype));
        (difference, Some(Self(mean)))
    }

    /// Adds the product of the mean and the weight `w` (`[cols, d_out]`) to the bias.
    pub(super) fn bias(&self, w: FloatTensor<B>, bias: MaybeTensor<B>) -> MaybeTensor<B> {
        let d_out = w.shape()[1];
        let product = B::float_matmul(self.0.clone(), cast::<B>(w, FloatDType::F32));
        let product = B::float_reshape(product, Shape::new([d_out]));
        MaybeTensor::Present(match bias.into_option() {
            Some(bias) => B::float_add(product, cast::<B>(bias, FloatDType::F32)),
            None => product,
        })
    }

    /// Adds the part of the mean to the gradient of the weight, given the gradient `dy` of the
    /// output.
    pub(super) fn weight_grad(&self, grad: FloatTensor<B>, dy: FloatTensor<B>) -> FloatTensor<B> {
        let dtype = crate::ops::float_dtype(grad.dtype());
        let [cols, d_out] = [grad.shape()[0], grad.shape()[1]];
        let mean = B::float_reshape(self.0.clone(), Shape::new([cols, 1]));
        let sums = B::float_reshape(B::nvfp4_column_sums(dy), Shape::new([1, d_out]));
        let part = B::float_mul(mean, sums);
        cast::<B>(B::float_add(cast::<B>(grad, FloatDType::F32), part), dtype)
    }
}
