//! Capabilities of a device, and the backends that they select.

use std::any::TypeId;
use std::sync::{Mutex, PoisonError};

use cubecl::{
    client::Client,
    device::DeviceId,
    ir::{
        ElemType, FloatKind as CubeFloat,
        features::{MmaConfig, ScaledMmaConfig},
    },
};

pub use crate::cube::codec::Conversion;
use crate::environment::{Environment, GemmChoice};

/// Properties of a device that decide which code path an operation takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// Name of the device, as the runtime reports it.
    pub device: String,
    /// CubeCL runtime, such as "cpu" or "cuda".
    pub runtime: &'static str,
    /// CUDA compute capability as major * 10 + minor; `None` if the device is not a CUDA GPU.
    pub compute_capability: Option<u32>,
    /// Conversion of scaled values to codes.
    pub conversion: Conversion,
    /// GEMM backend for packed operands.
    pub gemm: GemmBackend,
}

/// Backend that multiplies packed operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GemmBackend {
    /// Compute capability 9.0: `wgmma` on operands dequantized to bf16. At small M, a kernel that
    /// dequantizes the packed weight in registers.
    Sm90Wgmma,
    /// Compute capability 10.0 and 10.3: FP4 tensor cores through cuBLASLt. Grouped, per-row and
    /// MXFP8 GEMMs run on the kernel of [`Sm100Tcgen05`](Self::Sm100Tcgen05) if its self-check
    /// passes. Never run on hardware.
    CublasLt,
    /// Compute capability 10.0 and 10.3, if the environment variable `NVFP4_GEMM=tcgen05` or a
    /// request asks for it: FP4 and FP8 tensor cores through a kernel of this crate. Requests that
    /// the kernel does not support fall back to [`CublasLt`](Self::CublasLt). Never run on
    /// hardware.
    Sm100Tcgen05,
    /// Compute capability 12.0 and 12.1: block-scaled matrix instructions on codes and block scales
    /// (never run on hardware). At small M, a kernel that dequantizes the packed weight in
    /// registers.
    Sm120BlockScaled,
    /// Tiles dequantized in shared memory and multiplied by 16x16x16 matrix instructions. At small
    /// M, a dedicated kernel for packed weights, if the device supports it.
    Cmma,
    /// One unit per output element.
    Scalar,
}

impl Capabilities {
    /// Returns the capabilities of the device behind `client`. A process asks each device once.
    pub fn of(client: &Client) -> &'static Self {
        type Device = (TypeId, DeviceId);
        static KNOWN: Mutex<Vec<(Device, &Capabilities)>> = Mutex::new(Vec::new());
        let id = client.service_id();
        let device = (id.service, id.device);
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, found)) = known.iter().find(|(other, _)| *other == device) {
            return found;
        }
        // As long as the process, and one for each device.
        let found: &'static Self = Box::leak(Box::new(Self::ask(client)));
        known.push((device, found));
        found
    }

    fn ask(client: &Client) -> Self {
        let properties = client.properties();
        let runtime = client.name();
        let is_cuda = runtime == "cuda";
        let compute_capability = if is_cuda {
            compute_capability(&properties.identity.fingerprint)
        } else {
            None
        };
        let matrix = MmaConfig {
            a_type: ElemType::Float(CubeFloat::BF16),
            b_type: ElemType::Float(CubeFloat::BF16),
            cd_type: ElemType::Float(CubeFloat::F32),
            m: 16,
            n: 16,
            k: 16,
        };
        let has_matrix = properties.features.matmul.cmma.contains(&matrix)
            && properties.hardware.plane_size_min == 32
            && properties.hardware.plane_size_max == 32;
        let block_scaled = ScaledMmaConfig {
            a_type: ElemType::Float(CubeFloat::E2M1x2),
            b_type: ElemType::Float(CubeFloat::E2M1x2),
            cd_type: ElemType::Float(CubeFloat::F32),
            scales_type: ElemType::Float(CubeFloat::E4M3),
            m: 16,
            n: 8,
            k: 64,
            scales_factor: 4,
        };
        let has_block_scaled = properties
            .features
            .matmul
            .scaled_mma
            .contains(&block_scaled);
        Self {
            device: properties.identity.name.clone(),
            runtime,
            compute_capability,
            conversion: conversion(compute_capability),
            gemm: with_tcgen05(
                gemm_backend(has_matrix, has_block_scaled, compute_capability),
                Environment::get().gemm == GemmChoice::Tcgen05,
            ),
        }
    }
}

/// Returns the GEMM backend of a device with or without 16x16x16 bf16 matrix instructions (in
/// planes of 32) and block-scaled ones.
fn gemm_backend(
    has_matrix: bool,
    has_block_scaled: bool,
    compute_capability: Option<u32>,
) -> GemmBackend {
    match compute_capability {
        Some(90) if has_matrix => GemmBackend::Sm90Wgmma,
        Some(100 | 103) if has_matrix => GemmBackend::CublasLt,
        Some(120..130) if has_matrix && has_block_scaled => GemmBackend::Sm120BlockScaled,
        _ if has_matrix => GemmBackend::Cmma,
        _ => GemmBackend::Scalar,
    }
}

/// Replaces [`GemmBackend::CublasLt`] by [`GemmBackend::Sm100Tcgen05`] if that is `asked` for.
fn with_tcgen05(backend: GemmBackend, asked: bool) -> GemmBackend {
    match backend {
        GemmBackend::CublasLt if asked => GemmBackend::Sm100Tcgen05,
        backend => backend,
    }
}

fn conversion(compute_capability: Option<u32>) -> Conversion {
    let conversion = match compute_capability {
        Some(100 | 103) => Conversion::Hardware,
        Some(101 | 110 | 120 | 121) => Conversion::HardwareNearest,
        Some(89 | 90) => Conversion::Sm89,
        Some(80..) => Conversion::Sm80,
        _ => Conversion::Software,
    };
    conversion.or_emulated()
}

/// Returns [`Capabilities::conversion`] of the device of `client`.
pub(crate) fn conversion_of(client: &Client) -> Conversion {
    Capabilities::of(client).conversion
}

/// True if a kernel can start before the previous one has ended (programmatic dependent launch):
/// compute capability 9.0 and later.
pub(crate) fn overlaps_kernels(client: &Client) -> bool {
    Capabilities::of(client).compute_capability >= Some(90)
}

/// Parses the number after `sm` in CubeCL's name of the compilation target, such as `ptx_sm90`.
fn compute_capability(fingerprint: &str) -> Option<u32> {
    let (_, rest) = fingerprint.rsplit_once("sm")?;
    let digits: String = rest
        .trim_start_matches('_')
        .chars()
        .take_while(char::is_ascii_digit)
        .collect();
    digits.parse().ok()
}

pub(crate) fn is_cpu(client: &Client) -> bool {
    client.properties().hardware.num_cpu_cores.is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_devices() {
        let path =
            |capability| gemm_backend(true, (120..130).contains(&capability), Some(capability));
        assert_eq!(path(90), GemmBackend::Sm90Wgmma);
        assert_eq!(path(120), GemmBackend::Sm120BlockScaled);
        assert_eq!(path(121), GemmBackend::Sm120BlockScaled);
        assert_eq!(path(100), GemmBackend::CublasLt);
        assert_eq!(path(103), GemmBackend::CublasLt);
        for capability in [80, 86, 89, 110] {
            assert_eq!(path(capability), GemmBackend::Cmma, "{capability}");
        }
        // CubeCL's LLVM path has matrix instructions, but no block-scaled ones.
        let llvm = gemm_backend(true, false, Some(120));
        assert_eq!(llvm, GemmBackend::Cmma);
        assert_eq!(gemm_backend(false, false, Some(75)), GemmBackend::Scalar);
        assert_eq!(gemm_backend(false, false, None), GemmBackend::Scalar);
    }

    /// The `tcgen05` kernel is selected if it is asked for and the GPU has it.
    #[test]
    fn tcgen05_is_asked_for() {
        let library = GemmBackend::CublasLt;
        assert_eq!(with_tcgen05(library, false), library);
        assert_eq!(with_tcgen05(library, true), GemmBackend::Sm100Tcgen05);
        for other in [GemmBackend::Sm90Wgmma, GemmBackend::Sm120BlockScaled] {
            assert_eq!(with_tcgen05(other, true), other);
        }
    }
}
