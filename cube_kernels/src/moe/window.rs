//! Choices of the experts of one device under expert parallelism; see
//! [`reference::sort_window`](crate::reference::sort_window). Nothing waits for the device.

use std::ops::Range;

use cubecl::{prelude::*, server::Handle};

use super::{
    groups::to_u32,
    router::kernel::{SortedKeys, SortedKeysLaunch, first_place},
};
use crate::{
    Nvfp4Error,
    launch::{buffer, grid, units},
    memory::{allocate, check_memory},
    reference::EARLIER_UNITS,
    sort::sort,
};

/// The choices of one device's experts, sorted by expert, in device memory; see
/// [`reference::ChoiceWindow`](crate::reference::ChoiceWindow).
#[derive(Debug, Clone)]
pub struct DeviceChoiceWindow {
    /// Choice at each place, `u32[slots]`; `slots` after those of the experts.
    pub choices: Handle,
    /// Place of each choice, `u32[slots]`; `slots` for choices of other experts.
    pub places: Handle,
    /// Start of each expert's choices, `u32[held + 1]`.
    pub offsets: Handle,
    /// Row units that the choices of earlier experts take, for
    /// [`EarlierGroups`](crate::moe::EarlierGroups): `u32[5]`.
    pub earlier: Handle,
    /// Number of choices of each expert, `u32[experts]`.
    pub counts: Handle,
}

/// Sorts `slots` choices (`u32` expert indices) by expert and keeps those of the experts `held`,
/// like [`reference::sort_window`](crate::reference::sort_window).
///
/// # Errors
/// Returns an error if there are no choices, `held` is not a range of experts, a buffer is smaller
/// than its shape, or a size does not fit 32 bits.
pub fn sort_window(
    client: &Client,
    chosen: &Handle,
    slots: usize,
    experts: usize,
    held: Range<usize>,
) -> Result<DeviceChoiceWindow, Nvfp4Error> {
    if slots == 0 {
        return Err(Nvfp4Error::value("slots", "0", "at least 1"));
    }
    to_u32("slots", 2 * slots)?;
    to_u32("experts", experts)?;
    if held.is_empty() || held.end > experts {
        return Err(Nvfp4Error::value(
            "held",
            format!("{held:?}"),
            format!("at least one of {experts} experts"),
        ));
    }
    check_memory("chosen", chosen, slots * 4)?;
    let sorted = sort(client, chosen, slots, experts);
    let words = |len: usize| allocate(client, len * 4);
    let made = DeviceChoiceWindow {
        choices: words(slots),
        places: words(slots),
        offsets: words(held.len() + 1),
        earlier: words(EARLIER_UNITS.len()),
        counts: words(experts),
    };
    let (count, dim) = grid(client, slots.max(experts));
    // SAFETY: the kernel stays below the choices and experts that the buffers were made for.
    unsafe {
        window_places_kernel::launch_unchecked(
            client,
            count,
            dim,
            SortedKeysLaunch::new(buffer(&sorted.keys, slots), buffer(&sorted.order, slots)),
            ChoiceWindowLaunch::new(
                buffer(&made.choices, slots),
                buffer(&made.places, slots),
                buffer(&made.offsets, held.len() + 1),
                buffer(&made.earlier, EARLIER_UNITS.len()),
                buffer(&made.counts, experts),
            ),
            slots,
            experts,
            held.start,
            held.len(),
            units(client),
        );
    }
    Ok(made)
}

/// A [`DeviceChoiceWindow`] in a kernel.
#[derive(CubeType, CubeLaunch)]
pub struct ChoiceWindow {
    /// Choice at each place.
    pub choices: Box<[u32]>,
    /// Place of each choice.
    pub places: Box<[u32]>,
    /// Start of each expert's choices.
    pub offsets: Box<[u32]>,
    /// Row units that the choices of earlier experts take.
    pub earlier: Box<[u32]>,
    /// Number of choices of each expert.
    pub counts: Box<[u32]>,
}

/// Number of sums in [`ChoiceWindow::earlier`].
const SUMS: usize = EARLIER_UNITS.len();

/// Moves the sorted choices so that those of this device's experts come first; other choices get an
/// out-of-range place. Cube 0 sums the row units that the choices of earlier experts take.
#[cube(launch_unchecked, create_dummy_kernel)]
pub fn window_places_kernel(
    sorted: &SortedKeys,
    mut out: ChoiceWindow,
    slots: usize,
    experts: usize,
    first: usize,
    held: usize,
    #[comptime] units: usize,
) {
    let none = slots as u32;
    let start = first_place(&sorted.keys, slots, first as u32);
    let own = first_place(&sorted.keys, slots, (first + held) as u32) - start;
    let mut item = ABSOLUTE_POS;
    while item < slots {
        let choice = sorted.order[item];
        let mut place = item as u32 - start;
        if (item as u32) < start {
            place += none;
        }
        let is_own = place < own;
        out.choices[place as usize] = select(is_own, choice, none);
        // Always true, unless the sorted choices were overwritten.
        if choice < none {
            out.places[choice as usize] = select(is_own, place, none);
        }
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
    let mut expert = ABSOLUTE_POS;
    while expert < experts {
        out.counts[expert] = count_of(&sorted.keys, slots, expert as u32);
        expert += CUBE_COUNT * CUBE_DIM as usize;
    }
    let mut expert = ABSOLUTE_POS;
    while expert <= held {
        out.offsets[expert] = first_place(&sorted.keys, slots, (first + expert) as u32) - start;
        expert += CUBE_COUNT * CUBE_DIM as usize;
    }
    let mut shares: Shared<[u32]> = Shared::new_slice(comptime!(SUMS * units));
    let mut sums = Array::<u32>::new(SUMS);
    #[unroll]
    for i in 0..SUMS {
        sums[i] = 0u32;
    }
    let mut expert = UNIT_POS as usize;
    if CUBE_POS > 0usize {
        expert = first;
    }
    while expert < first {
        let count = count_of(&sorted.keys, slots, expert as u32);
        #[unroll]
        for i in 0..SUMS {
            sums[i] += count.div_ceil(comptime!(EARLIER_UNITS[i] as u32));
        }
        expert += CUBE_DIM as usize;
    }
    #[unroll]
    for i in 0..SUMS {
        shares[comptime!(i * units) + UNIT_POS as usize] = sums[i];
    }
    sync_cube();
    let mut entry = UNIT_POS as usize;
    if CUBE_POS > 0usize {
        entry = SUMS.runtime();
    }
    while entry < SUMS {
        let mut sum = 0u32;
        for unit in 0..units {
            sum += shares[entry * units + unit];
        }
        out.earlier[entry] = sum;
        entry += CUBE_DIM as usize;
    }
}

/// Returns how many sorted keys equal `expert`.
#[cube]
fn count_of(keys: &[u32], slots: usize, expert: u32) -> u32 {
    first_place(keys, slots, expert + 1u32) - first_place(keys, slots, expert)
}
