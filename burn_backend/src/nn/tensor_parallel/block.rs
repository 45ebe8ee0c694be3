//! The block of a transformer of a rank.

use burn_core as burn;

use burn_core::module::{Module, ParamId};
use nvfp4_kernels::Nvfp4Error;

use super::super::{BlockOutput, Nvfp4TransformerBlock, ResidualStream, RopeCache, rows};
use super::{
    SequenceParallelRmsNorm, ShardedParameter, TensorParallel, TensorParallelAttention,
    TensorParallelMoe, TensorParallelSwiGlu,
};
use crate::functions::or_panic;

/// An [`Nvfp4TransformerBlock`] with a part of its matrices, or of its experts, on each rank.
///
/// The residual stream is `[1, tokens, d_model]`, the same on all ranks, or with sequence
/// parallelism `[1, tokens / ranks, d_model]`: sequences of one length one behind another.
#[derive(Module, Debug)]
pub struct TensorParallelBlock {
    /// Before the attention.
    pub attention_norm: SequenceParallelRmsNorm,
    /// Mixes positions.
    pub attention: TensorParallelAttention,
    /// Before the feed-forward.
    pub feed_forward_norm: SequenceParallelRmsNorm,
    /// Mixes features, in a dense block.
    pub feed_forward: Option<TensorParallelSwiGlu>,
    /// Mixes features, in a block of experts.
    pub moe: Option<TensorParallelMoe>,
}

impl TensorParallelBlock {
    /// This rank's part of `block`, of which all ranks have the same, state included.
    ///
    /// # Errors
    /// As [`TensorParallelAttention::from_attention`], [`TensorParallelSwiGlu::from_swiglu`] and
    /// [`TensorParallelMoe::from_moe`], and when the experts of the block are on several ranks
    /// already.
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

    /// Fail unless the recipe's blocks end where the parts of ranks do, of features and of `tokens`
    /// of a rank. [`try_forward_stream`](Self::try_forward_stream) checks it, too.
    ///
    /// # Errors
    /// As there.
    pub fn check_parts(&self, tokens: usize) -> Result<(), Nvfp4Error> {
        self.attention.qkv.check_parts(tokens)?;
        self.attention.out.check_parts(tokens)?;
        let (mut dense, mut moe) = (self.feed_forward.iter(), self.moe.iter());
        dense.try_for_each(|dense| dense.check_parts(tokens))?;
        moe.try_for_each(|moe| moe.check_parts(tokens))
    }

    /// The parameters of which each rank has a part, but for [those of
    /// experts](crate::nn::expert_parameters).
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

    /// Applies the block to the residual stream of `batch` sequences. Each addition to the stream
    /// is left to the norm behind it.
    ///
    /// # Errors
    /// As [`TensorParallelAttention::try_forward`], [`TensorParallelSwiGlu::try_forward`] and
    /// [`TensorParallelMoe::try_forward`], and when the parts of the stream differ in shape, type
    /// or device.
    pub fn try_forward_stream(
        &self,
        stream: ResidualStream,
        batch: usize,
        positions: &RopeCache,
    ) -> Result<BlockOutput<ResidualStream>, Nvfp4Error> {
        let (sum, normed) = self.attention_norm.try_forward_stream(stream)?;
        let (normed, dims) = rows(normed);
        let mixed = self.attention.try_forward(normed, batch, positions)?;
        let stream = ResidualStream {
            sum,
            pending: Some(mixed.reshape(dims)),
        };
        let (sum, normed) = self.feed_forward_norm.try_forward_stream(stream)?;
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
