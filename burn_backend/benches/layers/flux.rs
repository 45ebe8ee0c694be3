//! A training step of one block of a diffusion transformer like FLUX, with the modules of `nvfp4::nn`
//! and the attention of this crate: streams of text and of patches, modulated by a condition (adaLN),
//! with joint attention. `benches/pytorch_step.py flux` measures the same step.

use burn_core as burn;

use burn_core::module::Module;
use burn_core::tensor::{Device, Tensor, activation::silu};
use burn_nvfp4::attention::{AttentionParams, Sequences, attention};
use burn_nvfp4::nn::transformer::{PositionWiseFeedForward, PositionWiseFeedForwardConfig};
use burn_nvfp4::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn_nvfp4::{Nvfp4Recipe, state::assign_layer_ids};

use crate::harness::Bench;
use crate::step;

/// Prefix of the names of its settings.
pub const SETTING: &str = "flux";

/// Sizes of a block and its input.
#[derive(Clone, Copy)]
struct Size {
    width: usize,
    heads: usize,
    /// Tokens of text, and patches.
    tokens: [usize; 2],
}

/// Layers of one stream.
#[derive(Module, Debug)]
struct Stream {
    modulation: Linear,
    norms: [LayerNorm; 2],
    qkv: Linear,
    qk_norms: [RmsNorm; 2],
    output: Linear,
    feed_forward: PositionWiseFeedForward,
}

/// Streams of text and of patches.
#[derive(Module, Debug)]
struct Block {
    streams: [Stream; 2],
}

impl Stream {
    fn new(size: Size, recipe: &Nvfp4Recipe, device: &Device) -> Self {
        let width = size.width;
        let linear = |d_output| {
            let config = LinearConfig::new(width, d_output).with_recipe(recipe.clone());
            config.init(device)
        };
        let feed_forward = PositionWiseFeedForwardConfig::new(width, 4 * width)
            .with_dropout(0.0)
            .with_recipe(recipe.clone());
        Self {
            modulation: linear(6 * width),
            norms: [0, 1].map(|_| LayerNormConfig::new(width).init(device)),
            qkv: linear(3 * width),
            qk_norms: [0, 1].map(|_| RmsNormConfig::new(width / size.heads).init(device)),
            output: linear(width),
            feed_forward: feed_forward.init(device),
        }
    }

    /// Returns queries, keys and values, `[batch, tokens, heads, head]`.
    fn qkv(&self, x: Tensor<3>, parts: &[Tensor<3>]) -> [Tensor<4>; 3] {
        let ([batch, tokens, width], [head]) = (x.dims(), self.qk_norms[0].gamma.dims());
        let x = modulate(self.norms[0].forward(x), &parts[0], &parts[1]);
        let qkv = self
            .qkv
            .forward(x)
            .reshape([batch, tokens, 3 * width / head, head]);
        let heads = width / head;
        let [q, k, v] = [0, 1, 2].map(|part| qkv.clone().narrow(2, part * heads, heads));
        let [q_norm, k_norm] = &self.qk_norms;
        [q_norm.forward(q), k_norm.forward(k), v]
    }

    /// Adds the attention and the feed-forward to `x`.
    fn finish(&self, x: Tensor<3>, attended: Tensor<3>, parts: &[Tensor<3>]) -> Tensor<3> {
        let x = x + self.output.forward(attended) * parts[2].clone();
        let y = modulate(self.norms[1].forward(x.clone()), &parts[3], &parts[4]);
        x + self.feed_forward.forward(y) * parts[5].clone()
    }
}

fn modulate(x: Tensor<3>, shift: &Tensor<3>, scale: &Tensor<3>) -> Tensor<3> {
    x * (scale.clone() + 1.0) + shift.clone()
}

impl Block {
    /// Applies the block to both streams and returns them in one, `[batch, tokens, width]`.
    fn forward(&self, tokens: [Tensor<3>; 2], condition: Tensor<2>) -> Tensor<3> {
        let condition = silu(condition);
        let parts = (self.streams.each_ref()).map(|stream| -> Vec<Tensor<3>> {
            let parts = stream.modulation.forward(condition.clone());
            parts.unsqueeze_dim::<3>(1).chunk(6, 2)
        });
        let [text, patches] = &self.streams;
        let [a, b] = [0, 1].map(|at| self.streams[at].qkv(tokens[at].clone(), &parts[at]));
        let [batch, text_tokens, heads, head] = a[0].dims();
        let [_, patch_tokens, ..] = b[0].dims();
        let all = text_tokens + patch_tokens;
        let [q, k, v] = [0, 1, 2].map(|part| {
            let both = Tensor::cat(vec![a[part].clone(), b[part].clone()], 1);
            both.reshape([batch * all, heads, head])
        });
        let params = AttentionParams::new(head);
        let attended = attention(q, k, v, &Sequences::Equal(batch), params);
        let attended = attended.reshape([batch, all, heads * head]);
        let [x, y] = tokens;
        let of_text = attended.clone().narrow(1, 0, text_tokens);
        let of_patches = attended.narrow(1, text_tokens, patch_tokens);
        let x = text.finish(x, of_text, &parts[0]);
        let y = patches.finish(y, of_patches, &parts[1]);
        Tensor::cat(vec![x, y], 1)
    }
}

/// Times steps of a block in several recipes.
pub fn steps(bench: &mut Bench) {
    let full = Size {
        width: 3072,
        heads: 24,
        tokens: [512, 3584],
    };
    let tiny = Size {
        width: 32,
        heads: 2,
        tokens: [4, 12],
    };
    let size = bench.size(full, tiny);
    let [text, patches] = size.tokens;
    let setting = format!("{SETTING} {}, {text} + {patches} tokens", size.width);
    let dtype = bench.activation();
    for preset in ["bf16", "nvidia"] {
        for is_graph in [false, true] {
            let graph = if is_graph { ", graph" } else { "" };
            let name = format!("nvfp4::nn, {preset}{graph}");
            let recipe = Nvfp4Recipe::preset(preset).expect("a preset");
            let block = Block {
                streams: [0, 1].map(|_| Stream::new(size, &recipe, &bench.device)),
            };
            assign_layer_ids(&block);
            let tokens = size
                .tokens
                .map(|tokens| bench.constant([1, tokens, size.width], dtype));
            let condition = bench.constant([1, size.width], dtype);
            step::time(bench, [&setting, &name], block, is_graph, |block| {
                block.forward(tokens.clone(), condition.clone())
            });
        }
    }
}
