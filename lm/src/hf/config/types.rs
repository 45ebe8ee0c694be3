//! Configuration of a decoder, independent of the files that state it.

use anyhow::{Result, ensure};
use serde_json::{Map, Value};

use super::super::fields::Fields;
use super::super::rope::Rope;

/// Model architecture, by its `model_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// Llama 2 and 3, and models with the same structure, such as SmolLM.
    Llama,
    /// Llama with a sliding window.
    Mistral,
    /// Qwen2 and Qwen2.5: Llama with biases of queries, keys and values.
    Qwen2,
    /// RMSNorm on each head of queries and keys, before the rotary embedding.
    Qwen3,
    /// Qwen3 with experts.
    Qwen3Moe,
    /// Mistral with experts.
    Mixtral,
    /// Gemma 2: norms before and after each block, soft caps of scores and logits.
    Gemma2,
    /// Text models of Gemma 3: Gemma 2 with norms of queries and keys instead of soft caps.
    Gemma3,
    /// DeepSeek-V3 and R1: latent attention, experts chosen by a sigmoid router, shared experts.
    DeepseekV3,
    /// gpt-oss: attention sinks, and experts with biases and a clamped SwiGLU.
    GptOss,
}

/// Facts of a family.
pub(super) struct Spec {
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// Class in `architectures`.
    pub architecture: &'static str,
    /// Reads the configuration.
    pub read: fn(&Fields, Family) -> Result<DecoderConfig>,
    /// Adds the fields that not all families have.
    pub write: fn(&DecoderConfig, &mut Map<String, Value>),
}

/// Activation of the gate in a feed-forward.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum GateActivation {
    /// SiLU.
    #[default]
    Silu,
    /// GELU in its `tanh` approximation.
    GeluTanh,
    /// `gate · sigmoid(alpha · gate) · (up + 1)`, with gate at most `limit` and up within ±`limit`.
    ClampedSwiGlu {
        /// Factor of the gate in the sigmoid.
        alpha: f32,
        /// Bound of gate and up.
        limit: f32,
    },
}

/// Projections that have a bias.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Biases {
    /// True for queries, keys and values.
    pub qkv: bool,
    /// True for the output projection of attention.
    pub out: bool,
    /// True for gate, up and down of dense feed-forwards.
    pub feed_forward: bool,
    /// True for routers, and for gate, up and down of experts.
    pub experts: bool,
}

/// Arithmetic of every layer. The default is that of Llama.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BlockConfig {
    /// Projections that have a bias.
    pub biases: Biases,
    /// True if each head of queries and keys has a norm before the rotary embedding.
    pub qk_norm: bool,
    /// True if attention and feed-forward also have a norm after them, before the residual
    /// addition.
    pub post_norms: bool,
    /// True if norms multiply by 1 + weight instead of the weight; also for the final norm.
    pub norm_plus_one: bool,
    /// True if every row of attention scores of a head also has that head's sink, a learned score
    /// without a value.
    pub sinks: bool,
    /// Activation of the gate in feed-forwards and experts.
    pub activation: GateActivation,
    /// Attention scores are divided by the square root of this number; by default, the head
    /// dimension.
    pub query_scalar: Option<f64>,
    /// Soft cap of attention scores: `cap · tanh(score / cap)`.
    pub score_cap: Option<f32>,
    /// Latent attention, if keys and values are made from a low-rank projection.
    pub latent: Option<LatentConfig>,
}

/// Sizes of DeepSeek's multi-head latent attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatentConfig {
    /// Rank of the queries; `None` if one projection makes them.
    pub q_rank: Option<usize>,
    /// Rank of keys and values.
    pub kv_rank: usize,
    /// Elements of a query or key head without a position.
    pub nope: usize,
    /// Elements of a query or key head with a rotary position. All heads share those of the key.
    pub rope: usize,
    /// Elements of a value head.
    pub value: usize,
    /// True if the pairs of the rotary embedding are neighbors in the projections' outputs.
    pub interleaved: bool,
    /// `mscale_all_dim` of YaRN, which scales attention scores; 0 if there is none.
    pub mscale_all_dim: f64,
}

impl LatentConfig {
    /// Returns the head dimension of queries and keys.
    pub fn query(&self) -> usize {
        self.nope + self.rope
    }

    /// Returns the head dimension for which attention is computed: the larger of those of keys and
    /// values, padded with zeros to a multiple of 16.
    pub fn width(&self) -> usize {
        self.query().max(self.value).next_multiple_of(16)
    }
}

/// Feed-forward of a layer.
#[derive(Clone, Debug, PartialEq)]
pub enum FeedForwardConfig {
    /// A gated feed-forward.
    Dense {
        /// Hidden width.
        hidden: usize,
    },
    /// A mixture of experts.
    Moe {
        /// Number of experts.
        experts: usize,
        /// Number of experts per token.
        top_k: usize,
        /// Hidden width of an expert.
        hidden: usize,
        /// True if the weights of a token's experts are divided by their sum.
        normalize: bool,
        /// Scores of the experts.
        scoring: Scoring,
        /// Hidden width of the feed-forward that all tokens use beside the experts, if any.
        shared: Option<usize>,
    },
}

/// Scores from which a token's experts and their weights follow.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Scoring {
    /// Softmax over all experts.
    #[default]
    Softmax,
    /// Sigmoid of each expert. A bias is added for the choice, but not for the weights. Only
    /// experts of the groups with the largest sums of two scores are chosen.
    GroupedSigmoid {
        /// Number of groups of equal size.
        groups: usize,
        /// Number of groups from which a token's experts are chosen.
        top_groups: usize,
        /// Factor of the weights.
        factor: f64,
    },
}

/// One layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerConfig {
    /// Maximum number of keys per query, including its own position; `None` for all.
    pub window: Option<usize>,
    /// Index of its rotary embedding in [`DecoderConfig::ropes`].
    pub rope: usize,
    /// Feed-forward after the attention.
    pub feed_forward: FeedForwardConfig,
}

/// Configuration of a decoder, in one form for all versions and architectures of `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Architecture.
    pub family: Family,
    /// Vocabulary size: rows of the embedding.
    pub vocab: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads; a divisor of `heads`.
    pub kv_heads: usize,
    /// Head dimension of attention and of its cache; even. `heads * head` may differ from
    /// `d_model`.
    pub head: usize,
    /// Layers, in order.
    pub layers: Vec<LayerConfig>,
    /// Epsilon of every RMSNorm.
    pub epsilon: f64,
    /// Rotary embeddings; each layer uses one of them.
    pub ropes: Vec<Rope>,
    /// Arithmetic of every layer.
    pub block: BlockConfig,
    /// True if embeddings are multiplied by the square root of `d_model`.
    pub scaled_embedding: bool,
    /// Soft cap of the logits: `cap · tanh(logit / cap)`.
    pub logit_cap: Option<f32>,
    /// Maximum context of the model, in tokens.
    pub max_positions: usize,
    /// Number of layers that predict further tokens. Files have them after the other layers; they
    /// are not loaded.
    pub extra_layers: usize,
    /// True if the head is tied to the embedding.
    pub tied: bool,
    /// Start-of-text token.
    pub bos: Option<u32>,
    /// End-of-text tokens.
    pub eos: Vec<u32>,
    /// Padding token.
    pub pad: Option<u32>,
}

impl DecoderConfig {
    /// Returns the number of elements of a head that have a rotary position.
    pub fn rotary_head(&self) -> usize {
        self.block.latent.map_or(self.head, |latent| latent.rope)
    }

    /// Returns the largest number of experts of a token in any layer; 0 without experts.
    pub fn most_experts_of_token(&self) -> usize {
        let of_layers = self.layers.iter().map(|layer| match layer.feed_forward {
            FeedForwardConfig::Dense { .. } => 0,
            FeedForwardConfig::Moe { top_k, .. } => top_k,
        });
        of_layers.max().unwrap_or(0)
    }

    /// Checks that the experts of the model can be distributed over `ep` ranks.
    ///
    /// # Errors
    /// Returns an error if the model has no experts, their number is not a multiple of `ep`, or
    /// their activation is not SiLU.
    pub fn check_experts(&self, ep: usize) -> Result<()> {
        if ep == 1 {
            return Ok(());
        }
        ensure!(
            self.most_experts_of_token() > 0,
            "ep is {ep}, but the model has no experts: leave it out"
        );
        let activation = self.block.activation;
        ensure!(
            activation == GateActivation::Silu,
            "ep is {ep}, but the activation of the experts is {activation:?}: only experts with \
             SiLU are distributed over ranks"
        );
        for layer in &self.layers {
            if let FeedForwardConfig::Moe { experts, .. } = layer.feed_forward {
                ensure!(
                    experts.is_multiple_of(ep),
                    "ep is {ep} and the model has {experts} experts, but each rank has as many \
                     experts: their number must be a multiple of ep"
                );
            }
        }
        Ok(())
    }

    /// Returns the maximum number of tokens of a text: the model's maximum context, or unlimited if
    /// the rotary embedding adapts to the length of the text.
    pub fn longest(&self) -> usize {
        match self
            .ropes
            .iter()
            .any(|rope| rope.dynamic_beyond().is_some())
        {
            true => usize::MAX,
            false => self.max_positions,
        }
    }

    /// Checks that texts of `length` tokens, described by `what`, fit into the maximum context.
    ///
    /// # Errors
    /// Returns an error that names `what`, the length and the maximum.
    pub fn check_length(&self, what: &str, length: usize) -> Result<()> {
        ensure!(
            length <= self.longest(),
            "{what} is {length}, but the model is meant for {} positions at most",
            self.max_positions
        );
        Ok(())
    }
}
