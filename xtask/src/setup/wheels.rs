//! Prebuilt packages from PyPI: pip downloads them and checks their hashes, Python unpacks them.
//!
//! Uses `pip download` instead of `pip install`: Debian's pip installs only into virtual
//! environments, and an installation splits a package over folders whose names contain Python's
//! version.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context, Result, bail, ensure};

use crate::workspace;

/// A list of packages with exact versions and file hashes.
pub struct Requirements {
    /// File name in `xtask/requirements`.
    pub name: &'static str,
    /// Contents of the file.
    pub text: &'static str,
}

/// Result of a download without an error of this machine or the files.
#[derive(Debug)]
pub enum Download {
    /// All packages are unpacked.
    Unpacked,
    /// pip could not download them; its message.
    OutOfReach(String),
}

fn python(arguments: &[&str]) -> Command {
    let mut command = Command::new("python3");
    command.args(arguments);
    command
}

/// Returns an error that says what to install unless `python3 -m pip` works.
pub fn require_pip() -> Result<()> {
    let output = python(&["-m", "pip", "--version"]).output();
    ensure!(
        output.is_ok_and(|output| output.status.success()),
        "`python3 -m pip` does not work here; it downloads the packages. Install Python 3 with \
         pip (Debian: `apt-get install python3 python3-pip`)"
    );
    Ok(())
}

/// Downloads the packages and unpacks them into one folder.
///
/// A file whose hash differs from the pinned one is an error; the setup never continues without it.
pub fn unpack(requirements: &Requirements, folder: &Path) -> Result<Download> {
    let file = workspace::root()
        .join("xtask/requirements")
        .join(requirements.name);
    let downloads = folder.join("downloads");
    let output = download(&file, &downloads, &[])?;
    if !output.status.success() {
        return refused(&output);
    }
    let names = requirements
        .text
        .lines()
        .filter(|line| !line.starts_with(' '));
    for line in names {
        if let Some((package, _)) = line.split_once(" \\") {
            println!("  {}: SHA-256 verified", package.replacen("==", " ", 1));
        }
    }
    for wheel in wheels(&downloads)? {
        unzip(&wheel, folder)?;
    }
    fs::remove_dir_all(&downloads)?;
    Ok(Download::Unpacked)
}

/// Runs pip on a requirements file; files without a matching hash are refused.
fn download(requirements: &Path, folder: &Path, arguments: &[&str]) -> Result<Output> {
    let mut pip = python(&["-m", "pip", "download", "--require-hashes", "--no-deps"]);
    pip.args([
        "--only-binary=:all:",
        "--quiet",
        "--disable-pip-version-check",
    ]);
    pip.args(["--retries", "2", "--timeout", "60"])
        .args(arguments);
    pip.arg("--dest")
        .arg(folder)
        .arg("--requirement")
        .arg(requirements);
    pip.output().context("cannot run `python3 -m pip download`")
}

/// Distinguishes a failed download from a file that differs from the pinned one.
fn refused(output: &Output) -> Result<Download> {
    let stderr = String::from_utf8_lossy(&output.stderr);
    // Text of pip's message ("THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE").
    if stderr.contains("DO NOT MATCH THE HASHES") {
        bail!(
            "a package is not the pinned one; nothing was installed\n{}",
            stderr.trim()
        );
    }
    Ok(Download::OutOfReach(stderr.trim().to_owned()))
}

fn wheels(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut wheels = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("{}", folder.display()))? {
        wheels.push(entry?.path());
    }
    wheels.sort();
    Ok(wheels)
}

/// Unpacks a wheel (a zip archive); modes and links are not kept.
fn unzip(wheel: &Path, folder: &Path) -> Result<()> {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a wheel with one empty module; prints its SHA-256.
    const MAKE_WHEEL: &str = r#"
import hashlib, sys, zipfile
path = sys.argv[1] + "/pinned-1-py3-none-any.whl"
with zipfile.ZipFile(path, "w") as wheel:
    wheel.writestr("pinned.py", "")
    info = "pinned-1.dist-info/"
    wheel.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: pinned\nVersion: 1\n")
    wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    wheel.writestr(info + "RECORD", "")
print(hashlib.sha256(open(path, "rb").read()).hexdigest())
"#;

    #[test]
    fn another_file_than_the_pinned_one_is_refused() {
        if require_pip().is_err() {
            nvfp4_test_support::skip!(NoPip);
        }
        let folder = std::env::temp_dir().join(format!("xtask-wheels-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        let made = python(&["-c", MAKE_WHEEL]).arg(&folder).output().unwrap();
        let hash = String::from_utf8(made.stdout).unwrap();
        let links = format!("--find-links={}", folder.display());
        let get = |line: &str| {
            let list = folder.join("list.txt");
            fs::write(&list, line).unwrap();
            let target = folder.join("downloads");
            download(&list, &target, &["--no-index", &links]).unwrap()
        };

        let pinned = get(&format!("pinned==1 --hash=sha256:{}", hash.trim()));
        assert!(
            pinned.status.success(),
            "{}",
            String::from_utf8_lossy(&pinned.stderr)
        );
        let downloaded = wheels(&folder.join("downloads")).unwrap();
        assert_eq!(downloaded.len(), 1);
        unzip(&downloaded[0], &folder).unwrap();
        assert!(folder.join("pinned.py").exists());
        fs::remove_dir_all(folder.join("downloads")).unwrap();

        let other = get(&format!("pinned==1 --hash=sha256:{}", "0".repeat(64)));
        assert!(
            refused(&other)
                .unwrap_err()
                .to_string()
                .contains("not the pinned one")
        );
        let unpinned = get("pinned==1");
        assert!(!unpinned.status.success());
        let absent = get(&format!("absent==1 --hash=sha256:{}", hash.trim()));
        assert!(matches!(refused(&absent), Ok(Download::OutOfReach(_))));
        fs::remove_dir_all(folder).unwrap();
    }
}
