//! Linear layer in NVFP4.

use burn_core as burn;

use burn_core::config::Config;
use burn_core::module::{Content, DisplaySettings, Module, ModuleDisplay, Param};
use burn_core::tensor::{Device, Tensor};
use burn_nn::{Initializer, Linear, LinearConfig, LinearLayout};
use nvfp4_formats::Nvfp4Error;

use super::operand_weight::{OperandWeight, gathered_weight};
use super::packed::PackedParameter;
use super::parts::{LinearPart, identity_of};
use super::rows;
use crate::functions::{linear_unchecked, or_panic};
use crate::ops::sharding::GatheredWeight;
use crate::ops::{LinearSpec, RowGroups, WeightIdentity};
use crate::recipe::Nvfp4Recipe;
use crate::state::LayerState;
use crate::validate;
use crate::whole::whole_dims;

/// Configuration of an [`Nvfp4Linear`].
#[derive(Config, Debug)]
pub struct Nvfp4LinearConfig {
    /// Number of input features, a positive multiple of 16.
    pub d_input: usize,
    /// Number of output features, a positive multiple of 16.
    pub d_output: usize,
    /// True if the layer has a bias.
    #[config(default = true)]
    pub bias: bool,
    /// Parameter initializer, as in `burn_nn::LinearConfig`.
    #[config(default = "Initializer::KaimingUniform{gain:1.0/3f64.sqrt(), fan_out_only:false}")]
    pub initializer: Initializer,
    /// Layout of the weight in records, as in `burn_nn::LinearConfig`.
    #[config(default = "LinearLayout::Row")]
    pub layout: LinearLayout,
    /// Quantization recipe.
    #[config(default = "Nvfp4Recipe::new()")]
    pub recipe: Nvfp4Recipe,
    /// Layer id, from which the random streams derive. `None` takes the next number of the process;
    /// [`assign_layer_ids`](crate::state::assign_layer_ids) numbers a whole model.
    pub layer: Option<u64>,
}

impl Nvfp4LinearConfig {
    /// Creates a layer on `device`.
    ///
    /// # Errors
    /// Returns an error if a dimension is not a positive multiple of 16, [`Nvfp4Recipe::check`]
    /// fails, the device has no implementation, or the layer number is 2^56 or more.
    pub fn try_init(&self, device: &Device) -> Result<Nvfp4Linear, Nvfp4Error> {
        validate::blocks("d_input", "d_input", self.d_input)?;
        validate::blocks("d_output", "d_output", self.d_output)?;
        validate::device("device", device)?;
        let linear = LinearConfig::new(self.d_input, self.d_output)
            .with_bias(self.bias)
            .with_initializer(self.initializer.clone())
            .with_layout(self.layout)
            .init(device);
        Nvfp4Linear::new(linear, &self.recipe, self.layer)
    }

    /// Panicking version of [`try_init`](Self::try_init).
    #[track_caller]
    pub fn init(&self, device: &Device) -> Nvfp4Linear {
        or_panic("Nvfp4LinearConfig::init", self.try_init(device))
    }
}

/// Linear layer `y = x W + b` whose forward and backward GEMMs run in NVFP4.
///
/// Replaces `burn_nn::Linear`: parameters and their record paths are the same, so each loads the
/// other's checkpoints. Parameters stay in high precision (`f32` master weights); operands are
/// quantized when they are used. The [crate](crate) page lists the rounding of each operand.
///
/// Each training forward, that is one whose output requires a gradient, takes the next offset of
/// the layer's random streams. Forwards under `valid()`, or of frozen layers on constant inputs,
/// draw nothing.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct Nvfp4Linear {
    /// Weight, `[d_input, d_output]`.
    pub weight: Param<Tensor<2>>,
    /// Bias, `[d_output]`.
    pub bias: Option<Param<Tensor<1>>>,
    /// Source of the layer's random bits; shared by clones, invisible to records.
    pub state: LayerState,
    /// Quantization recipe. Its seed and signs are only the initial ones of `state`.
    #[module(skip)]
    recipe: Nvfp4Recipe,
}

impl Nvfp4Linear {
    fn new(linear: Linear, recipe: &Nvfp4Recipe, layer: Option<u64>) -> Result<Self, Nvfp4Error> {
        recipe.check()?;
        let [d_in, d_out] = linear.weight.lazy_shape().dims();
        validate::blocks("weight", "d_input", d_in)?;
        validate::blocks("weight", "d_output", d_out)?;
        let state = LayerState::for_recipe(recipe, layer)?;
        Ok(Self {
            weight: linear.weight,
            bias: linear.bias,
            state,
            recipe: recipe.clone(),
        })
    }

    /// Takes over the parameters of `linear`, with their ids. The layer gets the next layer number
    /// of the process.
    ///
    /// # Errors
    /// Returns an error if a dimension is not a positive multiple of 16, or [`Nvfp4Recipe::check`]
    /// fails.
    pub fn from_linear(linear: Linear, recipe: &Nvfp4Recipe) -> Result<Self, Nvfp4Error> {
        Self::new(linear, recipe, None)
    }

    /// Returns the parameters as a `burn_nn::Linear`, with their ids.
    pub fn into_linear(self) -> Linear {
        Linear {
            weight: self.weight,
            bias: self.bias,
        }
    }

    /// Returns the recipe that the layer was built with.
    pub fn recipe(&self) -> &Nvfp4Recipe {
        &self.recipe
    }

    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - input: `[..., d_input]`, of dtype `f32`, `bf16` or `f16`; leading axes are flattened to
    ///   rows
    /// - output: `[..., d_output]`, in the dtype of the input
    ///
    /// # Errors
    /// Returns an error if the device has no implementation, the input is on another device than
    /// the weight, its dtype is not supported, or its last axis is not `d_input`.
    pub fn try_forward<const D: usize>(&self, input: Tensor<D>) -> Result<Tensor<D>, Nvfp4Error> {
        self.check(&input)?;
        if let Some(packed) = self.packed() {
            let (x, mut dims) = rows(input);
            [_, dims[D - 1]] = packed.dims();
            let y = packed.multiply(x, self.bias.as_ref(), RowGroups::Whole);
            return Ok(y.reshape(dims));
        }
        let weight = OperandWeight::new(&self.weight, self.gathered_weight(true));
        let bias = self.bias.as_ref().map(|bias| bias.val());
        let identity = identity_of([&self.weight], &[&weight.held]);
        self.forward_with(weight, identity, bias, input)
    }

    /// Returns the packed weight, if [`quantize`](crate::quantize()) has packed it.
    pub(super) fn packed(&self) -> Option<&PackedParameter> {
        self.weight.reparameterization()
    }

    /// Returns an error if [`try_forward`](Self::try_forward) does not accept `input`.
    pub(super) fn check<const D: usize>(&self, input: &Tensor<D>) -> Result<(), Nvfp4Error> {
        validate::parameter(&input.device(), "weight", &self.weight)?;
        validate::linear(input, &self.weight, self.bias.as_ref())
    }

    /// Returns an error if the layer is not on `device` or its weight does not have `shape`.
    /// `names` are those of its parameters in the enclosing module.
    pub(super) fn check_part(
        &self,
        names: [&'static str; 2],
        device: &Device,
        shape: [usize; 2],
    ) -> Result<(), Nvfp4Error> {
        validate::parameter(device, names[0], &self.weight)?;
        let why = || "as the layers around it have it".into();
        validate::shape(names[0], whole_dims(&self.weight), shape, why)?;
        validate::linear_parameters(device, names, &self.weight, self.bias.as_ref())
    }

    /// Runs the layer with another `weight`, identified by `identity`, and another `bias`, after
    /// [`validate::linear`].
    fn forward_with<const D: usize>(
        &self,
        weight: OperandWeight<2>,
        identity: Option<WeightIdentity>,
        bias: Option<Tensor<1>>,
        input: Tensor<D>,
    ) -> Result<Tensor<D>, Nvfp4Error> {
        let of_layer = (&self.state, &self.recipe);
        let (spec, context) = weight.begin(of_layer, identity, input.is_tracked())?;
        Ok(linear_unchecked(input, weight.held, bias, spec, context))
    }

    /// Returns the gather of the weight operands for the next forward, if the weight is sharded.
    /// `is_alone` is true if this weight is the whole weight of that forward.
    fn gathered_weight(&self, is_alone: bool) -> Option<GatheredWeight> {
        gathered_weight(&self.weight, (&self.state, &self.recipe), is_alone)
    }

    /// Replaces the parameters.
    pub(super) fn with_parameters(
        self,
        weight: Param<Tensor<2>>,
        bias: Option<Param<Tensor<1>>>,
    ) -> Self {
        Self {
            weight,
            bias,
            ..self
        }
    }

    /// Returns the operand specification of the next forward, without advancing to it.
    pub(crate) fn next_spec(&self) -> LinearSpec {
        self.state.next_spec(&self.recipe)
    }

    /// Returns the layer as a part of a feed-forward, for its next forward. `is_tracked` is true if
    /// autodiff tracks the input.
    pub(super) fn part(&self, is_tracked: bool) -> Result<LinearPart<2, 1>, Nvfp4Error> {
        self.part_with(self.gathered_weight(true), is_tracked)
    }

    /// Version of [`part`](Self::part) that gathers a sharded weight in high precision.
    pub(super) fn part_of_values(&self, is_tracked: bool) -> Result<LinearPart<2, 1>, Nvfp4Error> {
        self.part_with(None, is_tracked)
    }

    fn part_with(
        &self,
        gathered: Option<GatheredWeight>,
        is_tracked: bool,
    ) -> Result<LinearPart<2, 1>, Nvfp4Error> {
        let weight = OperandWeight::new(&self.weight, gathered);
        let bias = self.bias.as_ref().map(|bias| bias.val());
        weight.part(
            (&self.weight, bias),
            (&self.state, &self.recipe),
            is_tracked,
        )
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        or_panic("Nvfp4Linear::forward", self.try_forward(input))
    }

    /// Applies several layers to one input like one layer with concatenated weights. Returns one
    /// output per layer, in order.
    ///
    /// The weights share one global scale, from the amax of all of them: inference engines that
    /// fuse queries, keys and values, or gate and up, require that of a checkpoint. The input is
    /// quantized once. Random bits are those of the first layer, whose offset advances; the offsets
    /// of the others do not. The first layer caches the quantized weights until one of them
    /// changes, or until it runs alone or with other layers. In high precision the weights are
    /// concatenated in each forward. Layers with packed weights run one after the other.
    ///
    /// # Errors
    /// Same as [`try_forward`](Self::try_forward); also if `layers` is empty, or if layers differ
    /// in device, parameter dtypes, input features, recipe, mode, or presence of a bias.
    pub fn try_forward_together<const D: usize>(
        layers: &[&Self],
        input: Tensor<D>,
    ) -> Result<Vec<Tensor<D>>, Nvfp4Error> {
        let [first, others @ ..] = layers else {
            return Err(Nvfp4Error::value("layers", "none", "at least one"));
        };
        first.check(&input)?;
        for (index, other) in (1..).zip(others) {
            other.check_beside(first, index)?;
            other.check(&input)?;
        }
        if layers.iter().any(|layer| layer.packed().is_some()) {
            return (layers.iter())
                .map(|layer| layer.try_forward(input.clone()))
                .collect();
        }
        let widths = layers.iter().map(|layer| whole_dims(&layer.weight)[1]);
        let widths = widths.collect();
        let together = Self::forward_joined(layers, input)?;
        Ok(together.split_with_sizes(widths, D - 1))
    }

    /// Applies layers that were checked to one input, like one layer with concatenated weights.
    fn forward_joined<const D: usize>(
        layers: &[&Self],
        input: Tensor<D>,
    ) -> Result<Tensor<D>, Nvfp4Error> {
        let weights = weights_of_each(layers);
        let parts: Vec<&Tensor<2>> = weights.iter().map(|weight| &weight.held).collect();
        let identity = identity_of(layers.iter().map(|layer| &layer.weight), &parts);
        let biases = layers
            .iter()
            .map(|layer| layer.bias.as_ref().map(|bias| bias.val()));
        let biases: Option<Vec<_>> = biases.collect();
        let bias = biases.map(|biases| Tensor::cat(biases, 0));
        let weight = OperandWeight::side_by_side(weights);
        layers[0].forward_with(weight, identity, bias, input)
    }

    /// Panicking version of [`try_forward_together`](Self::try_forward_together).
    #[track_caller]
    pub fn forward_together<const D: usize>(layers: &[&Self], input: Tensor<D>) -> Vec<Tensor<D>> {
        or_panic(
            "Nvfp4Linear::forward_together",
            Self::try_forward_together(layers, input),
        )
    }

    /// Applies several layers to one input, which was checked, and concatenates their outputs:
    /// together, as [`try_forward_together`](Self::try_forward_together), if the layers allow it,
    /// otherwise one after the other.
    pub(super) fn try_forward_joined<const D: usize>(
        layers: &[&Self],
        input: Tensor<D>,
    ) -> Result<Tensor<D>, Nvfp4Error> {
        let mut others = layers[1..].iter().zip(1..);
        // In high precision nothing is quantized once for all, and the concatenation only costs.
        if !layers[0].state.is_high_precision()
            && layers.iter().all(|layer| layer.packed().is_none())
            && others.all(|(other, index)| other.check_beside(layers[0], index).is_ok())
        {
            return Self::forward_joined(layers, input);
        }
        let outputs = layers.iter().map(|layer| layer.try_forward(input.clone()));
        Ok(Tensor::cat(outputs.collect::<Result<_, _>>()?, D - 1))
    }

    /// Returns an error if this layer, at `index`, cannot be computed together with `first`.
    fn check_beside(&self, first: &Self, index: usize) -> Result<(), Nvfp4Error> {
        let differs = |what: &str, found: String, expected: String| {
            Nvfp4Error::value(
                "layers",
                format!("number {index} with {what} {found}"),
                format!("{what} {expected}, as number 0"),
            )
        };
        let [own, other] = [self, first].map(|layer| layer.weight.lazy_device());
        if own != other {
            return Err(Nvfp4Error::Device {
                argument: "layers",
                found: format!("number {index} on {}", validate::device_name(&own)),
                expected: format!("{}, as number 0", validate::device_name(&other)),
            });
        }
        let [own, other] = [self, first].map(|layer| {
            let bias = layer.bias.as_ref().map(|bias| bias.dtype());
            (layer.weight.dtype(), bias)
        });
        if own.0 != other.0 || own.1.zip(other.1).is_some_and(|(own, other)| own != other) {
            return Err(Nvfp4Error::DType {
                argument: "layers",
                found: format!("number {index} with weight and bias {own:?}"),
                expected: format!("{other:?}, as number 0"),
            });
        }
        let [own, other] = [self, first].map(|layer| whole_dims(&layer.weight)[0]);
        if own != other {
            return Err(differs("d_input", own.to_string(), other.to_string()));
        }
        let [own, other] = [self, first].map(|layer| layer.bias.is_some());
        if own != other {
            return Err(differs("a bias:", own.to_string(), other.to_string()));
        }
        let [own, other] = [self, first].map(|layer| layer.state.mode());
        if own != other {
            return Err(differs("mode", format!("{own:?}"), format!("{other:?}")));
        }
        let replaced = [self, first].map(|layer| layer.state.recipe());
        let own = replaced[0].as_deref().unwrap_or(&self.recipe);
        let other = replaced[1].as_deref().unwrap_or(&first.recipe);
        if own != other {
            let [own, other] = [own, other].map(|recipe| format!("{recipe:?}"));
            return Err(differs("recipe", own, other));
        }
        Ok(())
    }
}

/// Returns the weights of `layers` that are computed together: either all are whole or all are
/// shards.
fn weights_of_each(layers: &[&Nvfp4Linear]) -> Vec<OperandWeight<2>> {
    let gathered = layers.iter().map(|layer| layer.gathered_weight(false));
    let gathered: Option<Vec<_>> = gathered.collect();
    let weights = layers.iter().enumerate().map(|(index, layer)| {
        let gathered = gathered.as_ref().map(|all| all[index].clone());
        OperandWeight::new(&layer.weight, gathered)
    });
    weights.collect()
}

impl ModuleDisplay for Nvfp4Linear {
    fn custom_settings(&self) -> Option<DisplaySettings> {
        DisplaySettings::new()
            .with_new_line_after_attribute(false)
            .optional()
    }

    fn custom_content(&self, content: Content) -> Option<Content> {
        let [d_input, d_output] = whole_dims(&self.weight);
        content
            .add("d_input", &d_input)
            .add("d_output", &d_output)
            .add("bias", &self.bias.is_some())
            .add("high_precision", &self.state.is_high_precision())
            .optional()
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::parallel::{ProcessGroup, fully_shard};

    /// Returns true if each of two ranks quantizes its rows of a weight `[d_in, 32]` under the
    /// recipe.
    fn gathers_operands(d_in: usize, recipe: &str) -> bool {
        let config = crate::Nvfp4LinearConfig::new(d_in, 32);
        let config = &config.with_recipe(Nvfp4Recipe::preset(recipe).expect("a preset"));
        let found: Vec<bool> = thread::scope(|scope| {
            let groups = ProcessGroup::loopback(2, Duration::from_secs(20));
            let ranks = groups.into_iter().map(|group| {
                scope.spawn(move || {
                    let layer = config.init(&Device::flex().autodiff());
                    assert!(layer.gathered_weight(true).is_none());
                    let layer = fully_shard(layer, &group);
                    let weight = OperandWeight::new(&layer.weight, layer.gathered_weight(true));
                    let rows = if weight.gathered.is_some() { 2 } else { 1 };
                    assert_eq!(weight.held.dims(), [d_in / rows, 32]);
                    rows == 2
                })
            });
            let ranks: Vec<_> = ranks.collect();
            let ranks = ranks.into_iter().map(|rank| rank.join());
            ranks.map(|rank| rank.expect("no panic")).collect()
        });
        assert_eq!(found[0], found[1]);
        found[0]
    }

    /// Blocks and RHT groups must not cross ranks.
    #[test]
    fn operands_of_whole_blocks_are_gathered() {
        assert!(gathers_operands(32, "nvidia"));
        assert!(!gathers_operands(48, "nvidia"));
        assert!(!gathers_operands(32, "mxfp8"));
        assert!(gathers_operands(64, "mxfp8"));
        assert!(!gathers_operands(128, "quartet2"));
        assert!(gathers_operands(256, "quartet2"));
        assert!(gathers_operands(16, "bf16"));
    }
}
