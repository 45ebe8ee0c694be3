//! Tests of the plan, the schedule, and the records.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use super::corpus::Corpus;
use super::pack;
use super::plan::{PLAN, Plan, Run};
use super::record::{Record, Status, collect, read};
use super::schedule;
use super::{gap, record};

/// Temporary folder, removed on drop.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("nvfp4-ladder-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// Creates a corpus of `shards` shards of `tokens` tokens, whose files are empty.
    fn corpus(&self, shards: usize, tokens: u64) -> Corpus {
        let names: Vec<String> = std::iter::once("valid.tokens".to_owned())
            .chain((1..=shards).map(|number| format!("train-{number}.tokens")))
            .collect();
        fs::create_dir_all(self.0.join("tokenizer")).unwrap();
        for name in ["tokenizer.json", "tokenizer_config.json"] {
            fs::write(self.0.join("tokenizer").join(name), "{}").unwrap();
        }
        let shards: Vec<Value> = names
            .iter()
            .map(|name| {
                fs::write(self.0.join(format!("{name}.xz")), "").unwrap();
                json!({"file": name, "tokens": tokens, "checksum": format!("of-{name}"), "bytes": 1})
            })
            .collect();
        let manifest = json!({"tokenizer": "0f", "vocabulary": 32000, "shards": shards});
        fs::write(self.0.join("manifest.json"), manifest.to_string()).unwrap();
        Corpus::read(&self.0).unwrap()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn plan() -> Plan {
    Plan::parse(PLAN).unwrap()
}

fn run(name: &str) -> Run {
    let mut runs = plan().runs().unwrap().into_iter();
    runs.find(|run| run.name == name).unwrap()
}

/// Returns a machine's result for `run` after its last step, with a final validation loss.
fn finished(run: &Run, corpus: &Corpus, loss: f64) -> Value {
    let steps: u64 = run.option("--steps").unwrap().parse().unwrap();
    let train: Vec<(u64, f64)> = (1..=steps)
        .filter(|step| step % 100 == 0 || *step == steps)
        .map(|step| (step, 4.0))
        .collect();
    let mut value = corpus.queued(run, "abcdef012").unwrap();
    let fields = value.as_object_mut().unwrap();
    fields.remove("valid");
    let rest = json!({
        "gpu": "NVIDIA H100 80GB HBM3", "driver": "580.159", "device": "cuda:0",
        "status": "finished", "error": null, "date": "2026-11-28", "seconds": 200.5,
        "commands": [{"seconds": 200.5, "step": steps}], "tokens_per_s": 1.5e6,
        "train_loss": train, "valid_loss": [[0, 10.5], [steps, loss]],
    });
    fields.extend(rest.as_object().unwrap().clone());
    value
}

fn recorded(run: &Run, corpus: &Corpus, loss: f64) -> Record {
    serde_json::from_value(finished(run, corpus, loss)).unwrap()
}

#[test]
fn bf16_with_three_seeds_comes_first() {
    let runs = plan().runs().unwrap();
    let names: Vec<&str> = runs[..4].iter().map(|run| &*run.name).collect();
    assert_eq!(
        names,
        ["10m-bf16-s0", "10m-bf16-s1", "10m-bf16-s2", "10m-nvidia-s0"]
    );
    // The baseline of every shape comes before its other recipes.
    for (at, run) in runs.iter().enumerate() {
        let is_earlier = |other: &Run| other.shape == run.shape && other.recipe == "bf16";
        assert!(
            run.recipe == "bf16" || runs[..at].iter().any(is_earlier),
            "{}",
            run.name
        );
    }
}

#[test]
fn runs_of_30_m_are_those_of_the_published_ladder() {
    let run = run("30m-quartet2-s0");
    assert_eq!((run.tokens, &run.fields), (2861 * 512 * 512, &None));
    for (name, value) in [
        ("--steps", "2861"),
        ("--context", "512"),
        ("--lr", "0.0012"),
        ("--warmup", "286"),
        ("--weight-decay", "0.1"),
        ("--grad-clip", "1"),
        ("--log-every", "100"),
    ] {
        assert_eq!(run.option(name), Some(value), "{name}");
    }
    let rows: u64 = ["--batch", "--accumulate"]
        .map(|name| run.option(name).unwrap().parse::<u64>().unwrap())
        .iter()
        .product();
    assert_eq!(rows, 512);
    for (name, value) in [
        ("num_hidden_layers", 6),
        ("hidden_size", 640),
        ("num_attention_heads", 5),
        ("intermediate_size", 1792),
        ("vocab_size", 32_000),
    ] {
        assert_eq!(run.config[name], value, "{name}");
    }
}

#[test]
fn recorded_runs_are_not_run_again() {
    let folder = Scratch::new("next");
    let (plan, corpus) = (plan(), folder.corpus(5, 46_000_000));
    let names = |records: &[Record], minutes: f64, most: usize| -> Vec<String> {
        let next = schedule::next(&plan, records, &corpus, minutes, most).unwrap();
        next.into_iter().map(|run| run.name).collect()
    };
    // At least one, even if the time is too short.
    assert_eq!(names(&[], 0.0, 9), ["10m-bf16-s0"]);
    assert_eq!(names(&[], 1e6, 2), ["10m-bf16-s0", "10m-bf16-s1"]);
    let done = [recorded(&run("10m-bf16-s0"), &corpus, 3.5)];
    assert_eq!(names(&done, 0.0, 9), ["10m-bf16-s1"]);
    // 250 M tokens at the recorded 1.5 M per second, plus the start: 227 s.
    assert_eq!(names(&done, 7.5, 9).len(), 1);
    assert_eq!(names(&done, 7.7, 9).len(), 2);
    let all: Vec<Record> = (plan.runs().unwrap().iter())
        .map(|run| recorded(run, &corpus, 3.5))
        .collect();
    assert!(names(&all, 1e6, 1000).is_empty());
}

#[test]
fn a_corpus_that_is_too_small_is_refused() {
    let folder = Scratch::new("small");
    let plan = plan();
    let few = folder.corpus(2, 30_000_000);
    let error = schedule::next(&plan, &[], &few, 1.0, 1)
        .unwrap_err()
        .to_string();
    assert!(error.contains("times"), "{error}");
    let none = folder.corpus(1, 300_000_000);
    let error = schedule::next(&plan, &[], &none, 1.0, 1)
        .unwrap_err()
        .to_string();
    assert!(error.contains("needs 2 shards"), "{error}");
    fs::remove_file(folder.0.join("train-1.tokens.xz")).unwrap();
    let error = Corpus::read(&folder.0).unwrap_err().to_string();
    assert!(error.contains("train-1.tokens.xz is absent"), "{error}");
}

#[test]
fn malformed_plans_are_errors() {
    let changed = |from: &str, to: &str| {
        assert!(PLAN.contains(from), "{from}");
        format!(
            "{:#}",
            Plan::parse(&PLAN.replacen(from, to, 1)).unwrap_err()
        )
    };
    let error = changed("\"seeds\": [0, 1, 2]", "\"seeds\": [0, 0]");
    assert!(error.contains("10m-bf16-s0 twice"), "{error}");
    let error = changed("{\"shape\": \"10m\"", "{\"shape\": \"11m\"");
    assert!(error.contains("11m") && error.contains("30m"), "{error}");
    let error = changed("\"warmup\"", "\"warmups\"");
    assert!(error.contains("warmups"), "{error}");
}

#[test]
fn results_of_a_machine_are_recorded_once() {
    let folder = Scratch::new("collect");
    let (plan, corpus) = (plan(), folder.corpus(5, 46_000_000));
    let out = folder.0.join("results/ladder");
    let bf16 = finished(&run("10m-bf16-s0"), &corpus, 3.5);
    let mut diverged = finished(&run("10m-mxfp4-s0"), &corpus, 3.5);
    diverged["status"] = json!("diverged");
    diverged["error"] = json!("the mxfp4 loss of step 300 is NaN");
    diverged["train_loss"] = json!([[100, 5.0]]);
    let crashed = json!({"name": "10m-nvidia-s0", "status": "crashed", "error": "out of memory"});
    let text = json!([bf16, diverged, crashed]).to_string();
    let found = collect(&text, &plan, &out).unwrap();
    assert_eq!(found.new, ["10m-bf16-s0", "10m-mxfp4-s0"]);
    assert_eq!(
        found.crashed,
        [("10m-nvidia-s0".to_owned(), "out of memory".to_owned())]
    );
    let records = read(&out).unwrap();
    assert_eq!(records.len(), 2);
    assert_eq!(serde_json::to_value(&records[0]).unwrap(), bf16);
    assert_eq!(records[1].status, Status::Diverged);
    assert_eq!((records[0].loss(), records[1].loss()), (Some(3.5), None));
    // The next call of the same machine has the same runs, and one more.
    let nvidia = finished(&run("10m-nvidia-s0"), &corpus, 3.57);
    let text = json!([bf16, diverged, nvidia]).to_string();
    let found = collect(&text, &plan, &out).unwrap();
    assert_eq!((found.new.len(), found.known.len()), (1, 2));
    let records = read(&out).unwrap();
    let of = |name: &str| records.iter().find(|record| record.name == name).unwrap();
    assert!((gap(of("10m-nvidia-s0"), &records).unwrap() - 2.0).abs() < 1e-9);
    assert_eq!(gap(of("10m-bf16-s0"), &records), None);
    assert_eq!(gap(of("10m-mxfp4-s0"), &records), None);
}

#[test]
fn doubtful_results_are_refused() {
    let folder = Scratch::new("doubtful");
    let (plan, corpus) = (plan(), folder.corpus(5, 46_000_000));
    let out = folder.0.join("results/ladder");
    let whole = finished(&run("10m-bf16-s0"), &corpus, 3.5);
    let refused = |change: &dyn Fn(&mut Value), expected: &str| {
        let mut value = whole.clone();
        change(&mut value);
        let error = collect(&json!([value]).to_string(), &plan, &out).unwrap_err();
        let error = format!("{error:#}");
        assert!(error.contains(expected), "{error}, but expected {expected}");
        assert!(record::read(&out).unwrap().is_empty());
    };
    refused(&|v| v["name"] = json!("10m-bf16-s9"), "no run 10m-bf16-s9");
    refused(&|v| v["seed"] = json!(1), "the seed");
    refused(&|v| v["recipe"] = json!("nvidia"), "the recipe");
    refused(&|v| v["fields"] = json!({"seed": 1}), "recipe's file");
    refused(&|v| v["tokens"] = json!(5), "number of tokens");
    refused(&|v| v["config"]["hidden_size"] = json!(8), "configuration");
    refused(&|v| v["options"][1] = json!("12"), "options");
    refused(&|v| v["gpu"] = Value::Null, "no GPU");
    refused(
        &|v| v["train_loss"][0] = json!([99, 4.0]),
        "losses of steps",
    );
    refused(&|v| v["train_loss"][0] = json!([100, -4.0]), "positive");
    refused(&|v| v["valid_loss"] = json!([[0, 10.5]]), "last validation");
    refused(&|v| v["status"] = json!("diverged"), "log is empty");
    refused(&|v| v["surprise"] = json!(1), "surprise");
    let text = json!([whole]).to_string();
    collect(&text, &plan, &out).unwrap();
    let mut other = whole.clone();
    other["seconds"] = json!(1.0);
    let error = collect(&json!([other]).to_string(), &plan, &out).unwrap_err();
    assert!(error.to_string().contains("recorded already"), "{error}");
    let mut other = finished(&run("10m-bf16-s1"), &corpus, 3.5);
    other["corpus"]["valid"] = json!("changed");
    let error = collect(&json!([other]).to_string(), &plan, &out).unwrap_err();
    assert!(error.to_string().contains("another corpus"), "{error}");
    assert_eq!(read(&out).unwrap().len(), 1);
}

/// Stand-in for `nvfp4`. A new run continues until it is interrupted; a resumed run ends. MXFP4
/// diverges, and MXFP8 crashes.
const PROGRAM: &str = r#"#!/bin/sh
case "$*" in
*fwd_nvfp4_bwd_mxfp8*) echo "error: no such device"; exit 1 ;;
esac
while [ $# -gt 0 ]; do
    case "$1" in
    --out) folder=$2; begins=yes ;;
    --resume) folder=$2 ;;
    --recipe) recipe=$2 ;;
    esac
    shift
done
mkdir -p "$folder"
echo "step,tokens,train_loss,valid_loss,lr,tokens_per_s" > "$folder/metrics.csv"
echo "0,0,,10.5,1e-3," >> "$folder/metrics.csv"
if [ "$recipe" = mxfp4 ]; then
    echo "error: the mxfp4 loss of step 7 is NaN: try a lower --lr"
    exit 1
fi
if [ "$begins" = yes ]; then
    echo "{}" > "$folder/finetune.json"
    exec sleep 600
fi
for step in 100 200 300 400 500 600 700 800 900; do
    echo "$step,1,4.0,,1e-3,1000.0" >> "$folder/metrics.csv"
done
echo "954,1,4.0,3.5,1e-3,1000.0" >> "$folder/metrics.csv"
"#;

#[test]
fn a_queue_goes_on_after_its_limit() {
    let folder = Scratch::new("queue");
    let corpus = folder.corpus(5, 46_000_000);
    let program = folder.0.join("program");
    fs::create_dir_all(&program).unwrap();
    fs::write(program.join("nvfp4"), PROGRAM).unwrap();
    crate::setup::staging::make_executable(&program.join("nvfp4")).unwrap();
    let archive = folder.0.join("nvfp4.tar.xz");
    let mut tar = Command::new("tar");
    tar.arg("-cJf")
        .arg(&archive)
        .arg("-C")
        .arg(&program)
        .arg(".");
    assert!(tar.status().unwrap().success());
    let names = ["10m-bf16-s0", "10m-mxfp4-s0", "10m-fwd_nvfp4_bwd_mxfp8-s0"];
    let queue = names.map(|name| corpus.queued(&run(name), "abcdef012").unwrap());
    let mut files = vec![archive];
    for file in corpus.files(2) {
        if file.extension().is_some_and(|extension| extension == "xz") {
            let shard = file.with_extension("");
            fs::write(&shard, "tokens").unwrap();
            let mut xz = Command::new("xz");
            assert!(xz.arg("-kf").arg(&shard).status().unwrap().success());
        }
        files.push(file);
    }
    let upload = folder.0.join("upload");
    fs::create_dir_all(&upload).unwrap();
    let made = pack::folders(&files, &queue, 2 << 20, &upload).unwrap();
    let (work, out) = (folder.0.join("work"), folder.0.join("out"));
    let command_of =
        |at: usize, limit: &str, devices: &[&str], [work, out]: [&Path; 2]| -> String {
            let mut python = Command::new("python3");
            python.arg(made[at].join(pack::SCRIPT_FILE)).arg(&made[at]);
            python.args(["--limit", limit, "--stop", "1", "--devices"]);
            let output = python
                .args(devices)
                .arg("--work")
                .arg(work)
                .arg("--out")
                .arg(out)
                .output()
                .unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            let error = String::from_utf8(output.stderr).unwrap();
            assert!(output.status.success(), "{text}{error}");
            text
        };
    let command = |at: usize, limit: &str| command_of(at, limit, &["flex"], [&work, &out]);
    // The first run begins and is interrupted, unless unpacking took too long; then it begins in the
    // second command. Nothing else waits for a limit.
    let mut texts = vec![command(0, "6")];
    let results = || fs::read_to_string(out.join("results.json")).unwrap();
    while !results().contains("no such device") && texts.len() < 4 {
        texts.push(command(1, "60"));
    }
    let all = texts.concat();
    assert!(
        all.contains("10m-bf16-s0: begins") && all.contains("10m-bf16-s0: goes on"),
        "{all}"
    );
    let mut ended: Vec<Value> = serde_json::from_str(&results()).unwrap();
    let statuses: Vec<&str> = ended
        .iter()
        .map(|of| of["status"].as_str().unwrap())
        .collect();
    assert_eq!(statuses, ["finished", "diverged", "crashed"], "{all}");
    assert!(ended[0]["commands"].as_array().unwrap().len() > 1);
    for result in &mut ended[..2] {
        result["gpu"] = json!("a GPU");
    }
    let text = json!(ended).to_string();
    let found = collect(&text, &plan(), &folder.0.join("results")).unwrap();
    assert_eq!(found.new, names[..2]);
    assert_eq!(found.crashed[0].0, names[2]);
    // While one device trains the first run, another takes those behind it, each once.
    let [work2, out2] = ["work2", "out2"].map(|name| folder.0.join(name));
    let all = command_of(0, "15", &["flex", "cpu"], [&work2, &out2]);
    let ended = fs::read_to_string(out2.join("results.json")).unwrap();
    let ended: Vec<Value> = serde_json::from_str(&ended).unwrap();
    let ended: Vec<&str> = ended
        .iter()
        .map(|of| of["name"].as_str().unwrap())
        .collect();
    assert_eq!(ended, names[1..], "{all}");
    assert!(all.contains("10m-bf16-s0: stopped"), "{all}");
    // A corrupt upload is refused.
    let damaged = made[0].join("valid.tokens.xz");
    fs::write(&damaged, "other").unwrap();
    fs::remove_file(work.join("received.json")).unwrap();
    let mut python = Command::new("python3");
    python.arg(made[0].join(pack::SCRIPT_FILE)).arg(&made[0]);
    let output = python
        .arg("--work")
        .arg(&work)
        .arg("--out")
        .arg(&out)
        .output()
        .unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(
        !output.status.success() && error.contains("is damaged"),
        "{error}"
    );
}
