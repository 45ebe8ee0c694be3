//! Runs the command, and reads its output.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use serde_json::Value;

/// Options of a model with two thousand parameters and 32-byte sequences.
pub(crate) const SMALL: &str = "--device flex --width 32 --layers 2 --heads 2 --hidden 48 \
                                --context 32 --batch 4 --lr 1e-2 --eval-batches 2";

/// Creates an empty folder for one test.
pub(crate) fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join("cli")
        .join(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

/// Creates thirty files with words that follow a pattern.
pub(crate) fn text() -> &'static str {
    static TEXT: OnceLock<PathBuf> = OnceLock::new();
    let path = TEXT.get_or_init(|| {
        let path = folder("text");
        write_text(&path, 30);
        path
    });
    path.to_str().unwrap()
}

pub(crate) fn write_text(path: &Path, files: usize) {
    for file in 0..files {
        let words: Vec<String> = (0..60)
            .map(|i| ["let", "x", "=", "fn", "y", ";"][(file + i * i) % 6].repeat(1 + i % 2))
            .collect();
        fs::write(path.join(format!("file-{file}.txt")), words.join(" ")).unwrap();
    }
}

pub(crate) fn nvfp4(arguments: &str, more: &[&str]) -> Output {
    command(arguments, more).output().unwrap()
}

/// Runs the command with `input` as its standard input.
pub(crate) fn nvfp4_reads(input: &str, arguments: &str, more: &[&str]) -> Output {
    let mut command = command(arguments, more);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    // A command that ends early does not read all of it.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

pub(crate) fn command(arguments: &str, more: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvfp4"));
    command
        .args(arguments.split_whitespace())
        .args(more)
        .env("RUST_LOG", "warn");
    nvfp4_test_support::preload(&mut command);
    command
}

pub(crate) fn succeeds(output: Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the standard error of a failed command, which must contain everything in `names`.
pub(crate) fn fails(output: Output, names: &[&str]) -> String {
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

pub(crate) fn train(out: &Path, more: &str) -> Output {
    train_on("flex", out, more)
}

pub(crate) fn train_on(device: &str, out: &Path, more: &str) -> Output {
    let sizes = SMALL.replace("--device flex", &format!("--device {device}"));
    let out = out.to_str().unwrap();
    let more: Vec<&str> = more.split_whitespace().collect();
    nvfp4(
        &format!("train {sizes}"),
        &[&["--data", text(), "--out", out], &more[..]].concat(),
    )
}

/// Returns the device of resumed runs.
pub(crate) fn device() -> String {
    match std::env::var("NVFP4_TEST_DEVICE").as_deref() {
        Ok("cuda") => "cuda:0".into(),
        Ok(name) => name.into(),
        Err(_) => "flex".into(),
    }
}

/// Options of twelve steps; the run is the same with and without interruption.
pub(crate) const RUN: &str =
    "--steps 12 --warmup 2 --log-every 3 --eval-every 6 --checkpoint-every 4";

/// Returns a finished run that several tests use.
pub(crate) fn finished() -> &'static Path {
    static RUN_FOLDER: OnceLock<PathBuf> = OnceLock::new();
    RUN_FOLDER.get_or_init(|| {
        let out = folder("finished");
        succeeds(train(&out, RUN));
        out
    })
}

/// Returns a finished run of the same configuration on [`device`].
pub(crate) fn finished_on_device() -> &'static Path {
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

pub(crate) fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Returns the lines of a `metrics.csv` as fields, without the header, which is checked, and without
/// the column of the phase, which runs with several have.
pub(crate) fn metrics(path: &Path) -> Vec<Vec<String>> {
    let text = fs::read_to_string(path).unwrap();
    let mut lines = text.lines();
    let header = lines.next().unwrap();
    assert_eq!(
        header.strip_suffix(",phase").unwrap_or(header),
        "step,tokens,train_loss,valid_loss,lr,tokens_per_s"
    );
    lines
        .map(|line| line.split(',').take(6).map(String::from).collect())
        .collect()
}

/// Returns the only checkpoint in the folder of a recipe.
pub(crate) fn checkpoint(folder: &Path) -> PathBuf {
    let found: Vec<PathBuf> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_dir())
        .collect();
    assert_eq!(found.len(), 1, "{found:?}");
    found[0].clone()
}

/// Returns the path of the golden checkpoint `name` as an argument.
pub(crate) fn golden(name: &str) -> String {
    let path = nvfp4_test_support::golden(name);
    path.to_str().unwrap().to_owned()
}
