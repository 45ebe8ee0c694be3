//! Attention without matrix instructions, for every device and element type: the counterpart of
//! [`reference::attention`](crate::reference::attention).
//!
//! A row of queries (of keys, for their gradients) is distributed over as many lanes as needed for
//! at most 32 elements per lane; blocks of rows of the other side pass through shared memory as
//! `f32`. On the CPU runtime one unit has all lanes of a row, and a cube has one row.

pub(super) mod backward;
pub(super) mod forward;
pub(super) mod math;
pub(super) mod problem;

use cubecl::{prelude::*, server::Handle};

use self::{
    backward::{OperandsLaunch, scalar_dkdv_kernel, scalar_dq_kernel},
    forward::scalar_forward_kernel,
    problem::{HeadsViewLaunch, ProblemLaunch, ScalarPlan},
};
use super::{Attention, AttentionOutput, Backward, Heads, Rotation, Sequences, rope::rotate};
use crate::{
    capabilities::{conversion_of, is_cpu},
    launch::{buffer, units},
    memory::address_type,
    reference::attention::{lanes, padded},
};

/// Largest number of units per cube: more would have too few registers each.
pub(super) const UNITS: usize = 128;

fn plan(client: &Client, attention: &Attention) -> ScalarPlan {
    let q = &attention.q;
    ScalarPlan {
        padded: padded(q.head),
        lanes: lanes(q.head),
        units: units(client).min(UNITS),
        planes: !is_cpu(client),
        softcap: attention.params.softcap.is_some(),
        kind: q.dtype,
        conversion: conversion_of(client),
    }
}

pub(super) fn view<F: Numeric>(heads: &Heads) -> HeadsViewLaunch<F> {
    // SAFETY: the heads were checked against their memory.
    let data = unsafe { buffer(&heads.handle, heads.span()) };
    HeadsViewLaunch::new(data, heads.offset, heads.row_stride)
}

fn problem(attention: &Attention) -> ProblemLaunch {
    let Attention {
        q,
        k,
        sequences,
        params,
        ..
    } = attention;
    let starts = |handle: &Handle, count: usize| {
        // SAFETY: the offsets were checked against their memory; without offsets any will do.
        unsafe { buffer(handle, count) }
    };
    let (q_starts, k_starts, count, offsets) = match sequences {
        Sequences::Equal(count) => (starts(&q.handle, 1), starts(&q.handle, 1), *count, false),
        Sequences::Offsets { q, k, count } => {
            (starts(q, count + 1), starts(k, count + 1), *count, true)
        }
    };
    let softcap = params.softcap.unwrap_or(1.0);
    ProblemLaunch::new(
        q_starts,
        k_starts,
        count as u32,
        offsets.into(),
        q.tokens as u32,
        k.tokens as u32,
        q.heads as u32,
        attention.group() as u32,
        q.head as u32,
        params.causal.into(),
        params.window.unwrap_or(0) as u32,
        params.quiet_softmax.into(),
        params.scale,
        softcap,
        1.0 / softcap,
    )
}

/// Returns the cubes for `rows` tokens of one side in `heads` heads.
fn grid(client: &Client, plan: &ScalarPlan, rows: usize, heads: usize) -> (CubeCount, CubeDim) {
    let items = rows.div_ceil(plan.rows()) * heads;
    let hardware = &client.properties().hardware;
    let most = match is_cpu(client) {
        // No more cubes than the cores can use: each costs a call.
        true => 4 * hardware.num_cpu_cores.unwrap_or(1) as usize,
        false => i32::MAX as usize,
    };
    (
        CubeCount::Static(items.clamp(1, most) as u32, 1, 1),
        CubeDim::new_1d(plan.units as u32),
    )
}

/// Returns the width of the largest index of the operands, and of `others`.
fn indices(attention: &Attention, others: &[&Heads]) -> AddressType {
    let Attention { q, k, v, .. } = attention;
    let heads = others.iter().copied().chain([q, k, v]);
    // Missing rows of a block have addresses too.
    address_type(
        heads
            .map(|heads| heads.span() + 64 * heads.row_stride)
            .max()
            .unwrap_or(0),
    )
}

/// Launches the forward of checked operands, with at least one query.
pub(super) fn forward(client: &Client, attention: &Attention, output: &AttentionOutput) {
    let plan = plan(client, attention);
    let Attention { q, k, v, .. } = attention;
    let (count, dim) = grid(client, &plan, q.tokens, q.heads);
    // SAFETY: the kernel stays below the tokens of both sides, whatever the offsets are.
    unsafe {
        scalar_forward_kernel::launch_unchecked(
            client,
            count,
            dim,
            indices(attention, &[&output.out]),
            view(q),
            view(k),
            view(v),
            problem(attention),
            view(&output.out),
            buffer(&output.lse, q.heads * q.tokens),
            plan,
            q.dtype.storage_type(),
        );
    }
}

/// Launches the backward of checked operands.
pub(super) fn backward(client: &Client, attention: &Attention, backward: &Backward<'_>) {
    let plan = plan(client, attention);
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
    let [dq, dk, dv] = [&gradients.dq, &gradients.dk, &gradients.dv];
    let wide = indices(attention, &[dout, dq, dk, dv]);
    if q.tokens > 0 {
        let (count, dim) = grid(client, &plan, q.tokens, q.heads);
        // SAFETY: as in the forward.
        unsafe {
            scalar_dq_kernel::launch_unchecked(
                client,
                count,
                dim,
                wide,
                OperandsLaunch::new(
                    view(q),
                    view(k),
                    view(v),
                    view(dout),
                    buffer(&saved.lse, rows),
                    buffer(delta, rows),
                ),
                problem(attention),
                view(dq),
                plan,
                q.dtype.storage_type(),
            );
        }
    }
    if k.tokens > 0 {
        let (count, dim) = grid(client, &plan, k.tokens, k.heads);
        // SAFETY: as in the forward.
        unsafe {
            scalar_dkdv_kernel::launch_unchecked(
                client,
                count,
                dim,
                wide,
                OperandsLaunch::new(
                    view(q),
                    view(k),
                    view(v),
                    view(dout),
                    buffer(&saved.lse, rows),
                    buffer(delta, rows),
                ),
                problem(attention),
                view(dk),
                view(dv),
                plan,
                q.dtype.storage_type(),
            );
        }
    }
    if let Some(rope) = rope {
        // In place, by a separate pass: gradients are rounded a second time.
        rotate(client, dq, sequences.of_q(), rope, Rotation::Inverse, dq);
        rotate(client, dk, sequences.of_k(), rope, Rotation::Inverse, dk);
    }
}
