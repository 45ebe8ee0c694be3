//! Experts of a mixture with a router of its own, sharded over ranks.

use burn_core as burn;

use burn_core::module::Module;
use burn_core::tensor::{Int, Tensor};
use nvfp4_formats::Nvfp4Error;

use super::super::parts::PartIds;
use super::super::{MlpActivation, Nvfp4GroupedLinear, Routing};
use super::exchange::ExpertExchange;
use super::gathered::{GatheredChoices, gather_tokens};
use super::parallel::{ExpertDispatch, check_parts};
use super::steps::ExpertLayers;
use crate::experts::check_experts;
use crate::parallel::ProcessGroup;
use crate::whole::whole_dims;

/// Layer of this rank's experts: rank `r` of `n` holds the experts `r · experts / n` up to
/// `(r + 1) · experts / n` of a grouped layer.
///
/// For a mixture whose router is not that of [`Nvfp4Moe`](super::Nvfp4Moe):
/// [`ShardedExperts`] computes two such layers.
#[derive(Module, Debug)]
pub struct ExpertShard {
    /// Layer with the experts of this rank.
    pub layer: Nvfp4GroupedLinear,
    #[module(skip)]
    group: ProcessGroup,
    /// Ids of the layers that the whole layer was made from.
    #[module(skip)]
    ids: Option<Vec<PartIds>>,
}

impl ExpertShard {
    /// Returns this rank's shard of `layer`, which is the same on all ranks of `group`. Parameters
    /// keep their ids, and the layer its RNG state.
    ///
    /// # Errors
    /// Returns an error if the number of experts is not a multiple of the number of ranks.
    pub fn try_new(layer: Nvfp4GroupedLinear, group: &ProcessGroup) -> Result<Self, Nvfp4Error> {
        let [experts, _, _] = whole_dims(&layer.weight);
        check_parts(experts, group)?;
        let held = experts / group.size();
        let (layer, ids) = layer.into_part(group.rank() * held, held);
        Ok(Self {
            layer,
            group: group.clone(),
            ids,
        })
    }

    /// Gathers the experts of all ranks on every rank: the inverse of [`try_new`](Self::try_new).
    /// All ranks call it together.
    ///
    /// # Panics
    /// If the group fails.
    pub fn gathered(self) -> Nvfp4GroupedLinear {
        self.layer.gathered(&self.group, self.ids)
    }

    /// Returns the ranks that hold the experts.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Returns the number of experts on all ranks.
    pub fn experts(&self) -> usize {
        let [held, _, _] = whole_dims(&self.layer.weight);
        held * self.group.size()
    }
}

/// Tokens of this rank with the experts that a router chose.
#[derive(Clone, Debug)]
pub struct RoutedTokens {
    /// Tokens, `[tokens, d_model]`.
    pub x: Tensor<2>,
    /// Experts of each token, `[tokens, top_k]`, indices of the experts of all ranks, any integer
    /// dtype.
    pub chosen: Tensor<2, Int>,
    /// Weight of each of them, `f32[tokens, top_k]`.
    pub weights: Tensor<2>,
}

/// The two layers of experts that are sharded over ranks, with an activation between them.
///
/// Results, gradients and random bits are those of [`ExpertParallelMoe`](super::ExpertParallelMoe):
/// each expert receives the tokens of all ranks, in rank order. The backward computes the gradients
/// of the sum of the losses of all ranks; those of the experts are complete.
#[derive(Clone, Copy, Debug)]
pub struct ShardedExperts<'a> {
    /// First layer of each expert.
    pub gate_up: &'a ExpertShard,
    /// Second layer of each expert.
    pub down: &'a ExpertShard,
    /// Activation between them.
    pub activation: MlpActivation,
    /// True if the backward recomputes the input of the activation.
    pub recompute: bool,
    /// Dispatch mode; all ranks must choose the same.
    pub dispatch: ExpertDispatch,
}

impl ShardedExperts<'_> {
    /// Returns the sum over the experts of each token of their weighted results, `[tokens,
    /// d_model]` in the dtype of the tokens. All ranks call it together.
    ///
    /// # Errors
    /// Returns an error if there is no token, the shapes of tokens and layers do not match, a dtype
    /// or a device is not supported, or the activation does not support recomputation. Such an
    /// error occurs before anything is queued, on this rank only. Returns an error on all ranks if
    /// the rank of an expert would receive 2^31 choices or more; with [`ExpertDispatch::AllGather`]
    /// each rank receives the choices of all ranks.
    ///
    /// # Panics
    /// If the group fails.
    pub fn try_forward(&self, tokens: RoutedTokens) -> Result<Tensor<2>, Nvfp4Error> {
        let (layers, experts) = (self.layers(), self.gate_up.experts());
        self.check(&tokens)?;
        let RoutedTokens { x, chosen, weights } = tokens;
        let (group, amax) = (
            self.gate_up.group(),
            layers.gate_up.input_amax(x.is_tracked()),
        );
        match self.dispatch {
            ExpertDispatch::AllToAll => {
                let routing = Routing::try_new(chosen, experts)?;
                let exchange = ExpertExchange::try_new(routing.counts(), group)?;
                let sorted = routing.dispatch(x);
                let (rows, arrived) = exchange.dispatch((sorted, amax), None);
                let results = layers.run(rows, &arrived.experts, exchange.earlier())?;
                let results = exchange.combine(results, &arrived, false).end(None);
                Ok(routing.combine(results, weights))
            }
            ExpertDispatch::AllGather => {
                let all = gather_tokens(x, group, false).end(None);
                let choices = GatheredChoices::try_new(chosen, weights, experts, group)?;
                let (window, first) = (&choices.window, choices.first);
                let results = layers.run_window(window.dispatch(all, amax), window, first)?;
                Ok(choices.combine(results, false).end(None))
            }
        }
    }

    fn layers(&self) -> ExpertLayers<'_> {
        ExpertLayers {
            gate_up: &self.gate_up.layer,
            down: &self.down.layer,
            activation: self.activation,
            recompute: self.recompute,
        }
    }

    /// Returns an error if [`try_forward`](Self::try_forward) does not accept `tokens`.
    fn check(&self, tokens: &RoutedTokens) -> Result<(), Nvfp4Error> {
        let RoutedTokens { x, chosen, weights } = tokens;
        let [experts, down] = [self.gate_up, self.down].map(ExpertShard::experts);
        check_experts("gate_up.layer.weight", experts)?;
        if down != experts {
            return Err(Nvfp4Error::value(
                "down",
                format!("{down} experts on all ranks"),
                format!("{experts}, those of `gate_up`"),
            ));
        }
        let ([rows, d_model], choices) = (x.dims(), chosen.dims());
        if rows == 0 || choices[0] != rows || weights.dims() != choices {
            return Err(Nvfp4Error::shape(
                "chosen",
                format!("{choices:?}, with weights {:?}", weights.dims()),
                format!("[{rows}, top_k] for both, one row for each of at least one token"),
            ));
        }
        let held = experts / self.gate_up.group().size();
        self.layers().check((x, d_model), held)
    }
}
