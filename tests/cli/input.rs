//! Tests of invalid arguments, files and sizes.

use std::fs;

use crate::support::*;

#[test]
fn bad_arguments_are_named() {
    let cases: [(&str, &[&str]); 18] = [
        ("--decorate", &["decorate", "flex", "cuda:N"]),
        ("--decorate=maybe", &["--decorate", "strict", "lenient"]),
        ("--device gpu", &["device", "gpu", "flex, cpu, or cuda:N"]),
        ("--device cuda:99", &["cuda:99"]),
        ("--recipe fp8", &["recipe", "fp8", "nvidia"]),
        ("--preset huge", &["--preset", "huge", "tiny"]),
        ("--width 100", &["width", "100", "multiple of 16"]),
        ("--hidden 40", &["hidden", "40", "multiple of 16"]),
        ("--heads 5", &["heads", "5"]),
        ("--steps 0", &["steps", "at least 1"]),
        ("--lr -1", &["lr", "-1"]),
        ("--recipe f32 --compare", &["compare", "f32"]),
        (
            "--recipe f32 --no-compare --rht false",
            &["rht is given", "quantizes"],
        ),
        ("--top-k 3", &["top-k is 3", "no experts"]),
        ("--epochs 0", &["epochs is 0", "positive"]),
        ("--epochs 1 --steps 2", &["--epochs", "--steps"]),
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
    let generate = [path, "--prompt", "let", "--device", "flex"];
    fails(
        nvfp4("generate --temperature -1", &generate),
        &["temperature", "-1"],
    );
    // The default takes the most probable token, whatever these options say.
    for option in ["--top-k", "--top-p"] {
        fails(
            nvfp4(&format!("generate {option} 1"), &generate),
            &[&option[2..], "temperature is 0"],
        );
    }
    fails(
        nvfp4("generate --device gpu", &generate[..3]),
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
        nvfp4("train --lr 20", &resume),
        &["--resume", "as it was configured", "--steps"],
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

    // A file of options, overridden by flags.
    let out = folder("from-config");
    let values = format!(
        r#"{{"device": "cuda:0", "decorate": "strict", "experts": 4, "width": 16,
            "layers": 1, "heads": 1, "hidden": 16, "context": 16, "batch": 2, "steps": 2, "eval_batches": 1,
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

/// A step that cannot fit is one error before training starts, and the error suggests what to
/// change.
#[cfg(feature = "cpu")]
#[test]
fn a_batch_that_cannot_fit_is_an_error() {
    let out = folder("no-memory");
    fs::remove_dir(&out).unwrap();
    let run = SMALL
        .replace("--device flex", "--device cpu")
        .replace("--batch 4", "--batch 1000000000");
    let paths = ["--data", text(), "--out", out.to_str().unwrap()];
    let error = fails(
        nvfp4(&format!("train {run} --no-compare"), &paths),
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
