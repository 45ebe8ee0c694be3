//! Attention on Hopper (sm_90a): TMA loads of operands into shared memory, `wgmma` with the weights
//! in registers, one producer warpgroup and consumer warpgroups.
//!
//! Sequences that start at offsets in device memory use a table of tiles ([`mod@table`]), each of
//! one sequence. Everything else is as for sequences of equal length.

mod accumulators;
pub mod backward;
pub mod backward_problem;
mod barriers;
pub mod forward;
mod gradients;
#[cfg(feature = "proof")]
pub(crate) mod instances;
pub mod table;
pub mod tiles;

use cubecl::{prelude::*, server::Handle};
use half::bf16;

use self::{
    backward::sm90_backward_kernel,
    backward_problem::{BackwardProblemLaunch, Pass, RowsLaunch, Sm90BackwardPlan},
    forward::{Sm90Plan, sm90_forward_kernel},
    table::{Table, table},
    tiles::ScheduleLaunch,
};
use super::{
    Attention, AttentionOutput, Backward, Heads, Rope, Sequences,
    mma::{
        gradient::GradientViewLaunch,
        is_vectorized,
        problem::{MmaPlan, ProblemLaunch, Side},
        supports_scale,
    },
};
use crate::{
    Nvfp4Error,
    capabilities::{Capabilities, GemmBackend},
    memory::address_type,
    quantize::{
        AmaxRequest, Amaxes,
        amax::{AmaxOutLaunch, AmaxPlan, STRIP},
    },
    tensor::FloatKind,
    zeroed::counters,
};

/// Bytes of K and V of the heads whose tiles are interleaved: a large part of the L2 cache.
const SECTION_BYTES: usize = 32 << 20;

/// Checks that the forward of this folder supports `attention`.
///
/// # Errors
/// Returns the reason if it does not.
pub fn supports(client: &Client, attention: &Attention) -> Result<(), String> {
    if Capabilities::of(client).gemm != GemmBackend::Sm90Wgmma {
        return Err("the device is not of compute capability 9.0".into());
    }
    supports_scale(attention)?;
    let Attention { q, k, v, .. } = attention;
    if q.dtype != FloatKind::Bf16 {
        return Err(format!("operands are {:?} and not bf16", q.dtype));
    }
    if ![64, 128].contains(&q.head) {
        return Err(format!("heads of {} are neither of 64 nor of 128", q.head));
    }
    if q.tokens == 0 || k.tokens == 0 {
        return Err("there are no tokens".into());
    }
    for (name, heads) in [("q", q), ("k", k), ("v", v)] {
        if !is_vectorized(heads) {
            return Err(format!(
                "heads of `{name}` do not begin at multiples of 16 bytes"
            ));
        }
    }
    Ok(())
}

/// Returns the tensor map of one operand, `[sequences, tokens, heads, head]`, in boxes of `rows`
/// tokens of 64 elements of one head.
fn map(heads: &Heads, sequences: usize, rows: usize) -> TensorMapArg<Tiled> {
    let tokens = heads.tokens / sequences;
    let shape = [sequences, tokens, heads.heads, heads.head];
    let strides = [tokens * heads.row_stride, heads.row_stride, heads.head, 1];
    let handle = offset(heads);
    // SAFETY: the caller checked that the memory holds these tokens.
    let tensor = unsafe { TensorArg::from_raw_parts(handle, strides.into(), shape.into()) };
    TensorMapArg::new(
        TiledArgs {
            tile_size: [1, rows, 1, 64].into(),
        },
        tensor,
        bf16::elem_type_native(),
    )
    .with_swizzle(TensorMapSwizzle::B128)
    .with_prefetch(TensorMapPrefetch::B256)
}

/// Returns the memory from the first head on.
fn offset(heads: &Heads) -> Handle {
    let bytes = (heads.offset * heads.dtype.size()) as u64;
    heads.handle.clone().offset_start(bytes)
}

fn memory(handle: &Handle, len: usize) -> BufferArg {
    // SAFETY: the caller checked the operands against their memory.
    unsafe { BufferArg::from_raw_parts(handle.clone(), len) }
}

/// Returns the number of equal-length sequences of the tensor maps: one of all tokens if sequences
/// start at offsets.
fn count(attention: &Attention) -> usize {
    match attention.sequences {
        Sequences::Equal(count) => count,
        Sequences::Offsets { .. } => 1,
    }
}

/// Returns the schedule of `blocks` tiles for each of `heads` heads, with the table of tiles, if
/// any.
fn schedule(
    client: &Client,
    (heads, section): (usize, usize),
    blocks: usize,
    table: Option<&Table>,
) -> ScheduleLaunch {
    let drawn = counters(client, 1);
    let tiles = match table {
        Some(table) => memory(&table.handle, table.len()),
        None => memory(&drawn, 1),
    };
    let (heads, blocks, section) = (heads as u32, blocks as u32, section as u32);
    ScheduleLaunch::new(heads, blocks, section, tiles, memory(&drawn, 1))
}

/// Returns the choices shared with the `mma.sync` kernels, for blocks of `inner` rows.
fn plan(attention: &Attention, inner: usize) -> MmaPlan {
    let Attention {
        q,
        sequences,
        params,
        ..
    } = attention;
    MmaPlan {
        head: q.head,
        kind: q.dtype,
        strips: 1,
        half_strip: false,
        warps: 8,
        inner,
        causal: params.causal,
        window: params.window.is_some(),
        softcap: params.softcap.is_some(),
        quiet_softmax: params.quiet_softmax,
        offsets: matches!(sequences, Sequences::Offsets { .. }),
    }
}

fn problem(attention: &Attention, count: usize) -> ProblemLaunch {
    let Attention { q, k, params, .. } = attention;
    ProblemLaunch::new(
        memory(&q.handle, 1),
        memory(&q.handle, 1),
        count as u32,
        q.tokens as u32,
        k.tokens as u32,
        attention.group() as u32,
        params.scale,
        params.softcap.unwrap_or(1.0),
        params.window.unwrap_or(0) as u32,
    )
}

/// Returns the number of SMs of the device.
fn sms(client: &Client) -> usize {
    let sms = client.properties().hardware.num_streaming_multiprocessors;
    sms.unwrap_or(132) as usize
}

/// Returns the plan by which the forward of `attention` computes the amax values in `request` of
/// its output, or `None` if it does not. Column amax values require that each 16 tokens belong to
/// one sequence, which the host does not know for sequences at offsets.
pub(super) fn amax_plan(
    client: &Client,
    attention: &Attention,
    request: &AmaxRequest,
) -> Option<AmaxPlan> {
    let (tokens, count) = (attention.q.tokens, count(attention));
    let whole_strips = match attention.sequences {
        Sequences::Equal(_) => count == 1 || (tokens / count).is_multiple_of(STRIP),
        Sequences::Offsets { .. } => false,
    };
    let plan = request.of_written(client, attention.q.dtype)?;
    let plan = Some(plan).filter(AmaxPlan::is_whole)?;
    (plan.cols.is_none() || whole_strips).then_some(plan)
}

/// Launches the forward. If there is an [`amax_plan`], it raises the amax values in `request` of
/// its output in `found`.
///
/// # Errors
/// Returns an error if the offsets of the sequences do not fit.
pub(super) fn forward(
    client: &Client,
    attention: &Attention,
    output: &AttentionOutput,
    (request, found): (&AmaxRequest, Option<&(AmaxPlan, Amaxes)>),
) -> Result<(), Nvfp4Error> {
    let Attention { q, k, v, .. } = attention;
    let count = count(attention);
    let plan = Sm90Plan {
        plan: plan(attention, 128),
        amax: found.map(|(plan, _)| *plan),
    };
    let amax = match found {
        Some((_, found)) => found.arg([1, usize::from(request.cols.is_some())]),
        None => AmaxOutLaunch::new(memory(&output.lse, 1), memory(&output.lse, 1)),
    };
    let table = table(client, attention, Side::Queries, plan.rows())?;
    let blocks = match &table {
        Some(table) => table.capacity,
        None => (q.tokens / count).div_ceil(plan.rows()),
    };
    let pairs = count * q.heads;
    let cubes = (blocks * pairs).min(sms(client));
    // Heads that share keys and values are in the same section.
    let group = attention.group();
    let bytes = 2 * (k.tokens / count) * k.head * k.dtype.size();
    let section = (SECTION_BYTES / bytes.max(1)).max(1) * group;
    // SAFETY: the kernel reads through maps, and writes below the tokens of each sequence.
    unsafe {
        sm90_forward_kernel::launch_unchecked(
            client,
            CubeCount::Static(cubes as u32, 1, 1),
            CubeDim::new_1d(forward::UNITS),
            address_type(q.tokens * q.heads * q.head),
            map(q, count, plan.rows()),
            map(k, count, plan.plan.inner),
            map(v, count, plan.plan.inner),
            problem(attention, count),
            schedule(
                client,
                (q.heads, section.min(pairs)),
                blocks,
                table.as_ref(),
            ),
            forward::ForwardOutputsLaunch::new(
                memory(&output.out.handle, q.tokens * q.heads * q.head / 8),
                memory(&output.lse, q.heads * q.tokens),
                amax,
            ),
            request.signs(),
            plan,
        );
    }
    Ok(())
}

/// Returns the rows of the other side that a pass multiplies at a time, as many as the registers
/// for accumulators allow.
const fn backward_inner(head: usize, pass: Pass) -> usize {
    match (head, pass) {
        (..=64, Pass::Queries) => 128,
        _ => 64,
    }
}

/// Launches the backward.
///
/// # Errors
/// Returns an error if the offsets of the sequences do not fit.
pub fn backward(
    client: &Client,
    attention: &Attention,
    backward: &Backward<'_>,
) -> Result<(), Nvfp4Error> {
    let Attention { q, k, v, .. } = attention;
    let Backward {
        saved,
        dout,
        delta,
        rope,
        gradients,
    } = *backward;
    let count = count(attention);
    let rows = q.heads * q.tokens;
    for pass in [Pass::KeysValues, Pass::Queries] {
        let inner = backward_inner(q.head, pass);
        let plan = Sm90BackwardPlan {
            plan: plan(attention, inner),
            pass,
            rope: rope.is_some(),
        };
        let (own, blocks, written) = match pass {
            Pass::KeysValues => ([k, v], [q, dout], [&gradients.dk, &gradients.dv]),
            Pass::Queries => ([q, dout], [k, v], [&gradients.dq, &gradients.dq]),
        };
        let table = table(client, attention, plan.own_side(), plan.rows())?;
        let tiles = match &table {
            Some(table) => table.capacity,
            None => (own[0].tokens / count).div_ceil(plan.rows()),
        };
        let pairs = count * own[0].heads;
        let items = tiles * pairs;
        // Rows over which the tiles of a pair iterate, for all heads that read the same rows.
        let passed = match pass {
            Pass::KeysValues => q.tokens * attention.group(),
            Pass::Queries => k.tokens,
        };
        let bytes = 2 * (passed / count) * q.head * q.dtype.size();
        let section = (SECTION_BYTES / bytes.max(1)).clamp(1, pairs);
        let angles = |of: fn(&Rope) -> &Handle| match rope {
            Some(rope) => memory(of(rope), rope.positions * q.head / 2),
            None => memory(&saved.lse, 1),
        };
        let [first, second] = written.map(|heads| {
            GradientViewLaunch::new(
                memory(&heads.handle, heads.span() / 8),
                (heads.offset / 8) as u32,
                (heads.row_stride / 8) as u32,
            )
        });
        // SAFETY: the kernel reads through maps, and writes below the tokens of each sequence.
        unsafe {
            sm90_backward_kernel::launch_unchecked(
                client,
                CubeCount::Static(items.min(sms(client)) as u32, 1, 1),
                CubeDim::new_1d(forward::UNITS),
                address_type(written[0].span().max(written[1].span()).max(rows)),
                map(own[0], count, plan.rows()),
                map(own[1], count, plan.rows()),
                map(blocks[0], count, inner),
                map(blocks[1], count, inner),
                BackwardProblemLaunch::new(
                    problem(attention, count),
                    schedule(client, (own[0].heads, section), tiles, table.as_ref()),
                    RowsLaunch::new(
                        memory(&saved.lse, rows),
                        memory(delta, rows),
                        angles(|rope| &rope.cos),
                        angles(|rope| &rope.sin),
                    ),
                ),
                first,
                second,
                plan,
            );
        }
    }
    Ok(())
}
