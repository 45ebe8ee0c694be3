//! Multi-rank training: process groups, and parallel operations on tensors.
//!
//! - [`ProcessGroup`] is a rank's handle of a group, with collectives on tensors.
//! - [`functions`] are differentiable collectives, the building blocks of parallel layers.
//! - [`average_gradients`] is data parallelism: the model is replicated, and each rank has a shard
//!   of the batch. [`average_in_backward`] overlaps most of it with the backward.
//!   [`average_expert_gradients`] and [`average_replicated_in_backward`] are the versions for
//!   models with experts sharded over ranks.
//! - [`fully_shard`] is FSDP: each rank also has a shard of each parameter. [`Shards`] tells an
//!   optimizer which parameters are sharded. [`fully_shard_experts`] and
//!   [`reduce_expert_gradients`] are the versions for models with experts sharded over ranks, and
//!   [`SplitParameters`] describes the parameters that tensor or expert parallelism has split
//!   before.
//! - [`Overlap`] selects the exchanges between GPUs that run concurrently with kernels.
//! - [`CommunicationMeter`] measures exposed communication.
//! - [`try_quantize_all_gather`] all-gathers tensors as 4-bit codes.

pub mod functions;

mod buckets;
mod distributed;
mod gradients;
mod group;
mod meter;
mod overlapped;
mod pending;
mod quantized;
mod reparameterizations;
mod sharded;
mod shards;

pub use crate::ops::collective::{Overlap, ReduceDtype};
pub(crate) use distributed::warn_of_distributed_weight;
pub use gradients::{
    average_expert_gradients, average_gradients, broadcast, reduce_expert_gradients,
    reduce_gradients,
};
pub use group::ProcessGroup;
pub use meter::{CommunicationMeter, ExposedCommunication};
pub(crate) use overlapped::reduce_dtype_of;
pub use overlapped::{SMALLEST_ALONE, average_in_backward, average_replicated_in_backward};
pub(crate) use pending::Pending;
pub use quantized::try_quantize_all_gather;
pub use reparameterizations::{Averaged, Sharded};
pub use sharded::{fully_shard, fully_shard_experts, gather};
pub(crate) use sharded::{is_shardable, is_sharded, part};
pub use shards::{ExpertGroups, RankLoss, Shards, SplitParameters};
