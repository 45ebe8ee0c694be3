//! Collectives between ranks as differentiable operations: an extension trait of its own.
//!
//! An operation is queued at the same point of the program on all ranks of its group. The backward
//! visits operations in an order that the graph of the model alone decides, so ranks with the same
//! model meet there too.

mod autodiff;
#[cfg(any(feature = "cpu", feature = "cuda"))]
mod cube;
mod exchange;
#[cfg(feature = "flex")]
mod flex;
mod host;
mod link;
mod overlapped;
mod waiting;
#[cfg(feature = "cuda")]
mod window;

use burn_core as burn;

use burn_core::backend::{
    Backend, TensorMetadata, backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use burn_core::tensor::DType;

use super::dtype::{cast, float_dtype};
pub use exchange::{Exchange, ReduceDtype, Step};
#[cfg(feature = "cuda")]
pub(crate) use link::DeviceLink;
pub use link::{Fork, Link, Overlap};
pub use overlapped::OverlappedExchange;
pub use waiting::Waiting;

/// Collectives on the primitives of a backend.
///
/// # Panics
/// Each operation does when the group fails: another rank is gone, late, or does something else.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(any(feature = "cpu", feature = "cuda")),
    Fusion: cfg(feature = "cubecl-backend"),
    Autodiff
)]
pub trait CollectiveOps: Backend {
    /// [`Exchange::forward`] of `x` (`f32`, `bf16` or `f16`).
    ///
    /// Through the memory of the host, sums are those of
    /// [`Collective`](nvfp4_parallel::Collective): in the order of ranks, in `f32`, rounded once to
    /// the type in which the elements travel ([`Exchange::reduce_dtype`]).
    /// That runs in the thread that calls it, also where operations are queued for another one:
    /// ranks that share a device would wait for each other in its only thread. Where the group [is
    /// connected](crate::parallel::ProcessGroup::connect), the exchange is queued, and the library
    /// chooses the order.
    #[fusion(default)]
    fn nvfp4_exchange(x: FloatTensor<Self>, exchange: Exchange) -> FloatTensor<Self> {
        let dtype = x.dtype();
        let travels_in = exchange.travels_in(dtype);
        exchange.report(travels_in, &x.shape());
        if !exchange.is_queued(travels_in) {
            return host::exchange_floats::<Self>(x, &exchange);
        }
        if travels_in == dtype {
            return handed_over::<Self, _>(Self::nvfp4_queue_exchange(x, exchange));
        }
        let x = cast::<Self>(x, float_dtype(travels_in));
        let forks = exchange.fork.is_some();
        let reduced = handed_over::<Self, _>(Self::nvfp4_queue_exchange(x, exchange));
        match forks {
            // It is not there before it is joined.
            true => reduced,
            false => cast::<Self>(reduced, float_dtype(dtype)),
        }
    }

    /// [`Exchange::forward`] of integers of any type; only `u32` can be reduced.
    #[fusion(default)]
    fn nvfp4_exchange_int(x: IntTensor<Self>, exchange: Exchange) -> IntTensor<Self> {
        exchange.report(x.dtype(), &x.shape());
        match exchange.is_queued(x.dtype()) {
            true => handed_over::<Self, _>(Self::nvfp4_queue_exchange_int(x, exchange)),
            false => host::exchange_ints::<Self>(x, &exchange),
        }
    }

    /// The exchange on the device, of a group that is connected.
    #[fusion(meta = meta::exchange)]
    fn nvfp4_queue_exchange(x: FloatTensor<Self>, exchange: Exchange) -> FloatTensor<Self>;

    /// The same of integers.
    #[fusion(meta = meta::exchange)]
    fn nvfp4_queue_exchange_int(x: IntTensor<Self>, exchange: Exchange) -> IntTensor<Self>;

    /// The sum of the gradients of the parameter `id` that [wait](Waiting), of all its uses, on the
    /// device and of the backend of `like`, in the type that they were handed over in.
    #[fusion(default)]
    fn nvfp4_gradient_beside(like: FloatTensor<Self>, id: u64, group: Link) -> FloatTensor<Self> {
        drop(like);
        let waiting = group.waiting.clone();
        waiting.join::<Self>(id, |mean, dtype| {
            let mean = match group.is_connected() {
                true => {
                    let joined = Self::nvfp4_join(mean, group.clone(), Fork::Gradient);
                    handed_over::<Self, _>(joined)
                }
                false => mean,
            };
            cast::<Self>(mean, float_dtype(dtype))
        })
    }

    /// `x`, a result of an exchange of `group` that ran beside kernels as `fork` says: those that
    /// follow wait for it. The group is connected.
    #[fusion(meta = meta::joined)]
    fn nvfp4_join(x: FloatTensor<Self>, group: Link, fork: Fork) -> FloatTensor<Self>;

    /// The exchange of `x`, which begins here. Nobody reads the result before
    /// [`nvfp4_end`](Self::nvfp4_end).
    ///
    /// `Autodiff` ends that of the gradient here.
    #[fusion(default)]
    fn nvfp4_begin(x: FloatTensor<Self>, exchange: OverlappedExchange) -> FloatTensor<Self> {
        Self::nvfp4_exchange(x, exchange.forked())
    }

    /// `pending`, the result of `exchange`, to be read from here on. `_beside` is what was made
    /// beside the exchange, of any shape.
    ///
    /// `Autodiff` begins the exchange of the gradient here, ahead of what goes back through
    /// `_beside`. That has no gradient of it: another operation has to give it one.
    #[fusion(default)]
    fn nvfp4_end(
        pending: FloatTensor<Self>,
        _beside: FloatTensor<Self>,
        exchange: OverlappedExchange,
    ) -> FloatTensor<Self> {
        ended::<Self>(pending, &exchange)
    }

    /// `x`, of which something is made beside the exchange whose result is `_pending`.
    ///
    /// `Autodiff` lets its gradient go on before it ends that exchange's.
    #[fusion(default)]
    fn nvfp4_behind(x: FloatTensor<Self>, _pending: FloatTensor<Self>) -> FloatTensor<Self> {
        x
    }
}

/// `out`, the result of a collective, after Burn's fusion has handed over what it holds back, the
/// collective last. Held back, it could be reordered with the next one, which does not depend on it,
/// or still be there when this rank waits for another one elsewhere, which waits for the collective:
/// a deadlock, both ways.
///
/// # Panics
/// If an operation that was held back fails.
fn handed_over<B: Backend, T: TensorMetadata<Device = B::Device>>(out: T) -> T {
    B::flush(&out.device()).unwrap_or_else(|error| panic!("queueing a collective: {error}"));
    out
}

/// `pending`, the result of an exchange that has begun, behind it.
pub(super) fn ended<B: CollectiveOps>(
    pending: FloatTensor<B>,
    overlapped: &OverlappedExchange,
) -> FloatTensor<B> {
    let exchange = &overlapped.exchange;
    exchange.report_join();
    if !exchange.is_queued(pending.dtype()) {
        // The host has waited for it.
        return pending;
    }
    // What is queued beside it, and held back, comes first: it is not to wait.
    let pending = handed_over::<B, _>(pending);
    B::nvfp4_join(pending, exchange.group.clone(), overlapped.fork())
}

#[cfg(feature = "cubecl-backend")]
mod meta {
    use burn_core::backend::fusion::custom::TensorSpec;
    use burn_core::tensor::Shape;
    use nvfp4_parallel::Collective;

    use super::{Exchange, Fork, Link};

    pub(super) fn exchange(x: &TensorSpec, exchange: &Exchange) -> TensorSpec {
        let size = exchange.group.host.size();
        let shape = exchange.forward.shape(x.shape.to_vec(), size);
        TensorSpec::new(Shape::from(shape), x.dtype)
    }

    pub(super) fn joined(x: &TensorSpec, _group: &Link, _fork: &Fork) -> TensorSpec {
        TensorSpec::new(x.shape.clone(), x.dtype)
    }
}

/// The exchange of `grad`, a gradient of the parameter `id`, beside the kernels that follow: its
/// result [waits](Waiting), to be joined in type `dtype`.
pub(super) fn exchange_beside<B: CollectiveOps>(
    (id, dtype): (u64, DType),
    grad: FloatTensor<B>,
    exchange: Exchange,
) {
    let waiting = exchange.group.waiting.clone();
    let exchange = Exchange {
        fork: Some(Fork::Gradient),
        ..exchange
    };
    waiting.push::<B>((id, dtype), B::nvfp4_exchange(grad, exchange));
}
