//! Watches a launch from outside: waits for its end, lists its ranks, and kills one of them.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// Environment variable with the number of a rank.
const RANK: &str = "RANK";
/// Polling interval for processes.
const TICK: Duration = Duration::from_millis(2);

/// End of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// The launch exited.
    Exited(ExitStatus),
    /// The launch exceeded its limit; all of its processes were killed.
    Hung,
}

/// A running `nvfp4 launch`, whose output goes to a file.
pub(super) struct Launched {
    launcher: Child,
    log: PathBuf,
}

impl Launched {
    /// Starts `command` of `program` on `ranks` ranks.
    ///
    /// # Errors
    /// Returns an error if the program cannot be started or `log` cannot be written.
    pub(super) fn start(
        program: &Path,
        ranks: usize,
        command: &[OsString],
        log: &Path,
    ) -> Result<Self> {
        let output =
            File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
        let launcher = Command::new(program)
            .args(["launch", "--gpus", &ranks.to_string(), "--"])
            .args(command)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .with_context(|| format!("{} cannot be started", program.display()))?;
        let log = log.into();
        Ok(Self { launcher, log })
    }

    /// Returns the exit status, if the launch has ended.
    pub(super) fn status(&mut self) -> Result<Option<ExitStatus>> {
        self.launcher.try_wait().context("waiting for a launch")
    }

    /// Waits until `deadline` for the launcher, which waits for its ranks.
    ///
    /// # Errors
    /// Returns an error if the system cannot report the status.
    pub(super) fn wait(&mut self, deadline: Instant) -> Result<End> {
        loop {
            if let Some(status) = self.status()? {
                return Ok(End::Exited(status));
            }
            if Instant::now() >= deadline {
                self.kill_all();
                return Ok(End::Hung);
            }
            thread::sleep(TICK);
        }
    }

    /// Returns the process ID of rank `rank`; none if it has ended.
    ///
    /// # Errors
    /// Returns an error if this system cannot list processes.
    pub(super) fn rank(&self, rank: usize) -> Result<Option<u32>> {
        let found = self
            .ranks()?
            .into_iter()
            .find(|(number, _)| *number == rank);
        Ok(found.map(|(_, pid)| pid))
    }

    /// Returns the ranks and their process IDs.
    fn ranks(&self) -> Result<Vec<(usize, u32)>> {
        let pid = self.launcher.id();
        let Ok(children) = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")) else {
            if !Path::new("/proc/self").exists() {
                bail!("kills is given, but this system has no /proc, which lists the ranks");
            }
            // The launcher has ended.
            return Ok(Vec::new());
        };
        let ranks = children.split_whitespace().filter_map(|child| {
            let environment = fs::read(format!("/proc/{child}/environ")).ok()?;
            let prefix = format!("{RANK}=");
            let mut variables = environment.split(|byte| *byte == 0);
            let own = variables.find_map(|text| text.strip_prefix(prefix.as_bytes()))?;
            let rank = std::str::from_utf8(own).ok()?.parse().ok()?;
            Some((rank, child.parse().ok()?))
        });
        Ok(ranks.collect())
    }

    /// Kills every process of the launch. Each rank leads a separate process group.
    fn kill_all(&mut self) {
        let ranks = self.ranks().unwrap_or_default();
        ranks.into_iter().for_each(|(_, pid)| kill(pid));
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
    }

    /// Returns the errors written so far: those of rank 0, and that of the launcher, which names
    /// the first failure.
    pub(super) fn errors(&self) -> String {
        let bytes = fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&bytes);
        let lines = text.lines().filter_map(|line| line.strip_prefix("error: "));
        lines.collect::<Vec<_>>().join("; ")
    }
}

/// Ends the launch if nobody waits for it.
impl Drop for Launched {
    fn drop(&mut self) {
        if let Ok(None) = self.launcher.try_wait() {
            self.kill_all();
        }
    }
}

/// Kills a rank and its children by SIGKILL: a rank leads a process group with its number. Does
/// nothing if they have ended.
pub(super) fn kill(pid: u32) {
    let mut shell = Command::new("sh");
    let _ = shell.args(["-c", &format!("kill -KILL -{pid}")]).output();
}
