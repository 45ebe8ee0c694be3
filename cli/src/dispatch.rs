//! Which kernel each operation takes on a device, and why: the rows of `nvfp4 doctor`.

/// One operation.
pub(crate) struct Row {
    pub(crate) operation: &'static str,
    /// In a few words, for a table.
    pub(crate) kernel: String,
    pub(crate) why: String,
}

fn row(operation: &'static str, kernel: impl Into<String>, why: impl Into<String>) -> Row {
    Row {
        operation,
        kernel: kernel.into(),
        why: why.into(),
    }
}

const AMAX: &str = "amax";
const ROWWISE: &str = "quantize rowwise, 1x16";
const COLUMNWISE: &str = "quantize columnwise, 16x1";
const TILES: &str = "quantize tiles, 16x16";
const PER_ROW: &str = "quantize by amax per row";
const HADAMARD: &str = "random Hadamard transform";
const NEAREST: &str = "round to nearest";
const STOCHASTIC: &str = "round stochastically";
const EDEN: &str = "MS-EDEN";
const MXFP8: &str = "MXFP8";
const LAYOUT: &str = "128x4 scale layout";
const DEQUANTIZE: &str = "dequantize";
const NVFP4_GEMM: &str = "GEMM, NVFP4 x NVFP4";
const MIXED_GEMM: &str = "GEMM, bf16 x NVFP4";
const BF16_GEMM: &str = "GEMM, bf16 x bf16";
const WIDE_GEMM: &str = "GEMM, f32 or f16";
const GROUPED_GEMM: &str = "grouped GEMM";
const PROLOGUE: &str = "RMSNorm, SwiGLU";

/// The rows of Flex: it has one kernel for everything.
pub(crate) fn flex() -> Vec<Row> {
    let reference = "reference on all threads, AVX2 where there is";
    let host = "Flex tensors are host memory, so operations run the reference itself";
    let matmul = "dequantize to f32, then Flex's f32 matmul";
    vec![
        row(AMAX, reference, host),
        row(ROWWISE, reference, host),
        row(
            COLUMNWISE,
            format!("{reference}; transposed"),
            "wgrad contracts along the tokens, and a GEMM reads its operands along K",
        ),
        row(
            TILES,
            format!("{reference}; two passes"),
            "the columnwise tensor is the exact transpose of the rowwise one",
        ),
        row(
            PER_ROW,
            "amax of the rows, then as others",
            "the reference takes the amax values as an argument",
        ),
        row(
            HADAMARD,
            "f32 butterflies, many columns side by side",
            "additions are in the order of every device, so the bits are equal",
        ),
        row(NEAREST, "software", "CPUs convert to neither E2M1 nor E4M3"),
        row(
            STOCHASTIC,
            "Philox4x32-10, software",
            "CPUs do not convert to E2M1",
        ),
        row(EDEN, "reference; NVFP4 operands dequantized first", host),
        row(MXFP8, "reference; NVFP4 operands dequantized first", host),
        row(
            LAYOUT,
            "not used",
            "only FP4 tensor cores read it; scales stay in rows",
        ),
        row(DEQUANTIZE, reference, host),
        row(
            NVFP4_GEMM,
            matmul,
            "CPUs have no 4-bit matrix instructions; panels of rows are dequantized exactly, and \
             global scales and bias follow",
        ),
        row(
            MIXED_GEMM,
            matmul,
            "as for two NVFP4 operands; bf16 is exact in f32",
        ),
        row(
            BF16_GEMM,
            "cast to f32, then Flex's f32 matmul",
            "CPUs would emulate bf16",
        ),
        row(
            WIDE_GEMM,
            "Flex's f32 matmul; f16 is cast to f32",
            "it is Flex's widest, and exact for narrower operands",
        ),
        row(
            GROUPED_GEMM,
            "one GEMM for each group",
            "offsets are host memory: a single launch would save nothing",
        ),
        row(
            PROLOGUE,
            "Burn's operations",
            "the layers call Burn for them on every device",
        ),
    ]
}

#[cfg(any(feature = "cpu", feature = "cuda"))]
pub(crate) use cubecl::of_capabilities;

#[cfg(any(feature = "cpu", feature = "cuda"))]
mod cubecl {
    use nvfp4::kernels::capabilities::{Capabilities, GemmBackend};
    use nvfp4::kernels::cube::codec::Conversion;

    use super::*;

    /// The rows of a CubeCL device.
    pub(crate) fn of_capabilities(capabilities: &Capabilities) -> Vec<Row> {
        let mut rows = quantization(capabilities);
        rows.extend(gemms(capabilities));
        rows.push(row(
            PROLOGUE,
            "Burn's operations",
            "the layers call Burn for them; nvfp4-kernels also has them as fused prologues of \
             quantization",
        ));
        rows
    }

    /// What the device is compiled for, as reasons name it.
    fn target(capabilities: &Capabilities) -> String {
        match capabilities.compute_capability {
            Some(capability) => format!("sm_{capability}"),
            None => format!("CubeCL's {} runtime", capabilities.runtime),
        }
    }

    fn quantization(capabilities: &Capabilities) -> Vec<Row> {
        let target = target(capabilities);
        let (kernel, why) = match capabilities.runtime == "cpu" {
            true => (
                "CubeCL kernel, one thread in a CTA",
                "threads of this runtime are threads of the CPU: with more than it has cores, \
                 barriers make them wait for each other",
            ),
            false => (
                "CubeCL kernel",
                "the same source runs on every CubeCL device; nothing is read back to the host",
            ),
        };
        let (hadamard, why_hadamard) = match capabilities.conversion.has_ptx() {
            true => (
                "f32 butterflies in registers, shuffles from 32 elements",
                "a thread's registers hold 16 of its elements and no more",
            ),
            false => (
                "f32 butterflies, one thread each",
                "warps share one by PTX of sm_80, which the device does not take",
            ),
        };
        let e4m3 = match capabilities.compute_capability {
            Some(89..) => (
                "E4M3 by cvt.rn.satfinite.e4m3x2",
                format!("{target} has the instruction"),
            ),
            _ => (
                "E4M3 by integer arithmetic",
                format!("{target} has no E4M3 conversion"),
            ),
        };
        let layout = match capabilities.gemm {
            GemmBackend::CublasLt => row(
                LAYOUT,
                "CubeCL kernel, before each GEMM",
                "cuBLASLt reads 128x4 tiles of scales, and tensors keep theirs in rows",
            ),
            _ => row(
                LAYOUT,
                "not used",
                "the GEMM kernels of this device read scales in rows; quantize::swizzle converts",
            ),
        };
        let (nearest, why_nearest) = nearest(capabilities.conversion, &target);
        let (stochastic, why_stochastic) = stochastic(capabilities.conversion, &target);
        vec![
            row(AMAX, kernel, why),
            row(ROWWISE, kernel, why),
            row(
                COLUMNWISE,
                format!("{kernel}, transposed in shared memory"),
                "memory is read along rows, and wgrad contracts down the columns",
            ),
            row(
                TILES,
                format!("{kernel}, both tensors from one read"),
                "the columnwise tensor is the exact transpose of the rowwise one",
            ),
            row(
                PER_ROW,
                format!("{kernel}, one read; columnwise or rotated: two"),
                "a row's amax is found while its elements are in registers",
            ),
            row(HADAMARD, hadamard, why_hadamard),
            row(NEAREST, nearest, why_nearest),
            row(STOCHASTIC, stochastic, why_stochastic),
            row(
                EDEN,
                format!("{kernel}, twice; NVFP4 operands dequantized on load"),
                "codes depend on the rotated amax, and nothing between the two kernels is in \
                 memory",
            ),
            row(MXFP8, format!("{kernel}; {}", e4m3.0), e4m3.1),
            layout,
            row(DEQUANTIZE, kernel, why),
        ]
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

    /// Kernel and reason of the GEMMs of two NVFP4 operands, of one with a bf16 one, of two bf16
    /// ones, and of grouped ones.
    type Gemms = [(&'static str, &'static str); 4];

    fn gemms(capabilities: &Capabilities) -> Vec<Row> {
        let of_backend = match capabilities.gemm {
            GemmBackend::Sm90Wgmma => SM90_WGMMA,
            GemmBackend::CublasLt => CUBLASLT,
            GemmBackend::Sm120BlockScaled => SM120_BLOCK_SCALED,
            GemmBackend::Cmma => CMMA,
            GemmBackend::Scalar => SCALAR,
        };
        let operations = [NVFP4_GEMM, MIXED_GEMM, BF16_GEMM, GROUPED_GEMM];
        let mut rows: Vec<Row> = operations
            .into_iter()
            .zip(of_backend)
            .map(|(operation, (kernel, why))| row(operation, kernel, why))
            .collect();
        let wide = row(
            WIDE_GEMM,
            "dequantize, then Burn's matmul",
            "the kernels multiply what bf16 holds; grouped, Burn multiplies all tokens by every \
             expert",
        );
        rows.insert(3, wide);
        rows
    }

    const BURNS_BF16: (&str, &str) = (
        "Burn's matmul; with bias or f32 result: tiles",
        "Burn's bf16 matmul is faster than the tiles; the others it would compute in f32",
    );

    const SM90_WGMMA: Gemms = [
        (
            "wgmma on dequantized bf16; small M: mma.sync",
            "sm_90 has wgmma and no FP4 tensor cores; operands are dequantized in registers or \
             before, which is exact; where N or K is no multiple of 8, tiles in shared memory (see \
             --shape)",
        ),
        (
            "as NVFP4 x NVFP4",
            "the size decides between the kernels (see --shape)",
        ),
        (
            "wgmma, K-major and MN-major",
            "it is the kernel that NVFP4 operands are dequantized for",
        ),
        (
            "wgmma, one launch, offsets on the device",
            "no host reads the sizes of the groups",
        ),
    ];

    const CUBLASLT: Gemms = [
        (
            "cuBLASLt on FP4 tensor cores",
            "sm_100 and sm_103 have them; has not run on one yet (see --shape)",
        ),
        (
            "dequantize, then cuBLASLt bf16; small M: mma.sync",
            "the size decides between the kernels (see --shape)",
        ),
        ("cuBLASLt bf16", "the library has bf16 beside FP4"),
        (
            "cmma on dequantized tiles, one launch",
            "the library's grouped GEMMs are not used: the book says why",
        ),
    ];

    const SM120_BLOCK_SCALED: Gemms = [
        (
            "block-scaled mma.sync; small M: mma.sync",
            "sm_120 has the instructions; has not run on one yet (see --shape)",
        ),
        (
            "cmma on dequantized tiles; small M: mma.sync",
            "block-scaled instructions take NVFP4 operands only",
        ),
        BURNS_BF16,
        (
            "M-grouped: block-scaled mma.sync; K-grouped: cmma",
            "the block-scaled kernel takes rowwise NVFP4 operands and no groups along K",
        ),
    ];

    const CMMA: Gemms = [
        (
            "cmma on dequantized tiles; small M: mma.sync",
            "the device has 16x16x16 bf16 matrix instructions in warps of 32; tiles are \
             dequantized in shared memory, which is exact, and for small M in registers from sm_80 \
             on",
        ),
        (
            "as NVFP4 x NVFP4",
            "small M needs an NVFP4 weight; the size decides (see --shape)",
        ),
        BURNS_BF16,
        (
            "cmma on dequantized tiles, one launch",
            "no host reads the sizes of the groups",
        ),
    ];

    const WHY_SCALAR: &str = "the kernel of such devices is for tests: what is not NVFP4 is Burn's";

    const SCALAR: Gemms = [
        (
            "one thread for each output, f32 sums in order",
            "the device reports no 16x16x16 bf16 matrix instructions in warps of 32",
        ),
        ("dequantize to f32, then Burn's matmul", WHY_SCALAR),
        ("Burn's matmul", WHY_SCALAR),
        (
            "one thread for each output, one launch",
            "no host reads the sizes of the groups",
        ),
    ];

    #[cfg(test)]
    mod tests {
        use super::*;

        fn device(
            capability: Option<u32>,
            conversion: Conversion,
            gemm: GemmBackend,
        ) -> Capabilities {
            Capabilities {
                device: "a test".into(),
                runtime: if capability.is_some() { "cuda" } else { "cpu" },
                compute_capability: capability,
                conversion,
                gemm,
            }
        }

        fn find<'a>(rows: &'a [Row], operation: &str) -> &'a Row {
            let mut found = rows.iter().filter(|row| row.operation == operation);
            let row = found.next().expect(operation);
            assert!(found.next().is_none(), "{operation}");
            row
        }

        /// Every architecture has a row for what Flex has, in the same order, and says what is its
        /// own.
        #[test]
        fn every_architecture_says_what_it_does() {
            use Conversion::{Hardware, HardwareNearest, Sm80, Sm89, Software};
            use GemmBackend::{Cmma, CublasLt, Scalar, Sm90Wgmma, Sm120BlockScaled};
            let devices = [
                (None, Software, Scalar, "arithmetic", "one thread for each"),
                (Some(80), Sm80, Cmma, "in PTX", "cmma"),
                (Some(90), Sm89, Sm90Wgmma, "in PTX", "wgmma"),
                (Some(100), Hardware, CublasLt, "cvt.rn", "cuBLASLt"),
                (
                    Some(120),
                    HardwareNearest,
                    Sm120BlockScaled,
                    "cvt.rn",
                    "block-scaled",
                ),
            ];
            let operations: Vec<&str> = flex().iter().map(|row| row.operation).collect();
            for (capability, conversion, gemm, nearest, part_of_gemm) in devices {
                let rows = of_capabilities(&device(capability, conversion, gemm));
                let found: Vec<&str> = rows.iter().map(|row| row.operation).collect();
                assert_eq!(found, operations);
                for (operation, part) in [(NEAREST, nearest), (NVFP4_GEMM, part_of_gemm)] {
                    let kernel = &find(&rows, operation).kernel;
                    assert!(
                        kernel.contains(part),
                        "{capability:?}, {operation}: {kernel}"
                    );
                }
                let stochastic = &find(&rows, STOCHASTIC).kernel;
                let has_instruction = stochastic.contains("cvt.rs");
                assert_eq!(has_instruction, conversion == Hardware, "{stochastic}");
                let layout = &find(&rows, LAYOUT).kernel;
                assert_eq!(layout == "not used", gemm != CublasLt, "{layout}");
                // A table of 100 columns: two of indentation, 26 and 1 of the operation.
                for Row { kernel, .. } in rows.iter().chain(&flex()) {
                    assert!(kernel.len() <= 71, "{kernel}");
                }
            }
        }
    }
}
