//! Root-mean-square normalisation.

use burn_core as burn;

use burn_core::module::{Module, Param};
use burn_core::tensor::{Device, FloatDType, Tensor};
use burn_nn::RmsNorm as BurnRmsNorm;
use nvfp4_kernels::Nvfp4Error;

use super::{cast, rows};
use crate::validate;

/// `x / sqrt(mean(x²) + ε) · gain` over the last axis, computed in `f32` whatever the types of its
/// input and output.
///
/// It differs from `burn_nn::RmsNorm` in that (which divides and multiplies in the type of its
/// input), and in the name of its parameter.
#[derive(Module, Debug)]
pub struct RmsNorm {
    /// One factor per feature, `[width]`.
    pub gain: Param<Tensor<1>>,
    #[module(skip)]
    epsilon: f64,
}

impl RmsNorm {
    /// The default ε, which is added to the mean square.
    pub const EPSILON: f64 = 1e-6;

    /// A norm of `width` features with gains of 1 and an ε of [`EPSILON`](Self::EPSILON).
    pub fn new(width: usize, device: &Device) -> Self {
        Self {
            gain: Param::from_tensor(Tensor::ones([width], device)),
            epsilon: Self::EPSILON,
        }
    }

    /// Take over the parameter of `norm`, with its id, and its ε.
    pub fn from_rms_norm(norm: BurnRmsNorm) -> Self {
        Self {
            gain: norm.gamma,
            epsilon: norm.epsilon,
        }
    }

    /// Gives the parameter to a `burn_nn::RmsNorm`, with its id.
    pub fn into_rms_norm(self) -> BurnRmsNorm {
        BurnRmsNorm {
            gamma: self.gain,
            epsilon: self.epsilon,
        }
    }

    /// Fail unless the norm, its gain called `name` in the module that it is part of, takes rows of
    /// `width` on `device`.
    pub(super) fn check_part(
        &self,
        name: &'static str,
        device: &Device,
        width: usize,
    ) -> Result<(), Nvfp4Error> {
        validate::parameter(device, name, &self.gain)?;
        validate::shape(name, self.gain.dims(), [width], || {
            "the last axis of `x`".into()
        })
    }

    /// Normalise `x`, `[..., width]`, to the same shape in type `dtype`.
    pub fn forward<const D: usize>(&self, x: Tensor<D>, dtype: FloatDType) -> Tensor<D> {
        let x = cast(x, FloatDType::F32);
        let mean_square = x.clone().square().mean_dim(D - 1);
        let scaled = x / mean_square.add_scalar(self.epsilon).sqrt();
        // The gain's gradient is a sum over the rows, and one sum for each feature leaves a GPU
        // idle. The gain is spread over the longest power of two up to 256 first: the sum is made
        // in two steps, the first of them with that many more sums.
        let (scaled, dims) = rows(scaled);
        let [rows, width] = scaled.dims();
        let inner = 1 << rows.trailing_zeros().min(8);
        let scaled: Tensor<3> = scaled.reshape([rows / inner, inner, width]);
        let gain: Tensor<2> = self.gain.val().reshape([1, width]).expand([inner, width]);
        cast((scaled * gain.unsqueeze()).reshape(dims), dtype)
    }
}
