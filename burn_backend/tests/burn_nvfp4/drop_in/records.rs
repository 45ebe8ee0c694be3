//! Records that do not fit a module.

use burn_core::module::Module;
use burn_core::tensor::Device;
use burn_nn::activation::ActivationConfig;
use burn_nn::transformer as burns;
use burn_nvfp4::nn::attention::MultiHeadAttentionConfig;
use burn_nvfp4::nn::transformer::{
    PositionWiseFeedForwardConfig, TransformerDecoderConfig, TransformerEncoderConfig,
};
use burn_nvfp4::nn::{
    EmbeddingConfig, LayerNormConfig, LinearConfig, LinearLayout, RmsNormConfig, SwiGluConfig,
};

use super::{HEADS, HIDDEN, WIDTH};
use crate::module::saved;
use crate::support::{device, flex_only};

/// Asserts that `module` does not load the record of `other`, and that the error names `parameter`.
#[track_caller]
fn refuses(module: impl Module, other: impl Module, parameter: &str) {
    let error = module.try_load_record(saved(other)).unwrap_err();
    let text = error.to_string();
    assert!(text.contains(&format!("{parameter}: shape")), "{text}");
}

/// A record of another shape is an error that names the parameter, for each module.
#[test]
fn records_of_other_shapes_are_refused() {
    flex_only!();
    let device: Device = device();
    let linear = |d_output| LinearConfig::new(WIDTH, d_output);
    refuses(linear(48).init(&device), linear(64).init(&device), "weight");
    let columns = |d_output| linear(d_output).with_layout(LinearLayout::Col);
    let (narrow, wide) = (columns(48).init(&device), columns(64).init(&device));
    refuses(narrow, wide, "weight");
    let glu = |d_output| SwiGluConfig::new(WIDTH, d_output).init(&device);
    refuses(glu(48), glu(64), "linear_inner.weight");
    let rms = |width| RmsNormConfig::new(width).init(&device);
    refuses(rms(32), rms(16), "gamma");
    let layer = |width| LayerNormConfig::new(width).init(&device);
    refuses(layer(32), layer(16), "beta");
    let table = |rows| EmbeddingConfig::new(rows, WIDTH).init(&device);
    refuses(table(7), table(8), "weight");
    let feed_forward = |hidden| PositionWiseFeedForwardConfig::new(WIDTH, hidden).init(&device);
    refuses(feed_forward(48), feed_forward(64), "linear_outer.weight");
    let attention = |width| MultiHeadAttentionConfig::new(width, HEADS).init(&device);
    refuses(attention(32), attention(16), "query.bias");
    let encoder = |hidden| TransformerEncoderConfig::new(WIDTH, hidden, HEADS, 2).init(&device);
    let parameter = "layers.1.pwff.linear_inner.weight";
    refuses(encoder(HIDDEN), encoder(64), parameter);
    let decoder = |hidden| TransformerDecoderConfig::new(WIDTH, hidden, HEADS, 2).init(&device);
    refuses(decoder(HIDDEN), decoder(64), parameter);
    // A record of burn-nn's module.
    let other = burns::TransformerEncoderConfig::new(WIDTH, 64, HEADS, 2)
        .with_activation(ActivationConfig::Relu)
        .init(&device);
    refuses(encoder(HIDDEN), other, parameter);
}
