//! Modules.

mod linear;

pub use linear::{Nvfp4Linear, Nvfp4LinearConfig};
