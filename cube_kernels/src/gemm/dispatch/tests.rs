//! Kernel choices on every class of device.

use super::{
    super::{
        choices::as_written,
        cublaslt::{CublasLtFormat, CublasLtProblem},
        epilogue::Factor,
        heuristics::BAND,
        proof::{
            BlockScaledMma, CublasLtPlan, DequantThenBf16, DequantThenStreamK, Multiply, Sm100Form,
            Sm100Tile, Sm120Tile, Tcgen05, W4a16, W4a16MnMajor,
        },
        tiles::{Sm90Tile, W4a16MnTile, W4a16Tile},
    },
    *,
};
use crate::cube::{codec::Conversion, ptx::BlockScaled};

const PACKED: [OperandLayout; 2] = [OperandLayout::Packed; 2];
const WEIGHT_ONLY: [OperandLayout; 2] = [OperandLayout::KMajor, OperandLayout::Packed];

fn device(compute_capability: Option<u32>, gemm: GemmBackend) -> Capabilities {
    Capabilities {
        device: "a GPU".into(),
        runtime: "cuda",
        compute_capability,
        conversion: Conversion::Sm80,
        gemm,
    }
}

fn choice(capabilities: &Capabilities, sms: usize, problem: &Problem) -> Choice {
    let device = Device {
        capabilities,
        sms,
        cublaslt: &|_: &CublasLtProblem| Ok(()),
        tcgen05: &|_| Ok(()),
    };
    plan(&device, problem).unwrap()
}

/// Returns the form in which the GEMM reads packed operands.
fn reads(capabilities: &Capabilities, problem: &Problem) -> StoredForm {
    choice(capabilities, 132, problem).packed_reads(problem)
}

/// Returns the plan on an H100.
fn sm90(problem: &Problem) -> Plan {
    let choice = choice(&device(Some(90), GemmBackend::Sm90Wgmma), 132, problem);
    assert_eq!(choice.backend, GemmBackend::Sm90Wgmma);
    choice.plan
}

fn dense(m: usize, n: usize, k: usize) -> Plan {
    sm90(&Problem::new(PACKED, (m, n, k)))
}

/// Plans that were measured to be the fastest on an H100.
#[test]
fn plans_of_measured_shapes() {
    let w4a16 = |rows_a, ways| Plan::from(W4a16(W4a16Tile { rows_a, ways }, BAND));
    assert_eq!(dense(1, 8192, 8192), Plan::from(SmallM));
    assert_eq!(dense(16, 4096, 14336), Plan::from(SmallM));
    assert_eq!(dense(16, 4096, 14352), Plan::from(SmallM));
    assert_eq!(dense(32, 8192, 8192), w4a16(32, 4));
    assert_eq!(dense(64, 8192, 8192), w4a16(64, 2));
    assert_eq!(dense(96, 8192, 8192), w4a16(128, 2));
    assert_eq!(dense(128, 8192, 8192), w4a16(128, 2));
    assert_eq!(dense(128, 4096, 4096), w4a16(64, 2));
    assert_eq!(dense(256, 8192, 8192), w4a16(128, 1));
    assert_eq!(dense(512, 8192, 8192), w4a16(256, 1));
    assert_eq!(dense(2048, 2048, 2048), w4a16(256, 1));
    let bf16 = |tile| Plan::from(DequantThenBf16(tile, BAND));
    assert_eq!(dense(8192, 8192, 8192), bf16(Sm90Tile::N256));
    assert_eq!(dense(8192, 2112, 7168), bf16(Sm90Tile::N176));
}

/// On every GPU a packed MN-major `b` has a kernel that reads its codes, and none that dequantizes
/// it first.
#[test]
fn packed_mn_major_operands_are_read_as_they_are() {
    let layouts = [OperandLayout::KMajor, OperandLayout::PackedMnMajor];
    let problem = |shape| Problem::new(layouts, shape);
    let fused = |tile| Plan::from(W4a16MnMajor(tile, BAND));
    assert_eq!(
        sm90(&problem((4096, 4096, 14336))),
        fused(W4a16MnTile::M128)
    );
    // 64 tiles of 128 rows on 132 SMs.
    assert_eq!(sm90(&problem((512, 4096, 4096))), fused(W4a16MnTile::M64));
    let groups = problem((4096, 2048, 768)).grouped(GroupedDim::M, 128);
    let band = Plan::from(W4a16MnMajor(W4a16MnTile::M64, 1));
    assert_eq!(sm90(&groups), band);
    for (capability, backend) in [
        (80, GemmBackend::Cmma),
        (100, GemmBackend::CublasLt),
        (100, GemmBackend::Sm100Tcgen05),
        (120, GemmBackend::Sm120BlockScaled),
    ] {
        let capabilities = device(Some(capability), backend);
        for problem in [
            problem((8, 4096, 4096)),
            problem((4096, 4096, 4096)),
            groups,
        ] {
            let choice = choice(&capabilities, 132, &problem);
            assert_eq!(choice.plan, Plan::from(Cmma), "{backend:?}");
        }
        let asked = Problem {
            backend: Some(GemmBackend::CublasLt),
            ..problem((4096, 4096, 4096))
        };
        let device = Device {
            capabilities: &capabilities,
            sms: 132,
            cublaslt: &|_: &CublasLtProblem| Ok(()),
            tcgen05: &|_| Ok(()),
        };
        let error = plan(&device, &asked).unwrap_err().to_string();
        assert!(error.contains("MN-major"), "{error}");
    }
}

/// Weight gradients of small models use stream-K, independent of the operands' layouts.
#[test]
fn few_tiles_of_long_contractions_are_shared_out() {
    let layouts = [OperandLayout::KMajor, OperandLayout::MnMajor];
    for layout in layouts {
        let plan = |shape| sm90(&Problem::new([layout; 2], shape));
        let shared = |tile| Plan::from(DequantThenStreamK(tile, BAND));
        assert_eq!(plan((768, 768, 16384)), shared(Sm90Tile::N128));
        assert_eq!(plan((512, 512, 16384)), shared(Sm90Tile::N128));
        // Measured: whole tiles are as fast or faster.
        for shape in [
            (768, 2304, 16384),
            (768, 4096, 16384),
            (1024, 1024, 8192),
            (2048, 2048, 2048),
            (2048, 6144, 8192),
            (16384, 768, 2048),
        ] {
            let plan = plan(shape);
            assert!(plan.is::<DequantThenBf16>(), "{shape:?}: {plan}");
        }
    }
}

/// If both operands are dequantized, the following kernel is the same as for operands of which one
/// is already bf16.
#[test]
fn dequantized_operands_change_no_plan() {
    let hopper = device(Some(90), GemmBackend::Sm90Wgmma);
    let dequantizes =
        |shape| reads(&hopper, &Problem::new(PACKED, shape)) == StoredForm::Bf16Unscaled;
    for shape in [
        (8192, 4096, 4096),
        (8192, 8192, 8192),
        (8192, 14336, 4096),
        (8192, 2112, 7168),
    ] {
        assert!(dequantizes(shape), "{shape:?}");
        let (packed, values) = (OperandLayout::Packed, OperandLayout::KMajor);
        for layouts in [[values, packed], [packed, values], [values; 2]] {
            let plan = sm90(&Problem::new(layouts, shape));
            let (m, n, k) = shape;
            assert_eq!(plan, dense(m, n, k), "{shape:?}, {layouts:?}");
        }
    }
    // The last one is a weight gradient with few tiles, for which dequantizing both operands costs
    // more than it gains.
    for shape in [(16, 4096, 4096), (512, 8192, 8192), (4096, 4096, 8192)] {
        assert!(!dequantizes(shape), "{shape:?}");
    }
}

/// A GEMM whose operands were written as its kernel reads them runs the kernel that was chosen
/// before they were written.
#[test]
fn operands_in_the_form_that_is_read_change_no_choice() {
    let devices = [
        (90, GemmBackend::Sm90Wgmma),
        (100, GemmBackend::CublasLt),
        (120, GemmBackend::Sm120BlockScaled),
        (80, GemmBackend::Cmma),
    ];
    let sizes = [16, 64, 768, 1536, 2048, 4096, 8192, 14336];
    let (mut written, mn_major) = (0, OperandLayout::PackedMnMajor);
    for (capability, backend) in devices {
        let device = device(Some(capability), backend);
        for (m, n, k) in sizes
            .iter()
            .flat_map(|m| sizes.iter().map(move |n| (*m, *n)))
            .flat_map(|(m, n)| sizes.iter().map(move |k| (m, n, *k)))
        {
            for layouts in [PACKED, WEIGHT_ONLY, [OperandLayout::Packed, mn_major]] {
                let dims = [
                    (GroupedDim::None, 1),
                    (GroupedDim::M, 8),
                    (GroupedDim::K, 8),
                ];
                for (dim, groups) in dims {
                    let problem = Problem::new(layouts, (m, n, k)).grouped(dim, groups);
                    let planned = choice(&device, 132, &problem);
                    for other in as_written(&problem, planned.packed_reads(&problem)) {
                        let found = choice(&device, 132, &other);
                        assert_eq!(found.plan, planned.plan, "{problem:?}, {other:?}");
                        written += 1;
                    }
                }
            }
        }
    }
    assert!(written > 1000, "{written}");
}

/// Consumer Blackwell: the instruction reads codes, small M with a packed weight has its own
/// kernel, and the portable kernel takes the rest.
#[test]
fn plans_of_consumer_blackwell() {
    let blackwell = device(Some(120), GemmBackend::Sm120BlockScaled);
    let plan = |layouts, shape, dim| {
        let problem = Problem::new(layouts, shape).grouped(dim, 1);
        choice(&blackwell, 84, &problem).plan
    };
    let tile_of = |format, strips| {
        Plan::from(BlockScaledMma(Sm120Tile {
            format,
            strips,
            multiply: Multiply::Instruction,
        }))
    };
    let tile = |strips| tile_of(BlockScaled::Nvfp4, strips);
    let none = GroupedDim::None;
    assert_eq!(plan(PACKED, (4096, 4096, 4096), none), tile(2));
    assert_eq!(plan(PACKED, (64, 8192, 8192), none), tile(1));
    assert_eq!(plan(PACKED, (4096, 4096, 4096), GroupedDim::M), tile(2));
    assert_eq!(plan(PACKED, (8, 8192, 8192), none), Plan::from(SmallM));
    assert_eq!(plan(WEIGHT_ONLY, (8, 8192, 8192), none), Plan::from(SmallM));
    assert_eq!(plan(PACKED, (8, 8192, 48), none), Plan::from(SmallM));
    assert_eq!(plan(WEIGHT_ONLY, (64, 8192, 8192), none), Plan::from(Cmma));
    // Groups along K, an amax per row, and MXFP8 in every form.
    assert_eq!(plan(PACKED, (64, 8192, 8192), GroupedDim::K), tile(1));
    let mut per_row = Problem::new(PACKED, (4096, 4096, 4096));
    (per_row.epilogue.a, per_row.epilogue.b) = (Factor::PerRow, Factor::PerRow);
    assert_eq!(choice(&blackwell, 84, &per_row).plan, tile(2));
    let mxfp8 = [OperandLayout::Mxfp8; 2];
    for dim in [none, GroupedDim::M, GroupedDim::K] {
        let wide = tile_of(BlockScaled::Mxfp8, 2);
        assert_eq!(plan(mxfp8, (4096, 4096, 4096), dim), wide, "{dim:?}");
    }
    // Each group along K has its own output.
    let experts = Problem::new(PACKED, (768, 768, 8192)).grouped(GroupedDim::K, 8);
    assert_eq!(choice(&blackwell, 84, &experts).plan, tile(2));
    assert_eq!(plan(PACKED, (768, 768, 8192), GroupedDim::K), tile(1));
}

/// Other CUDA devices: the small-M kernel for a packed weight from sm_80 on, tiles otherwise.
#[test]
fn plans_of_other_devices() {
    let plan = |sm, layouts, shape, dim| {
        let problem = Problem::new(layouts, shape).grouped(dim, 1);
        choice(&device(sm, GemmBackend::Cmma), 132, &problem).plan
    };
    let (few, tiles, none) = (Plan::from(SmallM), Plan::from(Cmma), GroupedDim::None);
    let datacenter = Some(100);
    assert_eq!(plan(datacenter, PACKED, (1, 8192, 8192), none), few);
    assert_eq!(plan(datacenter, PACKED, (16, 10, 96), none), few);
    assert_eq!(plan(datacenter, PACKED, (17, 8192, 8192), none), tiles);
    assert_eq!(plan(datacenter, PACKED, (1, 8192, 48), none), few);
    assert_eq!(plan(datacenter, PACKED, (1, 9, 8192), none), tiles);
    let bf16 = [OperandLayout::Packed, OperandLayout::KMajor];
    assert_eq!(plan(datacenter, bf16, (1, 8192, 8192), none), tiles);
    let grouped = plan(datacenter, PACKED, (1, 8192, 8192), GroupedDim::M);
    assert_eq!(grouped, tiles);
    assert_eq!(plan(Some(80), PACKED, (1, 8192, 8192), none), few);
    assert_eq!(plan(Some(75), PACKED, (1, 8192, 8192), none), tiles);
    assert_eq!(plan(None, PACKED, (1, 8192, 8192), none), tiles);
}

/// Operands that the kernel with dequantization in registers cannot read go to the other kernel.
#[test]
fn plans_of_other_operands() {
    let is_bf16 = |plan: Plan| plan.is::<DequantThenBf16>();
    assert!(is_bf16(dense(64, 8192, 48)));
    let (packed, mn_major) = (OperandLayout::Packed, OperandLayout::MnMajor);
    let shape = (64, 8192, 8192);
    assert!(is_bf16(sm90(&Problem::new(
        [packed, OperandLayout::KMajor],
        shape
    ))));
    assert!(is_bf16(sm90(&Problem::new([mn_major, packed], shape))));
    let depth = Problem::new(PACKED, (4096, 4096, 8192)).grouped(GroupedDim::K, 8);
    assert!(is_bf16(sm90(&depth)));
    let rows = Problem::new(PACKED, (8192, 4096, 7168)).grouped(GroupedDim::M, 64);
    let tile = W4a16Tile {
        rows_a: 128,
        ways: 1,
    };
    assert_eq!(sm90(&rows), Plan::from(W4a16(tile, 1)));
    // 176 columns are no multiple of 64: those tiles require a K-major `b`.
    let narrow = |b| sm90(&Problem::new([mn_major, b], (8192, 2112, 7168)));
    assert_eq!(
        narrow(OperandLayout::KMajor),
        Plan::from(DequantThenBf16(Sm90Tile::N176, BAND))
    );
    assert_eq!(
        narrow(mn_major),
        Plan::from(DequantThenBf16(Sm90Tile::N128, BAND))
    );
    // Small M with an MN-major `a`: read directly, or transposed if TMA cannot read it.
    assert!(is_bf16(sm90(&Problem::new(
        [mn_major, packed],
        (16, 8192, 8192)
    ))));
    assert_eq!(
        sm90(&Problem::new([mn_major, packed], (12, 8192, 8192))),
        Plan::from(SmallM)
    );
}

/// A requested backend is used or refused, never replaced, and `Cmma` selects its tiles.
#[test]
fn backends_that_are_asked_for() {
    let hopper = device(Some(90), GemmBackend::Sm90Wgmma);
    let device = Device {
        capabilities: &hopper,
        sms: 132,
        cublaslt: &|_| Ok(()),
        tcgen05: &|_| Ok(()),
    };
    let asked = |backend, (m, n, k): (usize, usize, usize)| {
        let problem = Problem {
            backend: Some(backend),
            ..Problem::new(PACKED, (m, n, k))
        };
        plan(&device, &problem).map(|choice| choice.plan)
    };
    let few = (1, 8192, 8192);
    assert_eq!(asked(GemmBackend::Sm90Wgmma, few), Ok(Plan::from(SmallM)));
    assert_eq!(asked(GemmBackend::Cmma, few), Ok(Plan::from(Cmma)));
    assert_eq!(asked(GemmBackend::Scalar, few), Ok(Plan::from(Scalar)));
    let format = CublasLtFormat::Nvfp4;
    assert_eq!(
        asked(GemmBackend::CublasLt, few),
        Ok(Plan::from(CublasLtPlan(format)))
    );
    assert!(asked(GemmBackend::Sm90Wgmma, (1, 8190, 8192)).is_err());
    let error = asked(GemmBackend::Sm120BlockScaled, few).unwrap_err();
    assert!(error.to_string().contains("12.0"), "{error}");
}

/// Data-center Blackwell: cuBLASLt, unless it refuses or would dequantize a weight for small M.
#[test]
fn the_library_and_what_it_refuses() {
    let blackwell = device(Some(100), GemmBackend::CublasLt);
    let choose = |layouts, shape, takes: bool| {
        let device = Device {
            capabilities: &blackwell,
            sms: 148,
            cublaslt: &|_| match takes {
                true => Ok(()),
                false => Err(Nvfp4Error::value("k", "this", "that")),
            },
            tcgen05: &|_| Ok(()),
        };
        plan(&device, &Problem::new(layouts, shape)).unwrap()
    };
    let (few, many) = ((8, 8192, 8192), (4096, 4096, 4096));
    let nvfp4 = Plan::from(CublasLtPlan(CublasLtFormat::Nvfp4));
    assert_eq!(choose(PACKED, few, true).plan, nvfp4);
    assert_eq!(choose(WEIGHT_ONLY, few, true).plan, Plan::from(SmallM));
    let bf16 = Plan::from(CublasLtPlan(CublasLtFormat::Bf16));
    assert_eq!(choose(WEIGHT_ONLY, many, true).plan, bf16);
    assert_eq!(
        choose(PACKED, (4096, 4096, 4112), true).plan,
        Plan::from(Cmma)
    );
    let refused = choose(PACKED, many, false);
    assert_eq!(
        (refused.backend, refused.plan),
        (GemmBackend::Cmma, Plan::from(Cmma))
    );
    let is_library = |(_, refusal): &(_, Refusal)| matches!(refusal, Refusal::Library(_));
    assert!(refused.refusals.iter().any(is_library));
}

/// FP4 tensor cores of data-center Blackwell read block scales in 128x4 tiles in every GEMM; other
/// kernels read rows of scales, or bf16.
#[test]
fn who_reads_tiles_of_scales() {
    let (rows, tiles) = (StoredForm::Rows, StoredForm::Tiles);
    let shape = (4096, 4096, 4096);
    let dense = Problem::new(PACKED, shape);
    let mut per_row = dense;
    per_row.epilogue.b = Factor::PerRow;
    let grouped = [GroupedDim::M, GroupedDim::K].map(|dim| dense.grouped(dim, 8));
    for backend in [GemmBackend::CublasLt, GemmBackend::Sm100Tcgen05] {
        let blackwell = device(Some(100), backend);
        for problem in [dense, per_row, grouped[0], grouped[1]] {
            assert_eq!(reads(&blackwell, &problem), tiles, "{problem:?}");
        }
        let odd = Problem::new(PACKED, (4096, 4096, 4112));
        assert_eq!(reads(&blackwell, &odd), rows);
        let mxfp8 = Problem::new([OperandLayout::Mxfp8; 2], (4096, 4096, 4128));
        let grouped = [GroupedDim::M, GroupedDim::K].map(|dim| mxfp8.grouped(dim, 8));
        for problem in [mxfp8, grouped[0], grouped[1]] {
            assert_eq!(reads(&blackwell, &problem), tiles, "{problem:?}");
        }
        // Dequantized, from rows of scales.
        let narrow = Problem::new([OperandLayout::Mxfp8; 2], (4096, 4100, 4096));
        assert_eq!(reads(&blackwell, &narrow), rows);
        // A packed weight with bf16 activations.
        assert_ne!(reads(&blackwell, &Problem::new(WEIGHT_ONLY, shape)), tiles);
    }
    let hopper = device(Some(90), GemmBackend::Sm90Wgmma);
    let large = Problem::new(PACKED, (8192, 8192, 8192));
    assert_eq!(reads(&hopper, &large), StoredForm::Bf16Unscaled);
    let large = Problem::new([OperandLayout::Mxfp8; 2], (8192, 8192, 8192));
    assert_eq!(reads(&hopper, &large), rows);
    assert_eq!(reads(&hopper, &dense), rows);
    for (capability, backend) in [
        (Some(120), GemmBackend::Sm120BlockScaled),
        (Some(80), GemmBackend::Cmma),
        (None, GemmBackend::Scalar),
    ] {
        assert_eq!(
            reads(&device(capability, backend), &dense),
            rows,
            "{backend:?}"
        );
    }
}

/// Data-center Blackwell with the `tcgen05` kernel requested by `NVFP4_GEMM` or by the request;
/// problems that it refuses go to the usual kernel.
#[test]
fn tcgen05_where_it_is_asked_for() {
    let of = |form| Plan::from(Tcgen05(Sm100Tile::instruction(BlockScaled::Nvfp4, form)));
    let (tcgen05, few) = (of(Sm100Form::OneCta), of(Sm100Form::SwapAb));
    let large = of(Sm100Form::TwoCta);
    let nvfp4 = Plan::from(CublasLtPlan(CublasLtFormat::Nvfp4));
    let shape = (4096, 4096, 4096);
    let asked = device(Some(100), GemmBackend::Sm100Tcgen05);
    let plan = |problem: Problem| choice(&asked, 148, &problem).plan;
    let dense = Problem::new(PACKED, shape);
    assert_eq!(plan(dense), large);
    assert_eq!(plan(Problem::new(PACKED, (128, 1024, 4096))), tcgen05);
    assert_eq!(plan(Problem::new(PACKED, (1, 4096, 4096))), few);
    assert_eq!(plan(dense.grouped(GroupedDim::M, 8)), large);
    let mut per_token = dense;
    per_token.epilogue.a = Factor::PerRow;
    assert_eq!(plan(per_token), large);
    assert_eq!(plan(dense.grouped(GroupedDim::K, 8)), tcgen05);
    assert_eq!(
        plan(Problem::new(PACKED, (64, 4096, 4112))),
        Plan::from(Cmma)
    );
    assert_eq!(plan(Problem::new(PACKED, (64, 4096, 0))), Plan::from(Cmma));
    let unaligned = Problem {
        aligned: false,
        ..dense
    };
    assert!(!plan(unaligned).is::<Tcgen05>());
    let bf16 = Plan::from(CublasLtPlan(CublasLtFormat::Bf16));
    assert_eq!(plan(Problem::new(WEIGHT_ONLY, shape)), bf16);

    // Without the variable, only the request can select the backend.
    let library = device(Some(103), GemmBackend::CublasLt);
    let found = choice(&library, 148, &dense);
    assert_eq!(found.plan, nvfp4);
    assert_eq!(found.refusals[0].0, "sm100_block_scaled");
    let by_request = Problem {
        backend: Some(GemmBackend::Sm100Tcgen05),
        ..dense
    };
    let found = choice(&library, 148, &by_request);
    let backend = GemmBackend::Sm100Tcgen05;
    assert_eq!((found.backend, found.plan), (backend, large));
    let hopper = device(Some(90), GemmBackend::Sm90Wgmma);
    let hopper = Device {
        capabilities: &hopper,
        sms: 132,
        cublaslt: &|_| Ok(()),
        tcgen05: &|_| Ok(()),
    };
    let error = super::plan(&hopper, &by_request).unwrap_err();
    assert!(error.to_string().contains("10.0"), "{error}");
}

/// MXFP8 on data-center Blackwell: the `tcgen05` kernel is the default, dense and grouped, unless
/// its self-check of this format fails. On other devices, and if only one operand is MXFP8, the
/// choice is that for bf16.
#[test]
fn mxfp8_where_there_are_instructions_for_it() {
    const MXFP8: [OperandLayout; 2] = [OperandLayout::Mxfp8; 2];
    const BF16: [OperandLayout; 2] = [OperandLayout::KMajor; 2];
    let blackwell = device(Some(100), GemmBackend::CublasLt);
    let plan = |problem: Problem, fails: BlockScaled| {
        let device = Device {
            capabilities: &blackwell,
            sms: 148,
            cublaslt: &|_| Ok(()),
            tcgen05: &|tile| match tile.format == fails {
                true => Err("row 0".into()),
                false => Ok(()),
            },
        };
        super::plan(&device, &problem).unwrap().plan
    };
    let tcgen05 = |form| Plan::from(Tcgen05(Sm100Tile::instruction(BlockScaled::Mxfp8, form)));
    let (one, two, swap) = (Sm100Form::OneCta, Sm100Form::TwoCta, Sm100Form::SwapAb);
    let bf16 = Plan::from(CublasLtPlan(CublasLtFormat::Bf16));
    let (m, k) = (GroupedDim::M, GroupedDim::K);
    let mxfp8 = |m| Problem::new(MXFP8, (m, 4096, 4096));
    for (problem, own, other) in [
        (mxfp8(4096), tcgen05(two), bf16),
        (mxfp8(64), tcgen05(swap), bf16),
        (mxfp8(65), tcgen05(one), bf16),
        (mxfp8(4096).grouped(m, 8), tcgen05(two), Plan::from(Cmma)),
        (mxfp8(4096).grouped(m, 32), tcgen05(one), Plan::from(Cmma)),
        (mxfp8(512).grouped(m, 8), tcgen05(swap), Plan::from(Cmma)),
        (mxfp8(64).grouped(k, 8), tcgen05(one), Plan::from(Cmma)),
        (mxfp8(4096).grouped(k, 8), tcgen05(one), Plan::from(Cmma)),
    ] {
        assert_eq!(plan(problem, BlockScaled::Nvfp4), own, "{problem:?}");
        assert_eq!(plan(problem, BlockScaled::Mxfp8), other, "{problem:?}");
    }
    // If a single form fails its self-check, another one is used: one CTA without swapped operands.
    for (wrong, problem) in [(swap, mxfp8(64)), (two, mxfp8(4096))] {
        let hardware = Device {
            capabilities: &blackwell,
            sms: 148,
            cublaslt: &|_| Ok(()),
            tcgen05: &|tile| match tile.form == wrong {
                true => Err("row 0".into()),
                false => Ok(()),
            },
        };
        let plan = |problem| super::plan(&hardware, &problem).unwrap().plan;
        assert_eq!(plan(problem), tcgen05(one), "{wrong}");
        assert_eq!(plan(mxfp8(65)), tcgen05(one), "{wrong}");
    }
    let mixed = [OperandLayout::Mxfp8, OperandLayout::KMajor];
    let mixed = Problem::new(mixed, (4096, 4096, 4096));
    assert_eq!(plan(mixed, BlockScaled::Nvfp4), bf16);
    for (capability, backend) in [
        (Some(90), GemmBackend::Sm90Wgmma),
        (Some(80), GemmBackend::Cmma),
        (None, GemmBackend::Scalar),
    ] {
        let other = device(capability, backend);
        for grouped in [GroupedDim::None, m, k] {
            let plan = |layouts| {
                let problem = Problem::new(layouts, (4096, 4096, 4096)).grouped(grouped, 4);
                choice(&other, 132, &problem).plan
            };
            assert_eq!(plan(MXFP8), plan(BF16), "{backend:?}, {grouped:?}");
        }
    }
}

/// With small M, dense or as the average of the groups along M, `a` is the second operand of the
/// instructions.
#[test]
fn operands_are_exchanged_for_few_rows() {
    let asked = device(Some(100), GemmBackend::Sm100Tcgen05);
    let swapped = |m, grouped, groups| {
        let problem = Problem::new(PACKED, (m, 4096, 4096)).grouped(grouped, groups);
        let plan = choice(&asked, 148, &problem).plan;
        plan.get::<Tcgen05>().unwrap().0.form.swaps_ab()
    };
    assert!(swapped(1, GroupedDim::None, 1));
    assert!(swapped(64, GroupedDim::None, 1));
    assert!(!swapped(65, GroupedDim::None, 1));
    assert!(swapped(8192, GroupedDim::M, 128));
    assert!(!swapped(8193, GroupedDim::M, 128));
    assert!(!swapped(16, GroupedDim::K, 8));
}

/// Two CTAs share a tile if both have rows (on average over the groups along M) and pairs of SMs
/// take no more waves than single SMs: always, unless the number of tiles along M is odd.
#[test]
fn two_ctas_share_tiles_where_that_takes_no_more_waves() {
    let asked = device(Some(100), GemmBackend::Sm100Tcgen05);
    let form = |shape: (usize, usize, usize), grouped, groups| {
        let problem = Problem::new(PACKED, shape).grouped(grouped, groups);
        let plan = choice(&asked, 148, &problem).plan;
        plan.get::<Tcgen05>().unwrap().0.form
    };
    let (none, m, k) = (GroupedDim::None, GroupedDim::M, GroupedDim::K);
    let (one, two) = (Sm100Form::OneCta, Sm100Form::TwoCta);
    assert_eq!(form((256, 74 * 256, 4096), none, 1), two);
    assert_eq!(form((129, 256, 4096), none, 1), two);
    // The odd CTA has no rows.
    assert_eq!(form((128, 74 * 256, 4096), none, 1), one);
    assert_eq!(form((8192, 8192, 4096), none, 1), two);
    // Three rows of tiles, or two of pairs: one wave of both, or one of 147 and two of 98 pairs.
    assert_eq!(form((384, 37 * 256, 4096), none, 1), two);
    assert_eq!(form((384, 49 * 256, 4096), none, 1), one);
    assert_eq!(form((8192, 8192, 4096), m, 32), two);
    // 128 rows per group, then 129.
    assert_eq!(form((8192, 8192, 4096), m, 64), one);
    assert_eq!(form((129 * 32, 8192, 4096), m, 32), two);
    assert_eq!(form((8192, 8192, 4096), k, 8), one);
}

/// Every row names a kernel and the reason for not choosing another one.
#[test]
fn rows_of_every_device() {
    for (capability, backend) in [
        (None, GemmBackend::Scalar),
        (Some(80), GemmBackend::Cmma),
        (Some(90), GemmBackend::Sm90Wgmma),
        (Some(100), GemmBackend::CublasLt),
        (Some(100), GemmBackend::Sm100Tcgen05),
        (Some(120), GemmBackend::Sm120BlockScaled),
    ] {
        let capabilities = device(capability, backend);
        let device = Device {
            capabilities: &capabilities,
            sms: 132,
            cublaslt: &|_| Ok(()),
            tcgen05: &|_| Ok(()),
        };
        for groups in [1, 8] {
            let rows = describe_on(&device, (4096, 4096, 4096).into(), groups);
            for row in rows {
                assert!(!row.kernel.is_empty() && !row.reason.is_empty(), "{row:?}");
                let is_nvfp4 = row.operation == "GEMM, NVFP4 x NVFP4";
                assert!(
                    !is_nvfp4 || row.backend == format!("{backend:?}"),
                    "{row:?}"
                );
            }
        }
    }
}
