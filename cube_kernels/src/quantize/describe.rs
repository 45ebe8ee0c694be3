//! Quantization kernels of a device with reasons: rows of `nvfp4 doctor`.

use crate::{
    capabilities::{Capabilities, GemmBackend},
    cube::codec::Conversion,
    describe::CodePath,
};

/// Returns one row.
fn row(operation: &'static str, kernel: impl Into<String>, reason: impl Into<String>) -> CodePath {
    CodePath::new(operation, "CubeCL", kernel, reason)
}

/// Returns the compilation target of the device, as reasons name it.
fn target(capabilities: &Capabilities) -> String {
    match capabilities.compute_capability {
        Some(capability) => format!("sm_{capability}"),
        None => format!("CubeCL's {} runtime", capabilities.runtime),
    }
}

/// Returns how the operations of this module run on a device with these capabilities.
pub fn describe(capabilities: &Capabilities) -> Vec<CodePath> {
    let target = target(capabilities);
    let (nearest, why_nearest) = nearest(capabilities.conversion, &target);
    let (stochastic, why_stochastic) = stochastic(capabilities.conversion, &target);
    let (hadamard, why_hadamard) = match capabilities.conversion.has_ptx() {
        true => (
            "f32 butterflies in registers, shuffles from 32 on",
            "a thread's registers hold 16 of its elements and no more",
        ),
        false => (
            "f32 butterflies, one thread each",
            "warps share one by PTX of sm_80, which the device does not take",
        ),
    };
    let layout = match capabilities.gemm {
        GemmBackend::CublasLt | GemmBackend::Sm100Tcgen05 => row(
            "128x4 scale layout",
            "written by the quantizers",
            "FP4 tensor cores read 128x4 tiles of scales; other tensors are swizzled before a GEMM",
        ),
        _ => row(
            "128x4 scale layout",
            "not used",
            "the GEMM kernels of this device read scales in rows; quantize::swizzle converts",
        ),
    };
    let (kernel, why) = one_kernel(capabilities);
    let (e4m3, why_e4m3) = e4m3(capabilities);
    vec![
        row("amax", kernel, why),
        row("quantize rowwise, 1x16", kernel, why),
        row(
            "quantize columnwise, 16x1",
            format!("{kernel}, transposed in shared memory"),
            "memory is read along rows, and wgrad contracts down the columns",
        ),
        row(
            "quantize tiles, 16x16",
            format!("{kernel}, both tensors from one read"),
            "the columnwise tensor is the exact transpose of the rowwise one",
        ),
        row(
            "quantize by amax per row",
            format!("{kernel}, one read (rotated: two)"),
            "a row's amax is found while its elements are in registers",
        ),
        row("random Hadamard transform", hadamard, why_hadamard),
        row("round to nearest", nearest, why_nearest),
        row("round stochastically", stochastic, why_stochastic),
        row(
            "MS-EDEN",
            format!("{kernel}, twice; dequantized on load"),
            "codes depend on the rotated amax, and nothing between the two kernels is in memory",
        ),
        row("MXFP8", format!("{kernel}; {e4m3}"), why_e4m3),
        layout,
        row("dequantize", kernel, why),
    ]
}

/// Returns the kernel of an operation that takes one on every device, with the reason.
fn one_kernel(capabilities: &Capabilities) -> (&'static str, &'static str) {
    match capabilities.runtime == "cpu" {
        true => (
            "one thread in a CTA",
            "threads of this runtime are threads of the CPU: with more than it has cores, barriers \
             make them wait for each other",
        ),
        false => (
            "one kernel",
            "the same source runs on every CubeCL device; nothing is read back to the host",
        ),
    }
}

fn e4m3(capabilities: &Capabilities) -> (&'static str, String) {
    let target = target(capabilities);
    match capabilities.compute_capability {
        Some(89..) => (
            "E4M3 by cvt.rn.satfinite.e4m3x2",
            format!("{target} has the instruction"),
        ),
        _ => (
            "E4M3 by integer arithmetic",
            format!("{target} has no E4M3 conversion"),
        ),
    }
}

fn nearest(conversion: Conversion, target: &str) -> (&'static str, String) {
    match conversion {
        Conversion::Hardware | Conversion::HardwareNearest => (
            "cvt.rn.satfinite.e2m1x2",
            format!("{target} has the instruction"),
        ),
        Conversion::Emulated => (
            "cvt.rn.satfinite.e2m1x2, emulated",
            "this process was asked to, for a test".into(),
        ),
        Conversion::Sm80 | Conversion::Sm89 => (
            "f32 arithmetic in PTX",
            format!("{target} has no E2M1 conversion"),
        ),
        Conversion::Software => (
            "integer and f32 arithmetic",
            format!("{target} has neither an E2M1 conversion nor PTX of sm_80"),
        ),
    }
}

fn stochastic(conversion: Conversion, target: &str) -> (&'static str, String) {
    match conversion {
        Conversion::Hardware => (
            "Philox4x32-10, cvt.rs.satfinite.e2m1x4",
            format!("{target} has the instruction"),
        ),
        Conversion::Emulated => (
            "Philox4x32-10, cvt.rs.satfinite.e2m1x4 emulated",
            "this process was asked to, for a test".into(),
        ),
        Conversion::HardwareNearest => (
            "Philox4x32-10, fma.rz",
            format!("{target} has only the instruction that rounds to nearest"),
        ),
        Conversion::Sm80 | Conversion::Sm89 => (
            "Philox4x32-10, fma.rz",
            format!("{target} has no E2M1 conversion"),
        ),
        Conversion::Software => (
            "Philox4x32-10, integer and f32 arithmetic",
            format!("{target} has neither an E2M1 conversion nor PTX of sm_80"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every architecture reports its own kernels, in rows that fit the table.
    #[test]
    fn every_architecture_says_what_it_does() {
        use Conversion::{Hardware, HardwareNearest, Sm80, Sm89, Software};
        use GemmBackend::{Cmma, CublasLt, Scalar, Sm90Wgmma, Sm120BlockScaled};
        for (compute_capability, conversion, gemm, part) in [
            (None, Software, Scalar, "arithmetic"),
            (Some(80), Sm80, Cmma, "in PTX"),
            (Some(90), Sm89, Sm90Wgmma, "in PTX"),
            (Some(100), Hardware, CublasLt, "cvt.rn"),
            (Some(120), HardwareNearest, Sm120BlockScaled, "cvt.rn"),
        ] {
            let has_gpu = compute_capability.is_some();
            let rows = describe(&Capabilities {
                device: "a test".into(),
                runtime: if has_gpu { "cuda" } else { "cpu" },
                compute_capability,
                conversion,
                gemm,
            });
            let kernel = |operation| {
                let mut found = rows.iter().filter(|row| row.operation == operation);
                found.next().expect(operation).kernel.clone()
            };
            assert!(rows.iter().all(CodePath::fits), "{rows:?}");
            let nearest = kernel("round to nearest");
            assert!(nearest.contains(part), "{nearest}");
            let stochastic = kernel("round stochastically");
            let has_instruction = stochastic.contains("cvt.rs");
            assert_eq!(has_instruction, conversion == Hardware, "{stochastic}");
            let layout = kernel("128x4 scale layout");
            assert_eq!(layout == "not used", gemm != CublasLt, "{layout}");
        }
    }
}
