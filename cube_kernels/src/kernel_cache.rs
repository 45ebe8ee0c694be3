//! Compiled kernels that outlive the process.
//!
//! CubeCL compiles a kernel by NVRTC when it is first launched, and one after the other on each
//! GPU. A training step takes a hundred kernels and more, which is seconds of each start.
//! [`configure`] switches CubeCL's store of compiled kernels on, in a folder that all processes
//! share. What is stored is PTX; the driver keeps what it makes of it itself.
//!
//! Entries are found by CubeCL's version, the architecture of the GPU, the kernel with everything
//! that it is specialized for, and the build of the program. A program that is built anew finds
//! what it compiled before by the CUDA source. The file is one for each version of this crate and
//! of the driver, because PTX of a newer driver may not load in an older one. Files may be deleted
//! at any time. Where the file cannot be written, kernels are compiled as without it.
//!
//! CubeCL finds an entry by a hash alone, which leaves out the variant of an enum among a kernel's
//! arguments. This crate's kernels have a comptime number beside each such variant, and a test
//! compares the hashes of all of them. Kernels of others that take enums may not.

use std::path::{Path, PathBuf};

use cubecl::{
    config::{
        CubeClRuntimeConfig, RuntimeConfig, cache::CacheConfig, compilation::CompilationLogLevel,
    },
    environment,
};
use cubecl_environment::config::logger::LogCrateLevel;

/// Target of the messages of the crate `log` with which CubeCL reports each kernel that it
/// compiles, at level info, once [`configure`] was called: one message a kernel, before it is
/// compiled.
pub const COMPILATION_TARGET: &str = "cubecl::compilation";

/// Why kernels cannot be kept.
#[derive(thiserror::Error, Debug)]
pub enum KernelCacheError {
    /// CubeCL was used before, and reads its configuration once.
    #[error("CubeCL has been started: keep kernels before the first tensor is made")]
    Started,
    /// The folder cannot be made.
    #[error("the folder {} cannot be made: {error}", folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
}

/// The folder `nvfp4` in the user's folder of caches (`$XDG_CACHE_HOME`, or `~/.cache`).
pub fn default_folder() -> PathBuf {
    CacheConfig::Global.root().with_file_name("nvfp4")
}

/// Keeps compiled kernels in `folder`, or only reports each one that is compiled to the crate `log`
/// where there is none. To be called before anything else uses CubeCL: before the first device is
/// opened.
///
/// The file is returned where kernels are kept. They are not where there is no CUDA driver, and
/// where the crate was built without the feature `kernel-cache`.
///
/// Everything else of CubeCL's configuration is as without: from `cubecl.toml` or `burn.toml` in
/// the current folder or above it, and from the environment. Where that file switches the store on
/// itself (`compilation.cache`), its place and name stay, too.
///
/// # Errors
/// When CubeCL is in use already, or `folder` cannot be made.
pub fn configure(folder: Option<&Path>) -> Result<Option<PathBuf>, KernelCacheError> {
    let Some(driver) = driver_version() else {
        return Ok(None);
    };
    let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
    let kept = match folder {
        Some(folder) => keep(&mut config, folder, driver)?,
        None => false,
    };
    let logger = &mut config.compilation.logger;
    if matches!(logger.level, CompilationLogLevel::Disabled) {
        logger.level = CompilationLogLevel::Basic;
        logger.log = Some(LogCrateLevel::Info);
    }
    match CubeClRuntimeConfig::try_set(config) {
        true => Ok(kept.then(environment::path)),
        false => Err(KernelCacheError::Started),
    }
}

/// Switches the store on in `folder`; whether there is one.
#[cfg(feature = "kernel-cache")]
fn keep(
    config: &mut CubeClRuntimeConfig,
    folder: &Path,
    driver: i32,
) -> Result<bool, KernelCacheError> {
    if config.compilation.cache {
        return Ok(true);
    }
    std::fs::create_dir_all(folder).map_err(|error| KernelCacheError::Folder {
        folder: folder.into(),
        error,
    })?;
    config.compilation.cache = true;
    config.environment.path = CacheConfig::Directory(folder.into());
    config.environment.name = name(driver);
    Ok(true)
}

#[cfg(not(feature = "kernel-cache"))]
fn keep(_: &mut CubeClRuntimeConfig, _: &Path, _: i32) -> Result<bool, KernelCacheError> {
    Ok(false)
}

/// The name of the file, without its ending: the version of this crate and that of the driver.
#[cfg(feature = "kernel-cache")]
fn name(driver: i32) -> String {
    let mut name = format!("kernels-{}-cuda{driver}", env!("CARGO_PKG_VERSION"));
    let no_build_id = cubecl::hash::StableHasher::hash_one(&None::<&'static [u8]>);
    if cubecl_server::compiler::build_id_hash() == no_build_id {
        // The linker left no build id, by which CubeCL tells the builds of a program apart.
        name += &format!("-{:x}", program());
    }
    name
}

/// The version of the CUDA driver, such as 13000.
fn driver_version() -> Option<i32> {
    // SAFETY: the library is there, and writes one number.
    unsafe {
        if !cudarc::driver::sys::is_culib_present() {
            return None;
        }
        let mut version = 0;
        let status = cudarc::driver::sys::cuDriverGetVersion(&mut version);
        (status == cudarc::driver::sys::CUresult::CUDA_SUCCESS).then_some(version)
    }
}

/// A number for the file of this program: its length and when it was written.
#[cfg(feature = "kernel-cache")]
fn program() -> u64 {
    let metadata = std::env::current_exe().and_then(std::fs::metadata);
    metadata.map_or(0, |metadata| {
        let written = metadata
            .modified()
            .ok()
            .and_then(|time| time.duration_since(std::time::UNIX_EPOCH).ok())
            .map_or(0, |time| time.as_nanos() as u64);
        metadata.len() ^ written
    })
}
