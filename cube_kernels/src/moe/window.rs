//! The choices that fall on the experts of one device, where others have the other experts; see
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

/// The choices of some experts in the order of these, in device memory; see
/// [`reference::ChoiceWindow`](crate::reference::ChoiceWindow).
#[derive(Debug, Clone)]
pub struct DeviceChoiceWindow {
    /// The choice at each place, `u32[slots]`; `slots` behind those of the experts.
    pub choices: Handle,
    /// The place of each choice, `u32[slots]`; `slots` for those of other experts.
    pub places: Handle,
    /// Where the choices of each of the experts begin, `u32[held + 1]`.
    pub offsets: Handle,
    /// What the choices of earlier experts take, for
    /// [`EarlierGroups`](crate::moe::EarlierGroups): `u32[5]`.
    pub earlier: Handle,
    /// Choices of each expert, `u32[experts]`.
    pub counts: Handle,
}

/// Sorts `slots` choices (`u32`, numbers of experts) by expert and keeps those of the experts
/// `held`; see [`reference::sort_window`](crate::reference::sort_window), whose result this is.
///
/// # Errors
/// When there is no choice, `held` are no experts, a buffer is smaller than its shape, or a size
/// does not fit 32 bits.
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
    /// The choice at each place.
    pub choices: Box<[u32]>,
    /// The place of each choice.
    pub places: Box<[u32]>,
    /// Where the choices of each of the experts begin.
    pub offsets: Box<[u32]>,
    /// What the choices of earlier experts take.
    pub earlier: Box<[u32]>,
    /// Choices of each expert.
    pub counts: Box<[u32]>,
}

/// Sums in [`ChoiceWindow::earlier`].
const SUMS: usize = EARLIER_UNITS.len();

/// Units move the sorted choices so that those of the experts come first, and tell others by a
/// number that is none. Cube 0 adds up what the choices of earlier experts take.
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
        // Always, unless the sorted choices were written to.
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

/// The number of `sorted` keys that are `expert`.
#[cube]
fn count_of(keys: &[u32], slots: usize, expert: u32) -> u32 {
    first_place(keys, slots, expert + 1u32) - first_place(keys, slots, expert)
}
