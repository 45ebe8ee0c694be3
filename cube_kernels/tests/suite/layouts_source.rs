//! The CUDA source of the layout, MXFP8 and MS-EDEN kernels, compiled for Hopper and Blackwell on a
//! machine without a GPU; the conversion instructions looked for in the machine code, and spilled
//! registers, of which there may be none.

use std::sync::Arc;

use crate::support::sources::{Fake, cuda_source, disassembled, is_left_out, spills};
use cubecl::{ir::ElemType, prelude::*};
use nvfp4_kernels::{
    cube::{codec::Conversion, eden::SignsLaunch, philox::RandomLaunch},
    format::block::ElementFormat,
    quantize::kernels::{Grouping, PackedRowsLaunch, ShapeLaunch, SourcePlan},
    tensor::FloatKind,
};

/// All kernels of the crate.
mod kernels {
    pub use nvfp4_kernels::{moe::kernels::*, quantize::kernels::*};
}

/// One kernel of the crate, as source.
struct Source {
    name: String,
    text: String,
    /// Whether its machine code holds each of [`CONVERSIONS`].
    conversions: [bool; 2],
}

/// `cvt.rn.satfinite.e4m3x2` and `cvt.rn.satfinite.e2m1x2` in SASS.
const CONVERSIONS: [&str; 2] = [
    "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C",
    "F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C",
];
const NONE: [bool; 2] = [false, false];

fn source(name: String, kernel: impl CubeKernel, conversions: [bool; 2]) -> Source {
    let text = cuda_source(&name, kernel);
    Source {
        name,
        text,
        conversions,
    }
}

/// Every kernel in every policy that a device with `conversion` uses.
fn sources(conversion: Conversion) -> Vec<Source> {
    let Fake {
        client,
        properties,
        target,
    } = Fake::new();
    let properties = Arc::new(properties);
    let (rows, cols) = (256, 256);
    let (count, dim) = (CubeCount::Static(1, 1, 1), CubeDim::new_1d(256));
    let memory = client.empty(rows * cols * 4);
    let b = |len: usize| unsafe { BufferArg::from_raw_parts(memory.clone(), len) };
    let random = || RandomLaunch::new(1, 2, 3, 4);
    let signs = || SignsLaunch::new(1, 2, 3, 4);
    let shape = || ShapeLaunch::new(rows, cols, 8, 4);
    // As most kernels are launched, and with all that they can be asked for.
    let plain = SourcePlan {
        per_row: false,
        swizzled: false,
        grouping: Grouping::One,
    };
    let plans = [
        ("", plain),
        (
            "-groups",
            SourcePlan {
                grouping: Grouping::Offsets(16),
                ..plain
            },
        ),
        (
            "-batch",
            SourcePlan {
                per_row: true,
                swizzled: true,
                grouping: Grouping::Batch,
            },
        ),
    ];
    // The lengths of buffers do not matter.
    let n = rows * cols / 16;
    let packed = || PackedRowsLaunch::new(b(n), b(n), b(8), cols / 16, 2688.0);
    let eden_tiles = || kernels::EdenTilesLaunch::new(b(8), shape(), 16, 16);
    let eden_out = |swizzled: bool| {
        let scales = match swizzled {
            true => kernels::EdenScalesArgs::Swizzled(b(n)),
            false => kernels::EdenScalesArgs::Compact(b(n)),
        };
        kernels::EdenOutLaunch::new(b(n), scales, b(8))
    };
    let e2m1 = [false, conversion.has_nearest()];
    let mut sources = Vec::new();
    macro_rules! add {
        ($name:expr, $conversions:expr, $kernel:ident, $($argument:expr),* $(,)?) => {{
            // SAFETY: nothing is launched.
            #[allow(unused_unsafe)]
            let kernel = unsafe {
                kernels::$kernel::create_dummy_kernel(
                    properties.clone(), target.clone(), count.clone(), dim, $($argument),*
                )
            };
            let name = format!(concat!(stringify!($kernel), "-{}"), $name);
            sources.push(source(name, kernel, $conversions));
        }};
    }
    add!("", NONE, rescale_kernel, b(9), b(9), 8, 256, 16, 16, 256);
    add!(
        "",
        NONE,
        broadcast_group_values_kernel,
        b(8),
        b(9),
        b(rows),
        rows,
        8
    );
    for kind in [FloatKind::F32, FloatKind::F16, FloatKind::Bf16] {
        let (tag, wide, elem) = (format!("{kind:?}"), AddressType::U64, kind.storage_type());
        add!(
            tag,
            NONE,
            segment_sum_kernel,
            wide,
            b(n),
            b(9),
            b(n),
            rows,
            cols,
            8,
            kind,
            elem
        );
        add!(
            tag,
            NONE,
            zero_padding_rows_kernel,
            wide,
            b(9),
            b(n),
            rows,
            cols,
            8,
            kind,
            elem
        );
        for (address, width) in [(AddressType::U32, 4), (AddressType::U64, 1)] {
            for weighted in [false, true] {
                add!(
                    format!("{tag}-{address:?}-{width}-{weighted}"),
                    NONE,
                    moe_unpermute_kernel,
                    address,
                    width,
                    b(n),
                    b(n),
                    b(n),
                    b(n),
                    rows,
                    rows,
                    cols,
                    2,
                    weighted,
                    kind,
                    conversion,
                );
            }
            add!(
                format!("{tag}-{address:?}-{width}"),
                NONE,
                moe_unpermute_backward_kernel,
                address,
                width,
                b(n),
                b(n),
                b(n),
                b(n),
                b(n),
                b(n),
                rows,
                cols,
                2,
                true,
                kind,
                conversion,
            );
        }
    }
    for address in [AddressType::U32, AddressType::U64] {
        let tag = format!("{address:?}");
        for grouped in [false, true] {
            for (width, wide) in [(4, true), (2, true), (1, true), (1, false)] {
                let tag = format!("{tag}-{width}-{wide}-{grouped}");
                add!(
                    tag,
                    NONE,
                    swizzle_kernel,
                    address,
                    width,
                    b(n),
                    b(n),
                    kernels::GroupRowsLaunch::new(b(9), b(9), 8),
                    b(n),
                    kernels::ScaleShapeLaunch::new(rows, rows, cols, 2, n),
                    wide,
                    grouped,
                );
                add!(
                    tag,
                    NONE,
                    unswizzle_kernel,
                    address,
                    width,
                    b(n),
                    kernels::GroupRowsLaunch::new(b(9), b(9), 8),
                    b(n),
                    b(n),
                    kernels::ScaleShapeLaunch::new(rows, rows, cols, 2, n),
                    wide,
                    grouped,
                );
            }
        }
        add!(
            tag,
            NONE,
            swizzle_block_groups_kernel,
            address,
            b(n),
            b(n),
            b(9),
            b(9),
            b(n),
            rows,
            cols,
            8,
            n,
        );
        add!(
            tag,
            NONE,
            unswizzle_block_groups_kernel,
            address,
            b(n),
            b(9),
            b(9),
            b(n),
            rows,
            2,
            8,
            n,
        );
        for (width, storage) in [
            (4, u32::elem_type_native()),
            (8, FloatKind::Bf16.storage_type()),
        ] {
            for pad in [false, true] {
                let tag = format!("{tag}-{storage:?}-{pad}");
                add!(
                    tag,
                    NONE,
                    move_groups_kernel,
                    address,
                    width,
                    b(n),
                    kernels::GroupRowsLaunch::new(b(9), b(9), 8),
                    b(n),
                    rows,
                    rows,
                    cols,
                    pad,
                    storage,
                );
            }
        }
        for (across, (name, source)) in [false, true]
            .into_iter()
            .flat_map(|across| plans.map(|plan| (across, plan)))
        {
            let swizzled = source.swizzled;
            let policy = kernels::EdenPolicy {
                across,
                source,
                swizzled,
                device_offset: across,
                cuda: true,
                conversion,
            };
            let tag = format!("{tag}-{across}{name}");
            add!(
                tag,
                NONE,
                ms_eden_amax_packed_kernel,
                address,
                packed(),
                eden_tiles(),
                b(8),
                signs(),
                policy,
            );
            add!(
                tag,
                e2m1,
                ms_eden_packed_kernel,
                address,
                packed(),
                eden_tiles(),
                kernels::EdenInputsLaunch::new(b(8), 1.0, 1.0),
                eden_out(swizzled),
                kernels::EdenDrawLaunch::new(b(2), random(), signs()),
                policy,
            );
        }
        for kind in [FloatKind::F32, FloatKind::F16, FloatKind::Bf16] {
            let (width, elem): (usize, ElemType) = (16 / kind.size(), kind.storage_type());
            let tag = format!("{kind:?}-{tag}");
            // The index width is independent of the element type: one of them stands for all.
            if address == AddressType::U64 && kind != FloatKind::Bf16 {
                continue;
            }
            add!(
                tag,
                NONE,
                mx_dequantize_row_kernel,
                address,
                width,
                b(n),
                b(n),
                b(n),
                rows,
                cols,
                ElementFormat::E4m3,
                kind,
                elem,
            );
            add!(
                tag,
                NONE,
                mx_dequantize_col_kernel,
                address,
                width,
                b(n),
                b(n),
                b(n),
                rows,
                cols,
                ElementFormat::E4m3,
                kind,
                elem,
            );
            // All four targets convert to E4M3 themselves. The software form is for GPUs before
            // sm_89, for which Hopper stands in.
            let software = (!conversion.has_nearest()).then_some(false);
            for hardware in software.into_iter().chain([true]) {
                let lanes = 2 * kind.size();
                let e4m3 = [hardware, false];
                let tag = format!("{tag}-{hardware}");
                let mx = kernels::MxPlan {
                    element: ElementFormat::E4m3,
                    hardware,
                    kind,
                };
                add!(
                    tag,
                    e4m3,
                    mx_quantize_row_kernel,
                    address,
                    width,
                    8 / lanes,
                    b(n),
                    b(n),
                    b(n),
                    rows,
                    cols,
                    kernels::MxRowPlan {
                        dense: true,
                        lanes,
                        mx,
                    },
                    elem,
                );
                for (name, plan) in plans {
                    add!(
                        format!("{tag}{name}"),
                        e4m3,
                        mx_quantize_col_kernel,
                        address,
                        width,
                        b(n),
                        b(8),
                        b(n),
                        b(n),
                        shape(),
                        kernels::MxTilesLaunch::new(2, 8, 1),
                        plan.grouping,
                        mx,
                        elem,
                    );
                    add!(
                        format!("{tag}{name}"),
                        e4m3,
                        mx_requantize_across_kernel,
                        address,
                        width,
                        packed(),
                        b(8),
                        b(n),
                        b(n),
                        shape(),
                        kernels::MxTilesLaunch::new(2, 8, 1),
                        plan,
                        mx,
                        elem,
                    );
                }
                for (name, dense, maxima, swizzled) in [
                    ("", true, false, false),
                    ("-rows", false, true, false),
                    ("-swizzled", false, true, true),
                ] {
                    add!(
                        format!("{tag}{name}"),
                        e4m3,
                        mx_requantize_along_kernel,
                        address,
                        4,
                        kernels::PackedRowsLaunch::new(b(n), b(n), b(rows), cols / 16, 2688.0),
                        b(n),
                        b(n),
                        kernels::MxRowsLaunch::new(rows, cols, cols / 32),
                        maxima,
                        swizzled,
                        kernels::MxRowPlan {
                            dense,
                            lanes: 2,
                            mx,
                        },
                        elem,
                    );
                }
            }
            for (across, (name, source)) in [false, true]
                .into_iter()
                .flat_map(|across| plans.map(|plan| (across, plan)))
            {
                let swizzled = source.swizzled;
                // A matrix has neither maxima nor scales.
                let source = SourcePlan {
                    grouping: source.grouping,
                    ..plain
                };
                let policy = kernels::EdenPolicy {
                    across,
                    source,
                    swizzled,
                    device_offset: across,
                    cuda: true,
                    conversion,
                };
                let tag = format!("{tag}-{across}{name}");
                add!(
                    tag,
                    NONE,
                    ms_eden_amax_kernel,
                    address,
                    width,
                    b(n),
                    eden_tiles(),
                    b(8),
                    signs(),
                    policy,
                    kind,
                    elem,
                );
                add!(
                    tag,
                    e2m1,
                    ms_eden_kernel,
                    address,
                    width,
                    b(n),
                    eden_tiles(),
                    kernels::EdenInputsLaunch::new(b(8), 1.0, 1.0),
                    eden_out(swizzled),
                    kernels::EdenDrawLaunch::new(b(2), random(), signs()),
                    policy,
                    kind,
                    elem,
                );
            }
        }
    }
    sources
}

/// Compiles the kernels of a device with `conversion` for each of `archs`.
fn check(test: &str, archs: &[&str], conversion: Conversion) {
    let tools = tools!(test);
    let mut sources = sources(conversion);
    sources.retain(|source| !is_left_out(&source.name));
    for arch in archs {
        println!("{arch}: {} kernels", sources.len());
        for source in &sources {
            let name = &source.name;
            let sass = disassembled(&tools, name, &source.text, arch);
            assert_eq!(
                CONVERSIONS.map(|instruction| sass.contains(instruction)),
                source.conversions,
                "conversions in {name} for {arch}"
            );
            assert_eq!(spills(&sass), 0, "{name} for {arch} spills");
        }
    }
}

#[test]
fn compiles_for_sm_90a() {
    check("compiles_for_sm_90a", &["sm_90a"], Conversion::Sm89);
}

/// The two have the same source.
#[test]
fn compiles_for_sm_100a_and_sm_103a() {
    let archs = ["sm_100a", "sm_103a"];
    check(
        "compiles_for_sm_100a_and_sm_103a",
        &archs,
        Conversion::Hardware,
    );
}

#[test]
fn compiles_for_sm_120a() {
    check(
        "compiles_for_sm_120a",
        &["sm_120a"],
        Conversion::HardwareNearest,
    );
}
