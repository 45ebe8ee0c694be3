//! This rank's handle of a process group.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use burn_core::backend::Dispatch;
use burn_core::tensor::{Device, Int, Tensor};
use nvfp4_formats::Nvfp4Error;
use nvfp4_parallel::{Collective, HostGroup, ParallelError, Reduction, loopback};

#[cfg(feature = "cuda")]
use crate::ops::collective::DeviceLink;
use crate::ops::collective::{CollectiveOps, Exchange, Link, Overlap, ReduceDtype, Step};

/// This rank's handle of a group of ranks that work together, for example on shards of a batch or
/// of a weight. Clones are the same handle.
///
/// All ranks of a group must call the same operations in the same order. Tensors are exchanged
/// through host memory: sums are computed in rank order, in `f32`, and rounded once, so that all
/// ranks and every run have the same bits. After [`connect`](Self::connect) tensors are sent from
/// device to device, and NCCL chooses the order of summation.
///
/// # Panics
/// The operations panic if the group fails: another rank is gone, late, or calls another operation.
/// The message names the rank.
#[derive(Clone)]
pub struct ProcessGroup {
    link: Link,
    reduce_dtype: ReduceDtype,
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.link.fmt(f)
    }
}

impl From<Arc<HostGroup>> for ProcessGroup {
    fn from(group: Arc<HostGroup>) -> Self {
        Self {
            link: group.into(),
            reduce_dtype: ReduceDtype::default(),
        }
    }
}

impl ProcessGroup {
    /// Creates a group of one rank: its operations have no effect.
    pub fn single() -> Self {
        let mut groups = Self::loopback(1, Duration::ZERO);
        groups.remove(0)
    }

    /// Creates the groups of `size` ranks, each for a thread of this process. A call waits for
    /// another rank for at most `timeout`.
    ///
    /// # Panics
    /// If `size` is zero.
    pub fn loopback(size: usize, timeout: Duration) -> Vec<Self> {
        let groups = loopback::groups(size, timeout).into_iter();
        groups.map(|group| Self::from(Arc::new(group))).collect()
    }

    /// This rank, less than [`size`](Self::size).
    pub fn rank(&self) -> usize {
        self.link.host.rank()
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.link.host.size()
    }

    /// Sets the dtype in which the ranks exchange the gradients of parameters for reduction; all
    /// ranks must choose the same. The exchange of activation gradients, amax values, losses and
    /// parameters is unchanged.
    ///
    /// The setting applies to all reductions of parameter gradients:
    /// [`average_gradients`](super::average_gradients), [`fully_shard`](super::fully_shard),
    /// [`ZeroAdamW`](crate::optim::ZeroAdamW), their versions for experts, and the replicated
    /// parameters of layers of a tensor group. Modules keep the dtype that the group had when they
    /// were created.
    ///
    /// [`ReduceDtype::Bf16`] reduces `bf16` tensors. Through host memory it sums in rank order in
    /// `f32`, divides by the number of ranks for a mean, and rounds to `bf16` once. NCCL rounds
    /// each addition, in the order that it chooses. For two ranks the two have the same bits.
    pub fn with_reduce_dtype(self, dtype: ReduceDtype) -> Self {
        Self {
            reduce_dtype: dtype,
            ..self
        }
    }

    /// Returns the dtype of the exchange of parameter gradients.
    pub fn reduce_dtype(&self) -> ReduceDtype {
        self.reduce_dtype
    }

    /// Returns the group of `members`, ranks of this group in ascending order, including this one.
    /// All members call this at the same point of their program; nothing is exchanged.
    ///
    /// # Errors
    /// Returns an error if `members` is not ascending, contains a rank out of range, or lacks this
    /// rank.
    pub fn subgroup(&self, members: &[usize]) -> Result<Self, ParallelError> {
        let group = Self::from(Arc::new(self.link.host.subgroup(members)?));
        Ok(group.with_reduce_dtype(self.reduce_dtype))
    }

    /// Connects the devices by NCCL, which is loaded at run time, to exchange floats and integers
    /// from device to device. All ranks call it, each with its device. Operations that NCCL does
    /// not support still go through host memory: sums of `f16`, and slices. `overlap` selects the
    /// exchanges that run concurrently with kernels, on a second stream, where possible.
    ///
    /// Dropping a group does not close its connections: NCCL's memory is freed with the process.
    ///
    /// # Errors
    /// Returns an error if the device is not a CUDA device, NCCL is missing or fails, or the group
    /// fails.
    pub fn connect(self, device: &Device, overlap: Overlap) -> Result<Self, Nvfp4Error> {
        let refused = |reason: String| Nvfp4Error::Unsupported {
            library: "NCCL",
            problem: format!("a group of {} ranks on {device:?}", self.size()),
            reason,
        };
        #[cfg(feature = "cuda")]
        {
            use burn_core::backend::DispatchDevice;
            let plain = device.clone().without_autodiff();
            let DispatchDevice::Cube(cube) = plain.as_dispatch() else {
                return Err(refused("not a CUDA device".into()));
            };
            let made = DeviceLink::connect(&cube.client(), &self.link.host, overlap);
            let device = Some(made.map_err(refused)?);
            let link = Link {
                device,
                ..self.link
            };
            Ok(Self { link, ..self })
        }
        #[cfg(not(feature = "cuda"))]
        let _ = overlap;
        #[cfg(not(feature = "cuda"))]
        Err(refused("this build is without the feature cuda".into()))
    }

    /// Returns true if tensors are exchanged from device to device, with one device per rank.
    pub fn is_connected(&self) -> bool {
        self.link.is_connected()
    }

    /// Returns the exchanges that run concurrently with kernels, as passed to
    /// [`connect`](Self::connect).
    pub fn overlap(&self) -> Overlap {
        self.link.overlap()
    }

    /// Returns the collectives over host memory.
    pub fn collective(&self) -> &HostGroup {
        &self.link.host
    }

    /// Reduces tensors of one shape over all ranks; a constant for autodiff.
    ///
    /// # Panics
    /// If `reduction` is the mean of a tensor that is not `f32`, `bf16` or `f16`, or the group
    /// fails.
    pub fn all_reduce<const D: usize>(&self, x: Tensor<D>, reduction: Reduction) -> Tensor<D> {
        self.constant(x, Step::AllReduce(reduction))
    }

    /// Gathers tensors of one shape from all ranks, concatenated along axis `dim`; a constant for
    /// autodiff.
    ///
    /// # Panics
    /// If `dim` is not an axis, or the group fails.
    pub fn all_gather<const D: usize>(&self, x: Tensor<D>, dim: usize) -> Tensor<D> {
        let x = x.swap_dims(0, dim);
        self.constant(x, Step::AllGather).swap_dims(0, dim)
    }

    /// Reduces tensors over all ranks and returns shard `rank` along the first axis; a constant for
    /// autodiff.
    ///
    /// # Panics
    /// If the axis is not a multiple of the number of ranks, or the group fails.
    #[track_caller]
    pub fn reduce_scatter<const D: usize>(&self, x: Tensor<D>, reduction: Reduction) -> Tensor<D> {
        or_panic(self.check_parts("x", x.dims()[0]));
        self.constant(x, Step::ReduceScatter(reduction))
    }

    /// Broadcasts the tensor of rank `root`; `x` must have its shape on all ranks. A constant for
    /// autodiff.
    ///
    /// # Panics
    /// If there is no such rank, or the group fails.
    pub fn broadcast<const D: usize>(&self, x: Tensor<D>, root: usize) -> Tensor<D> {
        self.constant(x, Step::Broadcast { root })
    }

    /// Version of [`all_gather`](Self::all_gather) for integers, along the first axis.
    ///
    /// # Panics
    /// If the group fails.
    pub fn all_gather_int<const D: usize>(&self, x: Tensor<D, Int>) -> Tensor<D, Int> {
        self.exchange_int(x, Step::AllGather)
    }

    /// Sends `send[r]` rows of `x` to each rank `r`, and receives `receive[r]` rows from it.
    /// Returns all received rows in rank order.
    ///
    /// # Panics
    /// If the counts do not match `x` or those of another rank, or the group fails.
    pub fn all_to_all_int<const D: usize>(
        &self,
        x: Tensor<D, Int>,
        send: &[usize],
        receive: &[usize],
    ) -> Tensor<D, Int> {
        let step = Step::AllToAll {
            send: send.into(),
            receive: receive.into(),
        };
        self.exchange_int(x, step)
    }

    /// Waits until all ranks have called it.
    ///
    /// # Errors
    /// Returns an error if the group fails.
    pub fn barrier(&self) -> Result<(), ParallelError> {
        self.link.host.barrier()
    }

    /// Returns the connections that an exchange of this group needs.
    pub(crate) fn link(&self) -> Link {
        self.link.clone()
    }

    /// Returns an error if `len` elements of `argument` cannot be divided equally among the ranks.
    pub(crate) fn check_parts(&self, argument: &'static str, len: usize) -> Result<(), Nvfp4Error> {
        if len.is_multiple_of(self.size()) {
            return Ok(());
        }
        Err(Nvfp4Error::shape(
            argument,
            format!("an axis of {len}"),
            format!("a multiple of the {} ranks", self.size()),
        ))
    }

    /// Reduces a parameter gradient by `step`, in the [dtype for parameter
    /// gradients](Self::with_reduce_dtype).
    pub(crate) fn reduce_gradient<const D: usize>(&self, x: Tensor<D>, step: Step) -> Tensor<D> {
        self.exchange(x, self.gradient_exchange(step))
    }

    /// Returns the exchange of [`reduce_gradient`](Self::reduce_gradient).
    pub(crate) fn gradient_exchange(&self, step: Step) -> Exchange {
        Exchange::constant(self.link(), step).reducing_in(self.reduce_dtype)
    }

    fn constant<const D: usize>(&self, x: Tensor<D>, step: Step) -> Tensor<D> {
        self.exchange(x, Exchange::constant(self.link(), step))
    }

    fn exchange<const D: usize>(&self, x: Tensor<D>, exchange: Exchange) -> Tensor<D> {
        // Detaching alone keeps the gradient requirement of a leaf.
        let x = x.detach().set_require_grad(false).into_dispatch();
        Tensor::from_dispatch(Dispatch::nvfp4_exchange(x, exchange))
    }

    fn exchange_int<const D: usize>(&self, x: Tensor<D, Int>, step: Step) -> Tensor<D, Int> {
        let exchange = Exchange::constant(self.link(), step);
        Tensor::from_dispatch(Dispatch::nvfp4_exchange_int(x.into_dispatch(), exchange))
    }
}

fn or_panic(checked: Result<(), Nvfp4Error>) {
    checked.unwrap_or_else(|error| panic!("{error}"));
}
