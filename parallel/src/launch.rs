//! Starts the processes of a run on this machine, and ends all of them if one fails.
//!
//! Each process gets torchrun's variables and a token drawn for the run (see
//! [`environment`](crate::environment)). Each is the leader of a process group, so that its child
//! processes end with it. On Linux the processes end if the launcher is killed.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read};
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::environment::WORLD_SIZE;
use crate::environment::{LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, RANK, TOKEN};
use crate::error::{ParallelError, Result};
use crate::token::Token;

/// Number of output lines kept for a rank whose output is not shown.
const TAIL: usize = 20;
/// Interval between checks of the processes.
const TICK: Duration = Duration::from_millis(20);

/// Ranks whose output is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Show {
    /// Unmodified output of rank 0, and the last lines of a rank that fails.
    First,
    /// Output of all ranks, each line prefixed by the rank.
    All,
}

/// Processes to start.
#[derive(Debug, Clone)]
pub struct Launch {
    /// Number of processes.
    pub processes: usize,
    /// Program and arguments, the same for all.
    pub command: Vec<OsString>,
    /// Ranks whose output is shown.
    pub show: Show,
    /// Once a rank has failed, time for the others to end by themselves, and again after SIGTERM.
    pub grace: Duration,
}

/// Result of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// Exit code to pass on: that of the first rank that failed, 128 plus the number of the signal
    /// that killed it, or 0.
    pub code: u8,
    /// Description of the failure, if any.
    pub problem: Option<String>,
}

/// Process of a rank.
struct Rank {
    child: Child,
    status: Option<ExitStatus>,
    /// Threads that read its output.
    readers: Vec<JoinHandle<()>>,
    tail: Arc<Mutex<VecDeque<String>>>,
}

impl Launch {
    /// Starts the processes and waits for all of them. Passes SIGINT, SIGTERM and SIGHUP on to
    /// them.
    ///
    /// # Errors
    /// Returns an error if there is no command, the number of processes is zero, or one cannot be
    /// started; those already started are ended.
    pub fn run(&self) -> Result<Ended> {
        if self.processes == 0 {
            return Err(ParallelError::argument("processes", 0, "at least 1"));
        }
        let Some((program, arguments)) = self.command.split_first() else {
            return Err(ParallelError::argument(
                "command",
                "empty",
                "a program with arguments",
            ));
        };
        let signals = Signals::watch()?;
        let port = free_port()?;
        let token = Token::random()?;
        let mut ranks: Vec<Rank> = Vec::with_capacity(self.processes);
        for rank in 0..self.processes {
            let mut command = Command::new(program);
            command
                .args(arguments)
                .env(RANK, rank.to_string())
                .env(LOCAL_RANK, rank.to_string())
                .env(WORLD_SIZE, self.processes.to_string())
                .env(LOCAL_WORLD_SIZE, self.processes.to_string())
                .env(MASTER_ADDR, Ipv4Addr::LOCALHOST.to_string())
                .env(MASTER_PORT, port.to_string())
                .env(TOKEN, &token)
                .env_remove("TORCHELASTIC_USE_AGENT_STORE");
            match self.start(&mut command, rank) {
                Ok(started) => ranks.push(started),
                Err(error) => {
                    ranks.iter_mut().for_each(|rank| rank.signal(Signal::Kill));
                    ranks.iter_mut().for_each(|rank| drop(rank.child.wait()));
                    let program = program.to_string_lossy();
                    let reason = format!("{program} cannot be started as rank {rank}: {error}");
                    return Err(ParallelError::Launch(reason));
                }
            }
        }
        let ended = self.wait(&mut ranks, &signals);
        // After all processes have ended, so that their output is shown before the reason of the
        // failure.
        for reader in ranks.into_iter().flat_map(|rank| rank.readers) {
            let _ = reader.join();
        }
        Ok(ended)
    }

    fn start(&self, command: &mut Command, rank: usize) -> std::io::Result<Rank> {
        let inherited = self.show == Show::First && rank == 0;
        let stdio = || {
            if inherited {
                Stdio::inherit()
            } else {
                Stdio::piped()
            }
        };
        command.stdin(Stdio::null()).stdout(stdio()).stderr(stdio());
        isolate(command);
        let mut child = command.spawn()?;
        let tail = Arc::default();
        let reader = |stream: Box<dyn Read + Send>, error: bool| {
            let (tail, show) = (Arc::clone(&tail), self.show);
            thread::spawn(move || read(stream, rank, show, error, &tail))
        };
        let mut readers = Vec::new();
        if let Some(stream) = child.stdout.take() {
            readers.push(reader(Box::new(stream), false));
        }
        if let Some(stream) = child.stderr.take() {
            readers.push(reader(Box::new(stream), true));
        }
        Ok(Rank {
            child,
            status: None,
            readers,
            tail,
        })
    }

    /// Waits until all processes have ended.
    fn wait(&self, ranks: &mut [Rank], signals: &Signals) -> Ended {
        // First rank that failed, with its status.
        let mut failed: Option<(usize, ExitStatus, Instant)> = None;
        let mut asked = false;
        let mut interrupted = false;
        loop {
            for signal in signals.take() {
                interrupted = true;
                ranks.iter_mut().for_each(|rank| rank.signal(signal));
            }
            let mut ended = Vec::new();
            for (number, rank) in ranks.iter_mut().enumerate() {
                if rank.status.is_none()
                    && let Ok(Some(status)) = rank.child.try_wait()
                {
                    rank.status = Some(status);
                    // Ends child processes that it left running.
                    rank.signal_group(Signal::Kill);
                    if !status.success() {
                        ended.push((number, status));
                    }
                }
            }
            // Among those that failed within a tick, a killed process was first: others end by
            // themselves after it is gone.
            let first = (ended.into_iter()).min_by_key(|(_, status)| status.code().is_some());
            failed = failed.or(first.map(|(number, status)| (number, status, Instant::now())));
            if ranks.iter().all(|rank| rank.status.is_some()) {
                break;
            }
            if let Some((_, _, since)) = failed {
                let over = since.elapsed();
                if over > 2 * self.grace {
                    ranks.iter_mut().for_each(|rank| rank.signal(Signal::Kill));
                } else if over > self.grace && !asked {
                    asked = true;
                    ranks
                        .iter_mut()
                        .for_each(|rank| rank.signal(Signal::Terminate));
                }
            }
            thread::sleep(TICK);
        }
        match failed {
            None => Ended {
                code: 0,
                problem: None,
            },
            // The process that was told to stop did.
            Some((_, status, _)) if interrupted => Ended {
                code: code(status),
                problem: None,
            },
            Some((number, status, _)) => Ended {
                code: code(status),
                problem: Some(self.problem(ranks, number, status)),
            },
        }
    }

    fn problem(&self, ranks: &[Rank], number: usize, status: ExitStatus) -> String {
        let mut text = format!("rank {number} failed ({status})");
        if ranks.len() > 1 {
            text += &format!("; the run of {} ranks was ended", ranks.len());
        }
        let tail = ranks[number].tail.lock();
        let tail = tail.unwrap_or_else(|held| held.into_inner());
        if self.show == Show::First && !tail.is_empty() {
            text += "; its last lines:";
            for line in tail.iter() {
                text += &format!("\n[rank {number}] {line}");
            }
        }
        text
    }
}

impl Rank {
    /// Sends a signal to the process and its children, if it has not ended.
    fn signal(&mut self, signal: Signal) {
        if self.status.is_none() {
            self.signal_group(signal);
        }
    }

    #[cfg(unix)]
    fn signal_group(&mut self, signal: Signal) {
        let number = match signal {
            Signal::Interrupt => libc::SIGINT,
            Signal::Terminate => libc::SIGTERM,
            Signal::HangUp => libc::SIGHUP,
            Signal::Kill => libc::SIGKILL,
        };
        // SAFETY: no memory is passed. The group is that of a child that was made with it; a group
        // whose processes are all gone has no members to receive it.
        unsafe { libc::killpg(self.child.id() as libc::pid_t, number) };
    }

    #[cfg(not(unix))]
    fn signal_group(&mut self, _signal: Signal) {
        // No other way to end a process on this platform.
        let _ = self.child.kill();
    }
}

/// Shows the lines of a stream, or keeps the last ones.
fn read(
    stream: Box<dyn Read + Send>,
    rank: usize,
    show: Show,
    error: bool,
    tail: &Mutex<VecDeque<String>>,
) {
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    // Cuts overlong lines: nothing else bounds their length.
    while let Ok(1..) = (&mut reader).take(1 << 16).read_until(b'\n', &mut line) {
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_end_matches(['\n', '\r']);
        match (show, error) {
            (Show::All, true) => eprintln!("[rank {rank}] {text}"),
            (Show::All, false) => println!("[rank {rank}] {text}"),
            (Show::First, _) => {
                let mut tail = tail.lock().unwrap_or_else(|held| held.into_inner());
                if tail.len() == TAIL {
                    tail.pop_front();
                }
                tail.push_back(text.to_owned());
            }
        }
        line.clear();
    }
}

/// Signal from the launcher to the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Signal {
    #[cfg_attr(not(unix), allow(dead_code))]
    Interrupt,
    Terminate,
    #[cfg_attr(not(unix), allow(dead_code))]
    HangUp,
    Kill,
}

/// Returns the exit code of a status, as in shells.
fn code(status: ExitStatus) -> u8 {
    #[cfg(unix)]
    {
        use std::os::unix::process::ExitStatusExt;
        if let Some(signal) = status.signal() {
            return 128 + signal as u8;
        }
    }
    status
        .code()
        .and_then(|code| u8::try_from(code).ok())
        .unwrap_or(1)
}

/// Returns a port of this machine that is free now. If another process takes it before rank 0 does,
/// rank 0 fails with an error.
fn free_port() -> Result<u16> {
    let address = (Ipv4Addr::LOCALHOST, 0);
    let found = TcpListener::bind(address).and_then(|listener| listener.local_addr());
    let found = found.map_err(|error| {
        ParallelError::connection(Ipv4Addr::LOCALHOST, "looking for a free port", error)
    })?;
    Ok(found.port())
}

/// Creates a separate process group that ends with the launcher.
#[cfg(unix)]
fn isolate(command: &mut Command) {
    use std::os::unix::process::CommandExt;
    command.process_group(0);
    #[cfg(target_os = "linux")]
    // SAFETY: `prctl` is a system call that allocates nothing and takes no lock, and so may be made
    // between fork and exec.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM);
            Ok(())
        });
    }
}

#[cfg(not(unix))]
fn isolate(_command: &mut Command) {}

/// Signals received by the launcher.
struct Signals {
    #[cfg(unix)]
    received: [(Arc<std::sync::atomic::AtomicUsize>, Signal); 3],
    #[cfg(unix)]
    ids: Vec<signal_hook_registry::SigId>,
}

#[cfg(unix)]
impl Signals {
    fn watch() -> Result<Self> {
        use std::sync::atomic::{AtomicUsize, Ordering};
        let received = [Signal::Interrupt, Signal::Terminate, Signal::HangUp]
            .map(|signal| (Arc::new(AtomicUsize::new(0)), signal));
        let mut ids = Vec::new();
        let numbers = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];
        for ((count, _), number) in received.iter().zip(numbers) {
            let count = count.clone();
            let action = move || {
                count.fetch_add(1, Ordering::Relaxed);
            };
            // SAFETY: the handler does nothing but add to an atomic number.
            let id = unsafe { signal_hook_registry::register(number, action) };
            ids.push(id.map_err(|error| {
                ParallelError::Launch(format!("signal {number} cannot be watched: {error}"))
            })?);
        }
        Ok(Self { received, ids })
    }

    /// Returns the signals since the last call.
    fn take(&self) -> Vec<Signal> {
        use std::sync::atomic::Ordering;
        let taken = self.received.iter().flat_map(|(count, signal)| {
            let count = count.swap(0, Ordering::Relaxed);
            std::iter::repeat_n(*signal, count)
        });
        taken.collect()
    }
}

#[cfg(unix)]
impl Drop for Signals {
    fn drop(&mut self) {
        for id in self.ids.drain(..) {
            signal_hook_registry::unregister(id);
        }
    }
}

#[cfg(not(unix))]
impl Signals {
    fn watch() -> Result<Self> {
        Ok(Self {})
    }

    fn take(&self) -> Vec<Signal> {
        Vec::new()
    }
}
