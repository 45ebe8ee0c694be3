//! The device under test.

use anyhow::{Result, bail};
use burn::backend::DispatchDevice;
use nvfp4::kernels::cubecl::client::Client;

use crate::device::{DeviceName, cuda_count, hardware};

/// A device with kernels.
pub(super) struct TestedDevice {
    /// Name on the command line.
    pub name: DeviceName,
    /// CubeCL client of the device.
    pub client: Client,
    /// Name of the hardware.
    pub hardware: String,
}

impl TestedDevice {
    /// Opens the device of this name, else the first GPU, else the CPU.
    pub fn open(asked: Option<DeviceName>) -> Result<Self> {
        let name = match asked {
            Some(name) => name,
            None if cuda_count() > 0 => DeviceName::Cuda(0),
            None => DeviceName::Cpu,
        };
        let device = name.open()?;
        let DispatchDevice::Cube(cube) = device.as_dispatch() else {
            bail!("device is {name}, but it must be cpu or cuda:N: Flex has no kernels");
        };
        Ok(Self {
            name,
            client: cube.client(),
            hardware: hardware(&device).unwrap_or_else(|| name.to_string()),
        })
    }
}
