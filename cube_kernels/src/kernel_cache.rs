//! Cache of compiled kernels that outlives the process.
//!
//! CubeCL compiles a kernel through NVRTC at its first launch, one after the other on each GPU. A
//! training step uses more than a hundred kernels, which takes seconds at each start. [`configure`]
//! enables CubeCL's store of compiled kernels, in a folder that all processes share. The store
//! contains PTX; the driver caches the machine code itself.
//!
//! The key of an entry is CubeCL's version, the architecture of the GPU, the kernel with all its
//! comptime arguments, and the build of the program. A rebuilt program finds earlier entries by
//! their CUDA source. Each version of this crate and of the driver has its own file, because PTX of
//! a newer driver may not load in an older one. Files may be deleted at any time. If the file
//! cannot be written, kernels are compiled as without a cache.
//!
//! CubeCL looks up entries by hash only, and the hash leaves out the variant of an enum among a
//! kernel's arguments. Each such variant in this crate's kernels is accompanied by a comptime
//! number, and a test compares the hashes of all of them. Kernels of other crates that take enums
//! may collide.

use std::path::{Path, PathBuf};

use cubecl::{
    config::{
        CubeClRuntimeConfig, RuntimeConfig, cache::CacheConfig, compilation::CompilationLogLevel,
    },
    environment,
};
use cubecl_environment::config::logger::LogCrateLevel;

/// Target of the `log` messages with which CubeCL reports each kernel that it compiles, once
/// [`configure`] was called: one message per kernel at level info, before it is compiled.
pub const COMPILATION_TARGET: &str = "cubecl::compilation";

/// Reason why kernels cannot be cached.
#[derive(thiserror::Error, Debug)]
pub enum KernelCacheError {
    /// CubeCL was used before; it reads its configuration only once.
    #[error("CubeCL has been started: keep kernels before the first tensor is made")]
    Started,
    /// The folder cannot be created.
    #[error("the folder {} cannot be made: {error}", folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// Error of the operating system.
        error: std::io::Error,
    },
}

/// Returns the folder `nvfp4` in the user's cache folder (`$XDG_CACHE_HOME`, or `~/.cache`).
pub fn default_folder() -> PathBuf {
    CacheConfig::Global.root().with_file_name("nvfp4")
}

/// Caches compiled kernels in `folder`. If `folder` is `None`, only reports each compiled kernel to
/// the crate `log`. Call it before anything else uses CubeCL, that is, before the first device is
/// opened.
///
/// Returns the cache file, or `None` if kernels are not cached: without a `folder`, or without a
/// CUDA driver.
///
/// The rest of CubeCL's configuration is unchanged: it is read from `cubecl.toml` or `burn.toml` in
/// the current folder or above it, and from the environment. If that file enables the store itself
/// (`compilation.cache`), its location and name are kept, too.
///
/// # Errors
/// Returns an error if CubeCL is in use already, or `folder` cannot be created.
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

/// Enables the store in `folder`. Returns true if kernels are cached.
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

/// Returns the file name without its extension: the version of this crate and that of the driver.
fn name(driver: i32) -> String {
    let mut name = format!("kernels-{}-cuda{driver}", env!("CARGO_PKG_VERSION"));
    let no_build_id = cubecl::hash::StableHasher::hash_one(&None::<&'static [u8]>);
    if cubecl_server::compiler::build_id_hash() == no_build_id {
        // The linker left no build id, which CubeCL uses to distinguish builds of a program.
        name += &format!("-{:x}", program());
    }
    name
}

/// Returns the version of the CUDA driver, such as 13000.
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

/// Returns a number that identifies this program's executable, from its length and modification
/// time.
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
