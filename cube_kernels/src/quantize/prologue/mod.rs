//! Fused prologue: the input of a quantization kernel may be computed while it is loaded, and is
//! then never written to memory.
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
