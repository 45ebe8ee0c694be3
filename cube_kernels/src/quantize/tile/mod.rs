//! Tiles of 128 rows and 64 words (128 columns of 16 bits, or 64 of 32) in shared memory: how
//! kernels that read columns find, load and read them.
//!
//! A cube loads a tile with wide, coalesced loads; its units then read rows or columns of it. Rows
//! lie an odd multiple of four words apart, so that vectors of four words of neighbouring rows lie
//! in different banks; every 16 rows four words more ([`word_at()`]), so that the 16-row blocks of
//! a column do, too. Reads down columns take neighbouring words of one row.

mod data;
mod extent;
mod grid;

pub use data::*;
pub(crate) use extent::*;
pub use grid::*;
