//! Tensor-parallel attention.

use burn_core as burn;

use burn_core::module::Module;
use burn_core::tensor::Tensor;
use nvfp4_formats::Nvfp4Error;

use super::super::attention::layer::FusedAttention;
use super::super::{Nvfp4Attention, Nvfp4Linear, RopeCache};
use super::{ColumnParallelLinear, RowParallelLinear, TensorParallel};
use crate::attention::Sequences;
use crate::functions::or_panic;

/// [`Nvfp4Attention`] with its heads sharded over ranks: each rank has query heads and the key and
/// value heads that serve them.
///
/// Tokens are rows; sequences have one length and are concatenated. Input and output are
/// `[tokens, d_model]`, replicated on all ranks, or with sequence parallelism
/// `[tokens / ranks, d_model]`. Each rank computes attention over all tokens, with its heads.
#[derive(Module, Debug)]
pub struct TensorParallelAttention {
    /// Fused projection of queries, keys and values,
    /// `[d_model, (heads + 2 * kv_heads) * head / ranks]`.
    pub qkv: ColumnParallelLinear,
    /// Output projection, `[d_model / ranks, d_model]`.
    pub out: RowParallelLinear,
    #[module(skip)]
    heads: FusedAttention,
}

impl TensorParallelAttention {
    /// Returns this rank's shard of `attention`, which is identical on all ranks, state included.
    ///
    /// # Errors
    /// Returns an error if the number of ranks does not divide the query heads and the key and
    /// value heads, the width of a rank's heads is not a multiple of 16, or the attention has
    /// dropout or heads wider than 256, which its kernels do not support.
    pub fn from_attention(
        attention: Nvfp4Attention,
        parallel: &TensorParallel,
    ) -> Result<Self, Nvfp4Error> {
        let (qkv, out, whole) = attention.into_fused()?;
        let size = parallel.group().size();
        for (name, heads) in [("heads", whole.heads), ("kv_heads", whole.kv_heads)] {
            if !heads.is_multiple_of(size) {
                let expected = format!("a multiple of the {size} ranks");
                return Err(Nvfp4Error::value(name, heads.to_string(), expected));
            }
        }
        let [heads, kv_heads] = [whole.heads, whole.kv_heads].map(|heads| heads * whole.head);
        Ok(Self {
            qkv: ColumnParallelLinear::from_segments(qkv, &[heads, kv_heads, kv_heads], parallel)?,
            out: RowParallelLinear::from_linear(out, parallel)?,
            heads: FusedAttention {
                heads: whole.heads / size,
                kv_heads: whole.kv_heads / size,
                ..whole
            },
        })
    }

    /// Gathers the shards of all ranks into unsharded layers: the fused input projection and the
    /// output projection. All ranks call it together.
    ///
    /// # Panics
    /// If the group fails.
    pub fn into_layers(self) -> (Nvfp4Linear, Nvfp4Linear) {
        (self.qkv.into_linear(), self.out.into_linear())
    }

    /// Attends within each of `batch` sequences.
    ///
    /// # Errors
    /// Same as [`ColumnParallelLinear::try_forward`]; also if `batch` does not divide the number of
    /// tokens, or a sequence is longer than the context of `positions`.
    pub fn try_forward(
        &self,
        x: Tensor<2>,
        batch: usize,
        positions: &RopeCache,
    ) -> Result<Tensor<2>, Nvfp4Error> {
        let ranks = self.qkv.check(&x)?;
        let ([rows, width], device) = (x.dims(), x.device());
        let tokens = rows * ranks;
        if batch == 0 || !tokens.is_multiple_of(batch) {
            let expected = format!("a divisor of the {tokens} tokens");
            return Err(Nvfp4Error::value("batch", batch.to_string(), expected));
        }
        self.heads.check(tokens / batch, positions, &device)?;
        let names = ["out.weight", "out.bias"];
        let shape = [self.heads.heads * self.heads.head, width];
        self.out.linear.check_part(names, &device, shape)?;
        self.out.check_tokens::<2>(rows)?;
        let qkv = self.qkv.try_forward(x)?;
        let mixed = self
            .heads
            .attend(qkv, positions, &Sequences::Equal(batch), None)?;
        self.out.try_forward(mixed)
    }

    /// Panicking version of [`try_forward`](Self::try_forward).
    #[track_caller]
    pub fn forward(&self, x: Tensor<2>, batch: usize, positions: &RopeCache) -> Tensor<2> {
        let y = self.try_forward(x, batch, positions);
        or_panic("TensorParallelAttention::forward", y)
    }
}
