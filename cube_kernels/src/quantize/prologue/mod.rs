//! The fused prologue: a kernel writes a matrix that it computes from its inputs, and may find the
//! amax values of it in the same pass.
//!
//! A kernel takes a [`PrologueInputs`] beside `x`. Its variant is a comptime choice, so that a
//! kernel that reads a plain matrix has nothing of the others in it. Values are rounded to the
//! element type of the inputs, packed in words, and from there on the kernel is the same.

mod inputs;
mod kernel;
mod source;

pub use inputs::*;
pub use kernel::*;
pub use source::*;
