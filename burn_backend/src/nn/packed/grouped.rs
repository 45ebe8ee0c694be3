//! Grouped linear layer with packed weights.

use burn_core as burn;

use burn_core::backend::Dispatch;
use burn_core::module::{Module, Param};
use burn_core::tensor::Tensor;
use nvfp4_formats::{Nvfp4Error, Usage};

use super::{Activations, Nvfp4Weight, check_input};
use crate::experts::ExpertOffsets;
use crate::functions::or_panic;
use crate::nn::Nvfp4GroupedLinear;
use crate::ops::{Nvfp4KernelOps, QuantizeRequest, RowGroups, StoredForm};
use crate::validate;

/// Grouped linear layer with weights stored in NVFP4, `y = x W[e]ᵀ + b[e]` for the tokens of expert
/// `e`. All experts run in one launch.
///
/// Tokens are sorted by expert, as for [`Nvfp4GroupedLinear`]. The layer is differentiable by its
/// input, like [`Nvfp4PackedLinear`](super::Nvfp4PackedLinear).
#[derive(Module, Debug)]
pub struct Nvfp4PackedGroupedLinear {
    /// Weights, a stack of `[d_out, d_in]`.
    pub weight: Nvfp4Weight,
    /// Static global scales that dequantize the input, `f32[experts]`.
    pub input: Option<Param<Tensor<1>>>,
    /// Biases, `[experts, d_out]`.
    pub bias: Option<Param<Tensor<2>>>,
    #[module(skip)]
    activations: Activations,
}

impl Nvfp4PackedGroupedLinear {
    /// Creates a layer with the stack `weight` and a `bias`. `input` is the static global scale of
    /// each expert, for static `activations`.
    ///
    /// # Errors
    /// Returns an error if `input` is missing or not `f32[experts]`, or the bias does not fit.
    pub fn try_new(
        weight: Nvfp4Weight,
        activations: Activations,
        input: Option<Tensor<1>>,
        bias: Option<Tensor<2>>,
    ) -> Result<Self, Nvfp4Error> {
        let ([n, _], experts) = (weight.shape(), weight.stack());
        check_input(&activations, input.as_ref(), &weight, experts)?;
        if let Some(bias) = &bias {
            validate::operand("bias", bias)?;
            let device = weight.codes.device();
            validate::same_device(("weight", &device), ("bias", &bias.device()))?;
            let why = || "the experts and the rows of each".into();
            validate::shape("bias", bias.dims(), [experts, n / experts], why)?;
        }
        let input = input.map(|input| Param::from_tensor(input.detach()).set_require_grad(false));
        let bias = bias.map(|bias| Param::from_tensor(bias.detach()).set_require_grad(false));
        Ok(Self {
            weight: weight.read_by(&activations.spec(), true),
            input,
            bias,
            activations,
        })
    }

    /// Returns the activation quantization of the layer.
    pub fn activations(&self) -> Activations {
        self.activations
    }

    /// Applies the layer to tokens sorted by expert: `[tokens, d_in]`, of dtype `f32`, `bf16` or
    /// `f16`, to `[tokens, d_out]` of the same dtype; zero for tokens of no expert.
    ///
    /// # Errors
    /// Returns an error if the input is on another device than the weight or `experts`, its dtype
    /// is not supported, its shape is not `[experts.tokens(), d_in]`, or the number of experts in
    /// `experts` differs from the number of weights.
    pub fn try_forward(
        &self,
        input: Tensor<2>,
        experts: &ExpertOffsets,
    ) -> Result<Tensor<2>, Nvfp4Error> {
        validate::operand("x", &input)?;
        let (device, offsets) = (input.device(), experts.offsets());
        validate::same_device(("x", &device), ("weight", &self.weight.codes.device()))?;
        validate::same_device(("x", &device), ("experts", &offsets.device()))?;
        let ([_, d_in], stack) = (self.weight.shape(), self.weight.stack());
        if experts.experts() != stack {
            return Err(Nvfp4Error::shape(
                "experts",
                format!("{} experts", experts.experts()),
                format!("{stack}, as many as weights"),
            ));
        }
        let why = || "the tokens of `experts`, the d_in of the weights".into();
        validate::shape("x", input.dims(), [experts.tokens(), d_in], why)?;
        let static_input = (self.activations, self.input.as_ref());
        let groups = RowGroups::Offsets(offsets.clone().into_dispatch());
        let bias = self.bias.as_ref();
        Ok(self.weight.multiply(input, static_input, bias, groups))
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward(&self, input: Tensor<2>, experts: &ExpertOffsets) -> Tensor<2> {
        or_panic(
            "Nvfp4PackedGroupedLinear::forward",
            self.try_forward(input, experts),
        )
    }
}

impl Nvfp4GroupedLinear {
    /// Converts the layer for inference: quantizes its weights once, as each forward does, and
    /// keeps the activation quantization. Outputs have the bits of the layer under `valid()`.
    ///
    /// # Errors
    /// Returns an error if the layer is in high precision, its recipe has weights or activations in
    /// a format other than NVFP4, or weights with a global scale per row.
    pub fn try_to_packed(&self) -> Result<Nvfp4PackedGroupedLinear, Nvfp4Error> {
        let spec = self.recipe().spec(&self.state.rng_state());
        let (activations, params) = super::trained(&spec, self.state.is_high_precision())?;
        let [experts, d_in, d_out] = self.weight.dims();
        let weight = self.weight.val().detach().reshape([experts * d_in, d_out]);
        let groups = RowGroups::Batch(experts);
        let request = QuantizeRequest::of_matrix(weight.into_dispatch()).groups(groups);
        let request = request.along(Usage::Columnwise, params, StoredForm::Rows);
        let made = Dispatch::nvfp4_quantize(request).into_one();
        let bias = self.bias.as_ref().map(|bias| bias.val());
        let weight = Nvfp4Weight::from_trained(made)?;
        Nvfp4PackedGroupedLinear::try_new(weight, activations, None, bias)
    }
}
