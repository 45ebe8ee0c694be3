//! Training by several ranks: groups of them, and what they do with tensors together.
//!
//! - [`ProcessGroup`] is a rank's end of a group, with collectives on tensors.
//! - [`functions`] are collectives that autodiff differentiates, of which parallel layers are made.
//! - [`average_gradients`] is data parallelism: all ranks have the model, and a part of the batch.
//!   [`average_in_backward`] has most of it happen while the backward goes on.
//!   [`average_expert_gradients`] and [`average_replicated_in_backward`] are the same for models with
//!   experts on several ranks.
//! - [`fully_shard`] is FSDP: each rank has a part of each parameter, too. [`Shards`] tells an
//!   optimizer which ones. [`fully_shard_experts`] and [`reduce_expert_gradients`] are the same for
//!   models with experts on several ranks, and [`SplitParameters`] says what tensor or expert
//!   parallelism has split before.
//! - [`Overlap`] says what GPUs exchange beside kernels.
//! - [`CommunicationMeter`] measures what communication compute does not hide.
//! - [`try_quantize_all_gather`] sends 4-bit codes between ranks.

pub mod functions;

mod buckets;
mod distributed;
mod gradients;
mod group;
mod meter;
mod overlapped;
mod pending;
mod quantized;
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
pub use overlapped::{
    Averaged, SMALLEST_ALONE, average_in_backward, average_replicated_in_backward,
};
pub(crate) use pending::Pending;
pub use quantized::try_quantize_all_gather;
pub use sharded::{Sharded, fully_shard, fully_shard_experts, gather};
pub(crate) use sharded::{is_shardable, is_sharded, part, whole_dims};
pub use shards::{ExpertGroups, RankLoss, Shards, SplitParameters};
