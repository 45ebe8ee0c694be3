//! Devices that decorated layers run on.

use burn_core::backend::DispatchDevice;
use burn_core::tensor::Device;
use burn_cubecl::CubeDevice;
use nvfp4_formats::Nvfp4Error;

use crate::validate;

/// Returns an error if decorated layers cannot run on `device`. They need Burn's fusion over a
/// CubeCL runtime that the kernels support.
pub(super) fn check_device(argument: &'static str, device: &Device) -> Result<(), Nvfp4Error> {
    fn is_cube(device: &DispatchDevice) -> bool {
        match device {
            DispatchDevice::Autodiff(device) => is_cube(device),
            DispatchDevice::Cube(CubeDevice::Cpu(_) | CubeDevice::Cuda(_)) => true,
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }
    validate::device(argument, device)?;
    if is_cube(device.as_dispatch()) {
        Ok(())
    } else {
        Err(Nvfp4Error::Device {
            argument,
            found: validate::device_name(device),
            expected: "a CubeCL CPU or CUDA device: decorated models rest on Burn's fusion \
                (Nvfp4Linear runs elsewhere too)"
                .into(),
        })
    }
}
