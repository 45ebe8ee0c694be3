//! Tests of training models from Hugging Face folders.

use std::fs;
use std::path::{Path, PathBuf};

use crate::support::*;

/// Writes thirty texts and prompts that follow a pattern, one per line.
pub(crate) fn lines(folder: &Path) -> String {
    let path = folder.join("lines.jsonl");
    let line = |i: usize| {
        let words = ["the quick", " brown fox", " jumps over", " the lazy dog"];
        let words: String = (0..5 + i % 4).map(|j| words[(i + j * j) % 4]).collect();
        match i % 3 {
            0 => format!(r#"{{"prompt": "{words}", "completion": " again and again"}}"#),
            _ => format!(r#"{{"text": "{words}"}}"#),
        }
    };
    let lines: Vec<String> = (0..30).map(line).collect();
    fs::write(&path, lines.join("\n")).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Options of a run of six steps with small rows.
const RUN: &str = "--device flex --steps 6 --batch 2 --context 32 --lr 3e-3 --warmup 1 --valid-share \
                   0.2 --log-every 2 --eval-every 3 --checkpoint-every 4";

/// Returns the arguments of a run with `more`, into `out`.
fn arguments<'a>(data: &'a str, out: &'a Path, more: &'a str) -> Vec<&'a str> {
    let own = ["--data", data, "--out", out.to_str().unwrap()];
    let words = RUN.split_whitespace().chain(more.split_whitespace());
    own.into_iter().chain(words).collect()
}

/// Returns the perplexities before and after training.
fn perplexities(text: &str) -> [f64; 2] {
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("validation perplexity "))
        .expect(text);
    let fields: Vec<&str> = line.split(' ').collect();
    [fields[0], fields[2]].map(|figure| figure.parse().expect(line))
}

/// Returns the only checkpoint of a run.
pub(crate) fn saved(out: &Path) -> PathBuf {
    let entries = fs::read_dir(out).unwrap().map(|entry| entry.unwrap());
    let names = entries.map(|entry| entry.file_name().into_string().unwrap());
    let found: Vec<String> = names
        .filter(|name| name.starts_with("checkpoint-"))
        .collect();
    assert_eq!(found.len(), 1, "{found:?}");
    out.join(&found[0])
}

#[test]
fn a_model_is_finetuned_and_resumed() {
    let model = golden("llama3-tiny");
    let data = lines(&folder("finetune-data"));
    let (whole, parts) = (folder("finetune-whole"), folder("finetune-parts"));
    let finetune = |arguments: &[&str]| nvfp4("finetune", arguments);
    let said = succeeds(finetune(
        &[&[&*model], &arguments(&data, &whole, "")[..]].concat(),
    ));
    let [before, after] = perplexities(&said);
    assert!(after < before, "{said}");

    let stopped = arguments(&data, &parts, "--stop-at 3");
    let said = succeeds(finetune(&[&[&*model], &stopped[..]].concat()));
    assert!(said.contains("finetune --resume"), "{said}");
    assert!(!parts.join("model").exists());
    let resumed = succeeds(finetune(&["--resume", parts.to_str().unwrap()]));
    assert_eq!(perplexities(&resumed), [before, after]);
    for file in ["model.bpk", "optimizer.bpk"] {
        let [left, right] = [&whole, &parts].map(|out| fs::read(saved(out).join(file)).unwrap());
        assert!(left == right, "{file} differs");
    }
    let [left, right] =
        [&whole, &parts].map(|out| fs::read(out.join("model/model.safetensors")).unwrap());
    assert!(left == right, "the models differ");

    // Other commands read the output.
    let trained = whole.join("model");
    let trained = trained.to_str().unwrap();
    assert_eq!(json(&whole.join("model/config.json"))["dtype"], "bfloat16");
    let generated = ["--prompt", "the quick", "--tokens", "4", "--device", "flex"];
    let text = succeeds(nvfp4("generate", &[&[trained], &generated[..]].concat()));
    assert!(text.starts_with("the quick"), "{text}");

    // A resumed run keeps its settings.
    fails(
        finetune(&["--resume", parts.to_str().unwrap(), "--lr", "9"]),
        &["--resume", "--lr"],
    );
    // A folder holds one run, and a run that cannot start does not claim it.
    fails(
        finetune(&[&[&*model], &arguments(&data, &whole, "")[..]].concat()),
        &["already holds a run", "--resume"],
    );
    // Its models are in subfolders.
    let run = whole.to_str().unwrap();
    let says = ["folder of a finetuning", &format!("{run}/model")];
    fails(nvfp4("inspect", &[run]), &says);
    fails(nvfp4("eval", &[run, "--data", "none"]), &says);
    let other = folder("finetune-refused").join("out");
    for (more, names) in [
        ("--warmup 6", ["warmup is 6", "steps"]),
        ("--recipe no-such", ["no-such", "recipe"]),
        ("--temperature 2", ["temperature", "--distill"]),
        ("--valid-share 1.5", ["valid-share is 1.5", "0 and 1"]),
        ("--context 9999", ["context is 9999", "positions"]),
        ("--recompute 9", ["recompute is 9", "layers"]),
    ] {
        let run = arguments(&data, &other, more);
        // Repeated flags are refused by name as well.
        let run: Vec<&str> = match more.split(' ').next() {
            Some(flag) if RUN.contains(flag) => {
                let at = run.iter().position(|word| *word == flag).unwrap();
                [&run[..at], &run[at + 2..]].concat()
            }
            _ => run,
        };
        fails(finetune(&[&[&*model], &run[..]].concat()), &names);
        assert!(!other.join("finetune.json").exists(), "{more}");
    }
}

/// A run of epochs writes its curves, and is extended after its end.
#[test]
fn a_run_of_epochs_is_extended() {
    let model = golden("llama3-tiny");
    let own = folder("finetune-epochs");
    let (data, out, events) = (lines(&own), own.join("out"), own.join("events"));
    let words = [
        "--context",
        "16",
        "--batch",
        "2",
        "--lr",
        "3e-3",
        "--log-every",
        "1000",
        "--device",
        "flex",
        "--recipe",
        "f32",
        "--lora",
        "2",
        "--eval-rows",
        "2",
        "--eval-every",
        "1000",
    ];
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    let begin = |out: &Path, more: &[&str]| {
        let paths = [&*model, "--data", &data, "--out", &path(out)];
        nvfp4("finetune", &[&paths[..], &words, more].concat())
    };
    let said = begin(&out, &["--epochs", "0.5", "--tensorboard", &path(&events)]);
    let notes = String::from_utf8_lossy(&said.stderr).into_owned();
    succeeds(said);
    let steps = json(&out.join("finetune.json"))["steps"].as_u64().unwrap();
    let line = notes
        .lines()
        .find(|line| line.starts_with("steps: "))
        .expect(&notes);
    let rows: f64 = line
        .split_whitespace()
        .nth_back(1)
        .unwrap()
        .parse()
        .unwrap();
    assert_eq!(steps, (0.5 * rows / 2.0).ceil() as u64, "{line}");
    let epoch = format!(
        "step {steps}/{steps}  epoch {:.2}  loss ",
        steps as f64 * 2.0 / rows
    );
    assert!(notes.contains(&epoch), "no {epoch:?}: {notes}");
    // Rank 2 on q and v, k and o, gate, up and down of both layers.
    let trained = notes
        .lines()
        .find(|line| line.starts_with("parameters: "))
        .expect(&notes);
    assert!(
        trained.ends_with(" %)") && trained.contains(" trained of "),
        "{trained}"
    );
    let svg = fs::read_to_string(out.join("loss.svg")).unwrap();
    for part in ["f32, training", "f32, validation", "nats per token"] {
        assert!(svg.contains(part), "loss.svg lacks {part}");
    }
    let log = events.join("events.out.tfevents.0.nvfp4");
    let logged = fs::metadata(&log).unwrap().len();

    let resume = |more: &[&str]| {
        let all = [&["--resume", out.to_str().unwrap()], more].concat();
        nvfp4("finetune", &all)
    };
    let fewer = (steps - 1).to_string();
    let has = format!("the run has {steps}");
    fails(
        resume(&["--steps", &fewer]),
        &["steps is", &has, "--stop-at"],
    );
    let more = (steps + 2).to_string();
    let said = resume(&["--steps", &more, "--tensorboard", &path(&events)]);
    let notes = String::from_utf8_lossy(&said.stderr).into_owned();
    succeeds(said);
    let extended = format!("extended from {steps} to {more} steps: the learning rate continues");
    assert!(notes.contains(&extended), "no {extended:?}: {notes}");
    assert_eq!(json(&out.join("finetune.json"))["steps"].to_string(), more);
    assert!(saved(&out).ends_with(format!("checkpoint-{:08}", steps + 2)));
    // The output of the first end is kept beside the new one.
    let weights =
        |name: String| fs::read(out.join(name).join("adapter_model.safetensors")).unwrap();
    assert!(weights("adapter".into()) != weights(format!("adapter-{steps}")));
    let rows = metrics(&out.join("metrics.csv"));
    let last: Vec<&str> = rows.iter().rev().take(2).map(|row| &*row[0]).collect();
    assert_eq!(last, [more.clone(), steps.to_string()]);
    assert!(fs::metadata(&log).unwrap().len() > logged);
    // Another run does not write into the same log.
    let other = begin(&own.join("other"), &["--tensorboard", &path(&events)]);
    fails(other, &["tensorboard", "another run"]);
    fails(
        begin(&own.join("none"), &["--epochs", "-1"]),
        &["epochs is -1", "positive"],
    );
}

/// A file of options stands for flags, and flags override it.
#[test]
fn options_are_read_from_a_file() {
    let model = golden("llama3-tiny");
    let own = folder("finetune-config");
    let (data, out) = (lines(&own), own.join("out"));
    let file = own.join("options.json");
    let file_name = file.to_str().unwrap();
    let options = serde_json::json!({
        "model": model, "data": [data], "out": out, "steps": 2, "batch": 2, "context": 16,
        "device": "flex", "recipe": "f32", "lora": 2, "eval_rows": 2, "checkpoint_every": 1,
    });
    fs::write(&file, options.to_string()).unwrap();
    let printed = succeeds(nvfp4(
        "finetune --print-config --lora 4 --config",
        &[file_name],
    ));
    let printed: serde_json::Value = serde_json::from_str(&printed).unwrap();
    for (key, value) in options.as_object().unwrap() {
        let expected = if key == "lora" { &4.into() } else { value };
        assert_eq!(&printed[key], expected, "{key}");
    }
    assert_eq!(printed["valid_share"], 0.05);
    assert!(!out.exists());
    // What is printed is a file of options.
    fs::write(&file, printed.to_string()).unwrap();
    let flags = "launch --gpus 1 -- finetune --steps 1 --config";
    succeeds(nvfp4(flags, &[file_name]));
    let config = json(&out.join("finetune.json"));
    let found = ["steps", "batch", "context"].map(|key| config[key].as_u64().unwrap());
    assert_eq!((found, &config["lora"]["rank"]), ([1, 2, 16], &4.into()));

    fs::write(&file, "{\n \"stepz\": 2}").unwrap();
    for command in ["finetune --config", "launch --gpus 1 -- pretrain --config"] {
        let names = ["options.json", "line 2", "stepz", "eval_every"];
        fails(nvfp4(command, &[file_name]), &names);
    }
    let printed = succeeds(nvfp4("train --print-config --device flex --steps 7", &[]));
    let printed: serde_json::Value = serde_json::from_str(&printed).unwrap();
    assert_eq!(
        (&printed["steps"], &printed["preset"]),
        (&7.into(), &"tiny".into())
    );
}

/// Two processes split the rows of each forward pass, with replicated or sharded parameters, and a
/// single process resumes their run. Other commands read the resulting models.
#[test]
fn ranks_finetune_together() {
    let model = golden("llama3-tiny");
    let data = lines(&folder("finetune-ranks-data"));
    let [one, two] = ["finetune-ranks-one", "finetune-ranks-two"].map(folder);
    let begin =
        |command: &str, arguments: &[&str]| nvfp4(command, &[&[&*model], arguments].concat());
    let said = succeeds(begin("finetune", &arguments(&data, &one, "--recipe f32")));
    let [_, expected] = perplexities(&said);
    let ranks = "launch --gpus 2 -- finetune";
    let stopped = arguments(&data, &two, "--recipe f32 --fsdp --stop-at 4");
    let said = succeeds(begin(ranks, &stopped));
    assert!(
        said.contains("launch --gpus 2 -- finetune --resume"),
        "{said}"
    );
    for file in ["model-1.bpk", "optimizer-1.bpk"] {
        assert!(saved(&two).join(file).exists(), "{file}");
    }
    // Resumes on one rank, which reads all shards.
    let said = succeeds(nvfp4("finetune", &["--resume", two.to_str().unwrap()]));
    let [_, found] = perplexities(&said);
    assert!((found / expected - 1.0).abs() < 1e-4, "{found}, {expected}");
    let trained = two.join("model");
    let generated = ["--prompt", "the quick", "--tokens", "4", "--device", "flex"];
    let generate = [&[trained.to_str().unwrap()], &generated[..]].concat();
    succeeds(nvfp4("generate", &generate));

    let refused = folder("finetune-ranks-refused").join("out");
    fails(
        begin(
            "launch --gpus 3 -- finetune",
            &arguments(&data, &refused, ""),
        ),
        &["batch is 2", "(3)"],
    );
    fails(
        begin(ranks, &arguments(&data, &refused, "--fsdp --lora 4")),
        &["fsdp is true", "lora"],
    );
    assert!(!refused.join("finetune.json").exists());
    let pretrained = folder("pretrain-ranks");
    let config = Path::new(&*model).join("config.json");
    let of = [
        "--model-config",
        config.to_str().unwrap(),
        "--tokenizer",
        &*model,
    ];
    let run = [&of[..], &arguments(&data, &pretrained, "--fsdp")].concat();
    let said = succeeds(nvfp4("launch --gpus 2 -- pretrain", &run));
    let [before, after] = perplexities(&said);
    assert!(after < before, "{said}");
}

/// Tests QAT and distillation, and an export that other commands read.
#[test]
fn models_are_trained_for_serving() {
    let model = golden("qwen3-tiny");
    let data = lines(&folder("finetune-qat-data"));
    let out = folder("finetune-qat");
    let more =
        "--qat w4a4 --distill --temperature 1.5 --export compressed-tensors --save-dtype f32";
    let said = succeeds(nvfp4(
        "finetune",
        &[&[&*model], &arguments(&data, &out, more)[..]].concat(),
    ));
    assert!(said.contains("compressed-tensors w4a4 written"), "{said}");
    // The saved models compute without the recipe of the training.
    let after = |begin: &str, end: &str| {
        let line = said
            .lines()
            .find(|line| line.starts_with(begin) && line.ends_with(end));
        let line = line.unwrap_or_else(|| panic!("no {begin:?} .. {end:?}: {said}"));
        let figure = line.split("before, ").nth(1).unwrap().split(' ').next();
        figure.unwrap().to_owned()
    };
    let [high, quantized] =
        ["(model)", "(nvfp4)"].map(|name| after("validation perplexity ", name));
    let trained = after("in training, with recipe qat_w4a4: ", " nats a token");
    assert!(high != quantized && high != trained, "{said}");
    let quantized = out.join("nvfp4");
    let inspected = succeeds(nvfp4("inspect", &[quantized.to_str().unwrap()]));
    assert!(inspected.contains("w4a4"), "{inspected}");
    assert!(!inspected.contains("problem"), "{inspected}");
    assert_eq!(json(&out.join("model/config.json"))["dtype"], "float32");
    assert_eq!(json(&out.join("finetune.json"))["recipe_name"], "qat_w4a4");
}

/// Trains adapters of a quantized folder, and writes the merged model.
#[test]
fn adapters_are_trained_and_merged() {
    let model = golden("llama3-tiny");
    let data = lines(&folder("finetune-lora-data"));
    let quantized = folder("finetune-lora-quantized").join("out");
    let quantized = quantized.to_str().unwrap();
    succeeds(nvfp4("quantize", &[&model, "--out", quantized]));
    let tokenizer = Path::new(quantized).join("tokenizer.json");
    assert!(tokenizer.exists());
    let out = folder("finetune-lora");
    let more = "--lora 4 --lora-targets (q|v)_proj$ --activation f32";
    let run = arguments(&data, &out, more);
    let said = succeeds(nvfp4("finetune", &[&[quantized], &run[..]].concat()));
    assert_eq!(json(&out.join("finetune.json"))["frozen"], "w4a16");
    let [before, after] = perplexities(&said);
    assert!(after < before, "{said}");
    let of_adapter = format!(" nats a token (adapter on {quantized})");
    assert!(said.contains(&of_adapter), "no {of_adapter:?}: {said}");
    let adapter = json(&out.join("adapter/adapter_config.json"));
    assert_eq!(
        (&adapter["r"], &adapter["lora_alpha"]),
        (&4.into(), &8.0.into())
    );
    assert!(out.join("adapter/adapter_model.safetensors").exists());
    assert!(!out.join("model").exists());
    let adapter = out.join("adapter");
    let adapter = adapter.to_str().unwrap();
    for hint in [
        format!("generate {quantized} --adapter {adapter} --prompt"),
        format!("merge {quantized} {adapter} --out"),
    ] {
        assert!(said.contains(&hint), "{hint}: {said}");
    }

    let merged = folder("finetune-lora-merged");
    let more = format!("{more} --merge");
    let run = arguments(&data, &merged, &more);
    let said = succeeds(nvfp4("finetune", &[&[quantized], &run[..]].concat()));
    let trained = merged.join("model");
    let hint = format!("generate {} --prompt", trained.display());
    assert!(said.contains(&hint), "{said}");

    // Adapters are applied beside the packed weights, and merged later to the same bytes.
    let generate = |model: &str, more: &[&str]| {
        let few = ["--prompt", "the quick", "--tokens", "4", "--device", "flex"];
        nvfp4("generate", &[&[model], more, &few[..]].concat())
    };
    let text = succeeds(generate(quantized, &["--adapter", adapter]));
    assert!(text.starts_with("the quick"), "{text}");
    succeeds(generate(trained.to_str().unwrap(), &[]));
    let text = out.join("text.txt");
    fs::write(&text, "the quick brown fox jumps over the lazy dog").unwrap();
    let eval = |more: &[&str]| {
        let on = ["--device", "flex", "--data", text.to_str().unwrap()];
        succeeds(nvfp4("eval", &[&[quantized], more, &on[..]].concat()))
    };
    assert_ne!(eval(&[]), eval(&["--adapter", adapter]));
    let [own, later, packed] = ["adapter", "later", "packed"].map(|name| merged.join(name));
    let merge = |more: &[&str], into: &Path| {
        let paths = [
            quantized,
            own.to_str().unwrap(),
            "--out",
            into.to_str().unwrap(),
        ];
        nvfp4("merge", &[&paths[..], more].concat())
    };
    let said = succeeds(merge(&[], &later));
    assert!(said.contains("merged model written"), "{said}");
    let [left, right] =
        [&trained, &later].map(|model| fs::read(model.join("model.safetensors")).unwrap());
    assert!(left == right, "the models differ");
    fails(merge(&[], &later), &["--out", "later", "must be empty"]);
    // Adapters are no model, and the folder of their run is none of adapters.
    for folder in [adapter, out.to_str().unwrap()] {
        let other = merged.join("other");
        let quantize = [folder, "--out", other.to_str().unwrap()];
        let says = format!("`nvfp4 merge MODEL {adapter} --out DIR`");
        fails(nvfp4("quantize", &quantize), &["adapters", &says]);
    }
    let run = merged.to_str().unwrap();
    let says = format!("which has written {run}/adapter: give this folder");
    fails(nvfp4("merge", &[quantized, run, "--out", "none"]), &[&says]);
    // As shells complete the name of a folder.
    let said = succeeds(merge(&["--export", "modelopt"], &packed.join("")));
    assert!(said.contains("modelopt w4a16 written"), "{said}");
    succeeds(nvfp4("inspect", &[packed.to_str().unwrap()]));
    assert!(!merged.join("packed.f32").exists());
    // W4A4 has static scales of activations, which merging would lose.
    let w4a4 = merged.join("w4a4");
    let calibrated = ["--scheme", "w4a4", "--calibration", text.to_str().unwrap()];
    let quick = [
        "--calibration-length",
        "8",
        "--method",
        "rtn",
        "--device",
        "flex",
    ];
    let paths = [&*model, "--out", w4a4.to_str().unwrap()];
    succeeds(nvfp4(
        "quantize",
        &[&paths[..], &calibrated, &quick].concat(),
    ));
    let merge_w4a4 = |more: &[&str]| {
        let into = merged.join("of-w4a4");
        let paths = [
            paths[2],
            own.to_str().unwrap(),
            "--out",
            into.to_str().unwrap(),
        ];
        nvfp4("merge", &[&paths[..], more].concat())
    };
    fails(
        merge_w4a4(&["--export", "modelopt"]),
        &[
            "export is modelopt",
            "w4a4 and merge writes w4a16",
            "--calibration",
        ],
    );
    succeeds(merge_w4a4(&[]));
    // The golden folder is not the one that the adapters name.
    let noted = generate(&model, &["--adapter", adapter]);
    let note = String::from_utf8_lossy(&noted.stderr).into_owned();
    assert!(note.contains("trained beside"), "{note}");
    succeeds(noted);
    fails(
        generate(&golden("qwen3-tiny"), &["--adapter", adapter]),
        &["self_attn", "of the model needs"],
    );

    // Beside a folder in high precision the weights stay so, unless a recipe is asked for.
    let plain = folder("finetune-lora-plain");
    let run = arguments(&data, &plain, "--lora 4 --stop-at 1");
    succeeds(nvfp4("finetune", &[&[&*model], &run[..]].concat()));
    let config = json(&plain.join("finetune.json"));
    assert_eq!(
        (&config["frozen"], &config["recipe_name"]),
        (&"high".into(), &"bf16".into())
    );
    let other = plain.join("other");
    let run = arguments(&data, &other, "--lora 4 --high-precision layers");
    fails(
        nvfp4("finetune", &[&[&*model], &run[..]].concat()),
        &["high-precision is given", "recipe bf16"],
    );

    // A recipe requires high-precision weights.
    let other = folder("finetune-lora-high").join("out");
    let high = format!("{more} --recipe nvidia --frozen high --stop-at 1");
    let run = arguments(&data, &other, &high);
    succeeds(nvfp4("finetune", &[&[quantized], &run[..]].concat()));
    assert_eq!(json(&other.join("finetune.json"))["frozen"], "high");
    let refused = other.join("refused");
    for (more, names) in [
        (
            "--lora 4 --recipe nvidia",
            ["recipe is nvidia", "--frozen high"],
        ),
        ("--lora 4 --qat w4a4", ["qat is w4a4", "--frozen high"]),
        (
            "--lora 4 --schedule bf16,0.5=mxfp8",
            ["schedule is bf16,0.5=mxfp8", "--frozen high"],
        ),
        ("--frozen w4a16", ["--frozen", "--lora"]),
        ("--teacher-form high", ["teacher-form", "--distill"]),
    ] {
        let run = arguments(&data, &refused, more);
        fails(
            nvfp4("finetune", &[&[quantized], &run[..]].concat()),
            &names,
        );
    }
}

#[test]
fn tokens_are_written_once_and_a_model_begins_with_nothing() {
    let model = golden("qwen3-tiny");
    let own = folder("pretrain");
    let data = lines(&own);
    let tokens = own.join("all.tokens");
    let tokens = tokens.to_str().unwrap();
    let said = succeeds(nvfp4(
        "tokenize",
        &[&model, "--data", &data, "--out", tokens],
    ));
    assert!(said.contains("30 documents"), "{said}");
    fails(
        nvfp4("tokenize", &[&model, "--data", &data, "--out", tokens]),
        &["all.tokens", "new file"],
    );
    let (out, config) = (own.join("out"), format!("{model}/config.json"));
    let start = ["--model-config", &config, "--tokenizer", &model];
    let run = arguments(tokens, &out, "--recipe bf16 --activation f32");
    let said = succeeds(nvfp4("pretrain", &[&start[..], &run].concat()));
    let [before, after] = perplexities(&said);
    // The untrained model predicts all 288 tokens about equally.
    assert!((100.0..800.0).contains(&before) && after < before, "{said}");

    // With a tokenizer trained for the run.
    let own_tokens = own.join("own-tokens");
    let start = ["--model-config", &config, "--train-tokenizer"];
    let run = arguments(&data, &own_tokens, "--recipe bf16 --activation f32");
    // A start that fails leaves a tokenizer and a model, which the next one replaces.
    let failed: Vec<&str> = (run.iter().copied())
        .map(|word| if word == "2" { "0" } else { word })
        .collect();
    fails(
        nvfp4("pretrain", &[&start[..], &failed].concat()),
        &["at least 1"],
    );
    assert!(own_tokens.join("init").exists());
    let said = succeeds(nvfp4("pretrain", &[&start[..], &run].concat()));
    let [before, after] = perplexities(&said);
    assert!(after < before, "{said}");
    let again = nvfp4("pretrain", &[&start[..], &run].concat());
    fails(again, &["already holds a run"]);
    let trained = own_tokens.join("model");
    assert_eq!(json(&trained.join("config.json"))["eos_token_id"], 0);
    let generated = ["--prompt", "the quick", "--tokens", "4", "--device", "flex"];
    succeeds(nvfp4(
        "generate",
        &[&[trained.to_str().unwrap()], &generated[..]].concat(),
    ));

    // Truncated tokens, and tokens of another tokenizer.
    let bytes = fs::read(tokens).unwrap();
    fs::write(tokens, &bytes[..bytes.len() - 3]).unwrap();
    let other = own.join("other");
    let run = arguments(tokens, &other, "");
    fails(
        nvfp4("finetune", &[&[&*model], &run[..]].concat()),
        &["all.tokens", "truncated"],
    );
    fs::write(tokens, &bytes).unwrap();
    let llama = golden("llama3-tiny");
    let third = own.join("third");
    let run = arguments(tokens, &third, "");
    fails(
        nvfp4("finetune", &[&[&*llama], &run[..]].concat()),
        &["all.tokens", "another tokenizer"],
    );
}

/// A small DeepSeek from its configuration alone, in NVFP4: latent attention, a sigmoid router with
/// groups, and a shared expert; then adapters, quantization, perplexity and text of the result.
#[test]
fn a_mixture_with_latent_attention_is_trained_from_its_configuration() {
    let own = folder("pretrain-latent");
    let (data, config, out) = (lines(&own), own.join("config.json"), own.join("out"));
    let small = serde_json::json!({
        "model_type": "deepseek_v3", "vocab_size": 288, "hidden_size": 64,
        "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32,
        "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
        "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
        "max_position_embeddings": 128, "rope_theta": 10000.0, "tie_word_embeddings": false,
    });
    fs::write(&config, small.to_string()).unwrap();
    let start = [
        "--model-config",
        config.to_str().unwrap(),
        "--train-tokenizer",
    ];
    let run = arguments(&data, &out, "--recipe nvidia --activation f32");
    let said = succeeds(nvfp4("pretrain", &[&start[..], &run].concat()));
    let [before, after] = perplexities(&said);
    // The untrained model predicts all 288 tokens about equally.
    assert!((100.0..800.0).contains(&before) && after < before, "{said}");

    let model = out.join("model");
    let model = model.to_str().unwrap();
    let adapted = own.join("adapted");
    let run = arguments(&data, &adapted, "--lora 4 --activation f32 --merge");
    succeeds(nvfp4("finetune", &[&[model], &run[..]].concat()));
    let packed = own.join("packed");
    let packed = packed.to_str().unwrap();
    let merged = adapted.join("model");
    let merged = merged.to_str().unwrap();
    succeeds(nvfp4(
        "quantize",
        &[merged, "--out", packed, "--method", "rtn"],
    ));
    succeeds(nvfp4("inspect", &[packed]));
    for folder in [merged, packed] {
        let said = succeeds(nvfp4(
            "eval",
            &[folder, "--data", &data, "--device", "flex"],
        ));
        assert!(said.contains("perplexity"), "{said}");
        let prompt = ["--prompt", "the quick", "--tokens", "4", "--device", "flex"];
        succeeds(nvfp4("generate", &[&[folder], &prompt[..]].concat()));
    }
}
