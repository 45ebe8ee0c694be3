//! The 128x4 scale layout of FP4 tensor cores.
//!
//! The byte of outer row `r` and block `c` stands at
//! `((r/128 · ceil(C/4) + c/4) · 32 + r%32) · 16 + (r%128)/32 · 4 + c%4`, `C` being the number of
//! blocks in a row. Rows pad to 128 and blocks to 4; padding bytes are zero.

/// Where the scale of row `row` and block `block` stands, with `blocks` blocks in a row.
#[inline]
pub const fn offset(row: usize, block: usize, blocks: usize) -> usize {
    let tile = row / 128 * blocks.div_ceil(4) + block / 4;
    (tile * 32 + row % 32) * 16 + (row % 128) / 32 * 4 + block % 4
}

/// Bytes of the swizzled layout of `rows` x `blocks` scales, padding included.
pub const fn padded_len(rows: usize, blocks: usize) -> usize {
    rows.div_ceil(128) * 128 * blocks.div_ceil(4) * 4
}

/// Compact `[rows, blocks]` scales in the swizzled layout.
///
/// # Panics
/// When `scales` does not hold `rows * blocks` bytes.
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

/// The inverse of [`swizzle`]; padding is dropped.
///
/// # Panics
/// When `swizzled` does not have the padded length.
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

#[cfg(test)]
mod tests {
    use super::*;

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
