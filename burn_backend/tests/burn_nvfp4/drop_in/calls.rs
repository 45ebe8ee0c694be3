//! Calls of burn-nn's modules, compiled for both crates: only the path of the module differs.

use burn_core::module::Module;
use burn_core::tensor::{Bool, Device, Int, Tensor};

use super::{BATCH, HEADS, HIDDEN, MEMORY, TIME, WIDTH, first, input, near, padding, same, thirds};
use crate::support::{counted, device, flex_only, values};

/// Makes a module of functions that use `$nn`.
macro_rules! calls {
    ($name:ident, $($nn:ident)::+) => {
        mod $name {
            use super::*;
            use $($nn)::+::loss::{CrossEntropyLoss, CrossEntropyLossConfig};
            use $($nn)::+::{
                Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig,
                RmsNorm, RmsNormConfig, SwiGlu, SwiGluConfig,
            };
            use $($nn)::+::attention::{
                MhaCache, MhaInput, MhaOutput, MultiHeadAttention, MultiHeadAttentionConfig,
                generate_autoregressive_mask, generate_padding_mask,
            };
            use $($nn)::+::transformer::{
                PositionWiseFeedForward, PositionWiseFeedForwardConfig, TransformerDecoder,
                TransformerDecoderAutoregressiveCache, TransformerDecoderConfig,
                TransformerDecoderInput, TransformerDecoderLayer,
                TransformerDecoderLayerAutoregressiveCache, TransformerEncoder,
                TransformerEncoderAutoregressiveCache, TransformerEncoderConfig,
                TransformerEncoderInput, TransformerEncoderLayer,
                TransformerEncoderLayerAutoregressiveCache,
            };

            type Pad = Tensor<2, Bool>;
            type Mask = Tensor<3, Bool>;

            /// Types of burn-nn's functions.
            #[allow(clippy::type_complexity, reason = "one type per function")]
            pub fn signatures() {
                let _: fn(&LinearConfig, &Device) -> Linear = LinearConfig::init;
                let _: fn(&Linear, Tensor<3>) -> Tensor<3> = Linear::forward;
                let _: fn(&SwiGluConfig, &Device) -> SwiGlu = SwiGluConfig::init;
                let _: fn(&SwiGlu, Tensor<3>) -> Tensor<3> = SwiGlu::forward;
                let _: fn(&LayerNormConfig, &Device) -> LayerNorm = LayerNormConfig::init;
                let _: fn(&LayerNorm, Tensor<3>) -> Tensor<3> = LayerNorm::forward;
                let _: fn(&RmsNormConfig, &Device) -> RmsNorm = RmsNormConfig::init;
                let _: fn(&RmsNorm, Tensor<3>) -> Tensor<3> = RmsNorm::forward;
                let _: fn(&EmbeddingConfig, &Device) -> Embedding = EmbeddingConfig::init;
                let _: fn(&Embedding, Tensor<2, Int>) -> Tensor<3> = Embedding::forward;
                let _: fn(&CrossEntropyLossConfig, &Device) -> CrossEntropyLoss =
                    CrossEntropyLossConfig::init;
                let _: fn(Option<usize>, &Device) -> CrossEntropyLoss = CrossEntropyLoss::new;
                let _: fn(&CrossEntropyLoss, Tensor<2>, Tensor<1, Int>) -> Tensor<1> =
                    CrossEntropyLoss::forward;

                let _: fn(usize, usize, &Device) -> Mask = generate_autoregressive_mask;
                let _: fn(Tensor<3>) -> MhaInput = MhaInput::self_attn;
                let _: fn(Tensor<3>, Tensor<3>, Tensor<3>) -> MhaInput = MhaInput::new;
                let _: fn(MhaInput, Pad) -> MhaInput = MhaInput::mask_pad;
                let _: fn(MhaInput, Mask) -> MhaInput = MhaInput::mask_attn;
                let _: fn(&MultiHeadAttention, MhaInput) -> MhaOutput = MultiHeadAttention::forward;
                let _: fn(&MultiHeadAttention, MhaInput, &mut MhaCache) -> MhaOutput =
                    MultiHeadAttention::forward_cache;
                let _: fn(&PositionWiseFeedForward, Tensor<3>) -> Tensor<3> =
                    PositionWiseFeedForward::forward;

                type Encoding = TransformerEncoderInput;
                let _: fn(Encoding, Pad) -> Encoding = Encoding::mask_pad;
                let _: fn(Encoding, Mask) -> Encoding = Encoding::mask_attn;
                let _: fn(&TransformerEncoder, Encoding) -> Tensor<3> = TransformerEncoder::forward;
                let _: fn(
                    &TransformerEncoder,
                    Encoding,
                    &mut TransformerEncoderAutoregressiveCache,
                ) -> Tensor<3> = TransformerEncoder::forward_autoregressive_inference;
                type Layer = TransformerEncoderLayer;
                let _: fn(&TransformerEncoderConfig, &Device) -> Layer = Layer::new;
                let _: fn(&Layer, Tensor<3>, Option<Pad>, Option<Mask>) -> Tensor<3> =
                    Layer::forward;
                let _: fn(
                    &Layer,
                    Tensor<3>,
                    Option<Pad>,
                    Option<Mask>,
                    &mut TransformerEncoderLayerAutoregressiveCache,
                ) -> Tensor<3> = Layer::forward_autoregressive_inference;

                type Decoding = TransformerDecoderInput;
                let _: fn(Decoding, Pad) -> Decoding = Decoding::target_mask_pad;
                let _: fn(Decoding, Mask) -> Decoding = Decoding::target_mask_attn;
                let _: fn(Decoding, Pad) -> Decoding = Decoding::memory_mask_pad;
                let _: fn(Decoding, Mask) -> Decoding = Decoding::memory_mask_attn;
                let _: fn(&TransformerDecoder, Decoding) -> Tensor<3> = TransformerDecoder::forward;
                let _: fn(
                    &TransformerDecoder,
                    Decoding,
                    &mut TransformerDecoderAutoregressiveCache,
                ) -> Tensor<3> = TransformerDecoder::forward_autoregressive_inference;
                type DecoderLayer = TransformerDecoderLayer;
                let _: fn(&TransformerDecoderConfig, &Device) -> DecoderLayer = DecoderLayer::new;
                let _: fn(&DecoderLayer, Decoding) -> Decoding = DecoderLayer::forward;
                let _: fn(
                    &DecoderLayer,
                    Decoding,
                    &mut TransformerDecoderLayerAutoregressiveCache,
                ) -> Decoding = DecoderLayer::forward_autoregressive_inference;
            }

            pub fn attention(device: &Device) -> MultiHeadAttention {
                MultiHeadAttentionConfig::new(WIDTH, HEADS).init(device)
            }

            pub fn encoder(device: &Device) -> TransformerEncoder {
                TransformerEncoderConfig::new(WIDTH, HIDDEN, HEADS, 2).init(device)
            }

            pub fn decoder(device: &Device) -> TransformerDecoder {
                TransformerDecoderConfig::new(WIDTH, HIDDEN, HEADS, 2).init(device)
            }

            pub fn feed_forward(device: &Device) -> PositionWiseFeedForward {
                PositionWiseFeedForwardConfig::new(WIDTH, HIDDEN).init(device)
            }

            pub fn of_attention(attention: &MultiHeadAttention, x: Tensor<3>) -> Vec<Tensor<3>> {
                let device = x.device();
                // A mask that is kept in an option, as models do, and combined with another one.
                let causal: Option<Mask> = Some(generate_autoregressive_mask(BATCH, TIME, &device));
                let mut input = MhaInput::self_attn(x.clone());
                if let Some(mask) = &causal {
                    input = input.mask_attn(mask.clone());
                }
                let causal = causal.unwrap().bool_or(thirds(TIME, TIME, &device));
                let both = MhaInput::new(x.clone(), x.clone(), x.clone()).mask_attn(causal);
                // Tokens 1 and 2 are words, 0 is padding.
                let words = vec![vec![1, 2, 1, 2, 1, 2], vec![2, 1, 2, 1]];
                let words = generate_padding_mask(0, words, None::<usize>, &device);
                let padded = MhaInput::self_attn(x.clone()).mask_pad(words.mask);
                let inputs = [input, both, padded];
                let mut found = Vec::from(inputs.map(|input| attention.forward(input).context));
                let mut cache = MhaCache::autoregressive();
                for time in 1..=TIME {
                    let input = MhaInput::self_attn(first(&x, time));
                    found.push(attention.forward_cache(input, &mut cache).context);
                }
                found
            }

            pub fn of_encoder(encoder: &TransformerEncoder, x: Tensor<3>) -> Vec<Tensor<3>> {
                let device = x.device();
                let layer = &encoder.layers[0];
                let mask: Mask = generate_autoregressive_mask(BATCH, TIME, &device);
                let input = TransformerEncoderInput::new(x.clone()).mask_attn(mask.clone());
                let mut found = vec![
                    encoder.forward(input),
                    layer.forward(x.clone(), None, None),
                    layer.forward(x.clone(), None, Some(mask)),
                    layer.forward(x.clone(), None, Some(thirds(TIME, TIME, &device))),
                    layer.forward(x.clone(), Some(padding(TIME, &device)), None),
                ];
                let mut cache = encoder.new_autoregressive_cache();
                let mut of_layer = TransformerEncoderLayerAutoregressiveCache::empty();
                for time in 1..=TIME {
                    let x = first(&x, time);
                    let mask = generate_autoregressive_mask(BATCH, time, &device);
                    let input = TransformerEncoderInput::new(x.clone()).mask_attn(mask.clone());
                    found.push(encoder.forward_autoregressive_inference(input, &mut cache));
                    let (mask, cache) = (Some(mask), &mut of_layer);
                    found.push(layer.forward_autoregressive_inference(x, None, mask, cache));
                }
                found
            }

            pub fn of_decoder(
                decoder: &TransformerDecoder,
                [x, memory]: [Tensor<3>; 2],
            ) -> Vec<Tensor<3>> {
                let device = x.device();
                let input = |time| {
                    TransformerDecoderInput::new(first(&x, time), memory.clone())
                        .target_mask_attn(generate_autoregressive_mask(BATCH, time, &device))
                        .memory_mask_attn(thirds(time, MEMORY, &device))
                };
                let mut found = vec![decoder.forward(input(TIME))];
                // The output of a layer is the input of the next.
                let mut next = input(TIME);
                for layer in &decoder.layers {
                    next = layer.forward(next);
                }
                found.push(decoder.forward(next));
                let mut cache = decoder.new_autoregressive_cache();
                let mut of_layer = TransformerDecoderLayerAutoregressiveCache::empty();
                for time in 1..=TIME {
                    let step = decoder.forward_autoregressive_inference(input(time), &mut cache);
                    found.push(step);
                    let layer = &decoder.layers[0];
                    layer.forward_autoregressive_inference(input(time), &mut of_layer);
                }
                found
            }
        }
    };
}

calls!(ours, burn_nvfp4::nn);
calls!(burns, burn_nn);

fn all_near(what: &str, found: Vec<Tensor<3>>, expected: Vec<Tensor<3>>) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (index, (found, expected)) in found.into_iter().zip(expected).enumerate() {
        near(&format!("{what}, {index}"), found, expected);
    }
}

#[test]
fn calls_of_burn_nn_compile_and_give_its_results() {
    flex_only!();
    ours::signatures();
    burns::signatures();
    let device = device();
    let (x, memory) = (input(TIME, 1, &device), input(MEMORY, 2, &device));
    let (theirs, own) = same(burns::attention(&device), ours::attention(&device));
    let found = ours::of_attention(&own, x.clone());
    all_near("attention", found, burns::of_attention(&theirs, x.clone()));
    let (theirs, own) = same(burns::encoder(&device), ours::encoder(&device));
    let found = ours::of_encoder(&own, x.clone());
    all_near("encoder", found, burns::of_encoder(&theirs, x.clone()));
    let (theirs, own) = same(burns::decoder(&device), ours::decoder(&device));
    let found = ours::of_decoder(&own, [x.clone(), memory.clone()]);
    let expected = burns::of_decoder(&theirs, [x.clone(), memory]);
    all_near("decoder", found, expected);
    let (theirs, own) = same(burns::feed_forward(&device), ours::feed_forward(&device));
    near("feed-forward", own.forward(x.clone()), theirs.forward(x));
}

/// Attentions recognize the tensor of `generate_autoregressive_mask` and its clones, but no result
/// of an operation on it.
#[test]
fn causal_masks_are_recognized_until_they_are_changed() {
    use burn_nvfp4::nn::attention::generate_autoregressive_mask;
    let device = device();
    let _alone = counted::collect();
    // A size that no other test has.
    const LONG: usize = 9;
    let layer = ours::encoder(&device).valid().layers.remove(0);
    let x = input(LONG, 1, &device);
    let is_by_kernel = |mask: Tensor<3, Bool>| {
        counted::taken();
        values(layer.forward(x.clone(), None, Some(mask)));
        let rows = (BATCH * LONG) as u64;
        let is_attention = |work: &counted::Work| work.op == "attention" && work.rows == rows;
        counted::taken().iter().any(is_attention)
    };
    let mask = generate_autoregressive_mask(BATCH, LONG, &device);
    assert!(is_by_kernel(mask.clone()));
    assert!(is_by_kernel(mask.clone()), "again");
    let elsewhere = std::thread::spawn(|| mask).join().unwrap();
    assert!(
        is_by_kernel(elsewhere.clone()),
        "moved to a thread and back"
    );
    // In place, if no other clone is left.
    let later = elsewhere.bool_not();
    assert!(!is_by_kernel(later.clone()));
    assert!(!is_by_kernel(later.bool_not()), "equal, but another tensor");
    // The mask of a dropped one may have its memory.
    drop(generate_autoregressive_mask(BATCH, LONG, &device));
    assert!(!is_by_kernel(thirds(LONG, LONG, &device)));
    let burns = burn_nn::attention::generate_autoregressive_mask(BATCH, LONG, &device);
    assert!(!is_by_kernel(burns));
}
