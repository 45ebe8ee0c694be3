//! Tensor-parallel transformer block.

use burn_core as burn;

use burn_core::module::{Module, ParamId};
use nvfp4_formats::Nvfp4Error;

use super::super::{
    BlockOutput, Neighbours, Nvfp4TransformerBlock, ResidualStream, RopeCache, rows,
};
use super::{
    SequenceParallelRmsNorm, ShardedParameter, TensorParallel, TensorParallelAttention,
    TensorParallelMoe, TensorParallelSwiGlu,
};
use crate::functions::or_panic;

/// [`Nvfp4TransformerBlock`] with its matrices, or its experts, sharded over ranks.
///
/// The residual stream is `[1, tokens, d_model]`, replicated on all ranks, or with sequence
/// parallelism `[1, tokens / ranks, d_model]`: concatenated sequences of one length.
#[derive(Module, Debug)]
pub struct TensorParallelBlock {
    /// Norm before the attention.
    pub attention_norm: SequenceParallelRmsNorm,
    /// Attention.
    pub attention: TensorParallelAttention,
    /// Norm before the feed-forward.
    pub feed_forward_norm: SequenceParallelRmsNorm,
    /// Feed-forward of a dense block.
    pub feed_forward: Option<TensorParallelSwiGlu>,
    /// Experts of a mixture-of-experts block.
    pub moe: Option<TensorParallelMoe>,
}

impl TensorParallelBlock {
    /// Returns this rank's shard of `block`, which is identical on all ranks, state included.
    ///
    /// # Errors
    /// Same as [`TensorParallelAttention::from_attention`], [`TensorParallelSwiGlu::from_swiglu`]
    /// and [`TensorParallelMoe::from_moe`]; also if the experts of the block are already sharded
    /// over ranks.
    pub fn from_block(
        block: Nvfp4TransformerBlock,
        parallel: &TensorParallel,
    ) -> Result<Self, Nvfp4Error> {
        if block.feed_forward.is_some() == block.moe.is_some() {
            let (found, expected) = ("neither or both", "a dense feed-forward, or all experts");
            return Err(Nvfp4Error::value("block", found, expected));
        }
        let feed_forward =
            (block.feed_forward).map(|dense| TensorParallelSwiGlu::from_swiglu(dense, parallel));
        let moe = block
            .moe
            .map(|moe| TensorParallelMoe::from_moe(moe, parallel));
        let norm = |norm| SequenceParallelRmsNorm::new(norm, parallel);
        Ok(Self {
            attention_norm: norm(block.attention_norm),
            attention: TensorParallelAttention::from_attention(block.attention, parallel)?,
            feed_forward_norm: norm(block.feed_forward_norm),
            feed_forward: feed_forward.transpose()?,
            moe: moe.transpose()?,
        })
    }

    /// Checks that shard boundaries, of features and of the `tokens` of a rank, are multiples of
    /// the recipe's block size. [`try_forward_stream`](Self::try_forward_stream) checks it too.
    ///
    /// # Errors
    /// Same as [`try_forward_stream`](Self::try_forward_stream).
    pub fn check_parts(&self, tokens: usize) -> Result<(), Nvfp4Error> {
        self.attention.qkv.check_parts(tokens)?;
        self.attention.out.check_parts(tokens)?;
        let (mut dense, mut moe) = (self.feed_forward.iter(), self.moe.iter());
        dense.try_for_each(|dense| dense.check_parts(tokens))?;
        moe.try_for_each(|moe| moe.check_parts(tokens))
    }

    /// Returns the sharded parameters, except [those of experts](crate::nn::expert_parameters).
    pub fn sharded_parameters(&self) -> Vec<(ParamId, ShardedParameter)> {
        let (dense, moe) = (self.feed_forward.iter(), self.moe.iter());
        let attention = [
            &self.attention.qkv.sharded_parameters()[..],
            &self.attention.out.sharded_parameters(),
        ];
        let mixed = dense
            .flat_map(TensorParallelSwiGlu::sharded_parameters)
            .chain(moe.flat_map(TensorParallelMoe::sharded_parameters));
        attention.concat().into_iter().chain(mixed).collect()
    }

    /// Applies the block to the residual stream of `batch` sequences. Each residual addition is
    /// fused into the following norm.
    ///
    /// # Errors
    /// Same as [`TensorParallelAttention::try_forward`], [`TensorParallelSwiGlu::try_forward`] and
    /// [`TensorParallelMoe::try_forward`]; also if the terms of the stream differ in shape, dtype
    /// or device.
    pub fn try_forward_stream(
        &self,
        stream: ResidualStream,
        batch: usize,
        positions: &RopeCache,
    ) -> Result<BlockOutput<ResidualStream>, Nvfp4Error> {
        let dense = self.feed_forward.as_ref();
        // As in `Nvfp4TransformerBlock::try_forward_stream`.
        let beside_attention = Neighbours {
            before: dense.map(|dense| &dense.down.linear),
            next: Some(&self.attention.qkv.linear),
        };
        let norm = &self.attention_norm;
        let (sum, normed) = norm.try_forward_stream_for(beside_attention, stream)?;
        let (normed, dims) = rows(normed);
        let mixed = self.attention.try_forward(normed, batch, positions)?;
        let stream = ResidualStream {
            sum,
            pending: Some(mixed.reshape(dims)),
        };
        let shared = self.moe.as_ref().and_then(|moe| moe.shared.as_ref());
        let beside_feed_forward = Neighbours {
            before: Some(&self.attention.out.linear),
            next: dense.or(shared).map(|dense| &dense.gate_up.linear),
        };
        let norm = &self.feed_forward_norm;
        let (sum, normed) = norm.try_forward_stream_for(beside_feed_forward, stream)?;
        let (mixed, losses) = match (&self.feed_forward, &self.moe) {
            (Some(dense), None) => (dense.try_forward(rows(normed).0)?, None),
            (None, Some(moe)) => {
                let mixed = moe.try_forward(rows(normed).0)?;
                (mixed.output, Some((mixed.balance_loss, mixed.z_loss)))
            }
            _ => {
                let (found, expected) = ("neither or both", "one of feed_forward and moe");
                return Err(Nvfp4Error::value("block", found, expected));
            }
        };
        let (balance_loss, z_loss) = losses.unzip();
        Ok(BlockOutput {
            output: ResidualStream {
                pending: Some(mixed.reshape(sum.dims())),
                sum,
            },
            balance_loss,
            z_loss,
        })
    }

    /// Panicking version of [`try_forward_stream`](Self::try_forward_stream).
    #[track_caller]
    pub fn forward_stream(
        &self,
        stream: ResidualStream,
        batch: usize,
        positions: &RopeCache,
    ) -> BlockOutput<ResidualStream> {
        or_panic(
            "TensorParallelBlock::forward_stream",
            self.try_forward_stream(stream, batch, positions),
        )
    }
}
