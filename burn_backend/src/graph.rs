//! Training steps as CUDA graphs: captured once, replayed by one launch.
//!
//! A step of a small model consists of hundreds of launches, each of which takes longer on the host
//! than on the GPU. A graph records them: a replay launches all of them at once, with the recorded
//! buffers and scalar arguments. Therefore everything that changes from step to step must be in
//! device memory:
//!
//! - the batch: in tensors that [`copy_into`] fills;
//! - the numbers of the optimizer: [`AdamW::begin_step`](crate::optim::AdamW::begin_step) writes
//!   them before each step, and the step calls
//!   [`AdamW::try_step_begun`](crate::optim::AdamW::try_step_begun);
//! - the random bits: [`GraphSteps`] keeps the offset of all streams in device memory and advances
//!   it at the end of each step; the MS-EDEN kernels draw the signs of their transform from it.
//!
//! Replayed steps have the bits of ordinary steps. The exception is `Dropout` of burn-nn, whose seeds
//! are arguments from the host: each replay drops the same elements. Set its probability to 0.
//!
//! `nvfp4 train` uses these steps on a GPU. Tests compare replayed steps with ordinary ones on GPUs,
//! and launched steps on CubeCL's CPU runtime, which has no graphs.
//!
//! Without [`GraphSteps`], `burn::tensor::capture` around layers with stochastic rounding would
//! draw the same bits at each replay.

use std::sync::{Mutex, PoisonError};

use burn_core::backend::{Backend, BackendGraph, Dispatch, DispatchDevice};
use burn_core::module::Module;
use burn_core::tensor::{DType, Device, Int, Tensor};
use nvfp4_formats::Nvfp4Error;

use crate::ops::graph::GraphOps;
use crate::state::{FoundLayer, layers};
use crate::validate;

/// Number of ordinary steps before the captured one: allocations, autotuning and fusion have
/// settled by then. Burn's `capture` uses the same number.
const WARM_UP: usize = 3;

/// Execution mode of a step of [`GraphSteps::step`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TakenBy {
    /// The closure ran, kernel by kernel.
    Launches,
    /// The closure ran; its launches were captured and then replayed.
    Capture,
    /// The graph was replayed; the closure was not called.
    Replay,
}

/// Steps of one model: first ordinary steps, then a captured one, then replays.
///
/// Dropping it before the capture gives the device back as it was.
///
/// All memory that the step reads or writes must stay alive at its address as long as this value:
/// parameters and optimizer state are updated in place, and the batch is in tensors of
/// [`copy_into`].
///
/// No other thread should use the device while the step is captured: CubeCL captures in CUDA's
/// global mode, in which both the capture and an allocation by another thread then fail.
pub struct GraphSteps {
    _busy: Busy,
    /// Device without autodiff.
    device: Device,
    layers: Vec<FoundLayer>,
    /// Number of forwards of each layer since the beginning, `u32[2]`.
    offset: Tensor<1, Int>,
    /// Number of forwards of each layer in a step.
    forwards: Option<u64>,
    ordinary: usize,
    /// True if kernels of the graph overlap.
    overlaps: bool,
    graph: Option<BackendGraph<Dispatch>>,
}

impl GraphSteps {
    /// Begins: from now on, the device allocates as during a capture.
    ///
    /// # Errors
    /// Returns an error on Flex, or while other steps on the device are captured or replayed,
    /// because a device has one offset.
    pub fn begin<M: Module>(model: &M, device: &Device) -> Result<Self, Nvfp4Error> {
        let device = device.clone().without_autodiff();
        cubecl_only(&device)?;
        let busy = Busy::new(&device)?;
        let layers = layers(model);
        let offset = Tensor::<1, Int>::zeros([2], (&device, DType::U32));
        let offset = Dispatch::nvfp4_draw_at(offset.into_dispatch(), true);
        for layer in &layers {
            layer.state.pin();
        }
        Dispatch::graph_prepare(device.as_dispatch()).map_err(|error| failed("prepare", error))?;
        Ok(Self {
            _busy: busy,
            device,
            layers,
            offset: Tensor::from_dispatch(offset),
            forwards: None,
            ordinary: 0,
            overlaps: false,
            graph: None,
        })
    }

    /// Lets kernels of the graph begin before their predecessors have ended, where possible
    /// (programmatic dependent launch, from compute capability 9.0 on). For decoding steps, whose
    /// kernels take a few microseconds each. Call it before the capture.
    ///
    /// # Safety
    /// A step must not write a packed weight of a GEMM. Before the attention of a layer, it must
    /// not write the cache of that layer or the starts of its sequences. Kernels read these before
    /// they wait.
    pub unsafe fn overlap_kernels(&mut self) {
        self.overlaps = true;
    }

    /// Returns true if steps are replays from now on.
    pub fn is_captured(&self) -> bool {
        self.graph.is_some()
    }

    /// Returns true if the next step is ordinary, and the one after it is captured.
    pub fn is_before_capture(&self) -> bool {
        !self.is_captured() && self.ordinary + 1 == WARM_UP
    }

    /// Takes a step: calls `step`, or replays the captured `step`. `step` must not read back from
    /// the device or copy to it.
    ///
    /// # Errors
    /// Returns an error if the device cannot capture or replay, or the layers of the model have run
    /// different numbers of times: they share one offset.
    pub fn step(&mut self, step: impl FnOnce()) -> Result<TakenBy, Nvfp4Error> {
        if let (Some(graph), Some(forwards)) = (&self.graph, self.forwards) {
            // SAFETY: by this type's contract, which `begin`'s caller keeps, every tensor of the
            // step is alive; the queue is drained before, on the stream of the capture.
            unsafe { Dispatch::graph_replay(self.device.as_dispatch(), graph) }
                .map_err(|error| failed("replay", error))?;
            for layer in &self.layers {
                layer.state.replayed(forwards);
            }
            return Ok(TakenBy::Replay);
        }
        if self.ordinary < WARM_UP {
            self.launch(step)?;
            self.ordinary += 1;
            if self.ordinary == WARM_UP {
                let offset = Dispatch::nvfp4_make_room(self.offset.clone().into_dispatch());
                self.offset = Tensor::from_dispatch(offset);
            }
            return Ok(TakenBy::Launches);
        }
        let device = self.device.as_dispatch().clone();
        Dispatch::graph_start_capture(&device).map_err(|error| failed("capture", error))?;
        let launched = self.launch(step);
        if self.overlaps {
            let offset = Dispatch::nvfp4_overlap_kernels(self.offset.clone().into_dispatch());
            self.offset = Tensor::from_dispatch(offset);
        }
        let graph =
            Dispatch::graph_stop_capture(&device).map_err(|error| failed("capture", error))?;
        launched?;
        // SAFETY: as above.
        unsafe { Dispatch::graph_replay(&device, &graph) }
            .map_err(|error| failed("replay", error))?;
        self.graph = Some(graph);
        let offset = Dispatch::nvfp4_give_back_room(self.offset.clone().into_dispatch());
        self.offset = Tensor::from_dispatch(offset);
        // Now, because later other work may be queued: replays queue nothing.
        let _ = self.device.sync();
        Ok(TakenBy::Capture)
    }

    /// Takes a step kernel by kernel even after the capture, to inspect it.
    ///
    /// # Errors
    /// Same as [`step`](Self::step).
    pub fn launch(&mut self, step: impl FnOnce()) -> Result<(), Nvfp4Error> {
        for layer in &self.layers {
            layer.state.begin_step();
        }
        self.mark(true);
        step();
        self.mark(false);
        let drawn = self.layers.iter().map(|layer| layer.state.drawn());
        // Layers that have not run, or are in high precision, draw nothing.
        let mut drawn: Vec<u64> = drawn.filter(|drawn| *drawn > 0).collect();
        drawn.sort_unstable();
        drawn.dedup();
        if let Some(forwards) = self.forwards {
            drawn.retain(|drawn| *drawn != forwards);
            if !drawn.is_empty() {
                return Err(Nvfp4Error::value(
                    "step",
                    format!("one with {drawn:?} forwards of a layer"),
                    format!("steps alike: {forwards} forwards of each layer"),
                ));
            }
        } else {
            if drawn.len() > 1 {
                return Err(Nvfp4Error::value(
                    "step",
                    format!("one with {drawn:?} forwards of different layers"),
                    "as many forwards of each NVFP4 layer",
                ));
            }
            self.forwards = Some(drawn.first().copied().unwrap_or(0));
        }
        let forwards = u32::try_from(self.forwards.unwrap_or(0)).unwrap_or(u32::MAX);
        if forwards > 0 {
            let offset = self.offset.clone().into_dispatch();
            let offset = Dispatch::nvfp4_advance_offset(offset, forwards);
            self.offset = Tensor::from_dispatch(offset);
        }
        Ok(())
    }

    /// Marks the begin or the end of a step on the device.
    fn mark(&mut self, begins: bool) {
        let offset = Dispatch::nvfp4_mark_step(self.offset.clone().into_dispatch(), begins);
        self.offset = Tensor::from_dispatch(offset);
    }
}

/// Makes offsets counts of the host again.
impl Drop for GraphSteps {
    fn drop(&mut self) {
        for layer in &self.layers {
            layer.state.unpin();
        }
        if self.graph.is_none() {
            // Ends what `begin` prepared, whether or not a capture began.
            let _ = Dispatch::graph_stop_capture(self.device.as_dispatch());
        }
        // Resets the offset in queue order; the tensor is dropped after the queue is drained.
        let offset = Dispatch::nvfp4_draw_at(self.offset.clone().into_dispatch(), false);
        self.offset = Tensor::from_dispatch(offset);
        let _ = self.device.sync();
    }
}

/// Devices that have a [`GraphSteps`].
static BUSY: Mutex<Vec<Device>> = Mutex::new(Vec::new());

/// Entry of a device in [`BUSY`].
struct Busy(Device);

impl Busy {
    fn new(device: &Device) -> Result<Self, Nvfp4Error> {
        let mut busy = BUSY.lock().unwrap_or_else(PoisonError::into_inner);
        if busy.contains(device) {
            let found = format!("{device:?}, which has the steps of another graph");
            return Err(Nvfp4Error::value("device", found, "one without"));
        }
        busy.push(device.clone());
        Ok(Self(device.clone()))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let mut busy = BUSY.lock().unwrap_or_else(PoisonError::into_inner);
        busy.retain(|device| *device != self.0);
    }
}

/// Copies `from` into the memory of `out`, which nothing else may hold: a graph that reads `out`
/// reads `from` at its next replay.
///
/// # Errors
/// Returns an error if shapes, dtypes or devices differ, or on Flex.
pub fn copy_into<const D: usize>(
    out: Tensor<D, Int>,
    from: Tensor<D, Int>,
) -> Result<Tensor<D, Int>, Nvfp4Error> {
    let (device, of_from) = (
        out.device().without_autodiff(),
        from.device().without_autodiff(),
    );
    cubecl_only(&device)?;
    validate::same_device(("out", &device), ("from", &of_from))?;
    validate::shape("from", from.dims(), out.dims(), || "that of `out`".into())?;
    if from.dtype() != out.dtype() {
        return Err(Nvfp4Error::DType {
            argument: "from",
            found: format!("{:?}", from.dtype()),
            expected: format!("{:?}, that of `out`", out.dtype()),
        });
    }
    let made = Dispatch::nvfp4_copy_into(out.into_dispatch(), from.into_dispatch());
    Ok(Tensor::from_dispatch(made))
}

/// Returns an error for other backends than CubeCL's: only these have memory at constant addresses.
fn cubecl_only(device: &Device) -> Result<(), Nvfp4Error> {
    match device.as_dispatch() {
        DispatchDevice::Cube(_) => Ok(()),
        other => Err(Nvfp4Error::Device {
            argument: "device",
            found: format!("{other:?}"),
            expected: "a CUDA GPU".into(),
        }),
    }
}

fn failed(what: &str, error: impl std::fmt::Debug) -> Nvfp4Error {
    Nvfp4Error::value(
        "device",
        format!("one that cannot {what}: {error:?}"),
        "a CUDA GPU",
    )
}
