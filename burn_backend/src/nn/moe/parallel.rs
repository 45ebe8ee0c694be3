//! Expert parallelism: a mixture whose experts are sharded over ranks.

use burn_core as burn;

use burn_core::module::{Module, ModuleVisitor, Param, ParamId};
use burn_core::tensor::{Device, Tensor};
use burn_nn::Linear;
use nvfp4_formats::Nvfp4Error;

use super::super::parts::PartIds;
use super::super::{Nvfp4GroupedLinear, Nvfp4SwiGlu, Routing, rows};
use super::exchange::{ExpertExchange, ints};
use super::gathered::{GatheredChoices, gather_tokens};
use super::losses::{BatchRanks, batch_losses};
use super::steps::{MoeParts, MoeSettings};
use super::{MoeOutput, Nvfp4Moe, Nvfp4MoeConfig};
use crate::experts::{MoeRoute, check_experts};
use crate::functions::or_panic;
use crate::parallel::{Overlap, ProcessGroup, broadcast};
use crate::whole::whole_dims;

/// Dispatch mode of the tokens to the ranks of their experts and of the results back. Which
/// exchanges can overlap with kernels [depends on it](ExpertParallelMoe#overlap-with-kernels).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertDispatch {
    /// All-to-all with unequal counts, in both directions: each choice of an expert is sent once.
    /// The host waits for the counts once per forward.
    #[default]
    AllToAll,
    /// All-gather of the tokens of all ranks, and reduce-scatter of the partial sums of each rank's
    /// experts. All ranks must have the same number of tokens. Nothing waits for the device, so a
    /// [graph](crate::graph) can capture it. Each token is sent to all ranks, and each rank needs
    /// memory for the choices of all ranks.
    AllGather,
}

/// Output of the shared expert, if any.
type SharedOutput = Result<Option<Tensor<2>>, Nvfp4Error>;

/// Expert-parallel [`Nvfp4Moe`]: rank `r` of `n` holds experts `r · experts / n` up to
/// `(r + 1) · experts / n`. Router and shared expert are replicated on all ranks.
///
/// Each rank has a different shard of the batch. It sends each token to the ranks of its experts
/// (dispatch) and receives the results (combine), by either mode of [`ExpertDispatch`]. Experts
/// have no capacity and no token is dropped.
///
/// # One rank
///
/// The result is that of an [`Nvfp4Moe`] on one rank for the tokens of all ranks, in rank order.
/// Each expert receives the tokens of all ranks in that order, so the global scales of its tokens,
/// its blocks along the tokens and its sums over tokens are the same. Outputs and the gradients of
/// tokens and experts have the same bits if the router's logits do; a matmul may sum a row in a
/// different order for a different number of rows. With [`ExpertDispatch::AllGather`] an output is
/// the sum of the partial sums of the ranks, each rounded to the dtype of the tokens, instead of
/// being rounded once: it has the bits of one rank in `f32` with at most two experts per token.
///
/// Stochastic rounding draws the same bits too: blocks are numbered as a single rank numbers those
/// of all experts. This requires that layers of experts draw with the same rank
/// ([`set_rank`](crate::state::set_rank) of `gate_up` and `down`) on all ranks with the same
/// data-parallel index.
///
/// # Gradients
///
/// A backward computes the gradients of the sum of the losses of all ranks. Gradients of experts
/// are complete, because their rank has seen all tokens. Gradients of the router, the shared expert
/// and the layers around the mixture cover only this rank's tokens and must be summed over the
/// ranks. [`average_expert_gradients`](crate::parallel::average_expert_gradients) reduces both
/// kinds; [`expert_parameters`] lists the parameters of the experts.
///
/// All ranks must run the same operations in the same order, forward and backward. If one rank uses
/// a loss of [`MoeOutput`], all must.
///
/// # Overlap with kernels
///
/// If the group [requests overlap](crate::parallel::Overlap), or with
/// [`with_overlap`](Self::with_overlap), exchanges run concurrently with kernels, on a second
/// stream:
///
/// - The exchange of results overlaps with the shared expert, if any; the exchange of their
///   gradient overlaps with its backward.
/// - The exchange of tokens overlaps with the router in [`ExpertDispatch::AllGather`] mode; an
///   all-to-all depends on the router. The exchange of their gradient overlaps with the backward of
///   the logits in both modes.
///
/// Overlap does not change any bit. Where ranks of a tensor group share tokens, all exchanges are
/// serialized.
///
/// ```
/// # use burn_core as burn;
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_nvfp4::nn::ExpertParallelMoe;
/// use burn_nvfp4::parallel::ProcessGroup;
/// use burn_nvfp4::Nvfp4MoeConfig;
/// use std::time::Duration;
///
/// # #[cfg(feature = "flex")] {
/// let groups = ProcessGroup::loopback(2, Duration::from_secs(60));
/// std::thread::scope(|scope| {
///     for group in groups {
///         scope.spawn(move || {
///             let device = Device::flex().autodiff();
///             let config = Nvfp4MoeConfig::new(32, 48, 4);
///             let moe = ExpertParallelMoe::new(&config, &device, &group);
///             assert_eq!(moe.gate_up.weight.dims(), [2, 32, 96]);
///             let x = Tensor::<2>::random([5, 32], Distribution::Default, &device);
///             let out = moe.forward(x);
///             // Those of both ranks: ten tokens, each sent to two experts.
///             assert_eq!(out.counts.sum().into_scalar::<i64>(), 20);
///             let gradients = out.output.sum().backward();
///             assert_eq!(moe.down.weight.grad(&gradients).unwrap().dims(), [2, 48, 32]);
///         });
///     }
/// });
/// # }
/// ```
#[derive(Module, Debug)]
pub struct ExpertParallelMoe {
    /// Router, `[d_model, experts]`, replicated on all ranks.
    pub router: Linear,
    /// Gate and up weights of this rank's experts, `[experts / ranks, d_model, 2 * d_hidden]`, or
    /// `[experts / ranks, d_model, d_hidden]` if the activation is not gated.
    pub gate_up: Nvfp4GroupedLinear,
    /// Down weights of this rank's experts, `[experts / ranks, d_hidden, d_model]`.
    pub down: Nvfp4GroupedLinear,
    /// Shared expert, replicated on all ranks.
    pub shared: Option<Nvfp4SwiGlu>,
    #[module(skip)]
    group: ProcessGroup,
    /// Ranks whose tokens the losses cover.
    #[module(skip)]
    ranks: BatchRanks,
    #[module(skip)]
    settings: MoeSettings,
    #[module(skip)]
    dispatch: ExpertDispatch,
    /// True if exchanges of tokens and results overlap with kernels.
    #[module(skip)]
    overlap: bool,
    /// Ids of the layers that `gate_up` and `down` of all experts were made from.
    #[module(skip)]
    ids: [Option<Vec<PartIds>>; 2],
}

impl ExpertParallelMoe {
    /// Creates a mixture on `device` with the parameters that rank 0 of `group` initializes by
    /// [`Nvfp4MoeConfig::try_init`]. All ranks call it together; each temporarily holds all
    /// experts.
    ///
    /// # Errors
    /// Same as [`Nvfp4MoeConfig::try_init`]; also if `experts` is not a multiple of the number of
    /// ranks.
    ///
    /// # Panics
    /// If the group fails.
    pub fn try_new(
        config: &Nvfp4MoeConfig,
        device: &Device,
        group: &ProcessGroup,
    ) -> Result<Self, Nvfp4Error> {
        check_parts(config.experts, group)?;
        let moe = config.try_init(device)?;
        Self::try_from_moe(broadcast(moe, group), group)
    }

    /// Panicking version of [`try_new`](Self::try_new).
    #[track_caller]
    pub fn new(config: &Nvfp4MoeConfig, device: &Device, group: &ProcessGroup) -> Self {
        or_panic(
            "ExpertParallelMoe::new",
            Self::try_new(config, device, group),
        )
    }

    /// Returns this rank's shard of `moe`, which is the same on all ranks of `group`. Parameters
    /// keep their ids, and layers their RNG state.
    ///
    /// # Errors
    /// Returns an error if the number of experts is not 1 to 512 or not a multiple of the number of
    /// ranks, or the grouped layers of `moe` differ from its router in the number of experts.
    pub fn try_from_moe(moe: Nvfp4Moe, group: &ProcessGroup) -> Result<Self, Nvfp4Error> {
        let [_, experts] = whole_dims(&moe.router.weight);
        check_experts("router.weight", experts)?;
        check_parts(experts, group)?;
        let layers = [("gate_up.weight", &moe.gate_up), ("down.weight", &moe.down)];
        for (name, layer) in layers {
            let [found, d_in, d_out] = whole_dims(&layer.weight);
            if found != experts {
                return Err(Nvfp4Error::shape(
                    name,
                    format!("[{found}, {d_in}, {d_out}]"),
                    format!("{experts} matrices, as many as experts of the router"),
                ));
            }
        }
        let held = experts / group.size();
        let first = group.rank() * held;
        let (gate_up, gate_up_ids) = moe.gate_up.into_part(first, held);
        let (down, down_ids) = moe.down.into_part(first, held);
        Ok(Self {
            router: moe.router,
            gate_up,
            down,
            shared: moe.shared,
            group: group.clone(),
            ranks: BatchRanks::new(group),
            settings: moe.settings,
            dispatch: ExpertDispatch::default(),
            overlap: group.overlap() != Overlap::None,
            ids: [gate_up_ids, down_ids],
        })
    }

    /// Panicking version of [`try_from_moe`](Self::try_from_moe).
    #[track_caller]
    pub fn from_moe(moe: Nvfp4Moe, group: &ProcessGroup) -> Self {
        or_panic(
            "ExpertParallelMoe::from_moe",
            Self::try_from_moe(moe, group),
        )
    }

    /// Gathers the experts of all ranks on every rank: the inverse of
    /// [`try_from_moe`](Self::try_from_moe). All ranks call it together.
    ///
    /// # Panics
    /// If the group fails.
    pub fn into_moe(self) -> Nvfp4Moe {
        let [gate_up_ids, down_ids] = self.ids;
        Nvfp4Moe {
            router: self.router,
            gate_up: self.gate_up.gathered(&self.group, gate_up_ids),
            down: self.down.gathered(&self.group, down_ids),
            shared: self.shared,
            settings: self.settings,
        }
    }

    /// Sets the ranks of `batch` as those that share the batch: the ranks of [`group`](Self::group)
    /// and of further groups with the same experts, which data parallelism adds. The losses cover
    /// the tokens of all of them.
    pub fn with_batch(mut self, batch: &ProcessGroup) -> Self {
        self.ranks = BatchRanks::new(batch);
        self
    }

    /// Sets the ranks for tokens that the ranks of a tensor group share: `ranks` must include all
    /// of [`group`](Self::group).
    pub(in crate::nn) fn with_ranks(self, ranks: BatchRanks) -> Self {
        Self { ranks, ..self }
    }

    /// Sets the dispatch mode; all ranks must choose the same.
    pub fn with_dispatch(mut self, dispatch: ExpertDispatch) -> Self {
        self.dispatch = dispatch;
        self
    }

    /// Returns the dispatch mode.
    pub fn dispatch(&self) -> ExpertDispatch {
        self.dispatch
    }

    /// Sets whether exchanges of tokens and results [overlap with
    /// kernels](Self#overlap-with-kernels) or are serialized with them; all ranks must choose the
    /// same. The default is the [setting of the group](ProcessGroup::overlap). Outputs and
    /// gradients have the same bits.
    pub fn with_overlap(mut self, overlap: bool) -> Self {
        self.overlap = overlap;
        self
    }

    /// Returns the ranks that hold the experts.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Number of experts per token.
    pub fn top_k(&self) -> usize {
        self.settings.top_k
    }

    /// Sets whether the backward recomputes the input of all experts' activation instead of keeping
    /// it; see [`Nvfp4Moe::with_recompute`].
    pub fn with_recompute(mut self, recompute: bool) -> Self {
        self.settings.recompute = recompute;
        self.shared = self.shared.map(|shared| shared.with_recompute(recompute));
        self
    }

    /// Applies the mixture. All ranks call it together.
    ///
    /// # Shapes
    ///
    /// - input: `[..., d_model]`, of dtype `f32`, `bf16` or `f16`, with at least one token. The
    ///   number of tokens may differ between ranks, except with [`ExpertDispatch::AllGather`]
    /// - output: see [`MoeOutput`]; `output` covers this rank's tokens; the losses and `counts`
    ///   cover the tokens of all ranks (those of [`with_batch`](Self::with_batch), if set)
    ///
    /// # Errors
    /// Returns an error if there is no token, the last axis is not `d_model`, devices differ, a
    /// dtype is not supported, the shapes of the layers do not match, or the activation does not
    /// support recomputation. Such an error occurs before anything is queued, on this rank only;
    /// its absence ends the calls of the other ranks. Returns an error on all ranks if the rank of
    /// an expert would receive 2^31 choices or more; with [`ExpertDispatch::AllGather`] each rank
    /// receives the choices of all ranks.
    ///
    /// # Panics
    /// If the group fails.
    pub fn try_forward<const D: usize>(&self, x: Tensor<D>) -> Result<MoeOutput<D>, Nvfp4Error> {
        self.try_forward_with(x, |x| self.parts().run_shared(x))
    }

    /// Version of [`try_forward`](Self::try_forward) with `shared` as the shared expert.
    ///
    /// # Errors
    /// Same as [`try_forward`](Self::try_forward), and any error of `shared`.
    pub(in crate::nn) fn try_forward_with<const D: usize>(
        &self,
        x: Tensor<D>,
        shared: impl FnOnce(Tensor<2>) -> SharedOutput,
    ) -> Result<MoeOutput<D>, Nvfp4Error> {
        self.check(&x)?;
        let (x, dims) = rows(x);
        let MoeOutput {
            output,
            balance_loss,
            z_loss,
            counts,
        } = match self.dispatch {
            ExpertDispatch::AllToAll => self.by_all_to_all(x, shared)?,
            ExpertDispatch::AllGather => self.by_all_gather(x, shared)?,
        };
        Ok(MoeOutput {
            output: output.reshape(dims),
            balance_loss,
            z_loss,
            counts,
        })
    }

    /// Exchanges tokens and results by all-to-all.
    fn by_all_to_all(
        &self,
        x: Tensor<2>,
        shared: impl FnOnce(Tensor<2>) -> SharedOutput,
    ) -> Result<MoeOutput<2>, Nvfp4Error> {
        let parts = self.parts();
        let experts = parts.experts();
        let logits = parts.logits(x.clone());
        let MoeRoute {
            chosen, weights, ..
        } = parts.route(logits.clone())?;
        let routing = Routing::try_new(chosen, experts)?;
        // Queues everything that needs no count before the host waits for the counts, so that the
        // device is busy in the meantime.
        let sorted = routing.dispatch(x.clone());
        let exchange = ExpertExchange::try_new(routing.counts(), &self.group)?;
        let amax = self.gate_up.input_amax(x.is_tracked());
        let (tokens, arrived) =
            exchange.dispatch((sorted, amax), self.overlaps().then_some(&logits));
        let results = parts
            .layers()
            .run(tokens, &arrived.experts, exchange.earlier())?;
        let results = exchange.combine(results, &arrived, self.overlaps_shared());
        let shared = shared(results.behind(x.clone()))?;
        let results = results.end(shared.as_ref());
        let output = self.with_shared(routing.combine(results, weights), shared);
        let counts: Vec<i32> = if self.has_all_tokens() {
            exchange
                .totals()
                .iter()
                .map(|&count| count as i32)
                .collect()
        } else {
            let all = self.ranks.sum_counts(routing.counts().clone());
            all.into_data().iter::<i32>().collect()
        };
        let top_k = self.settings.top_k;
        let of = counts.iter().map(|&count| count as usize).sum::<usize>() / top_k;
        let counts = ints(&counts, &x.device());
        let losses = batch_losses(logits, (of, counts.clone()), top_k, &self.ranks);
        let [balance_loss, z_loss] = losses;
        Ok(MoeOutput {
            output,
            balance_loss,
            z_loss,
            counts,
        })
    }

    /// Exchanges tokens by all-gather and partial sums by reduce-scatter.
    fn by_all_gather(
        &self,
        x: Tensor<2>,
        shared: impl FnOnce(Tensor<2>) -> SharedOutput,
    ) -> Result<MoeOutput<2>, Nvfp4Error> {
        let parts = self.parts();
        let all = gather_tokens(x.clone(), &self.group, self.overlaps());
        let logits = parts.logits(x.clone());
        let MoeRoute {
            chosen,
            weights,
            counts,
            ..
        } = parts.route(logits.clone())?;
        // Ends before the next collective: the collectives of a group run one at a time.
        let all = all.end(Some(&logits));
        let choices = GatheredChoices::try_new(chosen, weights, parts.experts(), &self.group)?;
        let (window, first) = (&choices.window, choices.first);
        let amax = self.gate_up.input_amax(all.is_tracked());
        let results = parts
            .layers()
            .run_window(window.dispatch(all, amax), window, first)?;
        let counts = match self.has_all_tokens() {
            true => window.counts.clone(),
            false => self.ranks.sum_counts(counts),
        };
        let [tokens, _] = x.dims();
        let (of, top_k) = (tokens * self.ranks.size(), self.settings.top_k);
        let results = choices.combine(results, self.overlaps_shared());
        let shared = shared(results.behind(x))?;
        let results = results.end(shared.as_ref());
        let output = self.with_shared(results, shared);
        let losses = batch_losses(logits, (of, counts.clone()), top_k, &self.ranks);
        let [balance_loss, z_loss] = losses;
        Ok(MoeOutput {
            output,
            balance_loss,
            z_loss,
            counts,
        })
    }

    /// Returns true if exchanges overlap with kernels. Not where ranks share tokens: the layers
    /// that would overlap contain collectives themselves, which would wait for the exchange or run
    /// at the same time.
    fn overlaps(&self) -> bool {
        self.overlap && self.ranks.tensor.size() == 1
    }

    /// Returns true if the exchange that the shared expert overlaps with runs concurrently.
    fn overlaps_shared(&self) -> bool {
        self.overlaps() && self.shared.is_some()
    }

    /// Adds the output of the shared expert to `output`.
    ///
    /// The order of the terms determines the order in which the backward adds up the gradients of
    /// the tokens: it is the same with and without overlap.
    fn with_shared(&self, output: Tensor<2>, shared: Option<Tensor<2>>) -> Tensor<2> {
        match shared {
            Some(shared) if self.overlaps_shared() => shared + output,
            Some(shared) => output + shared,
            None => output,
        }
    }

    /// Returns true if the ranks of [`group`](Self::group), which exchange tokens and counts, hold
    /// all tokens that the losses cover.
    fn has_all_tokens(&self) -> bool {
        self.ranks.size() <= self.group.size()
    }

    /// Returns an error if [`try_forward`](Self::try_forward) does not accept `x`.
    pub(in crate::nn) fn check<const D: usize>(&self, x: &Tensor<D>) -> Result<(), Nvfp4Error> {
        let parts = self.parts();
        let experts = parts.experts();
        check_parts(experts, &self.group)?;
        parts.check(x, experts / self.group.size())
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> MoeOutput<D> {
        or_panic("ExpertParallelMoe::forward", self.try_forward(x))
    }

    fn parts(&self) -> MoeParts<'_> {
        MoeParts {
            router: &self.router,
            tensor: Some(&self.ranks.tensor),
            gate_up: &self.gate_up,
            down: &self.down,
            shared: self.shared.as_ref(),
            settings: self.settings,
        }
    }
}

/// Returns an error if the experts cannot be divided equally among the ranks.
pub(super) fn check_parts(experts: usize, group: &ProcessGroup) -> Result<(), Nvfp4Error> {
    if experts.is_multiple_of(group.size()) {
        return Ok(());
    }
    Err(Nvfp4Error::value(
        "experts",
        experts.to_string(),
        format!("a multiple of {}, the number of ranks", group.size()),
    ))
}

/// Returns the ids of the parameters of `model` that differ between ranks: the experts of each
/// [`ExpertParallelMoe`] and each [`ExpertShard`](super::ExpertShard) in it.
///
/// If experts are sharded over the ranks of a group and the batch over all ranks, the gradients of
/// these parameters are reduced over the ranks with the same experts, and those of all other
/// parameters over all ranks.
pub fn expert_parameters<M: Module>(model: &M) -> Vec<ParamId> {
    let mut visitor = ExpertVisitor::default();
    model.visit(&mut visitor);
    visitor.found
}

#[derive(Default)]
struct ExpertVisitor {
    /// Stack of modules being visited: true for an expert layer and for modules inside one.
    within: Vec<bool>,
    found: Vec<ParamId>,
}

impl ModuleVisitor for ExpertVisitor {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        let is_within = self.within.last().is_some_and(|&within| within);
        let is_experts = matches!(
            (container_type, name),
            ("Struct:ExpertParallelMoe", "gate_up" | "down") | ("Struct:ExpertShard", "layer")
        );
        self.within.push(is_within || is_experts);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.within.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.within.last().is_some_and(|&within| within) {
            self.found.push(param.id);
        }
    }
}
