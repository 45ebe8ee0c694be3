//! AdamW over many parameters at once, in place, and the norm of all gradients.
//!
//! Values that change between steps are read from device memory: the learning rate, the bias
//! corrections of the moments and the step ([`AdamWSchedule`](crate::reference::AdamWSchedule)),
//! and the factor that clips gradients. Nothing waits for the device. See
//! [`reference`](crate::reference) for the arithmetic. A NaN or infinite gradient makes the norm
//! NaN or infinite. A NaN norm makes every parameter NaN; an infinite norm makes those parameters
//! NaN whose gradients are infinite, and the others take a step with zero gradients.

mod adamw;
#[cfg(feature = "proof")]
pub(crate) mod instances;
mod norm;

use std::collections::BTreeMap;

use cubecl::{client::Client, prelude::*, server::Handle};

use self::adamw::{AdamWPlan, AdamWSlotLaunch, AdamWStepLaunch, adamw_kernel};
use self::norm::{GradientSlotLaunch, SquarePlan, clip_factor_kernel, square_sums_kernel};
use crate::{
    Nvfp4Error,
    capabilities::{conversion_of, is_cpu},
    launch::{buffer, cubes, grid, units},
    memory::{address_type, allocate, check_memory, is_aligned},
    reference::{AdamWConstants, AdamWParams, SQUARE_CHUNK},
    tensor::FloatKind,
};

/// Parameters per launch on a GPU. Each has its own copy of the kernel's loop.
const SLOTS: usize = 8;
/// Parameters per launch on the CPU, where compiling takes longer.
const CPU_SLOTS: usize = 2;

/// Elements per vector; one if a length is not a multiple of it.
const WIDTH: usize = 4;

/// Contiguous gradient in device memory.
#[derive(Debug, Clone)]
pub struct Gradient {
    /// Memory of the gradient.
    pub handle: Handle,
    /// Number of elements.
    pub elements: usize,
    /// Element type.
    pub dtype: FloatKind,
}

impl Gradient {
    fn check(&self) -> Result<(), Nvfp4Error> {
        check_memory("gradient", &self.handle, self.elements * self.dtype.size())
    }

    fn width(&self) -> usize {
        match self.elements.is_multiple_of(WIDTH) && is_aligned(&self.handle) {
            true => WIDTH,
            false => 1,
        }
    }
}

/// One parameter of a step; all buffers are contiguous.
#[derive(Debug, Clone)]
pub struct AdamWUpdate {
    /// Gradient.
    pub gradient: Gradient,
    /// Parameter in `f32`, updated in place.
    pub weight: Handle,
    /// First moment: the running mean of the gradient, updated in place.
    pub first: Handle,
    /// Second moment: the running mean of the squared gradient, updated in place.
    pub second: Handle,
    /// Output copy of the parameter in another type (`Bf16` or `F16`).
    pub copy: Option<(Handle, FloatKind)>,
    /// Weight decay, which is multiplied by the learning rate.
    pub decay: f32,
    /// Key of the random bits that round moments.
    pub key: [u32; 2],
}

/// Settings of a step.
#[derive(Debug, Clone)]
pub struct AdamWSpec<'a> {
    /// Constants of AdamW.
    pub params: AdamWParams,
    /// Type of the moments: `F32`, or `Bf16` with stochastic rounding.
    pub moments: FloatKind,
    /// [Four words](crate::reference::AdamWSchedule::words) in device memory.
    pub schedule: &'a Handle,
    /// Result of [`clip_factor`], if gradients are clipped.
    pub factor: Option<&'a Handle>,
}

/// Returns the number of sums that [`square_sums`] computes for a gradient.
fn square_sum_count(elements: usize) -> usize {
    elements.div_ceil(SQUARE_CHUNK)
}

/// Computes the sums of squares (`f32`) of all chunks of the gradients, one gradient after the
/// other. Returns the sums and their number.
///
/// # Errors
/// Returns an error if a buffer is smaller than its elements.
pub fn square_sums(client: &Client, gradients: &[Gradient]) -> Result<(Handle, usize), Nvfp4Error> {
    gradients.iter().try_for_each(Gradient::check)?;
    let counts = gradients
        .iter()
        .map(|gradient| square_sum_count(gradient.elements));
    let count: usize = counts.clone().sum();
    let sums = allocate(client, 4 * count);
    let mut starts = Vec::with_capacity(gradients.len());
    let mut start = 0;
    for own in counts {
        starts.push(start);
        start += own;
    }
    let mut alike: BTreeMap<(usize, usize), Vec<usize>> = BTreeMap::new();
    for (index, gradient) in gradients.iter().enumerate() {
        if gradient.elements > 0 {
            let key = (gradient.dtype as usize, gradient.width());
            alike.entry(key).or_default().push(index);
        }
    }
    for ((_, width), indices) in alike {
        for batch in indices.chunks(most_slots(client)) {
            square_batch(client, gradients, &starts, batch, width, &sums, count);
        }
    }
    Ok((sums, count))
}

fn square_batch(
    client: &Client,
    gradients: &[Gradient],
    starts: &[usize],
    batch: &[usize],
    width: usize,
    sums: &Handle,
    count: usize,
) {
    let slots = padded(batch, client);
    let mut args = SequenceArg::new();
    let mut chunks = 0;
    let mut most = 0;
    for (slot, &index) in slots.iter().enumerate() {
        let gradient = &gradients[index];
        let own = match slot < batch.len() {
            true => square_sum_count(gradient.elements),
            false => 0,
        };
        most = most.max(gradient.elements);
        args.push(GradientSlotLaunch::new(
            // SAFETY: the memory was checked.
            unsafe { buffer(&gradient.handle, gradient.elements / width) },
            gradient.elements,
            chunks,
            chunks + own,
            starts[index],
        ));
        chunks += own;
    }
    let kind = gradients[batch[0]].dtype;
    let (cube_count, dim) = cubes(client, chunks);
    // SAFETY: the kernel stays below the elements of each gradient, and has a sum for each chunk.
    unsafe {
        square_sums_kernel::launch_unchecked(
            client,
            cube_count,
            dim,
            address_type(most),
            width,
            args,
            buffer(sums, count),
            SquarePlan {
                gradient: kind,
                conversion: conversion_of(client),
            },
            kind.storage_type(),
        );
    }
}

/// Computes the norm of all gradients, and the factor that scales them down to `max_norm` if the
/// norm is larger: `f32[2]`. `sums` contains the `count` sums of [`square_sums`].
///
/// # Errors
/// Returns an error if `sums` is smaller.
pub fn clip_factor(
    client: &Client,
    sums: &Handle,
    count: usize,
    max_norm: f32,
) -> Result<Handle, Nvfp4Error> {
    check_memory("sums", sums, 4 * count)?;
    let out = allocate(client, 8);
    // SAFETY: the kernel reads `count` sums and writes two numbers.
    unsafe {
        clip_factor_kernel::launch_unchecked(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(units(client) as u32),
            buffer(sums, count.max(1)),
            buffer(&out, 2),
            count,
            max_norm,
            conversion_of(client),
        );
    }
    Ok(out)
}

/// Returns amax values of zero for `parameters` parameters, which [`adamw`] raises.
pub fn no_amax(client: &Client, parameters: usize) -> Handle {
    crate::zeroed::zeros(client, parameters)
}

/// Resets the amax values of an earlier step to zero, like [`no_amax`].
///
/// # Errors
/// Returns an error if `amax` is smaller.
pub fn clear_amax(client: &Client, amax: &Handle, parameters: usize) -> Result<(), Nvfp4Error> {
    check_memory("amax", amax, parameters * 4)?;
    crate::zeroed::clear(client, amax, parameters);
    Ok(())
}

/// Performs a step of AdamW on all parameters, in place. If `amax` (`f32[parameters]`) is given,
/// each entry is raised to the amax of the new parameter, or of its copy if it has one.
///
/// # Errors
/// Returns an error if a buffer is smaller than its elements, or the type of an output is not
/// supported.
pub fn adamw(
    client: &Client,
    spec: &AdamWSpec<'_>,
    updates: &[AdamWUpdate],
    amax: Option<&Handle>,
) -> Result<(), Nvfp4Error> {
    check(spec, updates, amax)?;
    let mut alike: BTreeMap<(usize, Option<usize>, usize), Vec<usize>> = BTreeMap::new();
    for (index, update) in updates.iter().enumerate() {
        if update.gradient.elements > 0 {
            let copy = update.copy.as_ref().map(|(_, kind)| *kind as usize);
            let key = (update.gradient.dtype as usize, copy, update.width());
            alike.entry(key).or_default().push(index);
        }
    }
    for ((.., width), indices) in alike {
        for batch in indices.chunks(most_slots(client)) {
            adamw_batch(client, spec, updates, batch, width, amax);
        }
    }
    Ok(())
}

fn check(
    spec: &AdamWSpec<'_>,
    updates: &[AdamWUpdate],
    amax: Option<&Handle>,
) -> Result<(), Nvfp4Error> {
    if spec.moments == FloatKind::F16 {
        return Err(Nvfp4Error::value("moments", "F16", "F32 or Bf16"));
    }
    check_memory("schedule", spec.schedule, 16)?;
    if let Some(factor) = spec.factor {
        check_memory("factor", factor, 8)?;
    }
    if let Some(amax) = amax {
        check_memory("amax", amax, 4 * updates.len())?;
    }
    for update in updates {
        update.gradient.check()?;
        let elements = update.gradient.elements;
        check_memory("weight", &update.weight, 4 * elements)?;
        check_memory("first", &update.first, elements * spec.moments.size())?;
        check_memory("second", &update.second, elements * spec.moments.size())?;
        if let Some((handle, kind)) = &update.copy {
            if *kind == FloatKind::F32 {
                return Err(Nvfp4Error::value("copy", "F32", "F16 or Bf16"));
            }
            check_memory("copy", handle, elements * kind.size())?;
        }
    }
    Ok(())
}

impl AdamWUpdate {
    /// Returns the number of elements per vector, for every buffer.
    fn width(&self) -> usize {
        let copy = self.copy.as_ref().map(|(handle, _)| handle);
        let others = [&self.weight, &self.first, &self.second];
        match others.into_iter().chain(copy).all(is_aligned) {
            true => self.gradient.width(),
            false => 1,
        }
    }
}

fn adamw_batch(
    client: &Client,
    spec: &AdamWSpec<'_>,
    updates: &[AdamWUpdate],
    batch: &[usize],
    width: usize,
    amax: Option<&Handle>,
) {
    let slots = padded(batch, client);
    let mut args = SequenceArg::new();
    let mut vectors = 0;
    let mut most = 0;
    for (slot, &index) in slots.iter().enumerate() {
        let update = &updates[index];
        let len = update.gradient.elements / width;
        let own = if slot < batch.len() { len } else { 0 };
        most = most.max(update.gradient.elements);
        let copy = update.copy.as_ref().map(|(handle, _)| handle);
        // SAFETY: the memory was checked; what is no copy is not touched.
        let arg = |handle: &Handle| unsafe { buffer(handle, len) };
        args.push(AdamWSlotLaunch::new(
            arg(&update.gradient.handle),
            arg(&update.weight),
            arg(&update.first),
            arg(&update.second),
            arg(copy.unwrap_or(&update.weight)),
            vectors,
            vectors + own,
            update.decay,
            update.key[0],
            update.key[1],
            index,
        ));
        vectors += own;
    }
    let AdamWConstants {
        beta_1,
        rest_1,
        beta_2,
        rest_2,
        epsilon,
    } = AdamWConstants::new(&spec.params);
    let first = &updates[batch[0]];
    let plan = AdamWPlan {
        gradient: first.gradient.dtype,
        moment: spec.moments,
        copy: first.copy.as_ref().map(|(_, kind)| *kind),
        clip: spec.factor.is_some(),
        amax: amax.is_some(),
        planes: !is_cpu(client),
        conversion: conversion_of(client),
    };
    let step = AdamWStepLaunch::new(
        // SAFETY: checked to hold four words, and two numbers.
        unsafe { buffer(spec.schedule, 4) },
        unsafe { buffer(spec.factor.unwrap_or(spec.schedule), 2) },
        beta_1,
        rest_1,
        beta_2,
        rest_2,
        epsilon,
    );
    let (cube_count, dim) = grid(client, vectors);
    // SAFETY: the kernel stays below the vectors of each parameter.
    unsafe {
        adamw_kernel::launch_unchecked(
            client,
            cube_count,
            dim,
            address_type(most.max(vectors)),
            width,
            args,
            step,
            buffer(
                amax.unwrap_or(spec.schedule),
                amax.map_or(1, |_| updates.len()),
            ),
            plan,
            plan.gradient.storage_type(),
            plan.moment.storage_type(),
            plan.copy_kind().storage_type(),
        );
    }
}

/// Returns the largest number of parameters per launch.
fn most_slots(client: &Client) -> usize {
    if is_cpu(client) { CPU_SLOTS } else { SLOTS }
}

/// Returns `batch` with its first entry repeated until the launch is full, or `batch` itself if it
/// has one entry: each number of slots is a separate kernel to compile.
fn padded(batch: &[usize], client: &Client) -> Vec<usize> {
    let mut slots = batch.to_vec();
    if slots.len() > 1 {
        slots.resize(most_slots(client), batch[0]);
    }
    slots
}
