//! Conversion of block scales from rows to the 128x4 tiles of FP4 tensor cores, and back.
//!
//! The layouts are those of [`reference::swizzle`](mod@crate::reference::swizzle) (specification,
//! section 11). Every byte of a result is written; padding is zero. Any one-byte scales are
//! supported: E4M3 of 16-blocks, UE8M0 of 32-blocks.
//!
//! Groups are given by offsets in device memory ([`GroupOffsets`]). Results then have the length of
//! the worst-case split, so that neither memory nor launches depend on the offsets and nothing
//! waits for the device.

use cubecl::{prelude::*, server::Handle};

use crate::launch::grid;
use crate::moe::groups::{GroupOffsets, GroupRows, GroupRowsLaunch, find_group, span, to_u32};
use crate::{
    Nvfp4Error,
    memory::{address_type, allocate, check_memory},
    reference::swizzle::{padded_len, row_group_tiles},
};

/// Converts the `[rows, blocks]` bytes of `scales` to 128x4 tiles: `ceil128(rows) * ceil4(blocks)`
/// bytes. See [`reference::swizzle::swizzle`](crate::reference::swizzle::swizzle).
///
/// # Errors
/// Returns an error if `scales` is smaller than its shape.
pub fn swizzle(
    client: &Client,
    scales: &Handle,
    rows: usize,
    blocks: usize,
) -> Result<Handle, Nvfp4Error> {
    swizzle_batch(client, scales, 1, rows, blocks)
}

/// The inverse of [`swizzle`]: `[rows, blocks]` bytes.
///
/// # Errors
/// Returns an error if `swizzled` is smaller than its shape.
pub fn unswizzle(
    client: &Client,
    swizzled: &Handle,
    rows: usize,
    blocks: usize,
) -> Result<Handle, Nvfp4Error> {
    unswizzle_batch(client, swizzled, 1, rows, blocks)
}

/// [`swizzle`] of each of the `batch` matrices of `[batch, rows, blocks]`: the scales of 3-D expert
/// weights.
///
/// # Errors
/// Returns an error if `scales` is smaller than its shape.
pub fn swizzle_batch(
    client: &Client,
    scales: &Handle,
    batch: usize,
    rows: usize,
    blocks: usize,
) -> Result<Handle, Nvfp4Error> {
    check_memory("scales", scales, batch * rows * blocks)?;
    let out = allocate(client, batch * padded_len(rows, blocks));
    let tiles = batch * rows.div_ceil(128);
    launch_swizzle(
        client,
        scales,
        (batch * rows, rows, blocks),
        tiles,
        None,
        &out,
    );
    Ok(out)
}

/// The inverse of [`swizzle_batch`].
///
/// # Errors
/// Returns an error if `swizzled` is smaller than its shape.
pub fn unswizzle_batch(
    client: &Client,
    swizzled: &Handle,
    batch: usize,
    rows: usize,
    blocks: usize,
) -> Result<Handle, Nvfp4Error> {
    check_memory("swizzled", swizzled, batch * padded_len(rows, blocks))?;
    let out = allocate(client, batch * rows * blocks);
    let tiles = batch * rows.div_ceil(128);
    launch_unswizzle(
        client,
        swizzled,
        (batch * rows, rows, blocks),
        tiles,
        None,
        &out,
    );
    Ok(out)
}

/// [`swizzle`] of each group of rows (M groups), one after another. Returns `row_group_tiles(rows,
/// groups) * 128 * ceil4(blocks)` bytes, zero after the last group, and the starts of the groups in
/// them, in padded rows. See
/// [`reference::swizzle::swizzle_row_groups`](crate::reference::swizzle::swizzle_row_groups).
///
/// # Errors
/// Returns an error if a buffer is smaller than its shape, or if there are more than 2^32 rows.
pub fn swizzle_row_groups(
    client: &Client,
    scales: &Handle,
    rows: usize,
    blocks: usize,
    groups: &GroupOffsets,
) -> Result<(Handle, GroupOffsets), Nvfp4Error> {
    groups.check("groups")?;
    check_memory("scales", scales, rows * blocks)?;
    let tiles = row_group_tiles(rows, groups.count);
    to_u32("rows", tiles * 128)?;
    let padded = groups.rescaled(client, rows, 128, 128)?;
    let out = allocate(client, tiles * padded_len(1, blocks));
    let grouping = Some((groups, &padded));
    launch_swizzle(client, scales, (rows, rows, blocks), tiles, grouping, &out);
    Ok((out, padded))
}

/// The inverse of [`swizzle_row_groups`]: `[rows, blocks]` bytes, zero in rows that belong to no
/// group.
///
/// # Errors
/// See [`swizzle_row_groups`].
pub fn unswizzle_row_groups(
    client: &Client,
    swizzled: &Handle,
    rows: usize,
    blocks: usize,
    groups: &GroupOffsets,
) -> Result<Handle, Nvfp4Error> {
    groups.check("groups")?;
    let tiles = row_group_tiles(rows, groups.count);
    to_u32("rows", tiles * 128)?;
    check_memory("swizzled", swizzled, tiles * padded_len(1, blocks))?;
    let padded = groups.rescaled(client, rows, 128, 128)?;
    let out = allocate(client, rows * blocks);
    let grouping = Some((groups, &padded));
    launch_unswizzle(
        client,
        swizzled,
        (rows, rows, blocks),
        tiles,
        grouping,
        &out,
    );
    Ok(out)
}

/// Returns the words per load: as many as divide a row, at most four.
fn words(blocks: usize) -> usize {
    match blocks {
        _ if blocks.is_multiple_of(16) => 4,
        _ if blocks.is_multiple_of(8) => 2,
        _ => 1,
    }
}

/// `rows` counts all rows, `matrix_rows` those of one matrix of a batch.
fn launch_swizzle(
    client: &Client,
    scales: &Handle,
    (rows, matrix_rows, blocks): (usize, usize, usize),
    tiles: usize,
    grouping: Option<(&GroupOffsets, &GroupOffsets)>,
    out: &Handle,
) {
    let width = words(blocks);
    let columns = blocks.div_ceil(4);
    let items = tiles * columns / width * 32;
    if items == 0 {
        return;
    }
    let (count, dim) = grid(client, items);
    let groups = groups_arg(grouping, scales);
    // SAFETY: the kernel reads below `rows` rows and writes `tiles * columns` tiles.
    unsafe {
        swizzle_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(tiles * columns * 512),
            width,
            BufferArg::from_raw_parts(scales.clone(), rows * blocks / 4 / width),
            BufferArg::from_raw_parts(scales.clone(), rows * blocks),
            groups,
            BufferArg::from_raw_parts(out.clone(), tiles * columns * 32),
            ScaleShapeLaunch::new(rows, matrix_rows, blocks, tiles, items),
            blocks.is_multiple_of(4),
            grouping.is_some(),
        );
    }
}

fn launch_unswizzle(
    client: &Client,
    swizzled: &Handle,
    (rows, matrix_rows, blocks): (usize, usize, usize),
    tiles: usize,
    grouping: Option<(&GroupOffsets, &GroupOffsets)>,
    out: &Handle,
) {
    let wide = blocks.is_multiple_of(4);
    let width = words(blocks);
    let columns = blocks.div_ceil(4);
    let items = if wide {
        rows * columns / width
    } else {
        rows * blocks
    };
    if items == 0 {
        return;
    }
    let (count, dim) = grid(client, items);
    let groups = groups_arg(grouping, swizzled);
    // SAFETY: the kernel reads below `tiles * columns` tiles and writes `rows` rows.
    unsafe {
        unswizzle_kernel::launch_unchecked(
            client,
            count,
            dim,
            address_type(tiles * columns * 512),
            width,
            BufferArg::from_raw_parts(swizzled.clone(), tiles * columns * 128),
            groups,
            BufferArg::from_raw_parts(out.clone(), rows * blocks / 4 / width),
            BufferArg::from_raw_parts(out.clone(), rows * blocks),
            ScaleShapeLaunch::new(rows, matrix_rows, blocks, tiles, items),
            wide,
            grouping.is_some(),
        );
    }
}

/// Returns the groups' buffers, or a placeholder, which the kernel does not read, if there are no
/// groups.
fn groups_arg(
    grouping: Option<(&GroupOffsets, &GroupOffsets)>,
    placeholder: &Handle,
) -> GroupRowsLaunch {
    match grouping {
        Some((groups, padded)) => GroupRowsLaunch::new(groups.arg(), padded.arg(), groups.count),
        None => {
            // SAFETY: not read.
            let arg = || unsafe { BufferArg::from_raw_parts(placeholder.clone(), 1) };
            GroupRowsLaunch::new(arg(), arg(), 0)
        }
    }
}

/// Scales of one matrix, or of a batch of equally sized ones.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub struct ScaleShape {
    /// Rows of all matrices.
    pub rows: usize,
    /// Rows of one matrix.
    pub matrix_rows: usize,
    /// Blocks per row.
    pub blocks: usize,
    /// Tiles of 128 rows.
    pub tiles: usize,
    /// Work items of the grid.
    pub items: usize,
}

/// Each unit makes the 16 bytes of line `r % 32` in `N` neighbouring tiles: four rows, 32 apart,
/// and four blocks per tile. Neighbouring units write neighbouring lines.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn swizzle_kernel<N: Size>(
    source_words: &[Vector<u32, N>],
    source: &[u8],
    groups: GroupRows,
    out: &mut [Vector<u32, Const<4>>],
    shape: ScaleShape,
    #[comptime] wide: bool,
    #[comptime] grouped: bool,
) {
    let (rows, blocks, items) = (shape.matrix_rows, shape.blocks, shape.items);
    let width = N::value();
    let columns = blocks.div_ceil(4);
    let vectors = columns / width;
    let mut item = ABSOLUTE_POS;
    while item < items {
        let line = item % 32usize;
        let column = (item / 32usize) % vectors;
        let tile = item / 32usize / vectors;
        let mut first = tile * 128usize;
        let mut present = 0usize;
        if comptime!(grouped) {
            let group = find_group(&groups.starts, groups.count, first);
            let rows = span(&groups.offsets, group, rows);
            // After the last group this index is also after its rows.
            first = rows.start + (first - groups.starts[group] as usize);
            if first < rows.end {
                present = rows.end - first;
            }
        } else {
            let row_tiles = rows.div_ceil(128);
            let local = (tile % row_tiles) * 128usize;
            first = (tile / row_tiles) * rows + local;
            present = rows - local;
        }
        let mut gathered = Array::<u32>::new(comptime!(4 * width));
        #[unroll]
        for s in 0..4usize {
            let row = line + comptime!(s * 32);
            let mut words = Vector::<u32, N>::new(0u32);
            if row < present {
                if comptime!(wide) {
                    words = source_words[(first + row) * vectors + column];
                } else {
                    let start = (first + row) * blocks;
                    let mut word = 0u32;
                    #[unroll]
                    for i in 0..4usize {
                        let block = column * 4usize + i;
                        if block < blocks {
                            let byte = u32::cast_from(source[start + block]);
                            word |= byte << comptime!(8 * i as u32);
                        }
                    }
                    words.insert(0usize, word);
                }
            }
            #[unroll]
            for w in 0..width {
                gathered[comptime!(w * 4 + s)] = words.extract(w);
            }
        }
        #[unroll]
        for w in 0..width {
            let mut words = Vector::<u32, Const<4>>::empty();
            #[unroll]
            for s in 0..4usize {
                words.insert(s, gathered[comptime!(w * 4 + s)]);
            }
            out[(tile * columns + column * width + w) * 32usize + line] = words;
        }
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// Each unit makes `N` words of a row, or one byte if rows are not whole words.
#[cube(launch_unchecked, address_type = "dynamic", create_dummy_kernel)]
pub fn unswizzle_kernel<N: Size>(
    source: &[u32],
    groups: GroupRows,
    out_words: &mut [Vector<u32, N>],
    out: &mut [u8],
    shape: ScaleShape,
    #[comptime] wide: bool,
    #[comptime] grouped: bool,
) {
    let (rows, matrix_rows, blocks) = (shape.rows, shape.matrix_rows, shape.blocks);
    let (tiles, items) = (shape.tiles, shape.items);
    let width = N::value();
    let columns = blocks.div_ceil(4);
    let mut per_row = blocks;
    if comptime!(wide) {
        per_row = columns / width;
    }
    let mut item = ABSOLUTE_POS;
    while item < items {
        let row = item / per_row;
        let position = item % per_row;
        let mut local = 0usize;
        let mut tile = tiles;
        if comptime!(grouped) {
            let group = find_group(&groups.offsets, groups.count, row);
            let rows = span(&groups.offsets, group, rows);
            if row >= rows.start && row < rows.end {
                local = row - rows.start;
                tile = groups.starts[group] as usize / 128usize + local / 128usize;
            }
        } else {
            local = row % matrix_rows;
            tile = (row / matrix_rows) * matrix_rows.div_ceil(128) + local / 128usize;
        }
        // A row that belongs to no group has no tile.
        let inside = tile < tiles;
        let line = (local % 32usize) * 4usize + (local % 128usize) / 32usize;
        if comptime!(wide) {
            let mut words = Vector::<u32, N>::new(0u32);
            if inside {
                #[unroll]
                for w in 0..width {
                    let column = position * width + w;
                    words.insert(w, source[(tile * columns + column) * 128usize + line]);
                }
            }
            out_words[item] = words;
        } else {
            let mut byte = 0u32;
            if inside {
                let word = source[(tile * columns + position / 4usize) * 128usize + line];
                byte = (word >> (8u32 * (position % 4usize) as u32)) & 0xFFu32;
            }
            out[item] = u8::cast_from(byte);
        }
        item += CUBE_COUNT * CUBE_DIM as usize;
    }
}
