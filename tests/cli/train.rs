//! Tests of uninterrupted training runs.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use crate::support::*;

#[test]
fn a_comparison_writes_its_files() {
    let out = finished();
    for recipe in ["nvidia", "f32"] {
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
        (Some("nvidia"), Some("flex"))
    );
    assert_eq!(summary["baseline_recipe"].as_str(), Some("f32"));
    assert_eq!(number("tokens"), 12.0 * 4.0 * 32.0);
    assert!(number("seconds") > 0.0 && number("unigram_entropy") > 0.0);
    let gap = 100.0 * (number("final_valid_loss") / number("baseline_valid_loss") - 1.0);
    assert!((number("gap_percent") - gap).abs() < 1e-6);
    assert_ne!(number("final_valid_loss"), number("baseline_valid_loss"));
    let last = metrics(&out.join("nvidia/metrics.csv"))[4][3]
        .parse::<f64>()
        .unwrap();
    assert!((number("final_valid_loss") - last).abs() < 1e-6);

    assert_eq!(json(&out.join("config.json"))["width"].as_u64(), Some(32));
    let svg = fs::read_to_string(out.join("loss.svg")).unwrap();
    for part in [
        "<svg",
        "nvidia, validation",
        "f32, validation",
        "unigram entropy",
    ] {
        assert!(svg.contains(part), "loss.svg lacks {part}");
    }
}

/// A run that fails to start leaves no files, so the corrected command can use the same folder.
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

/// Without a terminal, progress is logged as one line per row.
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
    assert_eq!(start[..3], ["nvidia", "step 0/4", "epoch 0.00"]);
    number(start[3], "valid ", "");
    assert_eq!(start[4..], ["ETA ?"]);
    assert_eq!(middle[..2], ["nvidia", "step 2/4"]);
    number(middle[3], "loss ", "");
    number(middle[4], "", " tokens/s");
    assert!(middle[5].starts_with("ETA ") && middle[5].contains("second"));
    assert_eq!(end[..2], ["nvidia", "step 4/4"]);
    number(end[4], "valid ", "");
    assert_eq!(end[6..], ["ETA 0 seconds"]);
}

/// Trains the default model on real text: the sources of this crate.
#[test]
fn tiny_learns_more_than_the_frequencies_of_bytes() {
    let out = folder("learns");
    // The text is this project's and changes: 4 KB of validation are representative, 1 KB are not.
    let run = "train --device flex --preset tiny --context 64 --batch 4 --steps 60 --eval-every 60 \
               --eval-batches 16 --no-compare";
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

/// Prints the phases, their changes, and the phase in which a run resumes.
#[test]
fn a_schedule_is_printed() {
    let out = folder("schedule");
    let run = "--steps 4 --warmup 1 --no-compare --eval-every 4 --log-every 1 --stop-at 3 \
               --schedule nvidia,0.5=mxfp8:fwd_bf16";
    let said = |output: Output| {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        succeeds(output);
        said
    };
    let begun = said(train(&out, run));
    let resumed = said(nvfp4("train", &["--resume", out.to_str().unwrap()]));
    for (said, line) in [
        (&begun, "phase 1 of 2: nvidia, steps 1 to 2"),
        (&begun, "phase 2 of 2: mxfp8:fwd_bf16, steps 3 to 4"),
        (&begun, "phase 2 begins with step 3: mxfp8:fwd_bf16"),
        (
            &resumed,
            "mxfp8:fwd_bf16, steps 3 to 4; the run resumes here",
        ),
    ] {
        assert!(said.contains(line), "{line}: {said}");
    }
    let csv = fs::read_to_string(out.join("nvidia/metrics.csv")).unwrap();
    let phases: Vec<&str> = csv
        .lines()
        .filter_map(|line| line.rsplit(',').next())
        .collect();
    assert_eq!(phases, ["phase", "1", "1", "1", "2", "2"]);
}

/// Compares several recipes, one of them healed, with a mixture of experts and telemetry.
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
    // Two sampled steps of eight layers. In the second the forward has healed, so only the backward
    // is sampled: MS-EDEN's operands.
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

/// The text is the same on every machine that has built the command: `data::crates` of `nvfp4-lm`
/// tests its bytes.
#[test]
fn the_default_text_is_the_crates_of_the_build() {
    let out = folder("default-text");
    let out = out.to_str().unwrap();
    let options = "--steps 1 --no-compare --data-bytes 100000";
    let train = |home: Option<&Path>| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
        command.args(format!("train {SMALL} {options}").split_whitespace());
        command.args(["--out", out]);
        command.envs(home.map(|home| ("CARGO_HOME", home)));
        command.output().unwrap()
    };
    let empty = folder("cargo-home");
    let missing = ["ahash-", " more", "cargo fetch --locked", "--data PATH"];
    fails(train(Some(empty.as_path())), &missing);
    // A folder that cargo has not unpacked to the end is missing.
    let error = fails(train(Some(empty.as_path())), &[]);
    let start = error.find("ahash-").unwrap();
    let name = error[start..].split(',').next().unwrap();
    fs::create_dir_all(empty.join("registry/src/index").join(name)).unwrap();
    fails(train(Some(empty.as_path())), &[name]);

    succeeds(train(None));
    let state = json(&checkpoint(&Path::new(out).join("nvidia")).join("state.json"));
    let bytes = |part: &str| state["corpus"][part].as_u64().unwrap();
    assert!((100_000..500_000).contains(&(bytes("train_bytes") + bytes("valid_bytes"))));
}
