//! Transformer block.

use burn_core as burn;

use burn_core::config::Config;
use burn_core::module::Module;
use burn_core::tensor::{Bool, Device, Tensor};
use burn_nn::Initializer;
use nvfp4_formats::Nvfp4Error;

use super::{
    ExpertParallelMoe, MoeOutput, Neighbours, Nvfp4Attention, Nvfp4AttentionConfig, Nvfp4Moe,
    Nvfp4MoeConfig, Nvfp4SwiGlu, Nvfp4SwiGluConfig, ResidualStream, RmsNorm, RmsNormConfig,
    RopeCache,
};
use crate::functions::or_panic;
use crate::parallel::ProcessGroup;
use crate::recipe::Nvfp4Recipe;

/// Configuration of an [`Nvfp4TransformerBlock`].
#[derive(Config, Debug)]
pub struct Nvfp4TransformerBlockConfig {
    /// Width of the residual stream, a positive multiple of 16.
    pub d_model: usize,
    /// Number of query heads; see [`Nvfp4AttentionConfig`].
    pub heads: usize,
    /// Hidden width of the feed-forward, or of each expert; a positive multiple of 16.
    pub d_hidden: usize,
    /// Number of key and value heads; see [`Nvfp4AttentionConfig`].
    pub kv_heads: Option<usize>,
    /// Number of experts of the feed-forward; `None` for a dense one.
    pub experts: Option<usize>,
    /// Number of experts per token.
    #[config(default = 2)]
    pub top_k: usize,
    /// Hidden width of the shared expert; see [`Nvfp4MoeConfig`].
    pub shared_hidden: Option<usize>,
    /// ε of the two norms, added to the mean square; positive.
    #[config(default = 1e-6)]
    pub epsilon: f64,
    /// True if the backward recomputes gate and up instead of keeping them; see
    /// [`Nvfp4SwiGlu::with_recompute`].
    #[config(default = false)]
    pub recompute: bool,
    /// Parameter initializer, as in `burn_nn::LinearConfig`.
    #[config(default = "Initializer::KaimingUniform{gain:1.0/3f64.sqrt(), fan_out_only:false}")]
    pub initializer: Initializer,
    /// Quantization recipe.
    #[config(default = "Nvfp4Recipe::new()")]
    pub recipe: Nvfp4Recipe,
}

impl Nvfp4TransformerBlockConfig {
    /// Creates a block on `device`.
    ///
    /// # Errors
    /// Same as [`Nvfp4AttentionConfig::try_init`], [`Nvfp4SwiGluConfig::try_init`],
    /// [`Nvfp4MoeConfig::try_init`] and [`RmsNormConfig::try_init`].
    pub fn try_init(&self, device: &Device) -> Result<Nvfp4TransformerBlock, Nvfp4Error> {
        let attention = Nvfp4AttentionConfig::new(self.d_model, self.heads)
            .with_kv_heads(self.kv_heads)
            .with_initializer(self.initializer.clone())
            .with_recipe(self.recipe.clone())
            .try_init(device)?;
        let (feed_forward, moe) = match self.experts {
            None => {
                let config = Nvfp4SwiGluConfig::new(self.d_model, self.d_hidden)
                    .with_recompute(self.recompute)
                    .with_initializer(self.initializer.clone())
                    .with_recipe(self.recipe.clone());
                (Some(config.try_init(device)?), None)
            }
            Some(experts) => {
                let config = Nvfp4MoeConfig::new(self.d_model, self.d_hidden, experts)
                    .with_top_k(self.top_k)
                    .with_shared_hidden(self.shared_hidden)
                    .with_recompute(self.recompute)
                    .with_initializer(self.initializer.clone())
                    .with_recipe(self.recipe.clone());
                (None, Some(config.try_init(device)?))
            }
        };
        let norm = RmsNormConfig::new(self.d_model).with_epsilon(self.epsilon);
        Ok(Nvfp4TransformerBlock {
            attention_norm: norm.try_init(device)?,
            attention,
            feed_forward_norm: norm.try_init(device)?,
            feed_forward,
            moe,
            expert_parallel: None,
        })
    }

    /// Panicking version of [`try_init`](Self::try_init).
    #[track_caller]
    pub fn init(&self, device: &Device) -> Nvfp4TransformerBlock {
        or_panic("Nvfp4TransformerBlockConfig::init", self.try_init(device))
    }
}

/// Decoder block: attention, then a dense or mixture-of-experts feed-forward, each preceded by a
/// norm and added to the residual stream.
///
/// Exactly one of `feed_forward`, `moe` and `expert_parallel` is set.
#[derive(Module, Debug)]
pub struct Nvfp4TransformerBlock {
    /// Norm before the attention.
    pub attention_norm: RmsNorm,
    /// Attention.
    pub attention: Nvfp4Attention,
    /// Norm before the feed-forward.
    pub feed_forward_norm: RmsNorm,
    /// Feed-forward of a dense block.
    pub feed_forward: Option<Nvfp4SwiGlu>,
    /// Experts of a mixture-of-experts block.
    pub moe: Option<Nvfp4Moe>,
    /// Experts of a mixture-of-experts block whose experts are sharded over ranks.
    pub expert_parallel: Option<ExpertParallelMoe>,
}

/// Output of a block.
#[derive(Clone, Debug)]
pub struct BlockOutput<T = Tensor<3>> {
    /// Residual stream, `[batch, time, d_model]`, or [its two terms](ResidualStream).
    pub output: T,
    /// `f32[1]`; see [`MoeOutput::balance_loss`]. `None` for a dense block.
    pub balance_loss: Option<Tensor<1>>,
    /// `f32[1]`; see [`MoeOutput::z_loss`]. `None` for a dense block.
    pub z_loss: Option<Tensor<1>>,
}

impl Nvfp4TransformerBlock {
    /// Sets whether the backward recomputes gate and up instead of keeping them; see
    /// [`Nvfp4SwiGlu::with_recompute`].
    pub fn with_recompute(mut self, recompute: bool) -> Self {
        self.feed_forward = (self.feed_forward).map(|layer| layer.with_recompute(recompute));
        self.moe = self.moe.map(|moe| moe.with_recompute(recompute));
        self.expert_parallel = (self.expert_parallel).map(|moe| moe.with_recompute(recompute));
        self
    }

    /// Returns this rank's shard of a block that is identical on all ranks of `experts`. The
    /// experts are sharded over these ranks. `batch` are the ranks that share the batch; it
    /// includes all of `experts`. A block without experts is unchanged.
    ///
    /// # Errors
    /// Same as [`ExpertParallelMoe::try_from_moe`].
    pub fn into_expert_parallel(
        mut self,
        experts: &ProcessGroup,
        batch: &ProcessGroup,
    ) -> Result<Self, Nvfp4Error> {
        if let Some(moe) = self.moe.take() {
            let moe = ExpertParallelMoe::try_from_moe(moe, experts)?;
            self.expert_parallel = Some(moe.with_batch(batch));
        }
        Ok(self)
    }

    /// Applies the block to the residual stream `x`.
    ///
    /// # Shapes
    ///
    /// - `x`: `[batch, time, d_model]`, of type `f32`, `bf16` or `f16`
    /// - `padding`: `[batch, time]`, true where a position is padding: no query attends to it
    /// - output: `[batch, time, d_model]`, in the dtype of `x`
    ///
    /// # Errors
    /// Same as [`Nvfp4Attention::try_forward`], [`Nvfp4SwiGlu::try_forward`] and
    /// [`Nvfp4Moe::try_forward`].
    pub fn try_forward(
        &self,
        x: Tensor<3>,
        positions: &RopeCache,
        padding: Option<Tensor<2, Bool>>,
    ) -> Result<BlockOutput, Nvfp4Error> {
        let BlockOutput {
            output,
            balance_loss,
            z_loss,
        } = self.try_forward_stream(x.into(), positions, padding)?;
        Ok(BlockOutput {
            output: output.into_sum(),
            balance_loss,
            z_loss,
        })
    }

    /// Version of [`try_forward`](Self::try_forward) for a chain of blocks: each residual addition
    /// is fused into the following norm.
    ///
    /// # Errors
    /// Same as [`try_forward`](Self::try_forward); also if the terms of the stream differ in shape,
    /// dtype or device.
    pub fn try_forward_stream(
        &self,
        stream: ResidualStream,
        positions: &RopeCache,
        padding: Option<Tensor<2, Bool>>,
    ) -> Result<BlockOutput<ResidualStream>, Nvfp4Error> {
        self.check(&stream.sum, positions, padding.as_ref())?;
        // All blocks of a chain are alike: the pending term is the output of a layer like this
        // block's last one.
        let beside_attention = Neighbours {
            before: self.feed_forward.as_ref().map(|dense| &dense.down),
            next: Some(&self.attention.qkv),
        };
        let norm = &self.attention_norm;
        let (sum, normed) = norm.try_forward_stream_for(beside_attention, stream)?;
        let stream = ResidualStream {
            sum,
            pending: Some(self.attention.try_forward(normed, positions, padding)?),
        };
        // Experts quantize sorted copies of their tokens, whose amax values the sorting computes; a
        // shared expert quantizes the norm.
        let shared = match (&self.moe, &self.expert_parallel) {
            (Some(moe), _) => moe.shared.as_ref(),
            (None, moe) => moe.as_ref().and_then(|moe| moe.shared.as_ref()),
        };
        let dense = self.feed_forward.as_ref().or(shared);
        let beside_feed_forward = Neighbours {
            before: Some(&self.attention.out),
            next: dense.map(|dense| &dense.gate_up),
        };
        let norm = &self.feed_forward_norm;
        let (sum, normed) = norm.try_forward_stream_for(beside_feed_forward, stream)?;
        let output = |pending| ResidualStream {
            sum,
            pending: Some(pending),
        };
        let MoeOutput {
            output: mixed,
            balance_loss,
            z_loss,
            ..
        } = match (&self.feed_forward, &self.moe, &self.expert_parallel) {
            (Some(feed_forward), None, None) => {
                return Ok(BlockOutput {
                    output: output(feed_forward.try_forward(normed)?),
                    balance_loss: None,
                    z_loss: None,
                });
            }
            (None, Some(moe), None) => moe.try_forward(normed)?,
            (None, None, Some(moe)) => moe.try_forward(normed)?,
            _ => unreachable!("checked"),
        };
        Ok(BlockOutput {
            output: output(mixed),
            balance_loss: Some(balance_loss),
            z_loss: Some(z_loss),
        })
    }

    /// Returns an error if [`try_forward`](Self::try_forward) does not accept these arguments.
    fn check(
        &self,
        x: &Tensor<3>,
        positions: &RopeCache,
        padding: Option<&Tensor<2, Bool>>,
    ) -> Result<(), Nvfp4Error> {
        self.attention.check(x, positions, padding)?;
        match (&self.feed_forward, &self.moe, &self.expert_parallel) {
            (Some(feed_forward), None, None) => feed_forward.check(x)?,
            (None, Some(moe), None) => moe.check(x)?,
            (None, None, Some(moe)) => moe.check(x)?,
            (dense, experts, parallel) => {
                return Err(Nvfp4Error::value(
                    "feed_forward",
                    format!(
                        "dense: {}, experts: {}, experts on several ranks: {}",
                        dense.is_some(),
                        experts.is_some(),
                        parallel.is_some()
                    ),
                    "exactly one of the three",
                ));
            }
        }
        let (device, [_, _, width]) = (x.device(), x.dims());
        let (first, second) = (&self.attention_norm, &self.feed_forward_norm);
        first.check_part("attention_norm.gamma", &device, width)?;
        second.check_part("feed_forward_norm.gamma", &device, width)
    }

    /// Panicking version of [`try_forward`](Self::try_forward), without padding.
    #[track_caller]
    pub fn forward(&self, x: Tensor<3>, positions: &RopeCache) -> BlockOutput {
        or_panic(
            "Nvfp4TransformerBlock::forward",
            self.try_forward(x, positions, None),
        )
    }

    /// Panicking version of [`try_forward_stream`](Self::try_forward_stream), without padding.
    #[track_caller]
    pub fn forward_stream(
        &self,
        stream: ResidualStream,
        positions: &RopeCache,
    ) -> BlockOutput<ResidualStream> {
        or_panic(
            "Nvfp4TransformerBlock::forward_stream",
            self.try_forward_stream(stream, positions, None),
        )
    }
}
