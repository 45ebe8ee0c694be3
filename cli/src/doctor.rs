//! `nvfp4 doctor`: lists devices, their element types, and the kernel of each operation.

use std::str::FromStr;

use anyhow::{Result, bail};
use burn::tensor::{Device, FloatDType};
use nvfp4::formats::describe::CodePath;

use crate::device::{DeviceName, cuda_count, hardware};
use crate::dispatch;
use crate::wrap::wrapped;

/// Width of the report in characters.
const WIDTH: usize = 100;

/// Options of `nvfp4 doctor`.
#[derive(clap::Args)]
pub(crate) struct Doctor {
    /// Print why each operation uses its kernel
    #[arg(long)]
    why: bool,
    /// Print the kernel of a GEMM of this shape on each device, for example 64,8192,8192
    #[arg(long, value_name = "M,N,K")]
    shape: Option<Shape>,
    /// Divide the rows (M) of the shape into this many groups (experts) [default: 1]
    #[arg(long, value_name = "COUNT", default_value_t = 1, hide_default_value = true,
          requires = "shape", value_parser = clap::value_parser!(u32).range(1..))]
    groups: u32,
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
        run(&self)
    }
}

fn run(options: &Doctor) -> Result<()> {
    println!("nvfp4 {}", env!("CARGO_PKG_VERSION"));
    let compiled: Vec<&str> = [
        ("flex", cfg!(feature = "flex")),
        ("cpu", cfg!(feature = "cpu")),
        ("cuda", cfg!(feature = "cuda")),
    ]
    .into_iter()
    .filter_map(|(name, on)| on.then_some(name))
    .collect();
    let missing: Vec<&str> = ["flex", "cpu", "cuda"]
        .into_iter()
        .filter(|name| !compiled.contains(name))
        .collect();
    println!("backends compiled in: {}", list(&compiled));
    if !missing.is_empty() {
        println!(
            "not compiled in: {} (build with --features {})",
            list(&missing),
            missing.join(",")
        );
    }
    match DeviceName::best() {
        Ok(best) => println!("default device: {best}"),
        Err(error) => println!("no default device: {error}"),
    }
    if cfg!(feature = "cuda") && cuda_count() == 0 {
        println!("no CUDA device: there is no NVIDIA driver, or it reports no GPU");
    }

    if cfg!(feature = "flex") {
        show(DeviceName::Flex, flex, options.why)?;
        if let Some(Shape { m, n, k }) = options.shape {
            println!("  M {m}, N {n}, K {k}: as every shape");
        }
    }
    if cfg!(feature = "cpu") {
        show(DeviceName::Cpu, cube, options.why)?;
        show_shape(DeviceName::Cpu, options)?;
    }
    for index in 0..cuda_count() {
        show(DeviceName::Cuda(index), cube, options.why)?;
        show_shape(DeviceName::Cuda(index), options)?;
    }
    Ok(())
}

fn list(names: &[&str]) -> String {
    if names.is_empty() {
        "none".into()
    } else {
        names.join(", ")
    }
}

fn show(name: DeviceName, rows: fn(&Device) -> Vec<CodePath>, why: bool) -> Result<()> {
    let device = name.open()?;
    println!("\n{name}");
    match name {
        DeviceName::Flex => {
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            println!("  Burn's pure-Rust CPU backend, {threads} threads");
        }
        DeviceName::Cpu => {
            println!("  CubeCL's CPU runtime; for checking kernels, slow to train on")
        }
        DeviceName::Cuda(_) => println!("  NVIDIA GPU, CubeCL's CUDA runtime"),
    }
    if let Some(hardware) = hardware(&device) {
        println!("  hardware: {hardware}");
    }
    #[cfg(any(feature = "cpu", feature = "cuda"))]
    if let Some(identity) = device.as_dispatch().identity() {
        let target = format!("kernels are compiled for: {}", identity.fingerprint);
        wrapped(&target, WIDTH - 2).for_each(|line| println!("  {line}"));
    }
    let types: Vec<&str> = [
        ("f32", FloatDType::F32),
        ("bf16", FloatDType::BF16),
        ("f16", FloatDType::F16),
    ]
    .into_iter()
    .filter_map(|(name, dtype)| device.supports_dtype(dtype).then_some(name))
    .collect();
    println!("  types: {}", list(&types));
    if name == DeviceName::Cpu {
        println!("  train in f32: Burn's own bf16 operations do not link on this runtime");
    }
    for row in rows(&device) {
        show_row(&row, why);
    }
    Ok(())
}

/// Prints one operation of the table, and the reason for its kernel if `why` is set.
fn show_row(row: &CodePath, why: bool) {
    println!("  {row}");
    if why {
        let reason = format!("because {}", row.reason);
        wrapped(&reason, WIDTH - 31).for_each(|line| println!("{:31}{line}", ""));
    }
}

/// Returns the rows of Flex.
fn flex(_device: &Device) -> Vec<CodePath> {
    dispatch::flex()
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

/// Prints which kernels the requested shape uses on a CubeCL device.
#[cfg(any(feature = "cpu", feature = "cuda"))]
fn show_shape(name: DeviceName, options: &Doctor) -> Result<()> {
    use burn::backend::DispatchDevice;
    use nvfp4::kernels::gemm;

    let Some(Shape { m, n, k }) = options.shape else {
        return Ok(());
    };
    let device = name.open()?;
    let DispatchDevice::Cube(device) = device.as_dispatch() else {
        return Ok(());
    };
    let groups = options.groups as usize;
    println!("  M {m}, N {n}, K {k}, {groups} group(s)");
    for row in gemm::describe(&device.client(), (m, n, k), groups) {
        show_row(&row, options.why);
    }
    Ok(())
}

/// Without CubeCL, no device can show a shape.
#[cfg(not(any(feature = "cpu", feature = "cuda")))]
fn show_shape(_name: DeviceName, _options: &Doctor) -> Result<()> {
    Ok(())
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
