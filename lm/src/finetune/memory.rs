//! Estimates the device memory of a run before the model is loaded.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use nvfp4_formats::BLOCK;
use serde_json::{Map, Value};

use super::config::{FinetuneConfig, Objective};
use crate::checkpoint::read_json;
use crate::config::{Activation, ExpertDispatchName};
use crate::decoder::lora::joined_rank;
use crate::decoder::names::{self, Expected, Site, expected};
use crate::decoder::{FrozenForm, LoraConfig};
use crate::hf::config::CONFIG_FILE;
use crate::hf::{DecoderConfig, FeedForwardConfig, GateActivation};
use crate::interchange::Checkpoint;
use crate::interchange::checkpoint::is_quantized;
use crate::interchange::names::{canonical, expert_projection, is_head, is_linear, is_router};
use crate::memory::{ACCUMULATE, Advice, MemoryBudget, RECOMPUTE, StepSizes};

/// Returns the memory budget of the run `config` on each of `ranks` ranks, from the configurations
/// of its model and its teacher. It does not depend on the formats of the operands: it holds for
/// every phase of a schedule.
///
/// # Errors
/// Returns an error if a configuration cannot be read, or the adapters' targets are not a regular
/// expression.
pub fn budget(config: &FinetuneConfig, ranks: usize) -> Result<MemoryBudget> {
    let model = SizedModel::read(&config.model)?;
    let teacher = match &config.objective {
        Objective::CrossEntropy => None,
        Objective::Distillation { teacher, .. } => Some(SizedModel::read(teacher)?),
    };
    let sizes = sizes(config, &model, teacher.as_ref(), ranks)?;
    let has_adapters = config.lora.is_some();
    let options = [
        Some(ACCUMULATE),
        (!has_adapters && sizes.can_recompute()).then_some(RECOMPUTE),
        match (has_adapters, config.frozen) {
            (false, _) => Some("or adapters alone (--lora)"),
            (true, FrozenForm::High) => {
                Some("or packed weights beside the adapters (--frozen w4a16)")
            }
            (true, FrozenForm::W4a16 | FrozenForm::W4a4) => None,
        },
    ];
    Ok(MemoryBudget {
        device: config.device.clone(),
        need: sizes.need(),
        batch: config.batch,
        context: config.context,
        ranks,
        advice: Advice {
            elements: "tokens",
            smaller_model: "a smaller model",
            options: options.into_iter().flatten().collect(),
            narrower: (config.activation == Activation::F32).then_some("--activation bf16"),
        },
    })
}

/// Properties of a model that determine its memory.
#[derive(Debug, Clone)]
pub struct SizedModel {
    /// Configuration of the model.
    pub config: DecoderConfig,
    /// Modules that are packed in its folder, if it is quantized.
    packed: Option<BTreeSet<String>>,
}

impl SizedModel {
    /// Reads the model in `folder`, quantized or not.
    ///
    /// # Errors
    /// Returns an error if the configuration cannot be read.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(CONFIG_FILE);
        let mut json: Map<String, Value> = read_json(&path)?;
        json.remove("quantization_config");
        let config = DecoderConfig::from_json(&json).with_context(|| path.display().to_string())?;
        let packed = match is_quantized(folder)? {
            false => None,
            true => {
                let checkpoint = Checkpoint::open(folder)?;
                let modules = checkpoint.layers().keys();
                Some(modules.map(|name| canonical(name)).collect())
            }
        };
        Ok(Self { config, packed })
    }

    /// Returns the bytes of its weights in `form`; weights that are not packed have `element` bytes
    /// per element.
    fn frozen(&self, form: FrozenForm, element: u64) -> u64 {
        let bytes = |tensor: &Expected| {
            let elements = elements(&tensor.shape);
            match form != FrozenForm::High && self.is_packed(&tensor.name) {
                true => elements / 2 + elements / BLOCK as u64,
                false => element * elements,
            }
        };
        expected(&self.config).iter().map(bytes).sum()
    }

    /// Returns true if the tensor is packed when weights are: if the folder packs it, or, for other
    /// folders, if it is a projection or an expert.
    fn is_packed(&self, tensor: &str) -> bool {
        let Some(module) = tensor.strip_suffix(".weight") else {
            return false;
        };
        match &self.packed {
            Some(packed) => packed.contains(module),
            None => is_linear(module) && !is_head(module) && !is_router(module),
        }
    }

    /// Returns the number of elements of the largest weight of its layers; fused projections and
    /// the experts of a layer are one weight.
    fn largest_weight(&self) -> u64 {
        let model = &self.config;
        let attention = match &model.block.latent {
            None => model.d_model * (model.heads + 2 * model.kv_heads) * model.head,
            Some(latent) => {
                let low = latent.kv_rank + latent.rope;
                let query = model.heads * latent.query();
                let [first, second] = match latent.q_rank {
                    None => [query + low, 0],
                    Some(rank) => [rank + low, rank * query],
                };
                let kv = latent.kv_rank * model.heads * (latent.nope + latent.value);
                let out = model.heads * latent.value * model.d_model;
                (model.d_model * first).max(second).max(kv).max(out)
            }
        };
        let of_layers = model.layers.iter().map(|layer| {
            let feed_forward = match layer.feed_forward {
                FeedForwardConfig::Dense { hidden } => hidden,
                FeedForwardConfig::Moe {
                    hidden,
                    experts,
                    shared,
                    ..
                } => (experts * hidden).max(shared.unwrap_or(0)),
            };
            attention.max(2 * model.d_model * feed_forward)
        });
        of_layers.max().unwrap_or(0) as u64
    }
}

/// Returns the sizes of a step of the run `config` on `ranks` ranks. Excludes chunks of logits, and
/// tensors that quantization saves in addition to the values.
///
/// # Errors
/// Returns an error if the adapters' targets are not a regular expression.
fn sizes(
    config: &FinetuneConfig,
    model: &SizedModel,
    teacher: Option<&SizedModel>,
    ranks: usize,
) -> Result<StepSizes> {
    let (element, ep) = (config.activation.bytes() as u64, config.ep as u64);
    let (trained, base) = match &config.lora {
        None => {
            let experts = expert_parameters(&model.config);
            (parameters(&model.config) - experts + experts / ep, 0)
        }
        Some(lora) => {
            let base = model.frozen(config.frozen, element);
            // With bf16, kernels read packed weights directly. With f32, Burn multiplies one
            // dequantized weight after another.
            let dequantized = match (config.frozen, config.activation) {
                (FrozenForm::High, _) | (_, Activation::Bf16) => 0,
                (FrozenForm::W4a16 | FrozenForm::W4a4, Activation::F32) => {
                    element * model.largest_weight()
                }
            };
            (adapters(&model.config, lora)?.joined, base + dequantized)
        }
    };
    let of_teacher = match (&config.objective, teacher) {
        (Objective::Distillation { form, .. }, Some(teacher)) => teacher.frozen(*form, element),
        _ => 0,
    };
    let model = &model.config;
    // With an all-gather, a rank may receive the tokens of all ranks that share its experts.
    let gathered = match config.expert_dispatch(model.most_experts_of_token()) {
        ExpertDispatchName::AllGather => config.ep,
        ExpertDispatchName::AllToAll => 1,
    };
    // Inputs of the norms; queries, keys and values; inputs of the feed-forward's activation, and
    // its output if another kernel multiplies it by up.
    let norms = if model.block.post_norms { 4 } else { 2 };
    let layers = model.layers.iter().map(|layer| {
        let heads = (model.heads + 2 * model.kv_heads) * model.head;
        let low_rank = model.block.latent.map_or(0, |latent| {
            // Outputs of the first projections, and of their norms.
            2 * (latent.q_rank.unwrap_or(0) + latent.kv_rank) + latent.rope
        });
        let hidden = match layer.feed_forward {
            FeedForwardConfig::Dense { hidden } => hidden,
            FeedForwardConfig::Moe {
                hidden,
                top_k,
                shared,
                ..
            } => hidden * top_k * gathered + shared.unwrap_or(0),
        };
        let always = norms * model.d_model + heads + low_rank;
        match model.block.activation {
            GateActivation::Silu => [always, 2 * hidden],
            GateActivation::GeluTanh => [always + 3 * hidden, 0],
            GateActivation::ClampedSwiGlu { .. } => [always + 6 * hidden, 0],
        }
    });
    // Experts are sharded over the ranks that hold the same ones, all other parameters over all.
    let (trained, shards) = match config.fsdp {
        true => (parameters(model), ranks as u64),
        false => (trained, 1),
    };
    Ok(StepSizes {
        trained: trained / shards,
        optimized: trained / shards,
        // Trained parameters are f32.
        parameter: 4,
        frozen: base + of_teacher,
        tokens: (config.batch as u64).saturating_mul(config.context as u64),
        ranks: ranks as u64,
        activation: element,
        layers: layers.collect(),
        recompute: config.recompute,
        others: 0,
    })
}

/// Returns the number of trained parameters of the run `config`, and the number of all parameters,
/// including adapters.
///
/// # Errors
/// Returns an error if the configuration of the model cannot be read, or the adapters' targets are
/// not a regular expression.
pub fn trained(config: &FinetuneConfig) -> Result<[u64; 2]> {
    let model = SizedModel::read(&config.model)?.config;
    let own = parameters(&model);
    Ok(match &config.lora {
        None => [own, own],
        Some(lora) => {
            let adapters = adapters(&model, lora)?.own;
            [adapters, own + adapters]
        }
    })
}

/// Checks the values of a run that depend on the configuration of its model, without its tensors.
///
/// # Errors
/// Returns an error if the configuration cannot be read, `context` exceeds the model's positions,
/// `lora-targets` matches no projection, or experts cannot be distributed over `ep` ranks.
pub fn check_model(config: &FinetuneConfig) -> Result<()> {
    let model = SizedModel::read(&config.model)?.config;
    model.check_length("context", config.context)?;
    if let Some(lora) = &config.lora {
        adapters(&model, lora)?;
    }
    model.check_experts(config.ep)
}

/// Returns the number of elements in the tensors of all experts of a model.
fn expert_parameters(model: &DecoderConfig) -> u64 {
    let tensors = expected(model);
    let of_experts = tensors.iter().filter(|tensor| {
        let module = tensor.name.strip_suffix(".weight");
        module.is_some_and(|module| expert_projection(module).is_some())
    });
    of_experts.map(|tensor| elements(&tensor.shape)).sum()
}

/// Returns the number of elements in all tensors of a model.
fn parameters(model: &DecoderConfig) -> u64 {
    let tensors = expected(model);
    tensors.iter().map(|tensor| elements(&tensor.shape)).sum()
}

fn elements(shape: &[usize]) -> u64 {
    shape.iter().map(|&axis| axis as u64).product()
}

/// Numbers of elements in the adapters of a model.
struct AdapterSizes {
    /// Elements of the adapters' matrices.
    own: u64,
    /// Elements of the matrices that training joins them to, which have zeros elsewhere.
    joined: u64,
}

/// Returns the sizes of the adapters of a model. Experts cannot have adapters.
fn adapters(model: &DecoderConfig, lora: &LoraConfig) -> Result<AdapterSizes> {
    let targets = lora.check()?;
    let tensors = expected(model);
    let projections = tensors.iter().filter_map(|tensor| {
        let module = tensor.name.strip_suffix(".weight")?;
        is_linear(module).then_some((module, &tensor.shape))
    });
    let is_target = |(module, _): &(&str, _)| targets.is_match(module);
    let matched = projections.clone().filter(is_target);
    ensure!(
        matched.clone().next().is_some(),
        "lora-targets is {:?}, which matches no projection such as {}",
        lora.targets,
        projections
            .clone()
            .next()
            .map_or("none", |(module, _)| module)
    );
    let adapted = matched.filter(|(module, _)| expert_projection(module).is_none());
    let adapted: BTreeSet<&str> = adapted.map(|(module, _)| module).collect();
    let shapes: BTreeMap<&str, &Vec<usize>> = projections.collect();
    let mut sizes = AdapterSizes { own: 0, joined: 0 };
    for index in 0..model.layers.len() {
        for site in Site::ALL {
            let leaves = site.leaves(model).iter();
            let modules = leaves.map(|leaf| format!("{}{leaf}", names::layer(index)));
            let fused = modules.filter_map(|name| shapes.get_key_value(&*name));
            let fused: Vec<(&str, [usize; 2])> = fused
                .map(|(module, shape)| (*module, [shape[0], shape[1]]))
                .collect();
            let own = fused.iter().filter(|(module, _)| adapted.contains(module));
            let own: Vec<usize> = own.map(|(_, [d_out, d_in])| d_out + d_in).collect();
            if own.is_empty() {
                continue;
            }
            let d_in = fused[0].1[1];
            let d_out: usize = fused.iter().map(|(_, [d_out, _])| d_out).sum();
            let joined = joined_rank(own.len(), lora.rank) * (d_in + d_out);
            sizes.own += (own.iter().sum::<usize>() * lora.rank) as u64;
            sizes.joined += joined as u64;
        }
    }
    Ok(sizes)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use burn::module::Module;
    use burn::tensor::{Device, FloatDType};
    use burn_nvfp4::Nvfp4Recipe;
    use burn_nvfp4::nn::Nvfp4Weight;

    use super::*;
    use crate::config::{GradReduce, RecipeName};
    use crate::decoder::Decoder;
    use crate::decoder::feed_forward::FeedForward;
    use crate::decoder::lora::DEFAULT_TARGETS;
    use crate::decoder::projection::{Experts, Projection};
    use crate::memory::MemoryNeed;
    use nvfp4_test_support::golden;

    fn config(model: &Path, batch: usize) -> FinetuneConfig {
        FinetuneConfig {
            model: model.into(),
            data: vec!["text.tokens".into()],
            valid: vec![],
            valid_share: 0.2,
            recipe_name: RecipeName::nvidia(),
            recipe: Nvfp4Recipe::default(),
            schedule: None,
            lora: None,
            frozen: FrozenForm::High,
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
            recompute: 0,
            no_graph: false,
            fsdp: false,
            ep: 1,
            ep_dispatch: None,
            grad_reduce: GradReduce::F32,
            device: "cpu".into(),
        }
    }

    fn need(
        config: &FinetuneConfig,
        model: &SizedModel,
        teacher: Option<&SizedModel>,
    ) -> MemoryNeed {
        sizes(config, model, teacher, 1).unwrap().need()
    }

    #[test]
    fn the_need_is_that_of_the_parameters() {
        let root = golden("");
        for name in [
            "llama3-tiny",
            "qwen2-tiny",
            "qwen3-tiny",
            "qwen3moe-tiny",
            "mixtral-tiny",
            "gemma2-tiny",
            "gemma3-tiny",
            "deepseek3-tiny",
            "gptoss-tiny",
        ] {
            let folder = root.join(name);
            let mut config = config(&folder, 2);
            let (device, dtype) = (Device::flex().autodiff(), FloatDType::F32);
            let decoder = Decoder::load(&folder, &device, dtype).unwrap();
            let count = decoder.num_params() as u64;
            let model = SizedModel::read(&folder).unwrap();
            let full = need(&config, &model, None);
            assert_eq!(full.weights, 4 * count, "{name}");
            assert_eq!((full.gradients, full.optimizer), (4 * count, 8 * count));
            assert_eq!(full.frozen, 0);
            config.batch = 6;
            let wide = need(&config, &model, None);
            assert_eq!(wide.activations, 3 * full.activations);
            config.recompute = 1;
            let first = &model.config.layers[0].feed_forward;
            let inner = match first {
                FeedForwardConfig::Dense { hidden } => *hidden,
                FeedForwardConfig::Moe {
                    hidden,
                    top_k,
                    shared,
                    ..
                } => hidden * top_k + shared.unwrap_or(0),
            };
            let inner = match model.config.block.activation {
                GateActivation::Silu => inner,
                GateActivation::GeluTanh | GateActivation::ClampedSwiGlu { .. } => 0,
            };
            let less = need(&config, &model, None);
            let tokens = 6 * 48;
            assert_eq!(
                wide.activations - less.activations,
                (4 * tokens * 2 * inner) as u64,
                "{name}"
            );
            config.recompute = 0;
            config.activation = Activation::Bf16;
            config.objective = Objective::Distillation {
                teacher: folder.clone(),
                form: FrozenForm::High,
                temperature: 1.0,
            };
            let half = need(&config, &model, Some(&model));
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
            let own = adapted.adapters().into_iter();
            let own = own.map(|it| it.a.shape().num_elements() + it.b.shape().num_elements());
            let own = own.sum::<usize>() as u64;
            assert_eq!(super::trained(&config).unwrap(), [count, count]);
            config.lora = Some(lora);
            config.objective = Objective::CrossEntropy;
            let small = need(&config, &model, None);
            let trained = adapted.num_params() as u64 - count;
            assert!(own < trained, "the joined matrices have zeros");
            assert_eq!(super::trained(&config).unwrap(), [own, own + count]);
            assert_eq!(
                (small.weights, small.optimizer),
                (4 * trained, 8 * trained),
                "{name}"
            );
            assert_eq!(small.frozen, 2 * count);

            // Packed; for f32, plus the largest weight dequantized.
            let mut packed = config.clone();
            packed.frozen = FrozenForm::W4a16;
            let found = need(&packed, &model, None);
            packed.activation = Activation::F32;
            let of_f32 = need(&packed, &model, None);
            let form = FrozenForm::W4a16;
            let decoder = Decoder::load_frozen(&folder, &device, dtype, form).unwrap();
            let (mut bytes, mut plain, mut largest) = (0, count, 0);
            let mut add = |weight: &Nvfp4Weight| {
                let [n, k] = weight.shape();
                let elements = (n * k) as u64;
                bytes += (weight.bytes() - 4 * weight.stack()) as u64;
                (plain, largest) = (plain - elements, largest.max(elements));
            };
            for layer in &decoder.layers {
                if let FeedForward::Moe(moe) = &layer.feed_forward {
                    for experts in [&moe.gate_up, &moe.down] {
                        let Experts::Packed(experts) = experts else {
                            panic!("experts are packed");
                        };
                        add(&experts.weight);
                    }
                }
                for (_, projection) in layer.projections() {
                    let Projection::Packed(projection) = projection else {
                        panic!("projections are packed");
                    };
                    add(&projection.weight);
                }
            }
            assert_eq!(found.frozen, bytes + 2 * plain, "{name}");
            let expected = bytes + 4 * plain + 4 * largest;
            assert_eq!(of_f32.frozen, expected, "{name}");
        }
    }

    /// For a quantized folder, counts the weights that it packs.
    #[test]
    fn packed_folders_need_what_they_hold() {
        let folder = golden("llama3-tiny-ct-nvfp4a16");
        let model = SizedModel::read(&folder).unwrap();
        let all = parameters(&model.config);
        let (packed, high) = (
            model.frozen(FrozenForm::W4a16, 2),
            model.frozen(FrozenForm::High, 2),
        );
        assert_eq!(high, 2 * all);
        assert!(packed < high, "{packed}");
        let plain = SizedModel::read(&golden("llama3-tiny")).unwrap();
        assert_eq!(plain.frozen(FrozenForm::W4a16, 2), packed);
    }

    /// Runs on a device that reports its memory, before anything is loaded.
    #[cfg(feature = "cpu")]
    #[test]
    fn a_run_that_cannot_fit_is_refused_with_what_to_change() {
        let mut config = config(&golden("llama3-tiny"), 1 << 34);
        let says = |config: &FinetuneConfig, parts: &[&str]| {
            let error = budget(config, 1)
                .unwrap()
                .check(&Device::cpu())
                .unwrap_err();
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
                "a larger --recompute",
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
            form: FrozenForm::High,
            temperature: 1.0,
        };
        says(&config, &["frozen weights"]);
        config.batch = 2;
        budget(&config, 1).unwrap().check(&Device::cpu()).unwrap();
    }
}
