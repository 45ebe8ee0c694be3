//! Creates a folder atomically.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// A temporary folder next to its destination, removed on drop unless it was published.
///
/// It must be on the same file system as the destination, because a rename is atomic only there.
pub struct Staging {
    folder: PathBuf,
    destination: PathBuf,
}

impl Staging {
    /// Creates an empty staging folder for `destination`.
    pub fn new(destination: &Path) -> Result<Self> {
        let parent = destination
            .parent()
            .context("the destination has no parent folder")?;
        let name = destination
            .file_name()
            .context("the destination has no name")?;
        let name = format!(".{}.partial-{}", name.to_string_lossy(), std::process::id());
        let folder = parent.join(name);
        fs::create_dir_all(&folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
        Ok(Self {
            folder,
            destination: destination.to_owned(),
        })
    }

    /// Returns the folder that becomes the destination.
    pub fn root(&self) -> PathBuf {
        self.folder.join("root")
    }

    /// Returns a folder for downloads and other temporary files.
    pub fn scratch(&self) -> PathBuf {
        self.folder.join("scratch")
    }

    /// Writes `sentinel` (a file name) as the last file, and renames the folder to the destination.
    ///
    /// A destination without the sentinel is left from an interrupted installation, and is
    /// replaced. A destination with it was finished by another process in the meantime, and is
    /// kept.
    pub fn publish(self, sentinel: &str, contents: &str) -> Result<()> {
        fs::write(self.root().join(sentinel), contents)?;
        if self.destination.join(sentinel).exists() {
            return Ok(());
        }
        if self.destination.exists() {
            fs::rename(&self.destination, self.folder.join("replaced"))
                .with_context(|| format!("cannot replace {}", self.destination.display()))?;
        }
        let moved = fs::rename(self.root(), &self.destination);
        ensure!(
            moved.is_ok() || self.destination.join(sentinel).exists(),
            "cannot move the finished folder to {}: {}",
            self.destination.display(),
            moved.unwrap_err()
        );
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // A failure cannot be handled here; the name of a remaining folder shows that it is
        // temporary.
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Makes a file executable for everybody, because unpacking a wheel does not keep modes.
#[cfg(unix)]
pub fn make_executable(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    Ok(fs::set_permissions(
        path,
        fs::Permissions::from_mode(0o755),
    )?)
}

#[cfg(not(unix))]
pub fn make_executable(_path: &Path) -> Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn destination(test: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("xtask-{test}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        folder.join("installed")
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<String> = entries
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn whole_or_not_at_all() {
        let destination = destination("staging");
        let parent = destination.parent().unwrap().to_owned();

        let abandoned = Staging::new(&destination).unwrap();
        fs::create_dir(abandoned.root()).unwrap();
        drop(abandoned);
        assert!(names(&parent).is_empty());

        // The remainder of an interrupted installation is replaced as a whole.
        fs::create_dir(&destination).unwrap();
        fs::write(destination.join("stale"), "").unwrap();
        let staging = Staging::new(&destination).unwrap();
        fs::create_dir(staging.root()).unwrap();
        fs::write(staging.root().join("fresh"), "").unwrap();
        staging.publish(".done", "1").unwrap();
        assert_eq!(names(&destination), [".done", "fresh"]);

        // A finished installation is kept.
        let late = Staging::new(&destination).unwrap();
        fs::create_dir(late.root()).unwrap();
        late.publish(".done", "2").unwrap();
        assert_eq!(fs::read_to_string(destination.join(".done")).unwrap(), "1");
        assert_eq!(names(&parent), ["installed"]);
        fs::remove_dir_all(parent).unwrap();
    }
}
