//! Tests decoding steps: agreement with whole texts, FP8 caches, and graphs.

use burn::tensor::TensorData;

use super::*;
use crate::interchange::{Checkpoint, Scheme};
#[cfg(feature = "cuda")]
use crate::sampling::SamplingConfig;
use nvfp4_test_support::golden;

fn tokens(ids: &[u32], device: &Device) -> Tensor<2, Int> {
    let ids: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
    let count = ids.len();
    Tensor::from_data(TensorData::new(ids, [1, count]), device)
}

fn ids() -> Vec<u32> {
    (0..24).map(|i| (i * 37 + 5) % 288).collect()
}

/// Returns the logits after each of [`ids`], in chunks of `size` with a cache of `precision`.
fn cached(model: &Decoder, size: usize, precision: Option<KvPrecision>) -> Vec<f32> {
    let mut cache = model.cache_as(1, 24, precision).unwrap();
    let mut found = Vec::new();
    for chunk in ids().chunks(size) {
        let chunk = tokens(chunk, &model.device());
        let count = chunk.dims()[1];
        let logits = model.forward_cached(chunk, &[count], &mut cache).unwrap();
        found.extend(logits.into_data().try_to_vec::<f32>().unwrap());
    }
    found
}

/// Returns the largest difference, as a share of the largest value.
fn distance(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
    let pairs = found.iter().zip(expected);
    pairs.fold(0f32, |most, (a, b)| most.max((a - b).abs())) / largest
}

/// A folder that quantizes its cache gets an FP8 cache with its factors. The elements read are the
/// same for tokens one by one or many at a time.
#[test]
fn quantized_caches_are_used() {
    for folder in [
        "llama3-tiny-ct-nvfp4-kvfp8",
        "llama3-tiny-modelopt-nvfp4-kvfp8",
    ] {
        let folder = golden(folder);
        // Rounded activations would hide the effect of the cache.
        let (device, scheme) = (Device::flex(), Some(Scheme::W4a16));
        let model = Decoder::load_packed(&folder, &device, FloatDType::F32, scheme).unwrap();
        let scales = model.kv_scales.clone().unwrap();
        let checkpoint = Checkpoint::open(&folder).unwrap();
        for (index, scales) in scales.iter().enumerate() {
            let name = format!("model.layers.{index}.self_attn");
            let expected = checkpoint.kv_scales()[&name].map(|scale| scale.unwrap_or(1.0));
            assert_eq!(*scales, expected, "{name}");
        }
        let plain = cached(&model, 1, Some(KvPrecision::Activations));
        let fp8 = cached(&model, 1, None);
        assert!(fp8 == cached(&model, 1, Some(KvPrecision::Fp8)));
        let effect = distance(&fp8, &plain);
        assert!(effect > 1e-4 && effect < 0.2, "{effect}");
        // GEMMs of other sizes sum in another order, and an element next to a threshold of E4M3 may
        // round differently. The tolerance is far below the error from rounding all elements.
        for size in [6, 11] {
            let error = distance(&cached(&model, size, None), &fp8);
            assert!(
                error < effect / 20.0,
                "chunks of {size}: {error} of {effect}"
            );
        }
    }
    // Requested explicitly, without factors.
    let folder = golden("llama3-tiny");
    let model = Decoder::load(&folder, &Device::flex(), FloatDType::F32).unwrap();
    let error = distance(
        &cached(&model, 5, Some(KvPrecision::Fp8)),
        &cached(&model, 5, None),
    );
    assert!(error > 1e-4 && error < 0.2, "{error}");
}

/// The device chooses the same tokens as the host; tokens set by the host are those of sampling.
#[test]
fn steps_choose_what_logits_say() {
    let folder = golden("llama3-tiny");
    let model = Decoder::load(&folder, &Device::flex(), FloatDType::F32).unwrap();
    let mut cache = model.cache(2, 12).unwrap();
    let prompt: Vec<u32> = ids()[..4].to_vec();
    let both: Vec<i32> = prompt.iter().chain(&prompt).map(|id| *id as i32).collect();
    let both = Tensor::from_data(TensorData::new(both, [2, 4]), &model.device());
    model.forward_cached(both, &[4, 2], &mut cache).unwrap();
    let mut steps = DecodeSteps::new(&model, cache, &[7, 9], &[true, true], false).unwrap();
    let mut texts = [prompt.clone(), prompt[..2].to_vec()];
    let mut next = [7, 9];
    for step in 0..6 {
        // The second text pauses for a while.
        let goes_on = [true, step % 3 != 1];
        steps.set(&next, &goes_on).unwrap();
        steps.step().unwrap();
        let chosen = steps.chosen(1).unwrap().remove(0);
        let logits = steps.logits().unwrap();
        for row in (0..2).filter(|row| goes_on[*row]) {
            texts[row].push(next[row]);
            let whole = model.forward(tokens(&texts[row], &model.device())).unwrap();
            let whole = whole.into_data().try_to_vec::<f32>().unwrap();
            let vocab = model.config().vocab;
            let last = &whole[whole.len() - vocab..];
            let found = &logits[row * vocab..][..vocab];
            assert!(distance(found, last) < 1e-5, "{step}, {row}");
            let best = (0..vocab).fold(0, |b, i| if found[i] > found[b] { i } else { b });
            assert_eq!(chosen[row] as usize, best);
            next[row] = (best as u32 + 1) % 288;
        }
        assert_eq!(steps.lengths(), [texts[0].len(), texts[1].len()]);
    }
    assert!(steps.chosen(7).is_err());
    let (text, short) = (texts[0].len(), model.cache(1, 1).unwrap());
    assert_eq!(text, 10);
    let mut full = DecodeSteps::new(&model, short, &[1], &[true], false).unwrap();
    full.step().unwrap();
    let error = full.step().unwrap_err().to_string();
    assert!(error.contains("room for 1"), "{error}");
    let cache = model.cache(1, 4).unwrap();
    assert!(DecodeSteps::new(&model, cache, &[1, 2], &[true], false).is_err());
}

/// CubeCL's CPU runtime gives the same result kernel by kernel.
#[cfg(feature = "cpu")]
#[test]
fn kernels_take_the_steps_of_flex() {
    let folder = golden("llama3-tiny-ct-nvfp4-kvfp8");
    let prompts = vec![ids()[..11].to_vec(), ids()[..3].to_vec()];
    same_on_flex_and_cpu(&prompts, 6, |device| {
        let scheme = Some(Scheme::W4a16);
        Decoder::load_packed(&folder, device, FloatDType::F32, scheme).unwrap()
    });
}

/// Asserts that a model chooses the same `tokens` tokens on Flex and on CubeCL's CPU runtime.
#[cfg(feature = "cpu")]
pub(super) fn same_on_flex_and_cpu(
    prompts: &[Vec<u32>],
    tokens: usize,
    model: impl Fn(&Device) -> Decoder,
) {
    let cpu = nvfp4_test_support::cpu_runtime(Device::cpu);
    let texts = [Device::flex(), cpu].map(|device| {
        let generation = Generation::greedy(tokens);
        model(&device)
            .generate(prompts, &generation, |_, _| Ok(true))
            .unwrap()
    });
    assert_eq!(texts[0], texts[1]);
}

/// Replays give the same texts as ordinary steps: greedy and sampled, one text and several that end
/// at different times, with both cache formats. Tokens chosen by the host reach the buffers that
/// replays read.
#[cfg(feature = "cuda")]
#[test]
fn replayed_steps_are_ordinary_ones() {
    if std::env::var("NVFP4_TEST_DEVICE").as_deref() != Ok("cuda") {
        nvfp4_test_support::skip!(NoGpu);
    }
    let folder = golden("llama3-tiny-ct-nvfp4-kvfp8");
    let device = Device::cuda(0);
    let model =
        Decoder::load_for_inference(&folder, &device, FloatDType::BF16, Some(Scheme::W4a16));
    let model = model.unwrap();
    let prompts = [
        ids()[..11].to_vec(),
        ids()[..3].to_vec(),
        ids()[2..22].to_vec(),
    ];
    let sampled = SamplingConfig {
        temperature: 0.8,
        top_k: Some(20),
        repetition_penalty: 1.1,
        seed: 3,
        ..SamplingConfig::default()
    };
    for sampling in [SamplingConfig::default(), sampled] {
        for kv in [KvPrecision::Activations, KvPrecision::Fp8] {
            for prompts in [&prompts[..1], &prompts[..]] {
                let texts = [false, true].map(|graph| {
                    let generation = Generation {
                        sampling: sampling.clone(),
                        kv: Some(kv),
                        graph,
                        ..Generation::greedy(70)
                    };
                    let mut left = vec![70usize; prompts.len()];
                    let emit = |index: usize, _| {
                        left[index] -= 1;
                        // The first text ends earlier.
                        Ok(index > 0 || left[0] > 31)
                    };
                    model.generate(prompts, &generation, emit).unwrap()
                });
                assert_eq!(
                    texts[0],
                    texts[1],
                    "{sampling:?}, {kv:?}, {}",
                    prompts.len()
                );
            }
        }
    }
}
