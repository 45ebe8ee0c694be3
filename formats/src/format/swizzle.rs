//! The 128x4 scale layout of FP4 tensor cores.
//!
//! The byte of outer row `r` and block `c` has the offset
//! `((r/128 · ceil(C/4) + c/4) · 32 + r%32) · 16 + (r%128)/32 · 4 + c%4`, where `C` is the number
//! of blocks in a row. Rows pad to 128 and blocks to 4; padding bytes are zero (numerics, section
//! 11).
//!
//! # Several matrices in one buffer
//! The tiling restarts at each matrix; this makes no difference if every matrix is one tile:
//! - a **batch** of equal matrices: `[batch, rows, blocks]`, each in its own [`padded_len`] bytes;
//! - **row groups** (M groups): rows `offsets[g]..offsets[g + 1]` of one `[rows, blocks]` matrix
//!   are group `g`, whose rows pad to 128;
//! - **block groups** (K groups): tokens lie along the contraction, and group `g` has
//!   `ceil(tokens in g / elements in a block)` blocks. Its scales are a compact
//!   `[outer, blocks of g]` array; the arrays of the groups follow one another. In the result each
//!   group is a separate swizzled matrix of `ceil(outer / 128) · ceil(blocks of g / 4)` tiles of
//!   512 bytes.
//!
//! The length of a grouped result depends on the number of groups and not on their sizes, so that a
//! device can allocate it without knowing them: [`row_group_tiles`] and [`block_group_tiles`].
//! Bytes after the last group are zero.

use crate::BLOCK;

/// Elements of a stored NVFP4 row whose scales are in one tile: four blocks.
pub const TILE_INNER: usize = 4 * BLOCK;

/// Returns the offset of the scale of row `row` and block `block`, with `blocks` blocks per row.
#[inline]
pub const fn offset(row: usize, block: usize, blocks: usize) -> usize {
    let tile = row / 128 * blocks.div_ceil(4) + block / 4;
    (tile * 32 + row % 32) * 16 + (row % 128) / 32 * 4 + block % 4
}

/// Returns the size in bytes of the swizzled layout of `rows` x `blocks` scales, including padding.
pub const fn padded_len(rows: usize, blocks: usize) -> usize {
    rows.div_ceil(128) * 128 * blocks.div_ceil(4) * 4
}

/// Returns row and block of the first nonzero padding byte of `swizzled`, if any.
pub(crate) fn first_unclean_padding(
    swizzled: &[u8],
    rows: usize,
    blocks: usize,
) -> Option<(usize, usize)> {
    let padded_blocks = blocks.next_multiple_of(4);
    let behind = |row| if row < rows { blocks } else { 0 };
    (0..rows.next_multiple_of(128))
        .flat_map(|row| (behind(row)..padded_blocks).map(move |block| (row, block)))
        .find(|&(row, block)| swizzled[offset(row, block, blocks)] != 0)
}

/// Converts compact `[rows, blocks]` scales to the swizzled layout.
///
/// # Panics
/// Panics if `scales` does not have `rows * blocks` bytes.
pub fn swizzle(scales: &[u8], rows: usize, blocks: usize) -> Vec<u8> {
    assert_eq!(
        scales.len(),
        rows * blocks,
        "`scales` must hold rows * blocks bytes"
    );
    let mut out = vec![0; padded_len(rows, blocks)];
    for row in 0..rows {
        for block in 0..blocks {
            out[offset(row, block, blocks)] = scales[row * blocks + block];
        }
    }
    out
}

/// Inverts [`swizzle`], dropping the padding.
///
/// # Panics
/// Panics if `swizzled` does not have the padded length.
pub fn unswizzle(swizzled: &[u8], rows: usize, blocks: usize) -> Vec<u8> {
    assert_eq!(
        swizzled.len(),
        padded_len(rows, blocks),
        "`swizzled` must have the padded length for {rows} x {blocks} scales"
    );
    let mut out = vec![0; rows * blocks];
    for row in 0..rows {
        for block in 0..blocks {
            out[row * blocks + block] = swizzled[offset(row, block, blocks)];
        }
    }
    out
}

/// Applies [`swizzle`] to each of `batch` matrices.
///
/// # Panics
/// Panics if `scales` does not have `batch * rows * blocks` bytes.
pub fn swizzle_batch(scales: &[u8], batch: usize, rows: usize, blocks: usize) -> Vec<u8> {
    assert_eq!(
        scales.len(),
        batch * rows * blocks,
        "`scales` must hold batch * rows * blocks bytes"
    );
    (0..batch)
        .flat_map(|b| swizzle(&scales[b * rows * blocks..][..rows * blocks], rows, blocks))
        .collect()
}

/// Inverts [`swizzle_batch`].
///
/// # Panics
/// Panics if `swizzled` does not have the padded length.
pub fn unswizzle_batch(swizzled: &[u8], batch: usize, rows: usize, blocks: usize) -> Vec<u8> {
    let len = padded_len(rows, blocks);
    assert_eq!(
        swizzled.len(),
        batch * len,
        "`swizzled` must have the padded length of {batch} matrices"
    );
    (0..batch)
        .flat_map(|b| unswizzle(&swizzled[b * len..][..len], rows, blocks))
        .collect()
}

/// Returns the largest number of 128-row tiles that `rows` rows in `groups` groups can take:
/// `n + (rows - n) / 128` with `n = min(rows, groups)`, reached if all groups but one have a single
/// row.
pub const fn row_group_tiles(rows: usize, groups: usize) -> usize {
    super::padding::padded_bound(rows, groups, 128) / 128
}

/// Applies [`swizzle`] to each group of rows, for `row_group_tiles(rows, groups)` tiles of rows in
/// total. Also returns the first padded row of each group, and the end of the last group.
///
/// # Panics
/// Panics if `scales` does not have `rows * blocks` bytes, or the offsets are not ascending up to
/// `rows`.
pub fn swizzle_row_groups(
    scales: &[u8],
    rows: usize,
    blocks: usize,
    offsets: &[u32],
) -> (Vec<u8>, Vec<u32>) {
    assert_eq!(
        scales.len(),
        rows * blocks,
        "`scales` must hold rows * blocks bytes"
    );
    let padded = super::padding::padded_offsets(offsets, rows, 128);
    let mut out = Vec::new();
    for group in offsets.windows(2) {
        let (start, end) = (group[0] as usize, group[1] as usize);
        out.extend(swizzle(
            &scales[start * blocks..end * blocks],
            end - start,
            blocks,
        ));
    }
    out.resize(
        row_group_tiles(rows, offsets.len() - 1) * padded_len(1, blocks),
        0,
    );
    (out, padded)
}

/// Inverts [`swizzle_row_groups`]; rows of no group are zero.
///
/// # Panics
/// Panics if `swizzled` does not have the length that [`swizzle_row_groups`] returns.
pub fn unswizzle_row_groups(
    swizzled: &[u8],
    rows: usize,
    blocks: usize,
    offsets: &[u32],
) -> Vec<u8> {
    assert_eq!(
        swizzled.len(),
        row_group_tiles(rows, offsets.len() - 1) * padded_len(1, blocks),
        "`swizzled` must have the padded length of the groups"
    );
    let mut out = vec![0; rows * blocks];
    let mut rest = swizzled;
    for group in offsets.windows(2) {
        let (start, end) = (group[0] as usize, group[1] as usize);
        let (own, next) = rest.split_at(padded_len(end - start, blocks));
        out[start * blocks..end * blocks].copy_from_slice(&unswizzle(own, end - start, blocks));
        rest = next;
    }
    out
}

/// Returns the largest number of blocks that `tokens` tokens in `groups` groups can take, with
/// `elements` tokens per block: `n + (tokens - n) / elements` with `n = min(tokens, groups)`.
pub const fn block_group_blocks(tokens: usize, groups: usize, elements: usize) -> usize {
    super::padding::padded_bound(tokens, groups, elements) / elements
}

/// Returns the largest number of 4-block tiles that they can take:
/// `n + (tokens - n) / (4 · elements)`.
pub const fn block_group_tiles(tokens: usize, groups: usize, elements: usize) -> usize {
    block_group_blocks(tokens, groups, 4 * elements)
}

/// Applies [`swizzle`] to each group of blocks, for `ceil(outer / 128) · block_group_tiles(..)`
/// tiles in total. Also returns the first 4-block tile of each group, and the end of the last
/// group. `offsets` counts tokens, `elements` of which share a block.
///
/// # Panics
/// Panics if `scales` is shorter than the groups, or the offsets are not ascending up to `tokens`.
pub fn swizzle_block_groups(
    scales: &[u8],
    outer: usize,
    tokens: usize,
    elements: usize,
    offsets: &[u32],
) -> (Vec<u8>, Vec<u32>) {
    let mut starts = super::padding::padded_offsets(offsets, tokens, 4 * elements);
    for start in &mut starts {
        *start /= 4 * elements as u32;
    }
    let mut out = Vec::new();
    let mut rest = scales;
    for group in offsets.windows(2) {
        let blocks = ((group[1] - group[0]) as usize).div_ceil(elements);
        let (own, next) = rest.split_at(outer * blocks);
        out.extend(swizzle(own, outer, blocks));
        rest = next;
    }
    let tiles = block_group_tiles(tokens, offsets.len() - 1, elements);
    out.resize(outer.div_ceil(128) * tiles * 512, 0);
    (out, starts)
}

/// Inverts [`swizzle_block_groups`]: returns `outer * block_group_blocks(..)` bytes, which are zero
/// after the last group.
///
/// # Panics
/// Panics if `swizzled` does not have the length that [`swizzle_block_groups`] returns.
pub fn unswizzle_block_groups(
    swizzled: &[u8],
    outer: usize,
    tokens: usize,
    elements: usize,
    offsets: &[u32],
) -> Vec<u8> {
    let groups = offsets.len() - 1;
    assert_eq!(
        swizzled.len(),
        outer.div_ceil(128) * block_group_tiles(tokens, groups, elements) * 512,
        "`swizzled` must have the padded length of the groups"
    );
    let mut out = Vec::new();
    let mut rest = swizzled;
    for group in offsets.windows(2) {
        let blocks = ((group[1] - group[0]) as usize).div_ceil(elements);
        let (own, next) = rest.split_at(padded_len(outer, blocks));
        out.extend(unswizzle(own, outer, blocks));
        rest = next;
    }
    out.resize(outer * block_group_blocks(tokens, groups, elements), 0);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Guards against a bug: grouped scales that are swizzled as one matrix have the correct bytes
    /// only if each group is one tile.
    #[test]
    fn tiling_restarts_at_each_group() {
        let scales = |len: usize| -> Vec<u8> { (0..len).map(|i| (i % 126) as u8 + 1).collect() };
        // Rows in multiples of 128: one tiling over all rows equals one tiling per group.
        let bytes = scales(256 * 4);
        let grouped = swizzle_row_groups(&bytes, 256, 4, &[0, 128, 256]).0;
        assert_eq!(grouped[..1024], swizzle(&bytes, 256, 4));
        // They differ if a group ends inside a tile.
        let grouped = swizzle_row_groups(&bytes, 256, 4, &[0, 100, 256]).0;
        assert_ne!(grouped[..1024], swizzle(&bytes, 256, 4));
        // Row 100 is row 0 of the second group.
        assert_eq!(grouped[512..516], bytes[400..404]);

        // Along K, two groups of four blocks over 128 rows: one tile each, so no difference.
        let (first, second) = (scales(512), scales(512));
        let mut joined = vec![0; 1024];
        for row in 0..128 {
            joined[row * 8..][..4].copy_from_slice(&first[row * 4..][..4]);
            joined[row * 8 + 4..][..4].copy_from_slice(&second[row * 4..][..4]);
        }
        let both = [first, second].concat();
        let grouped = swizzle_block_groups(&both, 128, 128, 16, &[0, 64, 128]).0;
        assert_eq!(grouped[..1024], swizzle(&joined, 128, 8));
        // Over 256 rows, the second group starts after all tiles of the first.
        let both = scales(2048);
        let grouped = swizzle_block_groups(&both, 256, 128, 16, &[0, 64, 128]).0;
        assert_eq!(grouped[1024..1028], both[1024..1028]);
        assert_eq!(grouped[..1024], swizzle(&both[..1024], 256, 4));
    }

    #[test]
    fn grouped_round_trips_with_empty_groups() {
        let (rows, blocks) = (300, 5);
        let bytes: Vec<u8> = (0..rows * blocks).map(|i| (i % 126) as u8 + 1).collect();
        for offsets in [
            vec![0, 0, 1, 129, 129, 300, 300],
            vec![0, 300],
            vec![0, 0],
            vec![0, 7, 200],
        ] {
            let (swizzled, padded) = swizzle_row_groups(&bytes, rows, blocks, &offsets);
            let end = *offsets.last().unwrap() as usize;
            let mut expected = bytes.clone();
            expected[end * blocks..].fill(0);
            let found = unswizzle_row_groups(&swizzled, rows, blocks, &offsets);
            assert_eq!(found, expected, "{offsets:?}");
            assert!(*padded.last().unwrap() as usize <= row_group_tiles(rows, 6) * 128);

            let (outer, elements) = (131, 16);
            let in_groups: usize = offsets
                .windows(2)
                .map(|group| ((group[1] - group[0]) as usize).div_ceil(elements))
                .sum();
            let groups = offsets.len() - 1;
            let mut bytes: Vec<u8> = (0..outer * block_group_blocks(rows, groups, elements))
                .map(|i| (i % 126) as u8 + 1)
                .collect();
            let swizzled = swizzle_block_groups(&bytes, outer, rows, elements, &offsets).0;
            let kept = swizzled.iter().filter(|&&byte| byte != 0).count();
            assert_eq!(kept, outer * in_groups, "padding must be zero");
            bytes[outer * in_groups..].fill(0);
            let found = unswizzle_block_groups(&swizzled, outer, rows, elements, &offsets);
            assert_eq!(found, bytes, "{offsets:?}");
        }
        let batch = swizzle_batch(&bytes, 3, 100, 5);
        assert_eq!(batch.len(), 3 * padded_len(100, 5));
        assert_eq!(unswizzle_batch(&batch, 3, 100, 5), bytes);
    }

    #[test]
    fn round_trip_and_zero_padding() {
        for (rows, blocks) in [(1, 1), (128, 4), (129, 5), (300, 7), (0, 3), (256, 8)] {
            let scales: Vec<u8> = (0..rows * blocks).map(|i| (i % 126) as u8 + 1).collect();
            let swizzled = swizzle(&scales, rows, blocks);
            assert_eq!(unswizzle(&swizzled, rows, blocks), scales);
            let kept = swizzled.iter().filter(|&&byte| byte != 0).count();
            assert_eq!(kept, rows * blocks, "padding must be zero");
        }
    }

    #[test]
    fn first_tile_by_hand() {
        // Rows 0, 32, 64 and 96 share the first 16 bytes, four blocks each.
        let order: Vec<usize> = [0, 32, 64, 96]
            .iter()
            .flat_map(|&r| (0..4).map(move |c| offset(r, c, 8)))
            .collect();
        assert_eq!(order, (0..16).collect::<Vec<_>>());
        assert_eq!(offset(0, 4, 8), 512);
        assert_eq!(offset(128, 0, 8), 1024);
    }
}
