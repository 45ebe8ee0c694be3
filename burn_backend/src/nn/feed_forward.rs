//! Feed-forward layers.

use std::str::FromStr;

use burn_core as burn;

use burn_core::backend::Dispatch;
use burn_core::config::Config;
use burn_core::module::Module;
use burn_core::tensor::activation::relu;
use burn_core::tensor::{Device, Tensor};
use burn_nn::activation::{Activation, ActivationConfig, SwiGlu as BurnSwiGlu};
use burn_nn::transformer::PositionWiseFeedForward;
use burn_nn::{Dropout, Initializer, Linear};
use nvfp4_formats::Nvfp4Error;
use serde::{Deserialize, Serialize};

use super::parts::{LinearPart, PartIds, parts, side_by_side};
use super::{
    Nvfp4GroupedLinear, Nvfp4Linear, Nvfp4LinearConfig, checked_dropout, drops, equal_parts, rows,
};
use crate::experts::ExpertOffsets;
use crate::functions::{Gelu, into_bias, or_panic, try_gelu, try_swiglu};
use crate::ops::layers::Activation as GateActivation;
use crate::ops::{FeedForwardSpec, LinearParams, Nvfp4Ops, RowGroups};
use crate::recipe::Nvfp4Recipe;
use crate::validate;
use crate::whole::whole_dims;

/// Configuration of an [`Nvfp4SwiGlu`].
#[derive(Config, Debug)]
pub struct Nvfp4SwiGluConfig {
    /// Width of the input and the output, a positive multiple of 16.
    pub d_model: usize,
    /// Hidden width, a positive multiple of 16.
    pub d_hidden: usize,
    /// True if the projections have a bias.
    #[config(default = false)]
    pub bias: bool,
    /// True if the backward recomputes gate and up instead of keeping them; see
    /// [`Nvfp4SwiGlu::with_recompute`].
    #[config(default = false)]
    pub recompute: bool,
    /// Parameter initializer, as in `burn_nn::LinearConfig`.
    #[config(default = "Initializer::KaimingUniform{gain:1.0/3f64.sqrt(), fan_out_only:false}")]
    pub initializer: Initializer,
    /// Quantization recipe.
    #[config(default = "Nvfp4Recipe::new()")]
    pub recipe: Nvfp4Recipe,
}

impl Nvfp4SwiGluConfig {
    /// Creates a feed-forward on `device`.
    ///
    /// # Errors
    /// Returns an error if a width is not a positive multiple of 16, or the device has no
    /// implementation.
    pub fn try_init(&self, device: &Device) -> Result<Nvfp4SwiGlu, Nvfp4Error> {
        self.try_init_with(MlpActivation::SwiGlu, device)
    }

    /// Creates a feed-forward with another activation, which supports `recompute`.
    pub(super) fn try_init_with(
        &self,
        activation: MlpActivation,
        device: &Device,
    ) -> Result<Nvfp4SwiGlu, Nvfp4Error> {
        let linear = |d_in, d_out| {
            Nvfp4LinearConfig::new(d_in, d_out)
                .with_bias(self.bias)
                .with_initializer(self.initializer.clone())
                .with_recipe(self.recipe.clone())
                .try_init(device)
        };
        Ok(Nvfp4SwiGlu {
            gate_up: linear(self.d_model, activation.inputs() * self.d_hidden)?,
            down: linear(self.d_hidden, self.d_model)?,
            ids: None,
            activation,
            recompute: self.recompute,
        })
    }

    /// Panicking version of [`try_init`](Self::try_init).
    #[track_caller]
    pub fn init(&self, device: &Device) -> Nvfp4SwiGlu {
        or_panic("Nvfp4SwiGluConfig::init", self.try_init(device))
    }
}

/// SwiGLU feed-forward `(silu(x G) · (x U)) D`, with all three GEMMs in NVFP4.
///
/// `G` and `U` are one weight: the input is quantized once, and both share one global scale. The
/// three steps are one operation with the bits of the sequence [`Nvfp4Linear`],
/// [`SwiGluActivation`], [`Nvfp4Linear`]. One pass computes the activation (or its gradient) and
/// its amax values; the next pass quantizes it.
///
/// The shared expert of an [`Nvfp4Moe`](super::Nvfp4Moe) has the activation of the other experts
/// instead of SwiGLU.
#[derive(Module, Debug)]
pub struct Nvfp4SwiGlu {
    /// Gate and up weights `G` and `U`, concatenated, `[d_model, 2 * d_hidden]`;
    /// `[d_model, d_hidden]` if the activation is not gated.
    pub gate_up: Nvfp4Linear,
    /// Down weight `D`, `[d_hidden, d_model]`.
    pub down: Nvfp4Linear,
    /// Ids of the layers that `gate_up` was made from.
    #[module(skip)]
    ids: Option<Vec<PartIds>>,
    #[module(skip)]
    activation: MlpActivation,
    #[module(skip)]
    recompute: bool,
}

impl Nvfp4SwiGlu {
    /// Applies the layer: `[..., d_model]` to the same shape and dtype.
    ///
    /// # Errors
    /// Same as [`Nvfp4Linear::try_forward`]; also if the shapes of the two layers do not match.
    pub fn try_forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>, Nvfp4Error> {
        self.check(&x)?;
        let (x, dims) = rows(x);
        let settings = (self.activation, self.recompute);
        let y = feed_forward_of((&self.gate_up, &self.down), settings, x)?;
        Ok(y.reshape(dims))
    }

    /// Sets whether the backward recomputes `x G` and `x U` instead of keeping them.
    ///
    /// They are the largest tensors of a block: `2 * d_hidden` elements per token. With
    /// recomputation the forward keeps the operands of their GEMM, `d_model` elements of 4 bits per
    /// token, and the backward runs it again: two GEMMs of the feed-forward's size in addition to
    /// its nine. Results have the same bits.
    pub fn with_recompute(mut self, recompute: bool) -> Self {
        self.recompute = recompute;
        self
    }

    /// Returns true if the backward recomputes `x G` and `x U`.
    pub fn recomputes(&self) -> bool {
        self.recompute
    }

    /// Returns the activation.
    pub fn activation(&self) -> MlpActivation {
        self.activation
    }

    /// Returns an error if [`try_forward`](Self::try_forward) does not accept `x`.
    pub(super) fn check<const D: usize>(&self, x: &Tensor<D>) -> Result<(), Nvfp4Error> {
        self.activation.check_recompute(self.recompute)?;
        let down = (["down.weight", "down.bias"], &self.down);
        check_pair(&self.gate_up, down, self.activation, x)
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        or_panic("Nvfp4SwiGlu::forward", self.try_forward(x))
    }

    /// Takes over the parameters of `swiglu`, burn-nn's gated activation, and of the projection
    /// `down` that follows it, which keeps its ids. The two layers of `swiglu` are concatenated
    /// into one, with new ids ([`into_swiglu`](Self::into_swiglu) restores the old ones).
    ///
    /// # Errors
    /// Returns an error if the shapes do not match, or a width is not a positive multiple of 16.
    pub fn from_swiglu(
        swiglu: BurnSwiGlu,
        down: Linear,
        recipe: &Nvfp4Recipe,
    ) -> Result<Self, Nvfp4Error> {
        let BurnSwiGlu {
            linear_inner,
            linear_outer,
        } = swiglu;
        let [_, hidden] = linear_inner.weight.dims();
        let [d_hidden, _] = down.weight.dims();
        if d_hidden != hidden {
            return Err(Nvfp4Error::shape(
                "down",
                format!("a d_input of {d_hidden}"),
                format!("{hidden}, the d_output of the gated activation"),
            ));
        }
        let both = [linear_inner, linear_outer];
        Ok(Self {
            gate_up: Nvfp4Linear::from_linear(side_by_side(&both), recipe)?,
            down: Nvfp4Linear::from_linear(down, recipe)?,
            ids: Some(PartIds::of(&both)),
            activation: MlpActivation::SwiGlu,
            recompute: false,
        })
    }

    /// Returns the parameters as burn-nn's gated activation and the projection that follows it. The
    /// projection keeps its ids; the activation gets the ids of the one that this was made from, or
    /// new ids if there was none.
    ///
    /// # Panics
    /// If the activation is not SwiGLU.
    #[track_caller]
    pub fn into_swiglu(self) -> (BurnSwiGlu, Linear) {
        let is_swiglu = self.activation == MlpActivation::SwiGlu;
        let found = format!("{:?}", self.activation);
        let error = || Nvfp4Error::value("activation", found, "SwiGlu, as burn-nn's");
        let checked = is_swiglu.then_some(()).ok_or_else(error);
        or_panic("Nvfp4SwiGlu::into_swiglu", checked);
        let [linear_inner, linear_outer] = parts(self.gate_up.into_linear(), self.ids.as_deref());
        let swiglu = BurnSwiGlu {
            linear_inner,
            linear_outer,
        };
        (swiglu, self.down.into_linear())
    }
}

/// Computes [`Nvfp4SwiGlu`] for two layers that are fields elsewhere: `(silu(x G) · (x U)) D`, with
/// `G` and `U` concatenated in `gate_up`, and `D` in `down`. With `recompute` the backward
/// recomputes `x G` and `x U`; see [`with_recompute`](Nvfp4SwiGlu::with_recompute).
///
/// # Errors
/// Same as [`Nvfp4SwiGlu::try_forward`].
pub fn try_swiglu_of(
    gate_up: &Nvfp4Linear,
    down: &Nvfp4Linear,
    x: Tensor<2>,
    recompute: bool,
) -> Result<Tensor<2>, Nvfp4Error> {
    let (swiglu, names) = (MlpActivation::SwiGlu, ["down.weight", "down.bias"]);
    check_pair(gate_up, (names, down), swiglu, &x)?;
    feed_forward_of((gate_up, down), (swiglu, recompute), x)
}

/// Applies the feed-forwards of experts, with `activation` between the layers `input` and `output`,
/// to tokens sorted by expert. The output features of `input` are those of
/// [`LayerNormMlp::linear_inner`](super::LayerNormMlp::linear_inner), for each expert. With
/// `recompute` the backward recomputes the input of the activation, as in [`try_swiglu_of`].
///
/// # Errors
/// Same as [`Nvfp4GroupedLinear::try_forward`]; also if the shapes of the two layers do not match,
/// or the activation does not support `recompute`.
pub fn try_feed_forward_of_experts(
    (input, output): (&Nvfp4GroupedLinear, &Nvfp4GroupedLinear),
    activation: MlpActivation,
    x: Tensor<2>,
    experts: &ExpertOffsets,
    recompute: bool,
) -> Result<Tensor<2>, Nvfp4Error> {
    activation.check_recompute(recompute)?;
    input.check(&x, experts)?;
    let [count, d_model, d_inner] = whole_dims(&input.weight);
    let shape = [count, d_inner / activation.inputs(), d_model];
    output.check_part(["output.weight", "output.bias"], &x.device(), shape)?;
    if input.packed().or(output.packed()).is_some() {
        let hidden = activation.try_apply(input.try_forward(x, experts)?)?;
        return output.try_forward(hidden, experts);
    }
    let input = input.part(x.is_tracked())?;
    let output = output.part(input.tracks(&x))?;
    let groups = RowGroups::Offsets(experts.offsets().clone().into_dispatch());
    feed_forward_between(x, (input, output), groups, (activation, recompute))
}

/// Returns an error if the layers, with `activation` between them, do not match each other or the
/// input `x`. The second layer comes with the names of its parameters.
pub(super) fn check_pair<const D: usize>(
    input: &Nvfp4Linear,
    (names, output): ([&'static str; 2], &Nvfp4Linear),
    activation: MlpActivation,
    x: &Tensor<D>,
) -> Result<(), Nvfp4Error> {
    input.check(x)?;
    let [d_model, d_inner] = whole_dims(&input.weight);
    let shape = [d_inner / activation.inputs(), d_model];
    output.check_part(names, &x.device(), shape)
}

/// Computes a feed-forward of two layers after [`check_pair`]. `recompute` was checked.
pub(super) fn feed_forward_of(
    (input, output): (&Nvfp4Linear, &Nvfp4Linear),
    settings: (MlpActivation, bool),
    x: Tensor<2>,
) -> Result<Tensor<2>, Nvfp4Error> {
    if input.packed().or(output.packed()).is_some() {
        let hidden = settings.0.try_apply(input.try_forward(x)?)?;
        return output.try_forward(hidden);
    }
    let input = input.part(x.is_tracked())?;
    let output = output.part(input.tracks(&x))?;
    feed_forward_between(x, (input, output), RowGroups::Whole, settings)
}

/// Computes two layers whose arguments are checked, with the activation between them. The flag is
/// true if the backward recomputes the input of the activation.
pub(super) fn feed_forward_between<const W: usize, const B: usize>(
    x: Tensor<2>,
    (input, output): (LinearPart<W, B>, LinearPart<W, B>),
    groups: RowGroups<Dispatch>,
    (activation, recompute): (MlpActivation, bool),
) -> Result<Tensor<2>, Nvfp4Error> {
    let Some(fused) = activation.fused() else {
        let hidden = activation.try_apply(input.run(x, groups.clone()))?;
        return Ok(output.run(hidden, groups));
    };
    let params = |weight: Tensor<W>, bias| LinearParams {
        weight: weight.into_dispatch(),
        bias: into_bias(bias),
    };
    Ok(Tensor::from_dispatch(Dispatch::nvfp4_feed_forward(
        x.into_dispatch(),
        params(input.weight, input.bias),
        params(output.weight, output.bias),
        groups,
        FeedForwardSpec {
            activation: fused,
            input: input.spec,
            output: output.spec,
            recompute,
        },
    )))
}

/// Activation between the two layers of a feed-forward, named as in TransformerEngine. The first
/// layer of a gated one has twice the hidden features: those of the gate, then those of the factor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MlpActivation {
    /// GELU by its `tanh` approximation, as TransformerEngine's `gelu`.
    #[default]
    Gelu,
    /// GELU by the normal distribution function, which TransformerEngine does not have.
    #[serde(rename = "gelu_exact")]
    GeluExact,
    /// `gelu(gate) · factor`, with the `tanh` approximation.
    GeGlu,
    /// `silu(gate) · factor`.
    SwiGlu,
    /// `relu(gate) · factor`.
    ReGlu,
    /// `max(x, 0)`.
    Relu,
    /// Squared ReLU: `max(x, 0)²`.
    SRelu,
}

impl MlpActivation {
    /// Names of the activations, which records of configurations also use.
    pub const NAMES: [(&'static str, Self); 7] = [
        ("gelu", Self::Gelu),
        ("gelu_exact", Self::GeluExact),
        ("geglu", Self::GeGlu),
        ("swiglu", Self::SwiGlu),
        ("reglu", Self::ReGlu),
        ("relu", Self::Relu),
        ("srelu", Self::SRelu),
    ];

    /// Returns the number of output features of the first layer per hidden feature: 2 if gated.
    pub const fn inputs(self) -> usize {
        match self {
            Self::GeGlu | Self::SwiGlu | Self::ReGlu => 2,
            Self::Gelu | Self::GeluExact | Self::Relu | Self::SRelu => 1,
        }
    }

    /// Applies the activation to the last axis of `x`: `[..., inputs * hidden]` to
    /// `[..., hidden]`, in the dtype of `x`. GELU and SwiGLU are one pass each, the others are
    /// Burn's operations.
    ///
    /// # Errors
    /// Returns an error if the device has no implementation, the dtype is not supported, or the
    /// last axis is empty, or odd for a gated activation.
    pub fn try_apply<const D: usize>(self, x: Tensor<D>) -> Result<Tensor<D>, Nvfp4Error> {
        let gated = |activation: fn(Tensor<D>) -> Result<Tensor<D>, Nvfp4Error>| {
            let width = equal_parts(("the last axis of `x`", x.dims()[D - 1]), ("inputs", 2))?;
            let part = |first| x.clone().narrow(D - 1, first, width);
            Ok(activation(part(0))? * part(width))
        };
        match self {
            Self::Gelu => try_gelu(x, Gelu::Tanh),
            Self::GeluExact => try_gelu(x, Gelu::Erf),
            Self::SwiGlu => try_swiglu(x),
            Self::GeGlu => gated(|gate| try_gelu(gate, Gelu::Tanh)),
            Self::ReGlu => gated(|gate| Ok(relu(gate))),
            Self::Relu => Ok(relu(x)),
            Self::SRelu => {
                let x = relu(x);
                Ok(x.clone() * x)
            }
        }
    }

    /// Returns the activation of the operation that fuses it with the quantization of its output,
    /// if it has it.
    fn fused(self) -> Option<GateActivation> {
        match self {
            Self::Gelu => Some(GateActivation::Gelu(Gelu::Tanh)),
            Self::GeluExact => Some(GateActivation::Gelu(Gelu::Erf)),
            Self::SwiGlu => Some(GateActivation::SwiGlu),
            Self::GeGlu | Self::ReGlu | Self::Relu | Self::SRelu => None,
        }
    }

    /// Returns an error if the backward should recompute the input of an activation that is not
    /// fused.
    pub(super) fn check_recompute(self, recompute: bool) -> Result<(), Nvfp4Error> {
        if recompute && self.fused().is_none() {
            let found = format!("true with {self:?}");
            let expected = "false, or Gelu, GeluExact or SwiGlu as the activation";
            return Err(Nvfp4Error::value("recompute", found, expected));
        }
        Ok(())
    }
}

impl FromStr for MlpActivation {
    type Err = Nvfp4Error;

    fn from_str(name: &str) -> Result<Self, Nvfp4Error> {
        let mut all = Self::NAMES.iter();
        let found = all.find(|(known, _)| *known == name);
        found.map(|(_, activation)| *activation).ok_or_else(|| {
            let names = Self::NAMES.map(|(name, _)| name).join(", ");
            Nvfp4Error::value("activation", name, format!("one of {names}"))
        })
    }
}

/// SwiGLU activation between two linear layers, a module without parameters: `silu(gate) · up` of
/// the two halves of the last axis, `[..., 2 * hidden]` to `[..., hidden]`, in one pass in the
/// forward and one in the backward.
///
/// [`SwiGlu`](super::SwiGlu) includes the gate and up projections; [`Nvfp4SwiGlu`] includes all
/// three.
#[derive(Module, Debug, Default)]
pub struct SwiGluActivation {}

impl SwiGluActivation {
    /// Creates the module.
    pub fn new() -> Self {
        Self {}
    }

    /// Applies the activation.
    ///
    /// # Errors
    /// Same as [`try_swiglu`].
    pub fn try_forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>, Nvfp4Error> {
        try_swiglu(x)
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        or_panic("SwiGluActivation::forward", self.try_forward(x))
    }
}

/// Configuration of an [`Nvfp4FeedForward`]; the fields and defaults of
/// `burn_nn::transformer::PositionWiseFeedForwardConfig`, and a recipe.
#[derive(Config, Debug)]
pub struct Nvfp4FeedForwardConfig {
    /// Width of the input and the output, a positive multiple of 16.
    pub d_model: usize,
    /// Hidden width, a positive multiple of 16.
    pub d_ff: usize,
    /// Dropout probability of the hidden features, in `[0, 1)`.
    #[config(default = 0.1)]
    pub dropout: f64,
    /// Parameter initializer, as in `burn_nn::LinearConfig`.
    #[config(default = "Initializer::KaimingUniform{gain:1.0/3f64.sqrt(), fan_out_only:false}")]
    pub initializer: Initializer,
    /// Activation between the GEMMs.
    #[config(default = "ActivationConfig::Gelu")]
    pub activation: ActivationConfig,
    /// Quantization recipe.
    #[config(default = "Nvfp4Recipe::new()")]
    pub recipe: Nvfp4Recipe,
}

impl Nvfp4FeedForwardConfig {
    /// Creates a feed-forward on `device`.
    ///
    /// # Errors
    /// Returns an error if a width is not a positive multiple of 16, `dropout` is outside `[0, 1)`,
    /// or the device has no implementation.
    pub fn try_init(&self, device: &Device) -> Result<Nvfp4FeedForward, Nvfp4Error> {
        validate::blocks("d_model", "d_model", self.d_model)?;
        validate::blocks("d_ff", "d_ff", self.d_ff)?;
        let linear = |d_in, d_out| {
            Nvfp4LinearConfig::new(d_in, d_out)
                .with_initializer(self.initializer.clone())
                .with_recipe(self.recipe.clone())
                .try_init(device)
        };
        Ok(Nvfp4FeedForward {
            linear_inner: linear(self.d_model, self.d_ff)?,
            linear_outer: linear(self.d_ff, self.d_model)?,
            dropout: checked_dropout(self.dropout)?,
            activation: self.activation.init(device),
        })
    }

    /// Panicking version of [`try_init`](Self::try_init).
    #[track_caller]
    pub fn init(&self, device: &Device) -> Nvfp4FeedForward {
        or_panic("Nvfp4FeedForwardConfig::init", self.try_init(device))
    }
}

/// Position-wise feed-forward of `burn_nn` with its two GEMMs in NVFP4: same parameters, ids and
/// record paths.
///
/// GELU, in both forms, is one operation with the quantization of its output if there is no dropout,
/// and one pass otherwise. Parameters of an activation are not in records, as in `burn_nn`.
#[derive(Module, Debug)]
pub struct Nvfp4FeedForward {
    /// First layer, `[d_model, d_ff]`.
    pub linear_inner: Nvfp4Linear,
    /// Second layer, `[d_ff, d_model]`.
    pub linear_outer: Nvfp4Linear,
    /// Dropout between the activation and the second GEMM.
    pub dropout: Dropout,
    /// Activation between the GEMMs.
    #[module(skip)]
    pub activation: Activation,
}

impl Nvfp4FeedForward {
    /// Takes over the parameters of `feed_forward`, with their ids.
    ///
    /// # Errors
    /// Returns an error if `d_model` or `d_ff` is not a positive multiple of 16.
    pub fn from_position_wise(
        feed_forward: PositionWiseFeedForward,
        recipe: &Nvfp4Recipe,
    ) -> Result<Self, Nvfp4Error> {
        Ok(Self {
            linear_inner: Nvfp4Linear::from_linear(feed_forward.linear_inner, recipe)?,
            linear_outer: Nvfp4Linear::from_linear(feed_forward.linear_outer, recipe)?,
            dropout: feed_forward.dropout,
            activation: feed_forward.activation,
        })
    }

    /// Returns the parameters as burn-nn's feed-forward, with their ids.
    pub fn into_position_wise(self) -> PositionWiseFeedForward {
        PositionWiseFeedForward {
            linear_inner: self.linear_inner.into_linear(),
            linear_outer: self.linear_outer.into_linear(),
            dropout: self.dropout,
            activation: self.activation,
        }
    }

    /// Applies the layer: `[..., d_model]` to the same shape and dtype.
    ///
    /// # Errors
    /// Same as [`Nvfp4Linear::try_forward`]; also if the shapes of the two layers do not match.
    pub fn try_forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>, Nvfp4Error> {
        self.check(&x)?;
        let gelu = match &self.activation {
            Activation::Gelu(gelu) if gelu.approximate => Some(MlpActivation::Gelu),
            Activation::Gelu(_) => Some(MlpActivation::GeluExact),
            _ => None,
        };
        if let Some(gelu) = gelu.filter(|_| !drops(&self.dropout, &x.device())) {
            let (x, dims) = rows(x);
            let layers = (&self.linear_inner, &self.linear_outer);
            return Ok(feed_forward_of(layers, (gelu, false), x)?.reshape(dims));
        }
        let x = self.linear_inner.try_forward(x)?;
        let x = match gelu {
            Some(gelu) => gelu.try_apply(x)?,
            None => self.activation.forward(x),
        };
        self.linear_outer.try_forward(self.dropout.forward(x))
    }

    /// Returns an error if [`try_forward`](Self::try_forward) does not accept `x`.
    pub(super) fn check<const D: usize>(&self, x: &Tensor<D>) -> Result<(), Nvfp4Error> {
        let names = ["linear_outer.weight", "linear_outer.bias"];
        let outer = (names, &self.linear_outer);
        check_pair(&self.linear_inner, outer, MlpActivation::Gelu, x)
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        or_panic("Nvfp4FeedForward::forward", self.try_forward(x))
    }
}
