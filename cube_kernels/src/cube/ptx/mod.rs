//! PTX instructions, one wrapper each, by instruction family. A wrapper has the name of its
//! instruction and states its section of the PTX ISA, its PTX version and its minimum target.
//!
//! `gpu_asm!` only exists on the CUDA C++ path, so each function here must be guarded by a comptime
//! choice that depends on the device. Shared memory is addressed by its 32-bit address in the
//! shared window ([`cvta_to_shared()`]), device memory by its 64-bit address in the global one
//! ([`cvta_to_global()`]).
//!
//! A mutable variable reaches an asm block as a pointer, and so does the result of another block:
//! operands and results go through `reinterpret`, which turns them into new values.
//!
//! Sequences of several instructions for one computation (conversions of whole words of codes, for
//! example) are in the modules that explain them: [`codec`](super::codec) and
//! [`exact`](super::exact). The `wgmma` mainloops are one asm block each, because accumulators may
//! not leave a block while instructions are in flight: [`sm90_mainloop`], [`sm90_mainloop_w4a16`]
//! and [`sm90_mainloop_w4a16_mn_major`].
//! and [`sm90_mainloop_w4a16_mn_major`].

mod arith;
mod async_copy;
mod bar;
mod cluster;
mod cvt;
mod cvta;
mod descriptor;
mod griddepcontrol;
mod ldst;
mod mbarrier;
mod mma;
mod permute;
mod setmaxnreg;
pub mod sm90_mainloop;
pub mod sm90_mainloop_w4a16;
pub mod sm90_mainloop_w4a16_mn_major;
mod suspend;
mod tcgen05;
mod wgmma;
mod wgmma_gemm;

pub use arith::*;
pub use async_copy::*;
pub use bar::*;
pub use cluster::*;
pub use cvt::*;
pub use cvta::*;
pub use descriptor::*;
pub use griddepcontrol::*;
pub use ldst::*;
pub use mbarrier::*;
pub use mma::*;
pub use permute::*;
pub use setmaxnreg::*;
pub use suspend::*;
pub use tcgen05::*;
pub use wgmma::*;
pub use wgmma_gemm::*;
