//! The connections of a rank to the others of a group.

use std::sync::Arc;

use burn_core::tensor::DType;
use nvfp4_parallel::HostGroup;

#[cfg(feature = "cuda")]
use super::DeviceLink;
use super::Exchange;

/// A rank's connections to the others of a group. Clones are the same connections.
#[derive(Clone)]
pub struct Link {
    /// Through the memory of the host.
    pub host: Arc<HostGroup>,
    /// From device to device, where [`ProcessGroup::connect`](crate::parallel::ProcessGroup::connect)
    /// made one.
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

impl Exchange {
    /// Whether a tensor of type `dtype` is exchanged on the device.
    pub(super) fn is_queued(&self, dtype: DType) -> bool {
        #[cfg(feature = "cuda")]
        return self.group.device.is_some() && !self.is_local() && self.forward.is_queued(dtype);
        #[cfg(not(feature = "cuda"))]
        {
            let _ = dtype;
            false
        }
    }
}
