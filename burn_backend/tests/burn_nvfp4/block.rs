//! Attention, feed-forwards and blocks, and the burn-nn layers that they replace.

use burn_core::module::{Module, ModuleVisitor, Param, ParamGroup};
use burn_core::tensor::{Bool, DType, Device, Tensor, TensorData};
use burn_nn::activation::{SwiGlu, SwiGluConfig};
use burn_nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn_nn::transformer::PositionWiseFeedForwardConfig;
use burn_nn::{Linear, LinearConfig, RmsNormConfig};
use burn_nvfp4::nn::{RmsNorm, RopeCacheConfig};
use burn_nvfp4::{
    Nvfp4Attention, Nvfp4AttentionConfig, Nvfp4FeedForward, Nvfp4Linear, Nvfp4Recipe, Nvfp4SwiGlu,
    Nvfp4SwiGluConfig, Nvfp4TransformerBlockConfig,
};

use crate::support::{Matrix, device, gaussian, skip_where_small_only, values};

fn exempt() -> Nvfp4Recipe {
    Nvfp4Recipe::new().with_high_precision(Some(ParamGroup::all()))
}

fn input(batch: usize, time: usize, width: usize, device: &Device) -> Tensor<3> {
    let data = TensorData::new(gaussian(batch * time * width, 3), [batch, time, width]);
    Tensor::from_data(data, device)
}

fn assert_close(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(0f32, |m, v| m.max(v.abs()));
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!((f - e).abs() < 3e-3 * scale, "{what}[{i}]: {f}, not {e}");
    }
}

#[test]
fn attention_is_burn_nns() {
    skip_where_small_only!();
    let device = device();
    let (batch, time, width, heads) = (2, 9, 32, 4);
    for (causal, quiet, query_bias) in [(false, false, true), (true, true, false)] {
        let burn = MultiHeadAttentionConfig::new(width, heads)
            .with_quiet_softmax(quiet)
            .with_query_bias(query_bias)
            .init(&device);
        let x = input(batch, time, width, &device);
        let padding: Vec<bool> = (0..batch * time).map(|i| i == time - 1).collect();
        let padding =
            Tensor::<2, Bool>::from_data(TensorData::new(padding, [batch, time]), &device);
        let mut arguments = MhaInput::self_attn(x.clone()).mask_pad(padding.clone());
        if causal {
            let mask: Vec<bool> = (0..batch * time * time)
                .map(|i| i % time > i / time % time)
                .collect();
            let mask = TensorData::new(mask, [batch, time, time]);
            arguments = arguments.mask_attn(Tensor::from_data(mask, &device));
        }
        let expected = values(burn.forward(arguments).context);
        let ids = (burn.output.weight.id, burn.output.bias.as_ref().unwrap().id);
        let parts = |attention: &MultiHeadAttention| {
            let MultiHeadAttention {
                query, key, value, ..
            } = attention;
            [query, key, value].map(|linear| {
                let bias = linear.bias.as_ref().map(|bias| bias.id);
                (linear.weight.id, bias)
            })
        };
        let part_ids = parts(&burn);
        let key = values(burn.key.weight.val());
        let ours = Nvfp4Attention::from_multi_head_attention(burn, &exempt()).unwrap();
        exempt().apply(&ours).unwrap();
        assert_eq!(ours.out.weight.id, ids.0);
        let positions = RopeCacheConfig::new(time, width / heads)
            .with_causal(causal)
            .with_rotary(None)
            .init(&device);
        let found = ours.try_forward(x, &positions, Some(padding)).unwrap();
        assert_close("attention", &values(found), &expected);
        let back: MultiHeadAttention = ours.into_multi_head_attention().unwrap();
        assert_eq!(back.output.weight.id, ids.0);
        assert_eq!(back.output.bias.as_ref().unwrap().id, ids.1);
        assert_eq!(values(back.key.weight.val()), key);
        assert_eq!(back.quiet_softmax, quiet);
        for (found, expected) in parts(&back).into_iter().zip(part_ids) {
            assert_eq!(found.0, expected.0);
            // A bias that was missing is now zero, with a new id.
            assert!(found.1 == expected.1 || expected.1.is_none());
        }
        if !query_bias {
            let bias = values(back.query.bias.unwrap().val());
            assert!(bias.iter().all(|v| *v == 0.0));
        }
    }
}

/// Heads that share keys and values equal heads with identical keys and values.
#[test]
fn grouped_queries_share_keys() {
    skip_where_small_only!();
    let device = device();
    let (width, heads, kv_heads, head) = (64, 4, 2, 16);
    let config = Nvfp4AttentionConfig::new(width, heads).with_recipe(exempt());
    let shared = config.clone().with_kv_heads(Some(kv_heads)).init(&device);
    let mut all = config.init(&device);
    exempt().apply(&shared).unwrap();
    exempt().apply(&all).unwrap();
    let weight = shared.qkv.weight.val();
    assert_eq!(weight.dims(), [width, (heads + 2 * kv_heads) * head]);
    let column = |first: usize| weight.clone().narrow(1, first * head, head);
    let mut columns: Vec<Tensor<2>> = (0..heads).map(column).collect();
    for first in [heads, heads + kv_heads] {
        columns.extend((0..heads).map(|i| column(first + i / (heads / kv_heads))));
    }
    all.qkv.weight = Param::from_tensor(Tensor::cat(columns, 1));
    all.out.weight = Param::from_tensor(shared.out.weight.val());
    let positions = RopeCacheConfig::new(8, head).init(&device);
    let x = input(2, 8, width, &device);
    let expected = values(all.forward(x.clone(), &positions));
    assert_close("shared", &values(shared.forward(x, &positions)), &expected);
    let error = shared.into_multi_head_attention().unwrap_err().to_string();
    assert!(error.contains("`kv_heads`"), "{error}");
}

/// The score of a query and a key depends only on the difference of their positions; lengths are
/// preserved.
#[test]
fn rotations_are_relative() {
    let device = device();
    let positions = RopeCacheConfig::new(16, 8).init(&device);
    let repeat = |seed| {
        let row = gaussian(8, seed);
        let all: Vec<f32> = row.iter().copied().cycle().take(16 * 8).collect();
        let x = Tensor::<4>::from_data(TensorData::new(all, [1, 1, 16, 8]), &device);
        (row, values(positions.rotate(x)))
    };
    let ((q_row, q), (k_row, k)) = (repeat(1), repeat(2));
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    let score = |query: usize, key: usize| dot(&q[query * 8..][..8], &k[key * 8..][..8]);
    let length = dot(&q_row, &q_row);
    for i in 0..16 {
        let row = &q[i * 8..][..8];
        assert!((dot(row, row) - length).abs() < 1e-4 * length);
        assert!((score(i, i) - dot(&q_row, &k_row)).abs() < 1e-4);
    }
    for i in 0..12 {
        assert!((score(i + 3, i) - score(3, 0)).abs() < 1e-4, "position {i}");
    }
    assert!((score(3, 0) - score(0, 0)).abs() > 1e-3, "distance matters");
}

#[test]
fn causal_attention_does_not_look_ahead() {
    skip_where_small_only!();
    let device = device();
    let attention = Nvfp4AttentionConfig::new(32, 2)
        .with_recipe(exempt())
        .init(&device);
    exempt().apply(&attention).unwrap();
    let positions = RopeCacheConfig::new(8, 16).init(&device);
    let x = Matrix::gaussian(8, 32, DType::F32, 1);
    let forward = |x: &Matrix| {
        let x = x.tensor(&device).reshape([1, 8, 32]);
        values(attention.forward(x, &positions))
    };
    let whole = forward(&x);
    let mut other = Matrix::gaussian(8, 32, DType::F32, 1);
    other.values[5 * 32] += 1.0;
    let changed = forward(&other);
    assert_eq!(whole[..5 * 32], changed[..5 * 32]);
    assert_ne!(whole[5 * 32..6 * 32], changed[5 * 32..6 * 32]);
}

#[test]
fn feed_forwards_are_burn_nns() {
    skip_where_small_only!();
    let device = device();
    let x = input(2, 5, 32, &device);

    let burn = PositionWiseFeedForwardConfig::new(32, 48).init(&device);
    let expected = values(burn.forward(x.clone()));
    let ids = [burn.linear_inner.weight.id, burn.linear_outer.weight.id];
    let ours = Nvfp4FeedForward::from_position_wise(burn, &exempt()).unwrap();
    exempt().apply(&ours).unwrap();
    assert_close("position-wise", &values(ours.forward(x.clone())), &expected);
    let back = ours.into_position_wise();
    assert_eq!(
        [back.linear_inner.weight.id, back.linear_outer.weight.id],
        ids
    );

    let swiglu = SwiGluConfig::new(32, 48).with_bias(true).init(&device);
    let down = LinearConfig::new(48, 32).init(&device);
    let expected = values(down.forward(swiglu.forward(x.clone())));
    let id = down.weight.id;
    let ids = |swiglu: &SwiGlu| {
        [&swiglu.linear_inner, &swiglu.linear_outer]
            .map(|linear| (linear.weight.id, linear.bias.as_ref().map(|bias| bias.id)))
    };
    let part_ids = ids(&swiglu);
    let outer = values(swiglu.linear_outer.weight.val());
    let ours = Nvfp4SwiGlu::from_swiglu(swiglu, down, &exempt()).unwrap();
    exempt().apply(&ours).unwrap();
    assert_close("swiglu", &values(ours.forward(x.clone())), &expected);
    assert_eq!(ours.down.weight.id, id);
    let (swiglu, down) = ours.into_swiglu();
    assert_eq!(down.weight.id, id);
    assert_eq!(ids(&swiglu), part_ids);
    assert_eq!(values(swiglu.linear_outer.weight.val()), outer);
    assert_close(
        "back",
        &values(down.forward(swiglu.forward(x.clone()))),
        &expected,
    );

    let norm = RmsNormConfig::new(32).init(&device);
    let (id, expected) = (norm.gamma.id, values(norm.forward(x.clone())));
    let ours = RmsNorm::from_rms_norm(norm);
    let found = ours.forward(x);
    assert_close("norm", &values(found), &expected);
    assert_eq!(ours.into_rms_norm().gamma.id, id);
}

/// Asserts that `found` is `expected` up to rounding, which affects the largest input of the last
/// layer and so its global scale: it is ten times as near as `other`.
fn assert_nearer(found: &[f32], expected: &[f32], other: &[f32]) {
    let distance = |to: &[f32]| -> f32 {
        let squares = found.iter().zip(to).map(|(a, b)| (a - b) * (a - b));
        squares.sum::<f32>().sqrt()
    };
    let (near, far) = (distance(expected), distance(other));
    assert!(near < 0.1 * far, "{near} and {far}");
}

/// Fused projections have one global scale: if one part of the weight is eight times as large as
/// the others, the layer's output is that of all parts quantized together, not that of each
/// quantized separately. Tested in the layers themselves, to detect one that splits its GEMM.
#[test]
fn fused_weights_share_a_global_scale() {
    let device = device();
    let recipe = Nvfp4Recipe::new();
    let part =
        |seed, factor: f32| Matrix::gaussian(32, 32, DType::F32, seed).tensor(&device) * factor;
    let x = input(1, 6, 32, &device);
    let rows = x.clone().reshape([6, 32]);
    let plain = |w: Tensor<2>| {
        let linear = Linear {
            weight: Param::from_tensor(w),
            bias: None,
        };
        Nvfp4Linear::from_linear(linear, &recipe).unwrap()
    };
    let product = |w: Tensor<2>| plain(w).forward(rows.clone());
    let together = |parts: &[Tensor<2>]| product(Tensor::cat(parts.to_vec(), 1));
    let apart = |parts: &[Tensor<2>]| Tensor::cat(parts.iter().cloned().map(product).collect(), 1);

    let parts = [part(1, 1.0), part(2, 8.0)];
    let identity = Tensor::<2>::eye(32, &device);
    let mut swiglu = Nvfp4SwiGluConfig::new(32, 32)
        .with_recipe(recipe.clone())
        .init(&device);
    swiglu.gate_up.weight = Param::from_tensor(Tensor::cat(parts.to_vec(), 1));
    swiglu.down.weight = Param::from_tensor(identity.clone());
    let down = plain(identity.clone());
    let expected = |both: Tensor<2>| {
        let gate = burn_core::tensor::activation::silu(both.clone().narrow(1, 0, 32));
        values(down.forward(gate * both.narrow(1, 32, 32)))
    };
    let found = values(swiglu.forward(rows.clone()));
    assert_nearer(
        &found,
        &expected(together(&parts)),
        &expected(apart(&parts)),
    );

    // A single position attends only to itself: the output is its value.
    let parts = [part(3, 1.0), part(4, 8.0), part(5, 1.0)];
    let mut attention = Nvfp4AttentionConfig::new(32, 2)
        .with_recipe(recipe.clone())
        .init(&device);
    attention.qkv.weight = Param::from_tensor(Tensor::cat(parts.to_vec(), 1));
    attention.out.weight = Param::from_tensor(identity);
    let positions = RopeCacheConfig::new(1, 16).init(&device);
    let found = attention.forward(x.reshape([6, 1, 32]), &positions);
    let found = values(found.reshape([6, 32]));
    let expected = |qkv: Tensor<2>| values(down.forward(qkv.narrow(1, 64, 32)));
    assert_nearer(
        &found,
        &expected(together(&parts)),
        &expected(apart(&parts)),
    );
}

struct Gradients<'a>(&'a burn_optim::GradientsParams, Vec<String>, Vec<String>);

impl ModuleVisitor for Gradients<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.1.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.1.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.1.join(".");
        let gradient = self.0.get::<D>(param.id);
        let gradient = gradient.unwrap_or_else(|| panic!("{path} has no gradient"));
        assert!(values(gradient).iter().any(|v| *v != 0.0), "{path}");
        self.2.push(path);
    }
}

#[test]
fn every_parameter_of_a_block_gets_a_gradient() {
    skip_where_small_only!();
    let device = device().autodiff();
    let positions = RopeCacheConfig::new(12, 16).init(&device);
    let config = Nvfp4TransformerBlockConfig::new(64, 4, 96);
    for (config, parameters) in [
        (config.clone(), 6),
        (config.with_experts(Some(4)).with_shared_hidden(Some(32)), 9),
    ] {
        let block = config.init(&device);
        let out = block.forward(input(3, 12, 64, &device), &positions);
        assert_eq!(out.output.dims(), [3, 12, 64]);
        assert_eq!(out.balance_loss.is_some(), config.experts.is_some());
        let grads = out.output.square().mean().backward();
        let grads = burn_optim::GradientsParams::from_grads(grads, &block);
        let mut check = Gradients(&grads, Vec::new(), Vec::new());
        block.visit(&mut check);
        assert_eq!(check.2.len(), parameters, "{:?}", check.2);
    }
}

#[test]
fn arguments_are_named() {
    let device = device();
    for (argument, config) in [
        ("`heads`", Nvfp4AttentionConfig::new(32, 3)),
        (
            "`kv_heads`",
            Nvfp4AttentionConfig::new(32, 2).with_kv_heads(Some(4)),
        ),
        (
            "`dropout`",
            Nvfp4AttentionConfig::new(32, 2).with_dropout(1.0),
        ),
        ("`d_output`", Nvfp4AttentionConfig::new(24, 2)),
    ] {
        let error = config.try_init(&device).unwrap_err().to_string();
        let known = error.contains(argument) || error.contains("`d_input`");
        assert!(known, "{argument}: {error}");
    }
    let error = RopeCacheConfig::new(4, 7).try_init(&device).unwrap_err();
    assert!(error.to_string().contains("`head`"), "{error}");
    let attention = Nvfp4AttentionConfig::new(32, 2).init(&device);
    let positions = RopeCacheConfig::new(4, 16).init(&device);
    let short = attention.try_forward(input(1, 5, 32, &device), &positions, None);
    assert!(short.unwrap_err().to_string().contains("5 positions"));
    let other = RopeCacheConfig::new(4, 8).init(&device);
    let error = attention.try_forward(input(1, 4, 32, &device), &other, None);
    assert!(error.unwrap_err().to_string().contains("`positions`"));
}
