//! Parallelism of a run: numbers of ranks and their checks.

use anyhow::{Result, bail, ensure};
use burn_nvfp4::attention::MAX_HEAD;

use super::choices::{ExpertDispatchName, OptimizerName};
use super::model::VOCABULARY;
use super::run::RunConfig;

impl RunConfig {
    /// Returns the number of ranks that share a batch.
    pub(crate) fn ranks_together(&self) -> usize {
        self.dp.unwrap_or(1).max(1)
    }

    /// Returns the number of parameters per rank, if matrices or experts are split.
    pub(crate) fn parameters_of_rank(&self) -> usize {
        let experts = self.model.expert_parameters();
        (self.parameters() - experts) / self.tp + experts / self.ep
    }

    /// Returns the exchange of tokens with the ranks of their experts: the run's choice if given,
    /// otherwise [the default](ExpertDispatchName::default_of).
    pub fn expert_dispatch(&self) -> ExpertDispatchName {
        let is_captured = self.uncaptured().is_none();
        let default = ExpertDispatchName::default_of(is_captured, self.ep, self.model.top_k);
        self.ep_dispatch.unwrap_or(default)
    }

    /// Returns the number of data-parallel ranks among `ranks`, which take different shares of each
    /// batch.
    pub fn data_ranks(&self, ranks: usize) -> usize {
        ranks / self.tp.max(1)
    }

    /// Runs every check that does not need the number of ranks.
    pub(super) fn check_parallel(&self) -> Result<()> {
        for (flag, ranks) in [("tp", self.tp), ("ep", self.ep)] {
            ensure!(ranks > 0, "{flag} is 0, but it must be at least 1");
            if ranks > 1 {
                self.check_partition(flag, ranks)?;
            }
        }
        self.check_sharding()?;
        self.check_tensor_parallel()?;
        self.check_expert_parallel()
    }

    /// Checks that no option conflicts with a model that is split over `ranks` ranks.
    fn check_partition(&self, flag: &str, ranks: usize) -> Result<()> {
        ensure!(
            self.optimizer == OptimizerName::AdamW,
            "{flag} is {ranks} and optimizer is muon, but it must be adamw: Muon orthogonalises \
             whole matrices"
        );
        ensure!(
            self.decorate.is_none(),
            "{flag} is {ranks} and decorate is given, but decorated layers are Burn's, which are \
             not split: leave out one of them"
        );
        Ok(())
    }

    fn check_tensor_parallel(&self) -> Result<()> {
        let tp = self.tp;
        if tp == 1 {
            return Ok(());
        }
        ensure!(
            self.model.experts.is_none() || self.ep.is_multiple_of(tp),
            "tp is {tp} and ep is {}, but ranks of a tensor group have other tokens, and so other \
             experts: with experts ep must be a multiple of tp, such as {tp}",
            self.ep
        );
        let heads = self.model.heads;
        ensure!(
            heads.is_multiple_of(tp),
            "tp is {tp} and heads is {heads}, but each rank has as many heads: heads must be a \
             multiple of {tp}"
        );
        let head = self.model.width / heads;
        ensure!(
            head <= MAX_HEAD,
            "tp is {tp} and heads are {head} wide, but they must be at most {MAX_HEAD}: give more \
             heads"
        );
        let unit = 16 * tp;
        // Experts are not split.
        let hidden = (self.model.experts.is_none()).then_some(("hidden", self.model.hidden));
        for (name, len) in [("width", self.model.width)].into_iter().chain(hidden) {
            ensure!(
                len.is_multiple_of(unit),
                "tp is {tp} and {name} is {len}, but it must be a multiple of {unit}: blocks of 16 \
                 elements on each rank"
            );
        }
        ensure!(
            VOCABULARY.is_multiple_of(tp),
            "tp is {tp}, but it must divide the vocabulary ({VOCABULARY})"
        );
        Ok(())
    }

    fn check_expert_parallel(&self) -> Result<()> {
        let ep = self.ep;
        if ep == 1 {
            return Ok(());
        }
        let Some(experts) = self.model.experts else {
            bail!("ep is {ep}, but the model has no experts: leave it out, or give --model moe");
        };
        ensure!(
            experts.is_multiple_of(ep),
            "ep is {ep} and experts is {experts}, but each rank has as many experts: experts must \
             be a multiple of {ep}"
        );
        Ok(())
    }

    /// Checks that the run's state can be sharded over ranks.
    fn check_sharding(&self) -> Result<()> {
        let Some(flag) = [("fsdp", self.fsdp), ("zero1", self.zero1)]
            .into_iter()
            .find_map(|(flag, on)| on.then_some(flag))
        else {
            return Ok(());
        };
        ensure!(
            !(self.fsdp && self.zero1),
            "fsdp and zero1 are true, but FSDP shards the optimizer's state too: leave out zero1"
        );
        ensure!(
            self.optimizer == OptimizerName::AdamW,
            "{flag} is true and optimizer is muon, but it must be adamw: Muon orthogonalises whole \
             matrices"
        );
        ensure!(
            !self.fsdp || self.decorate.is_none(),
            "fsdp is true and decorate is given, but Burn's feed-forward reads the shape of its \
             weight, of which a rank has a shard: leave out one of them, or give zero1"
        );
        Ok(())
    }

    /// Checks that `ranks` ranks, one process each, can train this configuration.
    ///
    /// # Errors
    /// Returns an error that names the invalid value and the allowed ones.
    pub fn check_ranks(&self, ranks: usize) -> Result<()> {
        ensure!(
            self.tp > 0 && ranks.is_multiple_of(self.tp),
            "tp is {}, but the launch has {ranks} ranks: their number must be a multiple of tp",
            self.tp
        );
        let data = self.data_ranks(ranks);
        if let Some(dp) = self.dp {
            ensure!(
                dp == data && dp > 0,
                "dp is {dp}, but the launch has {ranks} ranks{}: leave it out, or start as many \
                 processes",
                match self.tp {
                    1 => String::new(),
                    tp => format!(" in tensor groups of {tp}"),
                }
            );
        }
        ensure!(
            self.ep > 0 && ranks.is_multiple_of(self.ep),
            "ep is {}, but the launch has {ranks} ranks: their number must be a multiple of ep",
            self.ep
        );
        if ranks == 1 {
            return Ok(());
        }
        ensure!(
            self.batch.is_multiple_of(data),
            "batch is {}, but it must be a multiple of the number of ranks ({data}), which take \
             equal parts of it",
            self.batch
        );
        let tokens = self.batch / data * self.model.context;
        ensure!(
            self.tp == 1 || tokens.is_multiple_of(16 * self.tp),
            "tp is {} and a tensor group has {tokens} tokens of each batch, but they must be a \
             multiple of {}, blocks of 16 on each rank: change batch or context",
            self.tp,
            16 * self.tp
        );
        Ok(())
    }
}
