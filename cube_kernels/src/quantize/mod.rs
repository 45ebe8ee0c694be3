//! Quantization to NVFP4 and MX formats, amax values, and dequantization.
//!
//! A [`Quantize`] request is complete when it is built. [`Quantize::launch`] checks it, chooses the
//! kernels and queues them, in this order.
//! [`Quantize::launch_amax`] computes only the amax values. Launches allocate their output, queue
//! the kernels and return without waiting; nothing is read back. All kernels use 64-bit indices if a
//! tensor requires them, and support any number of units per cube.
//!
//! Modules, bottom up:
//!
//! - `target`, `source`, `step`: the parts of requests and plans.
//! - `tile`, `scale_table`, `prologue` and others: the building blocks of kernels.
//! - `amax`, `rowwise`, `per_token`, `tiles` (with `columnwise` and `block_2d`), `ms_eden`, `mx`: the
//!   kernels and their launches.
//! - `check`, `planner`, `launch`, `request`: the request, the choice of its kernels, and their
//!   launch.
//! - `describe`: the kernels of a device, for `nvfp4 doctor`.

// `#[cube]` generates public items that cannot carry documentation.
#[allow(missing_docs)]
pub(crate) mod amax;
#[allow(missing_docs)]
mod block_2d;
mod check;
#[allow(missing_docs)]
mod columnwise;
#[allow(missing_docs)]
mod dequantize;
mod describe;
#[cfg(feature = "proof")]
pub(crate) mod instances;
mod launch;
#[allow(missing_docs)]
mod ms_eden;
#[allow(missing_docs)]
mod mx;
#[allow(missing_docs)]
mod offset;
#[allow(missing_docs)]
mod packed_source;
#[allow(missing_docs)]
mod per_token;
#[allow(missing_docs)]
// `#[cube]` expands `match` over enums of buffers, not `if let`.
#[allow(clippy::single_match)]
pub(crate) mod plan;
mod planner;
#[allow(missing_docs)]
pub(crate) mod prologue;
#[cfg(feature = "proof")]
pub mod proof;
mod request;
#[allow(missing_docs)]
mod rowwise;
mod scale_order;
#[allow(missing_docs)]
mod scale_table;
mod source;
mod step;
#[allow(missing_docs)]
mod swizzle;
mod target;
#[allow(missing_docs)]
pub(crate) mod tile;
#[allow(missing_docs)]
mod tile_memory;
#[allow(missing_docs)]
mod tiles;

pub use amax::{AmaxRequest, Amaxes};
pub use dequantize::dequantize;
pub use describe::describe;
pub use offset::advance_offset;
pub use request::{Quantize, Quantized};
pub use scale_order::in_form;
pub use source::Source;
pub use step::Operation;
pub(crate) use swizzle::{
    swizzle, swizzle_batch, swizzle_row_groups, unswizzle, unswizzle_batch, unswizzle_row_groups,
};
pub use target::TargetSpec;
