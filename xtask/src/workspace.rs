//! Describes the workspace, and calls its cargo.

use std::env;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// Features of all builds and tests: all backends in one binary.
pub const FEATURES: &str = "cpu,cuda";

/// Returns the workspace's root folder.
///
/// Determined at run time, not at compile time, because two checkouts may share a target folder.
pub fn root() -> PathBuf {
    let manifest = env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    manifest.parent().map(PathBuf::from).unwrap_or(manifest)
}

/// Returns a cargo command that runs in the workspace's root as if the user had typed it.
///
/// `cargo xtask` runs inside `cargo run`, which describes the package `xtask` in the environment. A
/// build script that watches one of those variables would otherwise rerun whenever the user
/// alternates between `cargo xtask test` and a plain `cargo test`.
pub fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    for (name, _) in env::vars_os() {
        let text = name.to_string_lossy();
        let describes_a_package = text.starts_with("CARGO_PKG_")
            || text.starts_with("CARGO_MANIFEST_")
            || matches!(
                &*text,
                "CARGO_PRIMARY_PACKAGE" | "CARGO_CRATE_NAME" | "CARGO_BIN_NAME"
            );
        if describes_a_package {
            command.env_remove(&name);
        }
    }
    command
}

/// A package of the workspace.
pub struct Member {
    /// Its name.
    pub name: String,
    /// Its folder.
    pub folder: PathBuf,
    /// True if it is published on crates.io.
    pub published: bool,
    /// True if it has a library whose documentation has examples.
    pub has_library: bool,
    /// The package's subset of [`FEATURES`], comma-separated.
    pub features: String,
}

/// Returns all packages of the workspace.
pub fn members() -> Result<Vec<Member>> {
    let metadata = metadata()?;
    let packages = metadata["packages"].as_array().context("no packages")?;
    packages.iter().map(member).collect()
}

fn member(package: &Value) -> Result<Member> {
    let manifest = package["manifest_path"]
        .as_str()
        .context("no manifest_path")?;
    let features: Vec<&str> = FEATURES
        .split(',')
        .filter(|name| package["features"].get(name).is_some())
        .collect();
    let targets = package["targets"].as_array().context("no targets")?;
    Ok(Member {
        has_library: targets.iter().any(|target| target["doctest"] == true),
        name: package["name"].as_str().context("no name")?.to_owned(),
        folder: PathBuf::from(manifest)
            .parent()
            .context("no folder")?
            .to_owned(),
        // `null` if a package may be published to every registry, an empty list if to none.
        published: package["publish"].is_null(),
        features: features.join(","),
    })
}

/// Returns cargo's target folder.
pub fn target_folder() -> Result<PathBuf> {
    let metadata = metadata()?;
    Ok(metadata["target_directory"]
        .as_str()
        .context("no target_directory")?
        .into())
}

/// Returns cargo's metadata about the packages of the workspace.
fn metadata() -> Result<Value> {
    let mut command = cargo();
    command.args(["metadata", "--locked", "--format-version", "1", "--no-deps"]);
    Ok(serde_json::from_slice(&output(&mut command)?)?)
}

/// Prints and runs a command that must succeed.
pub fn spawn(command: &mut Command) -> Result<()> {
    println!("$ {}", shown(command));
    let status = command.status().with_context(|| shown(command))?;
    ensure!(status.success(), "`{}` ended with {status}", shown(command));
    Ok(())
}

/// Returns the output of a command that must succeed.
pub fn output(command: &mut Command) -> Result<Vec<u8>> {
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| shown(command))?;
    ensure!(
        output.status.success(),
        "`{}` ended with {}",
        shown(command),
        output.status
    );
    Ok(output.stdout)
}

/// Formats a command line as a user would type it, for messages.
pub fn shown(command: &Command) -> String {
    let mut text = String::new();
    for (name, value) in command.get_envs() {
        if let Some(value) = value {
            text += &format!("{}='{}' ", name.to_string_lossy(), value.to_string_lossy());
        }
    }
    let program = command.get_program().to_string_lossy();
    text += program.rsplit(['/', '\\']).next().unwrap_or(&program);
    for argument in command.get_args() {
        text.push(' ');
        text += &argument.to_string_lossy();
    }
    text
}
