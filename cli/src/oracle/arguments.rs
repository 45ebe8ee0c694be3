//! The options of the checks.

// A build without kernels reads only the device.
#![cfg_attr(not(any(feature = "cpu", feature = "cuda")), allow(dead_code))]

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
    /// Folder with the sources of nvfp4, whose tests and benchmarks run
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    pub source: PathBuf,
}

/// Options shared by all check runs.
#[derive(Args)]
pub(super) struct CheckOptions {
    /// Check this device: cpu or cuda:N [default: cuda:0 if there is one, else cpu]
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
    /// Write the report to this file
    #[arg(long, value_name = "FILE", default_value = "nvfp4-oracle.json")]
    pub report: PathBuf,
    /// Run only the check with this name; may be given several times
    #[arg(long, value_name = "NAME")]
    pub only: Vec<String>,
    /// Limit each check to this many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    pub timeout: u64,
}

#[derive(Args)]
pub(super) struct OneCheck {
    /// Name of the check
    pub name: String,
    /// Device: cpu or cuda:N
    #[arg(long, value_name = "DEVICE")]
    pub device: Option<String>,
}

/// Commands of a build without kernels: they accept the options and check nothing.
#[cfg(not(any(feature = "cpu", feature = "cuda")))]
mod without_kernels {
    use anyhow::{Result, bail};

    use super::{All, OneCheck, Tcgen05};

    fn refuse(device: Option<&str>) -> Result<()> {
        bail!(
            "device is {}, but this build has no CubeCL runtime: build with --features cuda (or \
             cpu)",
            device.unwrap_or("not given")
        )
    }

    impl Tcgen05 {
        pub(in super::super) fn run(self) -> Result<()> {
            refuse(self.options.device.as_deref())
        }
    }

    impl All {
        pub(in super::super) fn run(self) -> Result<()> {
            refuse(self.options.device.as_deref())
        }
    }

    impl OneCheck {
        pub(in super::super) fn run(self) -> Result<()> {
            refuse(self.device.as_deref())
        }
    }
}
