//! Requirements and launch of the small-M GEMM.

use std::fmt;

use cubecl::{prelude::*, server::Handle};

use super::super::{sm90::bf16::check_sm90, sm120::check_sm120};
use super::{
    kernel::{small_m_kernel, small_m_norm_kernel},
    shape::{CHUNK, MAX_ROWS, SmallMLeft, SmallMNorm, SmallMShape},
};
use crate::{
    BLOCK, Nvfp4Error,
    capabilities::{Capabilities, GemmBackend, conversion_of, overlaps_kernels},
    gemm::{
        arguments::{MixedMatrixLaunch, PackedMatrixLaunch, ProblemShapeLaunch},
        epilogue::EpilogueArgs,
        materialize::Materialized,
        operand::OperandLayout,
        plan::{Candidate, GemmKernel, GemmPlan, Launch},
        problem::{Device, GemmShape, Problem, Refusal, UNALIGNED, sms},
        scheduler::GroupedDim,
    },
    memory::{address_type, is_aligned},
    norm::{
        forward::NormInputsLaunch,
        plan::{NormPlan, PLANES},
    },
    tensor::Matrix,
};

/// Maximum bytes of normalized rows in the shared memory of every cube. With more rows, normalizing
/// in every cube takes longer than launching a kernel that normalizes once.
const NORM_BYTES: usize = 16 * 1024;

/// Length of K that counts as long for few rows of `b`: each of 16 warps has at least four chunks.
const LONG: usize = 64 * CHUNK;
/// Maximum K for which a row of `a` is staged in shared memory: it takes 32 KiB.
const LONGEST: usize = 16 * 1024;

/// Returns true if the next rows of `a`, in `columns` groups, are loaded late. From sm_100 on the
/// compiler limits itself to 128 registers, so that two cubes of eight warps fit on an SM, and
/// spills some of the others. After the multiplications, the fragments of `a` no longer occupy
/// registers.
pub(crate) fn loads_a_late(columns: usize, left: SmallMLeft, compute: Option<u32>) -> bool {
    columns > 1 && left == SmallMLeft::Packed && compute >= Some(100)
}

/// Returns the shape for `m` rows of `a` and `n` of `b`: two strips if there are enough rows for
/// three waves of cubes, and as many warps and chunks in flight as registers allow.
///
/// Measured (H100, one row, microseconds, one strip / two strips): N = 6144, K = 4096 7.8 / 8.8;
/// 4096 x 4096 6.4 / 6.8; 4096 x 14336 13.6 / 15.1; 16384 x 2048 11.5 / 10.9, and 9.7 with 8 warps.
fn shape(
    client: &Client,
    capabilities: &Capabilities,
    (m, n, k): (usize, usize, usize),
    left: SmallMLeft,
) -> SmallMShape {
    let columns = m.div_ceil(8).next_power_of_two();
    let strips = if n.div_ceil(32) >= 3 * sms(client) {
        2
    } else {
        1
    };
    let is_long = columns == 1 && strips == 1 && k >= LONG;
    let (warps, ahead) = match columns {
        // One chunk for each of 16 warps leaves them idle while the cube ends. Instead: two for
        // each of 8, and more cubes per SM.
        1 if strips == 2 && k <= 16 * CHUNK => (8, 1),
        // There is only one cube per SM.
        1 if is_long && n.div_ceil(16) <= sms(client) => (32, 1),
        1 => (16, 1),
        _ => (8, 2),
    };
    let whole = k.is_multiple_of(CHUNK);
    let is_staged = is_long && whole && k <= LONGEST && m == 1 && left == SmallMLeft::Bf16;
    let (left, ahead) = match is_staged {
        // Registers that rows of `a` would take hold weights instead, if any are left.
        true => (SmallMLeft::Staged(k / 8), if warps == 32 { 1 } else { 2 }),
        false => (left, ahead),
    };
    SmallMShape {
        warps,
        strips,
        columns,
        ahead,
        early: columns == 1 && strips == 1 && whole && k <= warps * CHUNK,
        tail: !whole,
        halves: !k.is_multiple_of(2 * BLOCK),
        left,
        converts: capabilities.compute_capability >= Some(89),
        late: loads_a_late(columns, left, capabilities.compute_capability),
        overlaps: overlaps_kernels(client),
        swiglu: None,
    }
}

/// RMSNorm prologue of the GEMM, on `x` plus an optional residual.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NormLeft<'a> {
    /// Input, bf16 `[m, k]`.
    pub x: &'a Matrix,
    /// Residual of the same shape and type as `x`, and the destination of the sum.
    pub residual: Option<(&'a Matrix, &'a Matrix)>,
    /// Gain, `f32[k]`.
    pub gain: &'a Handle,
    /// Epsilon, added to the mean square.
    pub epsilon: f32,
}

/// Returns why the kernel cannot normalize `x` (plus the residual, if any) for a weight of `n`
/// rows.
///
/// Every cube normalizes, so it pays off if all cubes run at the same time. Measured (H100, one
/// row): a step of Llama 3.1 8B takes 2.85 ms with norms in its GEMMs of 384 and 896 cubes, and
/// 2.74 ms without; one of Llama 3.2 1B takes 0.750 ms with norms in its GEMMs of 192 and 512
/// cubes, and 0.743 ms with only the former.
pub(crate) fn refuses_norm(
    client: &Client,
    x: &Matrix,
    residual: Option<&Matrix>,
    gain: &Handle,
    n: usize,
) -> Option<Refusal> {
    let handles = [Some(&x.handle), residual.map(|it| &it.handle), Some(gain)];
    // The memory of rows does not depend on the number of warps.
    let norm = norm_plan(client, x, residual.is_some(), PLANES);
    if !x.cols.is_multiple_of(CHUNK) {
        Some(Refusal::Operands("k is no multiple of 128"))
    } else if n.div_ceil(16) > 2 * sms(client) {
        Some(Refusal::Operands(
            "more cubes than run at a time would each normalise the rows",
        ))
    } else if norm.plan.kept != 1 {
        // With two blocks, a unit takes too many registers for two cubes per SM, and on sm_80 more
        // than there are.
        Some(Refusal::Operands("k is above 4096"))
    } else if norm.bytes() > NORM_BYTES {
        Some(Refusal::Operands(
            "the normalised rows take more than 16 KiB",
        ))
    } else if !handles.into_iter().flatten().all(is_aligned) {
        Some(Refusal::Operands(UNALIGNED))
    } else {
        None
    }
}

/// Returns the plan to normalize the rows of `x` in cubes of `warps` warps.
fn norm_plan(client: &Client, x: &Matrix, residual: bool, warps: usize) -> SmallMNorm {
    SmallMNorm {
        plan: NormPlan::of_prologue(client, x, residual, warps),
        rows: x.rows.next_power_of_two(),
    }
}

/// The small-M GEMM with a packed weight, which is its own plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SmallM;

impl GemmKernel for SmallM {
    fn name(&self) -> &'static str {
        "small_m"
    }

    /// Returns the device's backend if its own kernels support the sizes, and otherwise the
    /// portable one.
    fn backend(&self, device: &Device, problem: &Problem) -> GemmBackend {
        if check_sm90(device, problem).is_ok() {
            GemmBackend::Sm90Wgmma
        } else if check_sm120(device, problem).is_ok() {
            GemmBackend::Sm120BlockScaled
        } else {
            GemmBackend::Cmma
        }
    }

    fn supports(&self, device: &Device, problem: &Problem) -> Result<(), Refusal> {
        let GemmShape { m, n, k } = problem.shape;
        let has_instructions = device
            .capabilities
            .compute_capability
            .is_some_and(|sm| sm >= 80);
        match problem {
            _ if !has_instructions || device.capabilities.gemm == GemmBackend::Scalar => {
                Err(Refusal::Device("the device has no mma.sync of sm_80"))
            }
            _ if problem.b != OperandLayout::Packed => {
                Err(Refusal::Operands("`b` is not packed along k"))
            }
            _ if m > MAX_ROWS => Err(Refusal::Operands("m is above 16")),
            _ if problem.grouped != GroupedDim::None => Err(Refusal::Operands("there are groups")),
            _ if k == 0 || !k.is_multiple_of(BLOCK) || !n.is_multiple_of(2) => {
                Err(Refusal::Operands("k is no multiple of 16, or n is odd"))
            }
            _ if !problem.aligned => Err(Refusal::Operands(UNALIGNED)),
            _ if problem.a == OperandLayout::MnMajor && check_sm90(device, problem).is_ok() => Err(
                Refusal::Operands("`a` is MN-major, which sm90_bf16 reads as it is"),
            ),
            _ if problem.backend == Some(GemmBackend::Cmma) => {
                Err(Refusal::Operands("the tiles of Cmma were asked for"))
            }
            _ => Ok(()),
        }
    }

    fn plan(&self, _device: &Device, _problem: &Problem) -> Candidate {
        Self.into()
    }
}

impl fmt::Display for SmallM {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("mma.sync for small M, `b` dequantized in registers")
    }
}

impl GemmPlan for SmallM {
    fn kernel(&self) -> &'static dyn GemmKernel {
        &SmallM
    }

    /// Memory-bound on the packed weight, which it reads directly.
    fn reads_codes_directly(&self) -> bool {
        true
    }

    fn launch(&self, launch: &Launch) -> Result<(), Nvfp4Error> {
        let GemmShape { m, k, .. } = launch.shape;
        let takes = m <= MAX_ROWS && k > 0 && k.is_multiple_of(BLOCK);
        if launch.b.layout != OperandLayout::Packed || !takes {
            return Err(launch.misfit(self));
        }
        queue(&SmallMLaunch {
            client: launch.client,
            capabilities: launch.capabilities,
            shape: launch.shape,
            left: Left::Operand(launch.a),
            b: launch.b,
            epilogue: launch.epilogue,
            swiglu: false,
            out: &launch.output.matrix().handle,
        });
        Ok(())
    }
}

/// Launch arguments: operands that were checked against the sizes.
pub(crate) struct SmallMLaunch<'a> {
    pub client: &'a Client,
    pub capabilities: &'a Capabilities,
    pub shape: GemmShape,
    pub left: Left<'a>,
    pub b: &'a Materialized,
    pub epilogue: &'a EpilogueArgs,
    /// True if the output is SwiGLU of both halves of the columns, which halves their number.
    pub swiglu: bool,
    pub out: &'a Handle,
}

/// Left operand.
pub(crate) enum Left<'a> {
    /// Rows of `a` without a norm.
    Operand(&'a Materialized),
    /// Rows that the kernel normalizes.
    Norm(NormLeft<'a>),
}

/// Queues the kernel.
pub(crate) fn queue(launch: &SmallMLaunch) {
    let SmallMLaunch {
        client,
        capabilities,
        b,
        epilogue,
        out,
        ..
    } = *launch;
    let GemmShape { m, n, k } = launch.shape;
    let left = match &launch.left {
        Left::Operand(a) if a.is_packed() => SmallMLeft::Packed,
        Left::Operand(_) => SmallMLeft::Bf16,
        Left::Norm(_) => SmallMLeft::Normed,
    };
    // The number of warps, and so the order of the sums, does not depend on prologue and epilogue.
    let shape = SmallMShape {
        swiglu: launch.swiglu.then(|| conversion_of(client)),
        ..shape(client, capabilities, (m, n, k), left)
    };
    let width = n / shape.inputs();
    let words = m * width * epilogue.kind.out.size() / 4;
    // SAFETY (of every argument): the caller checked the operands against their shapes. What the
    // kernel does not read of `a` is any memory.
    let buffer = |handle: &Handle, len| unsafe { BufferArg::from_raw_parts(handle.clone(), len) };
    let count = CubeCount::Static(width.div_ceil(shape.outputs()) as u32, 1, 1);
    let dim = CubeDim::new_1d(32 * shape.warps as u32);
    let address = address_type((n * k).max(m * n));
    let weight = PackedMatrixLaunch::new(
        buffer(&b.elements, n * k / 8),
        buffer(&b.scales, n * k / BLOCK),
    );
    let problem = ProblemShapeLaunch::of((m, n, k), 1);
    // SAFETY: rows and columns outside are clamped where they are read and not written.
    unsafe {
        let epilogue = epilogue.launch([m, n], 1, (out, words), 1.0);
        match &launch.left {
            Left::Operand(a) => small_m_kernel::launch_unchecked(
                client,
                count,
                dim,
                address,
                MixedMatrixLaunch::new(
                    buffer(&a.elements, m * k / 8),
                    buffer(&a.scales, m * k / BLOCK),
                    buffer(&a.elements, m * k / 8),
                ),
                weight,
                problem,
                epilogue,
                buffer(out, words),
                shape,
            ),
            Left::Norm(norm) => {
                let (residual, sum) = norm.residual.unwrap_or((norm.x, norm.x));
                let matrix = |matrix: &Matrix| buffer(&matrix.handle, m * k / 8);
                small_m_norm_kernel::launch_unchecked(
                    client,
                    count,
                    dim,
                    address,
                    NormInputsLaunch::new(
                        matrix(norm.x),
                        matrix(residual),
                        buffer(norm.gain, k / 4),
                        buffer(norm.gain, k / 4),
                        norm.epsilon,
                    ),
                    matrix(sum),
                    weight,
                    problem,
                    epilogue,
                    buffer(out, words),
                    norm_plan(client, norm.x, norm.residual.is_some(), shape.warps),
                    shape,
                )
            }
        }
    }
}
