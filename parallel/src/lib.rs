//! Process groups for training one model on several devices, with one process per device.
//! Independent of Burn.
//!
//! - [`environment`] reads the rank and the address of rank 0 that a launcher has set: this
//!   project's own launcher ([`launch`]), torchrun, Open MPI, PMI, Slurm or Kubernetes.
//! - [`layout`] numbers the ranks of data, tensor, expert and pipeline parallelism.
//! - [`store`] is the rendezvous: a small server on rank 0 with a shared token, through which ranks
//!   find each other, and which notices when one of them dies or hangs.
//! - [`watchdog`] is the client side of that, in each process.
//! - [`collective`] contains the operations: [`Collective`] is implemented over host memory by
//!   [`HostGroup`], between threads ([`loopback`]) or between processes over TCP ([`tcp`]).
//! - [`meter`] measures the time that a rank waits in collectives.
//! - `nccl` (feature `cuda`) contains the same operations on the memory of NVIDIA GPUs.
//! - [`world`] combines all of these in one call per process.
//! - [`launch`] starts the processes on one machine.
//!
//! ```
//! use nvfp4_parallel::{BufferMut, Collective, Reduction, loopback};
//!
//! let ranks = loopback::groups(2, std::time::Duration::from_secs(5));
//! let sums = loopback::run(ranks, |group| {
//!     let mut values = [1.0f32, group.rank() as f32];
//!     group.all_reduce(BufferMut::F32(&mut values), Reduction::Sum)?;
//!     Ok(values)
//! });
//! assert!(sums.into_iter().all(|sum| sum.unwrap() == [2.0, 1.0]));
//! ```
//!
//! # Order of reductions
//!
//! Reductions over host memory always add in rank order, in `f32`, and round once to the dtype of
//! the buffer. They have the same bits on all ranks and in every run. NCCL chooses its order by
//! topology and size.

pub mod buffer;
pub mod call;
pub mod collective;
pub mod environment;
pub mod error;
pub mod launch;
pub mod layout;
pub mod loopback;
pub mod meter;
#[cfg(feature = "cuda")]
pub mod nccl;
pub mod store;
pub mod tcp;
pub mod token;
pub mod watchdog;
pub mod world;

mod activity;
mod inbox;
mod reduction;
mod wire;

pub use buffer::{Buffer, BufferMut, DType, Element};
pub use call::{Call, Operation};
pub use collective::{Collective, HostGroup};
pub use environment::Environment;
pub use error::{Failure, ParallelError, Result};
pub use layout::{Axis, Layout};
pub use meter::{DeviceSpan, Meter};
pub use reduction::Reduction;
pub use world::World;
