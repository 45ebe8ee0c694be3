//! MS-EDEN: rotates a matrix, or the dequantized NVFP4 operand of a forward GEMM, and quantizes it
//! without bias along either axis.
//!
//! The results match [`reference::ms_eden`](crate::reference::ms_eden) (specification, section 9)
//! byte for byte. There are two kernels: one computes the amax of the rotated values, the other
//! rotates again and quantizes; no intermediate result is in memory. For a matrix that is needed
//! along and across its rows, a third kernel runs first and rules out nearly all tiles; a fourth
//! computes both amax values in the remaining ones.

pub(super) mod arguments;
mod cube_tile;
pub(super) mod kernel;
mod launch;
mod packed;
mod plane_exchange;
mod plane_result;
mod plane_tile;
pub(super) mod position;
mod result;
pub(super) mod screen;
pub(super) mod search;
mod transform;

pub(super) use launch::*;
pub(super) use screen::can_screen;
pub use transform::*;
