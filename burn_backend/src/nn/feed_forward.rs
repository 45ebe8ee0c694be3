//! Feed-forward layers.

use burn_core as burn;

use burn_core::backend::Dispatch;
use burn_core::config::Config;
use burn_core::module::Module;
use burn_core::tensor::{Device, Tensor};
use burn_nn::activation::{Activation, ActivationConfig, SwiGlu as BurnSwiGlu};
use burn_nn::transformer::PositionWiseFeedForward;
use burn_nn::{Dropout, Initializer, Linear};
use nvfp4_formats::Nvfp4Error;

use super::parts::{LinearPart, PartIds, parts, side_by_side};
use super::{Nvfp4GroupedLinear, Nvfp4Linear, Nvfp4LinearConfig, checked_dropout, rows};
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
        let linear = |d_in, d_out| {
            Nvfp4LinearConfig::new(d_in, d_out)
                .with_bias(self.bias)
                .with_initializer(self.initializer.clone())
                .with_recipe(self.recipe.clone())
                .try_init(device)
        };
        Ok(Nvfp4SwiGlu {
            gate_up: linear(self.d_model, 2 * self.d_hidden)?,
            down: linear(self.d_hidden, self.d_model)?,
            ids: None,
            recompute: self.recompute,
        })
    }

    /// Panicking version of [`try_init`](Self::try_init).
    pub fn init(&self, device: &Device) -> Nvfp4SwiGlu {
        or_panic("Nvfp4SwiGluConfig::init", self.try_init(device))
    }
}

/// SwiGLU feed-forward `(silu(x G) · (x U)) D`, with all three GEMMs in NVFP4.
///
/// `G` and `U` are one weight: the input is quantized once, and both share one global scale. The
/// three steps are one operation with the bits of the sequence [`Nvfp4Linear`],
/// [`SwiGluActivation`], [`Nvfp4Linear`]. One pass computes the activation (or its gradient) and its amax values; the
/// next pass quantizes it.
#[derive(Module, Debug)]
pub struct Nvfp4SwiGlu {
    /// Gate and up weights `G` and `U`, concatenated, `[d_model, 2 * d_hidden]`.
    pub gate_up: Nvfp4Linear,
    /// Down weight `D`, `[d_hidden, d_model]`.
    pub down: Nvfp4Linear,
    /// Ids of the layers that `gate_up` was made from.
    #[module(skip)]
    ids: Option<Vec<PartIds>>,
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
        let y = try_swiglu_of(&self.gate_up, &self.down, x, self.recompute)?;
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

    /// Returns an error if [`try_forward`](Self::try_forward) does not accept `x`.
    pub(super) fn check<const D: usize>(&self, x: &Tensor<D>) -> Result<(), Nvfp4Error> {
        check_swiglu(&self.gate_up, &self.down, x)
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
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
            recompute: false,
        })
    }

    /// Returns the parameters as burn-nn's gated activation and the projection that follows it. The
    /// projection keeps its ids; the activation gets the ids of the one that this was made from, or
    /// new ids if there was none.
    pub fn into_swiglu(self) -> (BurnSwiGlu, Linear) {
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
    check_swiglu(gate_up, down, &x)?;
    if gate_up.packed().or(down.packed()).is_some() {
        return down.try_forward(try_swiglu(gate_up.try_forward(x)?)?);
    }
    let input = gate_up.part(x.is_tracked())?;
    let output = down.part(input.tracks(&x))?;
    Ok(swiglu_between(
        x,
        input,
        output,
        RowGroups::Whole,
        recompute,
    ))
}

/// Grouped version of [`try_swiglu_of`], for tokens sorted by expert.
///
/// # Errors
/// Same as [`Nvfp4GroupedLinear::try_forward`]; also if the shapes of the two layers do not match.
pub fn try_swiglu_of_experts(
    gate_up: &Nvfp4GroupedLinear,
    down: &Nvfp4GroupedLinear,
    x: Tensor<2>,
    experts: &ExpertOffsets,
    recompute: bool,
) -> Result<Tensor<2>, Nvfp4Error> {
    gate_up.check(&x, experts)?;
    let [count, d_model, both] = whole_dims(&gate_up.weight);
    let (names, shape) = (["down.weight", "down.bias"], [count, both / 2, d_model]);
    down.check_part(names, &x.device(), shape)?;
    if gate_up.packed().or(down.packed()).is_some() {
        let hidden = try_swiglu(gate_up.try_forward(x, experts)?)?;
        return down.try_forward(hidden, experts);
    }
    let input = gate_up.part(x.is_tracked())?;
    let output = down.part(input.tracks(&x))?;
    let groups = RowGroups::Offsets(experts.offsets().clone().into_dispatch());
    Ok(swiglu_between(x, input, output, groups, recompute))
}

/// Returns an error if the layers do not match each other or the input `x`.
fn check_swiglu<const D: usize>(
    gate_up: &Nvfp4Linear,
    down: &Nvfp4Linear,
    x: &Tensor<D>,
) -> Result<(), Nvfp4Error> {
    gate_up.check(x)?;
    let [d_model, both] = whole_dims(&gate_up.weight);
    let (names, shape) = (["down.weight", "down.bias"], [both / 2, d_model]);
    down.check_part(names, &x.device(), shape)
}

/// Computes SwiGLU between two layers whose arguments are checked.
pub(super) fn swiglu_between<const W: usize, const B: usize>(
    x: Tensor<2>,
    input: LinearPart<W, B>,
    output: LinearPart<W, B>,
    groups: RowGroups<Dispatch>,
    recompute: bool,
) -> Tensor<2> {
    let params = |weight: Tensor<W>, bias| LinearParams {
        weight: weight.into_dispatch(),
        bias: into_bias(bias),
    };
    Tensor::from_dispatch(Dispatch::nvfp4_feed_forward(
        x.into_dispatch(),
        params(input.weight, input.bias),
        params(output.weight, output.bias),
        groups,
        FeedForwardSpec {
            activation: GateActivation::SwiGlu,
            input: input.spec,
            output: output.spec,
            recompute,
        },
    ))
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
    pub fn init(&self, device: &Device) -> Nvfp4FeedForward {
        or_panic("Nvfp4FeedForwardConfig::init", self.try_init(device))
    }
}

/// Position-wise feed-forward of `burn_nn` with its two GEMMs in NVFP4: same parameters, ids and
/// record paths.
///
/// GELU, in both forms, is one pass in the forward and one in the backward. Parameters of an
/// activation are not in records, as in `burn_nn`.
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
        let x = self.linear_inner.try_forward(x)?;
        let x = match &self.activation {
            Activation::Gelu(gelu) => match gelu.approximate {
                true => try_gelu(x, Gelu::Tanh)?,
                false => try_gelu(x, Gelu::Erf)?,
            },
            activation => activation.forward(x),
        };
        self.linear_outer.try_forward(self.dropout.forward(x))
    }

    /// Returns an error if [`try_forward`](Self::try_forward) does not accept `x`.
    pub(super) fn check<const D: usize>(&self, x: &Tensor<D>) -> Result<(), Nvfp4Error> {
        self.linear_inner.check(x)?;
        let [d_model, d_ff] = whole_dims(&self.linear_inner.weight);
        let names = ["linear_outer.weight", "linear_outer.bias"];
        let (device, shape) = (x.device(), [d_ff, d_model]);
        self.linear_outer.check_part(names, &device, shape)
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        or_panic("Nvfp4FeedForward::forward", self.try_forward(x))
    }
}
