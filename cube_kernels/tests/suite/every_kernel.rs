//! No kernel is forgotten by the tests that compile CUDA source: each that the crate launches is asked for
//! in one of them.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// All files with Rust source in `folder` and below.
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

/// Names of the functions behind `#[cube(launch…)]`.
fn kernels(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    for (start, _) in text.match_indices("#[cube(launch") {
        let (_, rest) = text[start..].split_once("fn ").unwrap();
        let name = rest.split(['<', '(']).next().unwrap();
        names.push(name.trim().to_owned());
    }
    names
}

#[test]
fn every_kernel_is_compiled_by_a_source_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: PathBuf| fs::read_to_string(path).unwrap();
    let launched: BTreeSet<String> = sources(&root.join("src"))
        .into_iter()
        .flat_map(|path| kernels(&read(path)))
        .collect();
    assert!(launched.len() > 40, "only {launched:?}");
    let compiled: String = ["cuda_source", "layouts_source", "gemm_source", "mma_source"]
        .map(|test| read(root.join(format!("tests/suite/{test}.rs"))))
        .concat();
    let is_word = |name: &str| {
        compiled.match_indices(name).any(|(at, _)| {
            let is_part = |c: char| c.is_alphanumeric() || c == '_';
            !compiled[..at].ends_with(is_part) && !compiled[at + name.len()..].starts_with(is_part)
        })
    };
    let forgotten: Vec<&String> = launched.iter().filter(|name| !is_word(name)).collect();
    assert!(forgotten.is_empty(), "not compiled: {forgotten:?}");
}
