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
    /// Whether both are connections of this rank to the others of one group.
    pub(crate) fn is_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.host, &other.host)
    }

    /// Whether there are connections from device to device.
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
    /// As that of [`Deferred`].
    pub(super) _input: Handle,
}

/// A rank's end of an NCCL communicator.
#[cfg(feature = "cuda")]
#[derive(Clone)]
pub(crate) struct DeviceLink {
    communicator: Arc<Mutex<Communicator>>,
    /// Whether collectives of gradients run beside the kernels of the backward.
    pub(super) overlaps: bool,
    /// Where they do.
    pub(super) side: Arc<SideStream>,
    /// Those that run there, and that kernels do not wait for yet.
    running: Arc<Mutex<Window<Running>>>,
    /// Where they do not run beside: those that are not queued yet.
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

    /// The communicator of `group` on the device of `client`; whether its collectives of gradients
    /// run beside kernels. All ranks call it.
    pub(crate) fn connect(
        client: &Client,
        group: &Arc<HostGroup>,
        overlaps: bool,
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
            overlaps,
            side: Arc::new(side),
            running: Arc::new(Mutex::new(Window::new(HELD))),
            deferred: Arc::new(Mutex::new(Window::new(HELD))),
        })
    }
}
