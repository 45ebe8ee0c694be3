//! Differentiable collectives. Each defines an operation on a tensor in the forward and one on its
//! gradient in the backward. Megatron calls the first four f, g, g with sequence parallelism, and f
//! with sequence parallelism.
//!
//! | function | forward | backward | between |
//! |---|---|---|---|
//! | [`copy`] | identity | sum | replicated input, sharded layers |
//! | [`reduce`] | sum | identity | partial sums, replicated output |
//! | [`reduce_scatter`] | reduce-scatter | gather | partial sums, output sharded by rows |
//! | [`gather_sum`] | gather | reduce-scatter (sum) | sharded input, sharded layers |
//! | [`gather_mean`] | gather | reduce-scatter (mean) | sharded weight, sharded batch |
//! | [`gather`] | gather | slice | shards, a tensor that all ranks use in the same way |
//! | [`scatter`] | slice | gather | replicated tensor, its shards |
//! | [`all_reduce`] | sum | sum | summands, a sum from which each rank computes a separate loss |
//! | [`all_to_all`] | rows to other ranks | rows back | tokens, their experts |
//!
//! # Panics
//! All functions panic if the group fails or a shape does not fit; the message names the shape. For
//! a group of one rank they return their argument.

use burn_core::backend::Dispatch;
use burn_core::tensor::Tensor;
use nvfp4_formats::Nvfp4Error;
use nvfp4_parallel::Reduction;

use super::ProcessGroup;
use crate::ops::collective::{CollectiveOps, Exchange, Step};

/// Operations on a tensor in the forward and on its gradient in the backward.
#[derive(Clone, Debug)]
pub(crate) struct Steps([Step; 2]);

impl Steps {
    /// Steps of [`reduce_scatter`] along the first axis.
    pub fn reduce_scatter() -> Self {
        Self([Step::ReduceScatter(Reduction::Sum), Step::AllGather])
    }

    /// Steps of [`gather_sum`] along the first axis.
    pub fn gather_sum() -> Self {
        Self([Step::AllGather, Step::ReduceScatter(Reduction::Sum)])
    }

    /// Steps of [`all_to_all`].
    pub fn all_to_all(send: &[usize], receive: &[usize]) -> Self {
        let step = |send: &[usize], receive: &[usize]| Step::AllToAll {
            send: send.into(),
            receive: receive.into(),
        };
        Self([step(send, receive), step(receive, send)])
    }

    /// Returns the exchange of `group` with these steps.
    pub fn exchange(self, group: &ProcessGroup) -> Exchange {
        let [forward, backward] = self.0;
        Exchange::new(group.link(), forward, backward)
    }
}

/// Returns `x`, which is replicated on all ranks; its gradient is summed over all ranks.
pub fn copy<const D: usize>(x: Tensor<D>, group: &ProcessGroup) -> Tensor<D> {
    let sum = Step::AllReduce(Reduction::Sum);
    exchange(x, group, Steps([Step::Identity, sum]))
}

/// Version of [`copy`] for a parameter, whose gradients are summed in the [dtype for parameter
/// gradients](ProcessGroup::with_reduce_dtype).
pub(crate) fn copy_parameter<const D: usize>(x: Tensor<D>, group: &ProcessGroup) -> Tensor<D> {
    if group.size() == 1 {
        return x;
    }
    let sum = Step::AllReduce(Reduction::Sum);
    let exchange = Steps([Step::Identity, sum]).exchange(group);
    let exchange = exchange.reducing_in(group.reduce_dtype());
    Tensor::from_dispatch(Dispatch::nvfp4_exchange(x.into_dispatch(), exchange))
}

/// Sums `x` over all ranks; the gradient of each summand is that of the sum.
pub fn reduce<const D: usize>(x: Tensor<D>, group: &ProcessGroup) -> Tensor<D> {
    let sum = Step::AllReduce(Reduction::Sum);
    exchange(x, group, Steps([sum, Step::Identity]))
}

/// Sums `x` over all ranks and returns shard `rank` along axis `dim`; the gradient is gathered from
/// all ranks.
pub fn reduce_scatter<const D: usize>(x: Tensor<D>, dim: usize, group: &ProcessGroup) -> Tensor<D> {
    check(&x, dim, group);
    along(x, dim, |x| exchange(x, group, Steps::reduce_scatter()))
}

/// Gathers the shards of all ranks along axis `dim`, for layers with sharded weights: the gradient
/// is this rank's shard of the sum of all ranks' gradients.
pub fn gather_sum<const D: usize>(x: Tensor<D>, dim: usize, group: &ProcessGroup) -> Tensor<D> {
    along(x, dim, |x| exchange(x, group, Steps::gather_sum()))
}

/// Gathers the shards of all ranks along the first axis, for ranks that each have a shard of the
/// batch: the gradient is this rank's shard of the mean of all ranks' gradients.
pub fn gather_mean<const D: usize>(x: Tensor<D>, group: &ProcessGroup) -> Tensor<D> {
    let mean = Step::ReduceScatter(Reduction::Avg);
    exchange(x, group, Steps([Step::AllGather, mean]))
}

/// Version of [`gather_mean`] for the parameter `id`, whose gradient is reduced by `reduction`,
/// concurrently with the rest of the backward.
pub(super) fn gather_beside<const D: usize>(
    x: Tensor<D>,
    group: &ProcessGroup,
    (id, reduction): (u64, Reduction),
) -> Tensor<D> {
    let reduced = Step::ReduceScatter(reduction);
    exchange_beside(x, group, Steps([Step::AllGather, reduced]), id)
}

/// Returns `x`, the parameter `id`, for ranks that each have a shard of the batch: its gradient is
/// reduced over all ranks by `reduction`, concurrently with the rest of the backward.
pub(super) fn copy_beside<const D: usize>(
    x: Tensor<D>,
    group: &ProcessGroup,
    (id, reduction): (u64, Reduction),
) -> Tensor<D> {
    let reduced = Step::AllReduce(reduction);
    exchange_beside(x, group, Steps([Step::Identity, reduced]), id)
}

/// Gathers the shards of all ranks along axis `dim`, for a result that all ranks use in the same
/// way: the gradient is this rank's shard of its own gradient.
pub fn gather<const D: usize>(x: Tensor<D>, dim: usize, group: &ProcessGroup) -> Tensor<D> {
    along(x, dim, |x| {
        exchange(x, group, Steps([Step::AllGather, Step::Slice]))
    })
}

/// Returns shard `rank` along axis `dim` of `x`, which is replicated on all ranks; the gradient is
/// gathered from all ranks.
pub fn scatter<const D: usize>(x: Tensor<D>, dim: usize, group: &ProcessGroup) -> Tensor<D> {
    check(&x, dim, group);
    along(x, dim, |x| {
        exchange(x, group, Steps([Step::Slice, Step::AllGather]))
    })
}

/// Sums `x` over all ranks, where each rank computes a separate loss from the sum: the gradient is
/// the sum of all ranks' gradients, which is that of the sum of their losses.
pub fn all_reduce<const D: usize>(x: Tensor<D>, group: &ProcessGroup) -> Tensor<D> {
    let sum = Step::AllReduce(Reduction::Sum);
    exchange(x, group, Steps([sum.clone(), sum]))
}

/// Sends `send[r]` rows of `x` to each rank `r`, and receives `receive[r]` rows from it. Returns
/// all received rows in rank order. Gradients are sent back the same way.
///
/// # Panics
/// If the counts do not match `x`, the number of ranks or the counts of another rank.
pub fn all_to_all<const D: usize>(
    x: Tensor<D>,
    send: &[usize],
    receive: &[usize],
    group: &ProcessGroup,
) -> Tensor<D> {
    exchange(x, group, Steps::all_to_all(send, receive))
}

fn along<const D: usize>(
    x: Tensor<D>,
    dim: usize,
    exchange: impl FnOnce(Tensor<D>) -> Tensor<D>,
) -> Tensor<D> {
    match dim {
        0 => exchange(x),
        dim => exchange(x.swap_dims(0, dim)).swap_dims(0, dim),
    }
}

fn check<const D: usize>(x: &Tensor<D>, dim: usize, group: &ProcessGroup) {
    let fits: Result<(), Nvfp4Error> = group.check_parts("x", x.dims()[dim]);
    fits.unwrap_or_else(|error| panic!("{error}"));
}

/// Applies the first of `steps` to `x`, serialized with kernels; the second step applies to its
/// gradient.
pub(super) fn exchange<const D: usize>(
    x: Tensor<D>,
    group: &ProcessGroup,
    steps: Steps,
) -> Tensor<D> {
    if group.size() == 1 {
        return x;
    }
    let exchange = steps.exchange(group);
    Tensor::from_dispatch(Dispatch::nvfp4_exchange(x.into_dispatch(), exchange))
}

fn exchange_beside<const D: usize>(
    x: Tensor<D>,
    group: &ProcessGroup,
    steps: Steps,
    id: u64,
) -> Tensor<D> {
    let exchange = Exchange {
        beside: Some(id),
        ..steps.exchange(group).reducing_in(group.reduce_dtype())
    };
    Tensor::from_dispatch(Dispatch::nvfp4_exchange(x.into_dispatch(), exchange))
}
