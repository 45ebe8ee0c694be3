//! Feed-forward of a layer: a gated feed-forward, or a mixture of gated experts.

use anyhow::Result;
use burn::module::{Module, Param};
use burn::tensor::activation::sigmoid;
use burn::tensor::{FloatDType, Tensor};
use burn_nvfp4::experts::Router;
use burn_nvfp4::functions::{Gelu, try_gelu, try_swiglu};
use burn_nvfp4::nn::{
    ExpertDispatch, MlpActivation, ResidualStream, RmsNorm, RoutedTokens, Routing, ShardedExperts,
    try_feed_forward_of_experts, try_swiglu_of,
};

use super::call::Call;
use super::names::Site;
use super::projection::{Experts, Projection, rows};
use super::router::route;
use crate::hf::{GateActivation, Scoring};
use crate::model::cast;

/// Feed-forward of a layer.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant, reason = "a model has few of them")]
pub enum FeedForward {
    /// One feed-forward for all tokens.
    Dense(Gated),
    /// A mixture of experts, a few per token.
    Moe(Moe),
}

/// `down(activation(gate(x)) * up(x))`.
#[derive(Module, Debug)]
pub struct Gated {
    /// Fused gate and up projection.
    pub gate_up: Projection,
    /// Down projection.
    pub down: Projection,
    #[module(skip)]
    pub(super) activation: GateActivation,
    /// True if the backward recomputes the input of the activation.
    #[module(skip)]
    pub(super) recompute: bool,
}

/// A mixture of experts.
///
/// The router's scores are a softmax over all experts or a sigmoid of each, in `f32`. The weights
/// of a token's `top_k` experts are their scores, divided by their sum if `normalize` is true.
#[derive(Module, Debug)]
pub struct Moe {
    /// Router weight, `[d_model, experts]`.
    pub router: Param<Tensor<2>>,
    /// Bias of the router, `[experts]`.
    pub router_bias: Option<Param<Tensor<1>>>,
    /// Fused gate and up projection of each expert.
    pub gate_up: Experts,
    /// Down projection of each expert.
    pub down: Experts,
    /// Bias of the scores for the choice of experts, `[experts]`, f32; not trained.
    pub correction: Option<Param<Tensor<1>>>,
    /// Feed-forward of all tokens, whose output is added.
    pub shared: Option<Gated>,
    #[module(skip)]
    pub(super) scoring: Scoring,
    #[module(skip)]
    pub(super) top_k: usize,
    #[module(skip)]
    pub(super) normalize: bool,
    #[module(skip)]
    pub(super) activation: GateActivation,
    /// True if the backward recomputes the inputs of the activation.
    #[module(skip)]
    pub(super) recompute: bool,
    /// Exchange of tokens with the ranks of their experts, if the experts are sharded.
    #[module(skip)]
    pub(super) dispatch: ExpertDispatch,
}

impl Gated {
    /// Returns true if the backward can recompute the input of the activation.
    fn can_recompute(&self) -> bool {
        let is_trained = |it: &Projection| matches!(it, Projection::Nvfp4(_));
        let is_silu = self.activation == GateActivation::Silu;
        is_silu && is_trained(&self.gate_up) && is_trained(&self.down)
    }

    /// Maps `[rows, d_model]` to the same shape. `sites` are the inputs of its projections in layer
    /// `index`.
    fn of_normed(
        &self,
        x: Tensor<2>,
        (index, sites): (usize, [Site; 2]),
        call: &mut Call<'_>,
    ) -> Result<Tensor<2>> {
        if let (true, Projection::Nvfp4(gate_up), Projection::Nvfp4(down)) =
            (self.recompute, &self.gate_up, &self.down)
            && call.observer.is_none()
        {
            return Ok(try_swiglu_of(gate_up, down, x, true)?);
        }
        call.show(index, sites[0], &x, None)?;
        let hidden = activate(self.activation, self.gate_up.forward(x)?)?;
        call.show(index, sites[1], &hidden, None)?;
        self.down.forward(hidden)
    }
}

/// Returns the input of the down projection, given the output of gate and up. SwiGLU is one kernel;
/// the other activations take several.
fn activate<const D: usize>(activation: GateActivation, gate_up: Tensor<D>) -> Result<Tensor<D>> {
    let hidden = gate_up.dims()[D - 1] / 2;
    let half = |first: usize| gate_up.clone().narrow(D - 1, first, hidden);
    match activation {
        GateActivation::Silu => Ok(try_swiglu(gate_up)?),
        GateActivation::GeluTanh => Ok(try_gelu(half(0), Gelu::Tanh)? * half(hidden)),
        GateActivation::ClampedSwiGlu { alpha, limit } => {
            let gate = half(0).clamp_max(limit);
            let up = half(hidden).clamp(-limit, limit);
            let gated = gate.clone() * sigmoid(gate.mul_scalar(alpha));
            Ok(gated * up.add_scalar(1.0))
        }
    }
}

impl FeedForward {
    /// Returns true if the backward can recompute the input of the activation: the activation must
    /// be SiLU, and the projections those of training, without adapters.
    pub(super) fn can_recompute(&self) -> bool {
        match self {
            Self::Dense(layer) => layer.can_recompute(),
            Self::Moe(layer) => {
                let shared = layer.shared.as_ref();
                let is_silu = layer.activation == GateActivation::Silu;
                let is_packed = layer.gate_up.is_packed() || layer.down.is_packed();
                is_silu && !is_packed && shared.is_none_or(Gated::can_recompute)
            }
        }
    }

    /// Makes the backward recompute the input of the activation.
    pub(super) fn recompute(&mut self) {
        match self {
            Self::Dense(layer) => layer.recompute = true,
            Self::Moe(layer) => {
                layer.recompute = true;
                if let Some(shared) = &mut layer.shared {
                    shared.recompute = true;
                }
            }
        }
    }

    /// Returns the stream with the feed-forward output of its `norm` pending, to be added later.
    /// `index` is the layer index.
    pub(super) fn forward(
        &self,
        norm: &RmsNorm,
        stream: ResidualStream,
        index: usize,
        call: &mut Call<'_>,
    ) -> Result<ResidualStream> {
        let dims = stream.sum.dims();
        let fused = match self {
            Self::Dense(layer) if call.observer.is_none() => {
                let is_silu = layer.activation == GateActivation::Silu;
                let gate_up = layer.gate_up.behind(norm, is_silu);
                gate_up.map(|gate_up| (gate_up, layer))
            }
            Self::Dense(_) | Self::Moe(_) => None,
        };
        let (sum, y) = match fused {
            Some((gate_up, layer)) => {
                let (sum, mut hidden) = gate_up.try_forward(stream)?;
                if !gate_up.swiglu {
                    hidden = activate(layer.activation, hidden)?;
                }
                (sum, layer.down.forward(rows(hidden))?)
            }
            None => {
                let (sum, x) = norm.try_forward_stream(stream)?;
                (sum, self.of_normed(rows(x), index, call)?)
            }
        };
        let pending = Some(y.reshape(dims));
        Ok(ResidualStream { sum, pending })
    }

    /// Maps `[rows, d_model]` to the same shape, in the type of `x`.
    fn of_normed(&self, x: Tensor<2>, index: usize, call: &mut Call<'_>) -> Result<Tensor<2>> {
        match self {
            Self::Dense(layer) => layer.of_normed(x, (index, [Site::GateUp, Site::Down]), call),
            Self::Moe(layer) => layer.forward(x, index, call),
        }
    }
}

impl Moe {
    fn forward(&self, x: Tensor<2>, index: usize, call: &mut Call<'_>) -> Result<Tensor<2>> {
        let Some(shared) = &self.shared else {
            return self.of_experts(x, index, call);
        };
        let routed = self.of_experts(x.clone(), index, call)?;
        let sites = [Site::SharedGateUp, Site::SharedDown];
        Ok(routed + shared.of_normed(x, (index, sites), call)?)
    }

    fn of_experts(&self, x: Tensor<2>, index: usize, call: &mut Call<'_>) -> Result<Tensor<2>> {
        let [_, experts] = self.router.dims();
        let router = cast(self.router.val(), FloatDType::F32);
        let mut logits = cast(x.clone(), FloatDType::F32).matmul(router);
        if let Some(bias) = &self.router_bias {
            logits = logits + cast(bias.val(), FloatDType::F32).unsqueeze::<2>();
        }
        let router = Router {
            experts,
            top_k: self.top_k,
            normalize: self.normalize,
        };
        let correction = self.correction.as_ref().map(|it| it.val());
        let (chosen, weights) = route(logits, correction, router, self.scoring)?;
        if let (Experts::Sharded(gate_up), Experts::Sharded(down)) = (&self.gate_up, &self.down) {
            let experts = ShardedExperts {
                gate_up,
                down,
                activation: MlpActivation::SwiGlu,
                recompute: self.recompute,
                dispatch: self.dispatch,
            };
            return Ok(experts.try_forward(RoutedTokens { x, chosen, weights })?);
        }
        let routing = Routing::try_new(chosen, experts)?;
        let experts = routing.experts();
        let x = match &self.gate_up {
            Experts::Grouped(gate_up) => routing.dispatch_for(gate_up, x),
            _ => routing.dispatch(x),
        };
        if let (true, Experts::Grouped(gate_up), Experts::Grouped(down)) =
            (self.recompute, &self.gate_up, &self.down)
            && call.observer.is_none()
        {
            let (layers, swiglu) = ((gate_up, down), MlpActivation::SwiGlu);
            let results = try_feed_forward_of_experts(layers, swiglu, x, experts, true)?;
            return Ok(routing.combine(results, weights));
        }
        call.show(index, Site::GateUp, &x, Some(experts))?;
        let hidden = activate(self.activation, self.gate_up.forward(x, experts)?)?;
        call.show(index, Site::Down, &hidden, Some(experts))?;
        let results = self.down.forward(hidden, experts)?;
        Ok(routing.combine(results, weights))
    }
}
