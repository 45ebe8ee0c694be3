//! A rank's end of a group.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use burn_core::backend::Dispatch;
use burn_core::tensor::{Device, Int, Tensor};
use nvfp4_kernels::Nvfp4Error;
use nvfp4_parallel::{Collective, HostGroup, ParallelError, Reduction, loopback};

#[cfg(feature = "cuda")]
use crate::ops::collective::DeviceLink;
use crate::ops::collective::{CollectiveOps, Exchange, Link, Overlap, ReduceDtype, Step};

/// The ranks that work together on something, such as the parts of a batch or of a weight: this
/// rank's end. Clones are the same end.
///
/// All ranks of a group call the same operations in the same order. Tensors travel through the
/// memory of the host: sums are taken in the order of ranks, in `f32`, and rounded once, so that
/// all ranks have the same bits, and every run has them. After [`connect`](Self::connect) they
/// travel from device to device, and NCCL chooses the order.
///
/// # Panics
/// The operations panic when the group fails: another rank is gone, late or does something else.
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
    /// A group of one rank: its operations change nothing.
    pub fn single() -> Self {
        let mut groups = Self::loopback(1, Duration::ZERO);
        groups.remove(0)
    }

    /// The groups of `size` ranks, each for a thread of this process. A call waits for another rank
    /// for at most `timeout`.
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

    /// The same group, whose ranks exchange the gradients of parameters in the type `dtype` to
    /// reduce them; all ranks choose the same. Gradients of activations, amax values, losses and
    /// parameters travel as before.
    ///
    /// It holds wherever gradients of parameters are reduced: in
    /// [`average_gradients`](super::average_gradients), [`fully_shard`](super::fully_shard),
    /// [`ZeroAdamW`](crate::optim::ZeroAdamW), their forms for experts, and in layers of a tensor
    /// group for what all of its ranks have. Modules keep the type that the group had when they
    /// were made.
    ///
    /// The reduction of [`ReduceDtype::Bf16`] is that of `bf16` tensors: through the memory of the
    /// host the sum in the order of ranks in `f32`, for a mean divided by their number, rounded to
    /// `bf16` once; by NCCL each addition is rounded, in the order that NCCL chooses. Of two ranks
    /// both have the same bits.
    pub fn with_reduce_dtype(self, dtype: ReduceDtype) -> Self {
        Self {
            reduce_dtype: dtype,
            ..self
        }
    }

    /// The type in which gradients of parameters travel to be reduced.
    pub fn reduce_dtype(&self) -> ReduceDtype {
        self.reduce_dtype
    }

    /// The group of `members`, ranks of this group in ascending order, this one among them. All of
    /// them call this at the same point of their program; nothing is exchanged.
    ///
    /// # Errors
    /// Returns an error if `members` is not ascending, has a rank that there is not, or lacks this
    /// one.
    pub fn subgroup(&self, members: &[usize]) -> Result<Self, ParallelError> {
        let group = Self::from(Arc::new(self.link.host.subgroup(members)?));
        Ok(group.with_reduce_dtype(self.reduce_dtype))
    }

    /// Has floats and integers travel from device to device, by NCCL, which is found at run time.
    /// All ranks call it, each with its device. What NCCL does not take still travels through the
    /// memory of the host: sums of `f16`, and slices.
    /// `overlap` says what runs beside kernels, on a second stream, where there is something that
    /// can.
    ///
    /// Dropping a group does not end its connections: NCCL's memory goes back with the process.
    ///
    /// # Errors
    /// Returns an error if the device is not a CUDA device, NCCL is not there or fails, or the
    /// group does.
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

    /// Returns true if tensors travel from device to device, of which the ranks each have one.
    pub fn is_connected(&self) -> bool {
        self.link.is_connected()
    }

    /// What is exchanged beside kernels: what [`connect`](Self::connect) was given.
    pub fn overlap(&self) -> Overlap {
        self.link.overlap()
    }

    /// The collectives over host memory.
    pub fn collective(&self) -> &HostGroup {
        &self.link.host
    }

    /// The reduction of all ranks' tensors, which have one shape; a constant for autodiff.
    ///
    /// # Panics
    /// If `reduction` is the mean of a tensor that is not `f32`, `bf16` or `f16`, and when the
    /// group fails.
    pub fn all_reduce<const D: usize>(&self, x: Tensor<D>, reduction: Reduction) -> Tensor<D> {
        self.constant(x, Step::AllReduce(reduction))
    }

    /// The tensors of all ranks, which have one shape, one after the other along axis `dim`; a
    /// constant for autodiff.
    ///
    /// # Panics
    /// If `dim` is not an axis, and when the group fails.
    pub fn all_gather<const D: usize>(&self, x: Tensor<D>, dim: usize) -> Tensor<D> {
        let x = x.swap_dims(0, dim);
        self.constant(x, Step::AllGather).swap_dims(0, dim)
    }

    /// Part `rank` along the first axis of the reduction of all ranks' tensors; a constant for
    /// autodiff.
    ///
    /// # Panics
    /// If the axis is no multiple of the number of ranks, and when the group fails.
    pub fn reduce_scatter<const D: usize>(&self, x: Tensor<D>, reduction: Reduction) -> Tensor<D> {
        or_panic(self.check_parts("x", x.dims()[0]));
        self.constant(x, Step::ReduceScatter(reduction))
    }

    /// The tensor of rank `root`, in place of tensors of its shape; a constant for autodiff.
    ///
    /// # Panics
    /// If there is no such rank, and when the group fails.
    pub fn broadcast<const D: usize>(&self, x: Tensor<D>, root: usize) -> Tensor<D> {
        self.constant(x, Step::Broadcast { root })
    }

    /// [`all_gather`](Self::all_gather) of integers along the first axis.
    ///
    /// # Panics
    /// If the group fails.
    pub fn all_gather_int<const D: usize>(&self, x: Tensor<D, Int>) -> Tensor<D, Int> {
        self.exchange_int(x, Step::AllGather)
    }

    /// Sends `send[r]` rows of `x` to each rank `r`, and receives `receive[r]` from it: all that
    /// arrive, in the order of ranks.
    ///
    /// # Panics
    /// If the counts do not fit `x` or those of another rank, and when the group fails.
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

    /// What an exchange of this group needs.
    pub(crate) fn link(&self) -> Link {
        self.link.clone()
    }

    /// Fails unless `len` elements of `argument` have equal parts on all ranks.
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

    /// The step of a gradient of a parameter, a reduction in the [type for
    /// them](Self::with_reduce_dtype).
    pub(crate) fn reduce_gradient<const D: usize>(&self, x: Tensor<D>, step: Step) -> Tensor<D> {
        self.exchange(x, self.gradient_exchange(step))
    }

    /// That step.
    pub(crate) fn gradient_exchange(&self, step: Step) -> Exchange {
        Exchange::constant(self.link(), step).reducing_in(self.reduce_dtype)
    }

    fn constant<const D: usize>(&self, x: Tensor<D>, step: Step) -> Tensor<D> {
        self.exchange(x, Exchange::constant(self.link(), step))
    }

    fn exchange<const D: usize>(&self, x: Tensor<D>, exchange: Exchange) -> Tensor<D> {
        // Detaching alone keeps the requirement of a leaf.
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
