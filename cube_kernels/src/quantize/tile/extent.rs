//! Dimensions of a tile.

use crate::{cube::words::block_words, tensor::FloatKind};

/// Rows per tile.
pub(crate) const ROWS: usize = 128;
/// Words per tile row.
pub(crate) const WORDS: usize = 64;
/// Returns the columns per tile.
pub(crate) const fn cols(kind: FloatKind) -> usize {
    WORDS * 4 / kind.size()
}

/// Returns the blocks per tile row.
pub(crate) const fn row_blocks(kind: FloatKind) -> usize {
    WORDS / block_words(kind)
}

/// Returns the number of blocks along the rows of a tile.
pub(crate) const fn blocks(kind: FloatKind) -> usize {
    ROWS * row_blocks(kind)
}
