//! Finds text files in folders.

use std::cell::Cell;
use std::collections::HashSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use walkdir::{DirEntry, WalkDir};

use crate::random::hash;

/// A text file that was found.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Found {
    /// Path relative to the given folder, with `/` as separator. The split depends on it.
    pub key: String,
    pub path: PathBuf,
}

/// Lists the files of `paths` in the order of [`Walk::into_files`].
pub(super) fn given_files(paths: &[PathBuf]) -> Result<Vec<Found>> {
    let mut walk = Walk::default();
    for path in paths {
        ensure!(path.exists(), "data {} does not exist", path.display());
        if path.is_dir() {
            walk.folder(path, "", &|_| true)?;
        } else {
            let name = path.file_name().unwrap_or(path.as_os_str());
            walk.file(path.clone(), name.to_string_lossy().into_owned())?;
        }
    }
    Ok(walk.into_files())
}

/// Lists the files of `paths`, which are those of `option`: a file as it is given, and the files in
/// a folder that `wanted` accepts, sorted by path. Also returns the number of other files in the
/// folders.
///
/// # Errors
/// Returns an error if a path does not exist or cannot be read, or if a folder has no such file.
pub(crate) fn wanted_files(
    option: &str,
    paths: &[PathBuf],
    wanted: impl Fn(&Path) -> bool,
) -> Result<(Vec<PathBuf>, usize)> {
    let mut walk = Walk::default();
    let others = Cell::new(0);
    for path in paths {
        let name = path.display();
        ensure!(path.exists(), "{option} {name} does not exist");
        if !path.is_dir() {
            walk.file(path.clone(), String::new())?;
            continue;
        }
        let found = Cell::new(0);
        walk.folder(path, "", &|path| {
            let count = if wanted(path) { &found } else { &others };
            count.set(count.get() + 1);
            wanted(path)
        })?;
        ensure!(
            found.get() > 0,
            "{option} {name} has no text: a folder has files that end in .txt, .md or .jsonl, or .json \
             files with a list of rows"
        );
    }
    let files = walk.files.into_iter().map(|file| file.path).collect();
    Ok((files, others.get()))
}

#[derive(Default)]
pub(super) struct Walk {
    files: Vec<Found>,
    /// Canonical paths of the files, because links can lead to a file twice.
    seen: HashSet<PathBuf>,
}

impl Walk {
    /// Adds the `wanted` files in `root`, depth first, in name order. Skips names that start with a
    /// dot, and links that are circular or broken. `key` precedes the keys of the files, if it is
    /// not empty.
    pub(super) fn folder(
        &mut self,
        root: &Path,
        key: &str,
        wanted: &dyn Fn(&Path) -> bool,
    ) -> Result<()> {
        let is_hidden =
            |entry: &DirEntry| entry.depth() > 0 && entry.file_name().as_encoded_bytes()[0] == b'.';
        let walk = WalkDir::new(root).follow_links(true).sort_by_file_name();
        for entry in walk.into_iter().filter_entry(|entry| !is_hidden(entry)) {
            let entry = match entry {
                Ok(entry) => entry,
                Err(error) if leads_nowhere(&error) => continue,
                Err(error) => {
                    let path = error.path().unwrap_or(root).display().to_string();
                    return Err(error).with_context(|| format!("cannot read {path}"));
                }
            };
            if entry.file_type().is_file() && wanted(entry.path()) {
                let below = entry.path().strip_prefix(root)?;
                let parts = below.iter().map(|part| part.to_string_lossy());
                let parts: Vec<_> = (!key.is_empty())
                    .then(|| key.into())
                    .into_iter()
                    .chain(parts)
                    .collect();
                self.file(entry.path().into(), parts.join("/"))?;
            }
        }
        Ok(())
    }

    fn file(&mut self, path: PathBuf, key: String) -> Result<()> {
        let real = path
            .canonicalize()
            .with_context(|| format!("cannot read {}", path.display()))?;
        if self.seen.insert(real) {
            self.files.push(Found { key, path });
        }
        Ok(())
    }

    /// Returns the files ordered by the hash of their keys, so that a limit takes a sample.
    pub(super) fn into_files(self) -> Vec<Found> {
        let mut files = self.files;
        files.sort_by_cached_key(|file| (hash(file.key.as_bytes()), file.clone()));
        files
    }
}

/// Returns true if a link is circular or broken.
fn leads_nowhere(error: &walkdir::Error) -> bool {
    let kind = error.io_error().map(std::io::Error::kind);
    error.loop_ancestor().is_some() || kind == Some(std::io::ErrorKind::NotFound)
}
