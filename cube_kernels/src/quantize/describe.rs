//! Quantization kernels of a device with reasons: rows of `nvfp4 doctor`.

use cubecl::client::Client;

use super::{request::Quantize, step::QuantizeStep, target::TargetSpec};
use crate::{
    BlockScaling, Format, Hadamard, QuantParams, RandomStream, Rounding,
    capabilities::{Capabilities, GemmBackend},
    cube::codec::Conversion,
    describe::CodePath,
    policy::AmaxGranularity,
    tensor::{FloatKind, Matrix},
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

/// Returns how the operations of this module run on the device of `client`.
pub fn describe(client: &Client) -> Vec<CodePath> {
    describe_as(client, Capabilities::of(client))
}

/// Returns the rows of [`describe`] on a device with these capabilities.
fn describe_as(client: &Client, capabilities: &Capabilities) -> Vec<CodePath> {
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
    let (e4m3, why_e4m3) = e4m3(capabilities.conversion, &target);
    let mut rows = plans(client, capabilities);
    rows.extend([
        row("random Hadamard transform", hadamard, why_hadamard),
        row("round to nearest", nearest, why_nearest),
        row("round stochastically", stochastic, why_stochastic),
        row("scales and MXFP8 elements", e4m3, why_e4m3),
        layout,
        threads(capabilities),
    ]);
    rows
}

/// Returns the kernels of typical requests in the order of their launch, as the planner chooses
/// them.
fn plans(client: &Client, capabilities: &Capabilities) -> Vec<CodePath> {
    let x = Matrix::empty(client, 128, 256, FloatKind::Bf16);
    let request = || Quantize::new(&x);
    let nearest = || TargetSpec::new(Rounding::Nearest);
    let random = RandomStream::new(0, 0, 0);
    let transformed = || {
        TargetSpec::new(QuantParams {
            hadamard: Some(Hadamard::default()),
            ..QuantParams::nvfp4(Rounding::Stochastic(random))
        })
    };
    let tiles = || TargetSpec::new(QuantParams::nvfp4_2d(BlockScaling::Standard));
    let eden = || TargetSpec::new(QuantParams::ms_eden(Hadamard::default(), random));
    [
        (
            "quantize rowwise, 1x16",
            request().rowwise(nearest()),
            "all elements share one amax, so a pass before the quantization computes it",
        ),
        (
            "quantize columnwise, 16x1",
            request().columnwise(transformed()),
            "memory is read along rows, and wgrad contracts down the columns",
        ),
        (
            "quantize both",
            request().rowwise(nearest()).columnwise(transformed()),
            "one read of the source serves both tensors",
        ),
        (
            "quantize both, 16x16",
            request().rowwise(tiles()).columnwise(tiles()),
            "the columnwise tensor is the exact transpose of the rowwise one",
        ),
        (
            "quantize by amax per row",
            request().rowwise(nearest().granularity(AmaxGranularity::PerRow)),
            "a row's amax is computed while its elements are in registers",
        ),
        (
            "MS-EDEN, both",
            request().rowwise(eden()).columnwise(eden()),
            "codes depend on the rotated amax; the rotated values are never in memory",
        ),
        (
            "MXFP8, rowwise",
            request().rowwise(TargetSpec::new(Format::Mxfp8)),
            "MX formats have no global scale, and need no amax of the tensor",
        ),
    ]
    .into_iter()
    .map(|(operation, request, why)| {
        let steps = request.steps(capabilities, false);
        row(operation, listed(&steps), why)
    })
    .collect()
}

/// Returns the names of `steps` in their order; equal steps in a row are counted.
fn listed(steps: &[QuantizeStep]) -> String {
    let names: Vec<String> = steps.iter().map(ToString::to_string).collect();
    let runs = names.chunk_by(|one, next| one == next);
    let run = |run: &[String]| match run.len() {
        1 => run[0].clone(),
        count => format!("{count} x {}", run[0]),
    };
    runs.map(run).collect::<Vec<_>>().join("; ")
}

/// Returns the number of threads of the kernels.
fn threads(capabilities: &Capabilities) -> CodePath {
    let (threads, why) = match capabilities.runtime == "cpu" {
        true => (
            "one thread in a CTA",
            "threads of this runtime are threads of the CPU: with more than it has cores, barriers \
             make them wait for each other",
        ),
        false => (
            "many threads in a CTA",
            "the same source runs on every CubeCL device; nothing is read back to the host",
        ),
    };
    row("amax, quantize, dequantize", threads, why)
}

fn e4m3(conversion: Conversion, target: &str) -> (&'static str, String) {
    match conversion.has_e4m3() {
        true => (
            "cvt.rn.satfinite.e4m3x2",
            format!("{target} has the instruction"),
        ),
        false => (
            "integer arithmetic",
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

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::*;

    /// Every architecture reports its own kernels, in rows that fit the table.
    #[test]
    fn every_architecture_says_what_it_does() {
        use Conversion::{Hardware, HardwareNearest, Sm80, Sm89, Software};
        use GemmBackend::{Cmma, CublasLt, Scalar, Sm90Wgmma, Sm120BlockScaled};
        let client = crate::cpu_client();
        for (compute_capability, conversion, gemm, part) in [
            (None, Software, Scalar, "arithmetic"),
            (Some(80), Sm80, Cmma, "in PTX"),
            (Some(90), Sm89, Sm90Wgmma, "in PTX"),
            (Some(100), Hardware, CublasLt, "cvt.rn"),
            (Some(120), HardwareNearest, Sm120BlockScaled, "cvt.rn"),
        ] {
            let has_gpu = compute_capability.is_some();
            let capabilities = Capabilities {
                device: "a test".into(),
                runtime: if has_gpu { "cuda" } else { "cpu" },
                compute_capability,
                conversion,
                gemm,
            };
            let rows = describe_as(&client, &capabilities);
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
            let eden = kernel("MS-EDEN, both");
            let has_screen = eden.starts_with("both rotated amax values;");
            assert_eq!(has_screen, matches!(conversion, Sm80 | Sm89), "{eden}");
            // Rows and columns have a step each of one name, which is listed once.
            for row in &rows {
                let steps: Vec<&str> = row.kernel.split("; ").collect();
                assert!(steps.windows(2).all(|pair| pair[0] != pair[1]), "{row}");
            }
            let layout = kernel("128x4 scale layout");
            assert_eq!(layout == "not used", gemm != CublasLt, "{layout}");
        }
    }
}
