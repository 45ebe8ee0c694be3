//! The processes of a run: this one among them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use burn::tensor::Device;
use nvfp4::parallel::{Overlap, ProcessGroup};
use nvfp4_lm::config::RunConfig;
use nvfp4_lm::groups::ParallelGroups;
use nvfp4_lm::train::Observer;
use nvfp4_parallel::environment::{TOKEN, WORLD_SIZE};
use nvfp4_parallel::world::Settings;
use nvfp4_parallel::{Environment, World};

use crate::device::DeviceName;

/// Name of the variable that says how tensors travel between ranks.
const COLLECTIVES: &str = "NVFP4_COLLECTIVES";
/// Through the memory of the host.
const HOST: &str = "host";
/// From GPU to GPU.
const NCCL: &str = "nccl";
/// The same, tokens of experts on other ranks beside kernels.
const TOKENS_OVERLAPPED: &str = "nccl-overlap-tokens";
/// The same, gradients too, while the backward goes on.
const OVERLAPPED: &str = "nccl-overlap";

/// This process in its run.
pub(crate) struct Ranks {
    /// None where nothing has started several.
    world: Option<World>,
    group: ProcessGroup,
}

impl Ranks {
    /// What `work` makes of this process in its run, which it joins before and leaves behind: the
    /// others end with this rank if that is an error.
    ///
    /// # Errors
    /// Those of `work`, when the variables of a launcher are not whole, or when another rank does
    /// not come or fails.
    pub(crate) fn run<T>(work: impl FnOnce(&Self) -> Result<T>) -> Result<T> {
        let ranks = Self::join()?;
        let result = work(&ranks);
        ranks.leave(result)
    }

    /// Joins the processes that a launcher has started with this one, if one has.
    ///
    /// # Errors
    /// When the variables of a launcher are not whole, or another rank does not come.
    fn join() -> Result<Self> {
        let world = match Environment::detect()? {
            Some(environment) => Some(World::join(environment, Settings::default())?),
            None => None,
        };
        let group = match &world {
            Some(world) => ProcessGroup::from(world.group().clone()),
            None => ProcessGroup::single(),
        };
        Ok(Self { world, group })
    }

    /// All ranks.
    pub(crate) fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Whether this rank writes and prints.
    pub(crate) fn is_first(&self) -> bool {
        self.group.rank() == 0
    }

    /// The device of this rank where each has its own: the first GPU stands for the one with the
    /// number of the rank on its machine.
    pub(crate) fn device(&self, name: DeviceName) -> DeviceName {
        match (&self.world, name) {
            (Some(world), DeviceName::Cuda(0)) => DeviceName::Cuda(world.environment().local_rank),
            _ => name,
        }
    }

    /// The groups of the run `config`, whose tensors on `device`, which it names, travel as the
    /// variable [`COLLECTIVES`] says. Without it, those of GPUs go by NCCL, and those of CPUs
    /// through the memory of the host.
    ///
    /// # Errors
    /// When the variable has another value, NCCL is not to be had, or the configuration does not
    /// fit the number of ranks.
    pub(crate) fn connected(&self, device: &Device, config: &RunConfig) -> Result<ParallelGroups> {
        let groups = ParallelGroups::new(&self.group, config)?;
        match self.travel(&config.device)? {
            Travel::Host => Ok(groups),
            Travel::Nccl(overlap) => groups.connect(device, overlap).with_context(without),
        }
    }

    /// All ranks, whose tensors on `device`, called `name`, travel as [`connected`](Self::connected)
    /// says.
    ///
    /// # Errors
    /// When the variable has another value, or NCCL is not to be had.
    pub(crate) fn connected_world(&self, device: &Device, name: &str) -> Result<ProcessGroup> {
        let world = self.group.clone();
        match self.travel(name)? {
            Travel::Host => Ok(world),
            Travel::Nccl(overlap) => Ok(world.connect(device, overlap).with_context(without)?),
        }
    }

    /// How tensors on `device` travel.
    fn travel(&self, device: &str) -> Result<Travel> {
        let is_gpu = device.starts_with("cuda");
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

    /// What the watchdog says that this rank does between collectives.
    pub(crate) fn label(&self, doing: &str) {
        self.group.collective().label(doing);
    }

    /// Leaves the run with a result: the others end with this rank if it is an error.
    ///
    /// # Errors
    /// That one, or that another rank has failed.
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

/// How tensors travel between ranks.
enum Travel {
    Host,
    Nccl(Overlap),
}

/// What to do where NCCL fails.
fn without() -> String {
    format!("{COLLECTIVES}={HOST} does without NCCL")
}

/// Fails where a launcher has started several processes of a command that runs in one.
///
/// # Errors
/// Names the command.
pub(crate) fn refuse(command: &str) -> Result<()> {
    let several = std::env::var(WORLD_SIZE).is_ok_and(|ranks| ranks != "1");
    if several && std::env::var_os(TOKEN).is_some() {
        bail!("nvfp4 {command} runs in one process, but {WORLD_SIZE} says that there are several");
    }
    Ok(())
}

/// How a command begins that runs in `ranks` processes.
pub(crate) fn launch(ranks: usize) -> String {
    match ranks {
        1 => String::new(),
        ranks => format!("launch --gpus {ranks} -- "),
    }
}

/// Passes on that the user wants to stop, and shows nothing.
pub(crate) struct Quiet(pub(crate) Arc<AtomicBool>);

impl Observer for Quiet {
    fn interrupted(&mut self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
