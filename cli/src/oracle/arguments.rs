//! The options of the checks.

use std::path::PathBuf;

use clap::Args;

#[derive(Args)]
pub(super) struct Tcgen05 {
    #[command(flatten)]
    pub options: CheckOptions,
}

#[derive(Args)]
pub(super) struct All {
    #[command(flatten)]
    pub options: CheckOptions,
    /// The folder with the sources of nvfp4, whose tests and benchmarks run
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    pub source: PathBuf,
}

/// What all runs of checks have.
#[derive(Args)]
pub(super) struct CheckOptions {
    /// Check this device: cpu or cuda:N [default: cuda:0 if there is one, else cpu]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// Write the report to this file
    #[arg(long, value_name = "FILE", default_value = "nvfp4-oracle.json")]
    pub report: PathBuf,
    /// Run only the check of this name; may be given several times
    #[arg(long, value_name = "NAME")]
    pub only: Vec<String>,
    /// Give each check this many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    pub timeout: u64,
}

#[derive(Args)]
pub(super) struct OneCheck {
    /// The name of the check
    pub name: String,
    /// The device: cpu or cuda:N
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
}

#[cfg(not(any(feature = "cpu", feature = "cuda")))]
mod without_kernels {
    use anyhow::{Result, bail};

    use super::{All, CheckOptions, OneCheck, Tcgen05};

    /// The device that was asked for, in a build that can check none.
    fn refuse(device: Option<&str>) -> Result<()> {
        bail!(
            "device is {}, but this build has no CubeCL runtime: build with --features cuda (or \
             cpu)",
            device.unwrap_or("not given")
        )
    }

    impl CheckOptions {
        fn refuse(&self) -> Result<()> {
            let Self {
                device,
                report: _,
                only: _,
                timeout: _,
            } = self;
            refuse(device.as_deref())
        }
    }

    impl Tcgen05 {
        pub(in super::super) fn run(self) -> Result<()> {
            self.options.refuse()
        }
    }

    impl All {
        pub(in super::super) fn run(self) -> Result<()> {
            let Self { options, source: _ } = self;
            options.refuse()
        }
    }

    impl OneCheck {
        pub(in super::super) fn run(self) -> Result<()> {
            let Self { name: _, device } = self;
            refuse(device.as_deref())
        }
    }
}
