//! Fused prologue: a kernel computes a matrix from its inputs and writes it, and may compute its
//! amax values in the same pass.
//!
//! A kernel takes a [`PrologueInputs`] in addition to `x`. Its variant is a comptime choice, so
//! that a kernel that reads a plain matrix contains no code of the others. Values are rounded to
//! the element type of the inputs and packed in words; the rest of the kernel is independent of the
//! prologue.

mod inputs;
mod kernel;
mod source;

pub use inputs::*;
pub use kernel::*;
pub use source::*;
