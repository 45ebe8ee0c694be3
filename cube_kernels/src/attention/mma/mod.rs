//! Attention by the matrix instructions of one warp, `mma.sync.m16n8k16`, for every CUDA GPU from
//! compute capability 8.0 on.
//!
//! - `tile`: heads in shared memory, copied by `cp.async` and read by `ldmatrix`
//! - `multiply`: the two kinds of GEMM of a warp
//! - `problem`: arguments, tiles of sequences, masks
//! - `forward`: output and log-sum-exp
//! - `gradient`: shared code of the backward kernels
//! - `dkdv`, `dq`: the two passes of the backward. Each recomputes the weights, and no two CTAs add
//!   to the same gradient, so results repeat bit for bit.

pub mod dkdv;
pub mod dq;
pub mod forward;
pub mod gradient;
#[cfg(feature = "proof")]
pub(crate) mod instances;
pub mod multiply;
pub mod problem;
pub mod tile;

use cubecl::{prelude::*, server::Handle};

use self::{
    dkdv::{OperandsLaunch, mma_dkdv_kernel},
    dq::mma_dq_kernel,
    forward::mma_forward_kernel,
    gradient::{BackwardPlan, GradientViewLaunch, Part, SavedLaunch},
    problem::{MmaPlan, ProblemLaunch},
    tile::HeadsViewLaunch,
};
use super::{Attention, AttentionOutput, Backward, Heads, Rope, Sequences};
use crate::{
    AttentionParams, capabilities::conversion_of, memory::address_type, memory::is_aligned,
    tensor::FloatKind,
};

/// Largest head size.
const MAX_HEAD: usize = 256;
/// Largest head size for which a warp has registers for the accumulators of two operands.
const BOTH: usize = 128;

/// Checks that the kernels of this folder support `attention`.
///
/// # Errors
/// Returns the reason if they do not.
pub fn supports(client: &Client, attention: &Attention) -> Result<(), String> {
    if !conversion_of(client).has_ptx() {
        return Err("the device is no CUDA GPU of compute capability 8.0 or later".into());
    }
    let Attention { q, k, v, .. } = attention;
    supports_scale(attention)?;
    if q.dtype == FloatKind::F32 {
        return Err("f32 operands have no matrix instructions of their precision".into());
    }
    if !q.head.is_multiple_of(16) || q.head > MAX_HEAD {
        return Err(format!(
            "heads of {} are no multiple of 16 up to {MAX_HEAD}",
            q.head
        ));
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

/// Checks that matrix-instruction kernels support the scale: the largest score of a row must be
/// that of the largest `q · k`, and masked scores are minus infinity.
pub(super) fn supports_scale(attention: &Attention) -> Result<(), String> {
    let scale = attention.params.scale;
    match scale > 0.0 {
        true => Ok(()),
        false => Err(format!("a scale of {scale} is not positive")),
    }
}

/// True if every head starts at a multiple of 16 bytes, and offsets fit 32 bits.
pub fn is_vectorized(heads: &Heads) -> bool {
    let last = heads.offset + heads.tokens * heads.row_stride;
    is_aligned(&heads.handle)
        && heads.offset.is_multiple_of(8)
        && heads.row_stride.is_multiple_of(8)
        && last / 8 <= u32::MAX as usize
}

/// Plans of the forward and the backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MmaPlans {
    /// Plan of the forward.
    pub forward: MmaPlan,
    /// Plan of the gradients of keys and values.
    pub dkdv: MmaPlan,
    /// Plan of the gradients of queries.
    pub dq: MmaPlan,
}

impl MmaPlans {
    /// Returns the plans for heads of `head` elements of type `kind`, on a device with `shared`
    /// bytes of shared memory per CTA.
    pub fn new(
        head: usize,
        kind: FloatKind,
        params: &AttentionParams,
        offsets: bool,
        shared: usize,
    ) -> Self {
        let plan = |strips, warps, inner| MmaPlan {
            head,
            kind,
            strips,
            half_strip: false,
            warps,
            inner,
            causal: params.causal,
            window: params.window.is_some(),
            softcap: params.softcap.is_some(),
            quiet_softmax: params.quiet_softmax,
            offsets,
        };
        // Returns the first plan that fits in shared memory.
        let fitting = |plans: [MmaPlan; 2], bytes: fn(MmaPlan) -> usize| {
            let fits = bytes(plans[0]) <= shared;
            plans[usize::from(!fits)]
        };
        let (forward, dkdv, dq) = if head <= BOTH {
            (
                [plan(2, 4, 64), plan(2, 4, 32)],
                [plan(1, 8, 64), plan(1, 8, 32)],
                [plan(1, 8, 64), plan(1, 8, 32)],
            )
        } else {
            (
                [plan(1, 8, 64), plan(1, 8, 32)],
                [plan(1, 4, 32), plan(1, 4, 16)],
                [plan(1, 4, 32), plan(1, 4, 16)],
            )
        };
        Self {
            forward: fitting(forward, forward_bytes),
            dkdv: fitting(dkdv, backward_bytes),
            dq: fitting(dq, backward_bytes),
        }
    }
}

/// Returns the shared memory of the forward.
const fn forward_bytes(plan: MmaPlan) -> usize {
    plan.tile_bytes(plan.rows()) + 2 * plan.tile_bytes(plan.inner)
}

/// Returns the shared memory of a backward kernel.
const fn backward_bytes(plan: MmaPlan) -> usize {
    2 * plan.tile_bytes(plan.rows()) + 4 * plan.tile_bytes(plan.inner) + 16 * plan.inner
}

fn plans(client: &Client, attention: &Attention) -> MmaPlans {
    MmaPlans::new(
        attention.q.head,
        attention.q.dtype,
        &attention.params,
        matches!(attention.sequences, Sequences::Offsets { .. }),
        client.properties().hardware.max_shared_memory_size,
    )
}

/// Returns the largest number of tiles of `rows` rows that `tokens` tokens in sequences can take.
pub(super) fn tiles(sequences: &Sequences, tokens: usize, rows: usize) -> usize {
    match sequences {
        Sequences::Equal(count) => count * (tokens / (*count).max(1)).div_ceil(rows),
        // Each sequence may end in a partial tile, and so may the tokens that belong to no
        // sequence.
        Sequences::Offsets { count, .. } => tokens / rows + count + 1,
    }
}

/// Returns a buffer of `len` items.
fn memory(handle: &Handle, len: usize) -> BufferArg {
    // SAFETY: the caller checked the operands against their memory, and the kernels stay below
    // their tokens.
    unsafe { BufferArg::from_raw_parts(handle.clone(), len) }
}

fn view(heads: &Heads) -> HeadsViewLaunch {
    HeadsViewLaunch::new(
        memory(&heads.handle, heads.span() / 2),
        (heads.offset / 8) as u32,
        (heads.row_stride / 8) as u32,
    )
}

fn gradient_view(heads: &Heads) -> GradientViewLaunch {
    GradientViewLaunch::new(
        memory(&heads.handle, heads.span() / 8),
        (heads.offset / 8) as u32,
        (heads.row_stride / 8) as u32,
    )
}

/// Returns the arguments of the kernels of this folder.
pub(super) fn problem(attention: &Attention) -> ProblemLaunch {
    let Attention {
        q,
        k,
        sequences,
        params,
        ..
    } = attention;
    // Without offsets any memory works.
    let (q_offsets, k_offsets, count) = match sequences {
        Sequences::Equal(count) => (memory(&q.handle, 1), memory(&q.handle, 1), *count),
        Sequences::Offsets { q, k, count } => (memory(q, count + 1), memory(k, count + 1), *count),
    };
    ProblemLaunch::new(
        q_offsets,
        k_offsets,
        count as u32,
        q.tokens as u32,
        k.tokens as u32,
        (q.heads / k.heads) as u32,
        params.scale,
        params.softcap.unwrap_or(1.0),
        params.window.unwrap_or(0) as u32,
    )
}

/// Returns the width of the largest index that the kernels use.
fn indices(attention: &Attention) -> cubecl::ir::AddressType {
    let Attention { q, k, v, .. } = attention;
    address_type(
        q.span()
            .max(k.span())
            .max(v.span())
            .max(q.tokens * q.heads * q.head),
    )
}

/// Launches the forward.
pub fn forward(client: &Client, attention: &Attention, output: &AttentionOutput) {
    let plan = plans(client, attention).forward;
    let Attention {
        q, k, v, sequences, ..
    } = attention;
    let count = tiles(sequences, q.tokens, plan.rows());
    if q.tokens == 0 || count == 0 {
        return;
    }
    // SAFETY: the kernel stays below the tokens of each sequence.
    unsafe {
        mma_forward_kernel::launch_unchecked(
            client,
            CubeCount::Static(count as u32, q.heads as u32, 1),
            CubeDim::new_1d(plan.units() as u32),
            indices(attention),
            view(q),
            view(k),
            view(v),
            problem(attention),
            memory(&output.out.handle, q.tokens * q.heads * q.head / 8),
            memory(&output.lse, q.heads * q.tokens),
            plan,
        );
    }
}

/// Launches the backward.
pub fn backward(client: &Client, attention: &Attention, backward: &Backward<'_>) {
    let plans = plans(client, attention);
    let Attention {
        q, k, v, sequences, ..
    } = attention;
    let Backward {
        saved,
        dout,
        delta,
        rope,
        gradients,
    } = *backward;
    let rows = q.heads * q.tokens;
    let saved = || {
        let tables = rope.map(|rope| (rope, rope.positions * q.head / 2));
        let table = |of: fn(&Rope) -> &Handle| match tables {
            Some((rope, len)) => memory(of(rope), len),
            None => memory(&saved.lse, 1),
        };
        SavedLaunch::new(
            view(dout),
            memory(&saved.lse, rows),
            memory(delta, rows),
            table(|rope| &rope.cos),
            table(|rope| &rope.sin),
        )
    };
    let operands = || OperandsLaunch::new(view(q), view(k), view(v));
    let kv_tiles = tiles(sequences, k.tokens, plans.dkdv.rows());
    if k.tokens > 0 && kv_tiles > 0 {
        let parts: &[Part] = match q.head {
            ..=BOTH => &[Part::Both],
            _ => &[Part::Keys, Part::Values],
        };
        for &part in parts {
            // SAFETY: the kernel stays below the tokens of each sequence.
            unsafe {
                mma_dkdv_kernel::launch_unchecked(
                    client,
                    CubeCount::Static(kv_tiles as u32, k.heads as u32, 1),
                    CubeDim::new_1d(plans.dkdv.units() as u32),
                    indices(attention),
                    operands(),
                    saved(),
                    problem(attention),
                    gradient_view(&gradients.dk),
                    gradient_view(&gradients.dv),
                    BackwardPlan {
                        plan: plans.dkdv,
                        rope: rope.is_some(),
                        part,
                    },
                );
            }
        }
    }
    let q_tiles = tiles(sequences, q.tokens, plans.dq.rows());
    if q.tokens > 0 && q_tiles > 0 {
        // SAFETY: the kernel stays below the tokens of each sequence.
        unsafe {
            mma_dq_kernel::launch_unchecked(
                client,
                CubeCount::Static(q_tiles as u32, q.heads as u32, 1),
                CubeDim::new_1d(plans.dq.units() as u32),
                indices(attention),
                operands(),
                saved(),
                problem(attention),
                gradient_view(&gradients.dq),
                BackwardPlan {
                    plan: plans.dq,
                    rope: rope.is_some(),
                    part: Part::Both,
                },
            );
        }
    }
}
