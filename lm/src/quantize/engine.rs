//! Where weights are quantized: on the host, or by kernels on a GPU. Both give the same bytes.

use anyhow::Result;
use burn::tensor::Device;
use nvfp4_formats::ptq::{self, BlockQuantizer};
#[cfg(any(feature = "cpu", feature = "cuda"))]
use nvfp4_kernels::{cubecl::prelude::Client, ptq as kernels};

/// Error text of GPTQ without a calibration.
pub(super) const NO_MOMENTS: &str = "GPTQ needs calibration: the second moments of the input";

/// Executes the arithmetic of quantization.
#[derive(Clone, Default)]
pub enum Engine {
    /// Functions of [`nvfp4_formats::ptq`], on all cores.
    #[default]
    Host,
    /// Kernels on a CubeCL device.
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    Device(Client),
}

impl Engine {
    /// Returns the engine of `device`: kernels on a GPU, otherwise the host.
    pub fn of(device: &Device) -> Self {
        #[cfg(any(feature = "cpu", feature = "cuda"))]
        if let Some(client) = crate::memory::client(&device.clone().without_autodiff())
            && client.name() != "cpu"
        {
            return Self::Device(client);
        }
        let _ = device;
        Self::Host
    }

    /// Returns the codes and scale bytes of `values`, with each block quantized independently; see
    /// [`ptq::round_rows`].
    pub(super) fn round_rows(
        &self,
        values: &[f32],
        quantizer: &BlockQuantizer,
        weights: &[f32],
    ) -> Result<(Vec<u8>, Vec<u8>)> {
        match self {
            Self::Host => Ok(ptq::round_rows(values, quantizer, weights)),
            #[cfg(any(feature = "cpu", feature = "cuda"))]
            Self::Device(client) => Ok(kernels::round_rows(client, values, quantizer, weights)?),
        }
    }
}

/// Factor of the inverse second moments of an input, where these were summed.
pub(super) enum Factor {
    Host(ptq::InverseFactor),
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    Device(Client, kernels::InverseFactor),
}

impl Factor {
    /// Returns the codes and scale bytes of `values` by GPTQ; see [`ptq::gptq()`].
    pub fn gptq(
        &self,
        values: &[f32],
        quantizer: &BlockQuantizer,
        weights: &[f32],
    ) -> Result<(Vec<u8>, Vec<u8>)> {
        match self {
            Self::Host(factor) => Ok(ptq::gptq(values, factor, quantizer, weights)),
            #[cfg(any(feature = "cpu", feature = "cuda"))]
            Self::Device(client, factor) => {
                let quantized = kernels::gptq(client, values, factor, quantizer, weights);
                Ok(quantized?)
            }
        }
    }
}
