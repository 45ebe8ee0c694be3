//! Mixture of experts.

mod exchange;
mod gathered;
mod losses;
mod parallel;
mod sharded;
mod steps;

pub(super) use losses::BatchRanks;
pub use parallel::{ExpertDispatch, ExpertParallelMoe, expert_parameters};
pub use sharded::{ExpertShard, RoutedTokens, ShardedExperts};

use burn_core as burn;

use burn_core::config::Config;
use burn_core::module::Module;
use burn_core::tensor::{Device, Int, Tensor};
use burn_nn::{Initializer, Linear, LinearConfig};
use nvfp4_formats::Nvfp4Error;

use super::{
    MlpActivation, Nvfp4GroupedLinear, Nvfp4GroupedLinearConfig, Nvfp4SwiGlu, Nvfp4SwiGluConfig,
    Routing, rows,
};
use crate::experts::MoeRoute;
use crate::functions::or_panic;
use crate::recipe::Nvfp4Recipe;
use steps::{MoeParts, MoeSettings};

/// Configuration of an [`Nvfp4Moe`].
#[derive(Config, Debug)]
pub struct Nvfp4MoeConfig {
    /// Width of the input and the output, a positive multiple of 16.
    pub d_model: usize,
    /// Hidden width of each expert, a positive multiple of 16.
    pub d_hidden: usize,
    /// Number of experts, 1 to 512.
    pub experts: usize,
    /// Number of experts per token, 1 to `experts`.
    #[config(default = 2)]
    pub top_k: usize,
    /// True to divide the weights of a token's experts by their sum. Without effect for a `top_k`
    /// of 1: the weight stays the router's probability (Switch), because a constant weight of 1
    /// would leave the router without a gradient.
    #[config(default = true)]
    pub normalize: bool,
    /// Hidden width of a shared expert, which processes every token with a weight of 1; a positive
    /// multiple of 16. `None` for no shared expert.
    pub shared_hidden: Option<usize>,
    /// Activation of all experts, between their two layers.
    #[config(default = "MlpActivation::SwiGlu")]
    pub activation: MlpActivation,
    /// True if the backward recomputes the input of the experts' activation instead of keeping it;
    /// see [`Nvfp4SwiGlu::with_recompute`]. For GELU and SwiGLU.
    #[config(default = false)]
    pub recompute: bool,
    /// Parameter initializer, as in `burn_nn::LinearConfig`.
    #[config(default = "Initializer::KaimingUniform{gain:1.0/3f64.sqrt(), fan_out_only:false}")]
    pub initializer: Initializer,
    /// Quantization recipe of the experts.
    #[config(default = "Nvfp4Recipe::new()")]
    pub recipe: Nvfp4Recipe,
}

impl Nvfp4MoeConfig {
    /// Creates a mixture on `device`.
    ///
    /// # Errors
    /// Returns an error if a width is not a positive multiple of 16, `experts` is not 1 to 512,
    /// `top_k` is not 1 to `experts`, the activation does not support `recompute`, or the device
    /// has no implementation.
    pub fn try_init(&self, device: &Device) -> Result<Nvfp4Moe, Nvfp4Error> {
        if !(1..=self.experts).contains(&self.top_k) {
            return Err(Nvfp4Error::value(
                "top_k",
                self.top_k.to_string(),
                format!("1 to {}, the number of experts", self.experts),
            ));
        }
        self.activation.check_recompute(self.recompute)?;
        let grouped = |d_in, d_out| {
            Nvfp4GroupedLinearConfig::new(self.experts, d_in, d_out)
                .with_initializer(self.initializer.clone())
                .with_recipe(self.recipe.clone())
                .try_init(device)
        };
        let shared = |hidden| {
            let config = Nvfp4SwiGluConfig::new(self.d_model, hidden)
                .with_recompute(self.recompute)
                .with_initializer(self.initializer.clone())
                .with_recipe(self.recipe.clone());
            config.try_init_with(self.activation, device)
        };
        let d_inner = self.activation.inputs() * self.d_hidden;
        Ok(Nvfp4Moe {
            gate_up: grouped(self.d_model, d_inner)?,
            down: grouped(self.d_hidden, self.d_model)?,
            shared: self.shared_hidden.map(shared).transpose()?,
            router: LinearConfig::new(self.d_model, self.experts)
                .with_bias(false)
                .with_initializer(self.initializer.clone())
                .init(device),
            settings: MoeSettings {
                top_k: self.top_k,
                normalize: self.normalize,
                activation: self.activation,
                recompute: self.recompute,
            },
        })
    }

    /// Panicking version of [`try_init`](Self::try_init).
    #[track_caller]
    pub fn init(&self, device: &Device) -> Nvfp4Moe {
        or_panic("Nvfp4MoeConfig::init", self.try_init(device))
    }
}

/// Mixture of experts, with the experts' GEMMs in NVFP4 and the router in `f32`. The experts have
/// SwiGLU, as below, or another [activation](MlpActivation).
///
/// ```text
/// p = softmax(x R)                              f32[tokens, experts]
/// y = Σ over the top_k experts e of p: w_e · (silu(x G_e) · (x U_e)) D_e
/// ```
///
/// `w` are the probabilities of the chosen experts, divided by their sum if `normalize` is set.
/// Experts have no capacity and no token is dropped. Tokens are sorted by expert on the device; the
/// host never waits for it. The gradient reaches the router through `w` and through the two losses
/// of [`MoeOutput`].
///
/// ```
/// # use burn_core as burn;
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_nvfp4::{Nvfp4MoeConfig, Nvfp4Recipe};
///
/// # #[cfg(feature = "flex")] {
/// let device = Device::flex().autodiff();
/// let moe = Nvfp4MoeConfig::new(32, 48, 4)
///     .with_top_k(2)
///     .with_recipe(Nvfp4Recipe::new().with_seed(7))
///     .init(&device);
///
/// let x = Tensor::<3>::random([2, 5, 32], Distribution::Normal(0.0, 1.0), &device);
/// let out = moe.forward(x);
/// assert_eq!(out.output.dims(), [2, 5, 32]);
/// // Ten tokens, each sent to two experts.
/// assert_eq!(out.counts.sum().into_scalar::<i64>(), 20);
///
/// let loss = out.output.sum() + out.balance_loss.mul_scalar(0.01) + out.z_loss.mul_scalar(0.001);
/// let gradients = loss.backward();
/// assert_eq!(moe.gate_up.weight.grad(&gradients).unwrap().dims(), [4, 32, 96]);
/// assert_eq!(moe.router.weight.grad(&gradients).unwrap().dims(), [32, 4]);
/// # }
/// ```
#[derive(Module, Debug)]
pub struct Nvfp4Moe {
    /// The router, `[d_model, experts]`, always in high precision.
    pub router: Linear,
    /// Gate and up weights of each expert, concatenated, `[experts, d_model, 2 * d_hidden]`: they
    /// share one global scale per expert. `[experts, d_model, d_hidden]` if the activation is not
    /// gated.
    pub gate_up: Nvfp4GroupedLinear,
    /// Down weights of each expert, `[experts, d_hidden, d_model]`.
    pub down: Nvfp4GroupedLinear,
    /// Shared expert.
    pub shared: Option<Nvfp4SwiGlu>,
    #[module(skip)]
    settings: MoeSettings,
}

/// Output of a mixture of experts.
#[derive(Clone, Debug)]
pub struct MoeOutput<const D: usize> {
    /// Output, of the shape and dtype of the input.
    pub output: Tensor<D>,
    /// Load-balancing loss, `f32[1]`: `experts · Σₑ fₑ · Pₑ`, with `f` the shares of the choices
    /// that went to each expert (no gradient passes) and `P` the mean probabilities (Fedus, Zoph
    /// and Shazeer, Switch Transformers, equations 4 to 6; Lepikhin et al., GShard). It is 1 if all
    /// experts are chosen equally often. Add it to the loss with a small factor, such as 0.01.
    pub balance_loss: Tensor<1>,
    /// Router z-loss, `f32[1]`: the mean over tokens of `(log Σₑ exp(logitₑ))²`, which keeps the
    /// router's logits small (Zoph et al., ST-MoE, equation 5). Add it to the loss with a small
    /// factor, such as 0.001, or ignore it.
    pub z_loss: Tensor<1>,
    /// Number of choices per expert, `i32[experts]`.
    pub counts: Tensor<1, Int>,
}

impl Nvfp4Moe {
    /// Sets whether the backward recomputes the input of all experts' activation instead of keeping
    /// it; see [`Nvfp4SwiGlu::with_recompute`]. A forward with an activation that does not support
    /// it returns an error.
    pub fn with_recompute(mut self, recompute: bool) -> Self {
        self.settings.recompute = recompute;
        self.shared = self.shared.map(|shared| shared.with_recompute(recompute));
        self
    }

    /// Number of experts per token.
    pub fn top_k(&self) -> usize {
        self.settings.top_k
    }

    /// Activation of all experts.
    pub fn activation(&self) -> MlpActivation {
        self.settings.activation
    }

    /// Applies the mixture.
    ///
    /// # Shapes
    ///
    /// - input: `[..., d_model]`, of type `f32`, `bf16` or `f16`, with at least one token
    /// - output: see [`MoeOutput`]
    ///
    /// # Errors
    /// Returns an error if there is no token, the last axis is not `d_model`, devices differ, a
    /// dtype is not supported, the shapes of the layers do not match, or the activation does not
    /// support recomputation.
    pub fn try_forward<const D: usize>(&self, x: Tensor<D>) -> Result<MoeOutput<D>, Nvfp4Error> {
        self.check(&x)?;
        let parts = self.parts();
        let (x, dims) = rows(x);
        let MoeRoute {
            chosen,
            weights,
            balance_loss,
            z_loss,
            counts,
        } = parts.route(parts.logits(x.clone()))?;
        let routing = Routing::try_new(chosen, parts.experts())?;
        let sorted = routing.dispatch_for(&self.gate_up, x.clone());
        let results = parts.layers().run(sorted, routing.experts(), &[])?;
        let mut output = routing.combine(results, weights);
        if let Some(shared) = parts.run_shared(x)? {
            output = output + shared;
        }
        Ok(MoeOutput {
            output: output.reshape(dims),
            balance_loss,
            z_loss,
            counts,
        })
    }

    /// Returns an error if [`try_forward`](Self::try_forward) does not accept `x`.
    pub(super) fn check<const D: usize>(&self, x: &Tensor<D>) -> Result<(), Nvfp4Error> {
        let parts = self.parts();
        parts.check(x, parts.experts())
    }

    fn parts(&self) -> MoeParts<'_> {
        MoeParts {
            router: &self.router,
            tensor: None,
            gate_up: &self.gate_up,
            down: &self.down,
            shared: self.shared.as_ref(),
            settings: self.settings,
        }
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> MoeOutput<D> {
        or_panic("Nvfp4Moe::forward", self.try_forward(x))
    }
}
