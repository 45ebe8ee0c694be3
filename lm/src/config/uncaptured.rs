//! Reasons for launching the kernels of a step one by one, instead of as a CUDA graph.

use std::fmt::{self, Display, Formatter};

/// Reason for launching the kernels of a training step one by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Uncaptured {
    /// The device has no graphs.
    NoGpu,
    /// `no_graph` is true.
    NoGraph,
    /// Muon takes its learning rate as an argument of its kernels.
    Muon,
    /// ZeRO-1 gathers the weights into new memory in each step.
    Zero1,
    /// The host counts the tokens that it sends to each expert.
    AllToAll,
    /// Collectives move tensors through the memory of the host.
    HostCollectives,
    /// The rotary positions depend on the length of a text.
    Positions,
}

impl Uncaptured {
    /// Returns the reason that the device `device` or the option `no_graph` is, if there is one.
    pub(crate) fn of_device(device: &str, no_graph: bool) -> Option<Self> {
        match (device.starts_with("cuda:"), no_graph) {
            (false, _) => Some(Self::NoGpu),
            (true, true) => Some(Self::NoGraph),
            (true, false) => None,
        }
    }

    /// Returns true if the run could be faster: it is on a GPU, and the user did not choose this.
    pub fn is_notable(self) -> bool {
        !matches!(self, Self::NoGpu | Self::NoGraph)
    }
}

impl Display for Uncaptured {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoGpu => "only GPUs (cuda:N) have graphs",
            Self::NoGraph => "--no-graph is given",
            Self::Muon => {
                "the learning rate of the optimizer muon is an argument of its kernels; adamw can be \
                 captured"
            }
            Self::Zero1 => {
                "ZeRO-1 gathers the weights into new memory in each step; --fsdp can be captured"
            }
            Self::AllToAll => {
                "the host counts the tokens of each expert in each step of --ep-dispatch \
                 all-to-all; all-gather can be captured"
            }
            Self::HostCollectives => {
                "tensors move between the ranks through the memory of the host; NCCL can be captured"
            }
            Self::Positions => "the rotary positions of the model depend on the length of a text",
        })
    }
}
