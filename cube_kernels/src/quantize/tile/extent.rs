//! How large a tile is.

use crate::{cube::words::block_words, tensor::FloatKind};

/// Rows of a tile.
pub(crate) const ROWS: usize = 128;
/// Words of a tile row.
pub(crate) const WORDS: usize = 64;
/// Columns of a tile.
pub(crate) const fn cols(kind: FloatKind) -> usize {
    WORDS * 4 / kind.size()
}

/// Blocks of a tile row.
pub(crate) const fn row_blocks(kind: FloatKind) -> usize {
    WORDS / block_words(kind)
}

/// Blocks along the rows of a tile.
pub(crate) const fn blocks(kind: FloatKind) -> usize {
    ROWS * row_blocks(kind)
}
