//! Groups of rows, as offsets in device memory.

use cubecl::{prelude::*, server::Handle};

use crate::launch::units;
use crate::{
    Nvfp4Error,
    memory::{allocate, check_memory},
};

/// Offsets of groups of consecutive rows: group `g` is rows `offsets[g]..offsets[g + 1]`.
///
/// The offsets are in device memory and the host never reads them: launches and allocations depend
/// on the number of groups and on the number of rows. Offsets ascend; any group may be empty, and
/// rows after the last offset belong to no group. Offsets beyond the number of rows are clamped to
/// it, and a group that ends before it starts is empty: if offsets do not ascend, the contents of a
/// result are unspecified, but no access is out of bounds.
#[derive(Debug, Clone)]
pub struct GroupOffsets {
    /// `count + 1` offsets, `u32`.
    pub offsets: Handle,
    /// Number of groups, at least one.
    pub count: usize,
}

impl GroupOffsets {
    /// Returns groups over existing memory.
    ///
    /// # Errors
    /// Returns an error if there are no groups, or the memory has less than `count + 1` words.
    pub fn new(offsets: Handle, count: usize) -> Result<Self, Nvfp4Error> {
        let groups = Self { offsets, count };
        groups.check("offsets")?;
        Ok(groups)
    }

    pub(crate) fn check(&self, argument: &'static str) -> Result<(), Nvfp4Error> {
        if self.count == 0 {
            return Err(Nvfp4Error::value(argument, "no group", "at least one"));
        }
        check_memory(argument, &self.offsets, (self.count + 1) * 4)
    }

    pub(crate) fn arg(&self) -> BufferArg {
        // SAFETY: checked to hold one offset more than there are groups.
        unsafe { BufferArg::from_raw_parts(self.offsets.clone(), self.count + 1) }
    }

    /// Returns the end of the last group, one word.
    pub(crate) fn end(&self) -> BufferArg {
        let end = self.offsets.clone().offset_start(4 * self.count as u64);
        // SAFETY: checked to hold one offset more than there are groups.
        unsafe { BufferArg::from_raw_parts(end, 1) }
    }

    /// Rounds the size of each group up to a multiple of `alignment`, for `rows` rows in total. The
    /// result contains the offsets of padded groups ([`pad_groups`](super::pad_groups),
    /// [`Quantize`](crate::quantize::Quantize)).
    ///
    /// # Errors
    /// Returns an error if `alignment` is zero, or a number does not fit 32 bits.
    pub fn aligned(
        &self,
        client: &Client,
        rows: usize,
        alignment: usize,
    ) -> Result<Self, Nvfp4Error> {
        if alignment == 0 {
            return Err(Nvfp4Error::value("alignment", "0", "at least 1"));
        }
        self.rescaled(client, rows, alignment, alignment)
    }

    /// Divides each group's size by `unit`, rounds up and multiplies by `scale`: with
    /// `unit == scale` each group is padded to a multiple of it.
    pub(crate) fn rescaled(
        &self,
        client: &Client,
        rows: usize,
        unit: usize,
        scale: usize,
    ) -> Result<Self, Nvfp4Error> {
        let out = allocate(client, (self.count + 1) * 4);
        let units = units(client);
        let rescaled = Self {
            offsets: out,
            count: self.count,
        };
        // SAFETY: one offset more than groups is read, and as many are written.
        unsafe {
            rescale_kernel::launch_unchecked(
                client,
                CubeCount::Static(1, 1, 1),
                CubeDim::new_1d(units as u32),
                self.arg(),
                rescaled.arg(),
                self.count,
                to_u32("rows", rows)?,
                to_u32("alignment", unit)?,
                to_u32("alignment", scale)?,
                units,
            );
        }
        Ok(rescaled)
    }
}

/// Converts a size to the 32 bits of an offset.
pub(crate) fn to_u32(argument: &'static str, value: usize) -> Result<u32, Nvfp4Error> {
    u32::try_from(value).map_err(|_| {
        Nvfp4Error::value(
            argument,
            format!("{value}"),
            format!("at most {}, the largest offset", u32::MAX),
        )
    })
}

/// Rows of a group.
#[derive(CubeType, Clone, Copy)]
pub struct Span {
    /// First row.
    pub start: usize,
    /// End of the rows (exclusive).
    pub end: usize,
}

/// Returns the rows of group `group`, within `rows` rows.
#[cube]
pub fn span(offsets: &[u32], group: usize, rows: usize) -> Span {
    Span {
        start: min(offsets[group] as usize, rows),
        end: min(offsets[group + 1usize] as usize, rows),
    }
}

/// Rows of a group in 32 bits, with `start <= end`.
#[derive(CubeType, Clone, Copy)]
pub struct Extent {
    /// First row.
    pub start: u32,
    /// End of the rows (exclusive).
    pub end: u32,
}

/// Returns the rows of group `group`, within `rows` rows; empty if it ends before it starts.
#[cube]
pub fn extent(offsets: &[u32], group: u32, rows: u32) -> Extent {
    let start = min(offsets[group as usize], rows);
    let end = min(offsets[group as usize + 1usize], rows);
    Extent {
        start,
        end: max(start, end),
    }
}

/// Returns the last of `groups` groups that starts at or before `position`, or the first group if
/// none does.
#[cube]
pub fn find_group(starts: &[u32], groups: usize, position: usize) -> usize {
    let mut low = 0usize;
    let mut count = groups;
    while count > 1usize {
        let half = count / 2usize;
        if starts[low + half] as usize <= position {
            low += half;
            count -= half;
        } else {
            count = half;
        }
    }
    low
}

/// Prefix sum of the group sizes by one cube: each unit sums its share, then the shares are summed.
#[cube(launch_unchecked, create_dummy_kernel)]
pub fn rescale_kernel(
    offsets: &[u32],
    out: &mut [u32],
    groups: usize,
    rows: u32,
    unit: u32,
    scale: u32,
    #[comptime] units: usize,
) {
    let mut shares = Shared::<[u32]>::new_slice(units);
    let share = groups.div_ceil(units);
    let first = UNIT_POS as usize * share;
    let last = min(first + share, groups);
    let mut sum = 0u32;
    let mut group = first;
    while group < last {
        sum += rescaled_size(offsets, group, rows, unit, scale);
        group += 1usize;
    }
    shares[UNIT_POS as usize] = sum;
    sync_cube();
    let mut before = 0u32;
    let mut distance = 1u32;
    while distance < CUBE_DIM {
        // Inclusive scan step with twice the distance.
        let mut other = 0u32;
        if UNIT_POS >= distance {
            other = shares[(UNIT_POS - distance) as usize];
        }
        sync_cube();
        shares[UNIT_POS as usize] += other;
        sync_cube();
        distance *= 2u32;
    }
    if UNIT_POS > 0u32 {
        before = shares[(UNIT_POS - 1u32) as usize];
    }
    if UNIT_POS == 0u32 {
        out[0] = 0u32;
    }
    let mut group = first;
    while group < last {
        before += rescaled_size(offsets, group, rows, unit, scale);
        out[group + 1usize] = before;
        group += 1usize;
    }
}

#[cube]
fn rescaled_size(offsets: &[u32], group: usize, rows: u32, unit: u32, scale: u32) -> u32 {
    let own = extent(offsets, group as u32, rows);
    let size = own.end - own.start;
    // `size + unit - 1` could overflow.
    (size / unit + min(size % unit, 1u32)) * scale
}

/// Groups of rows in a kernel. Not read if there are no groups.
#[derive(CubeType, CubeLaunch)]
pub struct GroupRows {
    /// First row of each group, and the end of the last group.
    pub offsets: Box<[u32]>,
    /// Starts of the padded groups, in the form of `offsets`.
    pub starts: Box<[u32]>,
    /// Number of groups.
    pub count: usize,
}
