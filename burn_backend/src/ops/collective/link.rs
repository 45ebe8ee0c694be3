//! The connections of a rank to the others of a group.

use std::sync::Arc;
#[cfg(feature = "cuda")]
use std::sync::Mutex;

#[cfg(feature = "cuda")]
use cubecl::client::Client;
#[cfg(feature = "cuda")]
use nvfp4_kernels::foreign;
use nvfp4_parallel::HostGroup;
#[cfg(feature = "cuda")]
use nvfp4_parallel::nccl::Communicator;

/// A rank's connections to the others of a group. Clones are the same connections.
#[derive(Clone)]
pub struct Link {
    /// Through the memory of the host.
    pub host: Arc<HostGroup>,
    /// From device to device, where
    /// [`ProcessGroup::connect`](crate::parallel::ProcessGroup::connect) made one.
    #[cfg(feature = "cuda")]
    pub(crate) device: Option<DeviceLink>,
}

impl From<Arc<HostGroup>> for Link {
    fn from(host: Arc<HostGroup>) -> Self {
        Self {
            host,
            #[cfg(feature = "cuda")]
            device: None,
        }
    }
}

/// A rank's end of an NCCL communicator.
#[cfg(feature = "cuda")]
#[derive(Clone)]
pub(crate) struct DeviceLink {
    pub(super) communicator: Arc<Mutex<Communicator>>,
}

#[cfg(feature = "cuda")]
impl DeviceLink {
    /// The communicator of `group` on the device of `client`. All ranks call it.
    pub(crate) fn connect(client: &Client, group: &Arc<HostGroup>) -> Result<Self, String> {
        let group = group.clone();
        // On the device's own thread, whose context is the device's.
        let made = foreign::run(client, move || {
            Communicator::new(&group).map_err(|error| error.to_string())
        });
        Ok(Self {
            communicator: Arc::new(Mutex::new(made?)),
        })
    }
}
