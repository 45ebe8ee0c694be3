//! The block of a transformer of a rank.

use burn_core as burn;

use burn_core::module::{Module, ParamId};
use nvfp4_kernels::Nvfp4Error;

use super::super::{Nvfp4TransformerBlock, ResidualStream, RopeCache, rows};
use super::{
    SequenceParallelRmsNorm, ShardedParameter, TensorParallel, TensorParallelAttention,
    TensorParallelSwiGlu,
};
use crate::functions::or_panic;

/// A dense [`Nvfp4TransformerBlock`] with a part of its matrices on each rank.
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
    /// Mixes features.
    pub feed_forward: TensorParallelSwiGlu,
}

impl TensorParallelBlock {
    /// This rank's part of `block`, of which all ranks have the same, state included.
    ///
    /// # Errors
    /// As [`TensorParallelAttention::from_attention`] and [`TensorParallelSwiGlu::from_swiglu`],
    /// and when the block has experts.
    pub fn from_block(
        block: Nvfp4TransformerBlock,
        parallel: &TensorParallel,
    ) -> Result<Self, Nvfp4Error> {
        let Some(feed_forward) = block.feed_forward else {
            let (found, expected) = ("experts", "a dense feed-forward");
            return Err(Nvfp4Error::value("block", found, expected));
        };
        let norm = |norm| SequenceParallelRmsNorm::new(norm, parallel);
        Ok(Self {
            attention_norm: norm(block.attention_norm),
            attention: TensorParallelAttention::from_attention(block.attention, parallel)?,
            feed_forward_norm: norm(block.feed_forward_norm),
            feed_forward: TensorParallelSwiGlu::from_swiglu(feed_forward, parallel)?,
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
        self.feed_forward.gate_up.check_parts(tokens)?;
        self.feed_forward.down.check_parts(tokens)
    }

    /// The parameters of which each rank has a part.
    pub fn sharded_parameters(&self) -> Vec<(ParamId, ShardedParameter)> {
        [
            self.attention.qkv.sharded_parameters(),
            self.attention.out.sharded_parameters(),
            self.feed_forward.gate_up.sharded_parameters(),
            self.feed_forward.down.sharded_parameters(),
        ]
        .concat()
    }

    /// Apply the block to the residual stream of `batch` sequences. Each addition to the stream is
    /// left to the norm behind it.
    ///
    /// # Errors
    /// As [`TensorParallelAttention::try_forward`] and [`TensorParallelSwiGlu::try_forward`], and
    /// when the parts of the stream differ in shape, type or device.
    pub fn try_forward_stream(
        &self,
        stream: ResidualStream,
        batch: usize,
        positions: &RopeCache,
    ) -> Result<ResidualStream, Nvfp4Error> {
        let (sum, normed) = self.attention_norm.try_forward_stream(stream)?;
        let (normed, dims) = rows(normed);
        let mixed = self.attention.try_forward(normed, batch, positions)?;
        let stream = ResidualStream {
            sum,
            pending: Some(mixed.reshape(dims)),
        };
        let (sum, normed) = self.feed_forward_norm.try_forward_stream(stream)?;
        let (normed, dims) = rows(normed);
        let mixed = self.feed_forward.try_forward(normed)?;
        Ok(ResidualStream {
            sum,
            pending: Some(mixed.reshape(dims)),
        })
    }

    /// [`try_forward_stream`](Self::try_forward_stream), panicking where it fails.
    pub fn forward_stream(
        &self,
        stream: ResidualStream,
        batch: usize,
        positions: &RopeCache,
    ) -> ResidualStream {
        or_panic(
            "TensorParallelBlock::forward_stream",
            self.try_forward_stream(stream, batch, positions),
        )
    }
}
