//! The router: from logits to experts, weights and losses in two launches, and back in one; and the
//! order of tokens by expert. Nothing waits for the device.

pub(crate) mod kernel;

use cubecl::{prelude::*, server::Handle};

use super::groups::to_u32;
use crate::{
    Nvfp4Error,
    capabilities::{conversion_of, is_cpu},
    launch::{buffer, cubes, grid, units},
    memory::{allocate, check_memory},
    reference::{BatchPart, ROUTER_CHUNK, Router},
    sort::sort,
};
use kernel::{
    RoutedArgsLaunch, RouterArgsLaunch, RouterOutLaunch, RouterPlan, RouterSumsLaunch,
    SortedKeysLaunch, choice_places_kernel, route_backward_kernel, route_kernel, route_sums_kernel,
};

/// What [`route`] gives, in device memory.
#[derive(Debug, Clone)]
pub struct DeviceRouted {
    /// The weights of the choices, `f32[tokens, top_k]`; behind them the balance loss and the mean
    /// of the squared log-sums.
    pub weights: Handle,
    /// The experts of each token, `u32[tokens, top_k]`.
    pub chosen: Handle,
    /// Choices of each expert, `u32[experts]`.
    pub counts: Handle,
}

/// Choices in the order of their experts, in device memory; see
/// [`reference::SortedChoices`](crate::reference::SortedChoices).
#[derive(Debug, Clone)]
pub struct DeviceSortedChoices {
    /// The choice at each place, `u32[slots]`.
    pub choices: Handle,
    /// The place of each choice, `u32[slots]`.
    pub places: Handle,
    /// Where each expert's choices begin, `u32[experts + 1]`.
    pub offsets: Handle,
    /// Choices of each expert, `u32[experts]`.
    pub counts: Handle,
}

fn plan_of(client: &Client, router: Router) -> RouterPlan {
    RouterPlan {
        per_lane: router.experts.div_ceil(32),
        planes: !is_cpu(client),
        normalizes: router.normalizes(),
        losses_only: false,
        conversion: conversion_of(client),
    }
}

/// Arguments for `tokens` tokens, with losses of `all` tokens.
fn args(tokens: usize, all: usize, router: Router) -> RouterArgsLaunch {
    let factors = router.factors(all);
    RouterArgsLaunch::new(
        tokens,
        router.experts,
        router.top_k,
        factors.balance,
        factors.mean,
        factors.z,
    )
}

fn check(logits: &Handle, tokens: usize, router: Router) -> Result<(), Nvfp4Error> {
    router.check()?;
    if tokens == 0 {
        return Err(Nvfp4Error::value("tokens", "0", "at least 1"));
    }
    to_u32("logits", tokens * router.experts)?;
    check_memory("logits", logits, tokens * router.experts * 4)
}

/// Experts, weights and losses of the logits `f32[tokens, experts]`; see
/// [`reference::route`](crate::reference::route), whose bits these are.
///
/// # Errors
/// When there is no token, a number of `router` is not in its range, a buffer is smaller than its
/// shape, or a size does not fit 32 bits.
pub fn route(
    client: &Client,
    logits: &Handle,
    tokens: usize,
    router: Router,
) -> Result<DeviceRouted, Nvfp4Error> {
    check(logits, tokens, router)?;
    let Router { experts, top_k, .. } = router;
    let (slots, chunks) = (tokens * top_k, tokens.div_ceil(ROUTER_CHUNK));
    let words = |len: usize| allocate(client, len * 4);
    let routed = DeviceRouted {
        weights: words(slots + 2),
        chosen: words(slots),
        counts: words(experts),
    };
    let (values, counts) = (words(chunks * (experts + 1)), words(chunks * experts));
    let plan = plan_of(client, router);
    let dim = CubeDim::new_1d(units(client) as u32);
    // SAFETY: the kernels stay below the tokens, experts and chunks that the buffers were made for;
    // chosen experts are below `experts`, since each token has at least `top_k`.
    unsafe {
        let sums = || {
            RouterSumsLaunch::new(
                buffer(&values, chunks * (experts + 1)),
                buffer(&counts, chunks * experts),
            )
        };
        route_kernel::launch_unchecked(
            client,
            CubeCount::Static(chunks as u32, 1, 1),
            dim,
            buffer(logits, tokens * experts),
            RouterOutLaunch::new(
                buffer(&routed.weights, slots + 2),
                buffer(&routed.chosen, slots),
            ),
            sums(),
            args(tokens, tokens, router),
            plan,
        );
        route_sums_kernel::launch_unchecked(
            client,
            CubeCount::Static(1, 1, 1),
            dim,
            sums(),
            buffer(&routed.counts, experts),
            buffer(&routed.weights, slots + 2),
            args(tokens, tokens, router),
            plan,
        );
    }
    Ok(routed)
}

/// The gradient by the logits of [`route`], `f32[tokens, experts]`, given `grads`,
/// `f32[tokens * top_k + 2]`, those by [`DeviceRouted::weights`]; see
/// [`reference::route_backward`](crate::reference::route_backward), whose bits these are.
///
/// # Errors
/// As [`route`].
pub fn route_backward(
    client: &Client,
    logits: &Handle,
    routed: &DeviceRouted,
    grads: &Handle,
    (tokens, router): (usize, Router),
) -> Result<Handle, Nvfp4Error> {
    check(logits, tokens, router)?;
    let Router { experts, top_k, .. } = router;
    let slots = tokens * top_k;
    check_memory("routed", &routed.weights, (slots + 2) * 4)?;
    check_memory("routed", &routed.chosen, slots * 4)?;
    check_memory("routed", &routed.counts, experts * 4)?;
    check_memory("grads", grads, (slots + 2) * 4)?;
    let out = allocate(client, tokens * experts * 4);
    let (count, dim) = cubes(client, tokens.div_ceil(units(client).div_ceil(32)));
    // SAFETY: the buffers were checked; the kernel stays below the tokens and experts.
    unsafe {
        route_backward_kernel::launch_unchecked(
            client,
            count,
            dim,
            buffer(logits, tokens * experts),
            RoutedArgsLaunch::new(
                buffer(&routed.weights, slots + 2),
                buffer(grads, slots + 2),
                buffer(&routed.chosen, slots),
                buffer(&routed.counts, experts),
            ),
            buffer(&out, tokens * experts),
            args(tokens, tokens, router),
            plan_of(client, router),
        );
    }
    Ok(out)
}

/// The balance loss and the mean of the squared log-sums of a batch, as far as the tokens of the
/// logits `f32[part.tokens, experts]` add to them, `f32[2]`, given the choices of each expert in
/// the batch, `u32[experts]`; see
/// [`reference::router_losses`](crate::reference::router_losses), whose bits these are.
///
/// # Errors
/// As [`route`].
pub fn router_losses(
    client: &Client,
    logits: &Handle,
    counts: &Handle,
    (part, router): (BatchPart, Router),
) -> Result<Handle, Nvfp4Error> {
    let BatchPart { tokens, of } = part;
    check(logits, tokens, router)?;
    let experts = router.experts;
    check_memory("counts", counts, experts * 4)?;
    let words = |len: usize| allocate(client, len * 4);
    let chunks = tokens.div_ceil(ROUTER_CHUNK);
    let (losses, values) = (words(2), words(chunks * (experts + 1)));
    let (unused, unused_counts) = (words(1), words(chunks * experts));
    let plan = RouterPlan {
        losses_only: true,
        ..plan_of(client, router)
    };
    let dim = CubeDim::new_1d(units(client) as u32);
    // SAFETY: the kernels stay below the tokens, experts and chunks that the buffers were made for;
    // with losses only they touch neither weights nor choices.
    unsafe {
        let sums = || {
            RouterSumsLaunch::new(
                buffer(&values, chunks * (experts + 1)),
                buffer(&unused_counts, chunks * experts),
            )
        };
        route_kernel::launch_unchecked(
            client,
            CubeCount::Static(chunks as u32, 1, 1),
            dim,
            buffer(logits, tokens * experts),
            RouterOutLaunch::new(buffer(&losses, 2), buffer(&unused, 1)),
            sums(),
            args(tokens, of, router),
            plan,
        );
        route_sums_kernel::launch_unchecked(
            client,
            CubeCount::Static(1, 1, 1),
            dim,
            sums(),
            buffer(counts, experts),
            buffer(&losses, 2),
            args(tokens, of, router),
            plan,
        );
    }
    Ok(losses)
}

/// The gradient by the logits of [`router_losses`], `f32[part.tokens, experts]`, given `grads`,
/// `f32[2]`, those by the losses; see
/// [`reference::router_losses_backward`](crate::reference::router_losses_backward), whose bits these
/// are.
///
/// # Errors
/// As [`route`].
pub fn router_losses_backward(
    client: &Client,
    logits: &Handle,
    counts: &Handle,
    grads: &Handle,
    (part, router): (BatchPart, Router),
) -> Result<Handle, Nvfp4Error> {
    let BatchPart { tokens, of } = part;
    check(logits, tokens, router)?;
    let experts = router.experts;
    check_memory("counts", counts, experts * 4)?;
    check_memory("grads", grads, 8)?;
    let out = allocate(client, tokens * experts * 4);
    let (count, dim) = cubes(client, tokens.div_ceil(units(client).div_ceil(32)));
    let plan = RouterPlan {
        losses_only: true,
        ..plan_of(client, router)
    };
    // SAFETY: the buffers were checked; the kernel stays below the tokens and experts, and with
    // losses only reads neither weights nor choices.
    unsafe {
        route_backward_kernel::launch_unchecked(
            client,
            count,
            dim,
            buffer(logits, tokens * experts),
            RoutedArgsLaunch::new(
                buffer(grads, 2),
                buffer(grads, 2),
                buffer(counts, experts),
                buffer(counts, experts),
            ),
            buffer(&out, tokens * experts),
            args(tokens, of, router),
            plan,
        );
    }
    Ok(out)
}

/// Sorts `slots` choices (`u32`, numbers of experts) by expert; see
/// [`reference::sort_choices`](crate::reference::sort_choices), whose result this is.
///
/// # Errors
/// When there is no choice or no expert, a buffer is smaller than its shape, or a size does not fit
/// 32 bits.
pub fn sort_choices(
    client: &Client,
    chosen: &Handle,
    slots: usize,
    experts: usize,
) -> Result<DeviceSortedChoices, Nvfp4Error> {
    for (argument, found) in [("slots", slots), ("experts", experts)] {
        if found == 0 {
            return Err(Nvfp4Error::value(argument, "0", "at least 1"));
        }
        to_u32(argument, found)?;
    }
    check_memory("chosen", chosen, slots * 4)?;
    let sorted = sort(client, chosen, slots, experts);
    let words = |len: usize| allocate(client, len * 4);
    let made = DeviceSortedChoices {
        choices: sorted.order,
        places: words(slots),
        offsets: words(experts + 1),
        counts: words(experts),
    };
    let (count, dim) = grid(client, slots.max(experts + 1));
    // SAFETY: the kernel stays below the choices and experts that the buffers were made for.
    unsafe {
        choice_places_kernel::launch_unchecked(
            client,
            count,
            dim,
            SortedKeysLaunch::new(buffer(&sorted.keys, slots), buffer(&made.choices, slots)),
            buffer(&made.places, slots),
            buffer(&made.offsets, experts + 1),
            buffer(&made.counts, experts),
            slots,
            experts,
        );
    }
    Ok(made)
}
