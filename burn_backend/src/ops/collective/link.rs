//! Connections of a rank to the others of a group.

use std::fmt;
use std::sync::Arc;
#[cfg(feature = "cuda")]
use std::sync::{Mutex, MutexGuard, PoisonError};

#[cfg(feature = "cuda")]
use cubecl::{client::Client, server::Handle};
#[cfg(feature = "cuda")]
use nvfp4_kernels::foreign::{self, SidePoint, SideStream};
#[cfg(feature = "cuda")]
use nvfp4_parallel::nccl::Communicator;
use nvfp4_parallel::{Collective, HostGroup};

use super::waiting::Waiting;
#[cfg(feature = "cuda")]
use super::window::Window;

/// Bytes of unsharded gradients, in addition to the last one, that a backward holds while their
/// collectives have not run. A collective of this size reaches the bandwidth of the connection.
#[cfg(feature = "cuda")]
const HELD: usize = 64 << 20;

/// Exchanges of a group that run concurrently with kernels, on a second stream of the device, once
/// the group [is connected](crate::parallel::ProcessGroup::connect). NCCL then takes SMs from the
/// concurrent kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overlap {
    /// No overlap. Gradients that are averaged in the backward are exchanged between its kernels,
    /// whenever 64 MiB of them are ready.
    #[default]
    None,
    /// Exchanges of tokens, if [`ExpertParallelMoe`](crate::nn::ExpertParallelMoe) has kernels to
    /// overlap them with. Gradients are exchanged as with [`None`](Self::None).
    Tokens,
    /// Exchanges of tokens, and of each gradient that is averaged in the backward as soon as it is
    /// ready.
    All,
}

/// Overlap of a step with kernels, and its key for [joining](super::CollectiveOps::nvfp4_join).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fork {
    /// Exchange of a parameter's gradient: immediately, or later together with others, depending on
    /// the [overlap of the group](crate::parallel::ProcessGroup::connect). All of them are joined
    /// together.
    Gradient,
    /// Immediate exchange on the second stream, joined by this number.
    Own(u64),
}

/// Connections of a rank to the others of a group. Clones are the same connections.
#[derive(Clone)]
pub struct Link {
    /// Connection through host memory.
    pub host: Arc<HostGroup>,
    /// Gradients that a backward has left here.
    pub waiting: Waiting,
    /// Connection from device to device, if created by
    /// [`ProcessGroup::connect`](crate::parallel::ProcessGroup::connect).
    #[cfg(feature = "cuda")]
    pub(crate) device: Option<DeviceLink>,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.host.rank(), self.host.size())
    }
}

impl Link {
    /// Returns true if both are connections of this rank to the same group.
    pub(crate) fn is_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.host, &other.host)
    }

    /// Returns the exchanges that overlap with kernels.
    pub(crate) fn overlap(&self) -> Overlap {
        #[cfg(feature = "cuda")]
        return self
            .device
            .as_ref()
            .map_or(Overlap::None, |device| device.overlap);
        #[cfg(not(feature = "cuda"))]
        Overlap::None
    }

    /// Returns true if the devices are connected.
    pub(crate) fn is_connected(&self) -> bool {
        #[cfg(feature = "cuda")]
        return self.device.is_some();
        #[cfg(not(feature = "cuda"))]
        false
    }
}

impl From<Arc<HostGroup>> for Link {
    fn from(host: Arc<HostGroup>) -> Self {
        Self {
            host,
            waiting: Waiting::default(),
            #[cfg(feature = "cuda")]
            device: None,
        }
    }
}

/// Collective that is not queued yet.
#[cfg(feature = "cuda")]
pub(super) struct Deferred {
    pub(super) call: nvfp4_parallel::Call,
    /// Addresses of its input and output.
    pub(super) addresses: [u64; 2],
    /// Keeps the input from being overwritten. The output [waits](Waiting).
    pub(super) _input: Handle,
}

/// Collective on the second stream.
#[cfg(feature = "cuda")]
pub(super) struct Running {
    /// Point after the collective.
    pub(super) point: SidePoint,
    /// Key for joining it.
    pub(super) fork: Fork,
    /// Memory of the collective that nothing else is certain to keep: the input, as in
    /// [`Deferred`], and the output, unless it [waits](Waiting).
    pub(super) _memory: Vec<Handle>,
}

/// Handle of an NCCL communicator.
#[cfg(feature = "cuda")]
#[derive(Clone)]
pub(crate) struct DeviceLink {
    communicator: Arc<Mutex<Communicator>>,
    pub(super) overlap: Overlap,
    /// Stream of overlapped collectives.
    pub(super) side: Arc<SideStream>,
    /// Overlapped collectives that kernels do not wait for yet.
    running: Arc<Mutex<Window<Running>>>,
    /// Collectives of gradients that are not queued yet, if these do not overlap.
    deferred: Arc<Mutex<Window<Deferred>>>,
}

#[cfg(feature = "cuda")]
impl DeviceLink {
    pub(super) fn communicator(&self) -> MutexGuard<'_, Communicator> {
        (self.communicator.lock()).unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn deferred(&self) -> MutexGuard<'_, Window<Deferred>> {
        self.deferred.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn running(&self) -> MutexGuard<'_, Window<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates the communicator of `group` on the device of `client`, with the overlap of its
    /// collectives. All ranks call it.
    pub(crate) fn connect(
        client: &Client,
        group: &Arc<HostGroup>,
        overlap: Overlap,
    ) -> Result<Self, String> {
        let group = group.clone();
        // Runs on the device's thread, which has the device's context.
        let made = foreign::run(client, move || {
            let communicator = Communicator::new(&group).map_err(|error| error.to_string())?;
            Ok((communicator, SideStream::new()?))
        });
        let (communicator, side) = made?;
        Ok(Self {
            communicator: Arc::new(Mutex::new(communicator)),
            overlap,
            side: Arc::new(side),
            running: Arc::new(Mutex::new(Window::new(HELD))),
            deferred: Arc::new(Mutex::new(Window::new(HELD))),
        })
    }
}
