//! Helpers shared by the modules of the suite.

pub mod inputs;
pub mod literal;
