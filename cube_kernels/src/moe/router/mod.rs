//! The router: computes experts, weights and losses from logits in two launches, and their gradient
//! in one; also sorts tokens by expert. Nothing waits for the device.

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

/// Result of [`route`], in device memory.
#[derive(Debug, Clone)]
pub struct DeviceRouted {
    /// Weights of the choices, `f32[tokens, top_k]`, followed by the balance loss and the mean of
    /// the squared log-sum-exps.
    pub weights: Handle,
    /// Experts of each token, `u32[tokens, top_k]`.
    pub chosen: Handle,
    /// Number of choices of each expert, `u32[experts]`.
    pub counts: Handle,
}

/// Choices sorted by expert, in device memory; see
/// [`reference::SortedChoices`](crate::reference::SortedChoices).
#[derive(Debug, Clone)]
pub struct DeviceSortedChoices {
    /// Choice at each place, `u32[slots]`.
    pub choices: Handle,
    /// Place of each choice, `u32[slots]`.
    pub places: Handle,
    /// Start of each expert's choices, `u32[experts + 1]`.
    pub offsets: Handle,
    /// Number of choices of each expert, `u32[experts]`.
    pub counts: Handle,
}

/// Tokens, and the outputs to compute for them.
#[derive(Clone, Copy)]
struct Request {
    part: BatchPart,
    router: Router,
    /// True to compute only the losses, from given numbers of choices.
    losses_only: bool,
}

impl Request {
    fn plan(self, client: &Client) -> RouterPlan {
        RouterPlan {
            per_lane: self.router.experts.div_ceil(32),
            planes: !is_cpu(client),
            normalizes: self.router.normalizes(),
            losses_only: self.losses_only,
            conversion: conversion_of(client),
        }
    }

    fn args(self) -> RouterArgsLaunch {
        let Router { experts, top_k, .. } = self.router;
        let factors = self.router.factors(self.part.of);
        RouterArgsLaunch::new(
            self.part.tokens,
            experts,
            top_k,
            factors.balance,
            factors.mean,
            factors.z,
        )
    }

    /// Returns the number of choices; 0 for losses only.
    fn slots(self) -> usize {
        match self.losses_only {
            true => 0,
            false => self.part.tokens * self.router.top_k,
        }
    }

    /// Writes `out`, whose memory is allocated. For losses only, its counts are read and there are
    /// no choices. The logits were checked.
    fn forward(self, client: &Client, logits: &Handle, out: &DeviceRouted) {
        let (tokens, experts, slots) = (self.part.tokens, self.router.experts, self.slots());
        let chunks = tokens.div_ceil(ROUTER_CHUNK);
        let words = |len: usize| allocate(client, len * 4);
        let (values, counts) = (words(chunks * (experts + 1)), words(chunks * experts));
        let plan = self.plan(client);
        let dim = CubeDim::new_1d(units(client) as u32);
        // SAFETY: the kernels stay below the tokens, experts and chunks that the buffers were made
        // for; chosen experts are below `experts`, since each token has at least `top_k`.
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
                    buffer(&out.weights, slots + 2),
                    buffer(&out.chosen, slots.max(1)),
                ),
                sums(),
                self.args(),
                plan,
            );
            route_sums_kernel::launch_unchecked(
                client,
                CubeCount::Static(1, 1, 1),
                dim,
                sums(),
                buffer(&out.counts, experts),
                buffer(&out.weights, slots + 2),
                self.args(),
                plan,
            );
        }
    }

    /// Computes the gradient of the logits from `grads`, the gradient of the weights of `routed`.
    /// All buffers were checked.
    fn backward(
        self,
        client: &Client,
        logits: &Handle,
        routed: &DeviceRouted,
        grads: &Handle,
    ) -> Handle {
        let (tokens, experts, slots) = (self.part.tokens, self.router.experts, self.slots());
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
                    buffer(&routed.chosen, slots.max(1)),
                    buffer(&routed.counts, experts),
                ),
                buffer(&out, tokens * experts),
                self.args(),
                self.plan(client),
            );
        }
        out
    }
}

/// Returns the request of [`route`].
fn routing(tokens: usize, router: Router) -> Request {
    Request {
        part: BatchPart { tokens, of: tokens },
        router,
        losses_only: false,
    }
}

fn check(logits: &Handle, tokens: usize, router: Router) -> Result<(), Nvfp4Error> {
    router.check()?;
    if tokens == 0 {
        return Err(Nvfp4Error::value("tokens", "0", "at least 1"));
    }
    to_u32("logits", tokens * router.experts)?;
    check_memory("logits", logits, tokens * router.experts * 4)
}

/// Computes experts, weights and losses from the logits `f32[tokens, experts]`, bit-identical to
/// [`reference::route`](crate::reference::route).
///
/// # Errors
/// Returns an error if there are no tokens, a number of `router` is out of range, a buffer is
/// smaller than its shape, or a size does not fit 32 bits.
pub fn route(
    client: &Client,
    logits: &Handle,
    tokens: usize,
    router: Router,
) -> Result<DeviceRouted, Nvfp4Error> {
    check(logits, tokens, router)?;
    let request = routing(tokens, router);
    let words = |len: usize| allocate(client, len * 4);
    let routed = DeviceRouted {
        weights: words(request.slots() + 2),
        chosen: words(request.slots()),
        counts: words(router.experts),
    };
    request.forward(client, logits, &routed);
    Ok(routed)
}

/// Computes the gradient of the logits of [`route`], `f32[tokens, experts]`, from `grads`,
/// `f32[tokens * top_k + 2]`, the gradient of [`DeviceRouted::weights`]. Bit-identical to
/// [`reference::route_backward`](crate::reference::route_backward).
///
/// # Errors
/// Returns the errors of [`route`].
pub fn route_backward(
    client: &Client,
    logits: &Handle,
    routed: &DeviceRouted,
    grads: &Handle,
    (tokens, router): (usize, Router),
) -> Result<Handle, Nvfp4Error> {
    check(logits, tokens, router)?;
    let request = routing(tokens, router);
    let slots = request.slots();
    check_memory("routed", &routed.weights, (slots + 2) * 4)?;
    check_memory("routed", &routed.chosen, slots * 4)?;
    check_memory("routed", &routed.counts, router.experts * 4)?;
    check_memory("grads", grads, (slots + 2) * 4)?;
    Ok(request.backward(client, logits, routed, grads))
}

/// Computes the contributions of some tokens to the balance loss and to the mean of the squared
/// log-sum-exps of a batch, `f32[2]`. Inputs are the tokens' logits `f32[part.tokens, experts]` and
/// the number of choices of each expert in the whole batch, `u32[experts]`. Bit-identical to
/// [`reference::router_losses`](crate::reference::router_losses).
///
/// # Errors
/// Returns the errors of [`route`].
pub fn router_losses(
    client: &Client,
    logits: &Handle,
    counts: &Handle,
    (part, router): (BatchPart, Router),
) -> Result<Handle, Nvfp4Error> {
    check(logits, part.tokens, router)?;
    check_memory("counts", counts, router.experts * 4)?;
    let request = Request {
        part,
        router,
        losses_only: true,
    };
    let out = DeviceRouted {
        weights: allocate(client, 8),
        // No expert is chosen.
        chosen: allocate(client, 4),
        counts: counts.clone(),
    };
    request.forward(client, logits, &out);
    Ok(out.weights)
}

/// Computes the gradient of the logits of [`router_losses`], `f32[part.tokens, experts]`, from
/// `grads`, `f32[2]`, the gradients of the losses. Bit-identical to
/// [`reference::router_losses_backward`](crate::reference::router_losses_backward).
///
/// # Errors
/// Returns the errors of [`route`].
pub fn router_losses_backward(
    client: &Client,
    logits: &Handle,
    counts: &Handle,
    grads: &Handle,
    (part, router): (BatchPart, Router),
) -> Result<Handle, Nvfp4Error> {
    check(logits, part.tokens, router)?;
    check_memory("counts", counts, router.experts * 4)?;
    check_memory("grads", grads, 8)?;
    let request = Request {
        part,
        router,
        losses_only: true,
    };
    // Neither weights nor choices are read.
    let routed = DeviceRouted {
        weights: grads.clone(),
        chosen: counts.clone(),
        counts: counts.clone(),
    };
    Ok(request.backward(client, logits, &routed, grads))
}

/// Sorts `slots` choices (`u32` expert indices) by expert, like
/// [`reference::sort_choices`](crate::reference::sort_choices).
///
/// # Errors
/// Returns an error if there are no choices or no experts, a buffer is smaller than its shape, or a
/// size does not fit 32 bits.
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
