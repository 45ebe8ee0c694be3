//! History of the repository: existing commits, and changes since a commit.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

/// All ancestors of the checked-out commit.
pub struct History {
    root: PathBuf,
    /// Full hashes, sorted.
    commits: Vec<String>,
    /// False in a shallow clone, which lacks the older commits.
    pub complete: bool,
}

impl History {
    /// Reads the history of the repository at `root`; `None` if it is not a git repository, or git
    /// is not installed.
    pub fn read(root: &Path) -> Result<Option<Self>> {
        let mut command = git(root);
        command.args(["rev-parse", "--is-shallow-repository"]);
        let shallow = match command.stderr(Stdio::null()).output() {
            Ok(output) if output.status.success() => output.stdout,
            _ => return Ok(None),
        };
        let mut commits: Vec<String> = text(git(root).args(["rev-list", "HEAD"]))?
            .lines()
            .map(str::to_owned)
            .collect();
        commits.sort_unstable();
        Ok(Some(Self {
            root: root.to_owned(),
            commits,
            complete: shallow.trim_ascii() == b"false",
        }))
    }

    /// Returns true if exactly one commit begins with `hash`.
    pub fn has(&self, hash: &str) -> bool {
        let hash = hash.to_ascii_lowercase();
        let first = self.commits.partition_point(|commit| *commit < hash);
        let found = self.commits[first..]
            .iter()
            .take_while(|commit| commit.starts_with(&hash));
        found.count() == 1
    }

    /// Filters pairs of a commit and a path: returns those whose path differs between the commit
    /// and the checked-out files, by git's hashes of files and folders.
    ///
    /// # Errors
    ///
    /// Returns an error if git fails.
    pub fn changed(&self, pairs: BTreeSet<Pair>) -> Result<BTreeSet<Pair>> {
        let then = pairs
            .iter()
            .map(|(commit, path)| format!("{commit}:{path}"));
        let now = pairs.iter().map(|(_, path)| format!("HEAD:{path}"));
        let hashes = self.hashes(&then.chain(now).collect::<Vec<_>>())?;
        let (then, now) = hashes.split_at(pairs.len());
        let uncommitted = text(git(&self.root).args(["diff", "--name-only", "HEAD"]))?;
        let is_edited = |path: &str| {
            let mut files = uncommitted.lines().map(Path::new);
            files.any(|file| file.starts_with(path))
        };
        let differs = then.iter().zip(now).map(|(then, now)| then != now);
        let pairs = pairs.into_iter().zip(differs);
        let changed = pairs.filter(|((_, path), differs)| *differs || is_edited(path));
        Ok(changed.map(|(pair, _)| pair).collect())
    }

    /// Returns the hashes of objects, `None` for those that do not exist.
    fn hashes(&self, names: &[String]) -> Result<Vec<Option<String>>> {
        let mut child = git(&self.root)
            .args(["cat-file", "--batch-check=%(objectname)"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("git")?;
        let mut input = child.stdin.take().context("git's input is not piped")?;
        let output = std::thread::scope(|scope| {
            let written =
                scope.spawn(move || input.write_all((names.join("\n") + "\n").as_bytes()));
            let output = child.wait_with_output();
            written.join().expect("writing does not panic")?;
            output
        })?;
        ensure!(output.status.success(), "git cat-file: {}", output.status);
        let lines = str::from_utf8(&output.stdout)?.lines();
        let hashes = lines.map(|line| (!line.ends_with(" missing")).then(|| line.to_owned()));
        let hashes: Vec<_> = hashes.collect();
        ensure!(hashes.len() == names.len(), "git cat-file left out objects");
        Ok(hashes)
    }
}

/// A commit and a path of the repository.
pub type Pair = (String, String);

fn git(root: &Path) -> Command {
    let mut command = Command::new("git");
    command.current_dir(root);
    command
}

fn text(command: &mut Command) -> Result<String> {
    let output = command.output().context("git")?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "git: {}", error.trim());
    Ok(String::from_utf8(output.stdout)?)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A repository in a temporary folder, removed on drop.
    struct Repository(PathBuf);

    impl Repository {
        fn new(name: &str) -> Self {
            let id = std::process::id();
            let root = std::env::temp_dir().join(format!("xtask-history-{name}-{id}"));
            fs::create_dir_all(&root).unwrap();
            Self(root)
        }

        fn git(&self, arguments: &[&str]) -> String {
            let identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"];
            text(git(&self.0).args(identity).args(arguments)).unwrap()
        }

        /// Writes a file, commits it and returns the commit's hash.
        fn commit(&self, file: &str, content: &str) -> String {
            let path = self.0.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
            self.git(&["add", "."]);
            self.git(&["commit", "--quiet", "--message", "a commit"]);
            self.git(&["rev-parse", "HEAD"]).trim().to_owned()
        }
    }

    impl Drop for Repository {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn folders_that_changed() {
        let repository = Repository::new("changed");
        repository.git(&["init", "--quiet"]);
        let first = repository.commit("kernels/a.rs", "a");
        repository.commit("book/page.md", "b");
        let history = History::read(&repository.0).unwrap().unwrap();
        let changed = |path: &str| {
            let pair = (first.clone(), path.to_owned());
            let changed = history.changed(BTreeSet::from([pair.clone()])).unwrap();
            changed.contains(&pair)
        };
        assert!(history.complete);
        assert!(!changed("kernels") && !changed("kernels/a.rs"));
        assert!(changed("book"), "it came later");
        fs::write(repository.0.join("kernels/a.rs"), "changed").unwrap();
        assert!(changed("kernels"), "it differs without a commit, too");
        repository.commit("kernels/a.rs", "b");
        assert!(changed("kernels"));
        repository.commit("kernels/a.rs", "a");
        assert!(!changed("kernels"), "it is as before");
    }

    #[test]
    fn commits_of_the_history() {
        let repository = Repository::new("commits");
        repository.git(&["init", "--quiet"]);
        let first = repository.commit("a", "a");
        repository.git(&["checkout", "--quiet", "-b", "other"]);
        let aside = repository.commit("b", "b");
        repository.git(&["checkout", "--quiet", "-"]);
        let last = repository.commit("c", "c");
        let history = History::read(&repository.0).unwrap().unwrap();
        assert!(history.has(&first) && history.has(&last[..8]));
        assert!(history.has(&first[..8].to_ascii_uppercase()));
        for absent in [&aside[..], "0000000", ""] {
            assert!(!history.has(absent), "{absent}");
        }
    }

    #[test]
    fn a_shallow_clone_is_not_complete() {
        let origin = Repository::new("origin");
        origin.git(&["init", "--quiet"]);
        let first = origin.commit("a", "a");
        let last = origin.commit("b", "b");
        let clone = Repository::new("clone");
        let url = format!("file://{}", origin.0.display());
        clone.git(&["clone", "--quiet", "--depth", "1", &url, "."]);
        let history = History::read(&clone.0).unwrap().unwrap();
        assert!(!history.complete);
        assert!(history.has(&last) && !history.has(&first));
    }

    #[test]
    fn a_folder_without_a_repository() {
        let folder = Repository::new("none");
        assert!(History::read(&folder.0).unwrap().is_none());
    }
}
