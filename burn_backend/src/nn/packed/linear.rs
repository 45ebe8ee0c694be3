//! Linear layer with a packed weight.

use burn_core as burn;

use burn_core::backend::Dispatch;
use burn_core::module::{Module, Param};
use burn_core::tensor::Tensor;
use nvfp4_formats::{Nvfp4Error, Usage};

use super::{Activations, Nvfp4Weight, check_input};
use crate::functions::or_panic;
use crate::nn::{Nvfp4Linear, rows};
use crate::ops::{Nvfp4KernelOps, QuantizeRequest, RowGroups, StoredForm};
use crate::validate;

/// Linear layer `y = x Wᵀ + b` with a weight stored in NVFP4: for inference, or as a frozen layer
/// in training.
///
/// With bf16 activations on a GPU, kernels read the codes directly; with small M (decoding), the
/// kernel is bound by reading them once. In other cases, such as `f32` activations, a GEMM may
/// dequantize the weight temporarily.
///
/// The layer is differentiable by its input, with the gradient of the dequantized weight, straight
/// through the rounding of quantized activations. Parameters have no gradient. The backward reads
/// the codes too: with bf16 activations on a GPU it never dequantizes the weight.
#[derive(Module, Debug)]
pub struct Nvfp4PackedLinear {
    /// Weight, `[d_out, d_in]`.
    pub weight: Nvfp4Weight,
    /// Static global scale that dequantizes the input, `f32[1]`.
    pub input: Option<Param<Tensor<1>>>,
    /// Bias, `[d_out]`.
    pub bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    activations: Activations,
}

impl Nvfp4PackedLinear {
    /// Creates a layer with `weight`, which must be one matrix, and a `bias`. `input` is the static
    /// global scale, for static `activations`.
    ///
    /// # Errors
    /// Returns an error if the weight is a stack, `input` is missing or not `f32[1]`, or the bias
    /// does not fit.
    pub fn try_new(
        weight: Nvfp4Weight,
        activations: Activations,
        input: Option<Tensor<1>>,
        bias: Option<Tensor<1>>,
    ) -> Result<Self, Nvfp4Error> {
        let [d_out, _] = weight.shape();
        if weight.stack() != 1 {
            return Err(Nvfp4Error::shape(
                "weight",
                format!("a stack of {} matrices", weight.stack()),
                "one matrix",
            ));
        }
        check_input(&activations, input.as_ref(), &weight, 1)?;
        if let Some(bias) = &bias {
            validate::operand("bias", bias)?;
            let device = weight.codes.device();
            validate::same_device(("weight", &device), ("bias", &bias.device()))?;
            validate::shape("bias", bias.dims(), [d_out], || {
                "the rows of `weight`".into()
            })?;
        }
        let param = |tensor: Tensor<1>| Param::from_tensor(tensor.detach()).set_require_grad(false);
        Ok(Self {
            weight: weight.read_by(&activations.spec(), false),
            input: input.map(param),
            bias: bias.map(param),
            activations,
        })
    }

    /// Returns the activation quantization of the layer.
    pub fn activations(&self) -> Activations {
        self.activations
    }

    /// Returns an error if the layer does not accept `x`.
    pub(super) fn check_x<const D: usize>(&self, x: &Tensor<D>) -> Result<(), Nvfp4Error> {
        validate::operand("x", x)?;
        let device = self.weight.codes.device();
        validate::same_device(("weight", &device), ("x", &x.device()))?;
        let ([d_out, d_in], dims) = (self.weight.shape(), x.dims());
        if dims[D - 1] != d_in {
            return Err(Nvfp4Error::shape(
                "x",
                format!("{dims:?}"),
                format!("a last axis of {d_in}, the d_in of the weight [{d_out}, {d_in}]"),
            ));
        }
        Ok(())
    }

    /// Applies the layer: `[..., d_in]`, of dtype `f32`, `bf16` or `f16`, to `[..., d_out]` of the
    /// same dtype.
    ///
    /// # Errors
    /// Returns an error if the input is on another device than the weight, its type is not
    /// supported, or its last axis is not `d_in`.
    pub fn try_forward<const D: usize>(&self, input: Tensor<D>) -> Result<Tensor<D>, Nvfp4Error> {
        self.check_x(&input)?;
        let [d_out, _] = self.weight.shape();
        let (x, mut dims) = rows(input);
        let input = (self.activations, self.input.as_ref());
        let bias = self.bias.as_ref();
        let y = self.weight.multiply(x, input, bias, RowGroups::Whole);
        dims[D - 1] = d_out;
        Ok(y.reshape(dims))
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        or_panic("Nvfp4PackedLinear::forward", self.try_forward(input))
    }
}

impl Nvfp4Linear {
    /// Converts the layer for inference: quantizes its weight once, as each forward does, and keeps
    /// the activation quantization. Outputs have the bits of the layer under `valid()`.
    ///
    /// # Errors
    /// Returns an error if the layer is in high precision, its recipe has weights or activations in
    /// a format other than NVFP4, or weights with a global scale per row.
    pub fn try_to_packed(&self) -> Result<Nvfp4PackedLinear, Nvfp4Error> {
        let spec = self.recipe().spec(&self.state.rng_state());
        let (activations, params) = super::trained(&spec, self.state.is_high_precision())?;
        let weight = self.weight.val().detach().into_dispatch();
        let request = QuantizeRequest::of_matrix(weight);
        let request = request.along(Usage::Columnwise, params, StoredForm::Rows);
        let made = Dispatch::nvfp4_quantize(request).into_one();
        let bias = self.bias.as_ref().map(|bias| bias.val());
        let weight = Nvfp4Weight::from_trained(made)?;
        Nvfp4PackedLinear::try_new(weight, activations, None, bias)
    }
}
