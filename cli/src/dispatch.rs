//! Rows of `nvfp4 doctor` that kernels do not describe themselves: Flex, and operations of Burn.

use nvfp4::formats::describe::CodePath;

/// Returns the rows of Flex, which has one kernel for everything.
pub(crate) fn flex() -> Vec<CodePath> {
    let reference = "reference on all threads, AVX2 where there is";
    let host = "Flex tensors are host memory, so operations run the reference itself";
    let row = |operation, kernel, why| CodePath::new(operation, "Flex", kernel, why);
    vec![
        row("amax, quantize, dequantize", reference, host),
        row(
            "MS-EDEN, MXFP8",
            "reference; NVFP4 operands dequantized first",
            host,
        ),
        row(
            "GEMM, NVFP4 or MXFP8",
            "dequantize to f32, then Flex's f32 matmul",
            "CPUs have no 4-bit matrix instructions; panels of rows are dequantized exactly, and \
             global scales and bias follow",
        ),
        row(
            "GEMM, bf16, f16 or f32",
            "Flex's f32 matmul",
            "it is Flex's widest, and exact for narrower operands",
        ),
        row(
            "grouped GEMM",
            "one GEMM for each group",
            "offsets are host memory: a single launch would save nothing",
        ),
        row(
            "attention",
            "reference: online softmax, rows of all heads",
            "no matrix of tokens by tokens; with padding or dropout of weights it is Burn's",
        ),
        burns_prologue(),
    ]
}

/// Describes the prologue that every device leaves to Burn's operations.
fn burns_prologue() -> CodePath {
    CodePath::new(
        "RMSNorm, SwiGLU",
        "Burn",
        "Burn's operations",
        "the layers call Burn for them on every device; nvfp4-kernels also has them as fused \
         prologues of quantization",
    )
}

/// Returns the rows of a CubeCL device.
#[cfg(any(feature = "cpu", feature = "cuda"))]
pub(crate) fn cube(client: &nvfp4::kernels::cubecl::client::Client) -> Vec<CodePath> {
    use nvfp4::kernels::{
        attention,
        capabilities::{Capabilities, GemmBackend},
        gemm, quantize,
    };

    let capabilities = Capabilities::of(client);
    let mut rows = quantize::describe(client);
    rows.extend(gemm::describe_typical(client));
    let bf16 = match capabilities.gemm {
        GemmBackend::Sm90Wgmma | GemmBackend::CublasLt | GemmBackend::Sm100Tcgen05 => None,
        GemmBackend::Sm120BlockScaled | GemmBackend::Cmma => Some(
            "Burn's bf16 matmul is faster than cmma; with a bias or an f32 result it would compute \
             in f32, and the kernels run",
        ),
        GemmBackend::Scalar => {
            Some("scalar kernels are for tests; Burn computes GEMMs of unquantized operands")
        }
    };
    if let Some(why) = bf16 {
        let operation = "GEMM, bf16 layers";
        rows.push(CodePath::new(operation, "Burn", "Burn's matmul", why));
    }
    rows.push(CodePath::new(
        "GEMM, f32 or f16",
        "Burn",
        "dequantize, then Burn's matmul",
        "the kernels multiply what bf16 holds; grouped, Burn multiplies all tokens by every expert",
    ));
    rows.extend(attention::describe(capabilities));
    rows.push(burns_prologue());
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_fit_the_table() {
        let rows = flex();
        assert!(rows.iter().all(CodePath::fits), "{rows:?}");
    }
}
