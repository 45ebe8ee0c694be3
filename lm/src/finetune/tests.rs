use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use burn::module::{Module, ParamGroup};
use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData};
use burn_nvfp4::Nvfp4Recipe;
use burn_nvfp4::parallel::ProcessGroup;
use burn_nvfp4::recipe::NamedSchedule;

use super::data::TextReader;
use super::frozen_tests::some_adapters;
use super::loss::cross_entropy_of;
use super::*;
use crate::config::{Activation, GradReduce, RecipeName};
use crate::decoder::feed_forward::FeedForward;
use crate::decoder::lora::DEFAULT_TARGETS;
use crate::decoder::{Decoder, FrozenForm, LoraConfig, PackedRows};
use crate::hf::Dtype;
use crate::interchange::{Dialect, Scheme};
use crate::metrics::METRICS;
use crate::quantize::plan::Kept;
use crate::tokens::rows::places;
use crate::tokens::{Rows, Shard};
use crate::train::Outcome;
use nvfp4_test_support::{Scratch, golden, golden_with_tokenizer};

/// Writes lines that follow a pattern.
fn text(folder: &Path) -> PathBuf {
    let path = folder.join("text.jsonl");
    let line = |i: usize| {
        let words = ["the quick", " brown fox", " jumps over", " the lazy dog"];
        let words: String = (0..6 + i % 5).map(|j| words[(i + j * j) % 4]).collect();
        serde_json::json!({ "text": words }).to_string()
    };
    let lines: Vec<String> = (0..40).map(line).collect();
    fs::write(&path, lines.join("\n")).unwrap();
    path
}

/// Returns a run of 8 steps on the text.
pub(super) fn config(model: &Path, folder: &Path, recipe: &str) -> FinetuneConfig {
    let reader = TextReader::read(model).unwrap();
    let out = folder.join("text.tokens");
    reader.write_shard(&[text(folder)], &out).unwrap();
    FinetuneConfig {
        model: model.into(),
        data: vec![out],
        valid: vec![],
        valid_share: 0.2,
        recipe_name: recipe.parse::<RecipeName>().unwrap(),
        recipe: Nvfp4Recipe::preset(recipe).unwrap().with_seed(7),
        schedule: None,
        lora: None,
        frozen: FrozenForm::High,
        objective: Objective::CrossEntropy,
        activation: Activation::F32,
        steps: 8,
        batch: 2,
        accumulate: 1,
        context: 48,
        lr: 3e-3,
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
        device: "flex".into(),
    }
}

pub(super) fn data(config: &FinetuneConfig) -> TrainingData {
    let vocabulary = TextReader::read(&config.model).unwrap().vocabulary();
    TrainingData::open(config, vocabulary).unwrap()
}

pub(super) fn open<'a>(
    config: &'a FinetuneConfig,
    data: &'a TrainingData,
    device: &Device,
    folder: &Path,
) -> Result<Finetune<'a>> {
    Finetune::open(FinetuneTask::new(config, data), device, folder)
}

pub(super) fn finished<'a>(
    config: &'a FinetuneConfig,
    data: &'a TrainingData,
    folder: &Path,
) -> Finetune<'a> {
    let mut run = open(config, data, &Device::flex(), folder).unwrap();
    assert_eq!(run.train(None, &mut ()).unwrap(), Outcome::Finished);
    run
}

pub(super) fn valid_losses(run: &Finetune<'_>) -> Vec<f64> {
    run.rows().iter().filter_map(|row| row.valid_loss).collect()
}

pub(super) fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_to_vec().unwrap()
}

pub(super) fn ids(ids: &[i32]) -> Tensor<2, Int> {
    Tensor::from_data(
        TensorData::new(ids.to_vec(), [1, ids.len()]),
        &Device::flex(),
    )
}

/// Every model family learns, in high precision and in NVFP4, and the saved model is the trained
/// one.
fn learns(name: &str, model: &Path, recipe: &str) {
    let folder = Scratch::new(&format!("finetune-{name}-{recipe}"));
    let config = config(model, &folder, recipe);
    let data = data(&config);
    let run = finished(&config, &data, &folder.join("run"));
    let losses = valid_losses(&run);
    assert_eq!(losses.len(), 3);
    assert!(losses[2] < losses[0] - 0.3, "{name} {recipe}: {losses:?}");
    let out = folder.join("model");
    run.save_model(&out, Dtype::F32).unwrap();
    let saved = Decoder::load(&out, &Device::flex(), FloatDType::F32).unwrap();
    assert_eq!(saved.head.is_none(), saved.config().tied);
    if recipe == "bf16" {
        let tokens = ids(&[5, 3, 8, 13, 21]);
        let expected = values(run.model().valid().forward(tokens.clone()).unwrap());
        let found = values(saved.forward(tokens).unwrap());
        let largest = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
        for (found, expected) in found.iter().zip(&expected) {
            assert!(
                (found - expected).abs() <= 1e-5 * largest,
                "{found}, not {expected}"
            );
        }
    }
}

#[test]
fn llama_learns() {
    learns("llama3-tiny", &golden("llama3-tiny"), "bf16");
    learns("llama3-tiny", &golden("llama3-tiny"), "nvidia");
}

/// Tied embeddings, with biases, or with query and key norms.
#[test]
fn qwen_learns() {
    let qwen2 = golden_with_tokenizer("qwen2-tiny");
    learns("qwen2-tiny", &qwen2, "bf16");
    learns("qwen2-tiny", &qwen2, "nvidia");
    learns("qwen3-tiny", &golden("qwen3-tiny"), "bf16");
    learns("qwen3-tiny", &golden("qwen3-tiny"), "fwd_nvfp4_bwd_bf16");
}

/// Norms of outputs, GELU, windows, and soft caps of scores and logits.
#[test]
fn gemma_learns() {
    for (name, recipe) in [("gemma3-tiny", "bf16"), ("gemma2-tiny", "nvidia")] {
        learns(name, &golden_with_tokenizer(name), recipe);
    }
}

/// Latent attention, a sigmoid router, and shared experts, also from weights in FP8.
#[test]
fn deepseek_learns() {
    for (name, recipe) in [
        ("deepseek3-tiny", "bf16"),
        ("deepseek3-tiny", "nvidia"),
        ("deepseek3-tiny-fp8", "nvidia"),
    ] {
        learns(name, &golden_with_tokenizer(name), recipe);
    }
}

#[test]
fn experts_learn() {
    learns(
        "qwen3moe-tiny",
        &golden_with_tokenizer("qwen3moe-tiny"),
        "bf16",
    );
    learns(
        "mixtral-tiny",
        &golden_with_tokenizer("mixtral-tiny"),
        "nvidia",
    );
}

/// Sinks and biases of experts and routers are trained, from experts in bf16 and in MXFP4.
#[test]
fn gpt_oss_learns() {
    for (name, recipe) in [("gptoss-tiny", "bf16"), ("gptoss-tiny-mxfp4", "nvidia")] {
        learns(name, &golden_with_tokenizer(name), recipe);
    }
}

/// Returns the files of a checkpoint, without times.
pub(super) fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let checkpoint = crate::checkpoint::latest(folder).unwrap().unwrap();
    let names = ["model.bpk", "optimizer.bpk", "state.json"];
    let read = |name: &str| (name.to_owned(), fs::read(checkpoint.join(name)).unwrap());
    names.into_iter().map(read).collect()
}

/// With stochastic rounding and gradient accumulation, across the end of an epoch.
#[test]
fn a_resumed_run_is_the_same() {
    let folder = Scratch::new("finetune-resume");
    let config = FinetuneConfig {
        accumulate: 3,
        ..config(&golden("llama3-tiny"), &folder, "nvidia")
    };
    let data = data(&config);
    assert!(data.train.len() < 8 * config.rows_per_step());
    let (whole, parts) = (folder.join("whole"), folder.join("parts"));
    finished(&config, &data, &whole);
    for stop in [2, 5] {
        let mut run = open(&config, &data, &Device::flex(), &parts).unwrap();
        assert_eq!(run.train(Some(stop), &mut ()).unwrap(), Outcome::Stopped);
        assert_eq!(run.step(), stop);
    }
    finished(&config, &data, &parts);
    for ((name, whole), (_, parts)) in files(&whole).iter().zip(&files(&parts)) {
        assert!(whole == parts, "{name} differs");
    }
    // Returns all columns except the speed.
    let losses = |folder: &Path| -> Vec<String> {
        let text = fs::read_to_string(folder.join(METRICS)).unwrap();
        let cut = |line: &str| line.rsplit_once(',').unwrap().0.to_owned();
        text.lines().map(cut).collect()
    };
    assert_eq!(losses(&whole), losses(&parts));
    // Another configuration is refused.
    let other = FinetuneConfig {
        lr: 1e-3,
        ..config.clone()
    };
    let error = open(&other, &data, &Device::flex(), &parts).err();
    let error = format!("{:#}", error.unwrap());
    assert!(error.contains("another configuration"), "{error}");
}

/// A run whose recipe changes resumes in its phase; another schedule is refused.
#[test]
fn a_schedule_resumes_in_its_phase() {
    let folder = Scratch::new("finetune-schedule");
    let scheduled = |text: &str| {
        let named: NamedSchedule = text.parse().unwrap();
        let seeded = |name: &str| Nvfp4Recipe::preset(name).map(|recipe| recipe.with_seed(7));
        FinetuneConfig {
            steps: 4,
            schedule: Some(named.resolve(seeded).unwrap()),
            ..config(&golden("llama3-tiny"), &folder, "bf16")
        }
    };
    let config = scheduled("bf16,0.5=nvidia");
    config.check().unwrap();
    let data = data(&config);
    let (whole, parts) = (folder.join("whole"), folder.join("parts"));
    finished(&config, &data, &whole);
    let mut run = open(&config, &data, &Device::flex(), &parts).unwrap();
    run.train(Some(3), &mut ()).unwrap();
    finished(&config, &data, &parts);
    for ((name, whole), (_, parts)) in files(&whole).iter().zip(&files(&parts)) {
        assert!(whole == parts, "{name} differs");
    }
    let other = scheduled("bf16,0.75=nvidia");
    let error = open(&other, &data, &Device::flex(), &parts).err();
    let error = format!("{:#}", error.unwrap());
    for part in ["is bf16,0.5=nvidia", "is bf16,0.75=nvidia"] {
        assert!(error.contains(part), "{error}");
    }
    // What holds for a recipe holds for each phase.
    let mixed = FinetuneConfig {
        recipe_name: RecipeName::nvidia(),
        ..config.clone()
    };
    let error = mixed.check().unwrap_err().to_string();
    assert!(error.contains("begins with recipe bf16"), "{error}");
    let packed = FinetuneConfig {
        lora: Some(LoraConfig {
            rank: 4,
            alpha: 8.0,
            targets: DEFAULT_TARGETS.into(),
        }),
        frozen: FrozenForm::W4a16,
        ..config
    };
    let error = packed.check().unwrap_err().to_string();
    assert!(
        error.contains("recipe bf16,0.5=nvidia quantizes"),
        "{error}"
    );
}

/// Accumulated gradients of several forward passes equal those of one forward pass with all rows.
#[test]
fn accumulation_is_a_larger_batch() {
    let folder = Scratch::new("finetune-accumulate");
    let config = config(&golden("qwen3-tiny"), &folder, "bf16");
    let data = data(&config);
    let losses = |batch, accumulate| {
        let config = FinetuneConfig {
            batch,
            accumulate,
            steps: 3,
            ..config.clone()
        };
        let out = folder.join(format!("{batch}x{accumulate}"));
        valid_losses(&finished(&config, &data, &out))
    };
    let (one, several) = (losses(4, 1), losses(1, 4));
    for (one, several) in one.iter().zip(&several) {
        assert!((one - several).abs() < 1e-4, "{one}, {several}");
    }
}

/// Two documents packed into a row have the same features as separately, in every architecture.
#[test]
fn documents_of_a_row_do_not_see_each_other() {
    let names = [
        "llama3-tiny",
        "qwen2-tiny",
        "qwen3-tiny",
        "qwen3moe-tiny",
        "mixtral-tiny",
        "gemma2-tiny",
        "gemma3-tiny",
        "deepseek3-tiny",
        "gptoss-tiny",
    ];
    for name in names {
        let model = Decoder::load(&golden(name), &Device::flex(), FloatDType::F32).unwrap();
        let device = Device::flex();
        let first: Vec<i32> = (0..9).map(|i| (i * 37 + 5) % 288).collect();
        let second: Vec<i32> = (0..6).map(|i| (i * 53 + 11) % 288).collect();
        let apart = [&first, &second].map(|document| values(model.forward(ids(document)).unwrap()));
        let padded = [&first[..], &second, &[0, 0, 0]].concat();
        let rows = PackedRows::new(&[vec![9, 6]], 18, &device).unwrap();
        let together = model.features_packed(ids(&padded), &rows).unwrap();
        let together = values(model.logits(together));
        let expected = apart.concat();
        for (found, expected) in together.iter().zip(&expected) {
            assert!(
                (found - expected).abs() < 1e-4,
                "{name}: {found}, not {expected}"
            );
        }
        // Without offsets, the second document attends to the first.
        let seen = values(model.forward(ids(&padded)).unwrap());
        let differs = seen[9 * 288..15 * 288].iter().zip(&apart[1]);
        assert!(
            differs.into_iter().any(|(a, b)| (a - b).abs() > 1e-2),
            "{name}"
        );
        let error = PackedRows::new(&[vec![9, 10]], 18, &device).unwrap_err();
        assert!(error.to_string().contains("19 tokens"), "{error}");
    }
}

/// The loss of a packed row is the mean of its documents' losses, and prompts do not count.
#[test]
fn losses_are_of_the_targets_that_count() {
    let model = golden("llama3-tiny");
    let folder = Scratch::new("finetune-counts");
    let reader = TextReader::read(&model).unwrap();
    let decoder = Decoder::load(&model, &Device::flex(), FloatDType::F32).unwrap();
    let lines = [
        r#"{"prompt": "the quick brown", "completion": " fox jumps"}"#,
        r#"{"text": "the lazy dog"}"#,
    ];
    let shard = |name: &str, lines: &[&str]| {
        let (text, out) = (
            folder.join(format!("{name}.jsonl")),
            folder.join(format!("{name}.tokens")),
        );
        fs::write(&text, lines.join("\n")).unwrap();
        reader.write_shard(&[text], &out).unwrap();
        [std::sync::Arc::new(Shard::open(&out).unwrap())]
    };
    let loss = |shards: &[std::sync::Arc<Shard>]| {
        let rows = Rows::pack(shards, &places(shards), 64).unwrap();
        assert_eq!(rows.len(), 1);
        let counted = rows.batch(&[0]).unwrap().counted();
        let alone = ProcessGroup::single();
        let loss = cross_entropy_of(&decoder, &rows, [1, 9], &Device::flex(), &alone).unwrap();
        (loss, counted)
    };
    let apart = [("a", &lines[..1]), ("b", &lines[1..])];
    let apart = apart.map(|(name, lines)| loss(&shard(name, lines)));
    let (together, counted) = loss(&shard("both", &lines));
    let sum: f64 = apart.iter().map(|(loss, count)| loss * *count as f64).sum();
    assert_eq!(counted, apart[0].1 + apart[1].1);
    assert!((together - sum / counted as f64).abs() < 1e-5, "{together}");

    // Computed by hand: only the completion counts, after the prompt.
    let shards = shard("hand", &lines[..1]);
    let tokens = shards[0].read(0..shards[0].len()).unwrap();
    let logs = crate::eval::log_probabilities(&decoder, &tokens).unwrap();
    let counts = (1..tokens.len()).filter(|&i| shards[0].counts(i));
    let nats: Vec<f64> = counts.map(|i| -f64::from(logs[i - 1])).collect();
    assert!(nats.len() < logs.len());
    let expected = nats.iter().sum::<f64>() / nats.len() as f64;
    assert!(
        (apart[0].0 - expected).abs() < 1e-5,
        "{:?}, {expected}",
        apart[0]
    );
}

/// A student with rounded weights approaches its teacher; an identical one stays.
#[test]
fn distillation_approaches_the_teacher() {
    let model = golden("llama3-tiny");
    let folder = Scratch::new("finetune-distill");
    let distill = |recipe: &str, name: &str| {
        let config = FinetuneConfig {
            objective: Objective::Distillation {
                teacher: model.clone(),
                form: FrozenForm::High,
                temperature: 1.0,
            },
            log_every: 1,
            lr: 1e-3,
            ..config(&model, &folder, recipe)
        };
        let data = data(&config);
        let run = finished(&config, &data, &folder.join(name));
        let losses = run.rows().iter().filter_map(|row| row.train_loss);
        losses.collect::<Vec<f64>>()
    };
    let losses = distill("fwd_nvfp4_bwd_bf16", "quantized");
    assert!(losses[0] > 1e-4, "{losses:?}");
    let last: f64 = losses[5..].iter().sum::<f64>() / 3.0;
    assert!(last < 0.8 * losses[0], "{losses:?}");
    let losses = distill("bf16", "same");
    assert!(losses[0].abs() < 1e-6, "{losses:?}");
}

/// A model with random weights learns from scratch.
#[test]
fn random_models_are_folders() {
    let source = golden("qwen3-tiny");
    let folder = Scratch::new("finetune-random");
    let model = folder.join("init");
    init::write_random(&source.join("config.json"), &source, None, &model, 5).unwrap();
    let again = folder.join("again");
    init::write_random(&source.join("config.json"), &source, None, &again, 5).unwrap();
    let bytes = |folder: &Path| fs::read(folder.join("model.safetensors")).unwrap();
    assert!(bytes(&model) == bytes(&again));
    let config = config(&model, &folder, "bf16");
    let data = data(&config);
    let losses = valid_losses(&finished(&config, &data, &folder.join("run")));
    // The untrained model predicts all 288 tokens about equally.
    assert!((losses[0] - 288f64.ln()).abs() < 0.7, "{losses:?}");
    assert!(losses[2] < losses[0] - 0.5, "{losses:?}");
}

/// Losses, parameters, moments and state equal those of a run without recomputation, byte for byte,
/// in high precision and with stochastic rounding, also with experts.
#[test]
fn recomputing_changes_no_bit() {
    for (name, recipe) in [
        ("llama3-tiny", "nvidia"),
        ("llama3-tiny", "bf16"),
        ("qwen3-tiny", "quartet2"),
        ("qwen3moe-tiny", "nvidia"),
        ("mixtral-tiny", "bf16"),
        ("deepseek3-tiny", "nvidia"),
    ] {
        let model = golden_with_tokenizer(name);
        let folder = Scratch::new(&format!("finetune-recompute-{name}-{recipe}"));
        let run = |recompute: usize| {
            let config = FinetuneConfig {
                recompute,
                steps: 3,
                log_every: 1,
                ..config(&model, &folder, recipe)
            };
            let data = data(&config);
            let out = folder.join(recompute.to_string());
            let run = finished(&config, &data, &out);
            let losses = run
                .rows()
                .iter()
                .map(|row| (row.train_loss, row.valid_loss));
            let losses: Vec<_> = losses.collect();
            // The state includes the configuration, so only the tensors are compared.
            let [model, optimizer] = [0, 1].map(|file| files(&out)[file].1.clone());
            (losses, model, optimizer)
        };
        let sized = memory::SizedModel::read(&model).unwrap();
        let layers = sized.config.layers.len();
        let kept = run(0);
        for recompute in [1, layers] {
            assert!(run(recompute) == kept, "{name}, {recipe}, {recompute}");
        }
    }
    let folder = Scratch::new("finetune-recompute-errors");
    let gemma = golden_with_tokenizer("gemma3-tiny");
    let gpt_oss = golden_with_tokenizer("gptoss-tiny");
    let config = |source: &Path| FinetuneConfig {
        recompute: 1,
        ..config(source, &folder, "bf16")
    };
    for other in [&gemma, &gpt_oss] {
        let config = config(other);
        let data = data(&config);
        let error = open(&config, &data, &Device::flex(), &folder.join("other")).err();
        let error = format!("{:#}", error.unwrap());
        assert!(error.contains("another activation than SiLU"), "{error}");
    }
    for (lora, recompute, says) in [
        (None, 99, "recompute is 99, but the model has"),
        (
            Some(LoraConfig {
                targets: "down_proj$".into(),
                ..some_adapters()
            }),
            1,
            "has adapters",
        ),
    ] {
        let config = FinetuneConfig {
            lora,
            recompute,
            ..config(&golden("llama3-tiny"))
        };
        let data = data(&config);
        let error = open(&config, &data, &Device::flex(), &folder.join("run")).err();
        let error = format!("{:#}", error.unwrap());
        assert!(error.contains(says), "{error}");
    }
}

/// After quantization-aware training, an engine's weights equal those of the training forward:
/// loaded as packed weights, the exported folder computes what the model in training did.
#[test]
fn exports_compute_as_in_training() {
    for (name, recipe) in [
        ("llama3-tiny", Nvfp4Recipe::weight_only_qat()),
        ("qwen2-tiny", Nvfp4Recipe::weight_only_qat()),
        ("gemma2-tiny", Nvfp4Recipe::weight_only_qat()),
        ("gemma3-tiny", Nvfp4Recipe::weight_only_qat()),
        ("qwen3moe-tiny", Nvfp4Recipe::weight_only_qat()),
        ("deepseek3-tiny", Nvfp4Recipe::weight_only_qat()),
        ("gptoss-tiny", Nvfp4Recipe::weight_only_qat()),
    ] {
        let model = golden_with_tokenizer(name);
        let folder = Scratch::new(&format!("finetune-export-{name}"));
        let config = FinetuneConfig {
            steps: 3,
            recipe: recipe.with_seed(7),
            ..config(&model, &folder, "weight_only_qat")
        };
        let data = data(&config);
        let run = finished(&config, &data, &folder.join("run"));
        let out = folder.join("nvfp4");
        run.export(&out, Dialect::CompressedTensors, Scheme::W4a16)
            .unwrap();
        let packed = Decoder::load_packed(&out, &Device::flex(), FloatDType::F32, None).unwrap();
        let tokens = ids(&[5, 3, 8, 13, 21]);
        let expected = values(run.model().valid().forward(tokens.clone()).unwrap());
        let found = values(packed.forward(tokens).unwrap());
        let largest = expected.iter().fold(0f32, |most, x| most.max(x.abs()));
        let pairs = found.iter().zip(&expected);
        let error = pairs.fold(0f32, |most, (a, b)| most.max((a - b).abs())) / largest;
        assert!(error < 1e-3, "{name}: {error}");
    }
}

/// A model packed for inference has the same losses as in validation.
#[test]
fn packed_models_have_the_losses_of_validation() {
    let folder = Scratch::new("finetune-once");
    for (name, recipe) in [
        ("llama3-tiny", "nvidia"),
        ("mixtral-tiny", "nvidia"),
        ("qwen3-tiny", "weight_only_qat"),
        ("gemma3-tiny", "nvidia"),
        ("deepseek3-tiny", "nvidia"),
        ("gptoss-tiny", "nvidia"),
        ("llama3-tiny", "fwd_nvfp4_bwd_bf16"),
    ] {
        let model = golden_with_tokenizer(name);
        let config = config(&model, &folder, recipe);
        let data = data(&config);
        let run = folder.join(format!("{name}-{recipe}"));
        let run = open(&config, &data, &Device::flex(), &run).unwrap();
        let model = run.model().valid();
        let mut packed = model.clone();
        for layer in &mut packed.layers {
            for (_, projection) in layer.projections_mut() {
                *projection = projection.clone().into_packed().unwrap();
            }
            if let FeedForward::Moe(moe) = &mut layer.feed_forward {
                moe.gate_up = moe.gate_up.clone().into_packed().unwrap();
                moe.down = moe.down.clone().into_packed().unwrap();
            }
        }
        assert!(packed.layers[0].attention.out.is_packed());
        let device = Device::flex();
        let alone = ProcessGroup::single();
        let loss = |model: &Decoder| {
            cross_entropy_of(model, &data.valid, [2, 8], &device, &alone).unwrap()
        };
        let (found, expected) = (loss(&packed), loss(&model));
        assert!(
            (found - expected).abs() < 2e-6 * expected,
            "{name}, {recipe}: {found}, not {expected}"
        );
    }
}

/// Layers that training keeps in high precision are not quantized by the export.
#[test]
fn exports_keep_what_training_keeps() {
    let folder = Scratch::new("finetune-kept");
    let kept = ParamGroup::from_any_regexes(vec!["layers\\.0\\.attention"]).unwrap();
    let config = FinetuneConfig {
        steps: 3,
        recipe: Nvfp4Recipe::fwd_nvfp4_bwd_bf16().with_high_precision(Some(kept)),
        ..config(&golden("llama3-tiny"), &folder, "fwd_nvfp4_bwd_bf16")
    };
    let data = data(&config);
    let run = finished(&config, &data, &folder.join("run"));
    let out = folder.join("nvfp4");
    let done = run.export(&out, Dialect::ModelOpt, Scheme::W4a4).unwrap();
    let done = done.expect("rank 0 writes");
    let excluded: Vec<&str> = done
        .kept
        .iter()
        .filter(|layer| layer.reason == Kept::Excluded)
        .map(|layer| layer.module.as_str())
        .collect();
    let modules = ["k_proj", "o_proj", "q_proj", "v_proj"];
    let expected = modules.map(|name| format!("model.layers.0.self_attn.{name}"));
    let mut sorted = excluded.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, expected);
    assert_eq!(done.layers.len(), 10);
}

#[test]
fn what_does_not_fit_is_named() {
    let model = golden("llama3-tiny");
    let folder = Scratch::new("finetune-errors");
    let good = config(&model, &folder, "bf16");
    let check = |change: &dyn Fn(&mut FinetuneConfig), name: &str| {
        let mut config = good.clone();
        change(&mut config);
        let error = config.check().unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    };
    check(&|config| config.batch = 0, "batch is 0");
    check(&|config| config.warmup = 8, "warmup is 8");
    check(&|config| config.lr = f64::NAN, "lr is NaN");
    check(&|config| config.data.clear(), "data");
    let data = data(&good);
    let long = FinetuneConfig {
        context: 100_000,
        ..good.clone()
    };
    let error = open(&long, &data, &Device::flex(), &folder.join("run")).err();
    assert!(error.unwrap().to_string().contains("context is 100000"));
    // Distillation of logits with a soft cap.
    let capped = FinetuneConfig {
        objective: Objective::Distillation {
            teacher: golden("gemma2-tiny"),
            form: FrozenForm::High,
            temperature: 1.0,
        },
        ..good.clone()
    };
    let error = open(&capped, &data, &Device::flex(), &folder.join("run")).err();
    let error = format!("{:#}", error.unwrap());
    assert!(error.contains("the teacher has a soft cap"), "{error}");
    // Tokens of another tokenizer.
    let other = TextReader::read(&golden("qwen3-tiny"))
        .unwrap()
        .vocabulary();
    let error = TrainingData::open(&good, other).unwrap_err().to_string();
    assert!(error.contains("another tokenizer"), "{error}");
}
