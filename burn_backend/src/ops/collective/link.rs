//! The connections of a rank to the others of a group.

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

/// Bytes of whole gradients that a backward holds beside the last one while their collectives have
/// not run. A collective of so many is as fast as the connection.
#[cfg(feature = "cuda")]
const HELD: usize = 64 << 20;

/// What the ranks of a group exchange beside kernels, on a second stream of the device, once they
/// [are connected](crate::parallel::ProcessGroup::connect). There NCCL takes SMs from the kernels
/// beside it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overlap {
    /// Nothing. Gradients that are averaged in the backward travel between its kernels, as soon as
    /// there are 64 MiB of them.
    #[default]
    None,
    /// Tokens, as far as [`ExpertParallelMoe`](crate::nn::ExpertParallelMoe) has kernels for them
    /// to run beside. Gradients travel as with [`None`](Self::None).
    Tokens,
    /// Tokens too, and each gradient that is averaged in the backward as soon as it is there.
    All,
}

/// How a step runs beside kernels, and what it is to those who
/// [join](super::CollectiveOps::nvfp4_join) it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fork {
    /// As one of a parameter's gradient: as the group was
    /// [connected](crate::parallel::ProcessGroup::connect) for these, at once, or later with
    /// others. All of them are joined together.
    Gradient,
    /// At once, on the second stream. It is joined by this number.
    Own(u64),
}

/// A rank's connections to the others of a group. Clones are the same connections.
#[derive(Clone)]
pub struct Link {
    /// Through the memory of the host.
    pub host: Arc<HostGroup>,
    /// Gradients that a backward has left here.
    pub waiting: Waiting,
    /// From device to device, where
    /// [`ProcessGroup::connect`](crate::parallel::ProcessGroup::connect) made one.
    #[cfg(feature = "cuda")]
    pub(crate) device: Option<DeviceLink>,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {}", self.host.rank(), self.host.size())
    }
}

impl Link {
    /// Returns true if both are connections of this rank to the others of one group.
    pub(crate) fn is_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.host, &other.host)
    }

    /// What is exchanged beside kernels.
    pub(crate) fn overlap(&self) -> Overlap {
        #[cfg(feature = "cuda")]
        return self
            .device
            .as_ref()
            .map_or(Overlap::None, |device| device.overlap);
        #[cfg(not(feature = "cuda"))]
        Overlap::None
    }

    /// Returns true if there are connections from device to device.
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

/// A collective that is not queued yet.
#[cfg(feature = "cuda")]
pub(super) struct Deferred {
    pub(super) call: nvfp4_parallel::Call,
    /// Of its input and output.
    pub(super) addresses: [u64; 2],
    /// While it is here, nobody writes to the input. The output [waits](Waiting).
    pub(super) _input: Handle,
}

/// A collective on the second stream.
#[cfg(feature = "cuda")]
pub(super) struct Running {
    /// Behind it.
    pub(super) point: SidePoint,
    /// What it is to those who join it.
    pub(super) fork: Fork,
    /// Its memory, as far as nobody else is certain to keep it: the input, as that of [`Deferred`],
    /// and the output, unless it [waits](Waiting).
    pub(super) _memory: Vec<Handle>,
}

/// A rank's end of an NCCL communicator.
#[cfg(feature = "cuda")]
#[derive(Clone)]
pub(crate) struct DeviceLink {
    communicator: Arc<Mutex<Communicator>>,
    pub(super) overlap: Overlap,
    /// Where collectives run beside kernels.
    pub(super) side: Arc<SideStream>,
    /// Those that run there, and that kernels do not wait for yet.
    running: Arc<Mutex<Window<Running>>>,
    /// Where those of gradients do not run beside kernels: those that are not queued yet.
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

    /// The communicator of `group` on the device of `client`; which of its collectives run beside
    /// kernels. All ranks call it.
    pub(crate) fn connect(
        client: &Client,
        group: &Arc<HostGroup>,
        overlap: Overlap,
    ) -> Result<Self, String> {
        let group = group.clone();
        // On the device's own thread, whose context is the device's.
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
