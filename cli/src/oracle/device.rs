//! The device that is asked.

use anyhow::{Result, anyhow, bail};
use burn::backend::DispatchDevice;
use nvfp4::kernels::cubecl::client::Client;

use crate::device::{DeviceName, cuda_count, hardware};

/// A device with kernels.
pub(super) struct TestedDevice {
    /// Its name on the command line.
    pub name: DeviceName,
    /// What queues kernels on it.
    pub client: Client,
    /// The hardware's own name.
    pub hardware: String,
}

impl TestedDevice {
    /// The device of this name, or the first GPU, or the CPU.
    pub fn open(asked: Option<&str>) -> Result<Self> {
        let name: DeviceName = match asked {
            Some(name) => name
                .parse()
                .map_err(|error| anyhow!("device is {name:?}, but {error}"))?,
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
