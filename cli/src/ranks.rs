//! The processes of a run.

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use nvfp4::parallel::{Overlap, ProcessGroup};
use nvfp4_lm::groups::ParallelGroups;
use nvfp4_parallel::environment::{TOKEN, WORLD_SIZE};
use nvfp4_parallel::world::Settings;
use nvfp4_parallel::{Environment, World};

use crate::device::DeviceName;
use crate::work;

/// Environment variable that selects the transport of tensors between ranks.
const COLLECTIVES: &str = "NVFP4_COLLECTIVES";
/// Through host memory.
const HOST: &str = "host";
/// From GPU to GPU, by NCCL.
const NCCL: &str = "nccl";
/// NCCL; the exchange of expert tokens overlaps with kernels.
const TOKENS_OVERLAPPED: &str = "nccl-overlap-tokens";
/// NCCL; the exchanges of expert tokens and of gradients overlap with kernels.
const OVERLAPPED: &str = "nccl-overlap";

/// This process as a rank of its run.
pub(crate) struct Ranks {
    /// None if no launcher started several processes.
    world: Option<World>,
    group: ProcessGroup,
}

impl Ranks {
    /// Joins the run, calls `work`, and leaves the run. If `work` fails, the other ranks end too.
    ///
    /// # Errors
    /// Returns the error of `work`. Also returns an error if the launcher's variables are
    /// incomplete, or if another rank does not join or fails.
    pub(crate) fn run<T>(work: impl FnOnce(&Self) -> Result<T>) -> Result<T> {
        let ranks = Self::join()?;
        let result = work(&ranks);
        ranks.leave(result)
    }

    /// Joins the processes that a launcher has started, if any.
    ///
    /// # Errors
    /// Returns an error if the launcher's variables are incomplete, or if another rank does not
    /// join.
    fn join() -> Result<Self> {
        let world = match Environment::detect()? {
            Some(environment) => Some(World::join(environment, Settings::default())?),
            None => None,
        };
        let group = match &world {
            Some(world) => ProcessGroup::from(world.group().clone()),
            None => ProcessGroup::single(),
        };
        if group.rank() > 0 {
            work::hide();
        }
        Ok(Self { world, group })
    }

    /// Returns the group of all ranks.
    pub(crate) fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Returns true on the rank that writes and prints (rank 0).
    pub(crate) fn is_first(&self) -> bool {
        self.group.rank() == 0
    }

    /// Returns the device of this rank if each rank has one: `cuda:0` stands for the GPU whose
    /// index is the local rank.
    pub(crate) fn device(&self, name: DeviceName) -> DeviceName {
        match (&self.world, name) {
            (Some(world), DeviceName::Cuda(0)) => DeviceName::Cuda(world.environment().local_rank),
            _ => name,
        }
    }

    /// Connects `groups`. The variable [`COLLECTIVES`] selects the transport of tensors on `device`,
    /// whose name is `name`. The default is NCCL for GPUs and host memory for CPUs.
    ///
    /// # Errors
    /// Returns an error if the variable has an invalid value, or if NCCL is not available.
    pub(crate) fn connected(
        &self,
        groups: ParallelGroups,
        device: &Device,
        name: DeviceName,
    ) -> Result<ParallelGroups> {
        match self.travel(name)? {
            Travel::Host => Ok(groups),
            Travel::Nccl(overlap) => groups
                .connect(device, overlap)
                .with_context(|| format!("{COLLECTIVES}={HOST} does without NCCL")),
        }
    }

    /// Returns the transport for tensors on `device`.
    fn travel(&self, device: DeviceName) -> Result<Travel> {
        let is_gpu = matches!(device, DeviceName::Cuda(_));
        let default = if is_gpu { NCCL } else { HOST };
        let how = std::env::var(COLLECTIVES).unwrap_or_else(|_| default.into());
        match (&*how, self.group.size()) {
            (HOST | NCCL | TOKENS_OVERLAPPED | OVERLAPPED, 1) => Ok(Travel::Host),
            (HOST, _) => {
                if self.is_first() && is_gpu {
                    tracing::warn!(
                        "tensors travel between the ranks through the memory of the host, which is \
                         slow; {COLLECTIVES}={NCCL} sends them from GPU to GPU"
                    );
                }
                Ok(Travel::Host)
            }
            (NCCL, _) => Ok(Travel::Nccl(Overlap::None)),
            (TOKENS_OVERLAPPED, _) => Ok(Travel::Nccl(Overlap::Tokens)),
            (OVERLAPPED, _) => Ok(Travel::Nccl(Overlap::All)),
            (other, _) => bail!(
                "{COLLECTIVES} is {other:?}, but it must be {HOST}, {NCCL}, {TOKENS_OVERLAPPED} or \
                 {OVERLAPPED}"
            ),
        }
    }

    /// Sets the activity that the watchdog reports for this rank between collectives.
    pub(crate) fn label(&self, doing: &str) {
        self.group.collective().label(doing);
    }

    /// Leaves the run with a result. If it is an error, the other ranks end too.
    ///
    /// # Errors
    /// Returns the error of `result`, or an error if another rank has failed.
    fn leave<T>(self, result: Result<T>) -> Result<T> {
        match (self.world, result) {
            (Some(world), Ok(made)) => {
                world.leave()?;
                Ok(made)
            }
            (Some(world), Err(error)) => {
                world.fail(&format!("{error:#}"));
                Err(error)
            }
            (None, result) => result,
        }
    }
}

/// Transport of tensors between ranks.
enum Travel {
    Host,
    Nccl(Overlap),
}

/// Refuses a command that runs in one process if a launcher has started several.
///
/// # Errors
/// Returns an error that names the command.
pub(crate) fn refuse(command: &str) -> Result<()> {
    let several = std::env::var(WORLD_SIZE).is_ok_and(|ranks| ranks != "1");
    if several && std::env::var_os(TOKEN).is_some() {
        bail!("nvfp4 {command} runs in one process, but {WORLD_SIZE} says that there are several");
    }
    Ok(())
}

/// Returns the prefix of a command that runs in `ranks` processes.
pub(crate) fn launch(ranks: usize) -> String {
    match ranks {
        1 => String::new(),
        ranks => format!("launch --gpus {ranks} -- "),
    }
}
