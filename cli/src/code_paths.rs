//! Which code path each operation takes on a device, and why, for `nvfp4 doctor`.

/// How one operation runs on a device.
pub(crate) struct CodePath {
    pub(crate) operation: &'static str,
    pub(crate) path: String,
    pub(crate) why: String,
}

fn code_path(operation: &'static str, path: impl Into<String>, why: impl Into<String>) -> CodePath {
    CodePath {
        operation,
        path: path.into(),
        why: why.into(),
    }
}

const AMAX: &str = "amax";
const ROWS: &str = "quantize rows, 1x16";
const COLUMNS: &str = "quantize columns, 16x1";
const TILES: &str = "quantize tiles, 16x16";
const PER_TOKEN: &str = "quantize per token";
const HADAMARD: &str = "random Hadamard transform";
const NEAREST: &str = "rounding to nearest";
const STOCHASTIC: &str = "stochastic rounding";
const EDEN: &str = "MS-EDEN";
const MXFP8: &str = "MXFP8";
const LAYOUT: &str = "128x4 scale layout";
const DEQUANTIZE: &str = "dequantize";
const PACKED: &str = "product, both packed";
const ONE_PACKED: &str = "product, packed and bf16";
const BF16: &str = "product, both bf16";
const WIDE: &str = "product with f32 or f16";
const GROUPED: &str = "product in groups";
const PRODUCERS: &str = "RMSNorm, SwiGLU";

/// The paths of Flex: it has one for everything.
pub(crate) fn flex() -> Vec<CodePath> {
    let oracle = "reference arithmetic, vectorised (AVX2 where the CPU has it), all threads";
    let host = "Flex tensors are host memory: operations run the oracle itself";
    let decoded = "packed operands decoded to f32 (exact), a panel of rows at a time, then Flex's f32 \
                   matrix product; factors and bias after it";
    vec![
        code_path(AMAX, oracle, host),
        code_path(ROWS, oracle, host),
        code_path(
            COLUMNS,
            format!("{oracle}; stored transposed"),
            "wgrad contracts along the tokens, and what a product contracts along is contiguous",
        ),
        code_path(
            TILES,
            format!("{oracle}; each copy in its own pass"),
            "the column-wise copy of a tile is the exact transpose of the row-wise one",
        ),
        code_path(
            PER_TOKEN,
            "the maxima of the rows (or columns), then as other copies",
            "the oracle takes the maxima as an argument",
        ),
        code_path(
            HADAMARD,
            "butterflies in f32, many columns side by side",
            "the additions of every device in the same order, so the bits are equal",
        ),
        code_path(
            NEAREST,
            "E2M1 and E4M3 in software",
            "CPUs have no conversion to either",
        ),
        code_path(
            STOCHASTIC,
            "Philox4x32-10 and rounding in software",
            "CPUs have no conversion to E2M1",
        ),
        code_path(
            EDEN,
            "reference arithmetic; a packed operand is dequantized first",
            host,
        ),
        code_path(
            MXFP8,
            "reference arithmetic; an NVFP4 operand is dequantized first",
            host,
        ),
        code_path(
            LAYOUT,
            "not used: scales stay in rows",
            "only FP4 tensor cores read the tiles",
        ),
        code_path(DEQUANTIZE, oracle, host),
        code_path(
            PACKED,
            decoded,
            "CPUs have no 4-bit matrix instructions; decoding costs little beside the product",
        ),
        code_path(
            ONE_PACKED,
            decoded,
            "as for two packed operands; bf16 is exact in f32",
        ),
        code_path(
            BF16,
            "both cast to f32, Flex's f32 matrix product",
            "CPUs would have to emulate bf16",
        ),
        code_path(
            WIDE,
            "as it is (f16: cast to f32), Flex's f32 matrix product",
            "that is Flex's widest product, and exact for narrower operands",
        ),
        code_path(
            GROUPED,
            "a loop over the groups, each as a product of its own",
            "offsets are host memory too: no launch is saved by doing all at once",
        ),
        code_path(
            PRODUCERS,
            "Burn's operations, before quantization",
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

    /// The paths of a CubeCL device, as the kernels crate and the Burn operations choose them.
    pub(crate) fn of_capabilities(capabilities: &Capabilities) -> Vec<CodePath> {
        let mut paths = quantization(capabilities);
        paths.extend(products(capabilities));
        paths.push(code_path(
            PRODUCERS,
            "Burn's operations, before quantization",
            "the layers call Burn for them; nvfp4-kernels can compute them while a quantization kernel loads \
             (ops::Source)",
        ));
        paths
    }

    /// What the device is compiled for, as reasons name it.
    fn target(capabilities: &Capabilities) -> String {
        match capabilities.compute_capability {
            Some(capability) => format!("sm_{capability}"),
            None => format!("CubeCL's {} runtime", capabilities.runtime),
        }
    }

    fn quantization(capabilities: &Capabilities) -> Vec<CodePath> {
        let conversion = capabilities.conversion;
        let target = target(capabilities);
        let is_cpu = capabilities.runtime == "cpu";
        let (kernel, why_kernel) = if is_cpu {
            (
                "CubeCL kernel, one unit in a cube",
                "units of this runtime are threads: at barriers more of them than cores only wait for each \
                 other",
            )
        } else {
            (
                "CubeCL kernel",
                "the same source runs on every CubeCL device; nothing is read back to the host",
            )
        };
        let (nearest, why_nearest) = nearest(conversion, &target);
        let (stochastic, why_stochastic) = stochastic(conversion, &target);
        let (across, why_across) = match conversion.has_ptx() {
            true => (
                "butterflies in f32 registers; from 32 elements on units of a plane share one by shuffles",
                "a unit's registers hold 16 of its elements, and no more",
            ),
            false => (
                "butterflies in f32, one unit for each",
                "units share one by PTX of sm_80, which the device does not take",
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
        vec![
            code_path(AMAX, kernel, why_kernel),
            code_path(ROWS, kernel, why_kernel),
            code_path(
                COLUMNS,
                format!("{kernel}, through tiles in shared memory; stored transposed"),
                "memory is read along rows, and wgrad contracts down the columns",
            ),
            code_path(
                TILES,
                format!("{kernel}; both copies from one read"),
                "the column-wise copy of a tile is the exact transpose of the row-wise one",
            ),
            code_path(
                PER_TOKEN,
                format!(
                    "{kernel}; rows: maximum and codes in one read; columns, or with a transform: two"
                ),
                "a row's maximum is found while its elements are in registers",
            ),
            code_path(HADAMARD, across, why_across),
            code_path(NEAREST, nearest, why_nearest),
            code_path(STOCHASTIC, stochastic, why_stochastic),
            code_path(
                EDEN,
                format!(
                    "{kernel}, twice: the maximum of the rotated values, then codes and scales; a packed \
                         operand is decoded on the way"
                ),
                "codes depend on the maximum, and nothing between the two kernels is in memory",
            ),
            code_path(
                MXFP8,
                format!(
                    "{kernel}; {}; an NVFP4 operand is decoded on the way",
                    e4m3.0
                ),
                e4m3.1,
            ),
            match capabilities.gemm {
                GemmBackend::CublasLt => code_path(
                    LAYOUT,
                    "CubeCL kernel, before each product of packed operands",
                    "cuBLASLt reads 128x4 tiles of scales, and copies are kept with scales in rows",
                ),
                _ => code_path(
                    LAYOUT,
                    "not used by products; ops::swizzle makes and unmakes it",
                    "the kernels of this device read scales in rows",
                ),
            },
            code_path(DEQUANTIZE, kernel, why_kernel),
        ]
    }

    fn nearest(conversion: Conversion, target: &str) -> (&'static str, String) {
        match conversion {
            Conversion::Hardware | Conversion::HardwareNearest => (
                "cvt.rn.satfinite.e2m1x2",
                format!("{target} has the instruction"),
            ),
            Conversion::Emulated => (
                "the instruction for E2M1, emulated",
                "this process was asked to, for a test".into(),
            ),
            Conversion::Sm80 | Conversion::Sm89 => (
                "E2M1 by arithmetic on f32, in PTX",
                format!("{target} has no E2M1 conversion"),
            ),
            Conversion::Software => (
                "E2M1 by plain arithmetic on values and bits",
                format!("{target} has no E2M1 conversion, nor PTX of sm_80"),
            ),
        }
    }

    fn stochastic(conversion: Conversion, target: &str) -> (&'static str, String) {
        match conversion {
            Conversion::Hardware => (
                "Philox4x32-10, then cvt.rs.satfinite.e2m1x4",
                format!("{target} has the instruction"),
            ),
            Conversion::Emulated => (
                "Philox4x32-10, then the instruction for E2M1, emulated",
                "this process was asked to, for a test".into(),
            ),
            Conversion::HardwareNearest => (
                "Philox4x32-10, then arithmetic on f32 with fma.rz",
                format!("{target} has only the instruction that rounds to nearest"),
            ),
            Conversion::Sm80 | Conversion::Sm89 => (
                "Philox4x32-10, then arithmetic on f32 with fma.rz",
                format!("{target} has no E2M1 conversion"),
            ),
            Conversion::Software => (
                "Philox4x32-10, then plain arithmetic on values and bits",
                format!("{target} has no E2M1 conversion, nor PTX of sm_80"),
            ),
        }
    }

    fn products(capabilities: &Capabilities) -> Vec<CodePath> {
        let [packed, one_packed, bf16, grouped] = match capabilities.gemm {
            GemmBackend::Sm90Wgmma => hopper(),
            GemmBackend::CublasLt => cublaslt(),
            GemmBackend::Sm120BlockScaled => block_scaled(),
            GemmBackend::Cmma => matrix_instructions(),
            GemmBackend::Scalar => scalar(),
        };
        let wide = code_path(
            WIDE,
            "Burn's matmul, in f32 unless operands and result are f16, a packed operand dequantized before; in \
             groups all tokens by every expert, and zeros for those of others",
            "the kernels multiply what bf16 holds: codes and bf16",
        );
        let [packed, one_packed, bf16, grouped] = [
            (PACKED, packed),
            (ONE_PACKED, one_packed),
            (BF16, bf16),
            (GROUPED, grouped),
        ]
        .map(|(operation, (path, why))| code_path(operation, path, why));
        vec![packed, one_packed, bf16, wide, grouped]
    }

    /// Path and reason of products of packed operands, of one with a bf16 one, of two bf16 ones, and of
    /// those in groups.
    type Products = [(&'static str, &'static str); 4];

    const SHAPES: &str = "sizes decide which: --shape says";

    const BURNS_BF16: &str = "to a bf16 result without bias: Burn's matmul, autotuned; others: tiles in shared \
                              memory";
    const WHY_BURNS_BF16: &str =
        "Burn's bf16 product is faster than the tiles; others it would compute in f32";

    fn hopper() -> Products {
        [
            (
                "wgmma, f32 sums; operands decoded to bf16 (exact) in registers or before; up to 16 rows by \
                 mma.sync; where n or k is no multiple of 8, tiles decoded in shared memory",
                "compute capability 9.0 has wgmma, and no FP4 tensor cores, which begin at 10.0 (--shape says \
                 more)",
            ),
            ("as two packed ones", SHAPES),
            (
                "wgmma, f32 sums; operands stored the other way round are read as they are",
                "it is the kernel that packed operands are decoded for",
            ),
            (
                "wgmma, one launch for all groups, with their offsets in device memory",
                "no host reads the sizes of the groups",
            ),
        ]
    }

    fn cublaslt() -> Products {
        [
            (
                "FP4 tensor cores through cuBLASLt, operands as they are",
                "compute capability 10.0 and 10.3 have them; has not run on one yet (--shape says whether the \
                 library takes a product)",
            ),
            (
                "the packed one decoded to bf16 (exact), bf16 by cuBLASLt; up to 16 rows with a packed weight by \
                 mma.sync, which decodes it in registers",
                SHAPES,
            ),
            (
                "bf16 by cuBLASLt",
                "the library multiplies bf16 as it does FP4",
            ),
            (
                "tiles decoded to bf16 in shared memory, 16x16x16 matrix instructions; one launch for all groups",
                "the library's own grouped products are not used: docs/src/gemm.md says why",
            ),
        ]
    }

    fn block_scaled() -> Products {
        [
            (
                "block-scaled mma.sync on codes and scales as they are, f32 sums; up to 16 rows by mma.sync on \
                 what is decoded in registers",
                "the device has the instructions; this kernel has not run on one yet (--shape says more)",
            ),
            (
                "up to 16 rows with a packed weight by mma.sync, which decodes it in registers; others: tiles \
                 decoded to bf16 in shared memory",
                "block-scaled instructions take packed operands only",
            ),
            (BURNS_BF16, WHY_BURNS_BF16),
            (
                "both packed, along rows: block-scaled mma.sync; others: tiles decoded in shared memory; one \
                 launch for all groups",
                "the block-scaled kernel does not take contractions in groups",
            ),
        ]
    }

    fn matrix_instructions() -> Products {
        [
            (
                "tiles decoded to bf16 in shared memory (exact), 16x16x16 matrix instructions, f32 sums; up to \
                 16 rows by mma.sync, which decodes in registers, from sm_80 on",
                "the device has them for bf16, in planes of 32, and no FP4 instructions that are used yet",
            ),
            (
                "as two packed ones, where the weight is the packed one; else tiles",
                SHAPES,
            ),
            (BURNS_BF16, WHY_BURNS_BF16),
            (
                "tiles decoded in shared memory, one launch for all groups",
                "no host reads the sizes of the groups",
            ),
        ]
    }

    fn scalar() -> Products {
        [
            (
                "one unit for each output element, f32 sums in order",
                "the device reports no 16x16x16 bf16 matrix instructions in planes of 32",
            ),
            (
                "the packed one dequantized to f32, then Burn's matmul in f32",
                "the kernel for such devices is for tests: what is not NVFP4 is left to Burn",
            ),
            (
                "Burn's matmul",
                "the kernel for such devices is for tests: what is not NVFP4 is left to Burn",
            ),
            (
                "packed or bf16: one unit for each output element, one launch for all groups",
                "no host reads the sizes of the groups",
            ),
        ]
    }

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

        fn find<'a>(paths: &'a [CodePath], operation: &str) -> &'a CodePath {
            let found: Vec<_> = paths
                .iter()
                .filter(|path| path.operation == operation)
                .collect();
            assert_eq!(found.len(), 1, "{operation}");
            found[0]
        }

        /// Every architecture has a line for what Flex has, in the same order, and says what is its own.
        #[test]
        fn every_architecture_says_what_it_does() {
            use Conversion::{Hardware, HardwareNearest, Sm80, Sm89, Software};
            let devices = [
                (
                    None,
                    Software,
                    GemmBackend::Scalar,
                    "plain arithmetic",
                    "one unit for each",
                ),
                (
                    Some(80),
                    Sm80,
                    GemmBackend::Cmma,
                    "in PTX",
                    "matrix instructions",
                ),
                (Some(90), Sm89, GemmBackend::Sm90Wgmma, "in PTX", "wgmma"),
                (
                    Some(100),
                    Hardware,
                    GemmBackend::CublasLt,
                    "cvt.rn",
                    "cuBLASLt",
                ),
                (
                    Some(120),
                    HardwareNearest,
                    GemmBackend::Sm120BlockScaled,
                    "cvt.rn",
                    "block-scaled",
                ),
            ];
            let operations: Vec<&str> = flex().iter().map(|path| path.operation).collect();
            for (capability, conversion, gemm, nearest, product) in devices {
                let paths = of_capabilities(&device(capability, conversion, gemm));
                let found: Vec<&str> = paths.iter().map(|path| path.operation).collect();
                assert_eq!(found, operations);
                for (operation, part) in [(NEAREST, nearest), (PACKED, product)] {
                    let path = &find(&paths, operation).path;
                    assert!(path.contains(part), "{capability:?}, {operation}: {path}");
                }
                let stochastic = &find(&paths, STOCHASTIC).path;
                assert_eq!(
                    stochastic.contains("cvt.rs"),
                    conversion == Hardware,
                    "{stochastic}"
                );
                let layout = &find(&paths, LAYOUT).path;
                assert_eq!(
                    layout.starts_with("not used"),
                    gemm != GemmBackend::CublasLt,
                    "{layout}"
                );
            }
        }
    }
}
