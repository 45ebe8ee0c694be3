//! `cargo xtask package`: makes the packages for crates.io.
//!
//! `cargo package` runs with `--no-verify`, because verification would rebuild Burn for each
//! package. Instead the packages are unpacked into one folder, and `cargo clippy` checks all of
//! them at once with their default features, as for a user of the published crates.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;

use anyhow::{Context, Result, bail, ensure};

use crate::workspace::{self, Member};

/// Features that docs.rs builds with, by package; identical to `package.metadata.docs.rs`.
const DOCS_RS: [(&str, &str); 4] = [
    ("burn-nvfp4", "flex,cubecl-backend,train"),
    ("nvfp4", "flex,train"),
    ("nvfp4-lm", "flex"),
    ("nvfp4-parallel", "cuda"),
];

/// Name prefixes of crates that bring a CubeCL runtime or LLVM into a build.
const RUNTIMES: [&str; 6] = [
    "cubecl-cpu",
    "cubecl-cuda",
    "cubecl-llvm",
    "tracel-llvm",
    "llvm-sys",
    "pliron-llvm",
];

/// Makes the packages and checks them.
pub fn run() -> Result<()> {
    let members = workspace::members()?;
    let published: Vec<&Member> = members.iter().filter(|member| member.published).collect();
    let mut command = workspace::cargo();
    // Uncommitted changes are allowed here; for publishing, cargo is called directly and refuses
    // them.
    command.args(["package", "--no-verify", "--allow-dirty", "--quiet"]);
    for member in &published {
        command.args(["--package", &member.name]);
    }
    workspace::spawn(&mut command)?;

    let target = workspace::target_folder()?;
    let folder = target.join("packages");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&folder)?;
    for member in &published {
        let unpacked = unpack(member, &target, &folder)?;
        included_files(&unpacked)?;
    }
    check_together(&published, &folder, &target)?;
    boundaries()
}

/// Checks that formats and oracle build without CubeCL, and that neither the default features nor
/// those of docs.rs need LLVM.
fn boundaries() -> Result<()> {
    let mut command = workspace::cargo();
    command.args(["check", "--package", "nvfp4-formats"]);
    workspace::spawn(&mut command)?;
    absent("nvfp4-formats", &[], &["cubecl", "tracel-llvm", "llvm-sys"])?;
    absent("nvfp4-kernels", &[], &RUNTIMES)?;
    absent("nvfp4", &[], &RUNTIMES)?;
    absent("nvfp4-cli", &[], &RUNTIMES)?;
    for (package, features) in DOCS_RS {
        let manifest = workspace::members()?
            .into_iter()
            .find(|member| member.name == package)
            .context(package)?
            .folder
            .join("Cargo.toml");
        let text = fs::read_to_string(&manifest)?;
        let list: Vec<String> = features
            .split(',')
            .map(|name| format!("\"{name}\""))
            .collect();
        ensure!(
            text.contains(&format!("features = [{}]", list.join(", "))),
            "{}: package.metadata.docs.rs has other features than {features}",
            manifest.display()
        );
        absent(
            package,
            &["--no-default-features", "--features", features],
            &RUNTIMES,
        )?;
    }
    Ok(())
}

/// Returns an error if a package depends on a crate whose name starts with one of these.
fn absent(package: &str, features: &[&str], beginnings: &[&str]) -> Result<()> {
    let mut command = workspace::cargo();
    command.args([
        "tree",
        "--locked",
        "--package",
        package,
        "--edges",
        "normal,build",
    ]);
    command
        .args(["--prefix", "none", "--format", "{p}"])
        .args(features);
    let output = workspace::output(&mut command)?;
    let tree = String::from_utf8_lossy(&output);
    // An empty list would pass regardless of the dependencies.
    ensure!(
        tree.starts_with(&format!("{package} v")),
        "cargo tree does not list {package}"
    );
    let found: Vec<&str> = tree
        .lines()
        .filter(|line| beginnings.iter().any(|b| line.starts_with(b)))
        .collect();
    if !found.is_empty() {
        bail!(
            "{package} {} depends on {}",
            features.join(" "),
            found.join(", ")
        );
    }
    let with = if features.is_empty() {
        "default features"
    } else {
        features.last().unwrap()
    };
    println!("{package}, {with}: no {}", beginnings.join(", "));
    Ok(())
}

/// Unpacks a package; returns its folder.
fn unpack(member: &Member, target: &Path, folder: &Path) -> Result<PathBuf> {
    let version = env!("CARGO_PKG_VERSION");
    let name = format!("{}-{version}", member.name);
    let file = target.join("package").join(format!("{name}.crate"));
    let mut command = Command::new("python3");
    command
        .args(["-W", "ignore", "-m", "tarfile", "-e"])
        .arg(&file)
        .arg(folder);
    workspace::output(&mut command)?;
    let unpacked = folder.join(&name);
    changed_now(&unpacked)?;
    for wanted in ["Cargo.toml", "LICENSE-APACHE", "LICENSE-MIT", "README.md"] {
        ensure!(unpacked.join(wanted).exists(), "{name} lacks {wanted}");
    }
    println!("{name}: {} KB", fs::metadata(&file)?.len() / 1024);
    Ok(unpacked)
}

/// Sets the time of every file's last change to now.
///
/// All files of a package have the same old date, so with a target folder that was kept, Cargo
/// would take what it compiled from an earlier package for up to date.
fn changed_now(package: &Path) -> Result<()> {
    let now = SystemTime::now();
    for entry in ignore::WalkBuilder::new(package)
        .standard_filters(false)
        .build()
    {
        let entry = entry?;
        if entry.file_type().is_some_and(|kind| kind.is_file()) {
            let file = fs::File::options().write(true).open(entry.path())?;
            file.set_modified(now)?;
        }
    }
    Ok(())
}

/// Returns an error if a source file includes a file that the package does not contain.
fn included_files(package: &Path) -> Result<()> {
    for file in ignore::Walk::new(package) {
        let path = file?.into_path();
        if path.extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        let text = fs::read_to_string(&path)?;
        let folder = path.parent().context("a file without a folder")?;
        for name in included(&text) {
            ensure!(
                folder.join(name).exists(),
                "{} includes {name}, which the package does not contain",
                path.strip_prefix(package)?.display()
            );
        }
    }
    Ok(())
}

/// Returns the names in `include_str!("...")`, `include_bytes!("...")` and `#[path = "..."]`.
fn included(text: &str) -> impl Iterator<Item = &str> {
    ["include_str!(\"", "include_bytes!(\"", "#[path = \""]
        .into_iter()
        .flat_map(|start| text.split(start).skip(1))
        .filter_map(|rest| rest.split('"').next())
}

/// Checks all packages with their default features, in a workspace without anything else.
fn check_together(published: &[&Member], folder: &Path, target: &Path) -> Result<()> {
    let root = workspace::root();
    let version = env!("CARGO_PKG_VERSION");
    let mut manifest = "[workspace]\nresolver = \"3\"\nmembers = [\n".to_owned();
    for member in published {
        manifest += &format!("    \"{}-{version}\",\n", member.name);
    }
    manifest += "]\n\n[patch.crates-io]\n";
    for Member { name, .. } in published {
        manifest += &format!("{name} = {{ path = \"{name}-{version}\" }}\n");
    }
    // With other profiles, the compiled dependencies could not be reused.
    manifest += "\n";
    manifest += &profiles(&fs::read_to_string(root.join("Cargo.toml"))?);
    fs::write(folder.join("Cargo.toml"), manifest)?;
    fs::copy(root.join("Cargo.lock"), folder.join("Cargo.lock"))?;

    // Not `cargo check`: it denies warnings only by RUSTFLAGS, which compile all dependencies again.
    let mut command = workspace::cargo();
    command.args(["clippy", "--workspace", "--manifest-path"]);
    command
        .arg(folder.join("Cargo.toml"))
        .arg("--target-dir")
        .arg(target);
    // Warnings of the compiler: code that only other features use. Clippy's own lints do not depend
    // on features.
    command.args(["--", "-D", "warnings", "-A", "clippy::all"]);
    workspace::spawn(&mut command)
}

/// Returns the profile sections of a manifest.
fn profiles(manifest: &str) -> String {
    let mut inside = false;
    let mut text = String::new();
    for line in manifest.lines() {
        if line.starts_with('[') {
            inside = line.starts_with("[profile.");
        }
        if inside {
            text += line;
            text.push('\n');
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn included_names() {
        let text = "#[doc = include_str!(\"../README.md\")]\n#[path = \"a/b.rs\"]\nmod b;\n\
                    const C: &[u8] = include_bytes!(\"c.bin\");";
        let names: Vec<&str> = included(text).collect();
        assert_eq!(names, ["../README.md", "c.bin", "a/b.rs"]);
    }

    #[test]
    fn sections_of_profiles() {
        let manifest = "[profile.dev]\ndebug = 0\n\n[package]\nname = \"a\"\n[profile.release]\n";
        assert_eq!(
            profiles(manifest),
            "[profile.dev]\ndebug = 0\n\n[profile.release]\n"
        );
    }
}
