//! Writes a folder atomically.

use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// A folder under a temporary name next to its target, renamed when it is complete. Removed if
/// dropped before that.
pub struct NewFolder {
    partial: PathBuf,
    target: PathBuf,
}

impl NewFolder {
    /// Creates the temporary folder for `target`, which must be absent or empty.
    ///
    /// # Errors
    /// Returns an error if `target` has files, or the folder cannot be made.
    pub fn create(target: &Path) -> Result<Self> {
        let is_free = match fs::read_dir(target) {
            Ok(mut entries) => entries.next().is_none(),
            Err(error) => error.kind() == ErrorKind::NotFound,
        };
        ensure!(
            is_free,
            "out {} must be empty, but it is not: give a folder that is empty or absent",
            target.display()
        );
        let name = target
            .file_name()
            .with_context(|| format!("{} has no name that a folder can get", target.display()))?;
        let mut partial = OsString::from(".");
        partial.push(name);
        partial.push(".partial-");
        remove_stale(target, &partial);
        partial.push(std::process::id().to_string());
        let partial = target.with_file_name(partial);
        fs::create_dir_all(&partial).with_context(|| partial.display().to_string())?;
        let target = target.to_owned();
        Ok(Self { partial, target })
    }

    /// Returns the path for writing files.
    pub fn path(&self) -> &Path {
        &self.partial
    }

    /// Renames the folder to its target.
    ///
    /// # Errors
    /// Returns an error if renaming fails; then there is no folder.
    pub fn finish(self) -> Result<()> {
        fs::rename(&self.partial, &self.target).with_context(|| self.target.display().to_string())
    }
}

/// Removes folders next to `target` whose names are `prefix` and the number of a process that has
/// ended: it was interrupted. A folder that cannot be removed only costs disk space.
fn remove_stale(target: &Path, prefix: &OsString) {
    let parent = match target.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    // Without /proc, nothing is known of processes.
    if !Path::new("/proc/self").exists() {
        return;
    }
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    for entry in entries {
        let name = entry.file_name();
        let number = name.to_string_lossy();
        let number = number.strip_prefix(&*prefix.to_string_lossy());
        let number = number.and_then(|number| number.parse::<u32>().ok());
        if number.is_some_and(|number| !Path::new("/proc").join(number.to_string()).exists()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Copies the contents of a file to a new one with default permissions, because restrictive
/// permissions of the source should not apply to a model.
///
/// # Errors
/// Returns an error that names the source if copying fails.
pub(crate) fn copy_file(from: &Path, to: &Path) -> Result<()> {
    let copy = || -> std::io::Result<u64> {
        std::io::copy(&mut fs::File::open(from)?, &mut fs::File::create(to)?)
    };
    copy().with_context(|| from.display().to_string())?;
    Ok(())
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        // After `finish` the path no longer exists.
        let _ = fs::remove_dir_all(&self.partial);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvfp4_test_support::Scratch;

    #[test]
    fn folders_of_interrupted_processes_are_removed() {
        let scratch = Scratch::new("new-folder");
        let target = scratch.join("model");
        // No process has the highest number.
        let stale = scratch.join(format!(".model.partial-{}", u32::MAX));
        let own = scratch.join(format!(".model.partial-{}", std::process::id()));
        let other = scratch.join(".model.partial-notes");
        for folder in [&stale, &own, &other] {
            fs::create_dir_all(folder).unwrap();
        }
        let new = NewFolder::create(&target).unwrap();
        assert!(other.exists() && own.exists() && !stale.exists());
        new.finish().unwrap();
        assert!(target.exists() && !own.exists());
    }
}
