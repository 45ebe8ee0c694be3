//! Kernel dispatch: kernels are asked in a fixed order, and each one asked before the chosen one
//! gives its reason for refusing.

#[cfg(test)]
mod tests;

use cubecl::client::Client;

use super::{
    cublaslt,
    kernels::{
        cublaslt::CublasLt,
        portable::{Cmma, Scalar},
        sm90::{
            bf16::Sm90Bf16, stream_k::Sm90StreamK, w4a16::Sm90W4a16,
            w4a16_mn_major::Sm90W4a16MnMajor,
        },
        sm100::Sm100BlockScaled,
        sm120::Sm120BlockScaled,
        small_m::SmallM,
    },
    operand::OperandLayout,
    plan::{Candidate, GemmKernel, Plan},
    problem::{Device, GemmShape, Problem, Refusal, sms},
    scheduler::GroupedDim,
    self_check,
};
use crate::{
    Nvfp4Error, StoredForm,
    capabilities::{Capabilities, GemmBackend},
    describe::CodePath,
};

/// All kernels, in the order in which they are asked.
const KERNELS: [&dyn GemmKernel; 10] = [
    &Sm100BlockScaled,
    &CublasLt,
    &SmallM,
    &Sm90W4a16,
    &Sm90W4a16MnMajor,
    &Sm90Bf16,
    &Sm90StreamK,
    &Sm120BlockScaled,
    &Cmma,
    &Scalar,
];

/// The kernel chosen for a problem, and the reasons against others.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// Backend of the kernel.
    pub backend: GemmBackend,
    /// Name of the kernel and of its file.
    pub kernel: &'static str,
    /// Kernel and configuration.
    pub plan: Plan,
    /// Kernels that were asked before or compared, with their reasons.
    pub refusals: Vec<(&'static str, Refusal)>,
}

impl Choice {
    /// Returns the form in which the GEMM `problem`, of which this is the choice, reads packed
    /// operands.
    pub fn packed_reads(&self, problem: &Problem) -> StoredForm {
        let is_mxfp8 = [problem.a, problem.b].contains(&OperandLayout::Mxfp8);
        let plan = self.plan.object();
        match is_mxfp8 && !plan.kernel().takes_mxfp8() {
            // Dequantized before the GEMM, from rows of scales.
            true => StoredForm::Rows,
            false => plan.reads(),
        }
    }
}

/// Returns the choice for `problem` on `device`: the first kernel that supports it or, if that
/// kernel estimates its time, the one with the lowest estimate.
///
/// # Errors
/// Returns an error if the requested backend does not support the problem.
pub fn plan(device: &Device, problem: &Problem) -> Result<Choice, Nvfp4Error> {
    let mut refusals = Vec::new();
    let mut best: Option<(&dyn GemmKernel, Candidate)> = None;
    for kernel in KERNELS {
        let problem = &seen_by(kernel, problem);
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
            // A kernel without an estimate is only used if no kernel before it supports the
            // problem.
            (Some(_), None) => break,
        }
    }
    match best {
        Some((kernel, candidate)) => Ok(Choice {
            backend: kernel.backend(device, &seen_by(kernel, problem)),
            kernel: kernel.name(),
            plan: candidate.plan,
            refusals,
        }),
        None => Err(refused(device, problem, refusals)),
    }
}

/// Returns true if the kernel `name` multiplies codes on devices of this compute capability.
pub(crate) fn multiplies_codes(name: &str, compute_capability: Option<u32>) -> bool {
    let kernel = KERNELS.iter().find(|kernel| kernel.name() == name);
    kernel.is_some_and(|kernel| kernel.multiplies_codes_on(compute_capability))
}

/// Returns `problem` as presented to `kernel`.
fn seen_by(kernel: &dyn GemmKernel, problem: &Problem) -> Problem {
    match kernel.takes_mxfp8() {
        true => *problem,
        false => problem.without_mxfp8(),
    }
}

/// Returns the error of a requested backend without a kernel that supports the problem.
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

/// Replaces the plan of `choice` by the requested `plan` if the backend of `choice` has several
/// plans (sm_90, sm_100 and sm_120); choices of other backends stay as they are.
///
/// # Errors
/// Returns an error if the plan's kernel does not support the problem.
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
    let kernel = plan.object().kernel();
    if let Err(refusal) = kernel.supports(device, &seen_by(kernel, problem)) {
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

/// Returns the kernels for GEMMs of a shape, grouped if `groups` is above one, as rows of `nvfp4
/// doctor`.
pub fn describe(client: &Client, shape: impl Into<GemmShape>, groups: usize) -> Vec<CodePath> {
    on_device(client, |device| describe_on(device, shape.into(), groups))
}

/// Returns the kernels for GEMMs of typical shapes: M = N = K = 4096, eight groups, and M = 1.
pub fn describe_typical(client: &Client) -> Vec<CodePath> {
    on_device(client, describe_typical_on)
}

/// Calls `ask` with the device of `client`.
fn on_device<T>(client: &Client, ask: impl FnOnce(&Device) -> T) -> T {
    ask(&Device {
        capabilities: Capabilities::of(client),
        sms: sms(client),
        cublaslt: &|problem| cublaslt::supports(client, problem),
        // The check runs with the first GEMM, and no GEMM runs here.
        tcgen05: &|tile| self_check::known(client, tile),
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

/// [`describe`] for any device.
fn describe_on(device: &Device, shape: GemmShape, groups: usize) -> Vec<CodePath> {
    use OperandLayout::{KMajor, MnMajor, Mxfp8, Packed, PackedMnMajor};
    let padded = GemmShape {
        k: shape.k.next_multiple_of(crate::BLOCK),
        ..shape
    };
    let mx = GemmShape {
        k: shape.k.next_multiple_of(crate::MX_BLOCK),
        ..shape
    };
    let dense = [
        ("GEMM, NVFP4 x NVFP4", [Packed; 2], padded),
        ("GEMM, MXFP8 x MXFP8", [Mxfp8; 2], mx),
        ("GEMM, bf16 x NVFP4", [KMajor, Packed], padded),
        ("GEMM, bf16 x NVFP4, dgrad", [KMajor, PackedMnMajor], shape),
        ("GEMM, bf16 x bf16", [KMajor; 2], shape),
        ("GEMM, bf16, MN-major", [MnMajor; 2], shape),
    ];
    let grouped = [
        ("M-grouped GEMM, NVFP4", GroupedDim::M, Packed, padded),
        ("K-grouped GEMM, NVFP4", GroupedDim::K, Packed, padded),
        ("M-grouped GEMM, MXFP8", GroupedDim::M, Mxfp8, mx),
        ("K-grouped GEMM, MXFP8", GroupedDim::K, Mxfp8, mx),
    ];
    match groups {
        0 | 1 => dense
            .map(|(operation, layouts, shape)| {
                code_path(device, operation, &Problem::new(layouts, shape))
            })
            .into(),
        _ => grouped
            .map(|(operation, dim, layout, shape)| {
                let problem = Problem::new([layout; 2], shape).grouped(dim, groups);
                code_path(device, operation, &problem)
            })
            .into(),
    }
}

/// Returns the choice for `problem` as a row.
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
