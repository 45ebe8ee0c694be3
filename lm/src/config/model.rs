//! Sizes of the model.

use anyhow::{Result, ensure};
use burn_nvfp4::experts::MAX_EXPERTS;
use clap::Args;
use serde::{Deserialize, Serialize};

/// Number of symbols: the model reads and writes bytes.
pub const VOCABULARY: usize = 256;

/// Sizes of the model, in elements.
#[derive(Debug, Clone, PartialEq, Eq, Args, Serialize, Deserialize)]
#[group(skip)]
pub struct ModelConfig {
    /// Set the width of the residual stream, a multiple of 16 [default: the preset's]
    #[arg(long, value_name = "N")]
    pub width: usize,
    /// Set the number of blocks [default: the preset's]
    #[arg(long, value_name = "N")]
    pub layers: usize,
    /// Set the number of attention heads; the head dimension must be even [default: the preset's]
    #[arg(long, value_name = "N")]
    pub heads: usize,
    /// Set the hidden width of each feed-forward, a multiple of 16 [default: the preset's]
    #[arg(long, value_name = "N")]
    pub hidden: usize,
    /// Use sequences of this length: bytes [default: the preset's]
    #[arg(long, value_name = "N")]
    pub context: usize,
    /// Set the number of experts in each block [default: 8 with --model moe]
    #[arg(long, value_name = "N")]
    #[serde(default)]
    pub experts: Option<usize>,
    /// Route each byte to this many experts [default: 2]
    #[arg(long, value_name = "K")]
    #[serde(default = "top_2")]
    pub top_k: usize,
}

fn top_2() -> usize {
    ModelConfig::TOP_K
}

impl ModelConfig {
    /// Default number of experts per byte.
    pub const TOP_K: usize = 2;

    /// Checks that the model can be built.
    ///
    /// # Errors
    /// Returns an error that names the invalid value and the allowed ones.
    pub fn check(&self) -> Result<()> {
        let Self {
            width,
            layers,
            heads,
            hidden,
            context,
            experts,
            top_k,
        } = *self;
        for (name, value) in [("width", width), ("hidden", hidden)] {
            ensure!(
                value > 0 && value % 16 == 0,
                "{name} is {value}, but it must be a positive multiple of 16: NVFP4 packs blocks \
                 of 16 elements"
            );
        }
        ensure!(
            layers > 0,
            "layers is 0, but a model has at least one block"
        );
        ensure!(
            heads > 0 && width % heads == 0 && (width / heads) % 2 == 0,
            "heads is {heads}, but it must divide width ({width}) into heads of an even size"
        );
        ensure!(
            context > 1,
            "context is {context}, but it must be at least 2 bytes"
        );
        if let Some(experts) = experts {
            ensure!(
                (1..=MAX_EXPERTS).contains(&experts),
                "experts is {experts}, but it must be 1 to {MAX_EXPERTS}"
            );
            ensure!(
                (1..=experts).contains(&top_k),
                "top-k is {top_k}, but it must be 1 to the number of experts ({experts})"
            );
        } else {
            ensure!(
                top_k == Self::TOP_K,
                "top-k is {top_k}, but the model has no experts to route to: leave it out, or give \
                 --model moe"
            );
        }
        Ok(())
    }

    /// Returns the number of weights in the blocks' projections that are active for each byte. In a
    /// mixture these are the experts that the byte is routed to.
    pub fn active_weights(&self) -> usize {
        let experts = self.experts.map_or(1, |_| self.top_k);
        let block = 4 * self.width * self.width + experts * 3 * self.width * self.hidden;
        self.layers * block
    }

    /// Returns the [`active_weights`](Self::active_weights) of a model of Burn's own layers.
    pub fn encoder_active_weights(&self) -> usize {
        self.layers * (4 * self.width * self.width + 2 * self.width * self.hidden)
    }

    /// Returns the number of trained parameters of a model of Burn's own layers.
    pub fn encoder_parameters(&self) -> usize {
        let &Self {
            width,
            layers,
            hidden,
            context,
            ..
        } = self;
        let attention = 4 * (width + 1) * width;
        let feed_forward = 2 * width * hidden + hidden + width;
        let norm = 2 * width;
        layers * (attention + feed_forward + 2 * norm) + norm + (2 * VOCABULARY + context) * width
    }

    /// Returns the number of trained parameters of all experts, without their routers.
    pub fn expert_parameters(&self) -> usize {
        self.layers * self.experts.unwrap_or_default() * 3 * self.width * self.hidden
    }

    /// Returns the number of trained parameters.
    pub fn parameters(&self) -> usize {
        let Self {
            width,
            layers,
            hidden,
            experts,
            ..
        } = *self;
        let feed_forward = 3 * width * hidden;
        let feed_forward = match experts {
            // Each expert, and its column of the router.
            Some(experts) => experts * (feed_forward + width),
            None => feed_forward,
        };
        let block = 4 * width * width + feed_forward + 2 * width;
        layers * block + 2 * VOCABULARY * width + width
    }
}
