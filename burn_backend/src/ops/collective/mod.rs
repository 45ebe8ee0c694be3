//! Differentiable collectives between ranks, as a separate extension trait.
//!
//! An operation must be queued at the same point of the program on all ranks of its group. The
//! order in which the backward visits operations depends only on the graph of the model, so ranks
//! with the same model run their collectives in the same order there too.

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
/// Each operation panics if the group fails: another rank is gone, late, or calls another
/// operation.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(any(feature = "cpu", feature = "cuda")),
    Fusion: cfg(feature = "cubecl-backend"),
    Autodiff
)]
pub trait CollectiveOps: Backend {
    /// Runs [`Exchange::forward`] on `x` (`f32`, `bf16` or `f16`).
    ///
    /// Through host memory, sums are those of [`Collective`](nvfp4_parallel::Collective): in rank
    /// order, in `f32`, rounded once to the dtype of the exchange ([`Exchange::reduce_dtype`]). The
    /// exchange runs in the calling thread, even if operations are queued for another thread: ranks
    /// that share a device would wait for each other in its only thread. If the group [is
    /// connected](crate::parallel::ProcessGroup::connect), the exchange is queued, and NCCL chooses
    /// the order.
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
            // The result must not be read before it is joined.
            true => reduced,
            false => cast::<Self>(reduced, float_dtype(dtype)),
        }
    }

    /// Runs [`Exchange::forward`] on integers of any dtype; only `u32` can be reduced.
    #[fusion(default)]
    fn nvfp4_exchange_int(x: IntTensor<Self>, exchange: Exchange) -> IntTensor<Self> {
        exchange.report(x.dtype(), &x.shape());
        match exchange.is_queued(x.dtype()) {
            true => handed_over::<Self, _>(Self::nvfp4_queue_exchange_int(x, exchange)),
            false => host::exchange_ints::<Self>(x, &exchange),
        }
    }

    /// Runs the exchange on the device, for a connected group.
    #[fusion(meta = meta::exchange)]
    fn nvfp4_queue_exchange(x: FloatTensor<Self>, exchange: Exchange) -> FloatTensor<Self>;

    /// Runs the exchange of integers on the device, for a connected group.
    #[fusion(meta = meta::exchange)]
    fn nvfp4_queue_exchange_int(x: IntTensor<Self>, exchange: Exchange) -> IntTensor<Self>;

    /// Sums the [waiting](Waiting) gradients of all uses of the parameter `id`, on the device and
    /// the backend of `like`, in the dtype in which they were submitted.
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

    /// Returns `x`, a result of an exchange of `group` that overlapped with kernels as given by
    /// `fork`, and makes later kernels wait for the exchange. The group must be connected.
    #[fusion(meta = meta::joined)]
    fn nvfp4_join(x: FloatTensor<Self>, group: Link, fork: Fork) -> FloatTensor<Self>;

    /// Begins the exchange of `x`. The result must not be read before
    /// [`nvfp4_end`](Self::nvfp4_end).
    ///
    /// `Autodiff` ends the exchange of the gradient here.
    #[fusion(default)]
    fn nvfp4_begin(x: FloatTensor<Self>, exchange: OverlappedExchange) -> FloatTensor<Self> {
        Self::nvfp4_exchange(x, exchange.forked())
    }

    /// Returns `pending`, the result of `exchange`, which may be read from now on. `_beside` is the
    /// result of the overlapped work, of any shape.
    ///
    /// `Autodiff` begins the exchange of the gradient here, before the backward of `_beside`.
    /// `_beside` gets no gradient from this operation: another operation has to give it one.
    #[fusion(default)]
    fn nvfp4_end(
        pending: FloatTensor<Self>,
        _beside: FloatTensor<Self>,
        exchange: OverlappedExchange,
    ) -> FloatTensor<Self> {
        ended::<Self>(pending, &exchange)
    }

    /// Returns `x` for work that overlaps with the exchange whose result is `_pending`.
    ///
    /// `Autodiff` passes its gradient on before it ends the exchange of the other gradient.
    #[fusion(default)]
    fn nvfp4_behind(x: FloatTensor<Self>, _pending: FloatTensor<Self>) -> FloatTensor<Self> {
        x
    }
}

/// Flushes Burn's fusion and returns `out`, the result of a collective, which is the last flushed
/// operation. An operation held back by fusion could be reordered with the next, independent
/// collective, or still be unqueued when this rank waits elsewhere for another rank that waits for
/// the collective: both are deadlocks.
///
/// # Panics
/// If an operation that was held back fails.
fn handed_over<B: Backend, T: TensorMetadata<Device = B::Device>>(out: T) -> T {
    B::flush(&out.device()).unwrap_or_else(|error| panic!("queueing a collective: {error}"));
    out
}

/// Joins `pending`, the result of an exchange that has begun.
pub(super) fn ended<B: CollectiveOps>(
    pending: FloatTensor<B>,
    overlapped: &OverlappedExchange,
) -> FloatTensor<B> {
    let exchange = &overlapped.exchange;
    exchange.report_join();
    if !exchange.is_queued(pending.dtype()) {
        // The host has waited for it already.
        return pending;
    }
    // Flushes the overlapped work that fusion holds back, so that it does not wait.
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

/// Exchanges `grad`, a gradient of the parameter `id`, concurrently with later kernels. Its result
/// [waits](Waiting), to be joined in dtype `dtype`.
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
