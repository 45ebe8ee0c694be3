//! Installs NVRTC, the headers and the disassembler for the source tests, which compile every
//! kernel without a GPU.
//!
//! The tests look in the folder named by `NVFP4_CUDA_TOOLS`, otherwise in
//! `<data folder of the user>/nvfp4/cuda-13.5`:
//!
//! ```text
//! lib/libnvrtc.so.13, lib/libnvrtc-builtins.so.13.5
//! bin/ptxas, bin/nvdisasm, bin/cuobjdump
//! include/                     CUDA's headers
//! include/cccl/                libcu++ (`<cuda/barrier>`): a second include path, as in CubeCL
//! .nvfp4-cuda-tools            the packages it was made from: requirements/cuda.txt
//! ```

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use super::staging::{self, Staging};
use super::wheels::{self, Download, Requirements};

/// Environment variable with another folder of the same layout.
const VARIABLE: &str = "NVFP4_CUDA_TOOLS";
const FOLDER: &str = "nvfp4/cuda-13.5";
const SENTINEL: &str = ".nvfp4-cuda-tools";

const PACKAGES: Requirements = Requirements {
    name: "cuda.txt",
    text: include_str!("../../requirements/cuda.txt"),
};

/// Programs that the tests need.
const PROGRAMS: [&str; 3] = ["ptxas", "nvdisasm", "cuobjdump"];
const LIBRARIES: [&str; 2] = ["libnvrtc.so.13", "libnvrtc-builtins.so.13.5"];

/// Returns the folder that [`ensure()`] fills, or the one that the user names.
pub fn folder() -> Result<PathBuf> {
    if let Some(folder) = env::var_os(VARIABLE) {
        return Ok(folder.into());
    }
    let data = dirs::data_local_dir().context("this user has no data folder")?;
    Ok(data.join(FOLDER))
}

/// Returns true if the folder has the library that the tests look for.
pub fn is_installed() -> bool {
    folder().is_ok_and(|folder| folder.join("lib").join(LIBRARIES[0]).exists())
}

/// Ensures that the tools are installed, or prints that the tests will be skipped.
pub fn ensure() -> Result<()> {
    if let Some(folder) = env::var_os(VARIABLE).map(PathBuf::from) {
        // The user's folder is checked, but never modified.
        ensure!(
            PROGRAMS
                .iter()
                .all(|name| folder.join("bin").join(name).exists())
                && folder.join("include").is_dir()
                && has_nvrtc(&folder.join("lib")),
            "{VARIABLE} is {}, which does not have lib/libnvrtc.so*, include/ and bin/{{{}}}",
            folder.display(),
            PROGRAMS.join(",")
        );
        println!("CUDA compiler: {} ({VARIABLE})", folder.display());
        return Ok(());
    }
    let folder = folder()?;
    if folder.join(SENTINEL).exists() {
        println!("CUDA compiler: already there ({})", folder.display());
        return Ok(());
    }
    let why = if cfg!(all(
        target_os = "linux",
        target_arch = "x86_64",
        target_env = "gnu"
    )) {
        println!("CUDA compiler: assembling {} from PyPI", folder.display());
        install(&folder)?
    } else {
        Some("the packages are for x86-64 Linux with glibc".to_owned())
    };
    match why {
        None => println!("CUDA compiler: installed in {}", folder.display()),
        Some(why) => println!(
            "CUDA compiler: not available, so the source tests of the kernels will report \
             themselves skipped\n{why}"
        ),
    }
    Ok(())
}

fn has_nvrtc(lib: &Path) -> bool {
    fs::read_dir(lib).is_ok_and(|entries| {
        entries
            .flatten()
            .any(|e| e.file_name().to_string_lossy().starts_with("libnvrtc.so"))
    })
}

/// Installs the tools; returns the reason if PyPI is unreachable.
fn install(folder: &Path) -> Result<Option<String>> {
    if let Err(error) = wheels::require_pip() {
        return Ok(Some(error.to_string()));
    }
    let staging = Staging::new(folder)?;
    let scratch = staging.scratch();
    if let Download::OutOfReach(why) = wheels::unpack(&PACKAGES, &scratch)? {
        return Ok(Some(why));
    }

    // All packages unpack into one CUDA tree; only these programs and libraries are kept.
    let tree = scratch.join("nvidia/cu13");
    let root = staging.root();
    for (part, files) in [("bin", &PROGRAMS[..]), ("lib", &LIBRARIES[..])] {
        fs::create_dir_all(root.join(part))?;
        for file in files {
            let (from, to) = (tree.join(part).join(file), root.join(part).join(file));
            fs::rename(&from, &to).with_context(|| format!("{}", from.display()))?;
            staging::make_executable(&to)?;
        }
    }
    fs::rename(tree.join("include"), root.join("include")).context("include")?;

    staging.publish(SENTINEL, PACKAGES.text)?;
    Ok(None)
}
