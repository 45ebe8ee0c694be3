//! What the GEMM of small M takes, and how it is launched.

use cubecl::{prelude::*, server::Handle};

use super::{
    sm90_bf16::check_sm90,
    sm120_block_scaled::check_sm120,
    small_m::{CHUNK, MAX_ROWS, SmallMLeft, SmallMShape, small_m_kernel},
};
use crate::{
    BLOCK, Nvfp4Error,
    capabilities::{Capabilities, GemmBackend, overlaps_kernels},
    gemm::{
        arguments::{MixedMatrixLaunch, PackedMatrixLaunch, ProblemShapeLaunch},
        operand::OperandLayout,
        problem::{
            Candidate, Device, GemmShape, Kernel, Launch, Plan, Problem, Refusal, UNALIGNED,
            misfit, sms,
        },
        scheduler::GroupedDim,
    },
    memory::address_type,
};

/// Whether the next rows of `a` are loaded late, for `columns` groups of them. From sm_100 on the
/// compiler keeps to 128 registers, so that two cubes of eight warps fit on a processor, and stores
/// some of the others in memory. Behind the products the fragments of `a` no longer take any.
pub(crate) fn loads_a_late(columns: usize, left: SmallMLeft, compute: Option<u32>) -> bool {
    columns > 1 && left == SmallMLeft::Packed && compute >= Some(100)
}

/// The shape for `m` rows of `a` and `n` of `b`: two strips where there are enough rows for three
/// waves of cubes, and as many warps and chunks under way as registers allow.
///
/// Measured (H100, one row, microseconds, a strip / two strips): N = 6144, K = 4096 7.8 / 8.8; 4096 x
/// 4096 6.4 / 6.8; 4096 x 14336 13.6 / 15.1; 16384 x 2048 11.5 / 10.9, of 8 warps 9.7.
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
    let (warps, ahead) = match columns {
        // A chunk for each of 16 warps leaves them idle while the cube ends; two for each of 8, and
        // more cubes a processor.
        1 if strips == 2 && k <= 16 * CHUNK => (8, 1),
        1 => (16, 1),
        _ => (8, 2),
    };
    SmallMShape {
        warps,
        strips,
        columns,
        ahead,
        tail: !k.is_multiple_of(CHUNK),
        halves: !k.is_multiple_of(2 * BLOCK),
        left,
        converts: capabilities.compute_capability >= Some(89),
        late: loads_a_late(columns, left, capabilities.compute_capability),
        overlaps: overlaps_kernels(client),
    }
}

/// The GEMM of small M with a packed weight.
pub(crate) struct SmallM;

impl Kernel for SmallM {
    fn name(&self) -> &'static str {
        "small_m"
    }

    /// That of the device where its own kernels take the sizes, and otherwise the portable one.
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
        Plan::SmallM.into()
    }

    fn launch(&self, launch: &Launch, plan: Plan) -> Result<(), Nvfp4Error> {
        let GemmShape { m, k, .. } = launch.shape;
        let takes = m <= MAX_ROWS && k > 0 && k.is_multiple_of(BLOCK);
        if plan != Plan::SmallM || launch.b.layout != OperandLayout::Packed || !takes {
            return Err(misfit(plan, launch));
        }
        queue(launch);
        Ok(())
    }
}

/// Queues the GEMM.
fn queue(launch: &Launch) {
    let Launch {
        client,
        capabilities,
        a,
        b,
        epilogue,
        output,
        ..
    } = *launch;
    let GemmShape { m, n, k } = launch.shape;
    let out = &output.matrix().handle;
    // SAFETY (of every argument): the caller checked the operands against their shapes. What the
    // kernel does not read of `a` is any memory.
    let buffer = |handle: &Handle, len| unsafe { BufferArg::from_raw_parts(handle.clone(), len) };
    let left = if a.is_packed() {
        SmallMLeft::Packed
    } else {
        SmallMLeft::Bf16
    };
    let shape = shape(client, capabilities, (m, n, k), left);
    let words = m * n * epilogue.kind.out.size() / 4;
    // SAFETY: rows and columns outside are clamped where they are read and not written.
    unsafe {
        small_m_kernel::launch_unchecked(
            client,
            CubeCount::Static(n.div_ceil(shape.rows()) as u32, 1, 1),
            CubeDim::new_1d(32 * shape.warps as u32),
            address_type((n * k).max(m * n)),
            MixedMatrixLaunch::new(
                buffer(&a.codes, m * k / 8),
                buffer(&a.scales, m * k / BLOCK),
                buffer(&a.dense, m * k / 8),
            ),
            PackedMatrixLaunch::new(
                buffer(&b.codes, n * k / 8),
                buffer(&b.scales, n * k / BLOCK),
            ),
            ProblemShapeLaunch::of((m, n, k), 1),
            epilogue.launch([m, n], 1, (out, words), 1.0),
            buffer(out, words),
            shape,
        );
    }
}
