//! Tests of what all commands share: groups, completions, man pages, and standard error.

use std::fs;
use std::process::Command;

use crate::support::*;

#[test]
fn commands_of_developers_are_in_one_group() {
    let help = succeeds(nvfp4("dev --help", &[]));
    let all = succeeds(nvfp4("--help", &[]));
    for name in ["cost", "decode-cost", "finetune-cost", "oracle", "study"] {
        let has = |help: &str| {
            let mut listed = help.lines().filter_map(|line| line.strip_prefix("  "));
            listed.any(|line| line.split(' ').next() == Some(name))
        };
        assert!(has(&help) && !has(&all), "{name}: {all}{help}");
        fails(nvfp4(name, &[]), &["unrecognized subcommand", name]);
    }
}

#[test]
fn shells_complete_commands_and_values() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = succeeds(nvfp4("completions", &[shell]));
        for part in ["nvfp4", "decode-cost", "calibration-sequences"] {
            assert!(script.contains(part), "{shell}: no {part}");
        }
        // The other two complete no values.
        if ["bash", "fish", "zsh"].contains(&shell) {
            assert!(script.contains("compressed-tensors"), "{shell}");
        }
    }
    fails(nvfp4("completions tcsh", &[]), &["tcsh", "bash", "zsh"]);
}

#[test]
fn every_command_has_a_man_page() {
    let out = folder("man").join("man1");
    let said = succeeds(nvfp4("man", &["--out", out.to_str().unwrap()]));
    assert!(said.contains("man1"), "{said}");
    for (page, part) in [
        ("nvfp4.1", "quantize"),
        ("nvfp4-generate.1", "repetition"),
        ("nvfp4-dev-cost.1", "round"),
        ("nvfp4-dev-oracle-cvt-rs.1", "DEVICE"),
    ] {
        let text = fs::read_to_string(out.join(page)).expect(page);
        assert!(text.contains(part), "{page}: {text}");
    }
    // The page of a command for internal use.
    assert!(!out.join("nvfp4-dev-oracle-check.1").exists());
    let file = out.join("nvfp4.1");
    let file = file.to_str().unwrap();
    fails(nvfp4("man", &["--out", file]), &["out", "cannot be made"]);
}

/// Notes and progress are suppressed; results, the log and errors are not. The log has no colors,
/// because standard error is no terminal.
#[test]
fn quiet_commands_print_results_and_errors() {
    let out = folder("quiet");
    let run = |name: &str, quiet: &[&str]| {
        let out = out.join(name);
        let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
        command
            .args(quiet)
            .args(format!("train {SMALL} --steps 2 --no-compare").split_whitespace())
            .args(["--data", text(), "--out", out.to_str().unwrap()])
            .env("RUST_LOG", "nvfp4=debug");
        let output = command.output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        (succeeds(output), error)
    };
    let notes = ["reading text", "model   tiny", "step 2/2"];
    let (said, error) = run("loud", &[]);
    for part in notes {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert!(said.contains("validation loss"), "{said}");
    let (said, error) = run("silent", &["--quiet"]);
    for part in notes {
        assert!(!error.contains(part), "{part}: {error}");
    }
    assert!(said.contains("validation loss"), "{said}");
    assert!(error.contains("wrote"), "{error}");
    assert!(!error.contains('\u{1b}'), "{error}");
    let bad = ["no-such-folder", "--prompt", "a", "-q"];
    fails(nvfp4("generate", &bad), &["error: ", "no-such-folder"]);
}
