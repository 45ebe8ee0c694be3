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
            "{} must not exist or be an empty folder, but it is not",
            target.display()
        );
        let name = target
            .file_name()
            .with_context(|| format!("{} has no name that a folder can get", target.display()))?;
        let mut partial = OsString::from(".");
        partial.push(name);
        partial.push(format!(".partial-{}", std::process::id()));
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
