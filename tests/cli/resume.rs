//! Tests of runs that stop, crash and are resumed.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::support::*;

/// Asserts that a resumed run equals an uninterrupted one.
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
        // The printed resume command can be pasted.
        let path = out.to_str().unwrap();
        let program = env!("CARGO_BIN_EXE_nvfp4");
        let hint = format!("to resume: {program} train --resume {path}");
        assert!(said.lines().any(|line| line.ends_with(&hint)), "{said}");
        succeeds(nvfp4("train", &["--resume", path]));
        assert_same_run(finished_on_device(), &out);
    }
}

/// Does the same with experts: routing, dispatch and combine of tokens, load-balancing loss.
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
    let recipe_folder = out.join("nvidia");
    // Simulates a crash: half a checkpoint, a row newer than the checkpoint, and half of another
    // row.
    let half = recipe_folder.join("checkpoint-00000008.unfinished");
    fs::create_dir(&half).unwrap();
    fs::write(half.join("model.bpk"), "half").unwrap();
    let csv = recipe_folder.join("metrics.csv");
    let whole = fs::read_to_string(&csv).unwrap();
    let resume = ["--resume", out.to_str().unwrap()];
    // Rows that the checkpoint covers must exist.
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

/// Each sample occurs once in telemetry.csv, even if its step was repeated.
#[test]
fn a_crash_repeats_no_sample() {
    let run = format!("{RUN} --no-compare --telemetry-every 2");
    let [whole, crashed] = ["sampled", "sampled-crashed"].map(folder);
    succeeds(train(&whole, &run));
    succeeds(train(&crashed, &format!("{run} --stop-at 7")));
    let [expected, csv] = [&whole, &crashed].map(|out| out.join("nvidia/telemetry.csv"));
    // Simulates a crash after step 11.
    let mut torn = fs::read_to_string(&expected).unwrap();
    assert!(torn.contains("\n10,blocks."));
    torn.truncate(torn.len() - 20);
    fs::write(&csv, torn).unwrap();
    succeeds(nvfp4("train", &["--resume", crashed.to_str().unwrap()]));
    let [expected, found] = [&expected, &csv].map(|path| fs::read_to_string(path).unwrap());
    assert!(found == expected, "{found}");
}

/// Text paths are stored as absolute paths.
#[test]
fn a_run_is_resumed_from_another_folder() {
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
    let csv = out.join("nvidia/metrics.csv");
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
    let name = checkpoint(&out.join("nvidia"))
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

/// A finished run goes on to more steps, on the cosine of its new length.
#[test]
fn a_finished_run_is_extended() {
    let out = folder("extended");
    let options = "--no-compare --warmup 0 --log-every 2 --eval-every 2";
    succeeds(train(&out, &format!("{options} --steps 3")));
    let resume = |steps| {
        nvfp4(
            "train",
            &["--resume", out.to_str().unwrap(), "--steps", steps],
        )
    };
    fails(resume("2"), &["steps is 2, but the run has 3", "--stop-at"]);
    let said = resume("5");
    let notes = String::from_utf8_lossy(&said.stderr).into_owned();
    succeeds(said);
    assert!(
        notes.contains("extended from 3 to 5 steps: the learning rate"),
        "{notes}"
    );
    let rows = metrics(&out.join("nvidia/metrics.csv"));
    let steps: Vec<&str> = rows.iter().map(|row| &*row[0]).collect();
    assert_eq!(steps, ["0", "2", "3", "4", "5"]);
    let lr: Vec<f64> = rows.iter().map(|row| row[4].parse().unwrap()).collect();
    // Step N has the rate after N - 1 steps, here of three and then of five.
    let cosine = |done: f64| 0.1 + 0.45 * (1.0 + (std::f64::consts::PI * done).cos());
    assert!((lr[2] / 1e-2 - cosine(2.0 / 3.0)).abs() < 1e-6, "{lr:?}");
    assert!((lr[3] / 1e-2 - cosine(3.0 / 5.0)).abs() < 1e-6, "{lr:?}");
    assert_eq!(json(&out.join("summary.json"))["steps"], 5);
    // Without --steps, the extended run is finished.
    succeeds(nvfp4("train", &["--resume", out.to_str().unwrap()]));
    // Passes over the text, in place of steps.
    let bytes = json(&out.join("summary.json"))["train_bytes"].as_u64();
    let per_epoch = bytes.unwrap() as f64 / (4.0 * 32.0);
    let epochs = 7.0 / per_epoch;
    let epochs = format!("{epochs:.9}");
    let resume = ["--resume", out.to_str().unwrap(), "--epochs", &epochs];
    succeeds(nvfp4("train", &resume));
    let summary = json(&out.join("summary.json"));
    let steps = (epochs.parse::<f64>().unwrap() * per_epoch - 1e-9).ceil();
    assert_eq!(summary["steps"].as_f64(), Some(steps));
    assert_eq!(
        json(&out.join("config.json"))["steps"].as_f64(),
        Some(steps)
    );
    let healed = folder("extended-healed");
    succeeds(train(
        &healed,
        &format!("{options} --steps 2 --healing 0.5"),
    ));
    fails(
        nvfp4(
            "train",
            &["--resume", healed.to_str().unwrap(), "--steps", "4"],
        ),
        &["steps is 4", "phases nvidia,0.5=nvidia:bf16"],
    );
}

#[test]
fn a_damaged_checkpoint_is_an_error() {
    let out = folder("damaged");
    succeeds(train(&out, &format!("{RUN} --stop-at 4 --no-compare")));
    let path = out.to_str().unwrap();
    let model = checkpoint(&out.join("nvidia")).join("model.bpk");
    let whole = fs::read(&model).unwrap();
    let mut damaged = whole.clone();
    let middle = damaged.len() / 2;
    damaged[middle] ^= 0x10;
    fs::write(&model, damaged).unwrap();
    fails(
        nvfp4("train", &["--resume", path]),
        &["checkpoint-00000004", "model.bpk is damaged"],
    );
    let generate = [path, "--prompt", "let", "--device", "flex"];
    fails(nvfp4("generate", &generate), &["model.bpk is damaged"]);
    fs::write(&model, whole).unwrap();
    succeeds(nvfp4("generate --tokens 2", &generate));
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
        &[
            "data has changed",
            "3650 bytes in 19 files",
            "resumes only with the same text",
        ],
    );
}
