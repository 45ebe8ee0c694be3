//! Test support for all packages: golden checkpoints, and the reasons for which a test may skip
//! itself. `cargo xtask test` reads the lines that this crate prints.

mod golden;
mod skip;

pub use golden::{Scratch, golden, golden_with_tokenizer};
pub use skip::{Elsewhere, Skip, is_full, test_name};
