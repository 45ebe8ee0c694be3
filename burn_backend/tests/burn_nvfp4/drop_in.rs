//! Modules with burn-nn's interface: the records, values and gradients of burn-nn's own modules.

mod calls;
mod losses;
mod masks;
mod records;

use burn_core::module::{Module, ModuleMapper, Param, ParamGroup};
use burn_core::tensor::{Bool, Device, Tensor, TensorData};
use burn_nn::activation::ActivationConfig;
use burn_nn::attention as burn_attention;
use burn_nn::transformer as burn_transformer;
use burn_nvfp4::Nvfp4Recipe;
use burn_nvfp4::nn::attention::{
    MhaCache, MhaInput, MultiHeadAttention, MultiHeadAttentionConfig, generate_autoregressive_mask,
};
use burn_nvfp4::nn::transformer::{
    PositionWiseFeedForwardConfig, TransformerDecoder, TransformerDecoderConfig,
    TransformerDecoderInput, TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
    TransformerEncoderLayer,
};
use burn_nvfp4::nn::{self, Linear, LinearConfig, LinearLayout, SwiGlu, SwiGluConfig};

use crate::attention::{argument, assert_near, tensor};
use crate::module::{assert_same_record, saved};
use crate::support::{burn_matmul_error, device, flex_only, skip_where_small_only, values};

const BATCH: usize = 2;
const TIME: usize = 6;
const MEMORY: usize = 4;
const WIDTH: usize = 32;
const HIDDEN: usize = 48;
const HEADS: usize = 2;

/// Replaces parameters by normal values, so that no two norms are alike.
struct Fill(u64);

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0 += 1;
        let (id, old, mapper) = param.consume();
        let new = tensor(old.dims(), self.0, &old.device().without_autodiff()) * 0.3;
        let new = match old.is_require_grad() {
            true => Tensor::from_inner(new).require_grad(),
            false => new,
        };
        Param::from_mapped_value(id, new, mapper)
    }
}

fn exempt() -> Nvfp4Recipe {
    Nvfp4Recipe::new().with_high_precision(Some(ParamGroup::all()))
}

/// Returns burn-nn's module with other parameters, and ours with the same, in high precision.
fn same<B: Module, O: Module>(burns: B, ours: O) -> (B, O) {
    let burns = burns.map(&mut Fill(0));
    let ours = ours.load_record(saved(burns.clone()));
    exempt().apply(&ours).unwrap();
    (burns, ours)
}

/// Returns the record of a module as a file.
fn bytes(module: impl Module) -> Vec<u8> {
    module.into_record().into_bytes().unwrap().to_vec()
}

fn near<const D: usize>(what: &str, found: Tensor<D>, expected: Tensor<D>) {
    assert_eq!(found.dims(), expected.dims(), "{what}");
    let tolerance = 10.0 * burn_matmul_error(1e-5);
    assert_near(what, &values(found), &values(expected), tolerance);
}

/// Padding at the start of the second sequence: its first query sees no other key of a causal
/// sequence.
fn padding(keys: usize, device: &Device) -> Tensor<2, Bool> {
    let values: Vec<bool> = (0..BATCH * keys).map(|at| at == keys).collect();
    Tensor::from_data(TensorData::new(values, [BATCH, keys]), device)
}

/// Mask that hides every third key, another one from each query.
fn thirds(queries: usize, keys: usize, device: &Device) -> Tensor<3, Bool> {
    let hides = |at: usize| (at / keys + at % keys).is_multiple_of(3);
    let values: Vec<bool> = (0..BATCH * queries * keys).map(hides).collect();
    Tensor::from_data(TensorData::new(values, [BATCH, queries, keys]), device)
}

/// Sets the outputs of positions that are padding to 0.
fn without_padding(x: Tensor<3>, padding: &Tensor<2, Bool>) -> Tensor<3> {
    let shape = x.dims();
    x.mask_fill(padding.clone().unsqueeze_dim::<3>(2).expand(shape), 0.0)
}

fn input(time: usize, seed: u64, device: &Device) -> Tensor<3> {
    tensor([BATCH, time, WIDTH], seed, device)
}

fn first<const D: usize>(x: &Tensor<D>, time: usize) -> Tensor<D> {
    x.clone().narrow(1, 0, time)
}

#[test]
fn linears_and_gates_replace_burn_nns() {
    flex_only!();
    let device = device();
    let x = input(TIME, 1, &device);
    for (layout, bias) in [(LinearLayout::Row, true), (LinearLayout::Col, false)] {
        let burns = burn_nn::LinearConfig::new(WIDTH, HIDDEN)
            .with_layout(layout)
            .with_bias(bias);
        let ours = LinearConfig::new(WIDTH, HIDDEN)
            .with_layout(layout)
            .with_bias(bias);
        assert_eq!(ours.initializer, burns.initializer);
        let (new_burns, new_ours): (_, Linear) = (burns.init(&device), ours.init(&device));
        let (burns, ours) = same(burns.init(&device), ours.init(&device));
        near("linear", ours.forward(x.clone()), burns.forward(x.clone()));
        // A new layer with the record of the other.
        let new_burns = new_burns.load_record(saved(ours.clone()));
        let new_ours = new_ours.load_record(saved(burns.clone()));
        exempt().apply(&new_ours).unwrap();
        let (weight, expected) = (values(ours.weight.val()), values(burns.weight.val()));
        assert_eq!(weight, expected);
        assert_eq!(values(new_burns.weight.val()), expected);
        assert_eq!(values(new_ours.weight.val()), expected);
        let expected = burns.forward(x.clone());
        near(
            "loaded by Burn",
            new_burns.forward(x.clone()),
            expected.clone(),
        );
        near("loaded", new_ours.forward(x.clone()), expected);
        // Burn 0.22 loads a weight in columns only into a layer that has no value yet, as in `same`.
        let loads_again = matches!(layout, LinearLayout::Row);
        match loads_again {
            true => assert_same_record(ours, burns),
            false => assert_eq!(bytes(ours), bytes(burns)),
        }

        let burns = burn_nn::SwiGluConfig::new(WIDTH, HIDDEN)
            .with_layout(layout)
            .with_bias(bias);
        let ours = SwiGluConfig::new(WIDTH, HIDDEN)
            .with_layout(layout)
            .with_bias(bias);
        let new_burns = burns.init(&device);
        let ours: SwiGlu = ours.init(&device);
        let (burns, ours) = same(burns.init(&device), ours);
        let expected = burns.forward(x.clone());
        near("swiglu", ours.forward(x.clone()), expected.clone());
        let new_burns = new_burns.load_record(saved(ours.clone()));
        near(
            "loaded by Burn",
            new_burns.forward(x.clone()),
            expected.clone(),
        );
        match loads_again {
            true => assert_same_record(ours.clone(), burns),
            false => assert_eq!(bytes(ours.clone()), bytes(burns)),
        }
        // Layers in different modes are computed one after the other.
        Nvfp4Recipe::new().apply(&ours.linear_outer).unwrap();
        let distance = ours.forward(x.clone()) - expected.clone();
        let distance = distance.abs().max().into_scalar::<f32>();
        let largest = expected.abs().max().into_scalar::<f32>();
        assert!(
            distance > 1e-3 * largest && distance < 0.6 * largest,
            "{distance}"
        );
    }
}

#[test]
fn feed_forwards_replace_burn_nns() {
    flex_only!();
    let device = device();
    let x = input(TIME, 1, &device);
    for activation in [
        ActivationConfig::Gelu,
        ActivationConfig::GeluApproximate,
        ActivationConfig::Relu,
    ] {
        let burns = burn_transformer::PositionWiseFeedForwardConfig::new(WIDTH, HIDDEN)
            .with_activation(activation.clone());
        let ours =
            PositionWiseFeedForwardConfig::new(WIDTH, HIDDEN).with_activation(activation.clone());
        assert_eq!(ours.dropout, burns.dropout);
        let (burns, ours) = same(burns.init(&device), ours.init(&device));
        let expected = burns.forward(x.clone());
        near(
            &format!("{activation:?}"),
            ours.forward(x.clone()),
            expected,
        );
        assert_same_record(ours, burns);
    }
}

fn attentions(
    quiet: bool,
    key_bias: bool,
    device: &Device,
) -> (burn_attention::MultiHeadAttention, MultiHeadAttention) {
    let burns = burn_attention::MultiHeadAttentionConfig::new(WIDTH, HEADS)
        .with_quiet_softmax(quiet)
        .with_key_bias(key_bias);
    let ours = MultiHeadAttentionConfig::new(WIDTH, HEADS)
        .with_quiet_softmax(quiet)
        .with_key_bias(key_bias);
    assert_eq!(
        (ours.dropout, ours.min_float),
        (burns.dropout, burns.min_float)
    );
    same(burns.init(device), ours.init(device))
}

#[test]
fn attention_replaces_burn_nns() {
    skip_where_small_only!();
    let device = device();
    for (quiet, key_bias) in [(false, true), (true, false)] {
        let (burns, ours) = attentions(quiet, key_bias, &device);
        let check = |what: &str, input: MhaInput, expected: burn_attention::MhaInput| {
            let (found, expected) = (ours.forward(input), burns.forward(expected));
            near(
                &format!("{what}: weights"),
                found.weights(),
                expected.weights,
            );
            near(what, found.context, expected.context);
        };
        let (x, memory) = (input(TIME, 1, &device), input(MEMORY, 2, &device));
        let own = || MhaInput::self_attn(x.clone());
        let burns_own = || burn_attention::MhaInput::self_attn(x.clone());
        let triangle = burn_attention::generate_autoregressive_mask(BATCH, TIME, &device);
        let (pad, thirds_mask) = (padding(TIME, &device), thirds(TIME, TIME, &device));
        check("plain", own(), burns_own());
        let expected = burns_own().mask_attn(triangle.clone());
        check("causal", own().causal(), expected.clone());
        let mask = generate_autoregressive_mask(BATCH, TIME, &device);
        check("burn's name", own().mask_attn(mask), expected.clone());
        let masked = own().mask_attn(triangle.clone());
        check("triangle", masked, expected.clone());
        let masked = own().mask_attn(triangle).mask_pad(pad.clone());
        check("causal, padded", masked, expected.mask_pad(pad.clone()));
        check(
            "masked",
            own().mask_pad(pad.clone()).mask_attn(thirds_mask.clone()),
            burns_own().mask_pad(pad).mask_attn(thirds_mask.clone()),
        );
        let one = thirds_mask.narrow(0, 0, 1);
        let expected = burns_own().mask_attn(one.clone());
        check("one mask", own().mask_attn(one), expected);

        let cross = || MhaInput::new(x.clone(), memory.clone(), memory.clone() * 0.5);
        let burns_cross =
            || burn_attention::MhaInput::new(x.clone(), memory.clone(), memory.clone() * 0.5);
        check("cross", cross(), burns_cross());
        let (pad, mask) = (padding(MEMORY, &device), thirds(TIME, MEMORY, &device));
        check(
            "masked cross",
            cross().mask_pad(pad.clone()).mask_attn(mask.clone()),
            burns_cross().mask_pad(pad).mask_attn(mask),
        );
        assert_same_record(ours, burns);
    }
}

#[test]
fn attention_caches_are_burn_nns() {
    skip_where_small_only!();
    let device = device();
    let (burns, ours) = attentions(false, true, &device);
    let (x, memory) = (input(TIME, 1, &device), input(MEMORY, 2, &device));
    let mut cache = MhaCache::autoregressive();
    let mut cross_cache = MhaCache::autoregressive_cross_attention();
    let mut burns_cache = burn_attention::MhaCache::autoregressive();
    let mut burns_cross = burn_attention::MhaCache::autoregressive_cross_attention();
    for time in 2..=TIME {
        let x = first(&x, time);
        let found = ours.forward_cache(MhaInput::self_attn(x.clone()), &mut cache);
        let expected = burn_attention::MhaInput::self_attn(x.clone());
        let expected = burns.forward_cache(expected, &mut burns_cache);
        // Ours are those of the queries that were computed.
        let new = if time == 2 { 2 } else { 1 };
        let weights = expected.weights.narrow(2, time - new, new);
        near("weights", found.weights(), weights);
        near("context", found.context, expected.context);

        let mask = thirds(time, MEMORY, &device);
        let found = MhaInput::new(x.clone(), memory.clone(), memory.clone());
        let found = ours.forward_cache(found.mask_attn(mask.clone()), &mut cross_cache);
        let expected = burn_attention::MhaInput::new(x, memory.clone(), memory.clone());
        let expected = burns.forward_cache(expected.mask_attn(mask), &mut burns_cross);
        near("cross", found.context, expected.context);
    }

    // Several positions in one call.
    let whole = ours.forward(MhaInput::self_attn(x.clone()).causal());
    let mut cache = MhaCache::autoregressive();
    let mut step = |time| {
        let input = MhaInput::self_attn(first(&x, time)).causal();
        ours.try_forward_cache(input, &mut cache)
    };
    step(2).unwrap();
    near("chunks", step(TIME).unwrap().context, whole.context);
    let refused = step(TIME);
    assert_eq!(argument(refused), "tensor", "no new position");
    let longer = MhaInput::new(x.clone(), memory.clone(), memory.clone());
    let mut fresh = MhaCache::autoregressive();
    let refused = ours.try_forward_cache(longer, &mut fresh);
    assert_eq!(argument(refused), "key", "keys grow with queries");
    let mut cache = MhaCache::autoregressive_cross_attention();
    let queries = first(&x, 2);
    let short = MhaInput::new(queries, memory.clone(), memory);
    ours.forward_cache(short, &mut cache);
    let other = MhaInput::new(first(&x, 3), x.clone(), x);
    let refused = ours.try_forward_cache(other, &mut cache);
    assert_eq!(
        argument(refused),
        "key",
        "other keys than those in the cache"
    );
}

/// In training, the weights that drop some keys are those of the output; `valid` drops nothing.
#[test]
fn dropout_is_of_the_weights() {
    flex_only!();
    let device = device().autodiff();
    let attention = MultiHeadAttentionConfig::new(WIDTH, HEADS)
        .with_dropout(0.5)
        .with_recipe(exempt())
        .init(&device);
    exempt().apply(&attention).unwrap();
    let zeros = |weights: Tensor<4>| values(weights).iter().filter(|w| **w == 0.0).count();
    let x = input(TIME, 1, &device.clone().without_autodiff());
    let valid = attention.valid().forward(MhaInput::self_attn(x.clone()));
    assert_eq!(zeros(valid.weights()), 0);
    let x = Tensor::from_inner(x);
    let training = attention.forward(MhaInput::self_attn(x.clone()));
    let weights = training.weights();
    let found = zeros(weights.clone().inner());
    assert!((20..124).contains(&found), "{found} of 144 were dropped");
    // The output is that of the same weights.
    let v = attention.value.forward(x);
    let v = v.reshape([BATCH, TIME, HEADS, WIDTH / HEADS]);
    let context = weights.matmul(v.swap_dims(1, 2)).swap_dims(1, 2);
    let expected = attention
        .output
        .forward(context.reshape([BATCH, TIME, WIDTH]));
    near("dropout", training.context.inner(), expected.inner());
}

/// Self-attention quantizes its input once, as one layer; projections that differ are separate.
#[test]
fn self_attention_is_one_projection() {
    flex_only!();
    let device = device().autodiff();
    let x = input(TIME, 1, &device.clone().without_autodiff());
    let x = Tensor::from_inner(x).require_grad();
    let config = MultiHeadAttentionConfig::new(WIDTH, HEADS).with_dropout(0.0);
    for (config, expected) in [
        (config.clone(), [1, 0, 0, 1]),
        (config.with_value_bias(false), [1, 1, 1, 1]),
    ] {
        let attention = config.init(&device);
        let output = attention.forward(MhaInput::self_attn(x.clone()).causal());
        let MultiHeadAttention {
            query,
            key,
            value,
            output: out,
            ..
        } = &attention;
        let offsets = [query, key, value, out].map(|layer| layer.state.rng_state().offset);
        assert_eq!(offsets, expected);
        let grads = output.context.square().sum().backward();
        for layer in [query, key, value, out] {
            let grad = values(layer.weight.grad(&grads).unwrap());
            assert!(grad.iter().any(|x| *x != 0.0) && grad.iter().all(|x| x.is_finite()));
        }
    }
}

fn encoders(
    norm_first: bool,
    device: &Device,
) -> (burn_transformer::TransformerEncoder, TransformerEncoder) {
    let burns = burn_transformer::TransformerEncoderConfig::new(WIDTH, HIDDEN, HEADS, 2)
        .with_norm_first(norm_first)
        .with_quiet_softmax(norm_first);
    let ours = TransformerEncoderConfig::new(WIDTH, HIDDEN, HEADS, 2)
        .with_norm_first(norm_first)
        .with_quiet_softmax(norm_first);
    assert_eq!(
        (ours.dropout, ours.layer_norm_eps),
        (burns.dropout, burns.layer_norm_eps)
    );
    same(burns.init(device), ours.init(device))
}

#[test]
fn encoders_replace_burn_nns() {
    flex_only!();
    use burn_transformer::TransformerEncoderInput as BurnInput;
    let device = device();
    let x = input(TIME, 1, &device);
    let pad = padding(TIME, &device);
    for norm_first in [false, true] {
        let (burns, ours) = encoders(norm_first, &device);
        let own = || TransformerEncoderInput::new(x.clone());
        let ours_triangle = |time| generate_autoregressive_mask(BATCH, time, &device);
        let triangle = |time| burn_attention::generate_autoregressive_mask(BATCH, time, &device);
        let expected = burns.forward(BurnInput::new(x.clone()));
        near("plain", ours.forward(own()), expected);
        let expected = burns.forward(BurnInput::new(x.clone()).mask_attn(triangle(TIME)));
        near("causal", ours.forward(own().causal()), expected.clone());
        let found = own().mask_attn(ours_triangle(TIME));
        near("burn's name", ours.forward(found), expected);
        let expected = BurnInput::new(x.clone()).mask_pad(pad.clone());
        let expected = burns.forward(expected.mask_attn(triangle(TIME)));
        let found = own().mask_pad(pad.clone()).mask_attn(triangle(TIME));
        near("masked", ours.forward(found), expected.clone());
        let found = own().mask_pad(pad.clone()).mask_attn(ours_triangle(TIME));
        let [found, expected] = [ours.forward(found), expected].map(|x| without_padding(x, &pad));
        near("causal, padded", found, expected);
        let mask = Some(ours_triangle(TIME));
        let layer = ours.layers[0].forward(x.clone(), None, mask);
        let expected = burns.layers[0].forward(x.clone(), None, Some(triangle(TIME)));
        near("causal layer", layer, expected);
        let layer = ours.layers[0].forward(x.clone(), Some(pad.clone()), None);
        let expected = burns.layers[0].forward(x.clone(), Some(pad.clone()), None);
        near("padded layer", layer, expected);

        let (mut cache, mut burns_cache) = (
            ours.new_autoregressive_cache(),
            burns.new_autoregressive_cache(),
        );
        for time in 1..=TIME {
            let (x, pad) = (first(&x, time), padding(time, &device));
            let found = TransformerEncoderInput::new(x.clone())
                .mask_pad(pad.clone())
                .mask_attn(ours_triangle(time));
            let found = ours.forward_autoregressive_inference(found, &mut cache);
            let expected = BurnInput::new(x).mask_pad(pad).mask_attn(triangle(time));
            let expected = burns.forward_autoregressive_inference(expected, &mut burns_cache);
            near("cached", found, expected);
        }
        let mut cache = ours.new_autoregressive_cache();
        let mut step = |time| {
            let input = TransformerEncoderInput::new(first(&x, time)).causal();
            ours.forward_autoregressive_inference(input, &mut cache)
        };
        step(4);
        near("chunks", step(TIME), ours.forward(own().causal()));
        assert_same_record(ours, burns);
    }
}

#[test]
fn decoders_replace_burn_nns() {
    flex_only!();
    use burn_transformer::TransformerDecoderInput as BurnInput;
    let device = device();
    let (x, memory) = (input(TIME, 1, &device), input(MEMORY, 2, &device));
    for norm_first in [false, true] {
        let burns = burn_transformer::TransformerDecoderConfig::new(WIDTH, HIDDEN, HEADS, 2)
            .with_norm_first(norm_first);
        let ours =
            TransformerDecoderConfig::new(WIDTH, HIDDEN, HEADS, 2).with_norm_first(norm_first);
        let ours: TransformerDecoder = ours.init(&device);
        let (burns, ours) = same(burns.init(&device), ours);
        let found = TransformerDecoderInput::new(x.clone(), memory.clone());
        let expected = BurnInput::new(x.clone(), memory.clone());
        near("plain", ours.forward(found), burns.forward(expected));

        let masked = |time| {
            let triangle = burn_attention::generate_autoregressive_mask(BATCH, time, &device);
            let mask = thirds(time, MEMORY, &device);
            let (pad, memory_pad) = (padding(time, &device), padding(MEMORY, &device));
            let expected = BurnInput::new(first(&x, time), memory.clone())
                .target_mask_attn(triangle.clone())
                .target_mask_pad(pad.clone())
                .memory_mask_attn(mask.clone())
                .memory_mask_pad(memory_pad.clone());
            let found = TransformerDecoderInput::new(first(&x, time), memory.clone())
                .target_mask_attn(triangle)
                .target_mask_pad(pad)
                .memory_mask_attn(mask)
                .memory_mask_pad(memory_pad);
            (found, expected)
        };
        let (found, expected) = masked(TIME);
        near("masked", ours.forward(found), burns.forward(expected));

        let (mut cache, mut burns_cache) = (
            ours.new_autoregressive_cache(),
            burns.new_autoregressive_cache(),
        );
        for time in 1..=TIME {
            let (found, expected) = masked(time);
            let found = ours.forward_autoregressive_inference(found, &mut cache);
            let expected = burns.forward_autoregressive_inference(expected, &mut burns_cache);
            near("cached", found, expected);
        }
        // By the kernels.
        let causal =
            |time| TransformerDecoderInput::new(first(&x, time), memory.clone()).target_causal();
        let whole = ours.forward(causal(TIME));
        let expected = BurnInput::new(x.clone(), memory.clone()).target_mask_attn(
            burn_attention::generate_autoregressive_mask(BATCH, TIME, &device),
        );
        near("causal", whole.clone(), burns.forward(expected));
        let mask = generate_autoregressive_mask(BATCH, TIME, &device);
        let found = TransformerDecoderInput::new(x.clone(), memory.clone()).target_mask_attn(mask);
        near("burn's name", ours.forward(found), whole.clone());
        let mut cache = ours.new_autoregressive_cache();
        ours.forward_autoregressive_inference(causal(3), &mut cache);
        let found = ours.forward_autoregressive_inference(causal(TIME), &mut cache);
        near("chunks", found, whole);
        assert_same_record(ours, burns);
    }
}

/// Gradients of one layer with the kernels. (Burn's gradient of the exact GELU is that of the
/// approximation, so the layer has the latter.)
#[test]
fn gradients_are_burn_nns() {
    flex_only!();
    let device = device().autodiff();
    for norm_first in [false, true] {
        let burns = burn_transformer::TransformerEncoderConfig::new(WIDTH, HIDDEN, HEADS, 1)
            .with_dropout(0.0)
            .with_activation(ActivationConfig::GeluApproximate)
            .with_norm_first(norm_first);
        let burns = burn_transformer::TransformerEncoderLayer::new(&burns, &device);
        let ours = TransformerEncoderConfig::new(WIDTH, HIDDEN, HEADS, 1)
            .with_dropout(0.0)
            .with_activation(ActivationConfig::GeluApproximate)
            .with_norm_first(norm_first);
        let ours = TransformerEncoderLayer::new(&ours, &device);
        let (burns, ours) = same(burns, ours);
        let leaf = |seed| Tensor::from_inner(input(TIME, seed, &device.clone().without_autodiff()));
        // Gradients of all parameters, and of the input.
        macro_rules! gradients {
            ($layer:ident) => {{
                let x = leaf(1).require_grad();
                let y = $layer.forward(x.clone(), None, None);
                let grads = (y * leaf(2)).sum().backward();
                let mut found = vec![values(x.grad(&grads).unwrap())];
                let (mha, pwff) = (&$layer.mha, &$layer.pwff);
                for linear in [&mha.query, &mha.key, &mha.value, &mha.output] {
                    found.push(values(linear.weight.grad(&grads).unwrap()));
                    let bias = linear.bias.as_ref().unwrap();
                    found.push(values(bias.grad(&grads).unwrap()));
                }
                for linear in [&pwff.linear_inner, &pwff.linear_outer] {
                    found.push(values(linear.weight.grad(&grads).unwrap()));
                    let bias = linear.bias.as_ref().unwrap();
                    found.push(values(bias.grad(&grads).unwrap()));
                }
                for norm in [&$layer.norm_1, &$layer.norm_2] {
                    found.push(values(norm.gamma.grad(&grads).unwrap()));
                    let beta = norm.beta.as_ref().unwrap();
                    found.push(values(beta.grad(&grads).unwrap()));
                }
                found
            }};
        }
        let (found, expected) = (gradients!(ours), gradients!(burns));
        let largest = |x: &[f32]| x.iter().fold(0f32, |m, v| m.max(v.abs()));
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            // Keys' bias: a constant of all scores, whose gradient is rounding.
            let is_zero = index == 4;
            if is_zero {
                assert!(largest(found) < 1e-4 && largest(expected) < 1e-4);
                continue;
            }
            assert_near(&format!("gradient {index}"), found, expected, 2e-4);
        }
    }
}

#[test]
fn other_names_are_burn_nns() {
    flex_only!();
    let device = device();
    let x = input(TIME, 1, &device);
    let dropped: burn_nn::Dropout = nn::DropoutConfig::new(0.5).init();
    assert_eq!(values(dropped.forward(x.clone())), values(x.clone()));
    let rotated = nn::RotaryEncodingConfig::new(TIME, WIDTH).init(&device);
    assert_eq!(rotated.forward(x.clone()).dims(), x.dims());
    let _: burn_nn::loss::MseLoss = nn::loss::MseLoss::new();
    let batch: burn_nn::BatchNorm = nn::norm::BatchNormConfig::new(TIME).init(&device);
    assert_eq!(batch.forward(x.clone()).dims(), x.dims());
}

#[test]
fn bad_arguments_of_configurations_are_named() {
    flex_only!();
    let device = device();
    let config = TransformerEncoderConfig::new(WIDTH, HIDDEN, HEADS, 1);
    let refused = |config: &TransformerEncoderConfig| argument(config.try_init(&device));
    assert_eq!(refused(&config.clone().with_dropout(1.0)), "dropout");
    let eps = config.clone().with_layer_norm_eps(0.0);
    assert_eq!(refused(&eps), "layer_norm_eps");
    for (widths, name) in [
        ([24, 48, 2], "d_model"),
        ([32, 40, 2], "d_ff"),
        ([32, 48, 3], "n_heads"),
        ([32, 48, 0], "n_heads"),
    ] {
        let [d_model, d_ff, heads] = widths;
        let config = TransformerEncoderConfig::new(d_model, d_ff, heads, 1);
        assert_eq!(refused(&config), name);
        let config = TransformerDecoderConfig::new(d_model, d_ff, heads, 1);
        assert_eq!(argument(config.try_init(&device)), name);
    }
    assert_eq!(
        argument(LinearConfig::new(20, 16).try_init(&device)),
        "d_input"
    );
    assert_eq!(
        argument(SwiGluConfig::new(16, 20).try_init(&device)),
        "d_output"
    );
}

#[test]
fn bad_inputs_are_named() {
    flex_only!();
    let device = device();
    let (x, memory) = (input(TIME, 1, &device), input(MEMORY, 2, &device));
    let narrow = tensor::<3>([BATCH, TIME, 16], 1, &device);
    let (_, attention) = attentions(false, true, &device);
    let refused = |input: MhaInput| argument(attention.try_forward(input));
    let own = || MhaInput::self_attn(x.clone());
    assert_eq!(refused(MhaInput::self_attn(narrow.clone())), "tensor");
    let [q, k] = [&x, &memory].map(|x| x.clone());
    let input = MhaInput::new(narrow.clone(), k.clone(), k.clone());
    assert_eq!(refused(input), "query");
    let input = MhaInput::new(q.clone(), narrow.clone(), k.clone());
    assert_eq!(refused(input), "key");
    let input = MhaInput::new(q.clone(), k.clone(), q.clone());
    assert_eq!(refused(input), "value");
    let half = k.clone().cast(burn_core::tensor::FloatDType::BF16);
    assert_eq!(refused(MhaInput::new(q.clone(), half.clone(), half)), "key");
    let input = MhaInput::new(q.clone(), k.clone(), k.clone()).causal();
    assert_eq!(refused(input), "query", "more queries than keys");
    assert_eq!(
        refused(own().mask_pad(padding(MEMORY, &device))),
        "mask_pad"
    );
    let mask = thirds(TIME, MEMORY, &device);
    assert_eq!(refused(own().mask_attn(mask.clone())), "mask_attn");
    let triangle = |batch, time| generate_autoregressive_mask(batch, time, &device);
    assert_eq!(refused(own().mask_attn(triangle(BATCH, 1))), "mask_attn");
    assert_eq!(refused(own().mask_attn(triangle(3, TIME))), "mask_attn");

    let (_, encoder) = encoders(false, &device);
    let bad = TransformerEncoderInput::new(x.clone()).mask_attn(mask.clone());
    assert_eq!(argument(encoder.try_forward(bad)), "mask_attn");
    let short = || Param::from_tensor(Tensor::<1>::ones([16], &device));
    let mut bad = encoder.clone();
    bad.layers[0].norm_2.gamma = short();
    let bad = bad.try_forward(TransformerEncoderInput::new(x.clone()));
    assert_eq!(argument(bad), "norm_2.gamma");
    let mut cache = TransformerEncoderConfig::new(WIDTH, HIDDEN, HEADS, 1)
        .init(&device)
        .new_autoregressive_cache();
    let whole = TransformerEncoderInput::new(x.clone());
    let bad = encoder.try_forward_autoregressive_inference(whole, &mut cache);
    assert_eq!(argument(bad), "cache");

    let decoder = TransformerDecoderConfig::new(WIDTH, HIDDEN, HEADS, 1).init(&device);
    let refused = |input: TransformerDecoderInput| argument(decoder.try_forward(input));
    let whole = || TransformerDecoderInput::new(x.clone(), memory.clone());
    let bad = TransformerDecoderInput::new(narrow.clone(), memory.clone());
    assert_eq!(refused(bad), "target");
    assert_eq!(
        refused(TransformerDecoderInput::new(x.clone(), narrow)),
        "memory"
    );
    assert_eq!(refused(whole().target_mask_attn(mask)), "target_mask_attn");
    let bad = whole().memory_mask_attn(triangle(BATCH, TIME));
    assert_eq!(refused(bad), "memory_mask_attn");
    let mut bad = decoder.clone();
    bad.layers[0].norm_3.beta = Some(short());
    assert_eq!(argument(bad.try_forward(whole())), "norm_3.beta");
    let bad = whole().memory_mask_pad(padding(TIME, &device));
    assert_eq!(refused(bad), "memory_mask_pad");
    let mut cache = decoder.new_autoregressive_cache();
    decoder.forward_autoregressive_inference(whole(), &mut cache);
    let bad = decoder.try_forward_autoregressive_inference(whole(), &mut cache);
    assert_eq!(argument(bad), "target", "no new position");
}
