//! `cargo xtask unified`: checks that every selection of packages uses the dependencies built for
//! the whole workspace.
//!
//! Cargo unifies the features requested by the selected packages. A selection that requests fewer
//! features would build other variants of its dependencies, and everything that depends on them.
//! The packages in `unify/` request the same features everywhere; this check fails if a feature is
//! missing there.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::workspace::{self, Member};

/// Builds the tests of each package alone, after those of the workspace; fails if a selection
/// compiles anything but the package itself.
pub fn run() -> Result<()> {
    let mut all = workspace::cargo();
    all.args([
        "test",
        "--no-run",
        "--workspace",
        "--features",
        workspace::FEATURES,
    ]);
    workspace::spawn(&mut all)?;

    let mut problems = Vec::new();
    for member in workspace::members()? {
        let compiled = compiled(&member)?;
        if compiled.is_empty() {
            println!("{}: nothing else to compile", member.name);
        } else {
            let list: Vec<String> = compiled.into_iter().collect();
            problems.push(format!("{} compiles {}", member.name, list.join(", ")));
        }
    }
    ensure!(
        problems.is_empty(),
        "features are missing in unify/ (compare `cargo tree --edges features`):\n  {}",
        problems.join("\n  ")
    );
    Ok(())
}

/// Returns the crates that `cargo test --package NAME` compiles, without the package itself.
fn compiled(member: &Member) -> Result<BTreeSet<String>> {
    let mut command = workspace::cargo();
    command.args(["test", "--quiet", "--no-run", "--message-format", "json"]);
    command.args(["--package", &member.name]);
    if !member.features.is_empty() {
        command.args(["--features", &member.features]);
    }
    let output = workspace::output(&mut command)?;
    let own = member.name.replace('-', "_");
    let mut compiled = BTreeSet::new();
    for line in String::from_utf8_lossy(&output).lines() {
        let message: Value = serde_json::from_str(line).context("cargo's messages")?;
        if message["reason"] == "compiler-artifact" && message["fresh"] == false {
            let name = message["target"]["name"]
                .as_str()
                .context("no target name")?;
            // `xtask` uses the dependencies compiled by `cargo xtask`, which are other variants
            // than those of the workspace's tests; only the package itself is compiled again.
            if name != own {
                compiled.insert(name.to_owned());
            }
        }
    }
    Ok(compiled)
}
