//! The default text: Rust sources of crates that a build of this project downloads.
//!
//! The list of crates has their versions of `Cargo.lock`, and crates.io never changes a published
//! version. The text therefore has the same bytes on every machine.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::walk::{Found, Walk};

/// Name, version and checksum of each crate, sorted.
///
/// The default features of `nvfp4-cli` need these crates on Linux, macOS and Windows, `Cargo.lock`
/// has one version of each, and each has between 25 kB and 1 MB of text.
const CRATES: &str = include_str!("crates.txt");
/// Limit on the size of a file; larger files are generated tables.
const FILE_LIMIT: u64 = 256 << 10;
/// Number of missing crates that an error names.
const NAMED: usize = 3;
/// File that cargo writes into the folder of a crate after it has unpacked the crate.
const UNPACKED: &str = ".cargo-ok";

/// Lists the `.rs` files of the crates in the order of [`Walk::into_files`]. A key begins with name
/// and version of the crate.
///
/// # Errors
/// Returns an error if cargo's folder is unknown, or if a crate is missing in its registry.
pub(super) fn files() -> Result<Vec<Found>> {
    let home = std::env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::home_dir().map(|home| home.join(".cargo")));
    let advice = "run `cargo fetch --locked` in the sources of this command, or give files or \
                  folders of text with --data PATH";
    let home = home.with_context(|| {
        format!(
            "the default text is in cargo's folder, but neither CARGO_HOME nor a home folder \
             is set: {advice}"
        )
    })?;
    let sources = home.join("registry").join("src");
    let registries = folders(&sources);
    let (mut walk, mut missing) = (Walk::default(), Vec::new());
    for name in names() {
        let mut folders = registries.iter().map(|registry| registry.join(&name));
        match folders.find(|folder| folder.join(UNPACKED).is_file()) {
            Some(folder) => walk.folder(&folder, &name, &is_text)?,
            None => missing.push(name),
        }
    }
    let named = missing[..missing.len().min(NAMED)].join(", ");
    let more = match missing.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    ensure!(
        missing.is_empty(),
        "the default text needs crates that are not in {}: {named}{more}; {advice}",
        sources.display()
    );
    Ok(walk.into_files())
}

/// Returns the names of the crates' folders.
fn names() -> impl Iterator<Item = String> {
    let fields = CRATES.lines().map(|line| line.split(' '));
    fields.map(|line| line.take(2).collect::<Vec<_>>().join("-"))
}

/// Returns true for a Rust source that is not too large.
fn is_text(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "rs")
        && fs::metadata(path).is_ok_and(|file| file.len() <= FILE_LIMIT)
}

/// Returns the subfolders of `path` in name order; none if it does not exist.
fn folders(path: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(path) else {
        return Vec::new();
    };
    let mut folders: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.is_dir())
        .collect();
    folders.sort();
    folders
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Corpus, Fingerprint};

    /// Environment variable that makes a test write the list, as it does for the lock files of
    /// machine code.
    const WRITE: &str = "NVFP4_LOCK";
    const WRITE_COMMAND: &str = "NVFP4_LOCK=1 cargo test -p nvfp4-lm --lib -- data::crates";

    #[test]
    fn crates_have_the_versions_of_the_lock_file() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        let lock = fs::read_to_string(folder.join("../Cargo.lock")).unwrap();
        let packages: Vec<&str> = lock.split("[[package]]\n").collect();
        let mut renewed = Vec::new();
        for name in CRATES.lines().filter_map(|line| line.split(' ').next()) {
            let first = format!("name = \"{name}\"\n");
            let found = packages
                .iter()
                .filter(|package| package.starts_with(&first));
            let found: Vec<&&str> = found.collect();
            let [package] = found[..] else {
                let versions = found.len();
                panic!(
                    "Cargo.lock has {versions} versions of {name}, but the default text needs \
                     one: delete the line of {name} in lm/src/data/crates.txt"
                );
            };
            let value = |key: &str| {
                let start = format!("{key} = \"");
                let line = package.lines().find_map(|line| line.strip_prefix(&start));
                line.unwrap().trim_end_matches('"')
            };
            renewed.push(format!("{name} {} {}", value("version"), value("checksum")));
        }
        assert!(renewed.is_sorted(), "lm/src/data/crates.txt is not sorted");
        if std::env::var_os(WRITE).is_some() {
            fs::write(
                folder.join("src/data/crates.txt"),
                renewed.join("\n") + "\n",
            )
            .unwrap();
            return;
        }
        let lines: Vec<&str> = CRATES.lines().collect();
        assert!(
            renewed == lines,
            "lm/src/data/crates.txt has other versions than Cargo.lock: `{WRITE_COMMAND}` renews \
             it, and then the fingerprint of the default text in lm/src/data/crates.rs changes"
        );
    }

    /// The text of every machine. It changes only with the list of crates.
    #[test]
    fn the_default_text_has_the_same_bytes_everywhere() {
        let corpus = Corpus::load(&[], 0).unwrap();
        let expected = Fingerprint {
            train_files: 2983,
            train_bytes: 28_041_880,
            valid_files: 325,
            valid_bytes: 2_870_681,
            checksum: "803d9b70661a72c9".into(),
        };
        assert_eq!(*corpus.fingerprint(), expected);
        assert_eq!(corpus.skipped(), 0);
        assert_eq!(names().count(), 148);
        // Every preset reads the whole text.
        let smallest = crate::config::RunConfig::preset(crate::config::Preset::Tiny, "flex");
        let limited = Corpus::load(&[], smallest.data_bytes).unwrap();
        assert_eq!(*limited.fingerprint(), expected);
    }
}
