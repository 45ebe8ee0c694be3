//! A block of a transformer.

use burn_core as burn;

use burn_core::config::Config;
use burn_core::module::Module;
use burn_core::tensor::{Bool, Device, Tensor};
use burn_nn::Initializer;
use nvfp4_kernels::Nvfp4Error;

use super::{
    ExpertParallelMoe, MoeOutput, Neighbours, Nvfp4Attention, Nvfp4AttentionConfig, Nvfp4Moe,
    Nvfp4MoeConfig, Nvfp4SwiGlu, Nvfp4SwiGluConfig, ResidualStream, RmsNorm, RopeCache,
};
use crate::functions::or_panic;
use crate::parallel::ProcessGroup;
use crate::recipe::Nvfp4Recipe;

/// Configuration of an [`Nvfp4TransformerBlock`].
#[derive(Config, Debug)]
pub struct Nvfp4TransformerBlockConfig {
    /// Width of the residual stream, a positive multiple of 16.
    pub d_model: usize,
    /// Heads of queries; see [`Nvfp4AttentionConfig`].
    pub heads: usize,
    /// Width inside the feed-forward, or inside each expert; a positive multiple of 16.
    pub d_hidden: usize,
    /// Heads of keys and values; see [`Nvfp4AttentionConfig`].
    pub kv_heads: Option<usize>,
    /// Number of experts of the feed-forward; `None` for a dense one.
    pub experts: Option<usize>,
    /// Experts that each token is sent to.
    #[config(default = 2)]
    pub top_k: usize,
    /// Width inside the expert of every token; see [`Nvfp4MoeConfig`].
    pub shared_hidden: Option<usize>,
    /// Whether the backward computes gate and up again instead of keeping them; see
    /// [`Nvfp4SwiGlu::with_recompute`].
    #[config(default = false)]
    pub recompute: bool,
    /// How parameters are initialised, as in `burn_nn::LinearConfig`.
    #[config(default = "Initializer::KaimingUniform{gain:1.0/3f64.sqrt(), fan_out_only:false}")]
    pub initializer: Initializer,
    /// What is quantized, and how.
    #[config(default = "Nvfp4Recipe::new()")]
    pub recipe: Nvfp4Recipe,
}

impl Nvfp4TransformerBlockConfig {
    /// A new block on `device`.
    ///
    /// # Errors
    /// As those of its parts: [`Nvfp4AttentionConfig::try_init`], [`Nvfp4SwiGluConfig::try_init`],
    /// [`Nvfp4MoeConfig::try_init`].
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
        Ok(Nvfp4TransformerBlock {
            attention_norm: RmsNorm::new(self.d_model, device),
            attention,
            feed_forward_norm: RmsNorm::new(self.d_model, device),
            feed_forward,
            moe,
            expert_parallel: None,
        })
    }

    /// [`try_init`](Self::try_init), panicking where it fails.
    pub fn init(&self, device: &Device) -> Nvfp4TransformerBlock {
        or_panic("Nvfp4TransformerBlockConfig::init", self.try_init(device))
    }
}

/// A block of a decoder: attention, then a feed-forward, dense or a mixture of experts, each behind
/// a norm and added to the residual stream.
///
/// It has one of `feed_forward`, `moe` and `expert_parallel`.
#[derive(Module, Debug)]
pub struct Nvfp4TransformerBlock {
    /// Before the attention.
    pub attention_norm: RmsNorm,
    /// Mixes positions.
    pub attention: Nvfp4Attention,
    /// Before the feed-forward.
    pub feed_forward_norm: RmsNorm,
    /// Mixes features, in a dense block.
    pub feed_forward: Option<Nvfp4SwiGlu>,
    /// Mixes features, in a block of experts.
    pub moe: Option<Nvfp4Moe>,
    /// Mixes features, in a block of experts that are on several ranks.
    pub expert_parallel: Option<ExpertParallelMoe>,
}

/// What a block gives.
#[derive(Clone, Debug)]
pub struct BlockOutput<T = Tensor<3>> {
    /// The residual stream, `[batch, time, d_model]`, or [its parts](ResidualStream).
    pub output: T,
    /// `f32[1]`; see [`MoeOutput::balance_loss`]. `None` for a dense block.
    pub balance_loss: Option<Tensor<1>>,
    /// `f32[1]`; see [`MoeOutput::z_loss`]. `None` for a dense block.
    pub z_loss: Option<Tensor<1>>,
}

impl Nvfp4TransformerBlock {
    /// The same block, whose backward computes gate and up again instead of keeping them; see
    /// [`Nvfp4SwiGlu::with_recompute`].
    pub fn with_recompute(mut self, recompute: bool) -> Self {
        self.feed_forward = (self.feed_forward).map(|layer| layer.with_recompute(recompute));
        self.moe = self.moe.map(|moe| moe.with_recompute(recompute));
        self.expert_parallel = (self.expert_parallel).map(|moe| moe.with_recompute(recompute));
        self
    }

    /// This rank's part of the block, of which all ranks of `experts` have the same: its experts are
    /// on these ranks, and `batch` are the ranks with a part of the batch, all of `experts` among
    /// them. A block without experts stays as it is.
    ///
    /// # Errors
    /// As [`ExpertParallelMoe::try_from_moe`].
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

    /// Apply the block to the residual stream `x`.
    ///
    /// # Shapes
    ///
    /// - `x`: `[batch, time, d_model]`, of type `f32`, `bf16` or `f16`
    /// - `padding`: `[batch, time]`, true where a position is no input: nothing attends to it
    /// - output: `[batch, time, d_model]`, of the type of `x`
    ///
    /// # Errors
    /// As those of its parts: [`Nvfp4Attention::try_forward`], [`Nvfp4SwiGlu::try_forward`],
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

    /// [`try_forward`](Self::try_forward) for a chain of blocks: each addition to the residual
    /// stream is left to the norm behind it, which adds while it normalises.
    ///
    /// # Errors
    /// As [`try_forward`](Self::try_forward), and when the parts of the stream differ in shape,
    /// type or device.
    pub fn try_forward_stream(
        &self,
        stream: ResidualStream,
        positions: &RopeCache,
        padding: Option<Tensor<2, Bool>>,
    ) -> Result<BlockOutput<ResidualStream>, Nvfp4Error> {
        self.check(&stream.sum, positions, padding.as_ref())?;
        // Blocks of a chain are alike: what is pending is of a layer such as this block's last one.
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
        // The tokens of experts are sorted before they are quantized.
        let beside_feed_forward = Neighbours {
            before: Some(&self.attention.out),
            next: self.feed_forward.as_ref().map(|dense| &dense.gate_up),
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

    /// Fail unless [`try_forward`](Self::try_forward) takes these arguments.
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
        first.check_part("attention_norm.gain", &device, width)?;
        second.check_part("feed_forward_norm.gain", &device, width)
    }

    /// [`try_forward`](Self::try_forward) without padding, panicking where it fails.
    pub fn forward(&self, x: Tensor<3>, positions: &RopeCache) -> BlockOutput {
        or_panic(
            "Nvfp4TransformerBlock::forward",
            self.try_forward(x, positions, None),
        )
    }

    /// [`try_forward_stream`](Self::try_forward_stream) without padding, panicking where it fails.
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
