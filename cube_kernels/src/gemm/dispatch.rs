//! Which kernel computes a GEMM: each is asked in order, and each of those that come before the
//! chosen one has said why not.

use cubecl::client::Client;

use super::{
    cublaslt,
    kernels::{
        cmma::Cmma, cublaslt::CublasLt, scalar::Scalar, sm90_bf16::Sm90Bf16,
        sm90_stream_k::Sm90StreamK, sm90_w4a16::Sm90W4a16, sm100_nvfp4::Sm100Nvfp4,
        sm120_nvfp4::Sm120Nvfp4, small_m::SmallM,
    },
    materialize::PackedReads,
    operand::OperandLayout,
    problem::{Candidate, Device, GemmShape, Kernel, Plan, Problem, Refusal, sms},
    scheduler::GroupedDim,
    self_check,
};
use crate::{
    Nvfp4Error,
    capabilities::{Capabilities, GemmBackend},
    describe::CodePath,
};

/// All kernels, in the order in which they are asked.
const KERNELS: [&dyn Kernel; 9] = [
    &Sm100Nvfp4,
    &CublasLt,
    &SmallM,
    &Sm90W4a16,
    &Sm90Bf16,
    &Sm90StreamK,
    &Sm120Nvfp4,
    &Cmma,
    &Scalar,
];

/// The kernel that a plan is of.
pub(crate) fn kernel_of(plan: Plan) -> &'static dyn Kernel {
    match plan {
        Plan::CublasLt(_) => &CublasLt,
        Plan::SmallM => &SmallM,
        Plan::W4a16(..) => &Sm90W4a16,
        Plan::DequantThenBf16(..) => &Sm90Bf16,
        Plan::StreamK(..) => &Sm90StreamK,
        Plan::BlockScaled(_) => &Sm120Nvfp4,
        Plan::Tcgen05(_) => &Sm100Nvfp4,
        Plan::Cmma => &Cmma,
        Plan::Scalar => &Scalar,
    }
}

/// The kernel of a problem, and why not another one.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// The backend that the kernel is part of.
    pub backend: GemmBackend,
    /// The name of the kernel, that of its file.
    pub kernel: &'static str,
    /// The kernel, and how it runs.
    pub plan: Plan,
    /// Kernels that were asked before or compared, and their reasons.
    pub refusals: Vec<(&'static str, Refusal)>,
}

impl Choice {
    /// What cuBLASLt said, where the problem is one that it is made for.
    pub(crate) fn refused_by_library(&self) -> Option<&Nvfp4Error> {
        self.refusals.iter().find_map(|refusal| match refusal {
            (_, Refusal::Library(error)) => Some(error),
            _ => None,
        })
    }
}

/// The kernel of `problem` on `device`: the first that takes it or, where that one estimates its
/// time, the one that estimates the least.
///
/// # Errors
/// When the backend that the problem asks for does not take it.
pub fn plan(device: &Device, problem: &Problem) -> Result<Choice, Nvfp4Error> {
    let mut refusals = Vec::new();
    let mut best: Option<(&dyn Kernel, Candidate)> = None;
    for kernel in KERNELS {
        let backend = kernel.backend(device, problem);
        if problem.backend.is_some_and(|asked| asked != backend) {
            continue;
        }
        if let Err(refusal) = kernel.supports(device, problem) {
            refusals.push((kernel.name(), refusal));
            continue;
        }
        let candidate = kernel.plan(device, problem);
        match (best, candidate.estimate) {
            (None, None) => {
                best = Some((kernel, candidate));
                break;
            }
            (None, Some(_)) => best = Some((kernel, candidate)),
            (Some((other, of_other)), Some(estimate)) => {
                let held = of_other.estimate.expect("else it was chosen");
                let is_slower = estimate >= held;
                let (name, worse, less) = match is_slower {
                    true => (kernel.name(), estimate, held),
                    false => (other.name(), held, estimate),
                };
                let refusal = Refusal::Slower {
                    estimate: worse,
                    best: less,
                };
                refusals.push((name, refusal));
                if !is_slower {
                    best = Some((kernel, candidate));
                }
            }
            // What estimates nothing takes what is left.
            (Some(_), None) => break,
        }
    }
    match best {
        Some((kernel, candidate)) => Ok(Choice {
            backend: kernel.backend(device, problem),
            kernel: kernel.name(),
            plan: candidate.plan,
            refusals,
        }),
        None => Err(refused(device, problem, refusals)),
    }
}

/// The error of a backend that was asked for and takes nothing.
fn refused(
    device: &Device,
    problem: &Problem,
    refusals: Vec<(&'static str, Refusal)>,
) -> Nvfp4Error {
    let GemmShape { m, n, k } = problem.shape;
    let name = &device.capabilities.device;
    let backend = problem.backend;
    let mut reasons = Vec::new();
    for (kernel, refusal) in refusals {
        match refusal {
            Refusal::Library(error) => return error,
            refusal => reasons.push(format!("{kernel}: {refusal}")),
        }
    }
    Nvfp4Error::Device {
        argument: "backend",
        found: format!("{backend:?} on {name} for {m} x {n} x {k}"),
        expected: format!("another one ({})", reasons.join("; ")),
    }
}

/// A plan that was given, in place of `choice` where that is of the same backend: other devices
/// keep theirs.
///
/// # Errors
/// When its kernel does not take the problem.
pub(crate) fn with_plan(
    device: &Device,
    problem: &Problem,
    choice: Choice,
    plan: Plan,
) -> Result<Choice, Nvfp4Error> {
    let is_planned = matches!(
        choice.backend,
        GemmBackend::Sm90Wgmma | GemmBackend::Sm100Tcgen05 | GemmBackend::Sm120BlockScaled
    );
    if !is_planned {
        return Ok(choice);
    }
    let kernel = kernel_of(plan);
    if let Err(refusal) = kernel.supports(device, problem) {
        let GemmShape { m, n, k } = problem.shape;
        return Err(Nvfp4Error::value(
            "plan",
            format!("{plan} for {m} x {n} x {k}: {refusal}"),
            "one that takes the operands",
        ));
    }
    Ok(Choice {
        kernel: kernel.name(),
        plan,
        ..choice
    })
}

/// What [`gemm`](super::gemm()) chooses for `problem` on the device behind `client`.
///
/// # Errors
/// As [`plan`].
pub fn choose(client: &Client, problem: &Problem) -> Result<Choice, Nvfp4Error> {
    on_device(client, |device| plan(device, problem))
}

/// The backend of `problem` on a device with these capabilities, where cuBLASLt takes what it is
/// made for.
pub fn backend_of(capabilities: &Capabilities, problem: &Problem) -> GemmBackend {
    let device = Device {
        capabilities,
        // No backend depends on it.
        sms: 1,
        cublaslt: &|_| Ok(()),
        tcgen05: &|| Ok(()),
    };
    match plan(&device, problem) {
        Ok(choice) => choice.backend,
        Err(_) => GemmBackend::Scalar,
    }
}

/// Whether a dense GEMM of two packed operands dequantizes both to bf16 before it multiplies: then
/// an operand that nothing else reads may as well be quantized to
/// [`Storage::Bf16Unscaled`](crate::Storage::Bf16Unscaled). The GEMM has the same bits.
pub fn dequantizes(client: &Client, shape: impl Into<GemmShape>) -> bool {
    let capabilities = Capabilities::of(client);
    // The library of other devices need not be asked.
    capabilities.gemm == GemmBackend::Sm90Wgmma
        && dequantizes_on(&capabilities, sms(client), shape.into())
}

/// [`dequantizes`] on a device with so many SMs.
fn dequantizes_on(capabilities: &Capabilities, sms: usize, shape: GemmShape) -> bool {
    let device = Device {
        capabilities,
        sms,
        cublaslt: &|_| Ok(()),
        tcgen05: &|| Ok(()),
    };
    let problem = Problem::new([OperandLayout::Packed; 2], shape);
    let choice = plan(&device, &problem);
    choice.is_ok_and(|choice| kernel_of(choice.plan).reads(choice.plan).packed == PackedReads::Bf16)
}

/// Which kernels GEMMs of a shape take, of `groups` groups where there is more than one: rows of
/// `nvfp4 doctor`.
pub fn describe(client: &Client, shape: impl Into<GemmShape>, groups: usize) -> Vec<CodePath> {
    on_device(client, |device| describe_on(device, shape.into(), groups))
}

/// Which kernels GEMMs of typical shapes take: M = N = K = 4096, eight groups, and M = 1.
pub fn describe_typical(client: &Client) -> Vec<CodePath> {
    on_device(client, describe_typical_on)
}

/// What `ask` finds about the device behind `client`.
fn on_device<T>(client: &Client, ask: impl FnOnce(&Device) -> T) -> T {
    ask(&Device {
        capabilities: &Capabilities::of(client),
        sms: sms(client),
        cublaslt: &|problem| cublaslt::supports(client, problem),
        // The check runs with the first GEMM, which nothing here is.
        tcgen05: &|| self_check::known(client),
    })
}

fn describe_typical_on(device: &Device) -> Vec<CodePath> {
    let shape = GemmShape {
        m: 4096,
        n: 4096,
        k: 4096,
    };
    let few = GemmShape { m: 1, ..shape };
    let weight_only = [OperandLayout::KMajor, OperandLayout::Packed];
    let mut rows = describe_on(device, shape, 1);
    let problem = Problem::new(weight_only, few);
    rows.push(code_path(device, "GEMM, bf16 x NVFP4, M = 1", &problem));
    rows.extend(describe_on(device, shape, 8));
    rows
}

/// [`describe`] on any device.
fn describe_on(device: &Device, shape: GemmShape, groups: usize) -> Vec<CodePath> {
    use OperandLayout::{KMajor, MnMajor, Packed};
    let padded = GemmShape {
        k: shape.k.next_multiple_of(crate::BLOCK),
        ..shape
    };
    let dense = [
        ("GEMM, NVFP4 x NVFP4", [Packed; 2], padded),
        ("GEMM, bf16 x NVFP4", [KMajor, Packed], padded),
        ("GEMM, bf16 x bf16", [KMajor; 2], shape),
        ("GEMM, bf16, MN-major", [MnMajor; 2], shape),
    ];
    let grouped = [
        ("M-grouped GEMM, NVFP4", GroupedDim::M),
        ("K-grouped GEMM, NVFP4", GroupedDim::K),
    ];
    match groups {
        0 | 1 => dense
            .map(|(operation, layouts, shape)| {
                code_path(device, operation, &Problem::new(layouts, shape))
            })
            .into(),
        _ => grouped
            .map(|(operation, dim)| {
                let problem = Problem::new([Packed; 2], padded).grouped(dim, groups);
                code_path(device, operation, &problem)
            })
            .into(),
    }
}

/// The choice for `problem` as a row.
fn code_path(device: &Device, operation: &'static str, problem: &Problem) -> CodePath {
    match plan(device, problem) {
        Ok(choice) => {
            let refusals = choice.refusals.iter();
            let reasons: Vec<_> = refusals
                .map(|(kernel, refusal)| format!("{kernel}: {refusal}"))
                .collect();
            let reason = match reasons.is_empty() {
                true => "it is the first that was asked".into(),
                false => reasons.join("; "),
            };
            let backend = format!("{:?}", choice.backend);
            CodePath::new(operation, backend, choice.plan.to_string(), reason)
        }
        Err(error) => CodePath::new(operation, "none", "none", error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            cublaslt::{CublasLtFormat, CublasLtProblem},
            epilogue::Factor,
            heuristics::BAND,
            tiles::{Multiply, Sm90Tile, Sm100Tile, Sm120Tile, W4a16Tile},
        },
        *,
    };
    use crate::cube::codec::Conversion;

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
            tcgen05: &|| Ok(()),
        };
        plan(&device, problem).unwrap()
    }

    /// On an H100.
    fn sm90(problem: &Problem) -> Plan {
        let choice = choice(&device(Some(90), GemmBackend::Sm90Wgmma), 132, problem);
        assert_eq!(choice.backend, GemmBackend::Sm90Wgmma);
        choice.plan
    }

    fn dense(m: usize, n: usize, k: usize) -> Plan {
        sm90(&Problem::new(PACKED, (m, n, k)))
    }

    /// The plans that were measured to be the fastest, on an H100.
    #[test]
    fn plans_of_measured_shapes() {
        let w4a16 = |rows_a, ways| Plan::W4a16(W4a16Tile { rows_a, ways }, BAND);
        assert_eq!(dense(1, 8192, 8192), Plan::SmallM);
        assert_eq!(dense(16, 4096, 14336), Plan::SmallM);
        assert_eq!(dense(16, 4096, 14352), Plan::SmallM);
        assert_eq!(dense(32, 8192, 8192), w4a16(32, 4));
        assert_eq!(dense(64, 8192, 8192), w4a16(64, 2));
        assert_eq!(dense(96, 8192, 8192), w4a16(128, 2));
        assert_eq!(dense(128, 8192, 8192), w4a16(128, 2));
        assert_eq!(dense(128, 4096, 4096), w4a16(64, 2));
        assert_eq!(dense(256, 8192, 8192), w4a16(128, 1));
        assert_eq!(dense(512, 8192, 8192), w4a16(256, 1));
        assert_eq!(dense(2048, 2048, 2048), w4a16(256, 1));
        let bf16 = |tile| Plan::DequantThenBf16(tile, BAND);
        assert_eq!(dense(8192, 8192, 8192), bf16(Sm90Tile::N256));
        assert_eq!(dense(8192, 2112, 7168), bf16(Sm90Tile::N176));
    }

    /// Weight gradients of small models share their tiles out, however the operands are stored.
    #[test]
    fn few_tiles_of_long_contractions_are_shared_out() {
        let layouts = [OperandLayout::KMajor, OperandLayout::MnMajor];
        for layout in layouts {
            let plan = |shape| sm90(&Problem::new([layout; 2], shape));
            let shared = |tile| Plan::StreamK(tile, BAND);
            assert_eq!(plan((768, 768, 16384)), shared(Sm90Tile::N128));
            assert_eq!(plan((512, 512, 16384)), shared(Sm90Tile::N128));
            // Measured: whole tiles are faster, or as fast.
            for shape in [
                (768, 2304, 16384),
                (768, 4096, 16384),
                (1024, 1024, 8192),
                (2048, 2048, 2048),
                (2048, 6144, 8192),
                (16384, 768, 2048),
            ] {
                let plan = plan(shape);
                assert!(
                    matches!(plan, Plan::DequantThenBf16(..)),
                    "{shape:?}: {plan}"
                );
            }
        }
    }

    /// Where both operands are dequantized, the kernel behind that is the same for a dequantized
    /// one in the place of either.
    #[test]
    fn dequantized_operands_change_no_plan() {
        let hopper = device(Some(90), GemmBackend::Sm90Wgmma);
        let dequantizes = |(m, n, k)| dequantizes_on(&hopper, 132, GemmShape { m, n, k });
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
        // The last is a weight gradient of few tiles, where dequantizing both operands costs more
        // than it gains.
        for shape in [(16, 4096, 4096), (512, 8192, 8192), (4096, 4096, 8192)] {
            assert!(!dequantizes(shape), "{shape:?}");
        }
    }

    /// Consumer Blackwell: codes go to the instruction, small M with a packed weight has its own
    /// kernel, and what neither takes is left to the portable one.
    #[test]
    fn plans_of_consumer_blackwell() {
        let blackwell = device(Some(120), GemmBackend::Sm120BlockScaled);
        let plan = |layouts, shape, dim| {
            let problem = Problem::new(layouts, shape).grouped(dim, 1);
            choice(&blackwell, 84, &problem).plan
        };
        let tile = |strips| {
            Plan::BlockScaled(Sm120Tile {
                strips,
                multiply: Multiply::Instruction,
            })
        };
        let none = GroupedDim::None;
        assert_eq!(plan(PACKED, (4096, 4096, 4096), none), tile(2));
        assert_eq!(plan(PACKED, (64, 8192, 8192), none), tile(1));
        assert_eq!(plan(PACKED, (4096, 4096, 4096), GroupedDim::M), tile(2));
        assert_eq!(plan(PACKED, (8, 8192, 8192), none), Plan::SmallM);
        assert_eq!(plan(WEIGHT_ONLY, (8, 8192, 8192), none), Plan::SmallM);
        assert_eq!(plan(PACKED, (8, 8192, 48), none), Plan::SmallM);
        assert_eq!(plan(WEIGHT_ONLY, (64, 8192, 8192), none), Plan::Cmma);
        assert_eq!(plan(PACKED, (64, 8192, 8192), GroupedDim::K), Plan::Cmma);
    }

    /// Other CUDA devices: small M with a packed weight from sm_80 on, tiles otherwise.
    #[test]
    fn plans_of_other_devices() {
        let plan = |sm, layouts, shape, dim| {
            let problem = Problem::new(layouts, shape).grouped(dim, 1);
            choice(&device(sm, GemmBackend::Cmma), 132, &problem).plan
        };
        let (few, tiles, none) = (Plan::SmallM, Plan::Cmma, GroupedDim::None);
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

    /// What the kernel that dequantizes in registers cannot read takes the other one.
    #[test]
    fn plans_of_other_operands() {
        let is_bf16 = |plan| matches!(plan, Plan::DequantThenBf16(..));
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
        assert_eq!(sm90(&rows), Plan::W4a16(tile, 1));
        // 176 columns are no multiple of 64: those tiles are for a K-major `b`.
        let narrow = |b| sm90(&Problem::new([mn_major, b], (8192, 2112, 7168)));
        assert_eq!(
            narrow(OperandLayout::KMajor),
            Plan::DequantThenBf16(Sm90Tile::N176, BAND)
        );
        assert_eq!(
            narrow(mn_major),
            Plan::DequantThenBf16(Sm90Tile::N128, BAND)
        );
        // Few rows of an MN-major `a`: read as they are, or transposed where TMA does not read
        // them.
        assert!(is_bf16(sm90(&Problem::new(
            [mn_major, packed],
            (16, 8192, 8192)
        ))));
        assert_eq!(
            sm90(&Problem::new([mn_major, packed], (12, 8192, 8192))),
            Plan::SmallM
        );
    }

    /// A backend that was asked for is taken or refused, never replaced, and `Cmma` is its tiles.
    #[test]
    fn backends_that_are_asked_for() {
        let hopper = device(Some(90), GemmBackend::Sm90Wgmma);
        let device = Device {
            capabilities: &hopper,
            sms: 132,
            cublaslt: &|_| Ok(()),
            tcgen05: &|| Ok(()),
        };
        let asked = |backend, (m, n, k): (usize, usize, usize)| {
            let problem = Problem {
                backend: Some(backend),
                ..Problem::new(PACKED, (m, n, k))
            };
            plan(&device, &problem).map(|choice| choice.plan)
        };
        let few = (1, 8192, 8192);
        assert_eq!(asked(GemmBackend::Sm90Wgmma, few), Ok(Plan::SmallM));
        assert_eq!(asked(GemmBackend::Cmma, few), Ok(Plan::Cmma));
        assert_eq!(asked(GemmBackend::Scalar, few), Ok(Plan::Scalar));
        let format = CublasLtFormat::Nvfp4;
        assert_eq!(
            asked(GemmBackend::CublasLt, few),
            Ok(Plan::CublasLt(format))
        );
        assert!(asked(GemmBackend::Sm90Wgmma, (1, 8190, 8192)).is_err());
        let error = asked(GemmBackend::Sm120BlockScaled, few).unwrap_err();
        assert!(error.to_string().contains("12.0"), "{error}");
    }

    /// Data-center Blackwell: the library, unless it refuses or would dequantize a weight for small
    /// M.
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
                tcgen05: &|| Ok(()),
            };
            plan(&device, &Problem::new(layouts, shape)).unwrap()
        };
        let (few, many) = ((8, 8192, 8192), (4096, 4096, 4096));
        let nvfp4 = Plan::CublasLt(CublasLtFormat::Nvfp4);
        assert_eq!(choose(PACKED, few, true).plan, nvfp4);
        assert_eq!(choose(WEIGHT_ONLY, few, true).plan, Plan::SmallM);
        let bf16 = Plan::CublasLt(CublasLtFormat::Bf16);
        assert_eq!(choose(WEIGHT_ONLY, many, true).plan, bf16);
        assert_eq!(choose(PACKED, (4096, 4096, 4112), true).plan, Plan::Cmma);
        let refused = choose(PACKED, many, false);
        assert_eq!(
            (refused.backend, refused.plan),
            (GemmBackend::Cmma, Plan::Cmma)
        );
        assert!(refused.refused_by_library().is_some());
    }

    /// Data-center Blackwell where the kernel for `tcgen05` is asked for, by `NVFP4_GEMM` or by the
    /// request; what it refuses goes where it would go else.
    #[test]
    fn tcgen05_where_it_is_asked_for() {
        let tcgen05 = Plan::Tcgen05(Sm100Tile::INSTRUCTION);
        let nvfp4 = Plan::CublasLt(CublasLtFormat::Nvfp4);
        let shape = (4096, 4096, 4096);
        let asked = device(Some(100), GemmBackend::Sm100Tcgen05);
        let plan = |problem: Problem| choice(&asked, 148, &problem).plan;
        let dense = Problem::new(PACKED, shape);
        assert_eq!(plan(dense), tcgen05);
        assert_eq!(plan(Problem::new(PACKED, (1, 4096, 4096))), tcgen05);
        assert_eq!(plan(dense.grouped(GroupedDim::M, 8)), tcgen05);
        let mut per_token = dense;
        per_token.epilogue.a = Factor::PerRow;
        assert_eq!(plan(per_token), tcgen05);
        assert_eq!(plan(dense.grouped(GroupedDim::K, 8)), tcgen05);
        assert_eq!(plan(Problem::new(PACKED, (64, 4096, 4112))), Plan::Cmma);
        assert_eq!(plan(Problem::new(PACKED, (64, 4096, 0))), Plan::Cmma);
        let unaligned = Problem {
            aligned: false,
            ..dense
        };
        assert_ne!(plan(unaligned), tcgen05);
        let bf16 = Plan::CublasLt(CublasLtFormat::Bf16);
        assert_eq!(plan(Problem::new(WEIGHT_ONLY, shape)), bf16);

        // Without that it is a request's backend, or nothing.
        let library = device(Some(103), GemmBackend::CublasLt);
        let found = choice(&library, 148, &dense);
        assert_eq!(found.plan, nvfp4);
        assert_eq!(found.refusals[0].0, "sm100_nvfp4");
        let by_request = Problem {
            backend: Some(GemmBackend::Sm100Tcgen05),
            ..dense
        };
        let found = choice(&library, 148, &by_request);
        let backend = GemmBackend::Sm100Tcgen05;
        assert_eq!((found.backend, found.plan), (backend, tcgen05));
        let hopper = device(Some(90), GemmBackend::Sm90Wgmma);
        let hopper = Device {
            capabilities: &hopper,
            sms: 132,
            cublaslt: &|_| Ok(()),
            tcgen05: &|| Ok(()),
        };
        let error = super::plan(&hopper, &by_request).unwrap_err();
        assert!(error.to_string().contains("10.0"), "{error}");
    }

    /// Every row names a kernel and why it is not another one.
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
                tcgen05: &|| Ok(()),
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
}
