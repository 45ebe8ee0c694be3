//! A run on these ranks: what `train`, `finetune` and `pretrain` share, from the device to the exit
//! code.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, ensure};
use burn::tensor::Device;
use nvfp4::parallel::ProcessGroup;
use nvfp4_lm::checkpoint::read_json;
use nvfp4_lm::groups::ParallelGroups;
use nvfp4_lm::memory::{MemoryUsed, shown};
use nvfp4_lm::ranks::{agree, on_first};
use nvfp4_lm::train::{Observer, Outcome, Task, Trainer};
use serde::de::DeserializeOwned;

use crate::device::DeviceName;
use crate::options::shared::SessionOptions;
use crate::progress::{INTERRUPTED, Progress, phases, watch_interrupts};
use crate::ranks::{Ranks, launch};
use crate::shell::{program, quoted};
use crate::terminal::note;

/// A run of a command on these ranks.
pub(crate) struct Session<'a> {
    pub(crate) ranks: &'a Ranks,
    pub(crate) device: Device,
    name: DeviceName,
    /// Process groups of the ranks, connected by their transport.
    pub(crate) groups: ParallelGroups,
    /// The command that resumes this run.
    command: &'static str,
    /// Folder of the run.
    pub(crate) folder: PathBuf,
    options: SessionOptions,
    interrupt: Arc<AtomicBool>,
}

impl<'a> Session<'a> {
    /// Opens the device `name` for the run of `command` in `folder`, and connects the groups that
    /// `groups` makes of the group of all ranks. All ranks call this function.
    ///
    /// # Errors
    /// Returns an error if the device does not exist, if the configuration does not fit the number
    /// of ranks, or if the ranks cannot be connected.
    pub(crate) fn open(
        ranks: &'a Ranks,
        name: DeviceName,
        groups: impl FnOnce(&ProcessGroup) -> Result<ParallelGroups>,
        command: &'static str,
        folder: &Path,
        options: &SessionOptions,
    ) -> Result<Self> {
        let group = ranks.group();
        let device = agree(group, name.open())?;
        let connected = groups(group).and_then(|groups| ranks.connected(groups, &device, name));
        Ok(Self {
            groups: agree(group, connected)?,
            ranks,
            device,
            name,
            command,
            folder: folder.into(),
            options: options.clone(),
            interrupt: Arc::default(),
        })
    }

    /// Reads the data of the run on all ranks, while the watchdog reports that they are `doing` it.
    /// From then on, Ctrl-C stops the run after a step.
    ///
    /// # Errors
    /// Returns the error of `read`, on all ranks.
    pub(crate) fn read<D>(&self, doing: &str, read: impl FnOnce() -> Result<D>) -> Result<D> {
        self.ranks.label(doing);
        let data = agree(self.ranks.group(), read())?;
        watch_interrupts(&self.interrupt)?;
        Ok(data)
    }

    /// Starts the run of `task` in `folder`, or resumes it.
    ///
    /// # Errors
    /// Returns the errors of [`Trainer::open_rank`].
    pub(crate) fn start<T: Task>(&self, task: T, folder: &Path) -> Result<Trainer<T>> {
        self.ranks.label("loading the model");
        let trainer = Trainer::open_rank(task, &self.device, folder, self.groups.clone());
        self.ranks.label("training");
        trainer
    }

    /// Trains to the last step, to the step at which the session stops, or until Ctrl-C. Rank 0
    /// shows the progress. Returns true if all steps of this session are done. All ranks call this
    /// function.
    ///
    /// # Errors
    /// Returns an error on all ranks if the folder of `--tensorboard` cannot be written, and the
    /// errors of [`Trainer::train`].
    pub(crate) fn train<T: Task>(&self, trainer: &mut Trainer<T>) -> Result<bool> {
        on_first(self.ranks.group(), || {
            let Some(events) = &self.options.tensorboard else {
                return Ok(());
            };
            let own = trainer.folder().strip_prefix(&self.folder);
            let events = events.join(own.unwrap_or(Path::new("")));
            trainer.log_events(&events)
        })?;
        let interrupt = self.interrupt.clone();
        let outcome = match self.ranks.is_first() {
            true => {
                let settings = trainer.settings();
                if let Some(reason) = settings.uncaptured.filter(|reason| reason.is_notable()) {
                    note!("steps are not captured as a CUDA graph: {reason}");
                }
                let steps = (trainer.step(), settings.schedule.steps);
                for line in phases(&settings.recipes, steps) {
                    note!("{line}");
                }
                let mut progress = Progress::new(
                    settings,
                    trainer.step(),
                    interrupt,
                    &self.device,
                    matches!(self.name, DeviceName::Cuda(_)),
                );
                let outcome = trainer.train(self.options.stop_at, &mut progress);
                progress.finish();
                outcome?
            }
            false => trainer.train(self.options.stop_at, &mut Quiet(interrupt))?,
        };
        // Any rank may have been interrupted.
        let is_early = self
            .options
            .stop_at
            .is_none_or(|stop| trainer.step() < stop);
        let is_stopped = outcome == Outcome::Stopped && is_early;
        if is_stopped {
            self.interrupt.store(true, Ordering::Relaxed);
        }
        Ok(!is_stopped)
    }

    /// Describes the measurements of `trainer`: the communication of several ranks, and the device
    /// memory.
    pub(crate) fn measured<T: Task>(&self, trainer: &Trainer<T>) -> [Option<String>; 2] {
        let settings = trainer.settings();
        let (recipe, ranks) = (&settings.recipe, self.ranks.group().size());
        let communication = trainer.communication();
        let steps = match (settings.uncaptured.is_none(), communication.steps) {
            (true, _) => "the last step before the graph".into(),
            (false, 1) => "1 step".into(),
            (false, steps) => format!("{steps} steps"),
        };
        let hidden = match communication.percent() {
            Some(percent) => {
                format!("{percent:.1} % of the time of a step ({recipe}, measured in {steps})")
            }
            None => format!("not measured ({recipe})"),
        };
        let whose = if ranks > 1 {
            ", on the rank with most"
        } else {
            ""
        };
        let memory = trainer.memory().map(|MemoryUsed { tensors, pools }| {
            format!(
                "device memory: {} in tensors at the peak of a step, {} in pools at the \
                 end{whose} ({recipe})",
                shown(tensors),
                shown(pools),
            )
        });
        let communication = format!("communication that compute did not hide: {hidden}");
        [(ranks > 1).then_some(communication), memory]
    }

    /// Prints how to resume the stopped run, and returns the exit code of the command.
    pub(crate) fn stopped(&self) -> ExitCode {
        if self.ranks.is_first() {
            println!(
                "stopped; to resume: {} {}{} --resume {}{}",
                program(),
                launch(self.ranks.group().size()),
                self.command,
                quoted(&self.folder.to_string_lossy()),
                match &self.options.tensorboard {
                    Some(events) => format!(" --tensorboard {}", quoted(&events.to_string_lossy())),
                    None => String::new(),
                }
            );
        }
        let interrupted = self.interrupt.load(Ordering::Relaxed);
        ExitCode::from(if interrupted { INTERRUPTED } else { 0 })
    }
}

/// Observer that reports the user's interrupt and shows nothing.
struct Quiet(Arc<AtomicBool>);

impl Observer for Quiet {
    fn interrupted(&mut self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Checks that `out` has no run, whose configuration is in `file`.
///
/// # Errors
/// Returns an error that names `out` if it has one.
pub(crate) fn check_new(out: &Path, file: &str) -> Result<()> {
    ensure!(
        !out.join(file).exists(),
        "out {} already holds a run: resume it by --resume {0}, or choose another folder",
        out.display()
    );
    Ok(())
}

/// Reads the configuration of the run in `folder` from `file`; also returns its path.
///
/// # Errors
/// Returns an error if the folder has none, or if the file is malformed.
pub(crate) fn read_config<C: DeserializeOwned>(folder: &Path, file: &str) -> Result<(PathBuf, C)> {
    let path = folder.join(file);
    ensure!(
        path.exists(),
        "resume {} is not the folder of a run: it has no {file}",
        folder.display()
    );
    let config = read_json(&path)?;
    Ok((path, config))
}

/// Makes paths absolute, so that the run can be resumed from another working directory.
///
/// # Errors
/// Returns an error that names the path if the working directory is unknown.
pub(crate) fn absolute(paths: &mut [PathBuf]) -> Result<()> {
    for path in paths {
        *path = std::path::absolute(&path).with_context(|| format!("data {}", path.display()))?;
    }
    Ok(())
}
