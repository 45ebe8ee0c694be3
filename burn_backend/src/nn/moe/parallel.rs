//! A mixture whose experts are on several ranks.

use burn_core as burn;

use burn_core::module::{Module, ModuleVisitor, Param, ParamId};
use burn_core::tensor::{Device, Tensor};
use burn_nn::Linear;
use nvfp4_kernels::Nvfp4Error;

use super::super::parts::PartIds;
use super::super::{Nvfp4GroupedLinear, Nvfp4SwiGlu, Routing, rows};
use super::exchange::{ExpertExchange, ints};
use super::gathered::{GatheredChoices, gather_tokens};
use super::losses::{BatchRanks, batch_losses};
use super::steps::{MoeParts, MoeSettings};
use super::{MoeOutput, Nvfp4Moe, Nvfp4MoeConfig};
use crate::experts::{MoeRoute, check_experts};
use crate::functions::or_panic;
use crate::parallel::{Overlap, ProcessGroup, broadcast, whole_dims};

/// How tokens travel to the ranks of their experts, and what these make of them back. What of it
/// can run beside kernels [depends on it](ExpertParallelMoe#beside-kernels).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertDispatch {
    /// By an all-to-all of unequal counts, there and back: each choice of an expert travels once.
    /// The host waits for the counts, once in each forward.
    #[default]
    AllToAll,
    /// By an all-gather of the tokens of all ranks, which have as many each, and a reduce-scatter
    /// of the sums of what each rank's experts make of them. Nothing waits for the device, so that
    /// a [graph](crate::graph) can have it; each token travels to all ranks, and memory is that of
    /// all choices on each.
    AllGather,
}

/// What the expert of every token makes of tokens, if there is one.
type SharedOutput = Result<Option<Tensor<2>>, Nvfp4Error>;

/// An [`Nvfp4Moe`] with its experts on several ranks: rank `r` of `n` has experts `r · experts / n`
/// up to `(r + 1) · experts / n`. All ranks have the router and the shared expert.
///
/// Each rank has tokens of its own, its part of the batch. It sends each to the ranks of its
/// experts (dispatch), and gets the results back (combine), in either way of [`ExpertDispatch`]: no
/// expert has a capacity and no token is dropped.
///
/// # One rank
///
/// It computes what an [`Nvfp4Moe`] computes for the tokens of all ranks, rank after rank. Each
/// expert has the tokens of all ranks in that order, so the global scales of its tokens, its blocks
/// along the tokens and its sums over tokens are the same. Outputs and the gradients of tokens and
/// experts have the same bits wherever the router's logits have. A matmul may sum a row in another
/// order for another number of rows. With [`ExpertDispatch::AllGather`] an output is the sum of
/// what the ranks' experts add to it, each rounded to the type of the tokens, and not rounded once:
/// it has the bits of one rank in `f32` with at most two experts for each token.
///
/// Stochastic rounding draws the same bits too: blocks are numbered as one rank numbers those of
/// all experts. For that, layers of experts draw as one rank ([`set_rank`](crate::state::set_rank)
/// of `gate_up` and `down`): ranks with the same number in data parallelism have the same.
///
/// # Gradients
///
/// A backward computes the gradients of the sum of the losses of all ranks. Those of experts are
/// complete: their rank has seen all tokens. Those of the router, the shared expert and of other
/// layers around are of this rank's tokens, to be summed over the ranks.
/// [`average_expert_gradients`](crate::parallel::average_expert_gradients) reduces both, and
/// [`expert_parameters`] tells which is which.
///
/// All ranks run the same operations in the same order, forward and backward. Where a rank uses a
/// loss of [`MoeOutput`], all do.
///
/// # Beside kernels
///
/// Where the group [says so](crate::parallel::Overlap), or [`with_overlap`](Self::with_overlap),
/// exchanges run beside kernels, on a second stream:
///
/// - That of results runs beside the shared expert, if there is one, and that of their gradient
///   beside its backward.
/// - That of tokens runs beside the router with [`ExpertDispatch::AllGather`]; an all-to-all needs
///   what the router says. That of their gradient runs beside the backward of the logits with both.
///
/// All bits are those without. Where ranks of a tensor group share tokens all exchanges are in
/// line.
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
    /// The router, `[d_model, experts]`, on all ranks.
    pub router: Linear,
    /// Gate and up of this rank's experts, `[experts / ranks, d_model, 2 * d_hidden]`.
    pub gate_up: Nvfp4GroupedLinear,
    /// Down of this rank's experts, `[experts / ranks, d_hidden, d_model]`.
    pub down: Nvfp4GroupedLinear,
    /// The expert of every token, on all ranks.
    pub shared: Option<Nvfp4SwiGlu>,
    #[module(skip)]
    group: ProcessGroup,
    /// Whose tokens the losses are of.
    #[module(skip)]
    ranks: BatchRanks,
    #[module(skip)]
    settings: MoeSettings,
    #[module(skip)]
    dispatch: ExpertDispatch,
    /// Whether tokens and results travel beside kernels.
    #[module(skip)]
    overlap: bool,
    /// Of the layers that `gate_up` and `down` of all experts were made of.
    #[module(skip)]
    ids: [Option<Vec<PartIds>>; 2],
}

impl ExpertParallelMoe {
    /// A new mixture on `device` with the parameters that rank 0 of `group` initialises, which are
    /// those of [`Nvfp4MoeConfig::try_init`] there. All ranks call it together, and hold all
    /// experts for a moment.
    ///
    /// # Errors
    /// As [`Nvfp4MoeConfig::try_init`], and when `experts` is no multiple of the number of ranks.
    ///
    /// # Panics
    /// When the group fails.
    pub fn try_new(
        config: &Nvfp4MoeConfig,
        device: &Device,
        group: &ProcessGroup,
    ) -> Result<Self, Nvfp4Error> {
        check_parts(config.experts, group)?;
        let moe = config.try_init(device)?;
        Self::try_from_moe(broadcast(moe, group), group)
    }

    /// [`try_new`](Self::try_new), panicking where it fails.
    pub fn new(config: &Nvfp4MoeConfig, device: &Device, group: &ProcessGroup) -> Self {
        or_panic(
            "ExpertParallelMoe::new",
            Self::try_new(config, device, group),
        )
    }

    /// This rank's part of `moe`, which is the same on all ranks of `group`. Parameters keep their
    /// ids, and layers their RNG state.
    ///
    /// # Errors
    /// When the number of experts is not 1 to 512 or no multiple of the number of ranks, or the
    /// grouped layers of `moe` have other numbers of experts than its router.
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

    /// [`try_from_moe`](Self::try_from_moe), panicking where it fails.
    pub fn from_moe(moe: Nvfp4Moe, group: &ProcessGroup) -> Self {
        or_panic(
            "ExpertParallelMoe::from_moe",
            Self::try_from_moe(moe, group),
        )
    }

    /// The mixture with the experts of all ranks, on every rank: the inverse of
    /// [`try_from_moe`](Self::try_from_moe). All ranks call it together.
    ///
    /// # Panics
    /// When the group fails.
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

    /// The same mixture for a batch of which the ranks of `batch` have a part each: those of
    /// [`group`](Self::group) and of further groups with the same experts, which data parallelism
    /// adds. The losses are of the tokens of all of them.
    pub fn with_batch(mut self, batch: &ProcessGroup) -> Self {
        self.ranks = BatchRanks::new(batch);
        self
    }

    /// The same mixture for tokens that ranks of a tensor group share: those of `ranks`, all of
    /// [`group`](Self::group) among them.
    pub(in crate::nn) fn with_ranks(self, ranks: BatchRanks) -> Self {
        Self { ranks, ..self }
    }

    /// The same mixture, whose tokens travel as `dispatch` says; all ranks choose the same.
    pub fn with_dispatch(mut self, dispatch: ExpertDispatch) -> Self {
        self.dispatch = dispatch;
        self
    }

    /// How tokens travel.
    pub fn dispatch(&self) -> ExpertDispatch {
        self.dispatch
    }

    /// The same mixture, whose tokens and results [travel beside
    /// kernels](Self#beside-kernels) if `overlap`, and else in line with them; all ranks choose the
    /// same. The group [says so](ProcessGroup::overlap) where this is not called. Outputs and
    /// gradients have the same bits.
    pub fn with_overlap(mut self, overlap: bool) -> Self {
        self.overlap = overlap;
        self
    }

    /// The ranks that the experts are on.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Experts that each token is sent to.
    pub fn top_k(&self) -> usize {
        self.settings.top_k
    }

    /// The same mixture, whose backward computes gate and up of all experts again instead of
    /// keeping them; see [`Nvfp4SwiGlu::with_recompute`].
    pub fn with_recompute(mut self, recompute: bool) -> Self {
        self.settings.recompute = recompute;
        self.shared = self.shared.map(|shared| shared.with_recompute(recompute));
        self
    }

    /// Apply the mixture. All ranks call it together.
    ///
    /// # Shapes
    ///
    /// - input: `[..., d_model]`, of type `f32`, `bf16` or `f16`, with at least one token;
    ///   ranks may have different numbers of them, but not with [`ExpertDispatch::AllGather`]
    /// - output: see [`MoeOutput`]; `output` is that of this rank's tokens, the losses and `counts`
    ///   are those of the tokens of all ranks (of [`with_batch`](Self::with_batch), if there are
    ///   such)
    ///
    /// # Errors
    /// When there is no token, the last axis is not `d_model`, devices differ, a type is not
    /// supported, or the parts do not fit each other: before anything is queued, on this rank
    /// alone, whose absence ends the others' calls. On all ranks when an expert's rank would get
    /// 2^31 choices or more, which with [`ExpertDispatch::AllGather`] are those of all ranks.
    ///
    /// # Panics
    /// When the group fails.
    pub fn try_forward<const D: usize>(&self, x: Tensor<D>) -> Result<MoeOutput<D>, Nvfp4Error> {
        self.try_forward_with(x, |x| self.parts().run_shared(x))
    }

    /// [`try_forward`](Self::try_forward) with this for the expert of every token.
    ///
    /// # Errors
    /// As there, and those of `shared`.
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

    /// Tokens to the ranks of their experts, and results back.
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
        // What needs no count is queued before the host waits for the counts: the device has work
        // while it waits.
        let sorted = routing.dispatch(x.clone());
        let exchange = ExpertExchange::try_new(routing.counts(), &self.group)?;
        let (tokens, arrived) = exchange.dispatch(sorted, &logits, self.overlaps());
        let results = parts.run(tokens, &arrived.experts, exchange.earlier())?;
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

    /// The tokens of all ranks to each, and the sums of what all experts make of them back.
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
        // Before the next collective: those of a group run one at a time.
        let all = all.end(Some(&logits));
        let choices = GatheredChoices::try_new(chosen, weights, parts.experts(), &self.group)?;
        let (window, first) = (&choices.window, choices.first);
        let results = parts.run_window(window.dispatch(all), window, first)?;
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

    /// Whether exchanges run beside kernels. Where ranks share tokens, so do the layers beside:
    /// they have collectives of their own, which would wait for the exchange or run at the same
    /// time.
    fn overlaps(&self) -> bool {
        self.overlap && self.ranks.tensor.size() == 1
    }

    /// The same of the exchange that the expert of every token runs beside.
    fn overlaps_shared(&self) -> bool {
        self.overlaps() && self.shared.is_some()
    }

    /// `output`, with what the expert of every token has made of the tokens.
    ///
    /// The order of the terms is that in which the backward comes upon what has the tokens for an
    /// operand, and adds up their gradients: it is the same order, whether exchanges overlap or
    /// not.
    fn with_shared(&self, output: Tensor<2>, shared: Option<Tensor<2>>) -> Tensor<2> {
        match shared {
            Some(shared) if self.overlaps_shared() => shared + output,
            Some(shared) => output + shared,
            None => output,
        }
    }

    /// Whether the ranks of [`group`](Self::group), which exchange tokens and counts, have all that
    /// the losses are of.
    fn has_all_tokens(&self) -> bool {
        self.ranks.size() <= self.group.size()
    }

    /// Fail unless [`try_forward`](Self::try_forward) takes `x`.
    pub(in crate::nn) fn check<const D: usize>(&self, x: &Tensor<D>) -> Result<(), Nvfp4Error> {
        let parts = self.parts();
        let experts = parts.experts();
        check_parts(experts, &self.group)?;
        parts.check(x, experts / self.group.size())
    }

    /// [`try_forward`](Self::try_forward), panicking where it fails.
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

/// Fails unless all ranks get as many experts.
fn check_parts(experts: usize, group: &ProcessGroup) -> Result<(), Nvfp4Error> {
    if experts.is_multiple_of(group.size()) {
        return Ok(());
    }
    Err(Nvfp4Error::value(
        "experts",
        experts.to_string(),
        format!("a multiple of {}, the number of ranks", group.size()),
    ))
}

/// Ids of the parameters of `model` of which each rank has others: the experts of each
/// [`ExpertParallelMoe`] in it.
///
/// With experts on the ranks of a group and the batch on all ranks, the gradients of these are
/// reduced over the ranks with the same experts; those of all other parameters over all ranks.
pub fn expert_parameters<M: Module>(model: &M) -> Vec<ParamId> {
    let mut visitor = ExpertVisitor::default();
    model.visit(&mut visitor);
    visitor.found
}

#[derive(Default)]
struct ExpertVisitor {
    /// Modules that are being visited, and whether each is one of experts or within one.
    within: Vec<bool>,
    found: Vec<ParamId>,
}

impl ModuleVisitor for ExpertVisitor {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        let is_within = self.within.last().is_some_and(|&within| within);
        let is_experts =
            container_type == "Struct:ExpertParallelMoe" && matches!(name, "gate_up" | "down");
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
