//! The command, end to end, with models that train in a second.
//!
//! Runs that are resumed are on the device that `NVFP4_TEST_DEVICE` names: `flex` (the default), `cpu` or
//! `cuda`. All others are on Flex, but for those of what another device has.

#![cfg(feature = "flex")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use nvfp4::Nvfp4Recipe;
use serde_json::Value;

/// A model of two thousand parameters on 32-byte sequences.
const SMALL: &str = "--device flex --width 32 --layers 2 --heads 2 --hidden 48 --context 32 \
                     --batch 4 --lr 1e-2 --eval-batches 2";

/// An empty folder for one test.
fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join("cli")
        .join(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

/// Thirty files with words that follow a pattern.
fn text() -> &'static str {
    static TEXT: OnceLock<PathBuf> = OnceLock::new();
    let path = TEXT.get_or_init(|| {
        let path = folder("text");
        write_text(&path, 30);
        path
    });
    path.to_str().unwrap()
}

fn write_text(path: &Path, files: usize) {
    for file in 0..files {
        let words: Vec<String> = (0..60)
            .map(|i| ["let", "x", "=", "fn", "y", ";"][(file + i * i) % 6].repeat(1 + i % 2))
            .collect();
        fs::write(path.join(format!("file-{file}.txt")), words.join(" ")).unwrap();
    }
}

fn nvfp4(arguments: &str, more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
    command
        .args(arguments.split_whitespace())
        .args(more)
        .env("RUST_LOG", "warn");
    command.output().unwrap()
}

fn succeeds(output: Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    String::from_utf8(output.stdout).unwrap()
}

/// What the command wrote to standard error, which must name everything in `names`.
fn fails(output: Output, names: &[&str]) -> String {
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        !output.status.success(),
        "succeeded, but should say {names:?}"
    );
    assert!(!error.contains("panicked"), "{error}");
    for name in names {
        assert!(error.contains(name), "does not say {name:?}: {error}");
    }
    error
}

fn train(out: &Path, more: &str) -> Output {
    train_on("flex", out, more)
}

fn train_on(device: &str, out: &Path, more: &str) -> Output {
    let sizes = SMALL.replace("--device flex", &format!("--device {device}"));
    let out = out.to_str().unwrap();
    let more: Vec<&str> = more.split_whitespace().collect();
    nvfp4(
        &format!("train {sizes}"),
        &[&["--data", text(), "--out", out], &more[..]].concat(),
    )
}

/// The device of runs that are resumed.
fn device() -> String {
    match std::env::var("NVFP4_TEST_DEVICE").as_deref() {
        Ok("cuda") => "cuda:0".into(),
        Ok(name) => name.into(),
        Err(_) => "flex".into(),
    }
}

/// Twelve steps, with and without interruption, are the same run.
const RUN: &str = "--steps 12 --warmup 2 --log-every 3 --eval-every 6 --checkpoint-every 4";

/// A finished run that several tests look at.
fn finished() -> &'static Path {
    static RUN_FOLDER: OnceLock<PathBuf> = OnceLock::new();
    RUN_FOLDER.get_or_init(|| {
        let out = folder("finished");
        succeeds(train(&out, RUN));
        out
    })
}

/// The same run on [`device`].
fn finished_on_device() -> &'static Path {
    static RUN_FOLDER: OnceLock<PathBuf> = OnceLock::new();
    if device() == "flex" {
        return finished();
    }
    RUN_FOLDER.get_or_init(|| {
        let out = folder("finished-on-device");
        succeeds(train_on(&device(), &out, RUN));
        out
    })
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// The lines of a `metrics.csv` as fields, without the header, which is checked.
fn metrics(path: &Path) -> Vec<Vec<String>> {
    let text = fs::read_to_string(path).unwrap();
    let mut lines = text.lines();
    assert_eq!(
        lines.next(),
        Some("step,tokens,train_loss,valid_loss,lr,tokens_per_s")
    );
    lines
        .map(|line| line.split(',').map(String::from).collect())
        .collect()
}

/// The only checkpoint in the folder of a recipe.
fn checkpoint(folder: &Path) -> PathBuf {
    let found: Vec<PathBuf> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_dir())
        .collect();
    assert_eq!(found.len(), 1, "{found:?}");
    found[0].clone()
}

#[test]
fn a_comparison_writes_its_files() {
    let out = finished();
    for recipe in ["nvfp4", "f32"] {
        let rows = metrics(&out.join(recipe).join("metrics.csv"));
        let steps: Vec<&str> = rows.iter().map(|row| row[0].as_str()).collect();
        assert_eq!(steps, ["0", "3", "6", "9", "12"]);
        for row in &rows {
            assert_eq!(row.len(), 6);
            let step: u64 = row[0].parse().unwrap();
            assert_eq!(row[1].parse::<u64>().unwrap(), step * 4 * 32);
            assert_eq!(row[2].is_empty(), step == 0, "train_loss of {row:?}");
            assert_eq!(
                row[3].is_empty(),
                !step.is_multiple_of(6),
                "valid_loss of {row:?}"
            );
            assert!(row[4].parse::<f64>().unwrap() > 0.0);
            assert_eq!(row[5].is_empty(), step == 0, "tokens_per_s of {row:?}");
        }
        let loss = |row: &Vec<String>| row[3].parse::<f64>().unwrap();
        assert!(
            loss(&rows[4]) < loss(&rows[0]) - 0.5,
            "{recipe} has not learnt: {rows:?}"
        );
        assert!(checkpoint(&out.join(recipe)).ends_with("checkpoint-00000012"));
    }
    let summary = json(&out.join("summary.json"));
    let number = |key: &str| {
        summary[key]
            .as_f64()
            .unwrap_or_else(|| panic!("{key}: {summary}"))
    };
    assert_eq!(
        (summary["recipe"].as_str(), summary["device"].as_str()),
        (Some("nvfp4"), Some("flex"))
    );
    assert_eq!(summary["baseline_recipe"].as_str(), Some("f32"));
    assert_eq!(number("tokens"), 12.0 * 4.0 * 32.0);
    assert!(number("seconds") > 0.0 && number("unigram_entropy") > 0.0);
    let gap = 100.0 * (number("final_valid_loss") / number("baseline_valid_loss") - 1.0);
    assert!((number("gap_percent") - gap).abs() < 1e-6);
    assert_ne!(number("final_valid_loss"), number("baseline_valid_loss"));
    let last = metrics(&out.join("nvfp4/metrics.csv"))[4][3]
        .parse::<f64>()
        .unwrap();
    assert!((number("final_valid_loss") - last).abs() < 1e-6);

    assert_eq!(json(&out.join("config.json"))["width"].as_u64(), Some(32));
    let svg = fs::read_to_string(out.join("loss.svg")).unwrap();
    for part in [
        "<svg",
        "nvfp4, validation",
        "f32, validation",
        "unigram entropy",
    ] {
        assert!(svg.contains(part), "loss.svg lacks {part}");
    }
}

/// Everything that a resumed run must share with an uninterrupted one.
fn assert_same_run(left: &Path, right: &Path) {
    let config = json(&left.join("config.json"));
    let compared = config["compare"].as_array().unwrap();
    for recipe in std::iter::once(&config["recipe"]).chain(compared) {
        let recipe = recipe.as_str().unwrap();
        let (left, right) = (left.join(recipe), right.join(recipe));
        for file in ["model.bpk", "optimizer.bpk", "state.json"] {
            let read = |folder: &Path| fs::read(checkpoint(folder).join(file)).unwrap();
            assert!(read(&left) == read(&right), "{recipe}/{file} differs");
        }
        let rows = |folder: &Path| {
            let mut rows = metrics(&folder.join("metrics.csv"));
            rows.iter_mut().for_each(|row| row[5].clear());
            rows
        };
        assert_eq!(rows(&left), rows(&right), "{recipe}/metrics.csv differs");
    }
    for key in ["final_valid_loss", "baseline_valid_loss", "gap_percent"] {
        let [left, right] = [left, right].map(|out| json(&out.join("summary.json"))[key].clone());
        assert_eq!(left, right, "{key} differs");
    }
}

#[test]
fn a_resumed_run_reaches_the_same_bytes() {
    // Between two checkpoints, two rows and two evaluations.
    for stop in ["5", "6"] {
        let out = folder(&format!("resumed-{stop}"));
        let said = succeeds(train_on(
            &device(),
            &out,
            &format!("{RUN} --stop-at {stop}"),
        ));
        assert!(!out.join("summary.json").exists());
        // What it says to go on by can be pasted.
        let path = out.to_str().unwrap();
        let program = env!("CARGO_BIN_EXE_nvfp4");
        let hint = format!("to resume: {program} train --resume {path}");
        assert!(said.lines().any(|line| line.ends_with(&hint)), "{said}");
        succeeds(nvfp4("train", &["--resume", path]));
        assert_same_run(finished_on_device(), &out);
    }
}

/// The same of a model with experts: routing, rows that are sent to experts and back, losses of balance.
#[test]
fn a_resumed_mixture_reaches_the_same_bytes() {
    let run = format!("{RUN} --no-compare --model moe --experts 4 --top-k 2");
    let [whole, resumed] = ["mixture", "mixture-resumed"].map(folder);
    succeeds(train_on(&device(), &whole, &run));
    succeeds(train_on(&device(), &resumed, &format!("{run} --stop-at 5")));
    succeeds(nvfp4("train", &["--resume", resumed.to_str().unwrap()]));
    assert_same_run(&whole, &resumed);
}

#[test]
fn a_crash_loses_only_what_came_after_the_checkpoint() {
    let out = folder("crashed");
    succeeds(train_on(&device(), &out, &format!("{RUN} --stop-at 7")));
    let nvfp4_folder = out.join("nvfp4");
    // As a crash would leave it: half a checkpoint, a row that the checkpoint does not know, and half of
    // another.
    let half = nvfp4_folder.join("checkpoint-00000008.unfinished");
    fs::create_dir(&half).unwrap();
    fs::write(half.join("model.bpk"), "half").unwrap();
    let csv = nvfp4_folder.join("metrics.csv");
    let whole = fs::read_to_string(&csv).unwrap();
    let resume = ["--resume", out.to_str().unwrap()];
    // What the checkpoint does know must be there.
    let gap: String = whole
        .split_inclusive('\n')
        .filter(|line| !line.starts_with("3,"))
        .collect();
    fs::write(&csv, gap).unwrap();
    fails(
        nvfp4("train", &resume),
        &["metrics.csv is damaged", "the row of step 3"],
    );
    fs::write(&csv, whole + "9,1152,1.0,,0.001,5.0\n12,11").unwrap();
    succeeds(nvfp4("train", &resume));
    assert_same_run(finished_on_device(), &out);
}

/// A sample is in telemetry.csv once, however often its step was done.
#[test]
fn a_crash_repeats_no_sample() {
    let run = format!("{RUN} --no-compare --telemetry-every 2");
    let [whole, crashed] = ["sampled", "sampled-crashed"].map(folder);
    succeeds(train(&whole, &run));
    succeeds(train(&crashed, &format!("{run} --stop-at 7")));
    let [expected, csv] = [&whole, &crashed].map(|out| out.join("nvfp4/telemetry.csv"));
    // As a crash after step 11 would leave it.
    let mut torn = fs::read_to_string(&expected).unwrap();
    assert!(torn.contains("\n10,blocks."));
    torn.truncate(torn.len() - 20);
    fs::write(&csv, torn).unwrap();
    succeeds(nvfp4("train", &["--resume", crashed.to_str().unwrap()]));
    let [expected, found] = [&expected, &csv].map(|path| fs::read_to_string(path).unwrap());
    assert!(found == expected, "{found}");
}

/// A run that cannot start leaves nothing, so that the corrected command can have its folder.
#[test]
fn a_failed_start_leaves_nothing() {
    let out = folder("failed-start");
    fs::remove_dir(&out).unwrap();
    fails(
        train(&out, "--high-precision typo"),
        &["high_precision", "typo"],
    );
    let long = SMALL.replace("--context 32", "--context 100000");
    let paths = ["--data", text(), "--out", out.to_str().unwrap()];
    fails(
        nvfp4(&format!("train {long}"), &paths),
        &["context of 100000"],
    );
    fails(
        nvfp4(
            "train --data typo --device flex --out",
            &[out.to_str().unwrap()],
        ),
        &["data typo does not exist"],
    );
    assert!(!out.exists());
    succeeds(train(&out, "--steps 1 --no-compare"));
}

/// What is not on a terminal gets a line for each row.
#[test]
fn progress_is_logged() {
    let run = "--steps 4 --log-every 2 --eval-every 4 --no-compare";
    let output = train(&folder("logged"), run);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    succeeds(output);
    let lines: Vec<Vec<&str>> = error
        .lines()
        .map(|line| line.trim().split("  ").collect())
        .filter(|parts: &Vec<&str>| parts.len() > 1 && parts[1].starts_with("step "))
        .collect();
    let number = |text: &str, before: &str, after: &str| {
        let number = text
            .strip_prefix(before)
            .and_then(|t| t.strip_suffix(after));
        let number = number.unwrap_or_else(|| panic!("{text:?}: {error}"));
        assert!(number.parse::<f64>().unwrap() > 0.0, "{text}");
    };
    let [start, middle, end] = &lines[..] else {
        panic!("not three lines: {error}");
    };
    assert_eq!(start[..2], ["nvfp4", "step 0/4"]);
    number(start[2], "valid ", "");
    assert_eq!(start[3..], ["ETA ?"]);
    assert_eq!(middle[..2], ["nvfp4", "step 2/4"]);
    number(middle[2], "loss ", "");
    number(middle[3], "", " tokens/s");
    assert!(middle[4].starts_with("ETA ") && middle[4].contains("second"));
    assert_eq!(end[..2], ["nvfp4", "step 4/4"]);
    number(end[3], "valid ", "");
    assert_eq!(end[5..], ["ETA 0 seconds"]);
}

/// The default model, on real text: this crate's sources.
#[test]
fn tiny_learns_more_than_the_frequencies_of_bytes() {
    let out = folder("learns");
    let run = "train --device flex --preset tiny --context 64 --batch 4 --steps 40 --eval-every 40 \
               --eval-batches 4 --no-compare";
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("../lm/src");
    let paths = [
        "--data",
        sources.to_str().unwrap(),
        "--out",
        out.to_str().unwrap(),
    ];
    succeeds(nvfp4(run, &paths));
    let summary = json(&out.join("summary.json"));
    let [loss, unigram] =
        ["final_valid_loss", "unigram_entropy"].map(|key| summary[key].as_f64().unwrap());
    assert!(
        loss < unigram - 0.1,
        "{loss}, and without context {unigram}"
    );
}

/// Paths of text are stored so that they hold anywhere.
#[test]
fn a_run_goes_on_from_another_folder() {
    let here = folder("relative");
    fs::create_dir(here.join("words")).unwrap();
    write_text(&here.join("words"), 20);
    let command = |folder: &Path, arguments: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
        command
            .args(arguments.split_whitespace())
            .current_dir(folder);
        command.output().unwrap()
    };
    let run = format!("train {SMALL} --steps 2 --no-compare --stop-at 1 --data words --out run");
    succeeds(command(&here, &run));
    succeeds(command(&here.join("words"), "train --resume ../run"));
}

#[cfg(unix)]
#[test]
fn ctrl_c_leaves_a_checkpoint() {
    let out = folder("interrupted");
    let path = out.to_str().unwrap();
    let mut child = Command::new(env!("CARGO_BIN_EXE_nvfp4"))
        .args(
            ["train"]
                .iter()
                .chain(&SMALL.split_whitespace().collect::<Vec<_>>()),
        )
        .args([
            "--data",
            text(),
            "--out",
            path,
            "--steps",
            "1000000",
            "--log-every",
            "1",
        ])
        .stderr(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let csv = out.join("nvfp4/metrics.csv");
    let trained = || fs::read_to_string(&csv).is_ok_and(|text| text.lines().count() > 4);
    while !trained() {
        assert!(child.try_wait().unwrap().is_none(), "ended early");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let kill = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status()
        .unwrap();
    assert!(kill.success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let name = checkpoint(&out.join("nvfp4"))
        .file_name()
        .unwrap()
        .to_str()
        .unwrap()
        .to_owned();
    let step: usize = name.strip_prefix("checkpoint-").unwrap().parse().unwrap();
    assert_eq!(metrics(&csv).last().unwrap()[0], step.to_string());
    let stop = (step + 2).to_string();
    succeeds(nvfp4("train", &["--resume", path, "--stop-at", &stop]));
    assert_eq!(metrics(&csv).last().unwrap()[0], stop);
}

#[test]
fn a_damaged_checkpoint_is_an_error() {
    let out = folder("damaged");
    succeeds(train(&out, &format!("{RUN} --stop-at 4 --no-compare")));
    let path = out.to_str().unwrap();
    let model = checkpoint(&out.join("nvfp4")).join("model.bpk");
    let whole = fs::read(&model).unwrap();
    let mut damaged = whole.clone();
    let middle = damaged.len() / 2;
    damaged[middle] ^= 0x10;
    fs::write(&model, damaged).unwrap();
    fails(
        nvfp4("train", &["--resume", path]),
        &["checkpoint-00000004", "model.bpk is damaged"],
    );
    let sample = ["--checkpoint", path, "--prompt", "let", "--device", "flex"];
    fails(nvfp4("sample", &sample), &["model.bpk is damaged"]);
    fs::write(&model, whole).unwrap();
    succeeds(nvfp4("sample --tokens 2", &sample));
}

#[test]
fn the_text_of_a_resumed_run_must_be_the_same() {
    let data = folder("changing-text");
    write_text(&data, 20);
    let out = folder("changing");
    let [data_name, out_name] = [&data, &out].map(|path| path.to_str().unwrap());
    let arguments = format!("train {SMALL} --steps 4 --stop-at 2 --no-compare");
    succeeds(nvfp4(&arguments, &["--data", data_name, "--out", out_name]));
    fs::write(data.join("file-3.txt"), "other words").unwrap();
    fails(
        nvfp4("train", &["--resume", out_name]),
        &["the text has changed"],
    );
}

#[test]
fn sampling_continues_the_prompt() {
    let path = finished().to_str().unwrap();
    let sample = |more: &str| {
        let arguments = format!("sample --device flex --tokens 40 {more}");
        succeeds(nvfp4(
            &arguments,
            &["--checkpoint", path, "--prompt", "let x"],
        ))
    };
    let first = sample("--seed 1");
    assert!(
        first.starts_with("let x") && first.len() > "let x\n".len(),
        "{first:?}"
    );
    assert_eq!(first, sample("--seed 1"));
    assert_eq!(
        sample("--temperature 0 --seed 1"),
        sample("--temperature 0 --seed 2")
    );
    let seeds: std::collections::HashSet<String> = (2..6)
        .map(|seed| sample(&format!("--seed {seed}")))
        .collect();
    assert!(seeds.len() > 1);
    // The folder of a recipe and of a checkpoint mean the same model.
    let recipe = finished().join("nvfp4");
    for folder in [checkpoint(&recipe), recipe] {
        let folder = folder.to_str().unwrap();
        let arguments = "sample --device flex --tokens 40 --seed 1 --prompt";
        assert_eq!(
            succeeds(nvfp4(arguments, &["let x", "--checkpoint", folder])),
            first
        );
    }
    let empty = folder("no-checkpoint");
    let sample = [
        "--prompt",
        "a",
        "--device",
        "flex",
        "--checkpoint",
        empty.to_str().unwrap(),
    ];
    fails(
        nvfp4("sample", &sample),
        &["no checkpoint", "no-checkpoint"],
    );
}

#[test]
fn bad_arguments_are_named() {
    let cases: [(&str, &[&str]); 15] = [
        ("--decorate", &["decorate", "flex", "cuda:N"]),
        ("--decorate=maybe", &["--decorate", "strict", "lenient"]),
        ("--devices cuda:0,cuda:1", &["--devices", "--device"]),
        ("--device gpu", &["device", "gpu", "flex, cpu, or cuda:N"]),
        ("--device cuda:99", &["cuda:99"]),
        ("--recipe fp8", &["recipe", "fp8", "nvfp4"]),
        ("--preset huge", &["--preset", "huge", "tiny"]),
        ("--width 100", &["width", "100", "multiple of 16"]),
        ("--hidden 40", &["hidden", "40", "multiple of 16"]),
        ("--heads 5", &["heads", "5"]),
        ("--steps 0", &["steps", "at least 1"]),
        ("--lr -1", &["lr", "-1"]),
        ("--recipe f32 --compare", &["compare", "f32"]),
        ("--high-precision nothing", &["high_precision", "nothing"]),
        (
            "--data /nonexistent/text",
            &["/nonexistent/text", "does not exist"],
        ),
    ];
    let usual = [
        ("--device", "flex"),
        ("--width", "32"),
        ("--heads", "2"),
        ("--hidden", "32"),
        ("--data", text()),
    ];
    for (number, (arguments, names)) in cases.into_iter().enumerate() {
        let out = folder(&format!("bad-{number}"));
        let mut given: Vec<&str> = arguments.split_whitespace().collect();
        for (name, value) in usual {
            if !given.contains(&name) {
                given.extend([name, value]);
            }
        }
        given.extend(["--out", out.to_str().unwrap()]);
        fails(nvfp4("train", &given), names);
        assert!(
            fs::read_dir(&out).unwrap().next().is_none(),
            "{arguments} left something behind"
        );
    }
    let path = finished().to_str().unwrap();
    let sample = ["--checkpoint", path, "--prompt", "let", "--device", "flex"];
    fails(
        nvfp4("sample --temperature -1", &sample),
        &["temperature", "-1"],
    );
    fails(
        nvfp4("sample --device gpu", &sample[..4]),
        &["--device", "gpu"],
    );
}

#[test]
fn folders_and_files_are_checked() {
    let taken = finished().to_str().unwrap();
    let data = ["--data", text()];
    fails(
        nvfp4("train", &[&data[..], &["--out", taken]].concat()),
        &["already holds a run"],
    );
    let resume = ["--resume", taken];
    fails(
        nvfp4("train --steps 20", &resume),
        &["--resume", "as it was configured"],
    );
    let empty = folder("not-a-run");
    fails(
        nvfp4("train", &["--resume", empty.to_str().unwrap()]),
        &["config.json"],
    );

    let config = folder("config").join("config.json");
    let config_name = config.to_str().unwrap();
    fs::write(&config, r#"{"device": "flex", "widht": 64}"#).unwrap();
    fails(
        nvfp4("train", &["--config", config_name]),
        &[config_name, "widht"],
    );
    fs::write(&config, r#"{"device": "flex", "width": "wide"}"#).unwrap();
    fails(
        nvfp4("train", &["--config", config_name]),
        &[config_name, "line 1"],
    );

    // A file of options, and flags that win over it.
    let out = folder("from-config");
    let values = format!(
        r#"{{"devices": ["cuda:0", "cuda:1"], "decorate": "strict", "experts": 4, "width": 16, "layers": 1,
            "heads": 1, "hidden": 16, "context": 16, "batch": 2, "steps": 2, "eval_batches": 1,
            "compare": false, "data": [{:?}]}}"#,
        text()
    );
    fs::write(&config, values).unwrap();
    let arguments = ["--config", config_name, "--out", out.to_str().unwrap()];
    let flags = "train --steps 3 --device flex --decorate false --model dense";
    succeeds(nvfp4(flags, &arguments));
    let summary = json(&out.join("summary.json"));
    assert_eq!(
        (summary["steps"].as_u64(), summary["gap_percent"].as_f64()),
        (Some(3), None)
    );
    assert!(!out.join("f32").exists());
}

#[test]
fn the_default_text_is_cargos_registry() {
    let home = folder("cargo-home");
    let out = folder("cargo-out");
    let train = |home: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
        command.args("train".split_whitespace().chain(SMALL.split_whitespace()));
        command.args([
            "--steps",
            "1",
            "--no-compare",
            "--out",
            out.to_str().unwrap(),
        ]);
        command.env("CARGO_HOME", home).output().unwrap()
    };
    fails(train(&home), &["no Rust sources", "--data", "cargo fetch"]);
    for name in ["one-1.0.0", "two-2.0.0"] {
        let sources = home.join("registry/src/index-0123").join(name).join("src");
        fs::create_dir_all(&sources).unwrap();
        for file in 0..10 {
            let text = format!("//! {name}\npub fn function_{file}() -> usize {{ {file} }}\n");
            fs::write(sources.join(format!("f{file}.rs")), text).unwrap();
        }
        fs::write(sources.join("notes.md"), "not Rust").unwrap();
    }
    succeeds(train(&home));
    let state = json(&checkpoint(&out.join("nvfp4")).join("state.json"));
    let files = |part: &str| state["corpus"][part].as_u64().unwrap();
    assert_eq!(files("train_files") + files("valid_files"), 20);
}

/// The section of a device in what the doctor said.
fn section<'a>(said: &'a str, device: &str) -> Vec<&'a str> {
    let heading = format!("{device}\n");
    let mut sections = said.split("\n\n");
    let section = sections.find(|section| section.starts_with(&heading));
    section.expect(device).lines().map(str::trim).collect()
}

#[test]
fn doctor_names_the_kernels() {
    let said = succeeds(nvfp4("doctor", &[]));
    let reasons = succeeds(nvfp4("doctor --why", &[]));
    let operations = [
        "amax",
        "quantize rowwise, 1x16",
        "quantize columnwise, 16x1",
        "quantize tiles, 16x16",
        "quantize by amax per row",
        "random Hadamard transform",
        "round to nearest",
        "round stochastically",
        "MS-EDEN",
        "MXFP8",
        "128x4 scale layout",
        "dequantize",
        "GEMM, NVFP4 x NVFP4",
        "GEMM, bf16 x NVFP4",
        "GEMM, bf16 x bf16",
        "GEMM, f32 or f16",
        "grouped GEMM",
        "RMSNorm, SwiGLU",
    ];
    // A section for each device, and in it each operation with its kernel; the reason on request.
    for device in [Some("flex"), cfg!(feature = "cpu").then_some("cpu")] {
        let Some(device) = device else { continue };
        for (said, has_reasons) in [(&said, false), (&reasons, true)] {
            let lines = section(said, device);
            assert!(lines.iter().any(|line| line.starts_with("types: f32")));
            for operation in operations {
                let line = lines.iter().position(|line| {
                    let kernel = line.strip_prefix(operation);
                    kernel
                        .is_some_and(|kernel| kernel.starts_with(' ') && !kernel.trim().is_empty())
                });
                let line = line.unwrap_or_else(|| panic!("{operation} on {device}: {said}"));
                let next = lines.get(line + 1);
                let is_reason = next.is_some_and(|line| line.starts_with("because "));
                assert_eq!(is_reason, has_reasons, "{said}");
            }
        }
    }
    for said in [&said, &reasons] {
        assert!(
            said.lines().all(|line| line.chars().count() <= 100),
            "{said}"
        );
    }
    let said = succeeds(nvfp4("doctor", &["--shape", "64,128,256"]));
    assert!(said.contains("M 64, N 128, K 256"), "{said}");
}

/// The kernels of a shape, dense and in groups: CubeCL's CPU runtime has one for all operands.
#[cfg(feature = "cpu")]
#[test]
fn doctor_names_the_kernels_of_a_shape() {
    for (more, groups) in [
        (vec![], "1 group(s)"),
        (vec!["--groups", "8"], "8 group(s)"),
    ] {
        let arguments = [vec!["--shape", "64,128,256"], more].concat();
        let said = succeeds(nvfp4("doctor", &arguments));
        let mut lines = section(&said, "cpu").into_iter();
        let shape = format!("M 64, N 128, K 256, {groups}");
        assert!(lines.any(|line| line == shape), "{shape}: {said}");
        for operands in ["NVFP4 x NVFP4", "bf16 x NVFP4", "bf16 x bf16"] {
            let backend = format!("{operands:<26} Scalar");
            assert_eq!(lines.next(), Some(backend.as_str()), "{said}");
            let kernel = lines.next().expect("a kernel");
            assert!(kernel.starts_with("one "), "{said}");
        }
    }
    fails(nvfp4("doctor", &["--shape", "64,128"]), &["64,128"]);
}

/// A step that cannot fit is one error before anything is trained, and says what to change.
#[cfg(feature = "cpu")]
#[test]
fn a_batch_that_cannot_fit_is_an_error() {
    let out = folder("no-memory");
    fs::remove_dir(&out).unwrap();
    let error = fails(
        train_on("cpu", &out, "--batch 1000000000 --no-compare"),
        &[
            "out of device memory on cpu",
            "at least",
            "weights",
            "optimizer state",
            "activations",
            "a smaller --batch",
        ],
    );
    assert!(error.lines().count() < 12, "{error}");
    assert!(!out.exists());
}

/// Several recipes side by side, one of them healed, a mixture of experts, and telemetry.
#[test]
fn recipes_are_compared_on_the_same_batches() {
    let out = folder("recipes");
    let run = "--steps 4 --warmup 1 --log-every 2 --eval-every 4 --recipe quartet2 \
               --compare f32,per_token --healing 0.5:forward --telemetry-every 2";
    let said = succeeds(train(&out, run));
    for gap in ["gap of quartet2 to f32", "gap of per_token to f32"] {
        assert!(said.contains(gap), "{said}");
    }
    let summary = json(&out.join("summary.json"));
    assert_eq!(summary["baseline_recipe"].as_str(), Some("f32"));
    let names: Vec<&str> = summary["results"]
        .as_array()
        .unwrap()
        .iter()
        .map(|result| result["recipe"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["quartet2", "f32", "per_token"]);
    let telemetry = fs::read_to_string(out.join("quartet2/telemetry.csv")).unwrap();
    let lines: Vec<&str> = telemetry.lines().collect();
    assert!(lines[0].starts_with("step,layer,operand,sqnr_db"));
    // Two sampled steps of eight layers. In the second the forward has healed, and what is left to look at is
    // the backward: MS-EDEN's operands.
    let of_step = |step: &str| {
        let lines = lines[1..].iter();
        lines.filter(|line| line.starts_with(step)).count()
    };
    let (whole, backward) = (5 * 8, 3 * 8);
    assert_eq!(
        (of_step("0,blocks."), of_step("2,blocks.")),
        (whole, backward)
    );
    assert_eq!(lines.len(), 1 + whole + backward, "{telemetry}");
    let state = json(&checkpoint(&out.join("quartet2")).join("state.json"));
    let modes = state["nvfp4"]["modes"].as_object().unwrap();
    assert_eq!(modes["blocks.0.attention.qkv"], "high_precision_forward");

    let out = folder("experts");
    let run = "--steps 2 --no-compare --model moe --experts 4 --top-k 2 --eval-every 2";
    succeeds(train(&out, run));
    let config = json(&out.join("config.json"));
    assert_eq!(
        (config["experts"].as_u64(), config["top_k"].as_u64()),
        (Some(4), Some(2))
    );
}

/// The model of Burn's layers, high precision and every preset, dense and with experts, take their steps and
/// are measured.
#[test]
fn the_cost_of_every_recipe_is_measured() {
    let path = folder("cost").with_extension("json");
    let file = path.to_str().unwrap();
    let run = format!("cost {SMALL} --rounds 2 --round-steps 1 --warm 1");
    for (more, first) in [("", "burn"), ("--model moe --experts 4", "f32")] {
        let more: Vec<&str> = more.split_whitespace().collect();
        let said = succeeds(nvfp4(&run, &[&more[..], &["--json", file]].concat()));
        let figures = json(&path);
        let results = figures["results"].as_array().unwrap();
        let names: Vec<&str> = results
            .iter()
            .map(|result| result["recipe"].as_str().unwrap())
            .collect();
        assert_eq!(names[0], first);
        for name in Nvfp4Recipe::preset_names().filter(|name| *name != "bf16") {
            assert!(names.contains(&name), "{name}: {names:?}");
        }
        for (name, result) in names.iter().zip(results) {
            assert!(said.contains(name), "{name}: {said}");
            let seconds = result["seconds"].as_array().unwrap();
            assert_eq!(seconds.len(), 2, "{name}: a figure for each round");
            assert!(seconds.iter().all(|each| each.as_f64().unwrap() > 0.0));
            // Flex has neither memory pools nor launches.
            assert!(result["memory"].is_null());
        }
    }
    for (more, names) in [
        ("--recipe nvidia", ["--recipes", "recipe"]),
        ("--recipes fp8", ["fp8", "nvidia_4over6"]),
        ("--rounds 0 --recipes f32", ["rounds", "at least 1"]),
        ("--recipes f32 --lock no/such", ["lock", "no/such"]),
    ] {
        let more: Vec<&str> = more.split_whitespace().collect();
        fails(nvfp4(&format!("cost {SMALL}"), &more), &names);
    }
}

/// A step that telemetry samples beside one that it does not, and what that makes of one in five.
#[test]
fn the_cost_of_telemetry_is_measured() {
    let path = folder("cost-of-telemetry").with_extension("json");
    let run = "--rounds 2 --round-steps 1 --warm 1 --recipes f32,nvidia --telemetry-every 5 --json";
    let run = format!("cost {SMALL} {run}");
    let said = succeeds(nvfp4(&run, &[path.to_str().unwrap()]));
    let header = said.lines().next().unwrap();
    for column in ["sampled ms", "1 in 5"] {
        assert!(header.contains(column), "{column}: {said}");
    }
    let figures = json(&path);
    for result in figures["results"].as_array().unwrap() {
        let median = |key: &str| {
            let rounds = result[key].as_array().unwrap().iter();
            let rounds: Vec<f64> = rounds.map(|each| each.as_f64().unwrap()).collect();
            assert_eq!(rounds.len(), 2, "{key}: a figure for each round");
            rounds[0].max(rounds[1])
        };
        let (plain, sampled) = (median("seconds"), median("sampled"));
        let share = 100.0 * (sampled / plain - 1.0) / 5.0;
        let name = result["recipe"].as_str().unwrap();
        let line = said.lines().find(|line| line.starts_with(name)).unwrap();
        let printed = line.trim_end_matches(" %").rsplit(' ').next().unwrap();
        let printed: f64 = printed.parse().unwrap();
        assert!((printed - share).abs() < 0.006, "{line}, {share}");
        let operands = result["sampled_operands"].as_u64().unwrap();
        assert_eq!(operands, if name == "f32" { 0 } else { 5 * 8 }, "{name}");
    }
    let said = succeeds(nvfp4(
        &format!("cost {SMALL} --rounds 1 --round-steps 1 --warm 1 --recipes f32"),
        &[],
    ));
    assert!(!said.contains("sampled"), "{said}");
}

/// What shares a lock measures when its turn has come.
#[test]
fn measurements_take_turns() {
    let path = folder("cost").with_extension("lock");
    let lock = std::fs::File::create(&path).unwrap();
    lock.lock().unwrap();
    let waiting = std::thread::spawn(move || {
        let run = format!("cost {SMALL} --rounds 1 --round-steps 1 --warm 1 --recipes f32");
        succeeds(nvfp4(&run, &["--lock", path.to_str().unwrap()]))
    });
    std::thread::sleep(std::time::Duration::from_secs(3));
    assert!(!waiting.is_finished());
    lock.unlock().unwrap();
    assert!(waiting.join().unwrap().contains("f32"));
}

/// A study in two parts and two sittings is the study in one.
#[test]
fn a_study_goes_on_and_reports() {
    let folder = folder("study");
    let plan = folder.join("plan.json");
    let written = serde_json::json!({
        "options": {
            "device": "flex", "data": [text()], "width": 32, "layers": 2, "heads": 2, "hidden": 48,
            "context": 32, "batch": 4, "lr": 0.01, "steps": 8, "warmup": 1, "log_every": 4,
            "eval_every": 4, "eval_batches": 1, "checkpoint_every": 4
        },
        "runs": [
            {"recipe": "f32", "seeds": [0, 1]},
            {"recipe": "nvidia", "healing": ["0.5:forward"]}
        ]
    });
    fs::write(&plan, written.to_string()).unwrap();
    let (whole, parts) = (folder.join("whole"), folder.join("parts"));
    let study = |out: &Path, more: &[&str]| {
        let arguments = [plan.to_str().unwrap(), "--out", out.to_str().unwrap()];
        succeeds(nvfp4("study", &[&arguments, more].concat()))
    };
    let said = study(&whole, &[]);
    assert!(
        said.contains("| `nvidia+healing-0.5-forward` | 1 |"),
        "{said}"
    );
    assert!(said.contains("Seeds alone move"), "{said}");
    study(&parts, &["--part", "1/2"]);
    study(&parts, &["--part", "2/2", "--seconds", "0"]);
    study(&parts, &["--part", "2/2"]);
    study(&parts, &["--report"]);
    let losses = |out: &Path| -> Vec<(String, f64)> {
        let results = json(&out.join("results.json"));
        let results = results.as_array().unwrap().iter();
        results
            .map(|run| {
                let loss = run["final_valid_loss"].as_f64().unwrap();
                (run["name"].as_str().unwrap().to_string(), loss)
            })
            .collect()
    };
    let found = losses(&whole);
    assert_eq!(found.len(), 4);
    assert_eq!(losses(&parts), found);
    // Up to where it heals, the healed run is the plain one.
    let rows = |name: &str| metrics(&whole.join(name).join("metrics.csv"));
    let (plain, healed) = (
        rows("nvidia-seed0"),
        rows("nvidia+healing-0.5-forward-seed0"),
    );
    assert_eq!(plain[..2], healed[..2]);
    assert_ne!(plain[2][3], healed[2][3]);
    let error = fails(
        nvfp4(
            "study",
            &[plan.to_str().unwrap(), "--out", "x", "--part", "3/2"],
        ),
        &["3/2"],
    );
    assert!(error.contains("I/N"), "{error}");
}

/// A model of Burn's own layers: trained, stopped, resumed, sampled, with an account of every product.
#[cfg(feature = "cpu")]
#[test]
fn a_decorated_model_trains_and_resumes() {
    let out = folder("decorated");
    let sizes = "--decorate --recipe nvidia --no-compare --device cpu --width 16 --layers 1 \
                 --heads 1 --hidden 32 --context 8 --batch 2 --steps 2 --eval-every 2 \
                 --eval-batches 1 --log-every 1 --checkpoint-every 2 --stop-at 1";
    let paths = ["--data", text(), "--out", out.to_str().unwrap()];
    let said = succeeds(nvfp4(&format!("train {sizes}"), &paths));
    assert!(
        said.contains("encoder.layers.0.pwff.linear_outer"),
        "{said}"
    );
    let mut heads = said.lines().filter(|line| line.starts_with("head"));
    let head = heads.next().expect("a line of the head");
    assert!(head.ends_with("not decorated"), "{said}");
    assert!(said.contains("NVFP4"), "{said}");
    let said = succeeds(nvfp4("train --resume", &[out.to_str().unwrap()]));
    assert!(said.contains("encoder.layers.0.mha.query"), "{said}");
    let rows = metrics(&out.join("nvidia").join("metrics.csv"));
    let steps: Vec<&str> = rows.iter().map(|row| row[0].as_str()).collect();
    assert_eq!(steps, ["0", "1", "2"]);
    let checkpoint = ["--checkpoint", out.to_str().unwrap(), "--prompt", "a"];
    fails(
        nvfp4("sample --device flex", &checkpoint),
        &["CubeCL CPU or CUDA"],
    );
}

/// A study of decorated models, stopped after a step and gone on with.
#[cfg(feature = "cpu")]
#[test]
fn a_study_decorates() {
    let folder = folder("decorated-study");
    let plan = folder.join("plan.json");
    let written = serde_json::json!({
        "options": {
            "decorate": "strict", "device": "cpu", "data": [text()], "width": 16, "layers": 1, "heads": 1,
            "hidden": 32, "context": 8, "batch": 2, "lr": 0.01, "steps": 2, "log_every": 1,
            "eval_every": 2, "eval_batches": 1, "checkpoint_every": 2
        },
        "runs": [{"recipe": "nvidia", "healing": ["0.5"]}]
    });
    fs::write(&plan, written.to_string()).unwrap();
    let out = folder.join("out");
    let study = |more: &[&str]| {
        let arguments = [plan.to_str().unwrap(), "--out", out.to_str().unwrap()];
        nvfp4("study", &[&arguments, more].concat())
    };
    let stopped = study(&["--seconds", "0"]);
    assert!(String::from_utf8_lossy(&stopped.stderr).contains("resumes"));
    succeeds(stopped);
    let plain = out.join("nvidia-seed0");
    assert!(checkpoint(&plain).ends_with("checkpoint-00000001"));
    let said = succeeds(study(&[]));
    for part in [
        "nvidia-seed0: GEMMs by backend",
        "encoder.layers.0.mha.query",
        "nvidia+healing-0.5-seed0: GEMMs by backend",
        "1 blocks of Burn's own layers",
        "| `nvidia+healing-0.5` | 1 |",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let rows = |name: &str| metrics(&out.join(name).join("metrics.csv"));
    let (plain, healed) = (rows("nvidia-seed0"), rows("nvidia+healing-0.5-seed0"));
    assert_eq!((plain.len(), healed.len()), (3, 3));
    assert_eq!(plain[..2], healed[..2], "up to where it heals");
    assert_ne!(plain[2][3], healed[2][3]);
}

/// What cannot be combined is said before anything is trained.
#[test]
fn a_study_refuses_what_cannot_be() {
    let folder = folder("refused-study");
    let plan = folder.join("plan.json");
    let out = folder.join("out");
    let cases: [(Value, &[&str], &[&str]); 7] = [
        (
            serde_json::json!({"decorate": "strict", "device": "flex"}),
            &[],
            &["decorate on device flex", "cpu and cuda:N"],
        ),
        (
            serde_json::json!({"decorate": "lenient", "device": "cpu", "model": "moe"}),
            &[],
            &["decorate is given and experts is 8"],
        ),
        (
            serde_json::json!({"decorate": "perhaps", "device": "cpu"}),
            &[],
            &["perhaps", "strict", "lenient"],
        ),
        (
            serde_json::json!({"devices": ["flex", "cpu"]}),
            &[],
            &["devices is flex,cpu", "at least two different GPUs"],
        ),
        (
            serde_json::json!({"devices": ["cuda:98", "cuda:99"], "batch": 3}),
            &[],
            &["batch is 3", "number of devices (2)"],
        ),
        (
            serde_json::json!({"devices": ["cuda:98", "cuda:99"]}),
            &["--device", "flex"],
            &["device is flex", "the first of devices (cuda:98,cuda:99)"],
        ),
        (
            serde_json::json!({"devices": ["cuda:98", "cuda:99"]}),
            &[],
            &["device cuda:98"],
        ),
    ];
    for (options, more, names) in cases {
        let mut options = options;
        options["data"] = serde_json::json!([text()]);
        let written = serde_json::json!({"options": options, "runs": [{"recipe": "nvidia"}]});
        fs::write(&plan, written.to_string()).unwrap();
        let arguments = [plan.to_str().unwrap(), "--out", out.to_str().unwrap()];
        fails(nvfp4("study", &[&arguments, more].concat()), names);
        let trained = out.join("nvidia-seed0");
        assert!(!trained.exists(), "{names:?}");
    }
}

/// CubeCL's CPU runtime has no bf16: text from a bf16 run would be noise there.
#[cfg(feature = "cpu")]
#[test]
fn a_device_without_bf16_samples_none() {
    let out = folder("bf16");
    succeeds(train(&out, "--steps 1 --no-compare --recipe bf16"));
    let sample = ["--checkpoint", out.to_str().unwrap(), "--prompt", "let"];
    fails(
        nvfp4("sample --tokens 2 --device cpu", &sample),
        &["BF16 on device cpu", "flex or cuda:N"],
    );
    succeeds(nvfp4("sample --tokens 2 --device flex", &sample));
}

#[cfg(feature = "cpu")]
#[test]
fn the_oracle_reads_random_bits() {
    let said = succeeds(nvfp4("oracle cvt-rs --device cpu --count 4096", &[]));
    for part in [
        "in software",
        "      0 7 6 5 4 3 2 1 0",
        "      3 31 30 29 28 27 26 25 24",
        "this is the order of the software form",
        "4096 of 4096 random questions",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    fails(
        nvfp4("oracle cvt-rs --device flex", &[]),
        &["flex", "cuda:N"],
    );
}
