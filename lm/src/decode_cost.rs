//! Measures prefill and decoding with random packed weights, in the shapes of known models.

use std::time::Instant;

use anyhow::{Result, ensure};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use clap::ValueEnum;
use serde::Serialize;
use serde_json::json;

use crate::capture::copy_into;
use crate::cost::{Kernel, observe};
use crate::decoder::{DecodeSteps, Decoder, FrozenForm, HeadPrecision, KvCache, KvPrecision};
use crate::hf::DecoderConfig;

/// Shape of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
pub enum Shape {
    /// Llama 3.2 1B: 16 layers of width 2048, head dimension 64, tied embeddings
    #[serde(rename = "llama-3.2-1b")]
    #[value(name = "llama-3.2-1b")]
    Llama1b,
    /// Llama 3.1 8B: 32 layers of width 4096, head dimension 128
    #[serde(rename = "llama-3.1-8b")]
    #[value(name = "llama-3.1-8b")]
    Llama8b,
    /// Two layers of width 64, for tests
    #[serde(rename = "tiny")]
    Tiny,
}

impl Shape {
    /// Returns the configuration of the model, as its `config.json` states it.
    ///
    /// # Errors
    /// Never returns an error, because the configurations are built in.
    pub fn config(self) -> Result<DecoderConfig> {
        let [layers, width, hidden, heads, kv_heads, vocab] = match self {
            Self::Llama1b => [16, 2048, 8192, 32, 8, 128_256],
            Self::Llama8b => [32, 4096, 14_336, 32, 8, 128_256],
            Self::Tiny => [2, 64, 128, 4, 2, 288],
        };
        let json = json!({
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": layers,
            "hidden_size": width,
            "intermediate_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": width / heads,
            "vocab_size": vocab,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": self != Self::Llama8b,
        });
        DecoderConfig::from_json(json.as_object().expect("it is one"))
    }
}

/// Amount of work to measure.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Tokens per prompt.
    pub prompt: usize,
    /// Number of sequences.
    pub batch: usize,
    /// Tokens per round of decoding.
    pub tokens: usize,
    /// Number of rounds; the median is reported.
    pub rounds: usize,
    /// True if decoding runs as a CUDA graph.
    pub graph: bool,
    /// Storage format of keys and values.
    pub kv: KvPrecision,
    /// Storage format of the head.
    pub head: HeadPrecision,
}

/// Measured cost. Times are in seconds.
#[derive(Clone, Debug, Serialize)]
pub struct DecodeCost {
    /// Shape of the model.
    pub shape: Shape,
    /// Number of sequences.
    pub batch: usize,
    /// Tokens per prompt.
    pub prompt: usize,
    /// Bytes of the packed weights in NVFP4 and FP8, codes and scales.
    pub packed_bytes: usize,
    /// Storage format of the head. The head counts as a packed weight unless it is stored as
    /// loaded.
    pub head: HeadPrecision,
    /// Bytes of all weights that a step reads: packed weights, an unpacked head, norms.
    pub step_bytes: usize,
    /// Bytes per second of a device copy, counting reads and writes; none if the device has no
    /// copy.
    pub copy_bandwidth: Option<f64>,
    /// Time from the end of loading to the first token of a prompt, including compilation.
    pub first_token: f64,
    /// Time from the prompt to the logits after its last token.
    pub prefill: f64,
    /// Time of a decoding step.
    pub step: f64,
    /// True if the step was replayed as a CUDA graph.
    pub is_graph: bool,
    /// Number of kernels per step.
    pub launches: usize,
    /// Time to read `step_bytes` at `copy_bandwidth`, as a share of the step time.
    pub share_of_reading: Option<f64>,
    /// Kernels of a step launched one by one, most expensive first.
    #[serde(skip)]
    pub kernels: Vec<Kernel>,
}

/// Bytes copied to measure the bandwidth.
const COPIED: usize = 1 << 30;

/// Measures a model of random packed weights on `device`.
///
/// # Errors
/// Returns an error if a number is zero, the device does not support the model or has too little
/// memory, or replayed steps differ from steps launched one by one.
pub fn measure(
    shape: Shape,
    device: &Device,
    dtype: FloatDType,
    effort: Effort,
) -> Result<DecodeCost> {
    let Effort {
        prompt,
        batch,
        tokens,
        rounds,
        graph,
        kv,
        head,
    } = effort;
    for (name, value) in [
        ("prompt-length", prompt),
        ("batch", batch),
        ("round-tokens", tokens),
        ("rounds", rounds),
    ] {
        ensure!(value > 0, "{name} is 0, but must be at least 1");
    }
    let form = FrozenForm::W4a16;
    let model = Decoder::random(&shape.config()?, device, dtype, form, 0)?.with_head(head)?;
    let wait = || -> Result<()> {
        device
            .sync()
            .map_err(|error| anyhow::anyhow!("the device failed: {error:?}"))
    };
    wait()?;
    let (packed_bytes, step_bytes) = model.bytes_of_step();
    let vocab = model.config().vocab as i32;
    let ids = (0..batch * prompt).map(|i| (i as i32 * 7919 + 13) % vocab);
    let data = TensorData::new(ids.collect::<Vec<i32>>(), [batch, prompt]);
    let ids: Tensor<2, Int> = Tensor::from_data(data, device);
    // Space for warm-up steps, the capture, and the rounds.
    let capacity = prompt + 2 * WARM + (rounds + 1) * tokens;
    let mut cache = model.cache_as(batch, capacity, Some(kv))?;
    let prefill = |cache: &mut KvCache| -> Result<(f64, Vec<f32>)> {
        (0..batch).for_each(|row| cache.truncate(row, 0));
        wait()?;
        let started = Instant::now();
        let counts = vec![prompt; batch];
        let logits = model.last_logits(ids.clone(), &counts, cache)?;
        Ok((started.elapsed().as_secs_f64(), logits))
    };
    let (first_token, logits) = prefill(&mut cache)?;
    ensure!(
        logits.iter().all(|logit| logit.is_finite()),
        "the logits of random weights are not finite"
    );
    prefill(&mut cache)?;
    let mut prefills = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        prefills.push(prefill(&mut cache)?.0);
    }
    let (next, goes_on) = (vec![1; batch], vec![true; batch]);
    // Record the launches of a step that runs without a graph.
    let mut plain = DecodeSteps::new(&model, cache.clone(), &next, &goes_on, false)?;
    for _ in 0..WARM {
        plain.step()?;
        plain.chosen(1)?;
    }
    let expected = (plain.chosen(WARM)?, plain.logits()?);
    let mut observed = Ok(());
    let (_, kernels) = observe::step(device, || {
        let taken = plain.step().and_then(|()| plain.chosen(1).map(|_| ()));
        observed = std::mem::replace(&mut observed, Ok(())).and(taken);
    });
    observed?;
    drop(plain);
    let mut steps = DecodeSteps::new(&model, cache, &next, &goes_on, graph)?;
    for _ in 0..WARM {
        steps.step()?;
        steps.chosen(1)?;
    }
    ensure!(
        (steps.chosen(WARM)?, steps.logits()?) == expected,
        "replayed steps gave other tokens or logits than those that were launched one by one"
    );
    let mut times = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        let started = Instant::now();
        for _ in 0..tokens {
            steps.step()?;
        }
        steps.chosen(1)?;
        times.push(started.elapsed().as_secs_f64() / tokens as f64);
    }
    let is_graph = steps.is_captured();
    drop(steps);
    let copy_bandwidth = if graph { Some(copy(device)?) } else { None };
    let step = median(times);
    Ok(DecodeCost {
        shape,
        batch,
        prompt,
        packed_bytes,
        head,
        step_bytes,
        copy_bandwidth,
        first_token,
        prefill: median(prefills),
        step,
        is_graph,
        launches: kernels.iter().map(|kernel| kernel.launches).sum(),
        share_of_reading: copy_bandwidth.map(|bandwidth| step_bytes as f64 / bandwidth / step),
        kernels,
    })
}

/// Steps before the first round.
const WARM: usize = 8;

/// Returns the bytes per second that a copy reads and writes.
fn copy(device: &Device) -> Result<f64> {
    let zeros = || Tensor::<1, Int>::zeros([COPIED / 4], (device, DType::I32));
    let (from, mut to) = (zeros(), zeros());
    let mut best = f64::INFINITY;
    for _ in 0..4 {
        let _ = device.sync();
        let started = Instant::now();
        const COPIES: usize = 10;
        for _ in 0..COPIES {
            to = copy_into(to, from.clone())?;
        }
        let _ = device.sync();
        best = best.min(started.elapsed().as_secs_f64() / COPIES as f64);
    }
    Ok(2.0 * COPIED as f64 / best)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    #[test]
    fn a_small_model_is_measured() {
        let effort = Effort {
            prompt: 20,
            batch: 2,
            tokens: 3,
            rounds: 2,
            graph: false,
            kv: KvPrecision::Activations,
            head: HeadPrecision::Stored,
        };
        let device = Device::flex();
        let found = measure(Shape::Tiny, &device, FloatDType::F32, effort).unwrap();
        // Two layers with 64 x 128, 64 x 64, 256 x 64 and 64 x 128 weights at 4.5 bits per weight.
        let weights = 2 * (128 * 64 + 64 * 64 + 256 * 64 + 64 * 128);
        assert_eq!(found.packed_bytes, weights * 9 / 16 + 2 * 4 * 4);
        let others = 288 * 64 * 4 + 5 * 64 * 4;
        assert_eq!(found.step_bytes, found.packed_bytes + others);
        assert!(found.step > 0.0 && found.prefill > 0.0 && !found.is_graph);
        // NVFP4: 4.5 bits per element and a global scale. FP8: 8 bits per element and one scale for
        // each of 288 rows.
        for (head, bytes) in [
            (HeadPrecision::Nvfp4, 288 * 64 * 9 / 16 + 4),
            (HeadPrecision::Fp8, 288 * 64 + 288 * 4),
        ] {
            let with_head = Effort { head, ..effort };
            let found = measure(Shape::Tiny, &device, FloatDType::F32, with_head).unwrap();
            let layers = weights * 9 / 16 + 2 * 4 * 4;
            assert_eq!((found.head, found.packed_bytes), (head, layers + bytes));
            assert_eq!(found.step_bytes, found.packed_bytes + 5 * 64 * 4);
        }
        let none = Effort {
            rounds: 0,
            ..effort
        };
        let error = measure(Shape::Tiny, &device, FloatDType::F32, none).unwrap_err();
        assert!(error.to_string().contains("rounds is 0"), "{error}");
    }

    #[test]
    fn shapes_are_those_of_their_models() {
        let small = Shape::Llama1b.config().unwrap();
        assert_eq!((small.head, small.layers.len(), small.tied), (64, 16, true));
        let large = Shape::Llama8b.config().unwrap();
        assert_eq!(
            (large.head, large.layers.len(), large.tied),
            (128, 32, false)
        );
    }
}
