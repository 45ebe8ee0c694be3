//! Tests adapters on frozen weights, in high precision and packed.

use std::path::Path;

use burn::module::Module;
use burn::tensor::{Device, FloatDType};
use burn_nvfp4::Nvfp4Recipe;

use super::data::TextReader;
use super::tests::{config, data, files, finished, ids, open, valid_losses, values};
use super::*;
use crate::decoder::feed_forward::FeedForward;
use crate::decoder::{AdapterFolder, Decoder, FrozenForm, LoraConfig};
use crate::hf::{Dtype, TensorFolder};
use crate::interchange::{Dialect, Scheme};
use nvfp4_test_support::{Scratch, golden, golden_with_tokenizer};

/// Only the adapters are trained. Merging them gives the trained model; their file holds the
/// trained values.
#[test]
fn adapters_learn_beside_frozen_weights() {
    let model = golden("qwen3-tiny");
    let folder = Scratch::new("finetune-lora");
    let lora = LoraConfig {
        rank: 4,
        alpha: 8.0,
        targets: r"\.(q|v|down)_proj$".into(),
    };
    let config = FinetuneConfig {
        lora: Some(lora.clone()),
        lr: 2e-2,
        steps: 12,
        ..config(&model, &folder, "bf16")
    };
    let data = data(&config);
    let whole = folder.join("whole");
    let run = finished(&config, &data, &whole);
    let losses = valid_losses(&run);
    assert!(losses[losses.len() - 1] < losses[0] - 0.1, "{losses:?}");

    // A resumed run gives the same result; a checkpoint has only the adapters.
    let parts = folder.join("parts");
    let mut part = open(&config, &data, &Device::flex(), &parts).unwrap();
    part.train(Some(5), &mut ()).unwrap();
    finished(&config, &data, &parts);
    let (left, right) = (files(&whole), files(&parts));
    for ((name, left), (_, right)) in left.iter().zip(&right) {
        assert!(left == right, "{name} differs");
    }
    // Queries and values are joined; the down projection alone is padded to a rank of 8.
    let trained = 2 * 8 * ((96 + 256) + (160 + 96));
    assert!(
        (4 * trained..4 * trained + 8192).contains(&left[0].1.len()),
        "{}",
        left[0].1.len()
    );

    // Merged, and loaded from the adapter's tensors.
    let merged = folder.join("merged");
    run.save_model(&merged, Dtype::F32).unwrap();
    let adapter = folder.join("adapter");
    run.save_adapter(&adapter).unwrap();
    let tokens = ids(&[5, 3, 8, 13, 21]);
    let expected = values(run.model().valid().forward(tokens.clone()).unwrap());
    let load = |folder: &Path| Decoder::load(folder, &Device::flex(), FloatDType::F32).unwrap();
    let read = AdapterFolder::read(&adapter).unwrap();
    for saved in [load(&merged), load(&model).with_adapter(&read).unwrap()] {
        let found = values(saved.forward(tokens.clone()).unwrap());
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found - expected).abs() < 1e-4, "{found}, not {expected}");
        }
    }
    let json: serde_json::Value =
        crate::checkpoint::read_json(&adapter.join("adapter_config.json")).unwrap();
    assert_eq!((&json["r"], &json["lora_alpha"]), (&4.into(), &8.0.into()));
    assert_eq!(json["target_modules"].as_array().unwrap().len(), 6);
    let tensors = TensorFolder::open_file(&adapter.join("adapter_model.safetensors")).unwrap();
    assert_eq!(tensors.len(), 12);
    let (before, after) = (
        TensorFolder::open(&model).unwrap(),
        TensorFolder::open(&merged).unwrap(),
    );
    let mut changed = 0;
    for tensor in after.iter() {
        let old = before.get(tensor.name).unwrap().to_f32().unwrap();
        let new = tensor.to_f32().unwrap();
        let module = tensor.name.strip_suffix(".weight").unwrap();
        let part = |part: &str| tensors.find(&format!("base_model.model.{module}.{part}.weight"));
        let (Some(a), Some(b)) = (part("lora_A"), part("lora_B")) else {
            assert_eq!(old, new, "{module}");
            continue;
        };
        changed += 1;
        let ([rows, columns], rank) = ([tensor.shape[0], tensor.shape[1]], a.shape[0]);
        assert_eq!(
            (a.shape, b.shape),
            (&[rank, columns][..], &[rows, rank][..])
        );
        let (a, b) = (a.to_f32().unwrap(), b.to_f32().unwrap());
        for row in 0..rows {
            for column in 0..columns {
                let product = (0..rank).map(|i| b[row * rank + i] * a[i * columns + column]);
                let expected = old[row * columns + column] + 2.0 * product.sum::<f32>();
                let found = new[row * columns + column];
                assert!(
                    (found - expected).abs() < 1e-5,
                    "{module}: {found}, not {expected}"
                );
            }
        }
    }
    assert_eq!(changed, 6);

    for (targets, model, name) in [
        ("nothing", "qwen3-tiny", "matches no projection"),
        ("(", "qwen3-tiny", "not a valid regular expression"),
        ("proj", "qwen3moe-tiny", "experts cannot"),
    ] {
        let config = FinetuneConfig {
            model: golden(model),
            lora: Some(LoraConfig {
                targets: targets.into(),
                ..lora.clone()
            }),
            ..config.clone()
        };
        let error = open(&config, &data, &Device::flex(), &folder.join("no")).err();
        let error = format!("{:#}", error.unwrap());
        assert!(error.contains(name), "{error}");
    }
}

/// Returns adapters of rank 4 on some projections.
pub(super) fn some_adapters() -> LoraConfig {
    LoraConfig {
        rank: 4,
        alpha: 8.0,
        targets: r"\.(q|v|o)_proj$".into(),
    }
}

/// Configures a run on the frozen weights of the quantized folder `model` in the form `frozen`,
/// with its data; the tokenizer is that of `plain`.
fn beside(model: &Path, plain: &Path, folder: &Path, frozen: FrozenForm) -> FinetuneConfig {
    FinetuneConfig {
        model: model.into(),
        lora: Some(some_adapters()),
        frozen,
        lr: 2e-2,
        log_every: 1,
        ..config(plain, folder, "bf16")
    }
}

/// Returns the data of such a run.
fn data_beside(config: &FinetuneConfig, plain: &Path) -> TrainingData {
    let vocabulary = TextReader::read(plain).unwrap().vocabulary();
    TrainingData::open(config, vocabulary).unwrap()
}

/// Adapters on packed weights learn the same as on the dequantized weights, and no high-precision
/// copy of packed weights remains.
#[test]
fn adapters_learn_beside_packed_weights() {
    for (name, plain) in [
        ("llama3-tiny-ct-nvfp4a16", "llama3-tiny"),
        ("qwen3moe-tiny-modelopt-nvfp4", "qwen3moe-tiny"),
        ("mixtral-tiny-modelopt-nvfp4", "mixtral-tiny"),
    ] {
        let (model, plain) = (golden(name), golden_with_tokenizer(plain));
        let folder = Scratch::new(&format!("finetune-packed-{name}"));
        let run = |frozen: FrozenForm| {
            let config = beside(&model, &plain, &folder, frozen);
            let data = data_beside(&config, &plain);
            let run = finished(&config, &data, &folder.join(frozen.name()));
            let is_packed = frozen != FrozenForm::High;
            let layer = &run.model().layers[0];
            assert_eq!(layer.attention.qkv.is_packed(), is_packed);
            if let FeedForward::Moe(moe) = &layer.feed_forward {
                assert_eq!(moe.gate_up.is_packed(), is_packed);
            }
            let losses = run.rows().iter().filter_map(|row| row.train_loss);
            (losses.collect::<Vec<f64>>(), valid_losses(&run))
        };
        let packed = run(FrozenForm::W4a16);
        let valid = &packed.1;
        assert!(valid[valid.len() - 1] < valid[0] - 0.1, "{name}: {valid:?}");
        // Folders that quantize activations are not dequantized.
        if name == "llama3-tiny-ct-nvfp4a16" {
            let high = run(FrozenForm::High);
            let pairs = packed.0.iter().zip(&high.0);
            for (packed, high) in pairs.chain(packed.1.iter().zip(&high.1)) {
                assert!((packed - high).abs() < 1e-4 * high, "{packed}, not {high}");
            }
        }
    }
}

/// Adapters on weights that are quantized at load time learn in every family, and the merged model
/// computes the same.
#[test]
fn adapters_learn_in_every_family() {
    for name in [
        "qwen2-tiny",
        "gemma2-tiny",
        "gemma3-tiny",
        "deepseek3-tiny",
        "deepseek3-tiny-fp8",
        "gptoss-tiny",
    ] {
        let model = golden_with_tokenizer(name);
        let folder = Scratch::new(&format!("finetune-adapters-{name}"));
        let config = FinetuneConfig {
            lora: Some(some_adapters()),
            frozen: FrozenForm::W4a16,
            lr: 2e-2,
            ..config(&model, &folder, "bf16")
        };
        let data = data(&config);
        let run = finished(&config, &data, &folder.join("run"));
        let losses = valid_losses(&run);
        assert!(
            losses[losses.len() - 1] < losses[0] - 0.1,
            "{name}: {losses:?}"
        );
        let merged = folder.join("merged");
        run.save_model(&merged, Dtype::F32).unwrap();
        let merged = Decoder::load(&merged, &Device::flex(), FloatDType::F32).unwrap();
        let tokens = ids(&[5, 3, 8, 13, 21]);
        let expected = values(run.model().valid().forward(tokens.clone()).unwrap());
        let found = values(merged.forward(tokens).unwrap());
        for (found, expected) in found.iter().zip(&expected) {
            assert!(
                (found - expected).abs() < 1e-3,
                "{name}: {found}, not {expected}"
            );
        }
    }
}

/// Adapters learn beside layers in NVFP4, FP8 and bf16, which stay as they are.
#[test]
fn adapters_learn_beside_mixed_formats() {
    for name in ["llama3-tiny-modelopt-mixed", "llama3-tiny-ct-mixed"] {
        let model = golden_with_tokenizer(name);
        let folder = Scratch::new(&format!("finetune-{name}"));
        let config = FinetuneConfig {
            lora: Some(some_adapters()),
            frozen: FrozenForm::of(&model).unwrap(),
            lr: 2e-2,
            ..config(&model, &folder, "bf16")
        };
        let data = data(&config);
        let run = finished(&config, &data, &folder.join("run"));
        let losses = valid_losses(&run);
        assert!(losses[losses.len() - 1] < losses[0] - 0.1, "{losses:?}");
        // Targets are the projections in FP8, and one of two outputs in NVFP4 or bf16.
        let trained = run.model().valid();
        let base = Decoder::load_dequantized(&model, &Device::flex(), FloatDType::F32);
        let base = match name {
            "llama3-tiny-ct-mixed" => base.unwrap(),
            _ => {
                let error = base.unwrap_err().to_string();
                assert!(error.contains("w4a4"), "{error}");
                continue;
            }
        };
        let down = |model: &Decoder| match &model.layers[0].feed_forward {
            FeedForward::Dense(dense) => values(dense.down.dense().0),
            FeedForward::Moe(_) => unreachable!("a dense model"),
        };
        assert!(
            down(&trained) == down(&base),
            "{name}: frozen weights changed"
        );
    }
}

/// Weights of a high-precision folder are quantized at load time, as in training for serving; the
/// run can be stopped, merged and exported.
#[test]
fn frozen_weights_are_quantized_at_load() {
    let model = golden_with_tokenizer("qwen3moe-tiny");
    let folder = Scratch::new("finetune-quantized-at-load");
    let loaded = |name: &str, form| {
        Decoder::load_frozen(&golden(name), &Device::flex(), FloatDType::F32, form)
    };
    let tokens = || ids(&[5, 3, 8, 13, 21]);
    let names = [
        "qwen3moe-tiny",
        "qwen2-tiny",
        "gemma2-tiny",
        "gemma3-tiny",
        "deepseek3-tiny",
        "gptoss-tiny",
    ];
    let forms = [FrozenForm::W4a16, FrozenForm::W4a4];
    for (name, form) in names
        .into_iter()
        .flat_map(|name| forms.map(|form| (name, form)))
    {
        let scheme = form.scheme().unwrap();
        let high = loaded(name, FrozenForm::High).unwrap();
        let rounding = high
            .into_training(&scheme.recipe(), FloatDType::F32)
            .unwrap();
        let expected = values(rounding.forward(tokens()).unwrap());
        let packed = loaded(name, form).unwrap();
        assert!(
            packed
                .layers
                .iter()
                .all(|layer| layer.attention.out.is_packed())
        );
        assert!(
            values(packed.forward(tokens()).unwrap()) == expected,
            "{name}, {form:?}"
        );
    }

    let config = FinetuneConfig {
        lora: Some(some_adapters()),
        frozen: FrozenForm::W4a4,
        lr: 2e-2,
        ..config(&model, &folder, "bf16")
    };
    let data = data(&config);
    let (whole, parts) = (folder.join("whole"), folder.join("parts"));
    let run = finished(&config, &data, &whole);
    let losses = valid_losses(&run);
    assert!(losses[losses.len() - 1] < losses[0] - 0.1, "{losses:?}");
    let mut part = open(&config, &data, &Device::flex(), &parts).unwrap();
    part.train(Some(5), &mut ()).unwrap();
    finished(&config, &data, &parts);
    for ((name, whole), (_, parts)) in files(&whole).iter().zip(&files(&parts)) {
        assert!(whole == parts, "{name} differs");
    }
    // Queries and values are joined; the output projection alone is padded to a rank of 8.
    let trained = 2 * 8 * ((96 + 256) + (96 + 96));
    let bytes = files(&whole)[0].1.len();
    assert!(
        (4 * trained..4 * trained + 8192).contains(&bytes),
        "a checkpoint of {bytes} bytes has more than adapters"
    );
    run.export(
        &folder.join("nvfp4"),
        Dialect::CompressedTensors,
        Scheme::W4a4,
    )
    .unwrap();

    // The merged model does not round activations.
    let merged = folder.join("merged");
    run.save_model(&merged, Dtype::F32).unwrap();
    let saved = Decoder::load(&merged, &Device::flex(), FloatDType::F32).unwrap();
    let weight = |model: &Decoder| values(model.layers[1].attention.out.dense().0);
    let (found, expected) = (weight(&saved), weight(&run.model().valid()));
    assert!(found == expected);
    let base = loaded("qwen3moe-tiny", FrozenForm::W4a4).unwrap();
    assert!(weight(&base) != expected, "the adapters are merged");

    // Options that a form excludes are refused, not ignored.
    for (change, name) in [
        (
            FinetuneConfig {
                lora: None,
                ..config.clone()
            },
            "frozen is w4a4, but all weights are trained",
        ),
        (
            FinetuneConfig {
                recipe: Nvfp4Recipe::default(),
                ..config.clone()
            },
            "frozen is w4a4, but recipe bf16 quantizes",
        ),
    ] {
        let error = change.check().unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
}

/// Folders that quantize activations propagate gradients, with or without quantized activations.
#[test]
fn folders_of_quantized_activations_are_trained() {
    let (model, plain) = (golden("llama3-tiny-ct-nvfp4"), golden("llama3-tiny"));
    let folder = Scratch::new("finetune-packed-w4a4");
    let losses = [FrozenForm::W4a16, FrozenForm::W4a4].map(|frozen| {
        let config = beside(&model, &plain, &folder, frozen);
        let data = data_beside(&config, &plain);
        let losses = valid_losses(&finished(&config, &data, &folder.join(frozen.name())));
        assert!(
            losses[losses.len() - 1] < losses[0] - 0.1,
            "{frozen:?}: {losses:?}"
        );
        losses
    });
    assert_ne!(losses[0], losses[1]);
    let config = beside(&model, &plain, &folder, FrozenForm::High);
    let data = data_beside(&config, &plain);
    let error = open(&config, &data, &Device::flex(), &folder.join("high")).err();
    let error = format!("{:#}", error.unwrap());
    assert!(error.contains("quantizes activations (w4a4)"), "{error}");
}

/// A packed teacher equals the packed model; an identical student has zero loss.
#[test]
fn teachers_are_packed() {
    let model = golden("llama3-tiny");
    let folder = Scratch::new("finetune-packed-teacher");
    let first_loss = |frozen: FrozenForm, form: FrozenForm| {
        let config = FinetuneConfig {
            lora: Some(some_adapters()),
            frozen,
            objective: Objective::Distillation {
                teacher: model.clone(),
                form,
                temperature: 1.0,
            },
            log_every: 1,
            steps: 3,
            ..config(&model, &folder, "bf16")
        };
        let data = data(&config);
        let out = folder.join(format!("{}-{}", frozen.name(), form.name()));
        let run = finished(&config, &data, &out);
        run.rows().iter().find_map(|row| row.train_loss).unwrap()
    };
    use FrozenForm::{High, W4a16};
    assert!(first_loss(W4a16, W4a16).abs() < 1e-6);
    let [to_high, to_packed] = [first_loss(W4a16, High), first_loss(High, W4a16)];
    assert!(to_high > 1e-4 && to_packed > 1e-4, "{to_high}, {to_packed}");
}
