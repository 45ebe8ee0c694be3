//! CUDA source and machine code of kernels, on a machine without a GPU.

use std::path::Path;

use cubecl::prelude::*;
use cubecl_server::compiler::Compiler;

use super::nvrtc::{Compiled, CudaTools};

/// Returns the tools, or returns early.
macro_rules! tools {
    ($test:expr) => {
        match $crate::support::nvrtc::CudaTools::find() {
            Ok(tools) => tools,
            Err(reason) => {
                nvfp4_test_support::Skip::NoCudaTools.print($test, reason);
                return;
            }
        }
    };
}

/// Returns CubeCL's CUDA C++ source of `kernel`.
pub fn cuda_source(name: &str, kernel: &dyn CubeKernel) -> String {
    cuda_kernel(name, kernel).0
}

/// Returns CubeCL's CUDA C++ source of `kernel`, and the bytes of shared memory of its launch.
pub fn cuda_kernel(name: &str, kernel: &dyn CubeKernel) -> (String, usize) {
    let mut compiler = cubecl_cpp::shared::CppCompiler::<cubecl_cpp::target::Cuda>::default();
    let mut options = cubecl_cpp::shared::CompilationOptions::default();
    options.supports_features.grid_constants = true;
    let compiled = compiler.compile(kernel.define(), &options);
    let compiled = compiled.unwrap_or_else(|error| panic!("{name}: {error:?}"));
    (compiled.to_string(), compiled.shared_memory_size)
}

/// Variable with a substring of the names of the kernels that a run selects.
const ONLY: &str = "NVFP4_ONLY";

/// True if the run selects only some kernels.
pub fn is_selection() -> bool {
    std::env::var_os(ONLY).is_some()
}

/// True if the run omits this kernel.
pub fn is_left_out(name: &str) -> bool {
    std::env::var(ONLY).is_ok_and(|only| !name.contains(&only))
}

/// Compiles `text` to machine code. Also writes source and code to the folder in `NVFP4_DUMP`, for
/// counting instructions by hand.
pub fn machine_code(tools: &CudaTools, name: &str, text: &str, arch: &str) -> Compiled {
    let file = std::env::var_os("NVFP4_DUMP")
        .map(|folder| Path::new(&folder).join(format!("{name}-{arch}")));
    if let Some(file) = &file {
        std::fs::write(file.with_extension("cu"), text).unwrap();
    }
    let compiled = tools
        .compile(text, arch)
        .unwrap_or_else(|log| panic!("{name} for {arch}:\n{log}\n{text}"));
    if let Some(file) = &file {
        std::fs::write(file.with_extension("cubin"), &compiled.code).unwrap();
    }
    compiled
}

/// Returns the number of instructions of `sass` whose opcode begins with `opcode`.
pub fn count(sass: &str, opcode: &str) -> usize {
    sass.lines()
        .filter(|line| line.split_whitespace().any(|word| word.starts_with(opcode)))
        .count()
}

/// Returns the number of instructions of `sass` that spill registers to memory.
pub fn spills(sass: &str) -> usize {
    count(sass, "LDL") + count(sass, "STL")
}
