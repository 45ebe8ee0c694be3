//! Linear layer with a weight stored in FP8.

use burn_core as burn;

use burn_core::backend::Dispatch;
use burn_core::module::{Module, Param, ParamId};
use burn_core::tensor::{DType, Int, Tensor};
use burn_nn::Linear;
use nvfp4_formats::Nvfp4Error;
use nvfp4_formats::reference::FP8_CHUNK;

use super::rows;
use crate::functions::or_panic;
use crate::ops::fp8::{Fp8Ops, Fp8Tensors};
use crate::validate;

/// Linear layer `y = x Wᵀ` without a bias, for inference. The weight `W` (`[n, k]`) is stored in
/// FP8: element `(n, k)` is `e4m3(code) · scale[n]`, with one scale per row.
///
/// With bf16 activations on a GPU of sm_80 or later, a kernel reads the codes once per 16 rows of
/// activations and decodes them in registers: it is meant for decoding. On other devices, and for
/// `f32` and `f16` activations, a portable kernel computes the layer, slowly on a GPU.
///
/// Outputs are constants to autodiff; parameters have no gradient. Records store the codes and
/// scales.
#[derive(Module, Debug)]
pub struct Fp8Linear {
    /// E4M3 codes, `u32[n, k / 4]`: four codes per word, the first in the lowest byte.
    pub codes: Param<Tensor<2, Int>>,
    /// Scale factors, one per row, `f32[n]`.
    pub scales: Param<Tensor<1>>,
}

impl Fp8Linear {
    /// Quantizes `weight` (`[k, n]`, as in Burn; fastest as a transposed view of an `[n, k]`
    /// buffer), rounding to nearest, with the scale `amax / 448` for each of its `n` rows of `k`. A
    /// row with a non-finite element becomes NaN.
    ///
    /// # Errors
    /// Returns an error if `k` is not a positive multiple of 64, `n` is 0, the dtype is not `F32`,
    /// `BF16` or `F16`, or the device has no implementation.
    pub fn try_from_weight(weight: Tensor<2>) -> Result<Self, Nvfp4Error> {
        validate::operand("weight", &weight)?;
        let [k, n] = weight.dims();
        check_shape("weight", [k, n], [n, k])?;
        let rows = weight.detach().transpose().into_dispatch();
        let Fp8Tensors { codes, scales } = Dispatch::nvfp4_fp8_quantize(rows);
        Self::try_from_parts(Tensor::from_dispatch(codes), Tensor::from_dispatch(scales))
    }

    /// Applies [`try_from_weight`](Self::try_from_weight) to the weight of a linear layer without a
    /// bias.
    ///
    /// # Errors
    /// Returns an error if the layer has a bias; otherwise same as
    /// [`try_from_weight`](Self::try_from_weight).
    pub fn try_from_linear(linear: &Linear) -> Result<Self, Nvfp4Error> {
        match linear.bias {
            None => Self::try_from_weight(linear.weight.val()),
            Some(_) => Err(Nvfp4Error::value("linear", "a bias", "no bias")),
        }
    }

    /// Creates a layer from codes, `u32[n, k / 4]`, and scales, `f32[n]`.
    ///
    /// A row with NaN codes must have a NaN scale: kernels decode a NaN code as 480.
    ///
    /// # Errors
    /// Returns an error if `k` is not a positive multiple of 64, `n` is 0, a buffer has another
    /// shape or dtype, the devices differ, or the device has no implementation.
    pub fn try_from_parts(codes: Tensor<2, Int>, scales: Tensor<1>) -> Result<Self, Nvfp4Error> {
        let device = codes.device();
        validate::device("codes", &device)?;
        let [n, words] = codes.dims();
        check_shape("codes", [n, words], [n, 4 * words])?;
        validate::buffer("codes", &codes, [n, words], DType::U32)?;
        validate::buffer("scales", &scales, [n], DType::F32)?;
        validate::same_device(("codes", &device), ("scales", &scales.device()))?;
        let scales = scales.detach().set_require_grad(false);
        Ok(Self {
            codes: Param::initialized(ParamId::new(), codes),
            scales: Param::initialized(ParamId::new(), scales),
        })
    }

    /// Returns the shape of the weight, `[n, k]`: number of rows and length of a row.
    pub fn shape(&self) -> [usize; 2] {
        let [n, words] = self.codes.dims();
        [n, 4 * words]
    }

    /// Size of codes and scales in bytes.
    pub fn bytes(&self) -> usize {
        let [n, k] = self.shape();
        n * k + 4 * n
    }

    /// Applies the layer: `[..., k]`, of dtype `f32`, `bf16` or `f16`, to `[..., n]` of the same
    /// dtype. Accumulates in `f32`, multiplies by the scale of the row, and rounds once.
    ///
    /// # Errors
    /// Returns an error if the input is on another device than the weight, its dtype is not
    /// supported, or its last axis is not `k`.
    pub fn try_forward<const D: usize>(&self, input: Tensor<D>) -> Result<Tensor<D>, Nvfp4Error> {
        validate::operand("x", &input)?;
        validate::same_device(("codes", &self.codes.device()), ("x", &input.device()))?;
        let ([n, k], dims) = (self.shape(), input.dims());
        if dims[D - 1] != k {
            return Err(Nvfp4Error::shape(
                "x",
                format!("{dims:?}"),
                format!("a last axis of {k}, the width of the weight [{n}, {k}]"),
            ));
        }
        let (x, mut dims) = rows(input);
        let w = Fp8Tensors {
            codes: self.codes.val().into_dispatch(),
            scales: self.scales.val().into_dispatch(),
        };
        let y = Dispatch::nvfp4_fp8_linear(x.into_dispatch(), w);
        dims[D - 1] = n;
        Ok(Tensor::<2>::from_dispatch(y).reshape(dims))
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        or_panic("Fp8Linear::forward", self.try_forward(input))
    }
}

/// Returns an error if a weight of `n` rows of `k` is empty or `k` is not a multiple of the chunk
/// size; `found` is the argument.
fn check_shape(
    argument: &'static str,
    found: [usize; 2],
    [n, k]: [usize; 2],
) -> Result<(), Nvfp4Error> {
    if n > 0 && k > 0 && k.is_multiple_of(FP8_CHUNK) {
        return Ok(());
    }
    Err(Nvfp4Error::shape(
        argument,
        format!("{found:?}, {n} rows of {k}"),
        format!("at least one row, of a positive multiple of {FP8_CHUNK}"),
    ))
}
