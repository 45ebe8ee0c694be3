//! Collectives that autodiff differentiates: each names what happens to a tensor in the forward and
//! to its gradient in the backward. Megatron's names of the first four are f, g, g with sequence
//! parallelism, and f with sequence parallelism.
//!
//! | function | forward | backward | between |
//! |---|---|---|---|
//! | [`copy`] | nothing | sum | an input that all ranks have, and layers with parts of the weights |
//! | [`reduce`] | sum | nothing | partial sums, and an output that all ranks have |
//! | [`reduce_scatter`] | sum, part of it | gather | partial sums, and parts of the output's rows |
//! | [`gather_sum`] | gather | sum, part of it | parts of an input, and layers with parts of the weights |
//! | [`gather_mean`] | gather | mean, part of it | parts of a weight, and parts of the batch |
//! | [`gather`] | gather | part | parts, and a tensor with which all ranks do the same |
//! | [`scatter`] | part | gather | a tensor that all ranks have, and parts of it |
//! | [`all_reduce`] | sum | sum | shares of something in which each rank has a loss of its own |
//! | [`all_to_all`] | rows to other ranks | rows back | tokens, and their experts |
//!
//! # Panics
//! All functions do when the group fails, and where a shape does not fit; the message names it. For
//! a group of one rank they return their argument.

use burn_core::backend::Dispatch;
use burn_core::tensor::Tensor;
use nvfp4_kernels::Nvfp4Error;
use nvfp4_parallel::Reduction;

use super::ProcessGroup;
use crate::ops::collective::{CollectiveOps, Exchange, Step};

/// What happens to a tensor in the forward, and to its gradient in the backward.
#[derive(Clone, Debug)]
pub(crate) struct Steps([Step; 2]);

impl Steps {
    /// Those of [`reduce_scatter`] along the first axis.
    pub fn reduce_scatter() -> Self {
        Self([Step::ReduceScatter(Reduction::Sum), Step::AllGather])
    }

    /// Those of [`gather_sum`] along the first axis.
    pub fn gather_sum() -> Self {
        Self([Step::AllGather, Step::ReduceScatter(Reduction::Sum)])
    }

    /// Those of [`all_to_all`].
    pub fn all_to_all(send: &[usize], receive: &[usize]) -> Self {
        let step = |send: &[usize], receive: &[usize]| Step::AllToAll {
            send: send.into(),
            receive: receive.into(),
        };
        Self([step(send, receive), step(receive, send)])
    }

    /// The exchange of `group` that has them.
    pub fn exchange(self, group: &ProcessGroup) -> Exchange {
        let [forward, backward] = self.0;
        Exchange::new(group.link(), forward, backward)
    }
}

/// `x`, which all ranks have; its gradient is the sum of all ranks' gradients.
pub fn copy<const D: usize>(x: Tensor<D>, group: &ProcessGroup) -> Tensor<D> {
    let sum = Step::AllReduce(Reduction::Sum);
    exchange(x, group, Steps([Step::Identity, sum]))
}

/// [`copy`] of a parameter, whose gradients are added up in the [type for
/// them](ProcessGroup::with_reduce_dtype).
pub(crate) fn copy_parameter<const D: usize>(x: Tensor<D>, group: &ProcessGroup) -> Tensor<D> {
    if group.size() == 1 {
        return x;
    }
    let sum = Step::AllReduce(Reduction::Sum);
    let exchange = Steps([Step::Identity, sum]).exchange(group);
    let exchange = exchange.reducing_in(group.reduce_dtype());
    Tensor::from_dispatch(Dispatch::nvfp4_exchange(x.into_dispatch(), exchange))
}

/// The sum of all ranks' `x`; the gradient of each is that of the sum.
pub fn reduce<const D: usize>(x: Tensor<D>, group: &ProcessGroup) -> Tensor<D> {
    let sum = Step::AllReduce(Reduction::Sum);
    exchange(x, group, Steps([sum, Step::Identity]))
}

/// Part `rank` along axis `dim` of the sum of all ranks' `x`; the gradient is the parts of all
/// ranks.
pub fn reduce_scatter<const D: usize>(x: Tensor<D>, dim: usize, group: &ProcessGroup) -> Tensor<D> {
    check(&x, dim, group);
    along(x, dim, |x| exchange(x, group, Steps::reduce_scatter()))
}

/// The parts of all ranks along axis `dim`, for layers with parts of the weights: the gradient is
/// this rank's part of the sum of all ranks' gradients.
pub fn gather_sum<const D: usize>(x: Tensor<D>, dim: usize, group: &ProcessGroup) -> Tensor<D> {
    along(x, dim, |x| exchange(x, group, Steps::gather_sum()))
}

/// The parts of all ranks along the first axis, for parts of a batch on each rank: the gradient is
/// this rank's part of the mean of all ranks' gradients.
pub fn gather_mean<const D: usize>(x: Tensor<D>, group: &ProcessGroup) -> Tensor<D> {
    let mean = Step::ReduceScatter(Reduction::Avg);
    exchange(x, group, Steps([Step::AllGather, mean]))
}

/// [`gather_mean`] of the parameter `id`, whose gradient is reduced by `reduction`, beside the rest of
/// the backward.
pub(super) fn gather_beside<const D: usize>(
    x: Tensor<D>,
    group: &ProcessGroup,
    (id, reduction): (u64, Reduction),
) -> Tensor<D> {
    let reduced = Step::ReduceScatter(reduction);
    exchange_beside(x, group, Steps([Step::AllGather, reduced]), id)
}

/// `x`, the parameter `id`, for parts of a batch on each rank: its gradient is the reduction by
/// `reduction` of all ranks' gradients, taken beside the rest of the backward.
pub(super) fn copy_beside<const D: usize>(
    x: Tensor<D>,
    group: &ProcessGroup,
    (id, reduction): (u64, Reduction),
) -> Tensor<D> {
    let reduced = Step::AllReduce(reduction);
    exchange_beside(x, group, Steps([Step::Identity, reduced]), id)
}

/// The parts of all ranks along axis `dim`, with which all ranks do the same: the gradient is this
/// rank's part of its own gradient.
pub fn gather<const D: usize>(x: Tensor<D>, dim: usize, group: &ProcessGroup) -> Tensor<D> {
    along(x, dim, |x| {
        exchange(x, group, Steps([Step::AllGather, Step::Slice]))
    })
}

/// Part `rank` along axis `dim` of `x`, which all ranks have; the gradient is the parts of all
/// ranks.
pub fn scatter<const D: usize>(x: Tensor<D>, dim: usize, group: &ProcessGroup) -> Tensor<D> {
    check(&x, dim, group);
    along(x, dim, |x| {
        exchange(x, group, Steps([Step::Slice, Step::AllGather]))
    })
}

/// The sum of all ranks' `x`, of which each rank makes a loss of its own: the gradient of each is
/// the sum of all ranks' gradients, that of the sum of their losses.
pub fn all_reduce<const D: usize>(x: Tensor<D>, group: &ProcessGroup) -> Tensor<D> {
    let sum = Step::AllReduce(Reduction::Sum);
    exchange(x, group, Steps([sum.clone(), sum]))
}

/// Sends `send[r]` rows of `x` to each rank `r`, and receives `receive[r]` from it: all that
/// arrive, in the order of ranks. Gradients go back the same way.
///
/// # Panics
/// If the counts do not fit `x`, the number of ranks or the counts of another rank, too.
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

/// `x` after the first of `steps`, in line with kernels; its gradient takes the second.
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
