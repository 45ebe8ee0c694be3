//! Devices by name.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use anyhow::{Result, anyhow, bail};
use burn::tensor::{Device, FloatDType};
use clap::ValueEnum;
use clap::builder::PossibleValue;
use serde::{Deserialize, Serialize};

/// Name of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) enum DeviceName {
    /// Burn's pure-Rust CPU backend.
    Flex,
    /// CubeCL's CPU runtime.
    Cpu,
    /// The NVIDIA GPU with this index.
    Cuda(usize),
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flex => f.write_str("flex"),
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "flex" => Ok(Self::Flex),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            _ => text
                .strip_prefix("cuda:")
                .and_then(|index| index.parse().ok())
                .map(Self::Cuda)
                .ok_or_else(|| "a device is flex, cpu, or cuda:N with the number of a GPU".into()),
        }
    }
}

impl From<DeviceName> for String {
    fn from(name: DeviceName) -> Self {
        name.to_string()
    }
}

impl TryFrom<String> for DeviceName {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl DeviceName {
    /// Returns the values that `--help` lists.
    pub(crate) fn values() -> Vec<PossibleValue> {
        let flex = PossibleValue::new("flex").help("Burn's pure-Rust CPU backend");
        [vec![flex], Self::values_with_kernels()].concat()
    }

    /// Returns the values of options that need a device with kernels.
    pub(crate) fn values_with_kernels() -> Vec<PossibleValue> {
        vec![
            PossibleValue::new("cpu").help("CubeCL's CPU runtime, for checking kernels"),
            PossibleValue::new("cuda:N").help("The NVIDIA GPU with index N"),
        ]
    }

    /// Parses `device`, which the configuration at `path` names.
    ///
    /// # Errors
    /// Returns an error if no such kind of device exists.
    pub(crate) fn of_config(path: &Path, device: &str) -> Result<Self> {
        let parsed = device.parse();
        parsed.map_err(|error| anyhow!("device in {} is {device:?}, but {error}", path.display()))
    }

    /// Returns the first GPU if there is one, else the CPU.
    pub(crate) fn best() -> Result<Self> {
        if cuda_count() > 0 {
            return Ok(Self::Cuda(0));
        }
        if cfg!(feature = "flex") {
            Ok(Self::Flex)
        } else if cfg!(feature = "cpu") {
            Ok(Self::Cpu)
        } else if cfg!(feature = "cuda") {
            bail!(
                "there is no CUDA device, and nothing else was compiled in: build with --features \
                 flex to train on the CPU"
            )
        } else {
            bail!("no backend was compiled in: build with --features flex, cpu or cuda")
        }
    }

    /// Opens the device of this name. Fails if support for it was not compiled in or it does not
    /// exist.
    pub(crate) fn open(self) -> Result<Device> {
        match self {
            Self::Flex => {
                #[cfg(feature = "flex")]
                return Ok(Device::flex());
                #[cfg(not(feature = "flex"))]
                bail!("device flex was not compiled in: build with --features flex")
            }
            Self::Cpu => {
                #[cfg(feature = "cpu")]
                return Ok(Device::cpu());
                #[cfg(not(feature = "cpu"))]
                bail!(
                    "device cpu, CubeCL's CPU runtime, was not compiled in: device flex trains on \
                     the CPU, and --features cpu compiles this one in"
                )
            }
            Self::Cuda(index) => {
                if !cfg!(feature = "cuda") {
                    bail!("device cuda:{index} was not compiled in: build with --features cuda");
                }
                let count = cuda_count();
                if index >= count {
                    bail!(
                        "device cuda:{index} does not exist: {}",
                        match count {
                            0 => "this machine has no NVIDIA driver, or no NVIDIA GPU".into(),
                            1 => "the only GPU is cuda:0".into(),
                            _ => format!("the GPUs are cuda:0 to cuda:{}", count - 1),
                        }
                    );
                }
                #[cfg(feature = "cuda")]
                return Ok(Device::cuda(index));
                #[cfg(not(feature = "cuda"))]
                unreachable!("there are no GPUs without the feature")
            }
        }
    }
}

/// Type of weights and activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ComputeType {
    F32,
    Bf16,
}

impl ComputeType {
    /// Returns the requested type, or the best type that the device supports.
    pub(crate) fn or_of(asked: Option<Self>, device: DeviceName) -> FloatDType {
        match (asked, device) {
            (Some(Self::Bf16), _) | (None, DeviceName::Cuda(_)) => FloatDType::BF16,
            (Some(Self::F32), _) | (None, _) => FloatDType::F32,
        }
    }
}

/// Installs the decorator in this process. Call it before the first tensor is made.
pub(crate) fn install_decorator() -> Result<()> {
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    nvfp4::decorate::install()?;
    Ok(())
}

/// Number of NVIDIA GPUs that this build can use.
pub(crate) fn cuda_count() -> usize {
    #[cfg(feature = "cuda")]
    return Device::enumerate(burn::tensor::DeviceType::Cuda).len();
    #[cfg(not(feature = "cuda"))]
    0
}

/// Returns the hardware's name, if it has one.
pub(crate) fn hardware(device: &Device) -> Option<String> {
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    return device
        .as_dispatch()
        .identity()
        .map(|identity| identity.name);
    #[cfg(not(any(feature = "cpu", feature = "cuda")))]
    {
        let _ = device;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for name in ["flex", "cpu", "cuda:0", "cuda:12"] {
            assert_eq!(name.parse::<DeviceName>().unwrap().to_string(), name);
        }
        assert_eq!("cuda".parse(), Ok(DeviceName::Cuda(0)));
        for name in ["", "gpu", "cuda:", "cuda:x", "CPU", "cuda:-1"] {
            assert!(
                name.parse::<DeviceName>().unwrap_err().contains("cuda:N"),
                "{name}"
            );
        }
    }
}
