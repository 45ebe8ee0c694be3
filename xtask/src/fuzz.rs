//! `cargo xtask fuzz`: runs the fuzz targets on a stable toolchain.
//!
//! Runs a test of `nvfp4-lm`, whose binary `cargo xtask test` has already built.

use anyhow::{Result, ensure};

use crate::workspace::{self, FEATURES};

/// Options of `cargo xtask fuzz`.
#[derive(clap::Args)]
pub struct Args {
    /// Run for this many seconds, shared by all targets
    #[arg(long, value_name = "N", default_value_t = 60)]
    seconds: u64,
    /// Run only this target, a folder of fuzz/seeds [default: all targets]
    #[arg(long, value_name = "NAME")]
    target: Option<String>,
    /// Seed the mutations
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

impl Args {
    /// Returns the options for all targets, together for `seconds`.
    pub fn all(seconds: u64) -> Self {
        Self {
            seconds,
            target: None,
            seed: 0,
        }
    }
}

/// Calls every parser with mutated seeds. Fails if one panics, or uses more memory than its input
/// justifies; the input is then written to the folder of temporary files.
pub fn run(args: &Args) -> Result<()> {
    ensure!(args.seconds > 0, "seconds is 0, but must be positive");
    if let Some(target) = &args.target {
        let folder = workspace::root().join("fuzz/seeds").join(target);
        ensure!(
            folder.is_dir(),
            "target is {target:?}, but the targets are the folders of fuzz/seeds"
        );
    }
    let mut command = workspace::cargo();
    command
        // All libraries, as `cargo xtask test` built them: one package alone has other features.
        .args(["test", "--workspace", "--lib", "--quiet"])
        .args(["--features", FEATURES, "--", "--nocapture", "--exact"])
        .arg("fuzz::tests::parsers_survive_changed_seeds")
        .env("NVFP4_FUZZ_SECONDS", args.seconds.to_string())
        .env("NVFP4_FUZZ_SEED", args.seed.to_string())
        // The backtrace of a panic that a parser converts to an error would count as its memory.
        .env("RUST_BACKTRACE", "0");
    if let Some(target) = &args.target {
        command.env("NVFP4_FUZZ_TARGET", target);
    }
    workspace::spawn(&mut command)
}
