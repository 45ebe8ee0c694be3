//! The CUDA source of the Hopper kernels, compiled on a machine without a GPU, and their machine code
//! read: the instructions that must be there, and no memory traffic for spilled registers.

use crate::support::nvrtc::CudaTools;
use crate::support::sources::{count, cuda_source, disassembled, is_left_out, spills};
use cubecl::prelude::*;
use half::bf16;
use nvfp4_kernels::{
    cube::ptx::Major,
    gemm::{
        OutputAmax,
        kernels::{
            ArrangeSizeLaunch, EpilogueKind, EpilogueLaunch, Factor, GroupedDim,
            GroupedProblemLaunch, MixedMatrixLaunch, PackedMatrixLaunch, ProblemShapeLaunch,
            SM90_UNITS, Schedule, ScheduledProblemLaunch, Sm90Plan, Sm90Tile, SmallMLeft,
            SmallMShape, W4a16Plan, W4a16Tile, arrange_kernel, dequantize_unscaled_kernel,
            sm90_bf16_kernel, sm90_w4a16_kernel, small_m_kernel, transpose_kernel,
        },
    },
    tensor::FloatKind,
};

/// The machine code of a kernel, or `None` where `NVFP4_ONLY` is no part of its name.
fn compile(tools: &CudaTools, name: &str, text: &str) -> Option<String> {
    (!is_left_out(name)).then(|| disassembled(tools, name, text, "sm_90a"))
}

#[test]
fn sm90_kernel_uses_the_tensor_cores_and_spills_nothing() {
    let tools = tools!("sm90_kernel_uses_the_tensor_cores_and_spills_nothing");
    let client = cubecl::Device::Cpu(Default::default()).client();
    let properties = client.properties_shared();
    let target = client.target_properties_shared();
    let memory = client.empty(1 << 20);
    let buffer = |len: usize| unsafe { BufferArg::from_raw_parts(memory.clone(), len) };
    let map = |rows: usize| {
        let tensor =
            unsafe { TensorArg::from_raw_parts(memory.clone(), [64, 1].into(), [256, 64].into()) };
        TensorMapArg::new(
            TiledArgs {
                tile_size: [rows, 64].into(),
            },
            tensor,
            bf16::elem_type_native(),
        )
        .with_swizzle(TensorMapSwizzle::B128)
    };
    let epilogue = |len: usize, kind: EpilogueKind| {
        EpilogueLaunch::new(
            buffer(len),
            buffer(len),
            buffer(len),
            buffer(1 << 14),
            buffer(1),
            2688.0,
            2688.0,
            256.0,
            kind,
        )
    };
    let plain_epilogue = EpilogueKind {
        a: Factor::Tensor,
        b: Factor::Tensor,
        bias: false,
        accumulate: false,
        out: FloatKind::Bf16,
        amax: None,
    };
    let all = EpilogueKind {
        a: Factor::PerRow,
        b: Factor::PerRow,
        bias: true,
        accumulate: true,
        out: FloatKind::F32,
        amax: Some(OutputAmax::Whole),
    };
    // SAFETY: nothing is launched.
    #[allow(unused_unsafe)]
    let kernel = unsafe {
        dequantize_unscaled_kernel::create_dummy_kernel(
            properties.clone(),
            target.clone(),
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(256),
            AddressType::U32,
            buffer(2048),
            buffer(1024),
            buffer(2048),
            2048,
        )
    };
    if let Some(sass) = compile(&tools, "decode", &cuda_source("decode", &kernel)) {
        assert_eq!(count(&sass, "STG.E.128"), 4);
        assert_eq!(spills(&sass), 0, "decode spills");
    }
    // SAFETY: nothing is launched.
    #[allow(unused_unsafe)]
    let kernel = unsafe {
        transpose_kernel::create_dummy_kernel(
            properties.clone(),
            target.clone(),
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(256),
            AddressType::U32,
            8,
            8,
            buffer(1024),
            buffer(1024),
            128,
            64,
        )
    };
    if let Some(sass) = compile(&tools, "transpose", &cuda_source("transpose", &kernel)) {
        println!("transpose: {} lines", sass.lines().count());
        assert!(count(&sass, "LDG.E.128") >= 2);
        assert!(count(&sass, "STG.E.128") >= 1);
        assert_eq!(spills(&sass), 0, "transpose spills");
    }
    let (whole, tail, halves) = ((false, false), (true, false), (true, true));
    for (warps, strips, columns, ahead, (tail, halves), left, plain) in [
        (16, 2, 1, 1, whole, SmallMLeft::Packed, true),
        (16, 1, 1, 1, tail, SmallMLeft::Packed, false),
        (16, 2, 1, 1, whole, SmallMLeft::Bf16, true),
        (8, 2, 2, 2, tail, SmallMLeft::Bf16, false),
        (8, 2, 2, 2, whole, SmallMLeft::Packed, true),
        (8, 1, 2, 2, whole, SmallMLeft::Packed, true),
        (16, 2, 1, 2, whole, SmallMLeft::Packed, true),
        (8, 2, 2, 2, halves, SmallMLeft::Bf16, false),
        (16, 2, 1, 1, halves, SmallMLeft::Packed, true),
    ] {
        let shape = SmallMShape {
            warps,
            strips,
            columns,
            ahead,
            tail,
            halves,
            left,
            converts: true,
        };
        // SAFETY: nothing is launched.
        #[allow(unused_unsafe)]
        let kernel = unsafe {
            small_m_kernel::create_dummy_kernel(
                properties.clone(),
                target.clone(),
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(32 * warps as u32),
                AddressType::U32,
                MixedMatrixLaunch::new(buffer(512), buffer(512), buffer(512)),
                PackedMatrixLaunch::new(buffer(512), buffer(512)),
                ProblemShapeLaunch::new(8, 64, 256, 1),
                epilogue(64, if plain { plain_epilogue } else { all }),
                buffer(64),
                shape,
            )
        };
        let name = format!("small_m-{warps}-{strips}-{columns}-{ahead}-{tail}-{halves}-{left:?}");
        let Some(sass) = compile(&tools, &name, &cuda_source(&name, &kernel)) else {
            continue;
        };
        println!(
            "{name}: {} HMMA, {} LDL, {} lines",
            count(&sass, "HMMA"),
            spills(&sass),
            sass.lines().count()
        );
        // Two instructions for each word, strip and group of columns, and four words.
        assert_eq!(count(&sass, "HMMA"), 8 * ahead * strips * columns, "{name}");
        assert_eq!(spills(&sass), 0, "{name} spills");
    }
    let order = |tile, by_width| Some(Schedule { tile, by_width });
    for (packed, grouped) in [
        (true, None),
        (false, None),
        (true, order(W4a16Tile::ALL[0], true)),
        (true, order(W4a16Tile::ALL[1], true)),
        (true, order(W4a16Tile::ALL[1], false)),
    ] {
        // SAFETY: nothing is launched.
        #[allow(unused_unsafe)]
        let kernel = unsafe {
            arrange_kernel::create_dummy_kernel(
                properties.clone(),
                target.clone(),
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(256),
                AddressType::U32,
                MixedMatrixLaunch::new(buffer(2048), buffer(1024), buffer(16384)),
                buffer(2048),
                buffer(9),
                buffer(32),
                ArrangeSizeLaunch::new(16, 2048, 8),
                packed,
                grouped,
            )
        };
        let name = format!("arrange-{packed}-{}", grouped.is_some());
        let Some(sass) = compile(&tools, &name, &cuda_source(&name, &kernel)) else {
            continue;
        };
        println!("{name}: {} lines", sass.lines().count());
        if grouped.is_none() {
            assert_eq!(count(&sass, "STG.E.128"), 2, "{name}");
        }
        assert_eq!(spills(&sass), 0, "{name} spills");
    }
    for tile in W4a16Tile::ALL {
        // The whole epilogue and groups once for a wide and for a narrow tile: an instance takes
        // seconds to compile.
        let instances = [
            (GroupedDim::None, plain_epilogue, FloatKind::Bf16),
            (GroupedDim::M, plain_epilogue, FloatKind::F16),
            (GroupedDim::None, all, FloatKind::F32),
        ];
        let most = if matches!(tile.rows_a, 32 | 256) {
            3
        } else {
            1
        };
        for (grouping, kind, out) in instances.into_iter().take(most) {
            let kind = EpilogueKind { out, ..kind };
            let name = format!(
                "fused-{}-{}-{grouping:?}-{out:?}",
                tile.rows_a,
                tile.rows_b()
            );
            let b_map = TensorMapArg::new(
                TiledArgs {
                    tile_size: [tile.rows_b(), 16].into(),
                },
                unsafe {
                    TensorArg::from_raw_parts(memory.clone(), [64, 1].into(), [256, 64].into())
                },
                u32::elem_type_native(),
            );
            // SAFETY: nothing is launched.
            #[allow(unused_unsafe)]
            let kernel = unsafe {
                sm90_w4a16_kernel::create_dummy_kernel(
                    properties.clone(),
                    target.clone(),
                    CubeCount::Static(1, 1, 1),
                    CubeDim::new_1d(tile.units()),
                    AddressType::U32,
                    map(tile.rows_of_copy()),
                    b_map,
                    buffer(512),
                    ScheduledProblemLaunch::new(
                        ProblemShapeLaunch::new(256, 256, 64, 1),
                        buffer(256),
                        8,
                    ),
                    epilogue(256, kind),
                    buffer(1 << 12),
                    W4a16Plan {
                        grouped: grouping,
                        tile,
                    },
                )
            };
            let Some(sass) = compile(&tools, &name, &cuda_source(&name, &kernel)) else {
                continue;
            };
            println!(
                "{name}: {} HGMMA, {} LDL, {} STL, {} lines",
                count(&sass, "HGMMA"),
                count(&sass, "LDL"),
                count(&sass, "STL"),
                sass.lines().count()
            );
            let widths = tile.widths().len();
            // One for each block of 16 of a stage, in two sets of four.
            assert_eq!(count(&sass, "HGMMA"), 8 * widths, "{name}");
            // Never more than the products of one set is waited for: the compiler has not serialized
            // them (it says `gsb0, 0x0` behind each, then).
            let waits = sass.matches("WARPGROUP.DEPBAR.LE gsb0, 0x0").count();
            assert_eq!(waits, widths, "{name} is serialized");
            // A main loop is what lies between the first product of a width and the last.
            let lines: Vec<&str> = sass.lines().collect();
            let products: Vec<usize> = (0..lines.len())
                .filter(|&line| lines[line].contains("HGMMA"))
                .collect();
            for products in products.chunks(8) {
                let loops = lines[products[0]..products[7]].join("\n");
                assert_eq!(spills(&loops), 0, "{name} spills in its main loop");
            }
        }
    }
    for tile in Sm90Tile::ALL {
        let rows = [false; 2];
        let mut instances = vec![
            (GroupedDim::None, plain_epilogue, FloatKind::Bf16, rows),
            (GroupedDim::None, plain_epilogue, FloatKind::F16, rows),
            (GroupedDim::M, plain_epilogue, FloatKind::Bf16, rows),
            (GroupedDim::K, plain_epilogue, FloatKind::F32, rows),
            (GroupedDim::None, all, FloatKind::F32, rows),
        ];
        for columns in [[false, true], [true, false], [true, true]] {
            if tile.takes_mn_major() || !columns[1] {
                instances.push((GroupedDim::None, plain_epilogue, FloatKind::Bf16, columns));
            }
        }
        if tile.takes_mn_major() {
            let columns = [true; 2];
            instances.push((GroupedDim::K, plain_epilogue, FloatKind::F32, columns));
            instances.push((GroupedDim::None, all, FloatKind::F32, columns));
        }
        for (grouping, kind, out, columns) in instances {
            let kind = EpilogueKind { out, ..kind };
            let accumulate = kind.accumulate;
            let name = format!("sm90-{tile:?}-{grouping:?}-{accumulate}-{out:?}-{columns:?}");
            let operand = |rows, in_columns| map(if in_columns { 64 } else { rows });
            // SAFETY: nothing is launched.
            #[allow(unused_unsafe)]
            let kernel = unsafe {
                sm90_bf16_kernel::create_dummy_kernel(
                    properties.clone(),
                    target.clone(),
                    CubeCount::Static(1, 1, 1),
                    CubeDim::new_1d(SM90_UNITS),
                    AddressType::U32,
                    operand(128, columns[0]),
                    operand(tile.n(), columns[1]),
                    GroupedProblemLaunch::new(
                        ProblemShapeLaunch::new(256, 256, 64, 1),
                        buffer(256),
                        8,
                    ),
                    epilogue(256, kind),
                    buffer(1 << 12),
                    Sm90Plan {
                        grouped: grouping,
                        tile,
                        majors: columns.map(|columns| if columns { Major::Mn } else { Major::K }),
                    },
                )
            };
            let Some(sass) = compile(&tools, &name, &cuda_source(&name, &kernel)) else {
                continue;
            };
            println!(
                "{name}: {} HGMMA, {} LDL, {} STL, {} lines",
                count(&sass, "HGMMA"),
                count(&sass, "LDL"),
                count(&sass, "STL"),
                sass.lines().count()
            );
            // Four in the loop, one in the tail.
            assert_eq!(count(&sass, "HGMMA"), 5, "{name}");
            // The operands that the instruction transposes.
            let transposed = [(".tnspA", columns[0]), (".tnspB", columns[1])];
            for (which, is_transposed) in transposed {
                let expected = if is_transposed { 5 } else { 0 };
                assert_eq!(sass.matches(which).count(), expected, "{name}: {which}");
            }
            // With every part of the epilogue, the widest tile keeps one register of it in memory.
            let most = if kind == all && tile == Sm90Tile::N256 {
                2
            } else {
                0
            };
            assert!(spills(&sass) <= most, "{name} spills");
            let lines: Vec<&str> = sass.lines().collect();
            let is_product = |line: &&str| line.contains("HGMMA");
            let first = lines.iter().position(is_product).unwrap();
            let last = lines.iter().rposition(is_product).unwrap();
            let loops = lines[first..last].join("\n");
            assert_eq!(spills(&loops), 0, "{name} spills in its main loop");
            let boxes = |rows: usize, in_columns| if in_columns { rows / 64 } else { 1 };
            let boxes = boxes(128, columns[0]) + boxes(tile.n(), columns[1]);
            assert!(count(&sass, "UTMALDG") >= boxes, "{name}");
        }
    }
}
