//! The block-scaled GEMM of data-center Blackwell (sm_100, sm_103), `sm100_block_scaled`:
//! `tcgen05.mma` directly on codes and block scales of NVFP4 (`kind::mxf4nvf4`, an E4M3 scale per
//! 16 elements) or MXFP8 (`kind::mxf8f6f4`, a UE8M0 scale per 32).
//!
//! **It has never run on hardware**, because no such GPU was available. Its machine code was
//! inspected. With [`TensorCore::Software`](tile::TensorCore::Software) all of its forms run on
//! Hopper, bit-identical to the scalar kernel. Dispatch asks it first on these GPUs; a self-check
//! on the device decides if it may be a default, and [`bring_up`](crate::bring_up) reports on
//! it.
//!
//! | file | content |
//! |---|---|
//! | `launch` | choice, tensor maps and launch |
//! | `cta` | the kernel: shared memory, barriers, tensor memory, epilogue warps |
//! | `roles` | the threads that load stages and issue instructions |
//! | `tile` | tile shapes; executor of the instructions, with the faults that tests inject |
//! | `stage`, `operands` | state of a CTA; layout of a stage |
//! | `output` | epilogue |
//! | `commands`, `engine` | interface to the tensor core; its software model, for tests and `nvfp4 dev oracle` on other devices |
//! | `probe` | single instructions, for bring-up |
//!
//! # Design
//!
//! A CTA has six warps. Four run the epilogue, with a lane of tensor memory per thread. One thread
//! of the fifth warp issues the instructions. One thread of the sixth is the TMA producer of a
//! multi-stage pipeline. A stage has 128 bytes of each of 128 rows of `a` and 256 of `b`, which are
//! 256 columns of NVFP4 or 128 of MXFP8, with their scales in 128x4 tiles of 512 bytes.
//!
//! For large M two CTAs of a cluster share a tile of 256 x 256
//! ([`Sm100Form::TwoCta`]). One thread of the even CTA issues the
//! instructions, which read the shared memory and write the tensor memory of both. Each CTA loads
//! 128 rows of `a` and 128 of `b`, 38,912 bytes per stage with the scales instead of 55,296, and
//! applies the epilogue to its 128 rows of the output.
//!
//! For small M the operands are swapped, as in CUTLASS and DeepGEMM ("swap A and B"): 128 rows of
//! `b` are the lanes, and up to 64 rows of `a` the columns, of which an instruction multiplies only
//! the existing ones, in steps of eight. More CTAs then read the weights, and no missing rows are
//! multiplied. The epilogue transposes.
//!
//! | barrier | arrivals of a phase | completes when |
//! |---|---|---|
//! | full, per stage | the TMA thread, and the bytes | the stage has arrived |
//! | empty, per stage | `tcgen05.commit` | its instructions have completed |
//! | accumulators full | `tcgen05.commit` | the tile has been multiplied |
//! | accumulators empty | 128 | the epilogue has read them |
//!
//! In a pair of CTAs only the even one waits for full stages and empty accumulators: the bytes and
//! the epilogues of both arrive at its barriers. Its commits arrive at the barriers of both.
//!
//! Each stage has separate columns of tensor memory for scales: the PTX ISA orders `tcgen05.cp`
//! before a later `tcgen05.mma`, but not after an earlier one.
//!
//! Rows of a tile that belong to another group are multiplied but not written, so that one tensor
//! map serves all groups. Scales start anew at each group.
//!
//! Groups along K begin at multiples of an instruction, 64 columns of NVFP4 or 32 of MXFP8, so that
//! the scales of all groups form one matrix of tiles. The last stage of a group may contain columns
//! of the next group. In MXFP8 the first stage may also contain columns of the previous group,
//! since a tile has the scales of 128 columns. No instruction multiplies them. For an empty group,
//! which has no stage, the epilogue writes zeros.

pub(crate) mod commands;
pub(crate) mod cta;
pub mod engine;
mod launch;
pub mod operands;
mod output;
pub mod probe;
mod roles;
pub(crate) mod stage;
pub(crate) mod tile;

pub(crate) use launch::Sm100BlockScaled;
pub use launch::Tcgen05;
pub use tile::{Sm100Form, Sm100Tile};
