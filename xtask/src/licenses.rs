//! `cargo xtask licenses`: the part of `cargo deny check licenses sources` that needs no tool.
//!
//! Both read `deny.toml`; cargo-deny needs minutes to install, this needs none.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::{spdx, workspace};

/// The only place besides this workspace from which a dependency may come.
const CRATES_IO: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Checks every package of the dependency graph, all features and all targets of `deny.toml`.
pub fn run() -> Result<()> {
    let text = fs::read_to_string(workspace::root().join("deny.toml")).context("deny.toml")?;
    let policy = Policy::parse(&text).context("deny.toml")?;

    for manifest in workspace::MANIFESTS {
        check(manifest, &policy)?;
    }
    Ok(())
}

fn check(manifest: &str, policy: &Policy) -> Result<()> {
    let mut command = workspace::cargo();
    command.args([
        "metadata",
        "--manifest-path",
        manifest,
        "--locked",
        "--format-version",
        "1",
        "--all-features",
    ]);
    for target in &policy.targets {
        command.args(["--filter-platform", target]);
    }
    let output = command.stderr(std::process::Stdio::inherit()).output()?;
    ensure!(
        output.status.success(),
        "`{}` failed",
        workspace::shown(&command)
    );
    let metadata: Value = serde_json::from_slice(&output.stdout).context("cargo metadata")?;
    let packages = metadata["packages"]
        .as_array()
        .context("cargo metadata: no packages")?;
    ensure!(!packages.is_empty(), "cargo metadata lists no package");

    let problems: Vec<String> = packages.iter().filter_map(|p| policy.problem(p)).collect();
    if !problems.is_empty() {
        bail!(
            "{} of {} packages:\n  {}",
            problems.len(),
            packages.len(),
            problems.join("\n  ")
        );
    }
    println!(
        "{manifest}: licences and origin of {} packages are allowed by deny.toml",
        packages.len()
    );
    Ok(())
}

/// What `deny.toml` allows.
struct Policy {
    allow: Vec<String>,
    /// Package name to the licences that only this package may have.
    exceptions: BTreeMap<String, Vec<String>>,
    /// Package name to the expression for a package that states none.
    clarified: BTreeMap<String, String>,
    targets: Vec<String>,
}

impl Policy {
    fn parse(text: &str) -> Result<Self> {
        let root: toml::Table = text.parse()?;
        let licences = root
            .get("licenses")
            .and_then(|v| v.as_table())
            .context("no [licenses] section")?;
        let targets = root.get("graph").and_then(|graph| graph.get("targets"));
        let mut policy = Self {
            allow: strings(licences.get("allow")).context("licenses.allow")?,
            exceptions: BTreeMap::new(),
            clarified: BTreeMap::new(),
            targets: strings(targets).context("graph.targets")?,
        };
        for entry in entries(licences, "exceptions") {
            let name = string(entry.get("crate")).context("licenses.exceptions: crate")?;
            let allow = strings(entry.get("allow")).context("licenses.exceptions: allow")?;
            policy.exceptions.insert(name, allow);
        }
        for entry in entries(licences, "clarify") {
            let name = string(entry.get("crate")).context("licenses.clarify: crate")?;
            let expression =
                string(entry.get("expression")).context("licenses.clarify: expression")?;
            policy.clarified.insert(name, expression);
        }
        Ok(policy)
    }

    /// Why a package of `cargo metadata` is not allowed, if it is not.
    fn problem(&self, package: &Value) -> Option<String> {
        let name = package["name"].as_str().unwrap_or("?");
        let label = format!("{name} {}", package["version"].as_str().unwrap_or("?"));
        // Packages of this workspace have no source.
        if let Some(source) = package["source"].as_str()
            && source != CRATES_IO
        {
            return Some(format!("{label}: comes from {source}, not from crates.io"));
        }
        let stated = package["license"]
            .as_str()
            .or(self.clarified.get(name).map(String::as_str));
        let Some(expression) = stated else {
            return Some(format!(
                "{label}: states no licence; add it to licenses.clarify"
            ));
        };
        let own = self.exceptions.get(name);
        let allowed = |licence: &str| {
            let is = |entry: &String| entry == licence;
            self.allow.iter().any(is) || own.is_some_and(|list| list.iter().any(is))
        };
        match spdx::satisfiable(expression, &allowed) {
            Ok(true) => None,
            Ok(false) => Some(format!("{label}: `{expression}` is not allowed")),
            Err(error) => Some(format!("{label}: cannot read `{expression}`: {error}")),
        }
    }
}

fn string(value: Option<&toml::Value>) -> Result<String> {
    Ok(value
        .and_then(|v| v.as_str())
        .context("must be a string")?
        .to_owned())
}

fn strings(value: Option<&toml::Value>) -> Result<Vec<String>> {
    let list = value
        .and_then(|v| v.as_array())
        .context("must be a list of strings")?;
    list.iter().map(|item| string(Some(item))).collect()
}

fn entries<'a>(table: &'a toml::Table, key: &str) -> impl Iterator<Item = &'a toml::Value> {
    table
        .get(key)
        .and_then(|v| v.as_array())
        .into_iter()
        .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: &str = r#"
        [graph]
        targets = ["x86_64-unknown-linux-gnu"]
        [licenses]
        allow = ["MIT", "Apache-2.0"]
        exceptions = [{ crate = "weak", allow = ["MPL-2.0"] }]
        [[licenses.clarify]]
        crate = "silent"
        expression = "Apache-2.0"
        license-files = [{ path = "LICENSE", hash = 1 }]
    "#;

    fn problem(name: &str, license: Option<&str>, source: Option<&str>) -> Option<String> {
        let package = serde_json::json!({
            "name": name, "version": "1.0.0", "license": license, "source": source,
        });
        Policy::parse(POLICY).unwrap().problem(&package)
    }

    #[test]
    fn allowed_packages() {
        assert_eq!(problem("a", Some("MIT OR GPL-3.0"), Some(CRATES_IO)), None);
        assert_eq!(problem("own", Some("MIT"), None), None);
        assert_eq!(problem("weak", Some("MPL-2.0"), Some(CRATES_IO)), None);
        assert_eq!(problem("silent", None, Some(CRATES_IO)), None);
    }

    #[test]
    fn refused_packages_say_why() {
        let why = |name, license, source| problem(name, license, source).unwrap();
        assert!(why("a", Some("MPL-2.0"), Some(CRATES_IO)).contains("`MPL-2.0` is not allowed"));
        assert!(why("a", None, Some(CRATES_IO)).contains("states no licence"));
        assert!(why("a", Some("MIT OR"), Some(CRATES_IO)).contains("cannot read"));
        assert!(why("a", Some("MIT"), Some("git+https://example.org/a")).contains("comes from"));
    }

    #[test]
    fn the_policy_of_this_workspace_can_be_read() {
        let policy = Policy::parse(include_str!("../../deny.toml")).unwrap();
        assert!(policy.allow.iter().any(|licence| licence == "MIT"));
        assert!(!policy.targets.is_empty());
    }
}
