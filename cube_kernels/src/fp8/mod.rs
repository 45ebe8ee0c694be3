//! FP8 weights for inference: E4M3 codes with one scale factor per row. See
//! [`reference::fp8_quantize_rows`](crate::reference::fp8_quantize_rows) for the format.
//!
//! [`quantize_rows`] makes such a weight, bit-identical to the oracle. [`linear`] multiplies rows
//! with it. For bf16 rows on a GPU with `mma.sync`, its kernel reads the codes once per 16 rows and
//! is bound by that: it is meant for decoding. In all other cases a portable kernel computes one
//! output element per unit.

#[cfg(feature = "proof")]
pub(crate) mod instances;
#[allow(missing_docs)] // `#[cube]` generates public items that cannot carry documentation.
mod linear;
#[allow(missing_docs)]
mod mma;
#[allow(missing_docs)]
mod quantize;

use cubecl::{prelude::*, server::Handle};

use crate::{
    Nvfp4Error,
    capabilities::{conversion_of, overlaps_kernels},
    launch::{buffer, cubes, grid, units},
    memory::{address_type, allocate, check_memory, is_aligned},
    moe::groups::to_u32,
    reference::FP8_CHUNK,
    tensor::{FloatKind, Matrix},
};
use linear::{Fp8LinearPlan, fp8_linear_kernel};
use mma::{Fp8MmaPlan, Fp8ShapeLaunch, Fp8WeightLaunch, fp8_linear_mma_kernel};
use quantize::{Fp8QuantizePlan, fp8_quantize_kernel};

/// A weight `[n, k]` in FP8 in device memory: element `(n, k)` is `e4m3(code) · scale[n]`.
#[derive(Debug, Clone)]
pub struct Fp8Weight {
    /// E4M3 bytes, row-major: `u32[n, k / 4]`, the first code in the lowest byte.
    pub codes: Handle,
    /// Scale factors, `f32[n]`.
    pub scales: Handle,
    /// Number of rows.
    pub n: usize,
    /// Number of columns.
    pub k: usize,
}

impl Fp8Weight {
    fn check(&self) -> Result<(), Nvfp4Error> {
        let Self { n, k, .. } = *self;
        if n == 0 || k == 0 || !k.is_multiple_of(FP8_CHUNK) {
            return Err(Nvfp4Error::shape(
                "weight",
                format!("[{n}, {k}]"),
                format!("at least one row, and columns in a positive multiple of {FP8_CHUNK}"),
            ));
        }
        to_u32("n", n)?;
        to_u32("k", k)?;
        to_u32("vectors of `weight`", n * k / 16)?;
        check_memory("weight.codes", &self.codes, n * k)?;
        check_memory("weight.scales", &self.scales, n * 4)
    }
}

/// Quantizes `x` to FP8, bit-identical to
/// [`reference::fp8_quantize_rows`](crate::reference::fp8_quantize_rows).
///
/// # Errors
/// Returns an error if the number of columns of `x` is not a positive multiple of 4, or its memory
/// is smaller than its shape.
pub fn quantize_rows(client: &Client, x: &Matrix) -> Result<Fp8Weight, Nvfp4Error> {
    x.check("x")?;
    let (n, k) = (x.rows, x.cols);
    if k == 0 || !k.is_multiple_of(4) {
        return Err(Nvfp4Error::shape(
            "x",
            format!("[{n}, {k}]"),
            "columns in a positive multiple of 4",
        ));
    }
    let made = Fp8Weight {
        codes: allocate(client, n * k),
        scales: allocate(client, n * 4),
        n,
        k,
    };
    if n == 0 {
        return Ok(made);
    }
    let start = x.handle.offset_start.unwrap_or(0);
    let width = match start.is_multiple_of(4 * x.dtype.size() as u64) {
        true => 4,
        false => 1,
    };
    let (count, dim) = cubes(client, n);
    let plan = Fp8QuantizePlan {
        kind: x.dtype,
        conversion: conversion_of(client),
        units: units(client),
    };
    // SAFETY: memory was checked or made; the kernel stays below the rows and their words.
    unsafe {
        fp8_quantize_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(n * k),
            width,
            buffer(&x.handle, n * k / width),
            buffer(&made.codes, n * k / 4),
            buffer(&made.scales, n),
            n,
            k / 4,
            plan,
            x.dtype.storage_type(),
        );
    }
    Ok(made)
}

/// Computes `out[m, n] = fl_out(fl(Σₖ a[m, k] · code[n, k]) · scale[n])` for the rows of `a`
/// (`[m, k]`): `[m, n]`, rounded once to `dtype`. Sums are in `f32`, in an order that depends on
/// the device.
///
/// For bf16 `a` on a GPU of sm_80 or later, the codes are read once per 16 rows of `a`. In all
/// other cases each output element reads its row, which takes far longer.
///
/// # Errors
/// Returns an error if `k` is not a positive multiple of 64, the weight has no rows, `a` and the
/// weight differ in their number of columns, a size does not fit 32 bits, or memory is smaller than
/// its shape.
pub fn linear(
    client: &Client,
    a: &Matrix,
    weight: &Fp8Weight,
    dtype: FloatKind,
) -> Result<Matrix, Nvfp4Error> {
    a.check("a")?;
    weight.check()?;
    let (m, n, k) = (a.rows, weight.n, weight.k);
    if a.cols != k {
        return Err(Nvfp4Error::shape(
            "a",
            format!("[{m}, {}]", a.cols),
            format!("{k} columns, those of the weight"),
        ));
    }
    to_u32("m", m)?;
    to_u32("vectors of `a`", m * k / 8)?;
    to_u32("the output", m * n)?;
    let out = Matrix::empty(client, m, n, dtype);
    if m == 0 {
        return Ok(out);
    }
    let aligned = is_aligned(&a.handle) && is_aligned(&weight.codes);
    if conversion_of(client).has_ptx() && a.dtype == FloatKind::Bf16 && aligned {
        launch_mma(client, a, weight, &out);
    } else {
        launch_portable(client, a, weight, &out);
    }
    Ok(out)
}

/// Launches the `mma.sync` kernel.
fn launch_mma(client: &Client, a: &Matrix, weight: &Fp8Weight, out: &Matrix) {
    let (m, n, k) = (a.rows, weight.n, weight.k);
    let plan = Fp8MmaPlan::of(m, out.dtype, overlaps_kernels(client));
    let cubes = n.div_ceil(plan.rows()) * m.div_ceil(plan.lines());
    // SAFETY: memory was checked; rows outside are clamped where they are read and not written.
    unsafe {
        fp8_linear_mma_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(32 * plan.warps as u32),
            address_type((n * k).max(m * k).max(m * n)),
            buffer(&a.handle, m * k / 8),
            weight_arg(weight),
            buffer(&out.handle, m * n),
            Fp8ShapeLaunch::new(m as u32, n as u32, k as u32),
            plan,
            out.dtype.storage_type(),
        );
    }
}

/// Launches the portable kernel.
fn launch_portable(client: &Client, a: &Matrix, weight: &Fp8Weight, out: &Matrix) {
    let (m, n, k) = (a.rows, weight.n, weight.k);
    let (count, dim) = grid(client, m * n);
    let plan = Fp8LinearPlan {
        a: a.dtype,
        out: out.dtype,
    };
    // SAFETY: memory was checked; the kernel stays below the elements of the output.
    unsafe {
        fp8_linear_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type((n * k).max(m * k).max(m * n)),
            buffer(&a.handle, m * k),
            weight_arg(weight),
            buffer(&out.handle, m * n),
            Fp8ShapeLaunch::new(m as u32, n as u32, k as u32),
            plan,
            a.dtype.storage_type(),
            out.dtype.storage_type(),
        );
    }
}

fn weight_arg(weight: &Fp8Weight) -> Fp8WeightLaunch {
    let Fp8Weight { n, k, .. } = *weight;
    // SAFETY: memory was checked.
    unsafe { Fp8WeightLaunch::new(buffer(&weight.codes, n * k / 4), buffer(&weight.scales, n)) }
}
