//! `nvfp4 doctor`: lists devices, their element types, and the kernel of each operation.

use std::str::FromStr;

use anyhow::{Result, bail};
use burn::tensor::{Device, FloatDType};
use nvfp4::formats::describe::CodePath;
use serde::{Serialize, Serializer};
use serde_json::json;

use crate::device::{DeviceName, cuda_count, hardware};
use crate::dispatch;
use crate::options::shared::JsonOption;
use crate::wrap::wrapped;

/// Width of the report in characters.
const WIDTH: usize = 100;

/// Options of `nvfp4 doctor`.
#[derive(clap::Args)]
pub(crate) struct Doctor {
    /// Print why each operation uses its kernel; --json includes it
    #[arg(long)]
    why: bool,
    /// Print the kernel of a GEMM of this shape on each device, for example 64,8192,8192
    #[arg(long, value_name = "M,N,K")]
    shape: Option<Shape>,
    /// Divide the rows (M) of the shape into this many groups (experts) [default: 1]
    #[arg(long, value_name = "N", default_value_t = 1, hide_default_value = true,
          requires = "shape", value_parser = clap::value_parser!(u32).range(1..))]
    groups: u32,
    #[command(flatten)]
    form: JsonOption,
}

/// Shape of a GEMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    m: usize,
    n: usize,
    k: usize,
}

impl FromStr for Shape {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let sizes: Vec<usize> = text
            .split(',')
            .map(|size| size.trim().parse())
            .collect::<Result<_, _>>()?;
        match sizes[..] {
            [m, n, k] if m > 0 && n > 0 && k > 0 => Ok(Self { m, n, k }),
            _ => bail!("`{text}` is not three positive sizes M,N,K"),
        }
    }
}

impl Doctor {
    /// Prints the report.
    pub(crate) fn run(self) -> Result<()> {
        let report = Report::new(&self)?;
        self.form.print(&report, |report| report.lines(self.why))
    }
}

/// Devices of this machine, and the kernels that they run.
#[derive(Serialize)]
struct Report {
    version: &'static str,
    /// Backends that were compiled in.
    backends: Vec<&'static str>,
    /// Backends that were not compiled in.
    missing_backends: Vec<&'static str>,
    default_device: Option<DeviceName>,
    /// Reason for which there is no default device.
    #[serde(skip_serializing_if = "Option::is_none")]
    no_default_device: Option<String>,
    devices: Vec<AboutDevice>,
}

/// One device.
#[derive(Serialize)]
struct AboutDevice {
    device: DeviceName,
    about: String,
    /// Name of the hardware.
    hardware: Option<String>,
    /// Properties that kernels are compiled for.
    target: Option<String>,
    /// Types of elements.
    types: Vec<&'static str>,
    #[serde(serialize_with = "serialize_rows")]
    operations: Vec<CodePath>,
    /// Kernels of the requested shape.
    #[serde(skip_serializing_if = "Option::is_none")]
    shape: Option<AboutShape>,
}

/// A GEMM of the requested shape on a device.
#[derive(Serialize)]
struct AboutShape {
    m: usize,
    n: usize,
    k: usize,
    groups: u32,
    /// Empty on Flex, which multiplies every shape by one kernel.
    #[serde(serialize_with = "serialize_rows")]
    operations: Vec<CodePath>,
}

/// Serializes the rows of the table.
fn serialize_rows<S: Serializer>(rows: &[CodePath], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(rows.iter().map(|row| {
        json!({
            "operation": row.operation,
            "backend": row.backend,
            "kernel": row.kernel,
            "reason": row.reason,
        })
    }))
}

impl Report {
    fn new(options: &Doctor) -> Result<Self> {
        let all = [
            ("flex", cfg!(feature = "flex")),
            ("cpu", cfg!(feature = "cpu")),
            ("cuda", cfg!(feature = "cuda")),
        ];
        let names = |is_there: bool| {
            let chosen = all.into_iter().filter(|(_, on)| *on == is_there);
            chosen.map(|(name, _)| name).collect()
        };
        let (default_device, no_default_device) = match DeviceName::best() {
            Ok(best) => (Some(best), None),
            Err(error) => (None, Some(error.to_string())),
        };
        let mut devices = Vec::new();
        if cfg!(feature = "flex") {
            devices.push(AboutDevice::new(DeviceName::Flex, options)?);
        }
        if cfg!(feature = "cpu") {
            devices.push(AboutDevice::new(DeviceName::Cpu, options)?);
        }
        for index in 0..cuda_count() {
            devices.push(AboutDevice::new(DeviceName::Cuda(index), options)?);
        }
        Ok(Self {
            version: env!("CARGO_PKG_VERSION"),
            backends: names(true),
            missing_backends: names(false),
            default_device,
            no_default_device,
            devices,
        })
    }

    /// Describes the devices in text. Includes the reasons for the kernels if `why` is set.
    fn lines(&self, why: bool) -> Vec<String> {
        let mut lines = vec![
            format!("nvfp4 {}", self.version),
            format!("backends compiled in: {}", list(&self.backends)),
        ];
        if !self.missing_backends.is_empty() {
            lines.push(format!(
                "not compiled in: {} (build with --features {})",
                list(&self.missing_backends),
                self.missing_backends.join(",")
            ));
        }
        if let Some(best) = self.default_device {
            lines.push(format!("default device: {best}"));
        }
        if let Some(error) = &self.no_default_device {
            lines.push(format!("no default device: {error}"));
        }
        let is_gpu = |about: &AboutDevice| matches!(about.device, DeviceName::Cuda(_));
        if cfg!(feature = "cuda") && !self.devices.iter().any(is_gpu) {
            lines
                .push("no CUDA device: there is no NVIDIA driver, or it reports no GPU".to_owned());
        }
        let devices = self.devices.iter();
        lines.extend(devices.flat_map(|about| about.lines(why)));
        lines
    }
}

fn list(names: &[&str]) -> String {
    if names.is_empty() {
        "none".into()
    } else {
        names.join(", ")
    }
}

impl AboutDevice {
    fn new(name: DeviceName, options: &Doctor) -> Result<Self> {
        let device = name.open()?;
        #[cfg(any(feature = "cpu", feature = "cuda"))]
        let identity = device.as_dispatch().identity();
        #[cfg(any(feature = "cpu", feature = "cuda"))]
        let target = identity.map(|identity| identity.fingerprint.to_string());
        #[cfg(not(any(feature = "cpu", feature = "cuda")))]
        let target = None;
        let types = [
            ("f32", FloatDType::F32),
            ("bf16", FloatDType::BF16),
            ("f16", FloatDType::F16),
        ];
        let types = types.into_iter();
        let types = types.filter_map(|(name, dtype)| device.supports_dtype(dtype).then_some(name));
        let groups = options.groups;
        Ok(Self {
            device: name,
            about: match name {
                DeviceName::Flex => {
                    let threads = std::thread::available_parallelism().map_or(1, usize::from);
                    format!("Burn's pure-Rust CPU backend, {threads} threads")
                }
                DeviceName::Cpu => {
                    "CubeCL's CPU runtime; for checking kernels, slow to train on".into()
                }
                DeviceName::Cuda(_) => "NVIDIA GPU, CubeCL's CUDA runtime".into(),
            },
            hardware: hardware(&device),
            target,
            types: types.collect(),
            operations: match name {
                DeviceName::Flex => dispatch::flex(),
                DeviceName::Cpu | DeviceName::Cuda(_) => cube(&device),
            },
            shape: options.shape.map(|shape| AboutShape {
                m: shape.m,
                n: shape.n,
                k: shape.k,
                groups,
                operations: cube_shape(&device, shape, groups),
            }),
        })
    }

    /// Describes the device in text, after an empty line.
    fn lines(&self, why: bool) -> Vec<String> {
        let mut lines = vec![
            String::new(),
            self.device.to_string(),
            format!("  {}", self.about),
        ];
        if let Some(hardware) = &self.hardware {
            lines.push(format!("  hardware: {hardware}"));
        }
        if let Some(target) = &self.target {
            let target = format!("kernels are compiled for: {target}");
            lines.extend(wrapped(&target, WIDTH - 2).map(|line| format!("  {line}")));
        }
        lines.push(format!("  types: {}", list(&self.types)));
        if self.device == DeviceName::Cpu {
            lines.push(
                "  train in f32: Burn's own bf16 operations do not link on this runtime".into(),
            );
        }
        lines.extend(describe_rows(&self.operations, why));
        if let Some(AboutShape {
            m,
            n,
            k,
            groups,
            operations,
        }) = &self.shape
        {
            lines.push(match self.device {
                DeviceName::Flex => format!("  M {m}, N {n}, K {k}: as every shape"),
                DeviceName::Cpu | DeviceName::Cuda(_) => {
                    format!("  M {m}, N {n}, K {k}, {groups} group(s)")
                }
            });
            lines.extend(describe_rows(operations, why));
        }
        lines
    }
}

/// Describes the operations of the table, and the reasons for their kernels if `why` is set.
fn describe_rows(rows: &[CodePath], why: bool) -> Vec<String> {
    let mut lines = Vec::new();
    for row in rows {
        lines.push(format!("  {row}"));
        if why {
            let reason = format!("because {}", row.reason);
            lines.extend(wrapped(&reason, WIDTH - 31).map(|line| format!("{:31}{line}", "")));
        }
    }
    lines
}

/// Returns the rows of a CubeCL device.
#[cfg(any(feature = "cpu", feature = "cuda"))]
fn cube(device: &Device) -> Vec<CodePath> {
    use burn::backend::DispatchDevice;

    let DispatchDevice::Cube(device) = device.as_dispatch() else {
        return Vec::new();
    };
    dispatch::cube(&device.client())
}

/// Returns the kernels of a GEMM of this shape on a CubeCL device; none on Flex.
#[cfg(any(feature = "cpu", feature = "cuda"))]
fn cube_shape(device: &Device, Shape { m, n, k }: Shape, groups: u32) -> Vec<CodePath> {
    use burn::backend::DispatchDevice;
    use nvfp4::kernels::gemm;

    let DispatchDevice::Cube(device) = device.as_dispatch() else {
        return Vec::new();
    };
    gemm::describe(&device.client(), (m, n, k), groups as usize)
}

/// Without CubeCL, no device has kernels of a shape.
#[cfg(not(any(feature = "cpu", feature = "cuda")))]
fn cube_shape(_device: &Device, _shape: Shape, _groups: u32) -> Vec<CodePath> {
    Vec::new()
}

/// Without CubeCL no such device can be opened.
#[cfg(not(any(feature = "cpu", feature = "cuda")))]
fn cube(_device: &Device) -> Vec<CodePath> {
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_three_sizes() {
        let shape = Shape {
            m: 64,
            n: 8192,
            k: 4096,
        };
        assert_eq!("64, 8192,4096".parse::<Shape>().unwrap(), shape);
        for wrong in ["", "64", "64,8192", "64,0,8", "64,8,8,8", "a,b,c"] {
            assert!(wrong.parse::<Shape>().is_err(), "{wrong}");
        }
    }
}
