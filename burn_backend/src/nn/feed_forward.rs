//! Feed-forwards.

use burn_core as burn;

use burn_core::backend::Dispatch;
use burn_core::config::Config;
use burn_core::module::Module;
use burn_core::tensor::{Device, Tensor};
use burn_nn::activation::{Activation, SwiGlu as BurnSwiGlu};
use burn_nn::transformer::PositionWiseFeedForward;
use burn_nn::{Dropout, Initializer, Linear};
use nvfp4_kernels::Nvfp4Error;

use super::parts::{LinearPart, PartIds, parts, side_by_side};
use super::{Nvfp4GroupedLinear, Nvfp4Linear, Nvfp4LinearConfig, rows};
use crate::experts::ExpertOffsets;
use crate::functions::{Gelu, into_bias, or_panic, try_gelu, try_swiglu};
use crate::ops::layers::Activation as GateActivation;
use crate::ops::{FeedForwardSpec, LinearParams, Nvfp4Ops, RowGroups};
use crate::parallel::whole_dims;
use crate::recipe::Nvfp4Recipe;

/// Configuration of an [`Nvfp4SwiGlu`].
#[derive(Config, Debug)]
pub struct Nvfp4SwiGluConfig {
    /// Width of the input and the output, a positive multiple of 16.
    pub d_model: usize,
    /// Width inside, a positive multiple of 16.
    pub d_hidden: usize,
    /// Whether the projections add a bias.
    #[config(default = false)]
    pub bias: bool,
    /// Whether the backward computes gate and up again instead of keeping them; see
    /// [`Nvfp4SwiGlu::with_recompute`].
    #[config(default = false)]
    pub recompute: bool,
    /// How parameters are initialised, as in `burn_nn::LinearConfig`.
    #[config(default = "Initializer::KaimingUniform{gain:1.0/3f64.sqrt(), fan_out_only:false}")]
    pub initializer: Initializer,
    /// What is quantized, and how.
    #[config(default = "Nvfp4Recipe::new()")]
    pub recipe: Nvfp4Recipe,
}

impl Nvfp4SwiGluConfig {
    /// A new feed-forward on `device`.
    ///
    /// # Errors
    /// When a width is no positive multiple of 16, or the device has no implementation.
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

    /// [`try_init`](Self::try_init), panicking where it fails.
    pub fn init(&self, device: &Device) -> Nvfp4SwiGlu {
        or_panic("Nvfp4SwiGluConfig::init", self.try_init(device))
    }
}

/// `(silu(x G) · (x U)) D`, with all three GEMMs in NVFP4.
///
/// `G` and `U` are one weight: the input is quantized once, and both share one global scale. The
/// three steps are one operation, whose bits are those of [`Nvfp4Linear`], [`SwiGlu`] and
/// [`Nvfp4Linear`]: the activation and its gradient are computed, and their amax values found, in
/// one pass, ahead of the one that quantizes them.
#[derive(Module, Debug)]
pub struct Nvfp4SwiGlu {
    /// `G` and `U` concatenated, `[d_model, 2 * d_hidden]`.
    pub gate_up: Nvfp4Linear,
    /// `D`, `[d_hidden, d_model]`.
    pub down: Nvfp4Linear,
    /// Of the layers that `gate_up` was made of.
    #[module(skip)]
    ids: Option<Vec<PartIds>>,
    #[module(skip)]
    recompute: bool,
}

impl Nvfp4SwiGlu {
    /// Apply the layer: `[..., d_model]` to the same shape and type.
    ///
    /// # Errors
    /// As [`Nvfp4Linear::try_forward`], and when the two layers do not fit each other.
    pub fn try_forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>, Nvfp4Error> {
        self.check(&x)?;
        let (x, dims) = rows(x);
        let y = try_swiglu_of(&self.gate_up, &self.down, x, self.recompute)?;
        Ok(y.reshape(dims))
    }

    /// The same layer, whose backward computes `x G` and `x U` again instead of keeping them.
    ///
    /// They are the largest tensors of a block: `2 * d_hidden` elements for each token. The forward
    /// then keeps the operands of their GEMM, `d_model` elements of 4 bits for each token, and the
    /// backward runs it again: two GEMMs of the feed-forward's size beside its nine. Results have
    /// the same bits.
    pub fn with_recompute(mut self, recompute: bool) -> Self {
        self.recompute = recompute;
        self
    }

    /// Whether the backward computes `x G` and `x U` again.
    pub fn recomputes(&self) -> bool {
        self.recompute
    }

    /// Fail unless [`try_forward`](Self::try_forward) takes `x`.
    pub(super) fn check<const D: usize>(&self, x: &Tensor<D>) -> Result<(), Nvfp4Error> {
        check_swiglu(&self.gate_up, &self.down, x)
    }

    /// [`try_forward`](Self::try_forward), panicking where it fails.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        or_panic("Nvfp4SwiGlu::forward", self.try_forward(x))
    }

    /// Take over the parameters of `swiglu`, burn-nn's gated activation, and of the projection
    /// `down` behind it, which keeps its ids. The two layers of `swiglu` become one, with new ids
    /// ([`into_swiglu`](Self::into_swiglu) gives the old ones back).
    ///
    /// # Errors
    /// When the shapes do not fit each other, or a width is no positive multiple of 16.
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

    /// Gives the parameters to burn-nn's gated activation, with the ids of the one that this
    /// was made of, or with new ones if it was made of none, and to the projection behind it, with
    /// its ids.
    pub fn into_swiglu(self) -> (BurnSwiGlu, Linear) {
        let [linear_inner, linear_outer] = parts(self.gate_up.into_linear(), self.ids.as_deref());
        let swiglu = BurnSwiGlu {
            linear_inner,
            linear_outer,
        };
        (swiglu, self.down.into_linear())
    }
}

/// `(silu(x G) · (x U)) D` of a `gate_up` layer, which has `G` and `U` concatenated, and a `down`
/// layer: what [`Nvfp4SwiGlu`] computes, of layers that are fields elsewhere. With `recompute` the
/// backward computes `x G` and `x U` again, as [`with_recompute`](Nvfp4SwiGlu::with_recompute)
/// says.
///
/// # Errors
/// As [`Nvfp4SwiGlu::try_forward`].
pub fn try_swiglu_of(
    gate_up: &Nvfp4Linear,
    down: &Nvfp4Linear,
    x: Tensor<2>,
    recompute: bool,
) -> Result<Tensor<2>, Nvfp4Error> {
    check_swiglu(gate_up, down, &x)?;
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

/// [`try_swiglu_of`] for each expert, of tokens that are sorted by expert.
///
/// # Errors
/// As [`Nvfp4GroupedLinear::try_forward`], and when the two layers do not fit each other.
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
    let input = gate_up.part(x.is_tracked())?;
    let output = down.part(input.tracks(&x))?;
    let groups = RowGroups::Offsets(experts.offsets().clone().into_dispatch());
    Ok(swiglu_between(x, input, output, groups, recompute))
}

/// Fail unless the layers fit each other and the input `x`.
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

/// SwiGLU between two layers, after their checks.
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

/// SwiGLU between two linear layers, a module without parameters: `silu(gate) · up` of both halves
/// of the last axis, `[..., 2 * hidden]` to `[..., hidden]`, in one pass forward and one backward.
///
/// `burn_nn`'s module of this name has the projections before it too; [`Nvfp4SwiGlu`] has all
/// three.
#[derive(Module, Debug, Default)]
pub struct SwiGlu {}

impl SwiGlu {
    /// A new module.
    pub fn new() -> Self {
        Self {}
    }

    /// Apply the activation.
    ///
    /// # Errors
    /// As [`try_swiglu`].
    pub fn try_forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>, Nvfp4Error> {
        try_swiglu(x)
    }

    /// [`try_forward`](Self::try_forward), panicking where it fails.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        or_panic("SwiGlu::forward", self.try_forward(x))
    }
}

/// `burn_nn`'s position-wise feed-forward with its two GEMMs in NVFP4: the same parameters, ids
/// and paths in a record.
#[derive(Module, Debug)]
pub struct Nvfp4FeedForward {
    /// `[d_model, d_ff]`.
    pub linear_inner: Nvfp4Linear,
    /// `[d_ff, d_model]`.
    pub linear_outer: Nvfp4Linear,
    /// Between the activation and the second GEMM.
    pub dropout: Dropout,
    /// Between the GEMMs.
    #[module(skip)]
    pub activation: Activation,
}

impl Nvfp4FeedForward {
    /// Take over the parameters of `feed_forward`, with their ids.
    ///
    /// # Errors
    /// When `d_model` or `d_ff` is no positive multiple of 16.
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

    /// Gives the parameters to burn-nn's feed-forward, with their ids.
    pub fn into_position_wise(self) -> PositionWiseFeedForward {
        PositionWiseFeedForward {
            linear_inner: self.linear_inner.into_linear(),
            linear_outer: self.linear_outer.into_linear(),
            dropout: self.dropout,
            activation: self.activation,
        }
    }

    /// Apply the layer: `[..., d_model]` to the same shape and type.
    ///
    /// # Errors
    /// As [`Nvfp4Linear::try_forward`], and when the two layers do not fit each other.
    pub fn try_forward<const D: usize>(&self, x: Tensor<D>) -> Result<Tensor<D>, Nvfp4Error> {
        self.linear_inner.check(&x)?;
        let [d_model, d_ff] = whole_dims(&self.linear_inner.weight);
        let names = ["linear_outer.weight", "linear_outer.bias"];
        let (device, shape) = (x.device(), [d_ff, d_model]);
        self.linear_outer.check_part(names, &device, shape)?;
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

    /// [`try_forward`](Self::try_forward), panicking where it fails.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        or_panic("Nvfp4FeedForward::forward", self.try_forward(x))
    }
}
