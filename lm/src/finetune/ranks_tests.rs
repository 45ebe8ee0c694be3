//! Compares runs of several ranks, as threads over loopback, with a single-rank run.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use burn::tensor::{Bytes, Device, FloatDType};
use burn_nvfp4::parallel::ProcessGroup;
use burn_pack::Reader;

use super::memory::check_model;
use super::tests::{config, data, files};
use super::*;
use crate::checkpoint::{latest, resolve};
use crate::config::{ExpertDispatchName, GradReduce};
use crate::decoder::feed_forward::FeedForward;
use crate::decoder::{Decoder, FrozenForm, LoraConfig};
use crate::hf::Dtype;
use crate::interchange::{Dialect, Scheme};
use nvfp4_test_support::{Scratch, golden, golden_with_tokenizer, is_full};

/// Runs a closure on each of `ranks` ranks with its run, and returns the results in rank order.
fn on_ranks<T: Send>(
    config: &FinetuneConfig,
    folder: &Path,
    ranks: usize,
    body: impl Fn(&mut Finetune<'_>) -> T + Sync,
) -> Vec<T> {
    let (body, data) = (&body, &data(config));
    let worlds = ProcessGroup::loopback(ranks, Duration::from_secs(120));
    thread::scope(|scope| {
        let threads = worlds.into_iter().map(|world| {
            let groups = config.groups(&world).unwrap();
            let task = FinetuneTask::new(config, data);
            let open = move || Finetune::open_rank(task, &Device::flex(), folder, groups);
            scope.spawn(move || body(&mut open().unwrap()))
        });
        let threads: Vec<_> = threads.collect();
        let results = threads.into_iter().map(|thread| thread.join());
        results
            .map(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

/// Returns the training and validation losses, which are the same on all ranks.
fn losses(config: &FinetuneConfig, folder: &Path, ranks: usize) -> Vec<f64> {
    let mut all = on_ranks(config, folder, ranks, |run| {
        run.train(None, &mut ()).unwrap();
        let rows = run.rows().iter();
        let training = rows.clone().filter_map(|row| row.train_loss);
        let valid = rows.filter_map(|row| row.valid_loss);
        training.chain(valid).collect::<Vec<f64>>()
    });
    let first = all.swap_remove(0);
    assert!(all.iter().all(|losses| *losses == first));
    first
}

fn largest_difference(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let errors = found.iter().zip(expected).map(|(a, b)| (a / b - 1.0).abs());
    errors.fold(0.0, f64::max)
}

/// Returns a configuration with four rows per forward pass.
fn four_rows(model: &Path, folder: &Path, recipe: &str) -> FinetuneConfig {
    FinetuneConfig {
        batch: 4,
        ..config(model, folder, recipe)
    }
}

fn fsdp(config: &FinetuneConfig) -> FinetuneConfig {
    FinetuneConfig {
        fsdp: true,
        ..config.clone()
    }
}

fn lora() -> Option<LoraConfig> {
    Some(LoraConfig {
        rank: 4,
        alpha: 8.0,
        targets: r"\.(q|v|down)_proj$".into(),
    })
}

/// Returns the tensors of the latest checkpoint: parameters and moments.
fn tensors(folder: &Path) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let saved = crate::checkpoint::Saved::<FinetuneRun>::load(&resolve(folder).unwrap());
    let saved = saved.unwrap();
    let read = |container: Bytes| {
        let tensors = Reader::from_bytes(container).unwrap().into_tensors();
        let tensors = tensors.unwrap().into_iter().map(|tensor| {
            let (name, _, shape, _, bytes) = tensor.into_parts().unwrap();
            let values = bytes.chunks_exact(4);
            let values = values.map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()));
            (name, shape.to_vec(), values.collect())
        });
        tensors.collect::<Vec<_>>()
    };
    [read(saved.model), read(saved.optimizer)].concat()
}

/// In high precision, ranks train like a single rank with all rows, up to the order of sums: with
/// tied heads, experts, adapters and a teacher, replicated and sharded, with accumulation. Without
/// `--full`, two ranks accumulate and four do not.
#[test]
fn ranks_train_as_one() {
    let accumulated = |config: FinetuneConfig| FinetuneConfig {
        accumulate: 2,
        steps: 4,
        ..config
    };
    for (name, change) in [
        ("llama3-tiny", None),
        ("qwen3-tiny", None),
        ("qwen3moe-tiny", None),
        ("gptoss-tiny", None),
        ("deepseek3-tiny", None),
        ("llama3-tiny", Some("lora")),
        ("llama3-tiny", Some("teacher")),
    ] {
        let folder = Scratch::new(&format!(
            "finetune-ranks-{name}-{}",
            change.unwrap_or("all")
        ));
        let model = golden_with_tokenizer(name);
        let config = four_rows(&model, &folder, "bf16");
        let config = match change {
            Some("lora") => FinetuneConfig {
                lora: lora(),
                ..config
            },
            Some(_) => FinetuneConfig {
                objective: Objective::Distillation {
                    teacher: golden("qwen3-tiny"),
                    form: FrozenForm::High,
                    temperature: 2.0,
                },
                ..config
            },
            None => config,
        };
        for config in [config.clone(), accumulated(config)] {
            let layout = |name: &str| folder.join(format!("{name}-{}", config.accumulate));
            let expected = losses(&config, &layout("one"), 1);
            let ranks: &[usize] = match (is_full(), config.accumulate) {
                (true, _) => &[2, 4],
                (false, 1) => &[4],
                (false, _) => &[2],
            };
            for &ranks in ranks {
                let whole = layout(&format!("whole-{ranks}"));
                let found = losses(&config, &whole, ranks);
                let error = largest_difference(&found, &expected);
                let what = format!("{name}, {change:?}, {ranks} ranks of {}", config.accumulate);
                eprintln!("{what}: {error:e}");
                assert!(error < 2e-6, "{what}: {error:e}");
                if config.lora.is_some() {
                    continue;
                }
                let sharded = layout(&format!("sharded-{ranks}"));
                let found = losses(&fsdp(&config), &sharded, ranks);
                let error = largest_difference(&found, &expected);
                eprintln!("{what}, sharded: {error:e}");
                assert!(error < 2e-6, "{what}, sharded: {error:e}");
            }
        }
    }
}

/// In NVFP4, with separate random bits on each rank, sharded ranks compute the same bits as
/// replicated ones if gradients are not clipped, because sharding changes the summation order of
/// the norm. Other numbers of ranks read the checkpoint, and write the same one.
#[test]
fn sharded_runs_have_the_bits_of_whole_ones() {
    for name in ["llama3-tiny", "mixtral-tiny", "deepseek3-tiny"] {
        let model = golden_with_tokenizer(name);
        let folder = Scratch::new(&format!("finetune-sharded-{name}"));
        let config = FinetuneConfig {
            grad_clip: 1e9,
            steps: 4,
            ..four_rows(&model, &folder, "nvidia")
        };
        let [whole, sharded] = ["whole", "sharded"].map(|name| folder.join(name));
        let expected = losses(&config, &whole, 2);
        assert_eq!(losses(&fsdp(&config), &sharded, 2), expected, "{name}");
        assert!(tensors(&sharded) == tensors(&whole), "{name}");
        let parts = latest(&sharded).unwrap().unwrap();
        assert!(parts.join("model-1.bpk").exists());
        assert!(
            !latest(&whole)
                .unwrap()
                .unwrap()
                .join("model-1.bpk")
                .exists()
        );
    }
}

/// A resumed run produces the same bytes on the same number of ranks.
#[test]
fn a_resumed_run_of_ranks_is_the_same() {
    let folder = Scratch::new("finetune-ranks-resume");
    let config = FinetuneConfig {
        accumulate: 2,
        steps: 6,
        grad_reduce: GradReduce::Bf16,
        ..four_rows(&golden("llama3-tiny"), &folder, "nvidia")
    };
    for (name, config) in [("whole", config.clone()), ("sharded", fsdp(&config))] {
        let [whole, parts] = ["a", "b"].map(|part| folder.join(format!("{name}-{part}")));
        losses(&config, &whole, 2);
        on_ranks(&config, &parts, 2, |run| {
            run.train(Some(3), &mut ()).unwrap();
        });
        losses(&config, &parts, 2);
        assert!(tensors(&parts) == tensors(&whole), "{name}");
        if name == "whole" {
            for ((file, whole), (_, parts)) in files(&whole).iter().zip(&files(&parts)) {
                assert!(whole == parts, "{file} differs");
            }
        }
        // A single rank can read the checkpoint directly.
        on_ranks(&config, &parts, 1, |run| assert_eq!(run.step(), 6));
    }
}

/// The final output equals that of one process, regardless of the sharding.
#[test]
fn rank_zero_writes_the_model() {
    let model = golden_with_tokenizer("qwen3moe-tiny");
    let folder = Scratch::new("finetune-ranks-saved");
    let config = FinetuneConfig {
        steps: 3,
        ..four_rows(&model, &folder, "weight_only_qat")
    };
    let written = |config: &FinetuneConfig, name: &str| {
        let out = folder.join(name);
        let exports = on_ranks(config, &out, 2, |run| {
            run.train(None, &mut ()).unwrap();
            run.save_model(&out.join("model"), Dtype::F32).unwrap();
            let quantized = out.join("nvfp4");
            let export = run.export(&quantized, Dialect::CompressedTensors, Scheme::W4a16);
            export.unwrap().is_some()
        });
        assert_eq!(exports, [true, false]);
        ["model", "nvfp4"].map(|name| fs::read(out.join(name).join("model.safetensors")).unwrap())
    };
    let config = FinetuneConfig {
        grad_clip: 1e9,
        ..config
    };
    assert!(written(&config, "whole") == written(&fsdp(&config), "sharded"));
}

fn on_experts(config: &FinetuneConfig, dispatch: ExpertDispatchName) -> FinetuneConfig {
    FinetuneConfig {
        ep: 2,
        ep_dispatch: Some(dispatch),
        ..config.clone()
    }
}

const DISPATCHES: [ExpertDispatchName; 2] =
    [ExpertDispatchName::AllToAll, ExpertDispatchName::AllGather];

/// In high precision, ranks with different experts train like a single rank with all experts and
/// rows, up to the order of sums: by either exchange, in several groups, with accumulation, and with
/// sharded parameters.
#[test]
fn expert_parallel_ranks_train_as_one() {
    for name in ["mixtral-tiny", "qwen3moe-tiny", "deepseek3-tiny"] {
        let model = golden_with_tokenizer(name);
        let folder = Scratch::new(&format!("finetune-experts-{name}"));
        let config = FinetuneConfig {
            steps: 4,
            ..four_rows(&model, &folder, "bf16")
        };
        let accumulated = FinetuneConfig {
            accumulate: 2,
            ..config.clone()
        };
        let expected = losses(&config, &folder.join("one"), 1);
        let of_accumulated = losses(&accumulated, &folder.join("one-accumulated"), 1);
        for dispatch in DISPATCHES {
            let cases = [
                ("two", on_experts(&config, dispatch), 2, &expected),
                ("four", on_experts(&config, dispatch), 4, &expected),
                (
                    "sharded",
                    fsdp(&on_experts(&config, dispatch)),
                    4,
                    &expected,
                ),
                (
                    "accumulated",
                    on_experts(&accumulated, dispatch),
                    2,
                    &of_accumulated,
                ),
            ];
            for (case, config, ranks, expected) in cases {
                let out = folder.join(format!("{case}-{dispatch:?}"));
                let error = largest_difference(&losses(&config, &out, ranks), expected);
                let what = format!("{name}, {dispatch:?}, {case}");
                eprintln!("{what}: {error:e}");
                assert!(error < 2e-6, "{what}: {error:e}");
            }
        }
    }
}

/// A checkpoint of ranks with different experts is that of a single rank, which continues it, and
/// the other way round; the written model has all experts.
#[test]
fn runs_move_between_distributions_of_experts() {
    let model = golden_with_tokenizer("deepseek3-tiny");
    let folder = Scratch::new("finetune-experts-moved");
    let one = FinetuneConfig {
        steps: 4,
        checkpoint_every: 2,
        ..four_rows(&model, &folder, "bf16")
    };
    let two = on_experts(&one, ExpertDispatchName::AllToAll);
    let expected = losses(&one, &folder.join("one"), 1);
    for (name, [(first, ranks), (then, others)]) in [
        ("apart", [(&one, 1), (&two, 2)]),
        ("together", [(&two, 2), (&one, 1)]),
        ("regrouped", [(&two, 2), (&two, 4)]),
    ] {
        let out = folder.join(name);
        on_ranks(first, &out, ranks, |run| {
            run.train(Some(2), &mut ()).unwrap();
        });
        let error = largest_difference(&losses(then, &out, others), &expected);
        assert!(error < 2e-6, "{name}: {error:e}");
    }
    let [whole, parts] = [("one", &one, 1), ("together", &two, 2)].map(|(name, config, ranks)| {
        let out = folder.join(format!("{name}-model"));
        on_ranks(config, &folder.join(name), ranks, |run| {
            run.save_model(&out, Dtype::F32).unwrap();
        });
        Decoder::load(&out, &Device::flex(), FloatDType::F32).unwrap()
    });
    for (index, [whole, parts]) in (whole.layers.iter().zip(&parts.layers))
        .map(|(whole, parts)| [whole, parts].map(|layer| &layer.feed_forward))
        .enumerate()
    {
        let (FeedForward::Moe(whole), FeedForward::Moe(parts)) = (whole, parts) else {
            continue;
        };
        for (whole, parts) in [(&whole.gate_up, &parts.gate_up), (&whole.down, &parts.down)] {
            let (whole, parts) = (whole.dense(), parts.dense());
            assert_eq!(whole.dims(), parts.dims());
            let error = (whole - parts).abs().max().into_scalar::<f32>();
            assert!(error < 1e-5, "layer {index}: {error:e}");
        }
    }
}

/// In NVFP4, losses are as near to those of a single rank as those of ranks with all experts.
#[test]
fn experts_of_several_ranks_are_quantized() {
    let model = golden_with_tokenizer("deepseek3-tiny");
    let folder = Scratch::new("finetune-experts-nvfp4");
    let config = FinetuneConfig {
        steps: 4,
        ..four_rows(&model, &folder, "nvidia")
    };
    let one = losses(&config, &folder.join("one"), 1);
    // Random bits and amax values of the other layers are those of a rank's own tokens.
    let replicated = losses(&config, &folder.join("two"), 2);
    let bound = 2.0 * largest_difference(&replicated, &one);
    for dispatch in DISPATCHES {
        let config = on_experts(&config, dispatch);
        let found = losses(&config, &folder.join(format!("{dispatch:?}")), 2);
        let error = largest_difference(&found, &one);
        let what = format!("{dispatch:?}: {error:e} of {bound:e}");
        eprintln!("{what}");
        assert!(error > 0.0 && error < bound, "{what}");
    }
}

#[test]
fn experts_that_ranks_cannot_share_are_named() {
    let folder = Scratch::new("finetune-experts-errors");
    let of = |model: &Path, ep: usize| FinetuneConfig {
        ep,
        ..four_rows(model, &folder, "bf16")
    };
    let error = |result: anyhow::Result<()>| result.unwrap_err().to_string();
    let mixtral = golden_with_tokenizer("mixtral-tiny");
    let found = error(of(&mixtral, 2).check_ranks(1));
    assert!(
        found.contains("ep is 2") && found.contains("1 ranks"),
        "{found}"
    );
    let found = error(of(&mixtral, 0).check());
    assert!(found.contains("ep is 0"), "{found}");
    for (name, ep, expected) in [
        ("llama3-tiny", 2, "the model has no experts"),
        ("gptoss-tiny", 2, "ClampedSwiGlu"),
        ("deepseek3-tiny", 3, "experts"),
    ] {
        let model = golden_with_tokenizer(name);
        let found = error(check_model(&of(&model, ep)));
        let is_named = found.contains(&format!("ep is {ep}")) && found.contains(expected);
        assert!(is_named, "{found}");
    }
    let adapters = FinetuneConfig {
        lora: lora(),
        ..of(&mixtral, 2)
    };
    let found = error(adapters.check());
    assert!(
        found.contains("ep is 2") && found.contains("lora"),
        "{found}"
    );
}

#[test]
fn what_ranks_cannot_share_is_named() {
    let folder = Scratch::new("finetune-ranks-errors");
    let config = four_rows(&golden("llama3-tiny"), &folder, "bf16");
    config.check_ranks(4).unwrap();
    let error = config.check_ranks(3).unwrap_err().to_string();
    assert!(
        error.contains("batch is 4") && error.contains("(3)"),
        "{error}"
    );
    let adapters = FinetuneConfig {
        lora: lora(),
        ..fsdp(&config)
    };
    let error = adapters.check().unwrap_err().to_string();
    assert!(
        error.contains("fsdp is true") && error.contains("lora"),
        "{error}"
    );
}
