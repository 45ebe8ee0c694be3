//! Grouped linear layer (one matrix per expert).

use burn_core as burn;

use burn_core::config::Config;
use burn_core::module::{Content, DisplaySettings, Module, ModuleDisplay, Param};
use burn_core::tensor::{Device, Tensor};
use burn_nn::{Initializer, Linear};
use nvfp4_formats::Nvfp4Error;

use super::operand_weight::{OperandWeight, gathered_weight};
use super::packed::PackedParameter;
use super::parts::{LinearPart, PartIds, apart, constant};
use crate::experts::{
    ExpertOffsets, check_experts, check_grouped_linear, check_grouped_parameters,
    grouped_linear_unchecked,
};
use crate::functions::or_panic;
use crate::ops::RowGroups;
use crate::ops::layers::OutputAmax;
use crate::parallel::ProcessGroup;
use crate::recipe::Nvfp4Recipe;
use crate::state::LayerState;
use crate::validate;
use crate::whole::whole_dims;

/// Configuration of an [`Nvfp4GroupedLinear`].
#[derive(Config, Debug)]
pub struct Nvfp4GroupedLinearConfig {
    /// Number of experts, 1 to 512.
    pub experts: usize,
    /// Number of input features, a positive multiple of 16.
    pub d_input: usize,
    /// Number of output features, a positive multiple of 16.
    pub d_output: usize,
    /// True if each expert has a bias.
    #[config(default = false)]
    pub bias: bool,
    /// Parameter initializer, with the fans of one expert.
    #[config(default = "Initializer::KaimingUniform{gain:1.0/3f64.sqrt(), fan_out_only:false}")]
    pub initializer: Initializer,
    /// Quantization recipe.
    #[config(default = "Nvfp4Recipe::new()")]
    pub recipe: Nvfp4Recipe,
    /// Layer number, from which the random streams derive; see
    /// [`Nvfp4LinearConfig`](crate::Nvfp4LinearConfig).
    pub layer: Option<u64>,
}

impl Nvfp4GroupedLinearConfig {
    /// Creates a layer on `device`.
    ///
    /// # Errors
    /// Returns an error if a dimension is not a positive multiple of 16, the number of experts is
    /// not 1 to 512, the device has no implementation, or the layer number is 2^56 or more.
    pub fn try_init(&self, device: &Device) -> Result<Nvfp4GroupedLinear, Nvfp4Error> {
        check_experts("experts", self.experts)?;
        validate::blocks("d_input", "d_input", self.d_input)?;
        validate::blocks("d_output", "d_output", self.d_output)?;
        validate::device("device", device)?;
        let fans = (Some(self.d_input), Some(self.d_output));
        let weight = [self.experts, self.d_input, self.d_output];
        let bias = [self.experts, self.d_output];
        let init = &self.initializer;
        Nvfp4GroupedLinear::new(
            init.init_with(weight, fans.0, fans.1, device),
            self.bias
                .then(|| init.init_with(bias, fans.0, fans.1, device)),
            &self.recipe,
            self.layer,
        )
    }

    /// Panicking version of [`try_init`](Self::try_init).
    #[track_caller]
    pub fn init(&self, device: &Device) -> Nvfp4GroupedLinear {
        or_panic("Nvfp4GroupedLinearConfig::init", self.try_init(device))
    }
}

/// Grouped linear layer, `y = x W[e] + b[e]` for the tokens of expert `e`. Its forward and backward
/// GEMMs run in NVFP4, with all experts in one launch.
///
/// Tokens are sorted by expert, with [`ExpertOffsets`] on the device; the host does not read the
/// number of tokens per expert. The tokens and the weight of each expert are quantized separately,
/// with separate global scales. The layer therefore computes the same as a loop of
/// [`Nvfp4Linear`](crate::Nvfp4Linear) over the experts, except for random bits, whose stream
/// continues from expert to expert.
///
/// Supports every recipe that [`Nvfp4Linear`](crate::Nvfp4Linear) supports. Parameters stay in high
/// precision. Training forwards, random draws, modes, high-precision layers and
/// [`Nvfp4State`](crate::Nvfp4State) behave as for [`Nvfp4Linear`](crate::Nvfp4Linear). Quantized
/// weights are cached until the weights change: with gradient accumulation, they are quantized once
/// for all micro-batches.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct Nvfp4GroupedLinear {
    /// Weights, one matrix per expert, `[experts, d_input, d_output]`.
    pub weight: Param<Tensor<3>>,
    /// Biases, one vector per expert, `[experts, d_output]`.
    pub bias: Option<Param<Tensor<2>>>,
    /// Source of the layer's random bits; shared by clones, invisible to records.
    pub state: LayerState,
    /// Quantization recipe. Its seed and signs are only the initial ones of `state`.
    #[module(skip)]
    recipe: Nvfp4Recipe,
    /// Ids of the layers that this one was made from.
    #[module(skip)]
    ids: Option<Vec<PartIds>>,
}

impl Nvfp4GroupedLinear {
    fn new(
        weight: Param<Tensor<3>>,
        bias: Option<Param<Tensor<2>>>,
        recipe: &Nvfp4Recipe,
        layer: Option<u64>,
    ) -> Result<Self, Nvfp4Error> {
        recipe.check()?;
        let state = LayerState::for_recipe(recipe, layer)?;
        Ok(Self {
            weight,
            bias,
            state,
            recipe: recipe.clone(),
            ids: None,
        })
    }

    /// Combines the experts `linears`, in order, into one layer. Their parameters are concatenated
    /// into new ones with new ids ([`into_linears`](Self::into_linears) restores the old ones). The
    /// layer gets the next layer number of the process.
    ///
    /// # Errors
    /// Returns an error if the number of experts is not 1 to 512, shapes differ, only some experts
    /// have a bias, or a dimension is not a positive multiple of 16.
    pub fn from_linears(linears: Vec<Linear>, recipe: &Nvfp4Recipe) -> Result<Self, Nvfp4Error> {
        check_experts("linears", linears.len())?;
        let shape = linears[0].weight.dims();
        let biased = linears[0].bias.is_some();
        for (index, linear) in linears.iter().enumerate() {
            let found = linear.weight.dims();
            if found != shape || linear.bias.is_some() != biased {
                return Err(Nvfp4Error::shape(
                    "linears",
                    format!(
                        "number {index} with weight {found:?}, bias: {}",
                        linear.bias.is_some()
                    ),
                    format!("weight {shape:?}, bias: {biased}, as number 0"),
                ));
            }
        }
        validate::blocks("linears", "d_input", shape[0])?;
        validate::blocks("linears", "d_output", shape[1])?;
        let weights = linears.iter().map(|linear| constant(&linear.weight));
        let weight = Tensor::stack::<3>(weights.collect(), 0);
        let biases = linears.iter().filter_map(|linear| linear.bias.as_ref());
        let biases: Vec<_> = biases.map(constant).collect();
        let bias = biased.then(|| Param::from_tensor(Tensor::stack::<2>(biases, 0)));
        let layer = Self::new(Param::from_tensor(weight), bias, recipe, None)?;
        Ok(Self {
            ids: Some(PartIds::of(&linears)),
            ..layer
        })
    }

    /// Splits the layer into one layer per expert, with the ids of the layers that it was made
    /// from, or new ids if there were none.
    pub fn into_linears(self) -> Vec<Linear> {
        let [experts, d_in, d_out] = self.weight.dims();
        let weight = constant(&self.weight);
        let bias = self.bias.as_ref().map(constant);
        let part = |expert: usize| {
            let weight = weight.clone().narrow(0, expert, 1).reshape([d_in, d_out]);
            let bias = bias.clone();
            let bias = bias.map(|bias| bias.narrow(0, expert, 1).reshape([d_out]));
            apart(self.ids.as_deref(), expert, weight, bias)
        };
        (0..experts).map(part).collect()
    }

    /// Returns experts `first` to `first + len` as a layer with the same parameter ids and state,
    /// and the ids of the layers that this one was made from.
    pub(super) fn into_part(self, first: usize, len: usize) -> (Self, Option<Vec<PartIds>>) {
        fn part<const D: usize>(tensor: Tensor<D>, first: usize, len: usize) -> Tensor<D> {
            map_value(tensor, |tensor| {
                // Copies through the host, once: a view would keep all experts in device memory.
                let place = (&tensor.device(), tensor.dtype());
                Tensor::from_data(tensor.narrow(0, first, len).into_data(), place)
            })
        }
        let ids = self.ids;
        let layer = Self {
            weight: self.weight.map(|weight| part(weight, first, len)),
            bias: (self.bias).map(|bias| bias.map(|bias| part(bias, first, len))),
            ids: (ids.as_ref()).map(|ids| ids[first..first + len].to_vec()),
            ..self
        };
        (layer, ids)
    }

    /// Gathers the experts of all ranks of `group`, in rank order, into one layer. `ids` are those
    /// of the layers that it was made from.
    pub(super) fn gathered(self, group: &ProcessGroup, ids: Option<Vec<PartIds>>) -> Self {
        fn whole<const D: usize>(tensor: Tensor<D>, group: &ProcessGroup) -> Tensor<D> {
            map_value(tensor, |tensor| group.all_gather(tensor, 0))
        }
        Self {
            weight: self.weight.map(|weight| whole(weight, group)),
            bias: (self.bias).map(|bias| bias.map(|bias| whole(bias, group))),
            ids,
            ..self
        }
    }

    /// Returns the recipe that the layer was built with.
    pub fn recipe(&self) -> &Nvfp4Recipe {
        &self.recipe
    }

    /// Applies the layer to tokens sorted by expert.
    ///
    /// # Shapes
    ///
    /// - input: `[tokens, d_input]`, of type `f32`, `bf16` or `f16`
    /// - output: `[tokens, d_output]`, in the dtype of the input; zero for tokens of no expert
    ///
    /// # Errors
    /// Returns an error if the device has no implementation, the input is on another device than
    /// the weight or `experts`, its dtype is not supported, its shape is not
    /// `[experts.tokens(), d_input]`, or the number of experts in `experts` differs from the
    /// layer's.
    pub fn try_forward(
        &self,
        input: Tensor<2>,
        experts: &ExpertOffsets,
    ) -> Result<Tensor<2>, Nvfp4Error> {
        self.check(&input, experts)?;
        if let Some(packed) = self.packed() {
            let groups = RowGroups::Offsets(experts.offsets().clone().into_dispatch());
            return Ok(packed.multiply(input, self.bias.as_ref(), groups));
        }
        let LinearPart { weight, bias, spec } = self.part(input.is_tracked())?;
        let (spec, context) = spec;
        Ok(grouped_linear_unchecked(
            input, weight, bias, experts, spec, context,
        ))
    }

    /// Returns the packed weights, if [`quantize`](crate::quantize()) has packed them.
    pub(super) fn packed(&self) -> Option<&PackedParameter> {
        self.weight.reparameterization()
    }

    /// Returns the amax values with which the layer quantizes its next input, if it does; those for
    /// wgrad only if there is a backward.
    pub(super) fn input_amax(&self, has_backward: bool) -> Option<OutputAmax> {
        match self.packed() {
            Some(_) => None,
            None => self.state.next_spec(&self.recipe).input_amax(has_backward),
        }
    }

    /// Returns an error if [`try_forward`](Self::try_forward) does not accept these arguments.
    pub(super) fn check(
        &self,
        input: &Tensor<2>,
        experts: &ExpertOffsets,
    ) -> Result<(), Nvfp4Error> {
        validate::parameter(&input.device(), "weight", &self.weight)?;
        check_grouped_linear(input, &self.weight, self.bias.as_ref(), experts)
    }

    /// Returns the layer as a part of a feed-forward, for its next forward. `is_tracked` is true if
    /// autodiff tracks the input.
    pub(super) fn part(&self, is_tracked: bool) -> Result<LinearPart<3, 2>, Nvfp4Error> {
        let of_layer = (&self.state, &self.recipe);
        let gathered = gathered_weight(&self.weight, of_layer, true);
        let weight = OperandWeight::new(&self.weight, gathered);
        let bias = self.bias.as_ref().map(|bias| bias.val());
        weight.part((&self.weight, bias), of_layer, is_tracked)
    }

    /// Returns an error if the layer is not on `device` or its weights do not have `shape`. `names`
    /// are those of its parameters in the enclosing module.
    pub(super) fn check_part(
        &self,
        names: [&'static str; 2],
        device: &Device,
        shape: [usize; 3],
    ) -> Result<(), Nvfp4Error> {
        validate::parameter(device, names[0], &self.weight)?;
        let why = || "as the layers around it have it".into();
        validate::shape(names[0], whole_dims(&self.weight), shape, why)?;
        check_grouped_parameters(device, names, &self.weight, self.bias.as_ref())
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward(&self, input: Tensor<2>, experts: &ExpertOffsets) -> Tensor<2> {
        or_panic(
            "Nvfp4GroupedLinear::forward",
            self.try_forward(input, experts),
        )
    }
}

/// Replaces the value of a parameter and keeps its gradient requirement.
fn map_value<const D: usize>(
    tensor: Tensor<D>,
    map: impl FnOnce(Tensor<D>) -> Tensor<D>,
) -> Tensor<D> {
    let requires_grad = tensor.is_require_grad();
    let constant = tensor.detach().set_require_grad(false);
    map(constant).set_require_grad(requires_grad)
}

impl ModuleDisplay for Nvfp4GroupedLinear {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new()
            .with_new_line_after_attribute(false)
            .optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let [experts, d_input, d_output] = whole_dims(&self.weight);
        content
            .add("experts", &experts)
            .add("d_input", &d_input)
            .add("d_output", &d_output)
            .add("bias", &self.bias.is_some())
            .add("high_precision", &self.state.is_high_precision())
            .optional()
    }
}
