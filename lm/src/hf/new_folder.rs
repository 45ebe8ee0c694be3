//! A folder that is written whole or not at all.

use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// A folder under a temporary name beside its own, which it gets when all of it is written. Dropped
/// before that, it is removed.
pub struct NewFolder {
    partial: PathBuf,
    target: PathBuf,
}

impl NewFolder {
    /// For the folder `target`, which must not exist or be empty.
    ///
    /// # Errors
    /// When it has files, or the disk refuses.
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

    /// Where its files are written.
    pub fn path(&self) -> &Path {
        &self.partial
    }

    /// Gives the folder its name.
    ///
    /// # Errors
    /// When the disk refuses; then there is no folder.
    pub fn finish(self) -> Result<()> {
        fs::rename(&self.partial, &self.target).with_context(|| self.target.display().to_string())
    }
}

/// Copies the content of a file to a new one, which gets the permissions of new files: those of a
/// source that only its owner can read are not for a model.
///
/// # Errors
/// When the disk refuses: names the source.
pub(crate) fn copy_file(from: &Path, to: &Path) -> Result<()> {
    let copy = || -> std::io::Result<u64> {
        std::io::copy(&mut fs::File::open(from)?, &mut fs::File::create(to)?)
    };
    copy().with_context(|| from.display().to_string())?;
    Ok(())
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        // It is gone if it was finished.
        let _ = fs::remove_dir_all(&self.partial);
    }
}
