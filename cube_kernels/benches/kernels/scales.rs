//! Conversion of block scales to the 128x4 tiles of FP4 tensor cores, and back. Bytes are those of
//! the scales, without padding.

use cubecl::{prelude::*, server::Handle};
use nvfp4_formats::BLOCK;
use nvfp4_kernels::quantize::proof as quantize;

use crate::{
    harness::Section,
    inputs::{Rotated, bytes, equal_groups},
};

/// Times the copy of as many bytes as the scales of `elements` elements.
pub fn copy(section: &mut Section<'_>, elements: usize) {
    let len = elements / BLOCK;
    let client = section.client();
    let scales = bytes(&client, len);
    section.copy(len, |i| &scales[i]);
}

/// Times `count` matrices of `rows` x `cols` values.
pub fn batch(section: &mut Section<'_>, count: usize, (rows, cols): (usize, usize)) {
    let blocks = cols / BLOCK;
    both(
        section,
        "",
        count * rows * blocks,
        |client, scales| quantize::swizzle_batch(client, scales, count, rows, blocks).unwrap(),
        |client, tiles| quantize::unswizzle_batch(client, tiles, count, rows, blocks).unwrap(),
    );
}

/// Times `tokens` tokens of `cols` values in `count` groups.
pub fn grouped(section: &mut Section<'_>, (tokens, cols): (usize, usize), count: usize) {
    let groups = &equal_groups(&section.client(), tokens, count);
    let blocks = cols / BLOCK;
    both(
        section,
        &format!(", {count} groups of rows"),
        tokens * blocks,
        |client, scales| {
            let swizzled = quantize::swizzle_row_groups(client, scales, tokens, blocks, groups);
            swizzled.unwrap().0
        },
        |client, tiles| {
            quantize::unswizzle_row_groups(client, tiles, tokens, blocks, groups).unwrap()
        },
    );
}

/// Times both directions, for `len` bytes of scales.
fn both(
    section: &mut Section<'_>,
    name: &str,
    len: usize,
    into: impl Fn(&Client, &Handle) -> Handle,
    back: impl Fn(&Client, &Handle) -> Handle,
) {
    let client = section.client();
    let scales = bytes(&client, len.next_multiple_of(4));
    section.time(&format!("swizzle{name}"), 2.0 * len as f64, |i| {
        into(&client, &scales[i]);
    });
    let tiles = Rotated::new(len as f64, |i| into(&client, &scales[i]));
    section.time(&format!("unswizzle{name}"), 2.0 * len as f64, |i| {
        back(&client, &tiles[i]);
    });
}
