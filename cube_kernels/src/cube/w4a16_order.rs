//! Order of columns in which the Hopper W4A16 kernel reads a bf16 `a`: the order in which lanes
//! hold the codes of `b`, so that a lane needs one scale per sixteen codes.
//!
//! Columns are permuted within spans of [`SPAN`]. Vector `8 h + 4 w + j` of a span has eight
//! elements: for `q` from 0 to 3 the columns `c + j` and `c + j + 4` with `c = 32 q + 16 h + 8 w`.
//! Its pair `q` belongs to word `4 q + 2 h + w` (eight columns) of the span.

use cubecl::prelude::*;

/// Columns that are permuted together.
pub const SPAN: usize = 128;

/// Vectors of eight elements per span, and words of eight columns per span.
pub const VECTORS: usize = SPAN / 8;

/// Returns the word of eight columns whose elements `vector % 4` and `vector % 4 + 4` are pair
/// `pair` of vector `vector`. Both are numbered within a span, or both within a row.
#[cube]
pub fn word_of(vector: u32, #[comptime] pair: u32) -> u32 {
    let span = vector & comptime!(!(VECTORS as u32 - 1));
    span + comptime!(4 * pair) + (vector / 8u32 % 2u32) * 2u32 + vector / 4u32 % 2u32
}
