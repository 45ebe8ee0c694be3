//! Tests heads in FP8 and NVFP4: their logits, decoding steps, and graphs.

use burn::module::Param;
use burn::tensor::TensorData;
use serde_json::json;

#[cfg(feature = "cpu")]
use super::steps_tests::same_on_flex_and_cpu;
use super::*;
use crate::decode_cost::Shape;

fn model(device: &Device, head: HeadPrecision) -> Decoder {
    let config = Shape::Tiny.config().unwrap();
    let mut model =
        Decoder::random(&config, device, FloatDType::F32, FrozenForm::W4a16, 5).unwrap();
    // Devices have different random generators, so the weights are generated here.
    let mut state = 1u32;
    let mut draw = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 16_777_216.0 - 0.5
    };
    let weight = (0..config.vocab * config.d_model).map(|_| 0.03 * (draw() + draw() + draw()));
    let weight = TensorData::new(weight.collect::<Vec<f32>>(), [config.vocab, config.d_model]);
    model.embedding.weight = Param::from_tensor(Tensor::from_data(weight, device));
    model.with_head(head).unwrap()
}

fn tokens(device: &Device) -> Tensor<2, Int> {
    let ids: Vec<i32> = (0..40).map(|i| (i * 37 + 5) % 288).collect();
    Tensor::from_data(TensorData::new(ids, [2, 20]), device)
}

fn logits(model: &Decoder) -> Vec<f32> {
    let logits = model.forward(tokens(&model.device())).unwrap();
    assert_eq!(logits.dims(), [2, 20, 288]);
    logits.into_data().try_to_vec::<f32>().unwrap()
}

/// Compares the signal-to-noise ratios of the logits under a rounded head, in dB.
#[test]
fn fp8_is_closer_than_nvfp4() {
    let device = Device::flex();
    let stored = logits(&model(&device, HeadPrecision::Stored));
    let ratio = |head| {
        let found = logits(&model(&device, head));
        let pairs = stored.iter().zip(&found);
        let noise: f32 = pairs.map(|(a, b)| (a - b) * (a - b)).sum();
        let signal: f32 = stored.iter().map(|a| a * a).sum();
        10.0 * (signal / noise).log10()
    };
    let [fp8, nvfp4] = [HeadPrecision::Fp8, HeadPrecision::Nvfp4].map(ratio);
    assert!(fp8 > 28.0 && fp8 < 40.0, "{fp8}");
    assert!(nvfp4 > 12.0 && fp8 > nvfp4 + 6.0, "{fp8} {nvfp4}");
    // Restores the stored weight, which was kept.
    let model = model(&device, HeadPrecision::Fp8).with_head(HeadPrecision::Stored);
    assert_eq!(logits(&model.unwrap()), stored);
}

/// Steps compute the same logits as whole texts.
#[test]
fn steps_use_the_head() {
    let device = Device::flex();
    for head in [HeadPrecision::Fp8, HeadPrecision::Nvfp4] {
        let model = model(&device, head);
        let whole = logits(&model);
        let mut cache = model.cache(2, 20).unwrap();
        let ids: Vec<u32> = tokens(&device).into_data().iter::<u32>().collect();
        let column = |at: usize| vec![ids[at], ids[20 + at]];
        let first = tokens(&device).narrow(1, 0, 1);
        model.features_cached(first, &[1, 1], &mut cache).unwrap();
        let (next, both) = (column(1), [true, true]);
        let mut steps = DecodeSteps::new(&model, cache, &next, &both, false).unwrap();
        for at in 1..20 {
            steps.set(&column(at), &both).unwrap();
            steps.step().unwrap();
            for (row, found) in steps.logits().unwrap().chunks(288).enumerate() {
                let expected = &whole[(20 * row + at) * 288..][..288];
                for (found, expected) in found.iter().zip(expected) {
                    let error = (found - expected).abs();
                    assert!(error < 1e-5, "{head:?} {at}: {found} {expected}");
                }
            }
        }
    }
}

/// CubeCL's CPU runtime chooses the same tokens as Flex.
#[cfg(feature = "cpu")]
#[test]
fn kernels_choose_the_tokens_of_flex() {
    let prompts = vec![vec![7, 9, 200], vec![1, 2, 3, 4, 5]];
    same_on_flex_and_cpu(&prompts, 5, |device| model(device, HeadPrecision::Fp8));
}

/// A graph of steps with the head gives the same tokens and logits as steps launched one by one.
#[cfg(feature = "cuda")]
#[test]
fn replayed_steps_are_ordinary_ones() {
    use crate::decode_cost::{Effort, measure};

    if std::env::var("NVFP4_TEST_DEVICE").as_deref() != Ok("cuda") {
        nvfp4_test_support::skip!(NoGpu);
    }
    let device = Device::cuda(0);
    for head in [HeadPrecision::Fp8, HeadPrecision::Nvfp4] {
        for batch in [1, 3, 17] {
            let effort = Effort {
                prompt: 20,
                batch,
                tokens: 3,
                rounds: 1,
                graph: true,
                kv: KvPrecision::Activations,
                head,
            };
            let found = measure(Shape::Tiny, &device, FloatDType::BF16, effort).unwrap();
            assert!(found.is_graph && found.head == head);
        }
    }
}

#[test]
fn a_width_that_does_not_fit_is_refused() {
    let json = json!({
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "hidden_size": 96,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "vocab_size": 32,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": true,
    });
    let config = DecoderConfig::from_json(json.as_object().unwrap()).unwrap();
    let device = Device::flex();
    let model = Decoder::random(&config, &device, FloatDType::F32, FrozenForm::W4a16, 5).unwrap();
    assert!(model.clone().with_head(HeadPrecision::Nvfp4).is_ok());
    let error = model.with_head(HeadPrecision::Fp8).unwrap_err().to_string();
    assert!(error.contains("32 rows of 96"), "{error}");
}
