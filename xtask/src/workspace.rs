//! Where the workspace is and how its cargo is called.

use std::env;
use std::path::PathBuf;
use std::process::Command;

/// The tests with burn-train, from the root: see there why they are a workspace of their own.
pub const TRAIN_TESTS: &str = "train_tests/Cargo.toml";

/// Both workspaces, from the root.
pub const MANIFESTS: [&str; 2] = ["Cargo.toml", TRAIN_TESTS];

/// The workspace's root folder.
///
/// Read when the command runs, not when it was compiled: two checkouts may share a target folder.
pub fn root() -> PathBuf {
    let manifest = env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    manifest.parent().map(PathBuf::from).unwrap_or(manifest)
}

/// Cargo, to be run in the workspace's root as if the user had typed it.
///
/// `cargo xtask` runs inside `cargo run`, which describes the package `xtask` in the environment.
/// A build script that watches one of those variables would otherwise run again every time that the
/// user changes between `cargo xtask test` and a plain `cargo test`.
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

/// A command line as a person would type it, for messages.
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
