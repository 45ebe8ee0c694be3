//! The CUDA source of every kernel, compiled for Hopper and Blackwell on a machine without a GPU, and
//! the conversion instructions looked for in the machine code.

use crate::support::sources::{Fake, cuda_source, is_left_out, machine_code};
use cubecl::{
    ir::{ElemType, UIntKind},
    prelude::*,
};
use nvfp4_kernels::{
    BlockScaling, ErrorNorm, HadamardSize,
    cube::{block::BlockPlan, codec::Conversion, hadamard::SignsLaunch, philox::RandomLaunch},
    gemm::{
        self,
        kernels::{EpilogueKind, EpilogueLaunch, Factor, PackedMatrixLaunch, ProblemShapeLaunch},
    },
    quantize::{
        self,
        kernels::{
            AmaxOutLaunch, AmaxPlan, AmaxTilesLaunch, DrawLaunch, FoundNormLaunch,
            GateInputsLaunch, Grouping, NormInputsLaunch, PackedOutLaunch, PerTokenPlan,
            ProducerArgs, QuantOutArgs, QuantPlan, QuantTargetLaunch, RowGroupsLaunch, RowNormArgs,
            RowPlan, ShapeLaunch, SinkArgs, TileGridLaunch, TilePlan, TokenRowsLaunch,
        },
    },
    tensor::{AmaxGranularity, FloatKind},
};
use std::sync::Arc;

/// `cvt.rn.satfinite.e2m1x2` and `cvt.rs.satfinite.e2m1x4` in SASS.
const NEAREST: &str = "F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C";
const STOCHASTIC: &str = "F2FP.SATFINITE.E2M1.F32.PACK_AB_MERGE_C.RS";

/// One kernel of the crate, as source.
struct Source {
    name: String,
    text: String,
    /// Whether it must hold the conversions to nearest and stochastically, where that is known.
    conversions: Option<(bool, bool)>,
}

fn source(name: String, kernel: impl CubeKernel, conversions: Option<(bool, bool)>) -> Source {
    let text = cuda_source(&name, kernel);
    Source {
        name,
        text,
        conversions,
    }
}

/// Whether there is an instruction, emulated ones left out.
fn has_nearest(conversion: Conversion) -> bool {
    conversion.has_nearest() && conversion != Conversion::Emulated
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
    let buffer = |len: usize| unsafe { BufferArg::from_raw_parts(memory.clone(), len) };
    let random = || RandomLaunch::new(1, 2, 3, 4);
    let signs = || SignsLaunch::new(1, 2, 3, 4);
    let gates = || GateInputsLaunch::new(buffer(64), buffer(64), 8, 4);
    let producer = |name: &str| match name {
        "RmsNorm" => ProducerArgs::RmsNorm(NormInputsLaunch::new(buffer(rows), buffer(cols / 4))),
        "SwiGlu" => ProducerArgs::SwiGlu(gates()),
        "SwiGluBackward" => ProducerArgs::SwiGluBackward(gates()),
        _ => ProducerArgs::Plain,
    };
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
    add!(
        "random_bits".into(),
        (conversion == Conversion::Hardware).then_some((false, true)),
        quantize::kernels::random_bits_kernel::create_dummy_kernel,
        buffer(256),
        buffer(64),
        buffer(64),
        64,
        conversion,
    );
    add!(
        "zero".into(),
        None,
        quantize::kernels::zero_kernel::create_dummy_kernel,
        buffer(64),
        buffer(64),
        64,
        64,
    );
    add!(
        "advance_offset".into(),
        None,
        quantize::kernels::advance_offset_kernel::create_dummy_kernel,
        buffer(2),
        1,
    );
    add!(
        "map_tiles".into(),
        None,
        quantize::kernels::map_tiles_kernel::create_dummy_kernel,
        buffer(3),
        buffer(8),
        ShapeLaunch::new(rows, cols, 2, 4),
        4,
        16,
        Grouping::Offsets(16),
    );
    let factor = gemm::kernels::Factor::Tensor;
    add!(
        "cublaslt_factors".into(),
        None,
        gemm::kernels::factors_kernel::create_dummy_kernel,
        buffer(1),
        buffer(1),
        buffer(2),
        2688.0,
        2688.0,
        1.0,
        factor,
        factor,
    );
    for dtype in [FloatKind::F32, FloatKind::F16, FloatKind::Bf16] {
        let elem = dtype.storage_type();
        for address in [AddressType::U32, AddressType::U64] {
            // The index width is independent of the element type: one of them stands for all.
            if address == AddressType::U64 && dtype != FloatKind::Bf16 {
                continue;
            }
            let tag = format!("{dtype:?}-{address:?}");
            let words = rows * cols * dtype.size() / 4;
            let word = ElemType::UInt(UIntKind::U32);
            add!(
                format!("amax-{tag}"),
                None,
                quantize::kernels::amax_kernel::create_dummy_kernel,
                address,
                4,
                buffer(words / 4),
                buffer(1),
                words / 4,
                false,
                true,
                conversion,
                dtype,
                word,
            );
            for (hadamard, grouping, computed) in [
                (None, Grouping::Offsets(16), "Plain"),
                (Some(HadamardSize::H16), Grouping::One, "Plain"),
                (Some(HadamardSize::H128), Grouping::Batch, "Plain"),
                (Some(HadamardSize::H16), Grouping::One, "RmsNorm"),
                (Some(HadamardSize::H16), Grouping::Offsets(16), "SwiGlu"),
                (Some(HadamardSize::H16), Grouping::One, "SwiGluBackward"),
            ] {
                let sink = match computed {
                    "SwiGlu" | "SwiGluBackward" => SinkArgs::Matrix(buffer(words / 4)),
                    _ => SinkArgs::None,
                };
                add!(
                    format!("amax_tiles-{tag}-{hadamard:?}-{computed}"),
                    None,
                    quantize::kernels::amax_tiles_kernel::create_dummy_kernel,
                    address,
                    4,
                    buffer(words / 4),
                    producer(computed),
                    sink,
                    AmaxTilesLaunch::new(buffer(4), ShapeLaunch::new(rows, cols, 2, 4), 2),
                    AmaxOutLaunch::new(buffer(1), buffer(1)),
                    signs(),
                    AmaxPlan {
                        rows: Some(AmaxGranularity::PerTensor),
                        cols: Some(AmaxGranularity::PerRow),
                        hadamard,
                        default_signs: hadamard == Some(HadamardSize::H16),
                        grouping,
                        elements: false,
                        units: 256,
                        planes: true,
                        conversion,
                        kind: dtype,
                    },
                    word,
                );
            }
            for (name, maxima, swizzled) in [
                ("", false, false),
                ("-rows", true, false),
                ("-swizzled", true, true),
            ] {
                add!(
                    format!("dequantize_rows-{tag}{name}"),
                    None,
                    quantize::kernels::dequantize_rows_kernel::create_dummy_kernel,
                    address,
                    buffer(blocks * 2),
                    buffer(blocks),
                    buffer(rows),
                    buffer(blocks * 2),
                    blocks * 2,
                    cols / 8,
                    cols / 8,
                    2688.0,
                    maxima,
                    swizzled,
                    dtype,
                    elem,
                );
            }
            for (name, per_row, swizzled, grouping) in [
                ("", true, false, Grouping::One),
                ("-groups", false, false, Grouping::Offsets(16)),
                ("-batch", true, true, Grouping::Batch),
            ] {
                add!(
                    format!("dequantize_cols-{tag}{name}"),
                    None,
                    quantize::kernels::dequantize_cols_kernel::create_dummy_kernel,
                    address,
                    buffer(blocks),
                    buffer(blocks),
                    buffer(rows),
                    buffer(8),
                    buffer(rows * cols),
                    ShapeLaunch::new(rows, cols, 2, 1),
                    rows / 16,
                    rows / 16,
                    2688.0,
                    16,
                    quantize::kernels::SourcePlan {
                        per_row,
                        swizzled,
                        grouping,
                    },
                    dtype,
                    elem,
                );
            }
            add!(
                format!("dequantize_col_pairs-{tag}"),
                None,
                quantize::kernels::dequantize_col_pairs_kernel::create_dummy_kernel,
                address,
                buffer(blocks / 2),
                buffer(blocks / 4),
                buffer(1),
                buffer(rows * cols / 2),
                rows,
                cols,
                cols / 16,
                2688.0f32,
                false,
                dtype,
                elem,
            );
            for add in [false, true] {
                add!(
                    format!("cublaslt_bias-{tag}-{add}"),
                    None,
                    gemm::kernels::add_rows_kernel::create_dummy_kernel,
                    address,
                    buffer(cols),
                    buffer(rows * cols),
                    rows * cols,
                    cols,
                    add,
                    dtype,
                    elem,
                );
            }
            for bias in [false, true] {
                let epilogue = EpilogueKind {
                    a: Factor::Tensor,
                    b: Factor::Tensor,
                    bias,
                    accumulate: false,
                    out: dtype,
                    amax: None,
                };
                add!(
                    format!("scalar_gemm-{tag}-{bias}"),
                    None,
                    gemm::kernels::scalar_kernel::create_dummy_kernel,
                    address,
                    PackedMatrixLaunch::new(buffer(blocks), buffer(blocks)),
                    PackedMatrixLaunch::new(buffer(blocks), buffer(blocks)),
                    ProblemShapeLaunch::new(rows as u32, rows as u32, cols as u32, 1),
                    EpilogueLaunch::new(
                        buffer(1),
                        buffer(1),
                        buffer(rows),
                        buffer(1),
                        buffer(1),
                        2688.0,
                        2688.0,
                        1.0,
                        epilogue,
                    ),
                    buffer(rows * cols),
                    true,
                    elem,
                );
            }
            let copy = |stochastic, device_offset, scaling, hadamard| QuantPlan {
                policy: BlockPlan {
                    stochastic,
                    device_offset,
                    scaling,
                    conversion,
                },
                hadamard,
                default_signs: hadamard == Some(HadamardSize::H16) && !device_offset,
                swizzled: device_offset,
                per_row: hadamard.is_some() && device_offset,
                unscaled: false,
            };
            let standard = BlockScaling::Standard;
            let four_over_six = BlockScaling::FourOverSix(ErrorNorm::Mse);
            let conversions = |plans: &[QuantPlan]| {
                // Four over six measures errors, for which it needs the rounded values themselves.
                let counts = |plan: &&QuantPlan| plan.policy.scaling != four_over_six;
                let stochastic = |plan: &QuantPlan| plan.policy.stochastic;
                let mut plans = plans.iter().filter(counts);
                let nearest = plans.clone().any(|plan| !stochastic(plan));
                Some((
                    nearest && has_nearest(conversion),
                    plans.any(stochastic) && conversion == Conversion::Hardware,
                ))
            };
            let values = |plan| QuantPlan {
                unscaled: true,
                ..plan
            };
            let draw = || DrawLaunch::new(buffer(2), random(), signs());
            let packed_out =
                || QuantOutArgs::Packed(PackedOutLaunch::new(buffer(blocks), buffer(blocks)));
            let target = |plan: Option<QuantPlan>| {
                let out = match plan {
                    None => QuantOutArgs::Absent,
                    Some(plan) if plan.unscaled => QuantOutArgs::Bf16Unscaled(buffer(blocks)),
                    Some(_) => packed_out(),
                };
                QuantTargetLaunch::new(buffer(8), draw(), out)
            };
            let row_plans = [
                copy(false, false, standard, None),
                copy(true, false, standard, None),
                copy(true, true, BlockScaling::Headroom, None),
                copy(false, false, four_over_six, None),
                values(copy(false, false, standard, None)),
            ];
            let grouped = [(5, row_plans[0], true), (6, row_plans[1], true)];
            let alone = row_plans.into_iter().enumerate();
            for (i, plan, find_groups) in alone.map(|(i, plan)| (i, plan, false)).chain(grouped) {
                add!(
                    format!("quantize_row-{tag}-{i}"),
                    conversions(&[plan]),
                    quantize::kernels::quantize_row_kernel::create_dummy_kernel,
                    address,
                    4,
                    buffer(words / 4),
                    target(Some(plan)),
                    RowGroupsLaunch::new(buffer(9), 8),
                    rows,
                    cols / 16,
                    RowPlan {
                        quant: plan,
                        across: 2,
                        whole_tiles: true,
                        find_groups,
                        kind: dtype,
                    },
                );
            }
            for (i, plan, computed) in [
                (0, row_plans[0], "Plain"),
                (1, row_plans[2], "Plain"),
                (0, row_plans[0], "RmsNorm"),
                (0, row_plans[0], "SwiGlu"),
                (0, row_plans[0], "SwiGluBackward"),
                (0, row_plans[0], "FoundNorm"),
            ] {
                let norm = match computed {
                    "FoundNorm" => RowNormArgs::Found(FoundNormLaunch::new(
                        buffer(rows),
                        buffer(cols / 4),
                        1e-6,
                    )),
                    _ => RowNormArgs::None,
                };
                add!(
                    format!("quantize_per_token-{tag}-{i}-{computed}"),
                    conversions(&[plan]),
                    quantize::kernels::quantize_per_token_kernel::create_dummy_kernel,
                    address,
                    4,
                    buffer(words / 4),
                    producer(computed),
                    norm,
                    buffer(rows),
                    packed_out(),
                    draw(),
                    TokenRowsLaunch::new(rows, rows, cols / 16),
                    PerTokenPlan {
                        quant: plan,
                        kept_blocks: 4,
                        planes: true,
                        kind: dtype,
                    },
                );
            }
            add!(
                format!("rms_norm_rstd-{tag}"),
                None,
                quantize::kernels::rms_norm_rstd_kernel::create_dummy_kernel,
                address,
                4,
                buffer(words / 4),
                buffer(rows),
                rows,
                cols / 16,
                1e-6,
                true,
                conversion,
                dtype,
            );
            for computed in ["RmsNorm", "SwiGlu", "SwiGluBackward"] {
                add!(
                    format!("produce-{tag}-{computed}"),
                    None,
                    quantize::kernels::produce_kernel::create_dummy_kernel,
                    address,
                    4,
                    buffer(words / 4),
                    producer(computed),
                    buffer(words / 4),
                    rows,
                    cols * dtype.size() / 16,
                    conversion,
                    dtype,
                );
            }
            let h16 = Some(HadamardSize::H16);
            let tile_plans = [
                (
                    Some(row_plans[0]),
                    Some(copy(true, false, standard, h16)),
                    false,
                ),
                (None, Some(copy(true, true, standard, h16)), false),
                (
                    None,
                    Some(copy(false, false, standard, Some(HadamardSize::H128))),
                    false,
                ),
                (Some(row_plans[0]), Some(row_plans[0]), true),
                (Some(row_plans[3]), Some(row_plans[3]), true),
                (Some(row_plans[0]), Some(row_plans[0]), false),
                (
                    Some(row_plans[0]),
                    Some(copy(true, false, standard, h16)),
                    false,
                ),
                (Some(row_plans[0]), None, true),
                (None, Some(row_plans[0]), true),
            ];
            let of_values = [
                (
                    Some(row_plans[4]),
                    Some(copy(false, false, standard, h16)),
                    false,
                ),
                (
                    Some(values(row_plans[1])),
                    Some(values(copy(true, false, standard, h16))),
                    false,
                ),
            ];
            let plain = (tile_plans.into_iter().chain(of_values))
                .enumerate()
                .map(|(i, plan)| (i, plan, "Plain"));
            let both = tile_plans[6];
            let computed = ["RmsNorm", "SwiGlu", "SwiGluBackward"].map(|name| (6, both, name));
            for (i, (row, col, tiles), computed) in plain.chain(computed) {
                // With a scale for the whole tile the codes of four over six need no errors.
                let expected = if tiles {
                    Some((has_nearest(conversion), false))
                } else {
                    conversions(&row.into_iter().chain(col).collect::<Vec<_>>())
                };
                add!(
                    format!("quantize_tiles-{tag}-{i}-{computed}"),
                    expected,
                    quantize::kernels::quantize_tiles_kernel::create_dummy_kernel,
                    address,
                    4,
                    buffer(words / 4),
                    producer(computed),
                    TileGridLaunch::new(
                        buffer(4),
                        ShapeLaunch::new(rows, cols, 2, 4),
                        4usize,
                        blocks,
                    ),
                    target(row),
                    target(col),
                    TilePlan {
                        row,
                        col,
                        tiles,
                        side_by_side: i == 0 && !tiles,
                        grouping: if i == 0 {
                            Grouping::Offsets(16)
                        } else {
                            Grouping::One
                        },
                        elements: false,
                        units: 256,
                        kind: dtype,
                    },
                    word,
                );
            }
        }
    }
    sources
}

/// Compiles the chosen kernels of a device with `conversion` for each of `archs`.
fn check(test: &str, archs: &[&str], conversion: Conversion, is_chosen: impl Fn(&Source) -> bool) {
    let tools = tools!(test);
    let mut sources = sources(conversion);
    sources.retain(|source| is_chosen(source) && !is_left_out(&source.name));
    for arch in archs {
        println!("{arch}: {} kernels", sources.len());
        for Source {
            name,
            text,
            conversions,
        } in &sources
        {
            let code = machine_code(&tools, name, text, arch);
            let Some(expected) = *conversions else {
                continue;
            };
            let sass = tools.disassemble(&code, &format!("{name}-{arch}"));
            let stochastic = sass.contains(STOCHASTIC);
            let nearest = sass
                .lines()
                .any(|line| line.contains(NEAREST) && !line.contains(STOCHASTIC));
            assert_eq!(
                (nearest, stochastic),
                expected,
                "(nearest, stochastic) in {name} for {arch}"
            );
        }
    }
}

#[test]
fn compiles_for_sm_90a() {
    check("compiles_for_sm_90a", &["sm_90a"], Conversion::Sm89, |_| {
        true
    });
}

/// The two have the same source.
#[test]
fn compiles_for_sm_100a_and_sm_103a() {
    let archs = ["sm_100a", "sm_103a"];
    check(
        "compiles_for_sm_100a_and_sm_103a",
        &archs,
        Conversion::Hardware,
        |_| true,
    );
}

#[test]
fn compiles_for_sm_120a() {
    check(
        "compiles_for_sm_120a",
        &["sm_120a"],
        Conversion::HardwareNearest,
        |_| true,
    );
}

/// With the instructions of Blackwell emulated its kernels compile for a Hopper: those that convert, with
/// one type of element.
#[test]
fn emulated_compiles_for_sm_90a() {
    let test = "emulated_compiles_for_sm_90a";
    check(test, &["sm_90a"], Conversion::Emulated, |source| {
        source.conversions.is_some() && source.name.contains("Bf16-U32")
    });
}

/// The compilation can fail: the stochastic conversion does not exist for sm_120a.
#[test]
fn stochastic_conversion_is_refused_where_it_does_not_exist() {
    let tools = tools!("stochastic_conversion_is_refused_where_it_does_not_exist");
    let sources = sources(Conversion::Hardware);
    let kernel = sources
        .iter()
        .find(|source| source.conversions == Some((false, true)))
        .unwrap();
    assert!(tools.compile(&kernel.text, "sm_100a").is_ok());
    for arch in ["sm_90a", "sm_120a"] {
        assert!(tools.compile(&kernel.text, arch).is_err(), "{arch}");
    }
}
