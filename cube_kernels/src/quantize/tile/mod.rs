//! Tiles of 128 rows and 64 words (128 columns of 16 bits, or 64 of 32) in shared memory, for
//! kernels that read columns: positions, loads and reads.
//!
//! A cube loads a tile with wide, coalesced loads; its units then read rows or columns of it. The
//! row pitch is an odd multiple of four words, so that vectors of four words of neighbouring rows
//! are in different banks. Every 16 rows, four more words are inserted ([`word_at()`]), so that
//! this also holds for the 16-row blocks of a column. Reads down columns take neighbouring words of
//! one row.

mod data;
mod extent;
mod grid;

pub use data::*;
pub(crate) use extent::*;
pub use grid::*;
