//! Wheels from PyPI: download through pip, verify, unpack.

use std::fs;
use std::io;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use sha2::{Digest, Sha256};

/// One pinned wheel.
pub struct Wheel {
    /// The package's name.
    pub package: &'static str,
    /// The exact version.
    pub version: &'static str,
    /// The file's name as PyPI serves it.
    pub file: &'static str,
    /// SHA-256 of the file, in lower-case hexadecimal.
    pub sha256: &'static str,
}

/// How a download ended, when nothing is wrong with this machine or with the files.
pub enum Download {
    /// All wheels are there, and each is the one that was pinned.
    Verified,
    /// pip could not get them; what it said.
    OutOfReach(String),
}

/// `python3 -m ...`, as the error messages call it.
fn python(arguments: &[&str]) -> Command {
    let mut command = Command::new("python3");
    command.args(arguments);
    command
}

/// An error that says what to install, unless `python3 -m pip` works.
pub fn require_pip() -> Result<()> {
    let output = python(&["-m", "pip", "--version"]).output();
    ensure!(
        output.is_ok_and(|output| output.status.success()),
        "`python3 -m pip` does not work here; it downloads the packages. Install Python 3 with pip \
         (Debian: `apt-get install python3 python3-pip`)"
    );
    Ok(())
}

/// Downloads `wheels` into `folder` and verifies each; files that are not the pinned ones are an
/// error, never a reason to go on without.
pub fn download(wheels: &[Wheel], folder: &Path) -> Result<Download> {
    fs::create_dir_all(folder)?;
    let mut command = python(&["-m", "pip", "download", "--no-deps", "--only-binary=:all:"]);
    command.args([
        "--quiet",
        "--disable-pip-version-check",
        "--retries",
        "2",
        "--timeout",
        "60",
    ]);
    command.arg("--dest").arg(folder);
    for wheel in wheels {
        command.arg(format!("{}=={}", wheel.package, wheel.version));
    }
    let output = command
        .output()
        .context("cannot run `python3 -m pip download`")?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        return Ok(Download::OutOfReach(stderr.trim().to_owned()));
    }
    verify(wheels, folder)?;
    Ok(Download::Verified)
}

/// Fails unless `folder` holds the files that were pinned.
fn verify(wheels: &[Wheel], folder: &Path) -> Result<()> {
    for wheel in wheels {
        let path = folder.join(wheel.file);
        ensure!(
            path.exists(),
            "pip did not download {}, but another file",
            wheel.file
        );
        let found = sha256(&path)?;
        if found != wheel.sha256 {
            bail!(
                "{} is not the file that was pinned:\n  SHA-256 {found}\n  pinned  {}\n\
                 Nothing was installed.",
                wheel.file,
                wheel.sha256
            );
        }
        println!("  {} {}: SHA-256 verified", wheel.package, wheel.version);
    }
    Ok(())
}

/// Unpacks a wheel (a zip archive; modes and links are not kept).
pub fn unpack(wheel: &Path, folder: &Path) -> Result<()> {
    let mut command = python(&["-m", "zipfile", "-e"]);
    let output = command
        .arg(wheel)
        .arg(folder)
        .output()
        .context("cannot run python3")?;
    ensure!(
        output.status.success(),
        "cannot unpack {}: {}",
        wheel.display(),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(())
}

fn sha256(path: &Path) -> Result<String> {
    let mut file = fs::File::open(path).with_context(|| format!("{}", path.display()))?;
    let mut hasher = Sha256::new();
    io::copy(&mut file, &mut hasher)?;
    Ok(hasher
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sha256_of_a_known_file() {
        let path = std::env::temp_dir().join(format!("xtask-sha256-{}", std::process::id()));
        fs::write(&path, "abc").unwrap();
        // FIPS 180-4, appendix B.1.
        let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(sha256(&path).unwrap(), expected);
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn another_file_than_the_pinned_one_is_refused() {
        let folder = std::env::temp_dir().join(format!("xtask-wheels-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let wheel = |file| Wheel {
            package: "package",
            version: "1",
            file,
            sha256: "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        };
        fs::write(folder.join("same.whl"), "abc").unwrap();
        fs::write(folder.join("other.whl"), "abd").unwrap();
        let verified = |file| verify(&[wheel(file)], &folder).map_err(|error| error.to_string());
        assert_eq!(verified("same.whl"), Ok(()));
        assert!(
            verified("other.whl")
                .unwrap_err()
                .contains("other.whl is not the file")
        );
        assert!(
            verified("absent.whl")
                .unwrap_err()
                .contains("did not download absent.whl")
        );
        fs::remove_dir_all(folder).unwrap();
    }
}
