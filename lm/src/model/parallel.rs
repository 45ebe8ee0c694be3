//! The language model of a rank under tensor parallelism.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use burn::module::{Module, ParamId};
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_nvfp4::nn::tensor_parallel::{
    SequenceParallelRmsNorm, ShardedParameter, TensorParallel, TensorParallelBlock,
    VocabParallelEmbedding, VocabParallelHead,
};
use burn_nvfp4::nn::{Embedding, LmHead, ResidualStream, RopeCache};
use burn_nvfp4::parallel::{Shards, functions};

use super::{LanguageModel, ModelPartition, RouterLosses, Transformer, cast, flat};
use crate::config::{Activation, RecipeName, RunConfig};
use crate::groups::ParallelGroups;

/// A [`Transformer`] under tensor parallelism: each rank of the tensor group holds a shard of each
/// matrix, and between matrices a shard of the tokens (sequence parallelism). Experts are not
/// split; each is on one rank of one or several tensor groups.
///
/// All ranks of the group have the same batch. Each rank computes the loss over all of its tokens.
#[derive(Module, Debug)]
pub struct ParallelTransformer {
    /// The rank's rows of the embedding.
    pub embedding: VocabParallelEmbedding,
    /// Transformer blocks, in order.
    pub blocks: Vec<TensorParallelBlock>,
    /// Norm before the head.
    pub norm: SequenceParallelRmsNorm,
    /// The rank's columns of the head, fused with the loss.
    pub head: VocabParallelHead,
    positions: RopeCache,
    #[module(skip)]
    activation: Activation,
    #[module(skip)]
    balance_share: f64,
    #[module(skip)]
    parallel: TensorParallel,
}

impl ParallelTransformer {
    /// Takes this rank's shard of `whole`, including its state. `whole` is the same on all ranks.
    ///
    /// # Errors
    /// Returns an error if the model cannot be split this way.
    pub fn from_transformer(whole: Transformer, parallel: &TensorParallel) -> Result<Self> {
        let blocks = whole.blocks.into_iter();
        let blocks = blocks.map(|block| TensorParallelBlock::from_block(block, parallel));
        let embedding = Embedding::new(whole.embedding);
        let head = LmHead::new(whole.head);
        Ok(Self {
            embedding: VocabParallelEmbedding::from_embedding(embedding, parallel)?,
            blocks: blocks.collect::<Result<_, _>>()?,
            norm: SequenceParallelRmsNorm::new(whole.norm, parallel),
            head: VocabParallelHead::from_head(head, parallel)?,
            positions: whole.positions,
            activation: whole.activation,
            balance_share: whole.balance_share,
            parallel: parallel.clone(),
        })
    }

    /// Returns the input of the head for the rank's tokens, in the type of the activations, and the
    /// auxiliary loss of the routers.
    fn features(&self, tokens: Tensor<2, Int>) -> (Tensor<2>, Option<Tensor<1>>) {
        let [batch, _] = tokens.dims();
        let x = self.embedding.forward(flat(tokens), self.activation.into());
        let mut stream = ResidualStream::from(x.unsqueeze::<3>());
        let mut routers = RouterLosses::default();
        for block in &self.blocks {
            let block = block.forward_stream(stream, batch, &self.positions);
            stream = routers.add(block, self.balance_share);
        }
        let (_, x) = self.norm.forward_stream(stream);
        let [_, rows, width] = x.dims();
        (x.reshape([rows, width]), routers.sum)
    }
}

impl LanguageModel for ParallelTransformer {
    type Whole = Transformer;

    fn build(config: &RunConfig, recipe: &RecipeName, device: &Device) -> Result<Transformer> {
        Transformer::build(config, recipe, device)
    }

    /// Splits one block at a time, of zeros.
    fn check(
        config: &RunConfig,
        recipe: &RecipeName,
        device: &Device,
        groups: &ParallelGroups,
    ) -> Result<()> {
        let (parallel, tokens) = split(config, groups);
        let whole = Transformer::layout_of(config, recipe, device)?;
        let mut blocks = whole.blocks.into_iter();
        let checked = blocks.try_for_each(|block| {
            TensorParallelBlock::from_block(block, &parallel)?.check_parts(tokens)
        });
        checked.with_context(|| format!("tp is {}", config.tp))
    }

    fn part_of(whole: Transformer, config: &RunConfig, groups: &ParallelGroups) -> Result<Self> {
        groups.number_draws(&whole)?;
        let context = || format!("tp is {}", config.tp);
        let (parallel, tokens) = split(config, groups);
        let mut part = Self::from_transformer(whole, &parallel).with_context(context)?;
        let dispatch = config.expert_dispatch().into();
        for block in &mut part.blocks {
            block.check_parts(tokens).with_context(context)?;
            block.moe = block.moe.take().map(|moe| moe.with_dispatch(dispatch));
            if let Some(moe) = &block.moe {
                groups.number_expert_draws([&moe.experts.gate_up, &moe.experts.down])?;
            }
        }
        Ok(part)
    }

    fn partitions(&self, groups: &ParallelGroups) -> Vec<ModelPartition> {
        let ends = [
            self.embedding.sharded_parameter(),
            self.head.sharded_parameter(),
        ];
        let blocks = self.blocks.iter();
        let blocks = blocks.flat_map(TensorParallelBlock::sharded_parameters);
        let all = ends.into_iter().chain(blocks);
        let by_number = |(id, part): (ParamId, ShardedParameter)| (id.val(), part);
        let parameters: BTreeMap<_, _> = all.map(by_number).collect();
        let matrices = ModelPartition {
            shards: Shards {
                group: groups.tensor().clone(),
                ids: parameters.keys().copied().collect(),
            },
            parameters,
        };
        let experts = ModelPartition::of_experts(self, groups);
        [matrices].into_iter().chain(experts).collect()
    }

    fn context(&self) -> usize {
        self.positions.context()
    }

    /// Returns the logits of all tokens and bytes, on each rank.
    fn predict(&self, tokens: Tensor<2, Int>) -> (Tensor<2>, Option<Tensor<1>>) {
        let (x, routers) = self.features(tokens);
        let logits = self.head.try_logits(x);
        let logits = logits.unwrap_or_else(|error| panic!("{error}"));
        let logits = functions::gather(logits, 1, self.parallel.group());
        (cast(logits, FloatDType::F32), routers)
    }

    /// Computes the loss from sharded logits; no rank materializes all of them.
    fn losses(
        &self,
        tokens: Tensor<2, Int>,
        targets: Tensor<2, Int>,
    ) -> (Tensor<1>, Option<Tensor<1>>) {
        let (x, routers) = self.features(tokens);
        (self.head.loss(x, flat(targets)), routers)
    }
}

/// Returns the tensor parallelism of the run `config` on the ranks of `groups`, and the tokens of a
/// rank between matrices.
fn split(config: &RunConfig, groups: &ParallelGroups) -> (TensorParallel, usize) {
    let (tp, batch) = (groups.tensor().size(), groups.batch().size());
    let parallel = TensorParallel::new(groups.tensor().clone())
        .with_sequence_parallel(true)
        .with_experts(groups.expert(), groups.batch());
    (parallel, config.batch / batch * config.model.context / tp)
}
