//! Lets the command start without cargo when CubeCL's LLVM is a shared library, by setting the
//! binary's run path to the folder of that library. Does nothing for the default features, which
//! link no LLVM.

use std::{env, path::PathBuf};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let links_llvm = ["CARGO_FEATURE_CPU", "CARGO_FEATURE_CUDA"]
        .iter()
        .any(|name| env::var_os(name).is_some());
    if !links_llvm || env::var("CARGO_CFG_TARGET_OS").as_deref() != Ok("linux") {
        return;
    }
    println!("cargo::rerun-if-env-changed=XDG_DATA_HOME");
    let data = match env::var_os("XDG_DATA_HOME") {
        Some(folder) => PathBuf::from(folder),
        None => match env::var_os("HOME") {
            Some(home) => PathBuf::from(home).join(".local/share"),
            None => return,
        },
    };
    // Prefix installed by `cargo xtask setup` or by CubeCL's build script.
    let libraries = data.join("tracel/tracel-llvm-23.1.0-4/lib");
    if libraries.join("libLLVM.so.23.1").exists() {
        println!(
            "cargo::rustc-link-arg-bins=-Wl,-rpath,{}",
            libraries.display()
        );
    }
}
