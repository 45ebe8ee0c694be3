//! CubeCL devices: NCCL on CubeCL's own stream, after the kernels launched before, or on a second
//! stream concurrently with kernels.

use super::exchange::Exchange;
use super::{CollectiveOps, Fork, Link};
use burn_core::backend::tensor::{FloatTensor, IntTensor};
use burn_cubecl::CubeBackend;

impl CollectiveOps for CubeBackend {
    fn nvfp4_queue_exchange(x: FloatTensor<Self>, exchange: Exchange) -> FloatTensor<Self> {
        queued(x, &exchange)
    }

    fn nvfp4_queue_exchange_int(x: IntTensor<Self>, exchange: Exchange) -> IntTensor<Self> {
        queued(x, &exchange)
    }

    fn nvfp4_join(x: FloatTensor<Self>, group: Link, fork: Fork) -> FloatTensor<Self> {
        joined(x, group, fork)
    }
}

#[cfg(feature = "cuda")]
use nccl::{joined, queued};

#[cfg(not(feature = "cuda"))]
fn queued(
    _x: burn_cubecl::tensor::CubeTensor,
    exchange: &Exchange,
) -> burn_cubecl::tensor::CubeTensor {
    unreachable!("no group is connected: {exchange:?}")
}

#[cfg(not(feature = "cuda"))]
fn joined(
    _x: burn_cubecl::tensor::CubeTensor,
    group: Link,
    fork: Fork,
) -> burn_cubecl::tensor::CubeTensor {
    unreachable!("no group is connected: {group:?}, {fork:?}")
}

#[cfg(feature = "cuda")]
mod nccl {
    use burn_core::tensor::{DType, Shape};
    use burn_cubecl::{kernel::into_contiguous, tensor::CubeTensor};
    use nvfp4_kernels::foreign::{self, ForeignMemory, ForeignPlace, StreamSpan};
    use nvfp4_parallel::nccl::{Communicator, Counts};
    use nvfp4_parallel::{self as parallel, Call, Collective, DeviceSpan, Meter};
    use nvfp4_parallel::{Operation, Reduction};

    use super::super::super::cube::tensors::new_tensor;
    use super::super::exchange::{Exchange, Step, reduced_type};
    use super::super::link::{Deferred, DeviceLink, Fork, Link, Overlap, Running};

    /// Name of a collective in CubeCL's reports.
    struct NcclCollective;

    /// Name of the wait for overlapped collectives in CubeCL's reports.
    struct NcclJoin;

    /// Queues the exchange of `x` and returns its result.
    pub(super) fn queued(x: CubeTensor, exchange: &Exchange) -> CubeTensor {
        let x = into_contiguous(x);
        let size = exchange.group.host.size();
        let dims = x.meta.shape().to_vec();
        let shape = exchange.forward.shape(dims.clone(), size);
        let width = x.dtype.size();
        let bytes = shape.iter().product::<usize>() * width;
        let out = x.client.empty(bytes.max(1));
        let row = dims[1..].iter().product::<usize>() * width;
        let work = Work::new(&exchange.forward, &dims, &shape, (x.dtype, row));
        let link = exchange
            .group
            .device
            .clone()
            .expect("a group that is connected");
        let memory = ForeignMemory {
            reads: vec![x.handle.clone().binding()],
            writes: vec![out.clone().binding()],
            scratch: Vec::new(),
        };
        let what = format!("NCCL, {exchange:?}");
        let stream = out.stream;
        let waits = Waits::of(exchange.group.host.meter());
        let held = dims.iter().product::<usize>() * width;
        let forked = exchange.fork.map(|fork| (fork, x.handle.clone()));
        // The output of a gradient's exchange is kept by the group instead.
        let output = match exchange.fork {
            Some(Fork::Own(_)) => Some(out.clone()),
            _ => None,
        };
        foreign::submit::<NcclCollective>(&x.client, stream, memory, what, move |place| {
            let Some((fork, input)) = forked else {
                return waits.timed(place, || work.queue(&mut link.communicator(), place));
            };
            match work {
                Work::Equal(call) if fork == Fork::Gradient && link.overlap != Overlap::All => {
                    let deferred = Deferred {
                        call,
                        addresses: [place.addresses[0], place.addresses[1]],
                        _input: input,
                    };
                    let calls = {
                        let mut window = link.deferred();
                        window.push(held, deferred);
                        match window.is_full() {
                            true => window.take(),
                            false => return Ok(()),
                        }
                    };
                    waits.timed(place, || queue_all(&link, calls, place))
                }
                work => {
                    work.queue(&mut link.communicator(), &link.side.fork(place)?)?;
                    let point = link.side.point()?;
                    let past = {
                        let mut window = link.running();
                        window.push(
                            held,
                            Running {
                                point,
                                fork,
                                _memory: output.into_iter().chain([input]).collect(),
                            },
                        );
                        window.take_excess()
                    };
                    match past.last() {
                        // The last point is after the others.
                        Some(last) => waits.timed(place, || link.side.wait_for(&last.point, place)),
                        None => Ok(()),
                    }
                }
            }
        });
        new_tensor(&x, out, Shape::from(shape), x.dtype)
    }

    /// Returns `x` after the exchanges that `fork` selects: its own exchange, or all overlapped
    /// exchanges and all deferred ones.
    pub(super) fn joined(x: CubeTensor, group: Link, fork: Fork) -> CubeTensor {
        let link = group.device.clone().expect("a group that is connected");
        let memory = ForeignMemory {
            reads: vec![x.handle.clone().binding()],
            writes: vec![x.handle.clone().binding()],
            scratch: Vec::new(),
        };
        let what = format!("NCCL, joining {group:?}");
        let stream = x.handle.stream;
        let waits = Waits::of(group.host.meter());
        foreign::submit::<NcclJoin>(&x.client, stream, memory, what, move |place| {
            if matches!(fork, Fork::Own(_)) {
                let past = link.running().take_through(|running| running.fork == fork);
                return match past.last() {
                    Some(own) => waits.timed(place, || link.side.wait_for(&own.point, place)),
                    // The stream already waits for it.
                    None => Ok(()),
                };
            }
            let deferred = link.deferred().take();
            if deferred.is_empty() && !link.side.is_forked() {
                return Ok(());
            }
            waits.timed(place, || {
                queue_all(&link, deferred, place)?;
                link.side.join(place)
            })?;
            link.running().take();
            Ok(())
        });
        x
    }

    /// Queues `calls` on the stream of `place`, and then releases their tensors.
    fn queue_all(
        link: &DeviceLink,
        calls: Vec<Deferred>,
        place: &ForeignPlace,
    ) -> Result<(), String> {
        if calls.is_empty() {
            return Ok(());
        }
        let queued: Vec<_> = calls.iter().map(|own| (own.call, own.addresses)).collect();
        // SAFETY: as for `Work::queue`; `calls` holds the inputs, and the joiner holds the outputs.
        let queued = unsafe { link.communicator().queue_all(&queued, place.stream) };
        queued.map_err(|error| error.to_string())
    }

    /// Measures the time in which the compute stream does not compute.
    struct Waits {
        meter: Meter,
        records: bool,
    }

    impl Waits {
        /// Creates a value with the current settings of `meter`.
        fn of(meter: &Meter) -> Self {
            Self {
                meter: meter.clone(),
                records: meter.is_recording(),
            }
        }

        /// Runs `work`, which queues non-compute work on the stream of `place`: a collective, or
        /// the wait for those of the second stream.
        fn timed(
            &self,
            place: &ForeignPlace,
            work: impl FnOnce() -> Result<(), String>,
        ) -> Result<(), String> {
            if !self.records || place.is_captured {
                return work();
            }
            let span = StreamSpan::default();
            span.begin(place)?;
            work()?;
            span.end(place)?;
            self.meter.push(Waited(span));
            Ok(())
        }
    }

    /// Span in which the compute stream waited.
    struct Waited(StreamSpan);

    impl DeviceSpan for Waited {
        fn seconds(&self) -> Result<f64, String> {
            self.0.seconds()
        }
    }

    /// Call of the NCCL library.
    enum Work {
        Equal(Call),
        /// All-to-all, with the bytes to and from each rank.
        AllToAll {
            send: Vec<usize>,
            receive: Vec<usize>,
        },
    }

    impl Work {
        /// Creates the call for a tensor of shape `dims` with a result of shape `shape`, given its
        /// dtype and the bytes per row.
        fn new(step: &Step, dims: &[usize], shape: &[usize], (dtype, row): (DType, usize)) -> Self {
            let elements = |dims: &[usize]| dims.iter().product::<usize>();
            let bytes = elements(dims) * dtype.size();
            let reduces = |operation: fn(Reduction) -> Operation, reduction, count| Call {
                operation: operation(reduction),
                dtype: reduced_type(dtype).expect("checked before it was queued"),
                count,
            };
            let moves = |operation| Call {
                operation,
                dtype: parallel::DType::U8,
                count: bytes,
            };
            match step {
                Step::AllReduce(reduction) => {
                    Self::Equal(reduces(Operation::AllReduce, *reduction, elements(dims)))
                }
                Step::ReduceScatter(reduction) => Self::Equal(reduces(
                    Operation::ReduceScatter,
                    *reduction,
                    elements(shape),
                )),
                Step::AllGather => Self::Equal(moves(Operation::AllGather)),
                Step::Broadcast { root } => {
                    Self::Equal(moves(Operation::Broadcast { root: *root }))
                }
                Step::AllToAll { send, receive } => {
                    let bytes = |rows: &[usize]| rows.iter().map(|rows| rows * row).collect();
                    Self::AllToAll {
                        send: bytes(send),
                        receive: bytes(receive),
                    }
                }
                Step::Identity | Step::Slice => unreachable!("{step:?} is not queued"),
            }
        }

        /// Queues the call. Runs on the device thread.
        fn queue(
            &self,
            communicator: &mut Communicator,
            place: &ForeignPlace,
        ) -> Result<(), String> {
            let [input, output] = [place.addresses[0], place.addresses[1]];
            // SAFETY: the context and the stream are those of the communicator's device, which the
            // tensors of its group are on; the memory has the sizes that the call was made of, and
            // CubeCL's bookkeeping keeps it until the stream has passed the call.
            let queued = unsafe {
                match self {
                    Self::Equal(call) => communicator.queue(call, input, output, place.stream),
                    Self::AllToAll { send, receive } => communicator.all_to_all(
                        parallel::DType::U8,
                        Counts { send, receive },
                        [input, output],
                        place.stream,
                    ),
                }
            };
            queued.map_err(|error| error.to_string())
        }
    }
}
