//! The options of the checks.

// A build without kernels reads only the device.
#![cfg_attr(not(any(feature = "cpu", feature = "cuda")), allow(dead_code))]

use std::path::PathBuf;

use clap::Args;
use clap::builder::PossibleValue;

use crate::device::DeviceName;
use crate::options::listed::listed;

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
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub source: PathBuf,
}

/// Device under test.
#[derive(Args)]
#[group(skip)]
pub(super) struct TestedDeviceOption {
    /// Run on this device [default: cuda:0 if there is one, else cpu]
    #[arg(
        long,
        value_name = "DEVICE",
        value_parser = listed::<DeviceName>(DeviceName::values_with_kernels)
    )]
    pub device: Option<DeviceName>,
}

/// Returns the names of the checks.
fn checks() -> Vec<PossibleValue> {
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    let names = nvfp4::kernels::bring_up::Check::ALL.map(|check| check.name());
    #[cfg(not(any(feature = "cpu", feature = "cuda")))]
    let names: [&str; 0] = [];
    names.into_iter().map(PossibleValue::new).collect()
}

/// Options shared by all check runs.
#[derive(Args)]
pub(super) struct CheckOptions {
    #[command(flatten)]
    pub device: TestedDeviceOption,
    /// Write the output to this file: the report, as JSON
    #[arg(long, value_name = "FILE", default_value = "nvfp4-oracle.json")]
    pub out: PathBuf,
    /// Run only the check with this name; may be given several times
    #[arg(long, value_name = "CHECK", value_parser = listed::<String>(checks))]
    pub only: Vec<String>,
    /// Limit each check to this many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    pub timeout: u64,
}

#[derive(Args)]
pub(super) struct OneCheck {
    /// Name of the check
    #[arg(value_name = "CHECK", value_parser = listed::<String>(checks))]
    pub name: String,
    #[command(flatten)]
    pub device: TestedDeviceOption,
}

/// Commands of a build without kernels: they accept the options and check nothing.
#[cfg(not(any(feature = "cpu", feature = "cuda")))]
mod without_kernels {
    use anyhow::{Result, bail};

    use super::{All, OneCheck, Tcgen05, TestedDeviceOption};

    impl TestedDeviceOption {
        pub(in super::super) fn refuse(&self) -> Result<()> {
            let device = self
                .device
                .map_or("not given".into(), |device| device.to_string());
            bail!(
                "device is {device}, but this build has no CubeCL runtime: build with --features \
                 cuda (or cpu)"
            )
        }
    }

    impl Tcgen05 {
        pub(in super::super) fn run(self) -> Result<()> {
            self.options.device.refuse()
        }
    }

    impl All {
        pub(in super::super) fn run(self) -> Result<()> {
            self.options.device.refuse()
        }
    }

    impl OneCheck {
        pub(in super::super) fn run(self) -> Result<()> {
            self.device.refuse()
        }
    }
}
