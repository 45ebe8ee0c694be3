//! The order of columns in which the W4A16 kernel of Hopper reads a bf16 `a`: that in which lanes
//! hold the codes of `b`, so that a lane needs one scale for sixteen codes.
//!
//! Columns change their places within spans of [`SPAN`]. Vector `8 h + 4 w + j` of a span, eight
//! elements, holds for `q` from 0 to 3 the columns `c + j` and `c + j + 4` with
//! `c = 32 q + 16 h + 8 w`: its pair `q` is of word `4 q + 2 h + w`, eight columns, of the span.

use cubecl::prelude::*;

/// Columns that the order changes together.
pub const SPAN: usize = 128;

/// Vectors of eight elements of a span, and words of eight columns.
pub const VECTORS: usize = SPAN / 8;

/// The word of eight columns of which vector `vector` has elements `vector % 4` and
/// `vector % 4 + 4` as its pair `pair`. Both are numbered within a span, or both within a row.
#[cube]
pub fn word_of(vector: u32, #[comptime] pair: u32) -> u32 {
    let span = vector & comptime!(!(VECTORS as u32 - 1));
    span + comptime!(4 * pair) + (vector / 8u32 % 2u32) * 2u32 + vector / 4u32 % 2u32
}
