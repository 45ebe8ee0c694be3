//! Every function of the crate that launches kernels has a benchmark: the names of the functions in
//! `src`, and those that `benches` call.
//!
//! Kernels behind one function (of formats, roundings, tiles and GPUs) are not told apart here.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// Functions with a client that are not timed: file, name, and the reason.
const EXEMPT: [(&str, &str, &str); 24] = [
    ("attention/proof.rs", "forward_into", "for tests"),
    ("attention/proof.rs", "uses_mma", "launches nothing"),
    (
        "bring_up/random_bits.rs",
        "has_stochastic_instruction",
        "launches nothing",
    ),
    (
        "bring_up/random_bits.rs",
        "match_random_bits",
        "a diagnostic",
    ),
    (
        "bring_up/random_bits.rs",
        "answer_random_bits",
        "a diagnostic",
    ),
    ("foreign.rs", "is_cuda", "launches nothing"),
    ("foreign.rs", "run", "waits for the device"),
    ("foreign.rs", "submit", "queues work of others"),
    ("foreign/span.rs", "mark", "a CUDA event"),
    ("gemm/dispatch/mod.rs", "describe", "launches nothing"),
    (
        "gemm/dispatch/mod.rs",
        "describe_typical",
        "launches nothing",
    ),
    (
        "gemm/kernels/cublaslt/mod.rs",
        "supports",
        "launches nothing",
    ),
    ("gemm/kernels/cublaslt/queue.rs", "plan", "launches nothing"),
    (
        "gemm/kernels/cublaslt/queue.rs",
        "submit",
        "a part of cuBLASLt's GEMM",
    ),
    ("gemm/run.rs", "choose", "launches nothing"),
    ("gemm/run.rs", "packed_reads", "launches nothing"),
    ("gemm/run.rs", "may_read_tiles", "launches nothing"),
    (
        "loss/mod.rs",
        "cross_entropy_rows",
        "a part of `cross_entropy`",
    ),
    ("loss/mod.rs", "sum_losses", "a part of `cross_entropy`"),
    ("loss/mod.rs", "target_scale", "a part of `cross_entropy`"),
    ("quantize/describe.rs", "describe", "launches nothing"),
    (
        "quantize/prologue/source.rs",
        "run_prologue_of_groups",
        "timed by `activation_of_groups`",
    ),
    (
        "quantize/swizzle.rs",
        "swizzle",
        "a batch of one: `swizzle_batch` is timed",
    ),
    (
        "quantize/swizzle.rs",
        "unswizzle",
        "a batch of one: `unswizzle_batch` is timed",
    ),
];

/// Files whose functions are parts of others with the same name, or stand in for them.
const PARTS: [&str; 3] = [
    "attention/mma/mod.rs",
    "attention/sm90/mod.rs",
    "gemm/kernels/cublaslt/absent.rs",
];

/// Returns the Rust files in `folder`.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}

/// Returns the public functions of `text` whose first parameter is the client.
fn functions(text: &str) -> impl Iterator<Item = &str> {
    text.split("\npub fn ").skip(1).filter_map(|rest| {
        let (name, parameters) = rest.split_once('(')?;
        let name = name.split('<').next()?;
        let is_launch = parameters.trim_start().starts_with("client: &Client");
        is_launch.then_some(name)
    })
}

/// Returns the identifiers of `text`.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_')
}

/// Returns the text up to the brace that closes the first one.
fn braced(text: &str) -> &str {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return &text[..at];
        }
    }
    text
}

/// Returns the names that `benches` take from a module: `module::name`, or an import.
fn names_of<'a>(benches: &'a str, module: &str) -> BTreeSet<&'a str> {
    let path = format!("{module}::");
    let uses = benches.split(&path).skip(1);
    uses.flat_map(|rest| match rest.starts_with('{') {
        true => words(braced(rest)).collect(),
        false => words(rest).next().into_iter().collect::<Vec<_>>(),
    })
    .collect()
}

/// Returns the functions in `files` (path in `src`, text) that `benches` do not call.
fn missing(files: &[(String, String)], benches: &str) -> Vec<String> {
    let mut missing = Vec::new();
    for (file, text) in files {
        for name in functions(text) {
            let is_exempt = PARTS.contains(&&**file)
                || EXEMPT
                    .iter()
                    .any(|(of, exempt, _)| (*of, *exempt) == (file, name));
            // By any module of its path: some are public, others re-exported.
            let is_called = words(file).any(|module| names_of(benches, module).contains(name));
            if !is_exempt && !is_called {
                missing.push(format!("{file}: {name}"));
            }
        }
    }
    missing
}

fn read(folder: &str) -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let name = |path: &Path| {
        let inner = path.strip_prefix(&folder).unwrap();
        inner.to_str().unwrap().replace('\\', "/")
    };
    let read = |path: PathBuf| (name(&path), fs::read_to_string(&path).unwrap());
    sources(&folder).into_iter().map(read).collect()
}

#[test]
fn every_function_that_launches_kernels_has_a_benchmark() {
    let (files, benches) = (read("src"), read("benches"));
    let benches: String = benches.into_iter().map(|(_, text)| text).collect();
    let support = fs::read_to_string(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/suite/support/quantize.rs"),
    );
    let benches = benches + &support.unwrap();
    let missing = missing(&files, &benches);
    assert!(missing.is_empty(), "no benchmark: {}", missing.join(", "));
    for (file, name, _) in EXEMPT {
        let is_there = |(path, text): &(String, String)| {
            path == file && functions(text).any(|function| function == name)
        };
        assert!(
            files.iter().any(is_there),
            "exempt, but gone: {file}: {name}"
        );
    }
}

#[test]
fn a_function_without_a_benchmark_is_found() {
    let source = "\npub fn sum(client: &Client) {}\npub fn other<T>(\n    client: &Client,\n) {}\n\
                  pub fn host(x: usize) {}\n";
    let files = [("moe/sums.rs".to_owned(), source.to_owned())];
    let missing = |benches: &str| missing(&files, benches);
    assert_eq!(missing("").len(), 2);
    assert_eq!(
        missing("moe::sum(&client); sum::other()"),
        ["moe/sums.rs: other"]
    );
    assert!(missing("use x::{moe::{sum, sums::{other}}};").is_empty());
}
