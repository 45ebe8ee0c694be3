//! Largest magnitudes: of a matrix, of its rows, of its columns, of its groups, before and after
//! the columnwise transform.

mod kernel;
mod launch;

pub use kernel::*;
pub use launch::*;
