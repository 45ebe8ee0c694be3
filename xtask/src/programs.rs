//! Packs programs for a machine with a GPU, which has neither Rust nor LLVM.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::workspace;

/// Packs `programs` and their non-system libraries into `archive`, unless that file is newer than
/// all of them.
///
/// # Errors
/// Returns an error if a tool (strip, ldd, tar, xz) or writing fails.
pub fn pack(programs: &[PathBuf], archive: &Path) -> Result<()> {
    let changed = |path: &Path| -> Result<_> {
        let data = fs::metadata(path).with_context(|| path.display().to_string())?;
        Ok(data.modified()?)
    };
    if archive.exists() {
        let packed = changed(archive)?;
        let times: Vec<_> = programs
            .iter()
            .map(|path| changed(path))
            .collect::<Result<_>>()?;
        if times.into_iter().all(|time| packed > time) {
            return Ok(());
        }
    }
    let stage = archive.with_extension("stage");
    recreate(&stage)?;
    for program in programs {
        let name = program.file_name().context("a program has a name")?;
        workspace::spawn(
            Command::new("strip")
                .arg("-o")
                .args([&stage.join(name), program]),
        )?;
        let listed = String::from_utf8(workspace::output(Command::new("ldd").arg(program))?)?;
        for (name, path) in libraries(&listed) {
            fs::copy(path, stage.join(name)).with_context(|| path.to_owned())?;
        }
    }
    let unfinished = archive.with_extension("unfinished");
    let mut tar = Command::new("tar");
    tar.args(["--create", "--use-compress-program", "xz -T0 -6", "--file"]);
    workspace::spawn(tar.arg(&unfinished).arg("--directory").arg(&stage).arg("."))?;
    fs::rename(&unfinished, archive)?;
    fs::remove_dir_all(&stage)?;
    Ok(())
}

/// Creates an empty folder, in the place of what was at `path`.
///
/// # Errors
/// Returns an error if the old folder cannot be removed or the new one cannot be created.
pub fn recreate(path: &Path) -> Result<()> {
    if path.exists() {
        fs::remove_dir_all(path).with_context(|| path.display().to_string())?;
    }
    fs::create_dir_all(path).with_context(|| path.display().to_string())
}

/// Returns names and paths of the non-system libraries in the output of `ldd`.
fn libraries(listed: &str) -> Vec<(&str, &str)> {
    listed.lines().filter_map(library).collect()
}

fn library(line: &str) -> Option<(&str, &str)> {
    let (name, rest) = line.trim().split_once(" => ")?;
    let path = rest.split(" (").next()?;
    let of_system = ["/lib/", "/lib64/", "/usr/lib/", "/usr/lib64/"];
    let is_own = path.starts_with('/') && !of_system.iter().any(|at| path.starts_with(at));
    is_own.then_some((name, path))
}

/// Returns the hash of the commit that is checked out.
///
/// # Errors
/// Returns an error if tracked files have changed since, so that nobody could tell what was built.
pub fn commit() -> Result<String> {
    let git = |arguments: &[&str]| -> Result<String> {
        let mut git = Command::new("git");
        git.current_dir(workspace::root()).args(arguments);
        Ok(String::from_utf8(workspace::output(&mut git)?)?
            .trim()
            .to_owned())
    };
    let changed = git(&["status", "--porcelain", "--untracked-files=no"])?;
    ensure!(
        changed.is_empty(),
        "files have changed since the last commit, so that results could not name what was built; \
         commit them first:\n{changed}"
    );
    git(&["rev-parse", "--short=9", "HEAD"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_of_the_system_stay_where_they_are() {
        let listed = "\tlinux-vdso.so.1 (0x00007ffc)\n\
                      \tlibLLVM.so.23.1 => /opt/llvm/lib/libLLVM.so.23.1 (0x00007f8e)\n\
                      \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f8e)\n\
                      \tlibz.so.1 => not found\n\
                      \t/lib64/ld-linux-x86-64.so.2 (0x00007f8f)\n";
        assert_eq!(
            libraries(listed),
            [("libLLVM.so.23.1", "/opt/llvm/lib/libLLVM.so.23.1")]
        );
    }
}
