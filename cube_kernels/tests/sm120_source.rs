//! The CUDA source of the block-scaled product, compiled for consumer Blackwell on a machine without a
//! GPU, and its machine code read: one block-scaled instruction for each 16 x 8 x 64, no other matrix
//! instruction, and no memory traffic for spilled registers.
#![cfg(all(feature = "cpu", feature = "cuda"))]

#[path = "common/nvrtc.rs"]
mod nvrtc;

use std::sync::Arc;

use cubecl::{ir::features::Plane, prelude::*};
use cubecl_server::{compiler::Compiler, runtime::Runtime};
use nvfp4_kernels::{
    device::FloatKind,
    gemm::kernels::{
        BlockScaledShape, EpilogueKind, Factor, Grouping, Multiply, Pieces, sm120_kernel,
    },
};
use nvrtc::CudaTools;

/// `mma.sync.m16n8k64` with E2M1 operands and E4M3 scales for 16 elements, in SASS.
const BLOCK_SCALED: &str = "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X";

fn source(
    name: &str,
    grouping: Grouping,
    shape: BlockScaledShape,
    pieces: Pieces,
    kind: EpilogueKind,
) -> String {
    let client = cubecl::Device::Cpu(Default::default()).client();
    let mut properties = (*client.properties_shared()).clone();
    properties.features.plane.insert(Plane::Ops);
    (
        properties.hardware.plane_size_min,
        properties.hardware.plane_size_max,
    ) = (32, 32);
    let memory = client.empty(1 << 16);
    let buffer = |len: usize| unsafe { BufferArg::from_raw_parts(memory.clone(), len) };
    // SAFETY: nothing is launched.
    #[allow(unused_unsafe)]
    let kernel = unsafe {
        sm120_kernel::create_dummy_kernel(
            Arc::new(properties),
            Arc::new(cubecl::cuda::CudaRuntime::target_properties()),
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(256),
            AddressType::U32,
            buffer(1024),
            buffer(512),
            buffer(1024),
            buffer(512),
            buffer(64),
            buffer(64),
            buffer(64),
            buffer(2),
            buffer(1024),
            buffer(256),
            buffer(1),
            64,
            64,
            64,
            1,
            2688.0,
            2688.0,
            8,
            grouping,
            shape,
            pieces,
            kind,
        )
    };
    let mut compiler = cubecl_cpp::shared::CppCompiler::<cubecl_cpp::target::Cuda>::default();
    let mut options = cubecl_cpp::shared::CompilationOptions::default();
    options.supports_features.grid_constants = true;
    compiler
        .compile(kernel.define(), &options)
        .unwrap_or_else(|error| panic!("{name}: {error:?}"))
        .to_string()
}

/// Instructions of `sass` whose opcode begins with `opcode`.
fn count(sass: &str, opcode: &str) -> usize {
    sass.lines()
        .filter(|line| line.split_whitespace().any(|word| word.starts_with(opcode)))
        .count()
}

const PLAIN: EpilogueKind = EpilogueKind {
    a: Factor::Tensor,
    b: Factor::Tensor,
    bias: false,
    accumulate: false,
    out: FloatKind::Bf16,
    amax: false,
};

const ALL: EpilogueKind = EpilogueKind {
    a: Factor::PerRow,
    b: Factor::PerRow,
    bias: true,
    accumulate: true,
    out: FloatKind::F32,
    amax: true,
};

#[test]
fn block_scaled_instructions_and_no_spills() {
    let tools = match CudaTools::find() {
        Ok(tools) => tools,
        Err(reason) => {
            println!("SKIPPED: block_scaled_instructions_and_no_spills: {reason}");
            return;
        }
    };
    for (strips, k, grouping, kind) in [
        (2, 128, Grouping::Dense, PLAIN),
        (1, 128, Grouping::Dense, PLAIN),
        (2, 64, Grouping::Rows, PLAIN),
        (2, 128, Grouping::Dense, ALL),
        (1, 16, Grouping::Rows, ALL),
        (2, 32, Grouping::Dense, ALL),
    ] {
        let shape = BlockScaledShape {
            strips,
            multiply: Multiply::Instruction,
        };
        let name = format!("sm120-{strips}-{k}-{grouping:?}-{:?}", kind.out);
        let text = source(&name, grouping, shape, Pieces::of(k), kind);
        for arch in ["sm_120a", "sm_121a"] {
            let name = format!("{name}-{arch}");
            let code = tools
                .compile(&text, arch)
                .unwrap_or_else(|log| panic!("{name}:\n{log}\n{text}"));
            let sass = tools.disassemble(&code, &name);
            if let Some(folder) = std::env::var_os("NVFP4_DUMP") {
                let folder = std::path::Path::new(&folder);
                std::fs::write(folder.join(format!("{name}.cu")), &text).unwrap();
                std::fs::write(folder.join(format!("{name}.sass")), &sass).unwrap();
            }
            println!(
                "{name}: {} OMMA, {} LDSM, {} LDGSTS, {} lines",
                count(&sass, "OMMA"),
                count(&sass, "LDSM"),
                count(&sass, "LDGSTS"),
                sass.lines().count()
            );
            // Two instructions along the contraction of a stage, for each strip and eight columns.
            assert_eq!(count(&sass, BLOCK_SCALED), 2 * strips * 8, "{name}");
            for other in ["HMMA", "QMMA", "IMMA"] {
                assert_eq!(count(&sass, other), 0, "{name}: {other}");
            }
            assert_eq!(count(&sass, "OMMA"), 2 * strips * 8, "{name}");
            // Two loads of fragments for `b` for each four strips of 8 rows, one for each strip of `a`.
            assert_eq!(count(&sass, "LDSM.16.M88.4"), 2 * (4 + strips), "{name}");
            assert_eq!(
                count(&sass, "LDL") + count(&sass, "STL"),
                0,
                "{name} spills"
            );
        }
    }
}
