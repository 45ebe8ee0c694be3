//! What a run needs of its device's memory, before the model is loaded.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Map, Value};

use super::config::{FinetuneConfig, Objective};
use crate::checkpoint::read_json;
use crate::config::Activation;
use crate::decoder::LoraConfig;
use crate::decoder::names::expected;
use crate::hf::config::CONFIG_FILE;
use crate::hf::{DecoderConfig, FeedForwardConfig};
use crate::interchange::names::{expert_projection, is_linear};
use crate::memory::{Finetuning, MemoryBudget, MemoryNeed};

/// The budget of the run `config`, by the configurations of its model and its teacher.
///
/// # Errors
/// When one of them cannot be read, or the adapters' targets are no regular expression.
pub fn budget(config: &FinetuneConfig) -> Result<MemoryBudget> {
    let model = read(&config.model)?;
    let teacher = match &config.objective {
        Objective::CrossEntropy => None,
        Objective::Distillation { teacher, .. } => Some(read(teacher)?),
    };
    Ok(MemoryBudget::of_finetuning(Finetuning {
        device: &config.device,
        need: need(config, &model, teacher.as_ref())?,
        batch: config.batch,
        context: config.context,
        has_adapters: config.lora.is_some(),
        is_f32: config.activation == Activation::F32,
    }))
}

/// The configuration of the model in `folder`, quantized or not: a quantized one is trained as the
/// values that it stands for.
fn read(folder: &Path) -> Result<DecoderConfig> {
    let path = folder.join(CONFIG_FILE);
    let mut json: Map<String, Value> = read_json(&path)?;
    json.remove("quantization_config");
    DecoderConfig::from_json(&json).with_context(|| path.display().to_string())
}

/// What a step of the run `config` holds at once, at the least. Chunks of logits are not counted,
/// nor what quantization keeps beside the values.
///
/// # Errors
/// When the adapters' targets are no regular expression.
pub fn need(
    config: &FinetuneConfig,
    model: &DecoderConfig,
    teacher: Option<&DecoderConfig>,
) -> Result<MemoryNeed> {
    let element = config.activation.bytes() as u64;
    let parameters = parameters(model);
    let (trained, base) = match &config.lora {
        None => (parameters, 0),
        Some(lora) => (adapters(model, lora)?, parameters),
    };
    let frozen = base + teacher.map_or(0, self::parameters);
    // Inputs of both norms; queries, keys and values; inputs of the feed-forward's activation.
    let of_layers = model.layers.iter().map(|layer| {
        let heads = (model.heads + 2 * model.kv_heads) * model.head;
        let hidden = match layer.feed_forward {
            FeedForwardConfig::Dense { hidden } => hidden,
            FeedForwardConfig::Moe { hidden, top_k, .. } => hidden * top_k,
        };
        (2 * model.d_model + heads + 2 * hidden) as u64
    });
    let tokens = (config.batch as u64).saturating_mul(config.context as u64);
    Ok(MemoryNeed {
        // Trained parameters are f32, their gradients and both moments of AdamW too.
        weights: 4 * trained,
        frozen: element * frozen,
        gradients: 4 * trained,
        optimizer: 8 * trained,
        activations: tokens.saturating_mul(element * of_layers.sum::<u64>()),
    })
}

/// Elements of all tensors of a model.
fn parameters(model: &DecoderConfig) -> u64 {
    let elements = |shape: &[usize]| shape.iter().map(|&axis| axis as u64).product::<u64>();
    expected(model)
        .iter()
        .map(|tensor| elements(&tensor.shape))
        .sum()
}

/// Elements of the adapters of a model. Experts cannot have any.
fn adapters(model: &DecoderConfig, lora: &LoraConfig) -> Result<u64> {
    let targets = lora.check()?;
    let tensors = expected(model);
    let sizes = tensors.iter().filter_map(|tensor| {
        let module = tensor.name.strip_suffix(".weight")?;
        let is_target = is_linear(module) && expert_projection(module).is_none();
        (is_target && targets.is_match(module)).then(|| tensor.shape.iter().sum::<usize>() as u64)
    });
    Ok(sizes.sum::<u64>() * lora.rank as u64)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::module::Module;
    use burn::tensor::{Device, FloatDType};
    use burn_nvfp4::Nvfp4Recipe;

    use super::*;
    use crate::config::RecipeName;
    use crate::decoder::Decoder;
    use crate::decoder::lora::DEFAULT_TARGETS;
    use crate::hf::golden::golden;

    fn config(model: &Path, batch: usize) -> FinetuneConfig {
        FinetuneConfig {
            model: model.into(),
            data: vec!["text.tokens".into()],
            valid: vec![],
            valid_share: 0.2,
            recipe_name: RecipeName::nvfp4(),
            recipe: Nvfp4Recipe::default(),
            lora: None,
            objective: Objective::CrossEntropy,
            activation: Activation::F32,
            steps: 8,
            batch,
            accumulate: 1,
            context: 48,
            lr: 1e-3,
            warmup: 2,
            weight_decay: 0.0,
            grad_clip: 1.0,
            seed: 7,
            eval_every: 4,
            eval_rows: 64,
            log_every: 2,
            checkpoint_every: 3,
            graph: false,
            device: "cpu".into(),
        }
    }

    #[test]
    fn the_need_is_that_of_the_parameters() {
        let root = golden!("");
        for name in ["llama3-tiny", "qwen3-tiny", "qwen3moe-tiny", "mixtral-tiny"] {
            let folder = root.join(name);
            let mut config = config(&folder, 2);
            let (device, dtype) = (Device::flex().autodiff(), FloatDType::F32);
            let decoder = Decoder::load(&folder, &device, dtype).unwrap();
            let count = decoder.num_params() as u64;
            let model = decoder.config().clone();
            let full = need(&config, &model, None).unwrap();
            assert_eq!(full.weights, 4 * count, "{name}");
            assert_eq!((full.gradients, full.optimizer), (4 * count, 8 * count));
            assert_eq!(full.frozen, 0);
            config.batch = 6;
            let wide = need(&config, &model, None).unwrap();
            assert_eq!(wide.activations, 3 * full.activations);
            config.activation = Activation::Bf16;
            let half = need(&config, &model, Some(&model)).unwrap();
            assert_eq!(
                half.frozen,
                2 * count,
                "a teacher has the activations' type"
            );
            assert_eq!(2 * half.activations, wide.activations);
            let lora = LoraConfig {
                rank: 4,
                alpha: 8.0,
                targets: DEFAULT_TARGETS.into(),
            };
            let adapted = decoder.into_training(&Nvfp4Recipe::bf16(), dtype).unwrap();
            let adapted = adapted.into_lora(&lora, 1).unwrap();
            config.lora = Some(lora);
            let small = need(&config, &model, None).unwrap();
            let trained = adapted.num_params() as u64 - count;
            assert_eq!(
                (small.weights, small.optimizer),
                (4 * trained, 8 * trained),
                "{name}"
            );
            assert_eq!(small.frozen, 2 * count);
        }
    }

    /// On a device that says how much memory it has, before anything is loaded.
    #[cfg(feature = "cpu")]
    #[test]
    fn a_run_that_cannot_fit_is_refused_with_what_to_change() {
        let mut config = config(&golden!("llama3-tiny"), 1 << 34);
        let says = |config: &FinetuneConfig, parts: &[&str]| {
            let error = budget(config).unwrap().check(&Device::cpu()).unwrap_err();
            let error = error.to_string();
            for part in parts {
                assert!(error.contains(part), "no {part:?}: {error}");
            }
            error
        };
        let error = says(
            &config,
            &[
                "out of device memory on cpu: a step needs at least",
                "sequences of 48 tokens",
                "a smaller --batch (no more than ",
                "a shorter --context, a larger --accumulate",
                "adapters alone (--lora)",
                "--activation bf16 halves the activations",
            ],
        );
        assert!(
            !error.contains("--preset") && !error.contains("frozen"),
            "{error}"
        );
        config.objective = Objective::Distillation {
            teacher: config.model.clone(),
            temperature: 1.0,
        };
        says(&config, &["frozen weights"]);
        config.batch = 2;
        budget(&config).unwrap().check(&Device::cpu()).unwrap();
    }
}
