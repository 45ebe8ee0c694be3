//! The CUDA source of every kernel, compiled for Hopper and Blackwell on a machine without a GPU, and
//! the conversion instructions looked for in the machine code.
#![cfg(all(feature = "cpu", feature = "cuda"))]

#[path = "common/nvrtc.rs"]
mod nvrtc;

use cubecl::{
    ir::{
        ElemType, FloatKind as CubeFloat,
        features::{MmaConfig, Plane},
    },
    prelude::*,
};
use cubecl_server::compiler::Compiler;
use nvfp4_kernels::{
    cube::{
        block::{BlockPolicy, Conversion},
        philox::RandomLaunch,
    },
    device::FloatKind,
    gemm, ops,
};
use nvrtc::CudaTools;
use std::sync::Arc;

/// What NVRTC is asked for, and how the kernels convert there.
const TARGETS: [(&str, Conversion); 4] = [
    ("sm_90a", Conversion::Software),
    ("sm_100a", Conversion::Hardware),
    ("sm_103a", Conversion::Hardware),
    ("sm_120a", Conversion::HardwareNearest),
];

/// `cvt.rn.satfinite.e2m1x2` and `cvt.rs.satfinite.e2m1x4` in SASS.
const NEAREST: &str = "F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C";
const STOCHASTIC: &str = "F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C.RS";

/// One kernel of the crate, as source.
struct Source {
    name: String,
    text: String,
    policy: Option<BlockPolicy>,
}

fn source(name: String, kernel: impl CubeKernel, policy: Option<BlockPolicy>) -> Source {
    let mut compiler = cubecl_cpp::shared::CppCompiler::<cubecl_cpp::target::Cuda>::default();
    let mut options = cubecl_cpp::shared::CompilationOptions::default();
    options.supports_features.grid_constants = true;
    let compiled = compiler.compile(kernel.define(), &options);
    let text = compiled
        .unwrap_or_else(|error| panic!("{name}: {error:?}"))
        .to_string();
    Source { name, text, policy }
}

/// Every kernel in every policy that a device with `conversion` uses.
fn sources(conversion: Conversion) -> Vec<Source> {
    // The CPU's client stands in: only its properties are asked, and nothing is launched.
    let client = cubecl::Device::Cpu(Default::default()).client();
    // What the CUDA runtime would add to them: matrix instructions and plane operations.
    let mut properties = (*client.properties_shared()).clone();
    let float = ElemType::Float;
    properties.features.matmul.cmma.insert(MmaConfig {
        a_type: float(CubeFloat::BF16),
        b_type: float(CubeFloat::BF16),
        cd_type: float(CubeFloat::F32),
        m: 16,
        n: 16,
        k: 16,
    });
    properties.features.plane.insert(Plane::Ops);
    (
        properties.hardware.plane_size_min,
        properties.hardware.plane_size_max,
    ) = (32, 32);
    let (properties, target) = (Arc::new(properties), client.target_properties_shared());
    let (rows, cols) = (256, 256);
    let (count, dim) = (CubeCount::Static(1, 1, 1), CubeDim::new_1d(256));
    let memory = client.empty(rows * cols * 4);
    let buffer = |len: usize| unsafe { BufferArg::from_raw_parts(memory.clone(), len) };
    let random = || RandomLaunch::new(1, 2, 3, 4);
    let blocks = rows * cols / 16;
    let mut sources = Vec::new();
    macro_rules! add {
        ($name:expr, $policy:expr, $kernel:path, $($argument:expr),* $(,)?) => {{
            // SAFETY: nothing is launched.
            #[allow(unused_unsafe)]
            let kernel = unsafe {
                $kernel(properties.clone(), target.clone(), count.clone(), dim, $($argument),*)
            };
            sources.push(source($name, kernel, $policy));
        }};
    }
    for dtype in [FloatKind::F32, FloatKind::F16, FloatKind::Bf16] {
        let (width, elem) = (16 / dtype.size(), dtype.storage_type());
        for address in [AddressType::U32, AddressType::U64] {
            // The index width is independent of the element type: one of them stands for all.
            if address == AddressType::U64 && dtype != FloatKind::Bf16 {
                continue;
            }
            let tag = format!("{dtype:?}-{address:?}");
            add!(
                format!("amax-{tag}"),
                None,
                ops::kernels::amax_kernel::create_dummy_kernel,
                address,
                width,
                buffer(rows * cols / width),
                buffer(1),
                rows * cols / width,
                true,
                dtype,
                elem,
            );
            add!(
                format!("amax_cols-{tag}"),
                None,
                ops::kernels::amax_cols_kernel::create_dummy_kernel,
                address,
                buffer(rows * cols),
                buffer(1),
                rows,
                cols,
                1,
                true,
                dtype,
                elem,
            );
            for transposed in [false, true] {
                add!(
                    format!("dequantize-{tag}-{transposed}"),
                    None,
                    ops::kernels::dequantize_kernel::create_dummy_kernel,
                    address,
                    buffer(blocks),
                    buffer(blocks),
                    buffer(1),
                    buffer(rows * cols),
                    rows,
                    cols,
                    transposed,
                    dtype,
                    elem,
                );
            }
            for bias in [false, true] {
                let epilogue = gemm::kernels::Epilogue {
                    bias,
                    ordered_add: true,
                };
                add!(
                    format!("scalar_gemm-{tag}-{bias}"),
                    None,
                    gemm::kernels::scalar_kernel::create_dummy_kernel,
                    address,
                    buffer(blocks),
                    buffer(blocks),
                    buffer(1),
                    buffer(blocks),
                    buffer(blocks),
                    buffer(1),
                    buffer(rows),
                    buffer(rows * cols),
                    rows,
                    rows,
                    cols / 16,
                    epilogue,
                    dtype,
                    elem,
                );
                add!(
                    format!("matrix_gemm-{tag}-{bias}"),
                    None,
                    gemm::kernels::matrix_kernel::create_dummy_kernel,
                    address,
                    buffer(blocks),
                    buffer(blocks),
                    buffer(1),
                    buffer(blocks),
                    buffer(blocks),
                    buffer(1),
                    buffer(rows),
                    buffer(rows * cols),
                    rows,
                    rows,
                    cols / 16,
                    epilogue,
                    dtype,
                    elem,
                );
            }
            for (stochastic, device_offset) in [(false, false), (true, false), (true, true)] {
                for hadamard in [false, true] {
                    let policy = BlockPolicy {
                        stochastic,
                        device_offset,
                        hadamard,
                        conversion,
                    };
                    let tag = format!("{tag}-{stochastic}-{device_offset}-{hadamard}");
                    add!(
                        format!("quantize_col-{tag}"),
                        Some(policy),
                        ops::kernels::quantize_col_kernel::create_dummy_kernel,
                        address,
                        buffer(rows * cols),
                        buffer(1),
                        buffer(blocks),
                        buffer(blocks),
                        buffer(2),
                        random(),
                        rows,
                        cols,
                        1,
                        policy,
                        dtype,
                        elem,
                    );
                    if hadamard {
                        continue;
                    }
                    add!(
                        format!("quantize_row-{tag}"),
                        Some(policy),
                        ops::kernels::quantize_row_kernel::create_dummy_kernel,
                        address,
                        width,
                        buffer(rows * cols / width),
                        buffer(1),
                        buffer(blocks),
                        buffer(blocks),
                        buffer(2),
                        random(),
                        blocks,
                        policy,
                        dtype,
                        elem,
                    );
                }
            }
            let policy = BlockPolicy {
                stochastic: false,
                device_offset: false,
                hadamard: false,
                conversion,
            };
            add!(
                format!("quantize_tile-{tag}"),
                Some(policy),
                ops::kernels::quantize_tile_kernel::create_dummy_kernel,
                address,
                width,
                buffer(rows * cols / width),
                buffer(1),
                buffer(blocks),
                buffer(blocks),
                buffer(blocks * 2),
                buffer(blocks),
                rows,
                cols,
                policy,
                dtype,
                elem,
            );
        }
    }
    sources
}

fn check_target(arch: &str, conversion: Conversion) {
    let tools = match CudaTools::find() {
        Ok(tools) => tools,
        Err(reason) => {
            println!("SKIPPED: compiles_for_{arch}: {reason}");
            return;
        }
    };
    let sources = sources(conversion);
    println!("{arch}: {} kernels", sources.len());
    for Source { name, text, policy } in sources {
        let code = tools
            .compile(&text, arch)
            .unwrap_or_else(|log| panic!("{name} for {arch}:\n{log}\n{text}"));
        let Some(policy) = policy else { continue };
        let sass = tools.disassemble(&code, &format!("{name}-{arch}"));
        let stochastic = sass.contains(STOCHASTIC);
        let nearest = sass
            .lines()
            .any(|line| line.contains(NEAREST) && !line.contains(STOCHASTIC));
        let expected = match (policy.conversion, policy.stochastic) {
            (Conversion::Software, _) | (Conversion::HardwareNearest, true) => (false, false),
            (_, false) => (true, false),
            (Conversion::Hardware, true) => (false, true),
        };
        assert_eq!(
            (nearest, stochastic),
            expected,
            "(nearest, stochastic) in {name} for {arch}"
        );
    }
}

#[test]
fn compiles_for_sm_90a() {
    check_target(TARGETS[0].0, TARGETS[0].1);
}

#[test]
fn compiles_for_sm_100a() {
    check_target(TARGETS[1].0, TARGETS[1].1);
}

#[test]
fn compiles_for_sm_103a() {
    check_target(TARGETS[2].0, TARGETS[2].1);
}

#[test]
fn compiles_for_sm_120a() {
    check_target(TARGETS[3].0, TARGETS[3].1);
}

/// The compilation can fail: the stochastic conversion does not exist for sm_120a.
#[test]
fn stochastic_conversion_is_refused_where_it_does_not_exist() {
    let Ok(tools) = CudaTools::find() else {
        println!(
            "SKIPPED: stochastic_conversion_is_refused_where_it_does_not_exist: no CUDA tools"
        );
        return;
    };
    let sources = sources(Conversion::Hardware);
    let kernel = sources
        .iter()
        .find(|source| source.policy.is_some_and(|policy| policy.stochastic))
        .unwrap();
    assert!(tools.compile(&kernel.text, "sm_100a").is_ok());
    for arch in ["sm_90a", "sm_120a"] {
        assert!(tools.compile(&kernel.text, arch).is_err(), "{arch}");
    }
}
